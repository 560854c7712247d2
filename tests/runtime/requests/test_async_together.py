"""Requests over one AsyncLLM: whoever comes, goes, fails or gives up, nobody else's text changes. A common beginning is
read once."""

from __future__ import annotations

import asyncio
import gc
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from costs import table
from fakes import POOLED, FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from remembering import RememberingEngine
from together import Timetable, collect, fake_engine, in_step, run, tokens_of, until

from draftwood.models.errors import EngineError, RequestError
from draftwood.runtime import LLM, AsyncLLM, SamplingParams, SpeculativeConfig, StreamChunk
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.backends import BACKENDS
from draftwood.runtime.engines.base import ForwardOutput, KVCache, TokenBatch
from draftwood.runtime.llm import Speculation
from draftwood.runtime.requests.async_llm import DeadlineError

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
POISON = 7
SYSTEM = [8 + index % 7 for index in range(90)]  # longer than a pass


def remembering_engine(self: EngineBundle, role: str, *rest: object) -> RememberingEngine:
    """What EngineBundle.open_engine is replaced by: `fake_engine` with a memory."""
    fake = fake_engine(self, role)
    return RememberingEngine(fake.predict, fake.spec.model.vocab_size, role)


class Pair(NamedTuple):
    """alone: what each text should be. served: the LLM that many use."""

    alone: LLM
    served: LLM


def opened(bundle: Path, engine: Callable[..., Any], *settings: Any) -> LLM:
    """An LLM with other engines than its bundle's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineBundle, "open_engine", engine)
        return LLM(bundle, *settings)


@pytest.fixture(scope="module")
def fakes(tiny_bundle: Path) -> Iterator[Pair]:
    """Rounds are planned by cost and sharing. The pools check whose rows a row sees, and are so small that they are
    tidied up all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, "fake", POOLED)
        pair = Pair(opened(tiny_bundle, fake_engine), opened(tiny_bundle, remembering_engine))
        for llm in pair:
            llm.costs = table(1.0, 0.1, row=0.1)
        yield pair


@pytest.fixture(scope="module", params=["pools", "ONNX Runtime"])
def pair(tiny_bundle: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    if request.param == "pools":
        yield request.getfixturevalue("fakes")
    else:
        with LLM(tiny_bundle, threads=1) as llm:
            assert llm.target.spec.backend == "onnxruntime"
            yield Pair(llm, llm)


class Arrival(NamedTuple):
    """A request. passes: of the target before it comes. end: how it ends before its time, and after how many chunks,
    or passes if there is a deadline."""

    prompt: list[int]
    params: SamplingParams
    how: Speculation
    passes: int
    end: tuple[str, int]


def fails_soon(output: Sequence[int], logits: NDArray[np.float64]) -> NDArray[np.float64]:
    if len(output) > 6:
        raise ZeroDivisionError("on purpose")
    return logits


FIXED: list[Speculation] = [None, SpeculativeConfig("topk", budget="fixed", max_total_draft_tokens=12, merge="gsd")]
FIXED.append(SpeculativeConfig("chain", budget="fixed", max_draft_len=3))
PLANNED: list[Speculation] = ["own", "own", SpeculativeConfig("chain", max_draft_len=3)]
PLANNED.append(SpeculativeConfig("lookup", lookup_ngram=1))


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    """Greedy, or drawn with a seed where proposals do not depend on who else is there. With all candidates, one draw in
    ten thousand would fall upon a rounding edge."""
    seeded = draw(st.booleans())
    params = SamplingParams(
        max_tokens=draw(st.integers(1, 24)),
        temperature=0.8 if seeded else 0.0,
        seed=draw(st.integers(0, 3)) if seeded else None,
        top_k=4 if seeded else 0,
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        logprobs=draw(st.sampled_from([None, 2])),
        ignore_eos=draw(st.booleans()),
        stop=draw(st.sampled_from([(), ("e", "a")])),
    )
    own = draw(st.lists(st.integers(8, 9), max_size=5) | st.lists(st.integers(8, 60), max_size=70))
    prompt = [8, *SYSTEM[: draw(st.sampled_from([0, 20, 63, 64, 65, 90]))], *own]
    kind = draw(st.sampled_from(["", "", "close", "abort", "deadline", "failure"]))
    how = draw(st.sampled_from(FIXED if seeded else [*FIXED, *PLANNED]))
    return Arrival(prompt, params, how, draw(st.integers(0, 25)), (kind, draw(st.integers(0, 4))))


def asked(arrival: Arrival) -> SamplingParams:
    return replace(arrival.params, logits_processors=(fails_soon,)) if arrival.end[0] == "failure" else arrival.params


def alone_with(llm: LLM, arrival: Arrival) -> list[StreamChunk]:
    """The chunks without company. A processor that fails on a proposed path shortens the proposal, here as there."""
    chunks: list[StreamChunk] = []
    with suppress(ZeroDivisionError):
        for chunk in llm.stream(arrival.prompt, asked(arrival), speculative=arrival.how):
            chunks.append(chunk)
    return chunks


async def served_to(served: AsyncLLM, arrival: Arrival, timetable: Timetable) -> list[StreamChunk]:
    """The chunks until the request's end, whatever ended it."""
    await timetable.reach(arrival.passes)
    kind, patience = arrival.end
    deadline = 1 + 2 * patience if kind == "deadline" else None
    stream = served.generate(arrival.prompt, asked(arrival), speculative=arrival.how, deadline_s=deadline)
    chunks: list[StreamChunk] = []
    if kind == "abort" and not patience:
        served.abort(stream.request_id)
    try:
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) >= patience and kind == "abort":
                served.abort(stream.request_id)
            elif len(chunks) > patience and kind == "close":
                await stream.aclose()
    except (DeadlineError, ZeroDivisionError) as error:
        assert kind == ("deadline" if isinstance(error, DeadlineError) else "failure")
    return chunks


@settings(max_examples=40, derandomize=True)  # engines of other rows differ in the last bits
@given(st.lists(arrivals(), min_size=2, max_size=8), st.integers(1, 4), st.sampled_from([0, 1, 100, 1000]))
def test_every_text_is_the_one_it_is_alone(pair: Pair, mix: list[Arrival], max_running: int, slots: int) -> None:
    async def together(served: AsyncLLM) -> list[list[StreamChunk]]:
        with in_step(served) as timetable, pytest.MonkeyPatch.context() as patch:
            for user in ("async_llm", "engine_thread"):  # a pass takes a second
                patch.setattr(f"draftwood.runtime.requests.{user}.monotonic", lambda: timetable.passes)
            return await asyncio.gather(*(served_to(served, arrival, timetable) for arrival in mix))

    found = run(together, pair.served, max_running=max_running, prefix_cache_slots=slots)
    for arrival, chunks in zip(mix, found, strict=True):
        alone = alone_with(pair.alone, arrival)
        (text, tokens), (expected, all_tokens) = (
            ("".join(chunk.text for chunk in each), tokens_of(each)) for each in (chunks, alone)
        )
        if chunks and chunks[-1].finish_reason not in (None, "abort"):
            assert (text, tokens, chunks[-1].finish_reason) == (expected, all_tokens, alone[-1].finish_reason)
        else:
            assert arrival.end[0] and expected.startswith(text) and all_tokens[: len(tokens)] == tokens
        if chunks:
            assert chunks[-1].stats.num_cached_tokens <= (len(arrival.prompt) - 1 if slots else 0)


def crowd(llm: LLM, prompts: Sequence[list[int]], failing: Callable[..., Any]) -> list[list[int] | BaseException]:
    """The tokens or the error of each request, all at once, while the target's passes are done by `failing`; in the end
    the engine is well and says so."""

    async def all_at_once(served: AsyncLLM) -> list[list[int] | BaseException]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.target, "score", failing)
            with served._scheduler.changed:  # the engine's thread finds all of them waiting
                streams = [served.generate(prompt, GREEDY, speculative=None) for prompt in prompts]
            results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        failed = sum(isinstance(result, BaseException) for result in results)
        assert served.accepting and not served.num_running
        assert not failed or f'finish_reason="error"}} {failed}' in served.metrics.to_prometheus({})
        assert tokens_of(await collect(served.generate(prompts[0], GREEDY))) == alone_of(llm, prompts[:1])[0]
        return [tokens_of(result) if isinstance(result, list) else result for result in results]

    return run(all_at_once, llm, max_running=3, max_waiting=3)


def alone_of(llm: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]


PROMPTS = [[10, 11, 12 + number] for number in range(6)]


def test_a_shared_pass_that_fails_once_is_nobodys_fault(pair: Pair) -> None:
    """Now and then a pass of the target fails; each request in it is asked again alone, and that succeeds."""
    score, calls, failed = pair.served.target.score, itertools.count(1), [0]

    def flaky(*arguments: Any) -> Any:
        if (call := next(calls)) - failed[-1] >= 4:
            failed.append(call)
            raise EngineError("out of memory, for the moment")
        return score(*arguments)

    assert crowd(pair.served, PROMPTS, flaky) == alone_of(pair.alone, PROMPTS)
    assert len(failed) > 5


def test_an_engine_that_fails_for_good_fails_everybody_and_comes_back(pair: Pair) -> None:
    score, calls = pair.served.target.score, itertools.count()

    def failing(*arguments: Any) -> Any:
        if next(calls) >= 5:
            raise EngineError("on purpose")
        return score(*arguments)

    assert all(isinstance(result, EngineError) for result in crowd(pair.served, PROMPTS, failing))


def test_an_engine_that_fails_for_one_request_goes_on_for_the_others(fakes: Pair) -> None:
    """A shared pass fails for all in it; each alone then shows whose fault it was."""
    score, shared = fakes.served.target.score, list[int]()

    def poisoned(batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        if POISON in batch.token_ids[: batch.num_tokens]:
            shared.append(batch.num_tokens)
            raise EngineError("the engine cannot read this token")
        return score(batch, cache)

    first, failed, last = crowd(fakes.served, [[10, 11, 12], [POISON, 13, 14], [15, 16, 17]], poisoned)
    assert isinstance(failed, EngineError) and sum(tokens > 2 for tokens in shared) == 1
    assert [first, last] == alone_of(fakes.alone, [[10, 11, 12], [15, 16, 17]])


@pytest.mark.parametrize("where", ["engine", "request"])
def test_an_error_that_somebody_keeps_keeps_no_caches(fakes: Pair, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    score, passes = FakeEngine.score, itertools.count()

    def fails(*_: object) -> NoReturn:
        raise EngineError("on purpose")

    def fails_after_three(self: FakeEngine, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        """The first passes work, so that there are caches; they are too few to finish a text."""
        return score(self, batch, cache) if next(passes) < 3 else fails()

    async def failing(served: AsyncLLM) -> BaseException:
        params = GREEDY if where == "engine" else replace(GREEDY, logits_processors=(fails,))
        if where == "engine":
            monkeypatch.setattr(FakeEngine, "score", fails_after_three)
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
        error = run(failing, fakes.alone)
    finally:
        gc.enable()
    assert "fails" in "".join(traceback.format_exception(error))


def test_what_was_read_before_is_counted_and_a_conversation_goes_on_behind_it(fakes: Pair) -> None:
    said = [*SYSTEM, *alone_of(fakes.alone, [SYSTEM])[0]]
    prompts = [SYSTEM, [*SYSTEM, 8], [*SYSTEM, 60, 9], [9], [*said, 9, 9, 9]]

    async def one_by_one(served: AsyncLLM) -> tuple[list[int], str]:
        found = [(await collect(served.generate(prompt, GREEDY)))[-1].stats.num_cached_tokens for prompt in prompts]
        return found, served.metrics.to_prometheus({})

    found, metrics = run(one_by_one, fakes.served, prefix_cache_slots=1000)
    assert found == [0, 90, 90, 0, len(said) - 1], "the last token of a text is in no cache"
    assert f"vllm:prefix_cache_queries_total {sum(map(len, prompts))}.0\n" in metrics
    assert f"vllm:prefix_cache_hits_total {sum(found)}.0\n" in metrics
    assert run(one_by_one, fakes.served, prefix_cache_slots=0)[0] == [0] * 5


def test_requests_that_come_together_read_a_prompt_once(fakes: Pair) -> None:
    """Nobody has read it when they come; they follow the first through it, chunk by chunk. Only its end, which is
    shorter than a pass, is read by as many as fit."""
    target = fakes.served.target
    assert isinstance(target, RememberingEngine)

    async def at_once(served: AsyncLLM, number: int) -> None:
        with served._scheduler.changed:  # the engine's thread finds all of them
            streams = [served.generate(SYSTEM, GREEDY, speculative=None) for _ in range(number)]
        await asyncio.gather(*map(collect, streams))

    def rows(number: int) -> int:
        before = target.scored
        run(lambda served: at_once(served, number), fakes.served, prefix_cache_slots=1000)
        return target.scored - before

    assert 0 <= rows(6) - rows(1) - 5 * GREEDY.max_tokens <= target.spec.max_width


def test_requests_tell_nothing_of_those_with_another_salt(fakes: Pair) -> None:
    (text,) = alone_of(fakes.alone, [SYSTEM])

    async def cached(served: AsyncLLM, salt: str | None) -> int:
        chunks = await collect(served.generate(SYSTEM, GREEDY, cache_salt=salt))
        assert tokens_of(chunks) == text
        return chunks[-1].stats.num_cached_tokens

    async def one_by_one(served: AsyncLLM) -> None:
        assert [await cached(served, salt) for salt in ("a", "a", "b", None, "b", None)] == [0, 89, 0, 0, 89, 89]
        with pytest.raises(RequestError, match="must not be empty"):
            served.generate(SYSTEM, GREEDY, cache_salt="")

    async def at_once(served: AsyncLLM) -> None:
        salts = [f"tenant {number}" for number in range(4)]
        assert await asyncio.gather(*(cached(served, salt) for salt in salts)) == [0] * 4

    run(one_by_one, fakes.served)
    run(at_once, fakes.served)
