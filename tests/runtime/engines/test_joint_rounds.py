"""Rounds on the device of requests that share a plan (`--max-batch`): the driver in libcuda's place executes their
kernels from their PTX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from cuda_driver.machine import Machine
from tensorrt_bundles import OpenLLM, demo_bundles

from draftwood.models.errors import EngineError
from draftwood.runtime import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from draftwood.runtime.engines.base import Pass
from draftwood.runtime.engines.passes import causal_batch
from draftwood.runtime.engines.rounds import BLOCK, RoundShape
from draftwood.runtime.engines.static import rounds as static_rounds
from draftwood.runtime.engines.static.cuda import CudaDevice
from draftwood.runtime.engines.static.engine import StaticEngine
from draftwood.runtime.engines.static.pool import SharedKVCache, StaticPool
from draftwood.runtime.prompt import Prompt

pytestmark = pytest.mark.usefixtures("no_faults")
MAX_BATCH = 3
GREEDY = SamplingParams(max_tokens=15, temperature=0, ignore_eos=True)
CHAIN = SpeculativeConfig("chain", budget="fixed", max_draft_len=3)
PROMPTS: list[Prompt] = ["def fibonacci(n):\n", "import os\n", "for i in range(10):"]
SHAPE = RoundShape(3, 3, 1)


@pytest.fixture(scope="module")
def open_llm(tmp_path_factory: pytest.TempPathFactory, gpu: Machine) -> Iterator[OpenLLM]:
    with demo_bundles(tmp_path_factory.mktemp("bundles"), gpu) as opened:
        yield opened


@pytest.fixture(scope="module")
def llm(open_llm: OpenLLM) -> Iterator[LLM]:
    with open_llm(MAX_BATCH, CHAIN) as opened:
        yield opened


@pytest.fixture(scope="module")
def by_host(open_llm: OpenLLM) -> list[RequestOutput]:
    """The texts by rounds of the host."""
    with pytest.MonkeyPatch.context() as patch, open_llm(MAX_BATCH, CHAIN) as opened:
        patch.setattr(CudaDevice, "runs_rounds", False)
        return opened.generate(PROMPTS, GREEDY)


def engines(llm: LLM) -> tuple[StaticEngine, StaticEngine]:
    target, draft = llm.target, llm.draft
    assert isinstance(target, StaticEngine) and isinstance(draft, StaticEngine)
    return target, draft


def texts_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [each.token_ids for each in outputs]


def test_rounds_of_several_texts_are_one_graph_and_one_wait(
    llm: LLM, by_host: list[RequestOutput], gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the texts and the proposals of the host's rounds. A round behind passes of the host also awaits the draft's
    moves."""
    run, joint, asked = static_rounds.SharedRounds.run, list[int](), list[Any]()

    def counted(self: Any, shape: RoundShape, texts: Any) -> Any:
        gpu.counts.clear()
        outcomes = run(self, shape, texts)
        joint.append(len(texts))
        asked.append({name: gpu.counts[name] for name in ("wait", "graph", "enqueue")})
        return outcomes

    monkeypatch.setattr(static_rounds.SharedRounds, "run", counted)
    for _ in range(2):  # every number of texts has been captured when the second list begins
        joint.clear()
        asked.clear()
        found = llm.generate(PROMPTS, GREEDY)
        assert texts_of(found) == texts_of(by_host)
        for mine, other in zip(found, by_host, strict=True):
            assert mine.stats.accepted_per_round == other.stats.accepted_per_round
            assert mine.stats.num_draft_tokens == other.stats.num_draft_tokens
    first, *others = (each for count, each in zip(joint, asked, strict=True) if count == MAX_BATCH)
    assert first["graph"] == 1 and not first["enqueue"]
    assert len(others) > 1 and all(each == {"wait": 1, "graph": 1, "enqueue": 0} for each in others)


def test_texts_by_rounds_of_the_host_keep_their_rows_meanwhile(
    llm: LLM, by_host: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities need logits, which only rounds of the host bring: their rows and moves are in the same area."""
    reserve, in_use = StaticPool.reserve, list[int]()

    def noted(self: StaticPool, columns: int) -> int:
        in_use.append(sum(cache.speculative for cache in self._caches.values()))
        return reserve(self, columns)

    monkeypatch.setattr(StaticPool, "reserve", noted)
    params = [GREEDY, replace(GREEDY, logprobs=1), GREEDY]
    assert texts_of(llm.generate(PROMPTS, params)) == texts_of(by_host)
    assert max(in_use) > 0


def test_columns_are_compacted_for_a_round(llm: LLM) -> None:
    """The rows that other texts use move to the first columns, and stay what they are."""
    target, _ = engines(llm)
    gone, live = (target.new_cache() for _ in range(2))
    assert isinstance(live, SharedKVCache)
    for each in (gone, live):
        Pass(target, causal_batch(target.spec, (5, 6, 7), 0), each).run()
    pool, first = target.pool, target.pool._tree_slot
    before, columns = pool.memory.contents(), live.speculative_columns
    gone.close()
    with target.lock:
        assert pool.reserve(1) == first + pool._used > first + 3
        assert pool.reserve(pool._columns - 4) == first + 3 and live.speculative_columns.tolist() == [0, 1, 2]
    after = pool.memory.contents()
    assert (after[:, :, :, first : first + 3] == before[:, :, :, first + columns]).all()
    live.close()


def test_which_rounds_texts_may_share(llm: LLM) -> None:
    target, draft = engines(llm)
    caches = target.new_cache(), draft.new_cache()
    rounds = target.rounds(caches[0], draft, caches[1])
    assert rounds is not None and rounds.fits(SHAPE, 1)
    assert not rounds.fits(RoundShape(3, 3, 1, BLOCK, True), 1), "above temperature 0"
    assert not rounds.fits(RoundShape(2, 32, 4), 1), "wider than a pass"
    assert not rounds.fits(RoundShape(9, 9, 16), 1), "more columns than a text may have"
    wanted = rounds.round(SHAPE, [1])
    assert wanted.engine is rounds.round(SHAPE, [1]).engine
    assert wanted.engine is not rounds.round(RoundShape(2, 2, 1), [1]).engine
    assert wanted.engine.num_joint([wanted] * 2) == 2 and wanted.engine.num_joint([wanted] * 9) == MAX_BATCH
    wide = rounds.round(RoundShape(2, 20, 16), [1])
    assert wide.engine.num_joint([wide] * 3) == 2, "of 16 rows in the draft's pass of 32"
    region = target.pool.region
    caches[0].length = caches[1].length = region - 4  # type: ignore[misc]
    assert rounds.fits(SHAPE, 1) and not rounds.fits(RoundShape(4, 4, 1), 1)
    rounds.close()
    with pytest.raises(EngineError, match="rounds of this text were closed"):
        wanted.run()
    for each in caches:
        each.close()


def test_engines_for_one_and_for_several_texts_run_no_rounds(llm: LLM, open_llm: OpenLLM) -> None:
    target, _ = engines(llm)
    with open_llm(1, CHAIN) as other:
        draft = engines(other)[1]
        caches = target.new_cache(), draft.new_cache()
        assert target.rounds(caches[0], draft, caches[1]) is None
        for each in caches:
            each.close()


def test_few_graphs_are_kept(
    llm: LLM, by_host: list[RequestOutput], gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another shape or number of texts takes the place of the oldest."""
    monkeypatch.setattr(static_rounds, "MOST_ROUNDS", 1)
    assert texts_of(llm.generate(PROMPTS[:2], GREEDY)) == texts_of(by_host)[:2]
    (shared,) = engines(llm)[0]._rounds.values()
    assert len(shared._rounds) == 1


def test_a_closed_draft_ends_the_rounds(open_llm: OpenLLM) -> None:
    with open_llm(MAX_BATCH, CHAIN) as opened:
        target, draft = engines(opened)
        caches = target.new_cache(), draft.new_cache()
        rounds = target.rounds(caches[0], draft, caches[1])
        assert rounds is not None
        draft.close()
        with pytest.raises(EngineError, match="the draft engine was closed"):
            rounds.round(SHAPE, [1]).run()
