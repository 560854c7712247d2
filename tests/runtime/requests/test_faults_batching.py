"""Requests that share passes of a real engine, and passes that fail: nobody's text depends on the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from together import Timetable, collect, in_step, run, tokens_of

from draftwood.models.errors import EngineError
from draftwood.runtime import LLM, AsyncLLM, SamplingParams, SpeculativeConfig, StreamChunk
from draftwood.runtime.llm import Speculation
from draftwood.runtime.requests.async_llm import DeadlineError

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
TEXT = "the cat sat on the mat and the dog sat on the cat and the mat "


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    """ONNX Runtime, two pools, rounds planned by cost."""
    with LLM(tiny_bundle, threads=1) as opened:
        yield opened


class Arrival(NamedTuple):
    """A request. passes: of the target before it comes. end: how it ends before its time, and after how many chunks,
    or passes if there is a deadline."""

    prompt: str
    params: SamplingParams
    how: Speculation
    passes: int
    end: tuple[str, int]


def fails(output: Sequence[int], logits: NDArray[np.float64]) -> NDArray[np.float64]:
    if len(output) > 6:
        raise ZeroDivisionError("on purpose")
    return logits


CHAIN, LOOKUP = SpeculativeConfig("chain", max_draft_len=3), SpeculativeConfig(lookup_ngram=1)
HOWS: tuple[Speculation, ...] = ("own", "own", None, CHAIN, LOOKUP)
arrivals = st.builds(
    Arrival,
    prompt=st.integers(0, 300).map(lambda length: (TEXT * 6)[:length]),
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 30),
        temperature=st.just(0.0),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        logprobs=st.sampled_from([None, 2]),
        ignore_eos=st.booleans(),
        stop=st.sampled_from([(), ("e", "a")]),
    ),
    how=st.sampled_from(HOWS),
    passes=st.integers(0, 25),
    end=st.tuples(st.sampled_from(["", "", "close", "abort", "deadline", "failure"]), st.integers(0, 4)),
)


async def served_to(served: AsyncLLM, arrival: Arrival, timetable: Timetable) -> list[StreamChunk]:
    """The chunks until the request's end, whatever ended it."""
    await timetable.reach(arrival.passes)
    kind, patience = arrival.end
    params = replace(arrival.params, logits_processors=(fails,)) if kind == "failure" else arrival.params
    deadline = 1 + 2 * patience if kind == "deadline" else None
    stream = served.generate(arrival.prompt, params, speculative=arrival.how, deadline_s=deadline)
    chunks: list[StreamChunk] = []
    try:
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) > patience and kind == "abort":
                served.abort(stream.request_id)
            elif len(chunks) > patience and kind == "close":
                await stream.aclose()
    except (DeadlineError, ZeroDivisionError) as error:
        assert kind == ("deadline" if isinstance(error, DeadlineError) else "failure")
    return chunks


@settings(max_examples=40)
@given(st.lists(arrivals, min_size=3, max_size=8), st.integers(1, 4))
def test_greedy_texts_of_a_real_engine_are_those_of_requests_alone(
    llm: LLM, mix: list[Arrival], max_running: int
) -> None:
    async def together(served: AsyncLLM) -> list[list[StreamChunk]]:
        with in_step(served) as timetable, pytest.MonkeyPatch.context() as patch:
            for user in ("async_llm", "engine_thread"):  # a pass takes a second
                patch.setattr(f"draftwood.runtime.requests.{user}.monotonic", lambda: timetable.passes)
            return await asyncio.gather(*(served_to(served, arrival, timetable) for arrival in mix))

    for arrival, chunks in zip(mix, run(together, llm, max_running=max_running), strict=True):
        alone = list(llm.stream(arrival.prompt, arrival.params, speculative=arrival.how))
        got, expected = tokens_of(chunks), tokens_of(alone)
        finished = bool(chunks) and chunks[-1].finish_reason not in (None, "abort")
        assert finished or arrival.end[0]
        assert (got if finished else [*got, *expected[len(got) :]]) == expected
        if finished:
            assert "".join(chunk.text for chunk in chunks) == "".join(chunk.text for chunk in alone)
            assert chunks[-1].finish_reason == alone[-1].finish_reason


class Flaky:
    """A forward that fails by itself whenever it is told to."""

    def __init__(self, forward: Any, failing: Any) -> None:
        self._forward, self._failing = forward, failing
        self.calls = self.failures = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self._failing(self.calls):
            self.failures += 1
            raise EngineError("out of memory, for the moment")
        return self._forward(*arguments)


def crowd(llm: LLM, flaky: Flaky) -> tuple[list[list[StreamChunk] | BaseException], str]:
    """Six requests at a time, and the metrics at their end."""

    async def six(served: AsyncLLM) -> tuple[list[list[StreamChunk] | BaseException], str]:
        with served._scheduler.changed:  # the engine's thread finds all of them waiting
            streams = [served.generate(f"{TEXT} {number}", GREEDY) for number in range(6)]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert served.accepting and not served.num_running
        flaky._failing = lambda call: False
        again = await collect(served.generate(TEXT, GREEDY))
        assert tokens_of(again) == llm.generate(TEXT, GREEDY)[0].token_ids
        return results, served.metrics.to_prometheus({})

    return run(six, llm, max_running=3, max_waiting=3)


def test_a_shared_pass_that_fails_once_is_nobodys_fault(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then a pass of the target fails; each request in it is asked again alone, and that succeeds."""
    flaky = Flaky(llm.target.score, lambda call: False)
    expected = [llm.generate(f"{TEXT} {number}", GREEDY)[0].token_ids for number in range(6)]
    monkeypatch.setattr(llm.target, "score", flaky)
    last = [0]

    def every_fourth(call: int) -> bool:
        failing = call - last[0] >= 4
        last[0] = call if failing else last[0]
        return failing

    flaky._failing = every_fourth
    results, _ = crowd(llm, flaky)
    assert flaky.failures >= 5
    assert [tokens_of(chunks) for chunks in results if isinstance(chunks, list)] == expected


def test_an_engine_that_fails_for_good_fails_everybody_and_comes_back(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaky = Flaky(llm.target.score, lambda call: call > 5)
    monkeypatch.setattr(llm.target, "score", flaky)
    results, metrics = crowd(llm, flaky)
    assert all(isinstance(result, EngineError) for result in results)
    assert 'finish_reason="error"} 6' in metrics and 'finish_reason="length"} 1' in metrics
