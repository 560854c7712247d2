"""An engine that fails at every pass: health says so, and one round that goes well ends it."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import pytest
from together import PATIENCE_S, collect, in_step, over_llm, tokens_of, until

from draftwood.models.errors import EngineError, RequestError
from draftwood.runtime import AsyncLLM, SamplingParams
from draftwood.runtime.requests.health import MAX_FAILURES
from draftwood.runtime.serving.triton.model import TritonModel

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
HEALTHY = "draftwood_engine_healthy"


def broken(*_: Any) -> Any:
    raise EngineError("an illegal memory access")


async def fail(served: AsyncLLM, times: int) -> None:
    for _ in range(times):
        with pytest.raises(EngineError, match="illegal"):
            await collect(served.generate("hello", GREEDY))


@over_llm()
async def test_it_takes_several_requests_and_one_round_ends_it(
    served: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's passes go well all the time: they alone make no text."""
    model = TritonModel()
    model._engine = served
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(served.llm.target, "score", broken)
            await fail(served, MAX_FAILURES - 1)
            assert served.trouble is None
            await fail(served, 1)
            assert served.trouble and served.alive and served.accepting and not model.is_ready()
            assert f"\n{HEALTHY} 0.0\n" in served.to_prometheus()
            await fail(served, 3)
            assert served.trouble
        assert len(tokens_of(await collect(served.generate("hello", GREEDY)))) == 6
        assert served.trouble is None and f"\n{HEALTHY} 1.0\n" in served.to_prometheus() and model.is_ready()


@over_llm()
async def test_requests_that_fail_while_another_goes_well_say_nothing(served: AsyncLLM) -> None:
    def fails(*_: Any) -> Any:
        raise EngineError("an illegal memory access")

    failing = SamplingParams(max_tokens=6, logits_processors=(fails,))
    with in_step(served):  # else the other one might be far ahead of its reader
        other = served.generate("other", SamplingParams(max_tokens=4000, ignore_eos=True))
        for _ in range(3 * MAX_FAILURES):
            with pytest.raises(EngineError):
                await collect(served.generate("hello", failing))
            assert served.num_running == 1
            await anext(other)
            assert served.trouble is None


@over_llm()
async def test_clients_cannot_make_it_look_broken(served: AsyncLLM) -> None:
    vocabulary = tuple(range(served.llm.bundle.manifest.engines["target"].model.vocab_size))
    impossible = SamplingParams(min_tokens=5, max_tokens=6, stop_token_ids=vocabulary)
    for _ in range(2 * MAX_FAILURES):
        with pytest.raises(RequestError, match="no token is left"):
            await collect(served.generate("hello", impossible))
        stream = served.generate("hello", GREEDY)
        await stream.aclose()
    assert await served.drain(PATIENCE_S) and served.trouble is None


@over_llm(max_running=MAX_FAILURES)
async def test_a_crowd_that_fails_at_the_same_time_counts_as_many(
    served: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.llm.target, "score", broken)
    streams = [served.generate(f"hello {number}", GREEDY) for number in range(MAX_FAILURES)]
    results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
    assert all(isinstance(result, EngineError) for result in results)
    assert served.trouble


@over_llm(max_running=MAX_FAILURES)
async def test_choices_of_one_call_that_fail_count_once(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.llm.target, "score", broken)
    for call in range(MAX_FAILURES):
        assert served.trouble is None
        streams = [served.generate("hello", GREEDY, call=call) for _ in range(MAX_FAILURES)]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
    assert served.trouble


@over_llm()
async def test_a_pass_without_an_end_is_seen_while_it_lasts(served: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, reached, go = served.llm.target.score, Event(), Event()

    def hanging(*arguments: Any) -> Any:
        reached.set()
        assert go.wait(PATIENCE_S)
        return forward(*arguments)

    monkeypatch.setattr(served.llm.target, "score", hanging)
    stream = served.generate("hello", GREEDY)
    await asyncio.to_thread(reached.wait, PATIENCE_S)
    assert served.trouble is None
    monkeypatch.setattr("draftwood.runtime.requests.health.MAX_PASS_SECONDS", 0.01)
    await asyncio.sleep(0.02)
    assert str(served.trouble).startswith("stuck: a pass") and f"\n{HEALTHY} 0.0\n" in served.to_prometheus()
    go.set()
    assert len(tokens_of(await collect(stream))) == 6
    await until(lambda: served.trouble is None)  # the engine's thread may not have left the pass yet
    await asyncio.sleep(0.02)
    assert served.trouble is None  # an engine that waits for work is not stuck
