"""Explanations: a round is recorded as it was decoded, and the recording changes no token and no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from costs import table
from explanations import CONFIGS, GREEDY, PROMPT, WARM, V, decode, explained
from fakes import FakeEngine, mixture, random_model
from numpy.typing import NDArray

from draftwood.runtime import LLM
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.round import (
    DEPTH_LIMIT,
    END_OF_ROOM,
    NO_SPECULATION,
    NOT_WORTH_IT,
    NOTHING_LEFT,
    PLANNED,
    TOKEN_BUDGET,
    Round,
    target_probabilities,
)
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.inspection.explain import RoundRecorder
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.sampling.structured import StructuredOutput
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.cost import CostModel
from draftwood.runtime.text.tokenizer import Tokenizer, token_texts


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_observing_changes_no_token(config: SpeculativeConfig | None, params: SamplingParams) -> None:
    rounds: list[Round] = []
    tokens = decode(config, params, rounds.append)
    assert tokens == decode(config, params)
    assert [token for round in rounds for token in round.token_ids] == tokens
    assert [round.finish_reason for round in rounds][-1] == "length"
    assert all(min(round.draft_seconds, round.target_seconds, round.host_seconds) >= 0 for round in rounds)


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_a_full_recorder_costs_nothing_in_later_rounds(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread describes no round that nobody looks at: each would take softmaxes over the vocabulary."""
    config, described = SpeculativeConfig("topk"), []
    whole, rounds = explained(config, params)
    sizes = [len(round.proposal.graph.tokens) for round in rounds]

    def counted(*row: Any) -> Any:
        described.append(row)
        return target_probabilities(*row)

    monkeypatch.setattr("draftwood.runtime.decoding.round.target_probabilities", counted)
    cut, seen = explained(config, params, max_nodes=sum(sizes[:2]))
    assert len(rounds) > 3 and len(seen) == len(described) == 3 and len(cut.rounds) == 2
    assert cut.settings == {**whole.settings, "rounds": "the first 2"} and "rounds" not in whole.settings
    exact, seen = explained(config, params, max_nodes=sum(sizes))
    assert len(exact.rounds) == len(seen) == len(rounds) and exact.settings == whole.settings
    assert decode(config, params, lambda round: True) == decode(config, params)


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_probabilities_are_those_of_the_models(params: SamplingParams) -> None:
    """Each node's q and p, computed once more from the models and the tokens before it."""
    explanation, rounds = explained(SpeculativeConfig("topk", verify="match", max_draft_len=3), params)
    model, other = random_model(1, V), random_model(2, V)
    committed = list(PROMPT)
    for shown, round in zip(explanation.rounds, rounds, strict=True):
        for node in shown.nodes[1:]:
            before = (*committed, *round.proposal.graph.path(node.node)[:-1])
            q = mixture(model, other, 0.7)(before)
            assert node.draft_prob == pytest.approx(q[node.token_id], rel=1e-5)
            if node.status != "not sent":
                assert node.target_prob == pytest.approx(warmed(model(before), params, node.token_id))
        assert shown.own_prob == pytest.approx(
            warmed(model((*committed, *(shown.nodes[n].token_id for n in shown.path))), params, shown.own_token_id)
        )
        committed += round.token_ids


def warmed(p: NDArray[np.float64], params: SamplingParams, token: int) -> float:
    """A token's probability at the request's temperature; at zero, that of the unprocessed model."""
    powered = p ** (1 / (params.temperature or 1.0))
    return float(powered[token] / powered.sum())


def test_accepted_rejected_and_left_out_are_told_apart() -> None:
    explanation, rounds = explained(SpeculativeConfig("topk", max_total_draft_tokens=6, max_draft_len=4), GREEDY)
    for shown, round in zip(explanation.rounds, rounds, strict=True):
        tree = round.proposal.tree
        assert [node.node for node in shown.nodes if node.status == "accepted"][1:] == sorted(shown.path)
        assert {node.node for node in shown.nodes if node.status != "not sent"} == set(tree.nodes)
        assert all((node.target_prob is None) == (node.status == "not sent") for node in shown.nodes[1:])
        tokens = [shown.nodes[node].token_id for node in shown.path] + [shown.own_token_id]
        assert tokens[: shown.num_tokens] == round.token_ids
    assert {node.status for shown in explanation.rounds for node in shown.nodes} == {"accepted", "rejected", "not sent"}


def short(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


@pytest.mark.parametrize(
    ("config", "params", "costs", "expected"),
    [
        (SpeculativeConfig("chain", max_draft_len=3), WARM, None, DEPTH_LIMIT),
        (SpeculativeConfig("topk", max_draft_len=1), GREEDY, None, DEPTH_LIMIT),
        (SpeculativeConfig("k-ary", branching=(2, 1)), WARM, None, DEPTH_LIMIT),
        (SpeculativeConfig("dyspec-heap", max_total_draft_tokens=4), WARM, None, TOKEN_BUDGET),
        (SpeculativeConfig("dyspec", max_total_draft_tokens=3), WARM, None, TOKEN_BUDGET),
        (SpeculativeConfig("dyspec-threshold", draft_threshold=1.0), WARM, None, NOTHING_LEFT),
        (SpeculativeConfig("topk", leaf_share=1.0), GREEDY, None, NOTHING_LEFT),
        (
            SpeculativeConfig("chain", stop_rule="confidence", confidence_threshold=1.0),
            WARM,
            None,
            "stop rule confidence",
        ),
        (
            SpeculativeConfig("topk", stop_rule="specdec++", rejection_threshold=0.0),
            GREEDY,
            None,
            "stop rule specdec++",
        ),
        (None, GREEDY, None, NO_SPECULATION),
        (SpeculativeConfig("topk", max_draft_len=5), short(3), None, END_OF_ROOM),
        (SpeculativeConfig("topk"), short(1), None, END_OF_ROOM),
        (SpeculativeConfig("chain"), short(3), table(1.0, 1e-6), END_OF_ROOM),
        (SpeculativeConfig("chain"), GREEDY, table(1.0, 0.45), PLANNED),
        (SpeculativeConfig("chain"), GREEDY, table(1.0, 1e-6), DEPTH_LIMIT),
        (SpeculativeConfig("k-ary", branching=(2, 1, 1)), GREEDY, table(1.0, 0.4), PLANNED),
        (SpeculativeConfig("topk", max_draft_len=4), GREEDY, table(1.0, 1e-6, row=0.5), PLANNED),
        (SpeculativeConfig("topk"), GREEDY, table(1.0, 3.0), NOT_WORTH_IT),
    ],
)
def test_the_end_of_growth_is_named(
    config: SpeculativeConfig | None, params: SamplingParams, costs: CostModel | None, expected: str
) -> None:
    explanation, rounds = explained(config, params, costs)
    first = explanation.rounds[0]
    assert first.growth_end == expected
    if expected == END_OF_ROOM:  # the last token needs no proposal
        assert max(rounds[0].proposal.graph.depths) == params.max_tokens - 1
        assert params.max_tokens > 1 or (first.num_drafted, first.num_tokens) == (0, 1)


def test_observing_is_not_decoding_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def ticking() -> float:
        nonlocal now
        now += 0.001  # between one look at the clock and the next
        return now

    monkeypatch.setattr("draftwood.runtime.speculation.stopwatch.perf_counter", ticking)
    target, draft = (FakeEngine(random_model(1, V), V, role) for role in ("target", "draft"))
    decoder = SpeculativeDecoder(target, draft, SpeculativeConfig("chain"), 4096, ())
    rounds, stats = list[Round](), SpecDecodeStats()

    def observe(round: Round) -> None:
        nonlocal now
        now += 50
        rounds.append(round)

    list(decoder.generate(PROMPT, Sampler(GREEDY, PROMPT, (), V), seeded_streams(7), stats, observe))
    assert rounds and 0 < stats.decode_seconds < 1
    assert sum(round.draft_seconds for round in rounds) == pytest.approx(stats.draft_seconds)
    assert sum(round.target_seconds for round in rounds) == pytest.approx(stats.target_seconds)


def test_a_list_of_prompts_shows_every_round_of_each(tiny_bundle: Path) -> None:
    rounds: list[Round] = []
    with LLM(tiny_bundle) as llm:
        results = llm.generate(["one", "two"], GREEDY, observe=rounds.append)
    tokens = [token for round in rounds for token in round.token_ids]
    assert tokens == [token for result in results for token in result.token_ids]


def test_the_form_of_a_text_is_shown_as_json_has_it(tiny_bundle: Path) -> None:
    params = SamplingParams(max_tokens=4, temperature=0, structured=StructuredOutput(regex="[ab]{3}"))
    with LLM(tiny_bundle) as llm:
        recorder = RoundRecorder(llm.token_text)
        (result,) = llm.generate("one", params, observe=recorder.observe)
        explanation = recorder.explanation("one", llm.speculative, params, result.stats)
    written = json.loads(json.dumps(explanation.to_json()))
    assert written["settings"]["structured"] == {"regex": "[ab]{3}"}


def test_token_texts_keep_what_decoding_alone_would_drop(tiny_bundle: Path) -> None:
    tokenizer = Tokenizer.load(tiny_bundle)
    text_of = token_texts(tokenizer)
    tokens = tokenizer.encode("two words", add_special_tokens=False)
    assert "".join(map(text_of, tokens)) == "two words"
    assert tokenizer.bos_token_id is not None and text_of(tokenizer.bos_token_id)
    assert all(isinstance(text_of(token), str) for token in range(tokenizer.vocab_size))
