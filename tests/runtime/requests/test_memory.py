"""What memory there is, by the system's own files, and which requests fit into it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from costs import FREE, passes
from fakes import POOLED, FakeCache, FakeEngine, random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from together import collect, fake_engine, over_llm, run, tokens_of

from draftwood.models.errors import ConfigError, RequestError
from draftwood.runtime import LLM, AsyncLLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.decoding.chunk import TokenChunk
from draftwood.runtime.decoding.decoder import SpeculativeDecoder
from draftwood.runtime.decoding.request import Request
from draftwood.runtime.decoding.scheduler import Scheduler
from draftwood.runtime.decoding.stats import SpecDecodeStats
from draftwood.runtime.engines.backends import BACKENDS, slot_bytes
from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch
from draftwood.runtime.engines.cache import StackedKVCache
from draftwood.runtime.engines.limits import available_bytes
from draftwood.runtime.engines.passes import Steps
from draftwood.runtime.engines.shared import memory
from draftwood.runtime.engines.shared.memory import (
    CACHE_SHARE,
    CacheBudget,
    OutOfMemoryError,
    cache_budget,
)
from draftwood.runtime.engines.shared.pool import PooledEngine
from draftwood.runtime.sampling.random import seeded_streams
from draftwood.runtime.sampling.sampler import Sampler
from draftwood.runtime.speculation.planning.cost import CostModel

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
MIB = 1 << 20


def files_of(root: Path, content: dict[str, str]) -> Path:
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9999 kB\nMemAvailable: 5000 kB\n"}
V2, V1 = "sys/fs/cgroup/", "sys/fs/cgroup/memory/"


def group(folder: str, most: object, now: int, stat: str = "") -> dict[str, str]:
    """The files of a control group, with names of its version."""
    names = ("limit_in_bytes", "usage_in_bytes") if folder.startswith(V1) else ("max", "current")
    files = {f"{folder}memory.{name}": str(value) for name, value in zip(names, (most, now), strict=True)}
    return files | ({f"{folder}memory.stat": stat} if stat else {})


def in_groups(own: str, *groups: dict[str, str]) -> dict[str, str]:
    return {"proc/self/cgroup": own} | {name: text for each in groups for name, text in each.items()}


CACHED, CACHED_V1 = "anon 5\ninactive_file 300\n", "inactive_file 1\ntotal_inactive_file 50\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, None),
        (MEMINFO, 5000 * 1024),
        (MEMINFO | in_groups("0::/\n", group(V2, "max", 7)), 5000 * 1024),
        (in_groups("0::/a/b\n", group(V2 + "a/", 1000, 900, CACHED), group(V2 + "a/b/", 800, 100)), 400),
        (in_groups("5:cpu:/\n4:memory:/not/seen/from/inside\n", group(V1, 1000, 1200)), 0),
        (in_groups("4:memory,hugetlb:/a\n", group(V1 + "a/", 1000, 600, CACHED_V1), group(V1, 2**63 - 4096, 600)), 450),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, content: dict[str, str], expected: int | None) -> None:
    assert available_bytes(files_of(tmp_path, content)) == expected


def test_a_limit_of_the_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100 * MIB, -1))
    files_of(tmp_path, {"proc/self/statm": "256 1 1\n"})
    assert available_bytes(tmp_path) == 100 * MIB - 256 * resource.getpagesize()


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineBundle, "open_engine", fake_engine)
        patch.setitem(BACKENDS, "fake", POOLED)
        yield LLM(tiny_bundle, SpeculativeConfig(budget="fixed"))


def test_the_default_is_a_share_of_what_is_there(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [llm.target.spec]
    few, many = ((1 << exponent) for exponent in (28, 34))
    budgets = []
    for there in (few, many):
        monkeypatch.setattr(memory, "available_bytes", lambda there=there: there)
        budgets.append(cache_budget(specs, None).slots or 0)
        assert budgets[-1] * slot_bytes(specs[0]) < CACHE_SHARE * there
    assert 0 < 50 * budgets[0] < budgets[1]
    monkeypatch.setattr(memory, "available_bytes", lambda: MIB)
    with pytest.raises(ConfigError, match="--kv-cache-bytes"):
        cache_budget(specs, None)
    with pytest.raises(ConfigError, match=f"--kv-cache-bytes of {MIB + 1} is more than the {MIB} bytes of memory"):
        cache_budget(specs, MIB + 1)
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    assert cache_budget(specs, None).slots is None
    monkeypatch.setattr(memory, "free_bytes", lambda: few)  # of the GPU on which caches lie
    assert cache_budget(specs, None, "cuda").slots == budgets[0]
    monkeypatch.setattr(memory, "free_bytes", lambda: MIB)
    with pytest.raises(ConfigError, match="1048576 bytes of memory are available on the GPU"):
        cache_budget(specs, None, "cuda")
    assert cache_budget(specs, MIB, "cuda") == cache_budget(specs, MIB)


def test_requests_wait_for_slots_in_order_and_the_impossible_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, forward, most = replace(cache_budget([llm.target.spec], None), slots=250, padding=64), llm.target.score, 0
    monkeypatch.setattr("draftwood.runtime.llm.cache_budget", lambda *_: budget)

    async def work(served: AsyncLLM) -> list[list[int]]:
        with pytest.raises(RequestError, match="--kv-cache-bytes"):
            served.generate([5] * 100, SamplingParams(max_tokens=100))
        assert served.max_tokens_after([5] * 100) == 250 - 64 - 100

        def watched(*arguments: Any) -> Any:
            nonlocal most
            most = max(most, sum(request.next_pass is not None for request in served._scheduler.queue.running))
            return forward(*arguments)

        monkeypatch.setattr(llm.target, "score", watched)
        with served._scheduler.changed:  # the engine's thread finds all of them
            streams = [served.generate([5, number], GREEDY) for number in range(8)]
        return list(map(tokens_of, await asyncio.gather(*map(collect, streams))))

    texts = run(work, llm, max_running=8, max_waiting=8)
    assert texts == [tokens_of(list(llm.stream([5, number], GREEDY))) for number in range(8)]
    assert most == 2  # of 86 slots each


@settings(max_examples=15, deadline=None)
@given(failing=st.sets(st.integers(1, 60), max_size=12))
@over_llm(max_running=4)
async def test_passes_without_memory_are_tried_again_and_no_text_changes(served: AsyncLLM, failing: set[int]) -> None:
    """A pass may fail before or after the engine has computed it."""
    calls = 0
    forward = served.llm.target.score

    def short(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in failing:
            raise MemoryError
        return forward(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.llm.target, "score", short)
        with served._scheduler.changed:  # the engine's thread finds all of them
            streams = [served.generate([5, number], GREEDY) for number in range(4)]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
    for number, result in enumerate(results):
        if isinstance(result, BaseException):
            assert isinstance(result, OutOfMemoryError) and any(call + 1 in failing for call in failing)
        else:
            assert tokens_of(result) == tokens_of(list(served.llm.stream([5, number], GREEDY)))
    assert served.alive
    assert len(tokens_of(await collect(served.generate([5], GREEDY)))) == 20


@over_llm(max_running=4, max_waiting=8)
async def test_memory_that_never_suffices_is_seen_by_health(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(served.llm.target, "score", never)
        streams = [served.generate([5, number], GREEDY) for number in range(8)]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
    assert all(isinstance(result, OutOfMemoryError) for result in results)
    assert served.trouble
    assert len(tokens_of(await collect(served.generate([5], GREEDY)))) == 20
    assert served.trouble is None


class Growing(FakeCache):
    """Memory for 1,024 rows."""

    capacity = 256

    def shrink(self, capacity: int) -> None:
        self.capacity = max(capacity, 256, len(self.rows))


@over_llm(max_running=2)
async def test_texts_that_only_together_find_no_memory_are_read_one_by_one(
    served: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, widest, alone = served.llm.target.score, 0, True

    def narrow(batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        nonlocal widest
        widest = max(widest, batch.num_tokens) if alone else widest
        if batch.num_tokens > widest:
            raise MemoryError
        return forward(batch, cache)

    monkeypatch.setattr(served.llm.target, "score", narrow)
    monkeypatch.setattr(FakeCache, "shrink", Growing.shrink)
    expected = [tokens_of(list(served.llm.stream([number], GREEDY))) for number in range(2)]
    alone = False
    with served._scheduler.changed:  # the engine's thread finds all of them
        streams = [served.generate([number], GREEDY) for number in range(2)]
    assert [tokens_of(text) for text in await asyncio.gather(*map(collect, streams))] == expected


class Short(FakeEngine):
    def new_cache(self, salt: str | None = None) -> FakeCache:
        return Growing()

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        assert isinstance(cache, Growing)
        while cache.capacity < cache.speculative + batch.num_tokens:
            if cache.capacity == 1024:
                raise MemoryError
            cache.capacity *= 2
        return super().score(batch, cache)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_full_cache_ends_no_text_because_of_an_empty_one(drafts: bool) -> None:
    """Four texts of 290 tokens. Only the target's cache is full: where plain decoding is planned, a draft reads
    nothing."""
    model, plain = random_model(3, 6), CostModel(passes(0.01, 0.01), passes(0.01, 0.01), FREE, FREE, {})
    pools = PooledEngine(Short(model, 6), 8192), PooledEngine(Short(model, 6, "draft"), 8192)
    budget, params = CacheBudget(8128, 4096, 64, 64), SamplingParams(max_tokens=120, temperature=0)
    scheduler: Scheduler[TokenChunk] = Scheduler(4, pools=pools, slots=budget)
    lengths, errors = Counter[str](), list[BaseException]()

    def steps_of(number: int, config: SpeculativeConfig | None) -> Steps[TokenChunk]:
        prompt = [number, *[1] * 170]
        decoder = SpeculativeDecoder(*pools, config, 4096, (), plain, lambda: scheduler.batch_size)
        sampler = Sampler(params, prompt, (), 6)
        return decoder.steps(prompt, sampler, seeded_streams(0), SpecDecodeStats(), salt=str(number))

    for number in range(4):
        steps = steps_of(number, SpeculativeConfig() if drafts else None)
        slots = budget.needed(171, 120)
        scheduler.add(Request(steps=steps, write=partial(lambda chunk: chunk), num_slots=slots, id=str(number)))
    while scheduler.queue.running:
        for request, chunk, error in scheduler.step():
            lengths[request.id] += len(chunk.token_ids) if chunk else 0
            errors += [] if error is None else [error]
    assert [lengths[name] for name in "01"] == [120, 120]
    assert len(errors) == 2 and all(isinstance(error, OutOfMemoryError) for error in errors)


class Halves(StackedKVCache):
    """Two arrays, the second of which may find no memory."""

    fails = False

    def _allocate(self, capacity: int) -> None:
        self.buffer = np.zeros((2, 1, 1, capacity, 1))
        if self.fails:
            raise MemoryError


def test_a_cache_that_cannot_grow_keeps_its_rows() -> None:
    engine = FakeEngine(lambda context: np.ones(8) / 8, 8)
    cache = Halves(engine.spec)
    cache.buffer[:] = 7
    cache.speculative = 256
    cache.fails = True
    before = cache.buffer
    with pytest.raises(MemoryError):
        cache._replace(512, 256)
    assert cache.buffer is before and cache.capacity == 256 and cache.buffer.min() == 7
    cache.fails = False
    cache._replace(512, 256)
    assert cache.capacity == 512 and cache.buffer[:, :, :, :256].min() == 7


def test_a_text_for_which_there_is_no_memory_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "fewest_tokens", lambda text: 0)
    monkeypatch.setattr(memory, "available_bytes", lambda: MIB)
    with pytest.raises(OutOfMemoryError, match="shorten it"):
        llm.encode("x" * 100_000)
    assert llm.encode("hello")
