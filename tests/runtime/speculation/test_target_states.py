"""A draft that reads its target's states reads those of the text that it is drafting for: in every round, after every
rejection, in windows, and in caches that texts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from costs import table
from state_fakes import number, reading_pair, told

from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.prefill import PrefillLimit
from draftwood.runtime.decoding.request import Request
from draftwood.runtime.decoding.scheduler import Scheduler
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.sampling.params import SamplingParams
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation import proposer, target_states
from draftwood.runtime.speculation.config import SpeculativeConfig
from draftwood.runtime.speculation.planning.cost import CostModel, HostCosts, PassCosts
from draftwood.runtime.speculation.proposer import DraftProposer
from draftwood.runtime.speculation.target_states import TargetStates

VOCAB = 6
DEAR = table(1.0, 0.2, row=0.02)  # of whose tokens a lookup often takes the place
LONG = [1, *[2 + index * index % 4 for index in range(150)]]
CONFIGS = {
    "chain": SpeculativeConfig("chain", max_draft_len=3, budget="fixed"),
    "tree": SpeculativeConfig("dyspec", max_total_draft_tokens=6, max_draft_len=3, budget="fixed"),
    "merged": SpeculativeConfig(
        "dyspec-threshold", merge="gsd", merge_ngram=1, max_total_draft_tokens=6, max_draft_len=3, budget="fixed"
    ),
    "lookups between": SpeculativeConfig(max_draft_len=3),
}


class Watched:
    """A target and a draft, and every path on which the draft was asked."""

    def __init__(self, context: int | None = None, places: bool = False) -> None:
        self.target, self.draft = reading_pair(0, VOCAB)
        self.target.places = self.draft.places = places
        self.draft.spec = replace(self.draft.spec, model=replace(self.draft.spec.model, draft_context=context))
        self.paths = list[tuple[int, ...]]()
        self.looked_up = 0  # rounds
        self.cached = 0  # rows of the target that were taken over
        predict = self.draft.predict

        def watched(path: tuple[int, ...]) -> Any:
            self.paths.append(path)
            return predict(path)

        self.draft.predict = watched

    def wrong(self, texts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """The paths that a draft that reads the text from scratch would not have: committed tokens have the state of
        all the text before them, proposed ones that of the path above."""
        return [path for path in self.paths if not self._is_sound(path, texts)]

    @staticmethod
    def _is_sound(path: tuple[int, ...], texts: Sequence[Sequence[int]]) -> bool:
        triples = [path[at : at + 3] for at in range(0, len(path), 3)]
        before = told[float(triples[0][1])]
        for index, (token, given, own) in enumerate(triples):
            if own:
                if own != number(path[: 3 * index]):
                    return False
                continue
            if told[float(given)] != before:
                return False
            before = (*before, token)
        return any(tuple(text[: len(before)]) == before for text in texts)


def written(
    pair: Watched,
    prompts: Sequence[Sequence[int]],
    config: SpeculativeConfig,
    shared: int | None = None,
    prefill: PrefillLimit | None = None,
    seed: int = 0,
    costs: CostModel | None = None,
) -> list[list[int]]:
    """The texts of these prompts, one by one; with `shared`, so many at a time over common caches. seed: of the first
    text."""
    target, draft, pools = pair.target, pair.draft, list[PooledEngine]()
    if shared is not None:
        pools = [PooledEngine(engine, 2000) for engine in (target, draft)]
        for pool in pools:
            pool.share_prefixes(1000)
    scheduler: Scheduler[Any] = Scheduler(shared or 1, 100, pools=pools, prefill=prefill)
    texts = [list(prompt) for prompt in prompts]
    requests = list[Request[Any]]()
    engines: list[Any] = [*pools] or [target, draft]
    for index, prompt in enumerate(prompts, seed):
        decoder = SpeculativeDecoder(engines[0], engines[1], config, 4096, (), costs)
        sampler = Sampler(SamplingParams(max_tokens=40, temperature=1.0, seed=index), prompt, (), VOCAB)
        stats = SpecDecodeStats()
        steps = decoder.steps(prompt, sampler, seeded_streams(index), stats)
        requests.append(Request(steps=steps, write=lambda chunk: chunk, stats=stats))
    for request, chunk in scheduler.run(requests):
        texts[requests.index(request)] += chunk.token_ids
    pair.looked_up = sum(request.stats.num_looked_up for request in requests)
    pair.cached = sum(request.stats.num_cached_tokens for request in requests)
    return texts


@pytest.mark.parametrize("context", [None, 2, 16, 100])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_row_has_its_states(name: str, context: int | None) -> None:
    for prompt in ([1], [1, 2, 3], LONG):
        pair = Watched(context)
        (text,) = written(pair, [prompt], CONFIGS[name], costs=DEAR if name == "lookups between" else None)
        assert len(pair.paths) > 10 and not pair.wrong([text])
        assert prompt is not LONG or (pair.looked_up > 0) is (name == "lookups between")


PROMPTS = [LONG, [0, *LONG[1:]], LONG[:100], [*LONG[:70], 5, 5], LONG, [1]]


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("at_a_time", [1, 3])
@pytest.mark.parametrize("context", [None, 16])
def test_texts_share_rows_and_keep_their_states(context: int | None, at_a_time: int, places: bool) -> None:
    """Also texts that differ in their first token, which is in no row of the draft. Each is the same text as alone."""
    pair = Watched(context, places)
    texts = written(pair, PROMPTS, CONFIGS["tree"], at_a_time)
    assert not pair.wrong(texts)
    assert pair.cached > 150
    for index, prompt in enumerate(PROMPTS):
        assert texts[index] == written(Watched(context), [prompt], CONFIGS["tree"], seed=index)[0]


def test_rows_of_a_prompt_that_both_hold_are_computed_once() -> None:
    """Of a prompt that was read before, the target computes the last row again, for its state, and no other."""
    pair = Watched()
    written(pair, [LONG, LONG], CONFIGS["chain"], 1)
    assert pair.cached == len(LONG) - 2


def costs(draft: float) -> CostModel:
    host = HostCosts(0.0, 0.0, 0.0)
    seconds = [PassCosts((1, 64), (0, 64), ((each, 2 * each), (each, 2 * each))) for each in (1.0, draft)]
    return CostModel(seconds[0], seconds[1], host, host, {})


def test_parts_of_prompts_that_others_wait_for_show_all_states() -> None:
    pair = Watched()
    texts = written(pair, [[1, 2], LONG, LONG[::-1]], CONFIGS["tree"], 3, prefill=PrefillLimit(costs(0.1), 1e-6))
    assert not pair.wrong(texts)


@pytest.mark.parametrize("kept", [3, target_states.KEPT])
def test_a_draft_that_is_seldom_asked_reads_on(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more states are kept than for so many tokens, however long plain decoding lasts."""
    monkeypatch.setattr(target_states, "KEPT", kept)
    monkeypatch.setattr(proposer, "KEPT", kept)
    most = 0
    add = TargetStates.add

    def watched(states: TargetStates, *rest: Any) -> None:
        nonlocal most
        add(states, *rest)
        most = max(most, states.end - states._begin)

    monkeypatch.setattr(TargetStates, "add", watched)
    for context in (None, 16):
        pair = Watched(context)
        decoder = SpeculativeDecoder(pair.target, pair.draft, SpeculativeConfig(max_draft_len=2), 4096, (), costs(5.0))
        sampler = Sampler(SamplingParams(max_tokens=300), [1], (), VOCAB)
        for _ in decoder.generate([1], sampler, seeded_streams(0), SpecDecodeStats()):
            pass
        assert pair.draft.passes or context
        assert most <= 2 * kept + 5 and not pair.wrong([[1, *sampler.output]])


def of_the_row_before(before: Callable[..., Any]) -> Callable[..., Any]:
    return lambda states, first, count: np.roll(before(states, first, count), 1, 0)


def of_a_rejected_one(self: DraftProposer, tree: Any, rows: Sequence[int]) -> None:
    """Keeps what was scored with the draft's own states, as a draft without states may."""
    kept = [row for row in rows if tree.nodes[row] in self._slots]
    self.cache.commit([self._slots[tree.nodes[row]] for row in kept])


def late(add: Callable[..., None]) -> Callable[..., None]:
    """The states of the round before."""

    def added(states: TargetStates, start: int, rows: Any, needed: int) -> None:
        held = getattr(states, "held", rows)
        states.held = rows.copy()  # type: ignore[attr-defined]
        add(states, start, held if held.shape == rows.shape else rows, needed)

    return added


def as_if_nothing_was_recalled(add: Callable[..., None]) -> Callable[..., None]:
    return lambda states, start, rows, needed: add(states, states.end, rows, needed)


WRONG = {
    "of the row before": (TargetStates, "before", of_the_row_before(TargetStates.before)),
    "of the draft": (DraftProposer, "commit", of_a_rejected_one),
    "of the round before": (TargetStates, "add", late(TargetStates.add)),
    "of before a recalled prefix": (TargetStates, "add", as_if_nothing_was_recalled(TargetStates.add)),
    "of another text": (proposer, "salt_after", lambda salt, text: salt),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_states_are_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: the output distribution stays what it was, so that no test of losslessness shows these."""
    monkeypatch.setattr(*WRONG[wrong])
    pair = Watched()
    try:
        assert pair.wrong(written(pair, PROMPTS, CONFIGS["tree"], 1))
    except AssertionError as error:
        assert "a row has the target's state" in str(error), "nothing else is wrong"
