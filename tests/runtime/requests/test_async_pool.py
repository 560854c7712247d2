"""AsyncLLM over pooled engines: whoever comes, goes, fails or gives up, nobody else's text changes."""

from __future__ import annotations

import asyncio
import gc
import itertools
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
from costs import table
from fakes import POOLED, FakeCache, FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from together import Timetable, collect, fake_engine, in_step, run, tokens_of, until

from draftwood.models.errors import EngineError
from draftwood.runtime import LLM, AsyncLLM, SamplingParams, SpeculativeConfig, StreamChunk
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.backends import BACKENDS
from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch
from draftwood.runtime.llm import Speculation

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
POISON = 7


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    """Rounds are planned by cost and sharing; the pools are so small that they are tidied up all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineBundle, "open_engine", fake_engine)
        patch.setitem(BACKENDS, "fake", POOLED)
        patch.setattr(FakeCache, "capacity", 96)
        opened = LLM(tiny_bundle)
        opened._costs = table(1.0, 0.1, row=0.1)
        yield opened


class Arrival(NamedTuple):
    """A request. passes: of the target before it comes. chunks: it reads before it gives up."""

    prompt: list[int]
    params: SamplingParams
    how: Speculation
    passes: int
    chunks: int | None


def speculations() -> st.SearchStrategy[Speculation]:
    own: Speculation = "own"
    chain = SpeculativeConfig("chain", max_draft_len=3)
    fixed = SpeculativeConfig("topk", budget="fixed", max_total_draft_tokens=12, merge="gsd")
    return st.sampled_from([own, own, None, chain, fixed, SpeculativeConfig(lookup_ngram=1)])


arrivals = st.builds(
    Arrival,
    prompt=st.lists(st.integers(8, 60), min_size=1, max_size=70),
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 24),
        temperature=st.just(0.0),
        repetition_penalty=st.sampled_from([1.0, 1.2]),
        stop=st.sampled_from([(), ("e", "a")]),
    ),
    how=speculations(),
    passes=st.integers(0, 25),
    chunks=st.none() | st.integers(0, 4),
)


async def served_to(served: AsyncLLM, arrival: Arrival, timetable: Timetable) -> list[StreamChunk]:
    await timetable.reach(arrival.passes)
    stream = served.generate(arrival.prompt, arrival.params, speculative=arrival.how)
    if arrival.chunks == 0:
        served.abort(stream.request_id)
    chunks: list[StreamChunk] = []
    async for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == arrival.chunks:
            served.abort(stream.request_id)
    return chunks


@settings(max_examples=50)
@given(st.lists(arrivals, min_size=2, max_size=8), st.integers(1, 4))
def test_who_comes_and_goes_changes_nobodys_text(llm: LLM, mix: list[Arrival], max_running: int) -> None:
    async def together(served: AsyncLLM) -> list[list[StreamChunk]]:
        with in_step(served) as timetable:
            return await asyncio.gather(*(served_to(served, arrival, timetable) for arrival in mix))

    for arrival, chunks in zip(mix, run(together, llm, max_running=max_running), strict=True):
        alone = list(llm.stream(arrival.prompt, arrival.params, speculative=arrival.how))
        text, expected = ("".join(chunk.text for chunk in each) for each in (chunks, alone))
        tokens, reason = tokens_of(chunks), chunks[-1].finish_reason
        if reason == "abort":
            assert arrival.chunks is not None and expected.startswith(text)
            assert tokens_of(alone)[: len(tokens)] == tokens
        else:
            assert (text, tokens, reason) == (expected, tokens_of(alone), alone[-1].finish_reason)


def test_an_engine_that_fails_for_one_request_goes_on_for_the_others(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared pass fails for all in it; each alone then shows whose fault it was."""
    score = FakeEngine.score
    shared = 0

    def poisoned(self: FakeEngine, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        nonlocal shared
        if POISON in batch.token_ids[: batch.num_tokens]:
            shared += batch.num_tokens > 2
            raise EngineError("the engine cannot read this token")
        return score(self, batch, cache)

    async def mixed(served: AsyncLLM) -> list[list[StreamChunk] | BaseException]:
        prompts = [[10, 11, 12], [POISON, 13, 14], [15, 16, 17]]
        with served._scheduler.changed:  # the engine's thread finds all of them waiting
            streams = [served.generate(prompt, GREEDY, speculative=None) for prompt in prompts]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert served.accepting and 'finish_reason="error"} 1' in served.metrics.to_prometheus({})
        return results

    expected = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in ([10, 11, 12], [15, 16, 17])]
    monkeypatch.setattr(FakeEngine, "score", poisoned)
    first, failed, last = run(mixed, llm)
    assert isinstance(failed, EngineError) and shared == 1
    assert isinstance(first, list) and isinstance(last, list)
    assert [tokens_of(first), tokens_of(last)] == expected


@pytest.mark.parametrize("where", ["engine", "request"])
def test_an_error_that_somebody_keeps_keeps_no_caches(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    score, passes = FakeEngine.score, itertools.count()

    def fails(*_: object) -> NoReturn:
        raise EngineError("on purpose")

    def fails_soon(self: FakeEngine, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        """The first passes work, so that there are caches; they are too few to finish a text."""
        return score(self, batch, cache) if next(passes) < 3 else fails()

    async def failing(served: AsyncLLM) -> BaseException:
        params = GREEDY if where == "engine" else replace(GREEDY, logits_processors=(fails,))
        if where == "engine":
            monkeypatch.setattr(FakeEngine, "score", fails_soon)
        with served._scheduler.changed:  # the engine's thread finds both waiting
            streams = [served.generate([number, 11, 12], params) for number in (20, 30)]
        kept = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        errors = [error for error in kept if isinstance(error, EngineError)]
        pools: Sequence[Any] = served._scheduler.pools
        assert len(errors) == len(pools) == 2
        await until(lambda: not any(pool.caches for pool in pools))  # the engine's thread may not have left its frame
        return errors[0]

    gc.collect()
    gc.disable()
    try:
        error = run(failing, llm)
    finally:
        gc.enable()
    assert "fails" in "".join(traceback.format_exception(error))


def test_a_real_engine_serves_many_as_it_serves_each(tiny_bundle: Path) -> None:
    """ONNX Runtime, draft and target in pools: greedy texts, and sampled ones with a seed."""
    hows: list[Speculation] = ["own", None, SpeculativeConfig("chain", budget="fixed", max_draft_len=3)]
    requests: list[tuple[str, SamplingParams, Speculation]] = [
        (f"{'again and ' * number}prompt {number}", params, hows[number % 3])
        for number in range(6)
        for params in (GREEDY, SamplingParams(max_tokens=16, seed=number, ignore_eos=True))
    ]

    async def together(served: AsyncLLM) -> list[list[StreamChunk]]:
        streams = [served.generate(prompt, params, speculative=how) for prompt, params, how in requests]
        return await asyncio.gather(*map(collect, streams))

    with LLM(tiny_bundle, SpeculativeConfig(budget="fixed"), threads=1) as llm:
        texts = [tokens_of(chunks) for chunks in run(together, llm, max_running=4)]
        alone = [tokens_of(list(llm.stream(prompt, params, speculative=how))) for prompt, params, how in requests]
    assert texts == alone
