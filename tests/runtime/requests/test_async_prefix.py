"""Requests with a common beginning over one AsyncLLM: it is read once, and no text changes because of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from costs import table
from fakes import POOLED
from hypothesis import given, settings
from hypothesis import strategies as st
from remembering import RememberingEngine
from together import Timetable, collect, fake_engine, in_step, run, tokens_of

from draftwood.models.errors import ConfigError
from draftwood.runtime import LLM, AsyncLLM, SamplingParams, SpeculativeConfig, StreamChunk
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.backends import BACKENDS
from draftwood.runtime.llm import Speculation

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SYSTEM = [8 + index % 7 for index in range(90)]  # longer than a pass
HOWS: list[Speculation] = ["own", None, SpeculativeConfig("topk", budget="fixed", merge="gsd"), SpeculativeConfig()]


def remembering_engine(self: EngineBundle, role: str, *rest: object) -> RememberingEngine:
    """What EngineBundle.open_engine is replaced by: `fake_engine` with a memory."""
    fake = fake_engine(self, role)
    return RememberingEngine(fake.predict, fake.spec.model.vocab_size, role)


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    """Rounds are planned by cost; requests that run alone have caches of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineBundle, "open_engine", fake_engine)
        patch.setitem(BACKENDS, "fake", POOLED)
        opened = LLM(tiny_bundle)
        opened._costs = table(1.0, 0.1, row=0.1)
        yield opened


@pytest.fixture(scope="module")
def pooled(llm: LLM) -> Iterator[LLM]:
    """The same for pools, which check whose rows a row sees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineBundle, "open_engine", remembering_engine)
        opened = LLM(llm.bundle.folder)
        opened._costs = llm._costs
        yield opened


class Arrival(NamedTuple):
    """A request for the first `shared` tokens of a common text and `own` ones. seed: None is greedy. passes: of the
    target before it comes. chunks: it reads before it gives up."""

    shared: int
    own: list[int]
    seed: int | None
    how: Speculation
    passes: int
    chunks: int | None

    @property
    def prompt(self) -> list[int]:
        return [8, *SYSTEM[: self.shared], *self.own]

    @property
    def params(self) -> SamplingParams:
        temperature = 0.0 if self.seed is None else 1.0
        return SamplingParams(max_tokens=10, temperature=temperature, seed=self.seed, ignore_eos=True)


arrivals = st.builds(
    Arrival,
    shared=st.sampled_from([0, 20, 63, 64, 65, 90]),
    own=st.lists(st.integers(8, 9), max_size=5),
    seed=st.none() | st.integers(0, 3),
    how=st.sampled_from(HOWS),
    passes=st.integers(0, 25),
    chunks=st.none() | st.none() | st.integers(1, 3),
)


async def served_to(served: AsyncLLM, arrival: Arrival, timetable: Timetable) -> list[StreamChunk]:
    await timetable.reach(arrival.passes)
    stream, chunks = served.generate(arrival.prompt, arrival.params, speculative=arrival.how), list[StreamChunk]()
    async for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == arrival.chunks:
            served.abort(stream.request_id)
    return chunks


@settings(max_examples=40)
@given(st.lists(arrivals, min_size=2, max_size=8), st.integers(1, 4), st.sampled_from([0, 1, 100, 1000]))
def test_a_common_beginning_changes_nobodys_text(
    llm: LLM, pooled: LLM, mix: list[Arrival], max_running: int, slots: int
) -> None:
    """Greedy, or drawn with a seed; planned by cost or not; whoever gives up, and however often rows are moved."""

    async def together(served: AsyncLLM) -> list[list[StreamChunk]]:
        with in_step(served) as timetable:
            return await asyncio.gather(*(served_to(served, arrival, timetable) for arrival in mix))

    served = run(together, pooled, max_running=max_running, prefix_cache_slots=slots)
    for arrival, chunks in zip(mix, served, strict=True):
        alone = tokens_of(list(llm.stream(arrival.prompt, arrival.params, speculative=arrival.how)))
        tokens = tokens_of(chunks)
        assert tokens == (alone[: len(tokens)] if chunks[-1].finish_reason == "abort" else alone)
        assert chunks[-1].stats.num_cached_tokens <= (len(arrival.prompt) - 1 if slots else 0)


def ask(
    pooled: LLM, prompts: Sequence[list[int]], at_once: bool, slots: int = 1000, how: Speculation = "own"
) -> list[StreamChunk]:
    """The last chunk of each request, one after another or all at once."""

    async def asked(served: AsyncLLM) -> list[StreamChunk]:
        if at_once:
            with served._scheduler.changed:  # the engine's thread finds all of them
                streams = [served.generate(prompt, GREEDY, speculative=how) for prompt in prompts]
            return [chunks[-1] for chunks in await asyncio.gather(*map(collect, streams))]
        return [(await collect(served.generate(prompt, GREEDY, speculative=how)))[-1] for prompt in prompts]

    return run(asked, pooled, prefix_cache_slots=slots)


def test_what_was_read_of_a_prompt_is_counted(pooled: LLM) -> None:
    prompts = [[*SYSTEM, 8], [*SYSTEM, 8], [*SYSTEM, 9, 9], [9]]
    assert [last.stats.num_cached_tokens for last in ask(pooled, prompts, at_once=False)] == [0, 90, 90, 0]
    assert [last.stats.num_cached_tokens for last in ask(pooled, prompts, at_once=False, slots=0)] == [0] * 4


def test_a_conversation_goes_on_behind_what_was_said(pooled: LLM, llm: LLM) -> None:
    said = [*SYSTEM, *llm.generate(SYSTEM, GREEDY)[0].token_ids]
    _, last = ask(pooled, [SYSTEM, [*said, 9, 9, 9]], at_once=False)
    assert last.stats.num_cached_tokens == len(said) - 1, "the last token of a text is in no cache"


def test_requests_that_come_together_read_a_prompt_once(pooled: LLM) -> None:
    """Nobody has read it when they come; they follow the first through it, chunk by chunk. Only its end, which is
    shorter than a pass, is read by as many as fit."""
    target = pooled.target
    assert isinstance(target, RememberingEngine)

    def rows(number: int) -> int:
        before = target.scored
        ask(pooled, [SYSTEM] * number, at_once=True, how=None)
        return target.scored - before

    twice = rows(6) - rows(1) - 5 * GREEDY.max_tokens
    assert 0 <= twice <= target.spec.max_width


def test_counters_say_how_much_was_found(pooled: LLM) -> None:
    async def counted(served: AsyncLLM) -> str:
        for _ in range(2):
            await collect(served.generate(SYSTEM, GREEDY))
        return served.metrics.to_prometheus({})

    text = run(counted, pooled)
    assert "vllm:prefix_cache_queries_total 180.0\n" in text and "vllm:prefix_cache_hits_total 89.0\n" in text
    with pytest.raises(ConfigError, match="prefix_cache_slots"):
        AsyncLLM(pooled, prefix_cache_slots=-1)


def test_a_real_engine_writes_the_same_with_and_without(tiny_bundle: Path) -> None:
    """ONNX Runtime, a burst and then a second one, greedy and with a seed."""
    system = "You answer shortly. " * 8
    requests = [
        (f"{system}Question {number % 3}.", SamplingParams(max_tokens=12, temperature=t, seed=number, ignore_eos=True))
        for number in range(6)
        for t in (0.0, 0.9)
    ]

    async def together(served: AsyncLLM) -> list[list[StreamChunk]]:
        first = await asyncio.gather(*(collect(served.generate(*request)) for request in requests))
        return [*first, *await asyncio.gather(*(collect(served.generate(*request)) for request in requests))]

    with LLM(tiny_bundle, SpeculativeConfig(budget="fixed"), threads=1) as llm:
        shared, apart = (run(together, llm, max_running=5, prefix_cache_slots=slots) for slots in (1024, 0))
        alone = [tokens_of(list(llm.stream(*request))) for request in requests]
    assert list(map(tokens_of, shared)) == list(map(tokens_of, apart)) == [*alone, *alone]
    assert all(chunks[-1].stats.num_cached_tokens > len(system) // 2 for chunks in shared[len(requests) :])
