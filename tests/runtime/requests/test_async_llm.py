"""AsyncLLM: many requests over one LLM; fair, isolated, and each as it would be alone."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from together import PATIENCE_S, WatchedEngine, collect, held, over_llm, run, tokens_of, until

from draftwood.models.errors import ConfigError, RequestError
from draftwood.runtime import LLM, AsyncLLM, QueueFullError, SamplingParams, SpeculativeConfig, StreamChunk
from draftwood.runtime.decoding.request import Request
from draftwood.runtime.llm import Speculation
from draftwood.runtime.requests.async_llm import DeadlineError, ShutdownError

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)


def test_a_request_gives_the_chunks_of_the_llm(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, seed=5, logprobs=2, ignore_eos=True)
    chunks = run(lambda served: collect(served.generate("hello", params)), llm)
    expected = list(llm.stream("hello", params))
    assert [chunk[:5] for chunk in chunks] == [chunk[:5] for chunk in expected]
    assert chunks[-1].stats.accepted_per_round == expected[-1].stats.accepted_per_round


def test_rounds_take_turns(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two running, the third waits; the two get a round each, in turn."""
    turns: list[str] = []

    async def three(served: AsyncLLM) -> None:
        def noted(request: Request[StreamChunk], chunk: StreamChunk) -> None:
            turns.append(request.id)
            record(request, chunk)

        record = served._record
        monkeypatch.setattr(served, "_record", noted)
        with served._scheduler.changed:  # none starts before all are there
            streams = [served.generate("same prompt", LONG, request_id=name) for name in "abc"]
            assert (served.num_running, served.num_waiting) == (2, 1)
        await asyncio.gather(*map(collect, streams))

    run(three, llm, max_running=2)
    rounds = turns.count("a")
    assert rounds > 20 and turns.count("b") == turns.count("c") == rounds
    shared = turns[: turns.index("c")]
    for end in range(len(shared)):  # a round has several passes: one may be ahead by that, never by more
        assert abs(shared[:end].count("a") - shared[:end].count("b")) <= 2


@over_llm(max_running=1, max_waiting=2)
async def test_a_full_queue_refuses_at_once(served: AsyncLLM) -> None:
    with served._scheduler.changed:  # none ends before all were sent
        streams = [served.generate("x", LONG) for _ in range(3)]
        with pytest.raises(QueueFullError, match="max-waiting"):
            served.generate("x", LONG)
        await streams[0].aclose()
    assert [len(tokens_of(await collect(stream))) for stream in streams[1:]] == [200, 200]
    served.generate("x", LONG)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "named"),
    [
        ("x" * 5000, {}, RequestError, "shorten it"),
        ([10**6], {}, RequestError, "1000000"),
        ("x", {"sampling_params": SamplingParams(stop_token_ids=(10**6,))}, RequestError, "stop_token_ids"),
        ("x", {"speculative": SpeculativeConfig("topk", max_total_draft_tokens=64)}, ConfigError, "widest pass"),
        ("x", {"deadline_s": 0}, RequestError, "deadline_s"),
        ("x", {"deadline_s": "5"}, RequestError, "deadline_s must be positive seconds, not '5'"),
        ("x", {"deadline_s": 10**400}, RequestError, "deadline_s"),
        ("x", {"client": ["x"]}, RequestError, "client must be hashable"),
        ("x", {"user": ["x"]}, RequestError, "user must be hashable"),
        ("x", {"call": ["x"]}, RequestError, "call must be hashable"),
        ("x", {"cache_salt": ["x"]}, RequestError, "cache_salt must be text"),
    ],
)
@over_llm()
async def test_bad_input_is_refused_before_it_is_queued(
    served: AsyncLLM, prompt: str | list[int], options: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        served.generate(prompt, **options)
    assert served.num_running == served.num_waiting == 0


@over_llm(max_running=1)
async def test_a_request_can_be_aborted_by_its_id(served: AsyncLLM) -> None:
    with held(served.llm.target, passes=6):
        stream, waiting = served.generate("x", LONG, request_id="one"), served.generate("x", LONG, request_id="two")
        with pytest.raises(RequestError, match="'one' is in progress"):
            served.generate("x", request_id="one")
        await anext(stream)
        assert served.abort("two") and served.abort("one") and not served.abort("three")
    rest, never_ran = await collect(stream), await collect(waiting)
    assert rest[-1].finish_reason == "abort" and rest[-1].stats.num_tokens >= len(tokens_of(rest))
    assert [chunk.finish_reason for chunk in never_ran] == ["abort"] and not tokens_of(never_ran)
    assert served.num_running == served.num_waiting == 0
    assert 'requests_total{finish_reason="abort"} 2' in served.metrics.to_prometheus({})


@pytest.mark.parametrize("way", ["close", "cancel", "drop"])
@over_llm()
async def test_a_consumer_that_goes_away_frees_the_engine(served: AsyncLLM, way: str) -> None:
    with held(served.llm.target, passes=6):
        stream = served.generate("x", LONG)
        await anext(stream)
        if way == "close":
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        elif way == "cancel":
            task = asyncio.create_task(collect(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            del stream
    assert await served.drain(PATIENCE_S)
    assert 'requests_total{finish_reason="abort"} 1' in served.metrics.to_prometheus({})


@over_llm(max_running=1)
async def test_a_deadline_ends_the_running_and_the_waiting(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a pass takes 20 ms."""
    score, passes = served.llm.target.score, 0

    def slowly(*_: object) -> NDArray[np.float64]:
        raise AssertionError("the waiting request has run")

    def counted(*arguments: Any) -> Any:
        nonlocal passes
        passes += 1
        return score(*arguments)

    monkeypatch.setattr(served.llm.target, "score", counted)
    for user in ("async_llm", "engine_thread"):
        monkeypatch.setattr(f"draftwood.runtime.requests.{user}.monotonic", lambda: passes / 50)
    with served._scheduler.changed:  # the engine's thread finds both
        running = served.generate("x", SamplingParams(max_tokens=200, seed=0, ignore_eos=True), deadline_s=0.5)
        params = SamplingParams(logits_processors=(slowly,))
        waiting = served.generate("x", params, deadline_s=0.01)
    chunks = []
    with pytest.raises(DeadlineError, match=r"0\.5 s"):
        async for chunk in running:
            chunks.append(chunk)
    assert chunks and passes == 25
    with pytest.raises(DeadlineError, match=r"0\.01 s"):
        await anext(waiting)
    assert len(tokens_of(await collect(served.generate("x", GREEDY, deadline_s=20)))) == 12


@over_llm(max_running=2)
async def test_draining_finishes_what_runs_and_takes_nothing_more(served: AsyncLLM) -> None:
    with held(served.llm.target):
        tasks = [asyncio.create_task(collect(served.generate("x", LONG))) for _ in range(3)]
        await asyncio.sleep(0)
        assert not await served.drain(0.001)
        with pytest.raises(ShutdownError, match="stopping"):
            served.generate("x", GREEDY)
    assert await served.drain() and not served.accepting
    assert [len(tokens_of(await task)) for task in tasks] == [200] * 3


@over_llm(max_running=2)
async def test_closing_ends_everybody(served: AsyncLLM) -> None:
    with held(served.llm.target, passes=6):
        streams = [served.generate("x", LONG) for _ in range(3)]
        await anext(streams[0])
        closing = asyncio.create_task(asyncio.to_thread(served.close))
        await until(lambda: not served.alive)  # it waits for the pass
    await closing
    for stream in streams:
        with pytest.raises(ShutdownError):
            await collect(stream)
    with pytest.raises(ShutdownError):
        served.generate("x", GREEDY)


@over_llm()
async def test_nobody_waits_for_ever_when_the_engine_thread_breaks(
    served: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.metrics, "record_round", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await collect(served.generate("x", GREEDY))
    assert not served.accepting


def test_caches_do_not_outlive_their_requests(llm: LLM) -> None:
    async def many(served: AsyncLLM) -> None:
        hows: list[Speculation] = ["own", None, SpeculativeConfig("chain")]
        for _ in range(6):
            streams = [served.generate("x", GREEDY, speculative=how) for how in hows * 3]
            for stream in streams[::4]:
                await stream.aclose()
            await asyncio.gather(*map(collect, streams))
            assert all(len(engine.caches) <= 4 for engine in engines)  # 3 running; one idle while another is made

    gc.collect()
    engines = [engine for engine in (llm.target, llm.draft) if isinstance(engine, WatchedEngine)]
    assert len(engines) == 2
    llm._idle.clear()
    run(many, llm, max_running=3)
    gc.collect()
    assert all(len(engine.caches) == len(llm._idle) <= 3 for engine in engines)


def test_memory_for_caches_lowers_what_runs(llm: LLM) -> None:
    each = llm.kv_cache_bytes
    with AsyncLLM(llm, max_running=8, kv_cache_bytes=3 * each + 1) as served:
        assert served.max_running == 3
    with AsyncLLM(llm, max_running=2, kv_cache_bytes=30 * each) as served:
        assert served.max_running == 2
    with pytest.raises(ConfigError, match=f"{each} bytes"):
        AsyncLLM(llm, kv_cache_bytes=each - 1)


def test_a_bundle_is_opened_and_closed_with_it(tiny_bundle: Path) -> None:
    async def one() -> list[int]:
        with AsyncLLM(tiny_bundle, speculative=None) as served:
            with pytest.raises(ConfigError, match="without its draft"):
                served.generate("x", speculative=SpeculativeConfig())
            looked_up = await collect(served.generate("hello", GREEDY, speculative=SpeculativeConfig("lookup")))
            assert looked_up[-1].stats.expected_tokens > 0, "planned by costs"
            return tokens_of(looked_up)

    with LLM(tiny_bundle) as llm:
        assert asyncio.run(one()) == llm.generate("hello", GREEDY)[0].token_ids
    for wrong in ({"max_pause_ms": 0}, {"prefix_cache_slots": -1}, {"kv_cache_bytes": 1}):
        with pytest.raises(ConfigError):
            AsyncLLM(tiny_bundle, **wrong)
