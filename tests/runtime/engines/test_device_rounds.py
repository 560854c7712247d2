"""Rounds that run on the device as a whole, over a stand-in for TensorRT's package: the driver in libcuda's place
executes their kernels from their PTX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest
from cuda_driver.machine import Machine
from engine_parts import held_by, random_text
from tensorrt_bundles import OpenLLM, demo_bundles
from uniforms import uniform_streams

from draftwood.models.errors import EngineError
from draftwood.runtime import LLM, RequestOutput, SamplingParams, SpecDecodeStats, SpeculativeConfig
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.round import Observer, Round
from draftwood.runtime.engines.base import Pass
from draftwood.runtime.engines.passes import causal_batch
from draftwood.runtime.engines.rounds import BLOCK, MATCH, TRAVERSAL, Rounds, RoundShape
from draftwood.runtime.engines.static import rounds as static_rounds
from draftwood.runtime.engines.static.cuda import CudaDevice
from draftwood.runtime.engines.static.draws import Vocabulary
from draftwood.runtime.engines.static.engine import MAX_PAIRS, StaticEngine
from draftwood.runtime.engines.static.pool import SharedKVCache, StaticPool
from draftwood.runtime.engines.static.rounds import MAX_DRAWN, StaticRounds
from draftwood.runtime.prompt import Prompt
from draftwood.runtime.sampling.sampler import Sampler

pytestmark = pytest.mark.usefixtures("no_faults")
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.7, max_tokens=9)
PROMPT = random_text(30)
CHAIN = SpeculativeConfig("chain", budget="fixed", max_draft_len=4)
TREE = SpeculativeConfig("topk", budget="fixed", max_total_draft_tokens=9, max_draft_len=3, frontier_width=3)
DRAWN_TREE = SpeculativeConfig("dyspec", budget="fixed", max_total_draft_tokens=5, max_draft_len=2, frontier_width=2)
MAX_BATCH, SHORT, SHAPE = 3, replace(CHAIN, max_draft_len=3), RoundShape(3, 3, 1)
PROMPTS: list[Prompt] = ["def fibonacci(n):\n", "import os\n", "for i in range(10):"]


@pytest.fixture(scope="module")
def open_llm(tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> Iterator[OpenLLM]:
    with demo_bundles(tmp_path_factory.mktemp("bundles"), gpu) as opened:
        yield opened


@pytest.fixture(scope="module", params=[1, MAX_BATCH], ids=["one text", "several texts"])
def any_llm(request: pytest.FixtureRequest, open_llm: OpenLLM) -> Iterator[LLM]:
    with open_llm(request.param, SHORT) as opened:
        yield opened


@pytest.fixture(scope="module")
def one(open_llm: OpenLLM) -> Iterator[LLM]:
    """For a text at a time."""
    with open_llm(1, SHORT) as opened:
        yield opened


@pytest.fixture(scope="module")
def joint(open_llm: OpenLLM) -> Iterator[LLM]:
    """For texts that share a plan."""
    with open_llm(MAX_BATCH, SHORT) as opened:
        yield opened


@pytest.fixture(scope="module")
def by_host(open_llm: OpenLLM) -> list[RequestOutput]:
    """The texts of PROMPTS by rounds of the host."""
    with pytest.MonkeyPatch.context() as patch, open_llm(MAX_BATCH, SHORT) as opened:
        patch.setattr(CudaDevice, "runs_rounds", False)
        return opened.generate(PROMPTS, GREEDY)


def engines(llm: LLM) -> tuple[StaticEngine, StaticEngine]:
    target, draft = llm.target, llm.draft
    assert isinstance(target, StaticEngine) and isinstance(draft, StaticEngine)
    return target, draft


def opened_rounds(llm: LLM) -> tuple[tuple[Any, Any], Rounds]:
    target, draft = engines(llm)
    caches = target.new_cache(), draft.new_cache()
    rounds = target.rounds(caches[0], draft, caches[1])
    assert rounds is not None
    return caches, rounds


def close(caches: Sequence[Any]) -> None:
    for each in caches:
        each.close()


def generation(
    llm: LLM,
    config: SpeculativeConfig | None,
    params: SamplingParams = GREEDY,
    stats: SpecDecodeStats | None = None,
    observe: Observer | None = None,
) -> Iterator[list[int]]:
    """The tokens of each round, with uniform numbers that host and device use alike."""
    decoder = SpeculativeDecoder(*engines(llm), config, 400, ())
    sampler = Sampler(params, PROMPT, (), 2048)
    for chunk in decoder.generate(PROMPT, sampler, uniform_streams(1), stats or SpecDecodeStats(), observe):
        yield chunk.token_ids


def text(*arguments: Any) -> list[int]:
    return [token for tokens in generation(*arguments) for token in tokens]


def text_of_host(*arguments: Any) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaDevice, "runs_rounds", False)
        return text(*arguments)


# A configuration and settings; whether its rounds run on the device.
CASES: dict[str, tuple[SpeculativeConfig | None, SamplingParams, bool]] = {
    "a chain": (CHAIN, GREEDY, True),
    "a tree": (TREE, GREEDY, True),
    "a drawn chain": (CHAIN, SAMPLED, True),
    "a drawn chain that must match": (replace(CHAIN, verify="match"), replace(SAMPLED, min_p=0.05), True),
    "a chosen tree": (TREE, replace(SAMPLED, top_k=40), True),
    "a drawn tree": (DRAWN_TREE, SAMPLED, True),
    "a drawn tree by rejection": (replace(DRAWN_TREE, verify="rejection"), replace(SAMPLED, top_k=20, top_p=0.9), True),
    "a drawn tree of a fixed shape": (SpeculativeConfig("k-ary", budget="fixed"), SAMPLED, False),
    "a drawn tree by the draft's own estimates": (replace(DRAWN_TREE, key="draft"), SAMPLED, False),
    "a chain verified by rejection": (replace(CHAIN, verify="rejection"), SAMPLED, False),
    "log-probabilities": (CHAIN, replace(GREEDY, logprobs=2), False),
    "penalties": (CHAIN, replace(GREEDY, repetition_penalty=1.2), False),
    "merges": (replace(TREE, merge="gsd"), GREEDY, False),
    "a lookup": (SpeculativeConfig("lookup"), GREEDY, False),
    "a fixed shape": (SpeculativeConfig("k-ary", budget="fixed"), GREEDY, False),
    "a stop rule": (replace(CHAIN, stop_rule="confidence"), GREEDY, False),
    "pruning": (replace(TREE, leaf_share=0.1), GREEDY, False),
    "a chain that is too deep for the text": (replace(CHAIN, max_draft_len=9), replace(GREEDY, max_tokens=9), False),
    "a tree that mostly ends before its depth": (replace(TREE, max_draft_len=6), GREEDY, False),
    "no speculation": (None, GREEDY, False),
}
LONG = ("a drawn chain that must match", "a drawn tree by rejection")


@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.full if each in LONG else ()) for each in CASES])
def test_texts_and_proposals_are_those_of_the_host(name: str, one: LLM, gpu: Machine) -> None:
    """The last tokens are of the host's rounds in any case, as are all rounds that the device does not run."""
    config, params, runs = CASES[name]
    by_host, by_device = SpecDecodeStats(), SpecDecodeStats()
    expected = text_of_host(one, config, params, by_host)
    assert text(one, config, params, by_device) == expected
    for field in ("accepted_per_round", "num_draft_tokens", "target_passes"):
        assert getattr(by_device, field) == getattr(by_host, field), field
    assert gpu.ran["pending_inputs"] == gpu.ran["verify"] and (gpu.ran["verify"] > 1) == runs


def test_an_observer_gets_its_rounds_from_the_host(one: LLM, gpu: Machine) -> None:
    seen: list[Round] = []
    text(one, CHAIN, GREEDY, None, seen.append)
    assert seen and gpu.ran["verify"] == 0


def test_rounds_of_two_texts_in_turn(one: LLM, gpu: Machine) -> None:
    """They share the engines' executions, whose bindings the host's passes change in between; one text's first rounds
    run on the host, whose last commit of the draft is still queued when a round on the device begins."""
    expected, found = text_of_host(one, CHAIN), (list[int](), list[int]())
    for tokens in zip_longest(generation(one, CHAIN), generation(one, TREE), fillvalue=list[int]()):
        for each, more in zip(found, tokens, strict=True):
            each += more
    assert found == (expected, expected)
    host_first = text(one, CHAIN, replace(GREEDY, logprobs=1, max_tokens=9))
    before = gpu.ran["verify"]
    assert [host_first, text(one, CHAIN)] == [expected[:9], expected] and gpu.ran["verify"] > before


def test_a_round_that_cannot_be_captured_is_queued(
    one: LLM, gpu: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = text_of_host(one, CHAIN)
    monkeypatch.setattr(gpu, "captures", False)
    assert text(one, replace(CHAIN, max_draft_len=6)) == expected
    assert sum("a round of" in message for message in caplog.messages) == 1
    assert [launched.name for launched in gpu.launches].count("verify") == gpu.ran["verify"] > 1


@pytest.mark.parametrize(
    ("shape", "alone", "shared"),
    [
        (SHAPE, True, True),
        (RoundShape(3, 3, 1, BLOCK, True), True, False),  # above temperature 0
        (RoundShape(2, 20, 17, TRAVERSAL, True, is_tree=True), True, False),
        (RoundShape(2, 250, 7, TRAVERSAL, True, is_tree=True), False, False),
        (RoundShape(4, 32, 4), False, False),  # wider than a pass
        (RoundShape(2, 20, 17), False, False),
        (RoundShape(34, 31, 4), False, False),
        (RoundShape(4, 256, 2), False, False),
        (RoundShape(9, 9, 16), False, False),  # more columns than a text may have
    ],
    ids=str,
)
def test_a_round_has_room_in_masks(shape: RoundShape, alone: bool, shared: bool, any_llm: LLM) -> None:
    caches, rounds = opened_rounds(any_llm)
    assert rounds.fits(shape, 1) is (alone if any_llm.target.spec.max_batch == 1 else shared)
    assert not rounds.fits(shape, 2) and not rounds.fits(shape, 0)
    close(caches)


def test_a_round_has_room_in_caches(any_llm: LLM) -> None:
    caches, rounds = opened_rounds(any_llm)
    target = any_llm.target
    assert isinstance(target, StaticEngine)
    room = target.spec.capacity - 1 if target.spec.max_batch == 1 else target.pool.region
    caches[0].length = caches[1].length = room - 4
    assert rounds.fits(SHAPE, 1) and not rounds.fits(RoundShape(8, 8, 2), 1)
    close(caches)


def test_what_was_closed_runs_no_round(open_llm: OpenLLM) -> None:
    with open_llm(MAX_BATCH, SHORT) as opened:
        _, rounds = opened_rounds(opened)
        _, others = opened_rounds(opened)
        wanted = rounds.round(SHAPE, [1])
        rounds.close()
        with pytest.raises(EngineError, match="rounds of this text were closed"):
            wanted.run()
        engines(opened)[1].close()
        with pytest.raises(EngineError, match="the draft engine was closed"):
            others.round(SHAPE, [1]).run()


def test_few_rounds_above_temperature_0_are_kept(one: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their buffers are large. They do not take the place of rounds at temperature 0."""
    caches, rounds = opened_rounds(one)
    assert isinstance(rounds, StaticRounds)
    shared = static_rounds.SharedRounds(*engines(one), (caches[0].memory, caches[1].memory))
    monkeypatch.setattr(shared, "_made", lambda shape, texts: object())
    greedy = [RoundShape(depth, depth, 1) for depth in range(1, MAX_DRAWN + 3)]
    drawn = [shape._replace(verify=MATCH, is_drawn=True) for shape in greedy]
    for shape in (*greedy, *drawn, drawn[-1]):
        shared._round(shape, 1)
    assert list(shared._rounds) == [(shape, 1) for shape in (*greedy, *drawn[-MAX_DRAWN:])]
    close(caches)


def test_few_pairs_of_memories_keep_their_rounds(one: LLM) -> None:
    """A closed cache's memory is the next one's, with its graphs; of many at a time the latest pairs stay."""
    for count in (1, MAX_PAIRS + 2, 1):
        opened = [opened_rounds(one) for _ in range(count)]
        close([each for caches, _ in opened for each in caches])
        if count > 1:
            latest = opened[-1][1]
    again = opened[0][1]
    assert len(engines(one)[0]._rounds) == MAX_PAIRS
    assert isinstance(latest, StaticRounds) and isinstance(again, StaticRounds) and again._shared is latest._shared


def test_vocabularies_that_are_drawn_from() -> None:
    """A draft of the target's vocabulary or a trimmed one, of at most 262,144 tokens."""
    assert Vocabulary(262144, 262144, 0, 0).fits and Vocabulary(700, 350, 8, 350).fits
    assert not Vocabulary(262145, 262145, 0, 0).fits and not Vocabulary(700, 704, 0, 0).fits


def test_engines_that_do_not_belong_together_run_no_rounds(one: LLM, joint: LLM) -> None:
    (mine, my_draft), (target, other_draft) = engines(one), engines(joint)
    caches = mine.new_cache(), my_draft.new_cache(), target.new_cache(), other_draft.new_cache()
    assert target.rounds(caches[2], my_draft, caches[1]) is None, "for one and for several texts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(my_draft.device, "number", 1)
        assert mine.rounds(caches[0], my_draft, caches[1]) is None, "on different devices"
    close(caches)


def test_rounds_of_several_texts_are_one_graph_and_one_wait(
    joint: LLM, by_host: list[RequestOutput], gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the texts and the proposals of the host's rounds. A round after passes of the host also awaits the draft's
    moves."""
    run, asked = static_rounds.SharedRounds.run, list[Any]()

    def counted(self: Any, shape: RoundShape, texts: Any) -> Any:
        gpu.counts.clear()
        outcomes = run(self, shape, texts)
        asked.append((len(texts), *(gpu.counts[name] for name in ("wait", "graph", "enqueue"))))
        return outcomes

    monkeypatch.setattr(static_rounds.SharedRounds, "run", counted)
    for _ in range(2):  # every number of texts has been captured when the second list begins
        asked.clear()
        found = joint.generate(PROMPTS, GREEDY)
        for mine, other in zip(found, by_host, strict=True):
            assert mine.token_ids == other.token_ids
            assert mine.stats.accepted_per_round == other.stats.accepted_per_round
            assert mine.stats.num_draft_tokens == other.stats.num_draft_tokens
    (_, _, *first), *others = (each for each in asked if each[0] == MAX_BATCH)
    assert first == [1, 0] and len(others) > 1 and set(others) == {(MAX_BATCH, 1, 1, 0)}


def test_texts_by_rounds_of_the_host_keep_their_rows_meanwhile(
    joint: LLM, by_host: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities need logits, which only rounds of the host bring: their rows and moves are in the same area."""
    reserve, in_use = StaticPool.reserve, list[int]()

    def noted(self: StaticPool, columns: int) -> int:
        in_use.append(sum(cache.speculative for cache in self._caches.values()))
        return reserve(self, columns)

    monkeypatch.setattr(StaticPool, "reserve", noted)
    found = joint.generate(PROMPTS, [GREEDY, replace(GREEDY, logprobs=1), GREEDY])
    assert [each.token_ids for each in found] == [each.token_ids for each in by_host] and max(in_use) > 0


def test_columns_are_compacted_for_a_round(joint: LLM) -> None:
    """The rows that other texts use move to the first columns, and stay what they are."""
    target, _ = engines(joint)
    gone, live = (target.new_cache() for _ in range(2))
    assert isinstance(live, SharedKVCache)
    for each in (gone, live):
        Pass(target, causal_batch(target.spec, (5, 6, 7), 0), each).run()
    pool, first = target.pool, target.pool._tree_slot
    before, columns = held_by(pool.memory), live.speculative_columns
    gone.close()
    with target.lock:
        assert pool.reserve(1) == first + pool._used > first + 3
        assert pool.reserve(pool._columns - 4) == first + 3 and live.speculative_columns.tolist() == [0, 1, 2]
    after = held_by(pool.memory)
    assert (after[:, :, :, first : first + 3] == before[:, :, :, first + columns]).all()
    live.close()


def test_which_rounds_texts_share(joint: LLM) -> None:
    caches, rounds = opened_rounds(joint)
    wanted = rounds.round(SHAPE, [1])
    assert wanted.engine is rounds.round(SHAPE, [1]).engine is not rounds.round(RoundShape(2, 2, 1), [1]).engine
    assert wanted.engine.num_joint([wanted] * 2) == 2 and wanted.engine.num_joint([wanted] * 9) == MAX_BATCH
    wide = rounds.round(RoundShape(2, 20, 16), [1])
    assert wide.engine.num_joint([wide] * 3) == 2, "of 16 rows in the draft's pass of 32"
    close(caches)
