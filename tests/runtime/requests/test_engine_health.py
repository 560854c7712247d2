"""An engine that fails at every pass: health says so, and one round that goes well ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from fakes import POOLED
from together import PATIENCE_S, collect, fake_engine, in_step, run, tokens_of, until

from draftwood.models.errors import EngineError, RequestError
from draftwood.runtime import LLM, AsyncLLM, SamplingParams, SpeculativeConfig
from draftwood.runtime.bundle.bundle import EngineBundle
from draftwood.runtime.engines.backends import BACKENDS, UNLISTED
from draftwood.runtime.requests.health import MAX_FAILURES
from draftwood.runtime.serving.triton.model import TritonModel

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
HEALTHY = "draftwood_engine_healthy"


@pytest.fixture(scope="module", params=["pooled", "one by one"])
def llm(tiny_bundle: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineBundle, "open_engine", fake_engine)
        patch.setitem(BACKENDS, "fake", POOLED if request.param == "pooled" else UNLISTED)
        yield LLM(tiny_bundle, SpeculativeConfig(budget="fixed"))


def broken(*_: Any) -> Any:
    raise EngineError("an illegal memory access")


async def fail(served: AsyncLLM, times: int) -> None:
    for _ in range(times):
        with pytest.raises(EngineError, match="illegal"):
            await collect(served.generate("hello", GREEDY))


def test_it_takes_several_requests_and_one_round_ends_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's passes go well all the time: they alone make no text."""
    model = TritonModel()

    async def work(served: AsyncLLM) -> None:
        model._engine = served
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(llm.target, "score", broken)
                await fail(served, MAX_FAILURES - 1)
                assert served.trouble is None
                await fail(served, 1)
                assert served.trouble and served.alive and served.accepting and not model.is_ready()
                assert f"\n{HEALTHY} 0.0\n" in served.to_prometheus()
                await fail(served, 3)
                assert served.trouble
            assert len(tokens_of(await collect(served.generate("hello", GREEDY)))) == 6
            assert served.trouble is None and f"\n{HEALTHY} 1.0\n" in served.to_prometheus() and model.is_ready()

    run(work, llm)


def test_requests_that_fail_while_another_goes_well_say_nothing(llm: LLM) -> None:
    def fails(*_: Any) -> Any:
        raise EngineError("an illegal memory access")

    async def work(served: AsyncLLM) -> None:
        failing = SamplingParams(max_tokens=6, logits_processors=(fails,))
        with in_step(served):  # else the other one might be far ahead of its reader
            other = served.generate("other", SamplingParams(max_tokens=4000, ignore_eos=True))
            for _ in range(3 * MAX_FAILURES):
                with pytest.raises(EngineError):
                    await collect(served.generate("hello", failing))
                assert served.num_running == 1
                await anext(other)
                assert served.trouble is None

    run(work, llm)


def test_clients_cannot_make_it_look_broken(llm: LLM) -> None:
    vocabulary = tuple(range(llm.bundle.manifest.engines["target"].model.vocab_size))
    impossible = SamplingParams(min_tokens=5, max_tokens=6, stop_token_ids=vocabulary)

    async def work(served: AsyncLLM) -> None:
        for _ in range(2 * MAX_FAILURES):
            with pytest.raises(RequestError, match="no token is left"):
                await collect(served.generate("hello", impossible))
            stream = served.generate("hello", GREEDY)
            await stream.aclose()
        assert await served.drain(PATIENCE_S) and served.trouble is None

    run(work, llm)


def test_a_crowd_that_fails_at_the_same_time_counts_as_many(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(served: AsyncLLM) -> None:
        monkeypatch.setattr(llm.target, "score", broken)
        streams = [served.generate(f"hello {number}", GREEDY) for number in range(MAX_FAILURES)]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        assert served.trouble

    run(work, llm, max_running=MAX_FAILURES)


def test_choices_of_one_call_that_fail_count_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(served: AsyncLLM) -> None:
        monkeypatch.setattr(llm.target, "score", broken)
        for call in range(MAX_FAILURES):
            assert served.trouble is None
            streams = [served.generate("hello", GREEDY, call=call) for _ in range(MAX_FAILURES)]
            results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
            assert all(isinstance(result, EngineError) for result in results)
        assert served.trouble

    run(work, llm, max_running=MAX_FAILURES)


def test_a_pass_without_an_end_is_seen_while_it_lasts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, reached, go = llm.target.score, Event(), Event()

    def hanging(*arguments: Any) -> Any:
        reached.set()
        assert go.wait(PATIENCE_S)
        return forward(*arguments)

    async def work(served: AsyncLLM) -> None:
        monkeypatch.setattr(llm.target, "score", hanging)
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

    run(work, llm)
