"""A real tritonserver under crowds, reloads, killed processes, readers that do not read, and nonsense."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import wait_for

from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.requests.health import MAX_FAILURES

pytest.importorskip("pytriton", reason="nvidia-pytriton, the [triton] extra, is not installed")
client_errors = pytest.importorskip("tritonclient.utils", reason="tritonclient, the [triton] extra, is not installed")
grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient, the [triton] extra, is not installed")

from triton_client import (  # noqa: E402 - after the skips
    BREAKS,
    FAULTY,
    OWN,
    PLAIN,
    SLOW,
    Call,
    ask,
    canary,
    inputs,
    metric,
    post,
    triton,
)

from draftwood.runtime.serving.triton.request import SPECULATION, TritonBody  # noqa: E402
from draftwood.runtime.serving.triton.server import TritonServer  # noqa: E402

Refused = client_errors.InferenceServerException
GREEDY = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
ASKED = {"max_tokens": 200, "stream": True, "end_id": -1}
SLOWLY = {**ASKED, "max_tokens": 40, "seed": SLOW}  # a second or more
SLOW_GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with triton(tiny_bundle, tmp_path_factory.mktemp("faults") / "models") as running:
        yield running


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, OWN) as opened:
        yield opened


@pytest.fixture
def client(server: TritonServer) -> Iterator[Any]:
    with grpc.InferenceServerClient(server.grpc) as opened:
        yield opened


def text_of(call: Call) -> str:
    return "".join(answer.outputs["text_output"] for answer in call.rest())


def some_settings(number: int) -> dict[str, Any]:
    """Of one request: SamplingParams' names, and the same ones every time."""
    draw = random.Random(number)
    chosen: dict[str, Any] = {"max_tokens": draw.randint(1, 40), "seed": number, "temperature": draw.choice([0.0, 0.8])}
    chosen["top_k"] = 4  # with all candidates, one draw in ten thousand falls upon a rounding edge
    for name, values in (("top_p", [0.9]), ("repetition_penalty", [1.25]), ("min_tokens", [1]), ("stop", [("e", "a")])):
        if draw.random() < 0.4:
            chosen[name] = draw.choice(values)
    return chosen


def test_a_crowd_gets_what_each_would_get_alone(server: TritonServer, llm: LLM) -> None:
    """Eight clients at a time: streams and whole texts, some cancelled, some out of time, some refused."""

    def visit(number: int) -> list[str]:
        sent = some_settings(number)
        words = {"stop_words": list(sent.pop("stop"))} if "stop" in sent else {}
        prompt = f"prompt {number}"
        with Call(server.grpc, PLAIN, inputs(prompt, **ASKED)) as cancelled:
            begun = cancelled.next().outputs["text_output"]
        with pytest.raises(Refused, match=r"deadline of|retry later"):  # it has places for three
            ask(server, FAULTY, inputs(prompt, **SLOWLY), timeout=0.05)
        with pytest.raises(Refused, match="min_tokens"):
            ask(server, PLAIN, inputs(prompt, max_tokens=1, min_tokens=2))
        with Call(server.grpc, PLAIN, inputs(prompt, stream=True, **sent, **words)) as call:
            streamed = text_of(call)
        (whole,) = ask(server, PLAIN, inputs(prompt, exclude_input_in_output=True, **sent, **words))
        return [begun, streamed, whole.outputs["text_output"]]

    numbers = range(12)
    with ThreadPoolExecutor(8) as threads:
        visits = list(threads.map(visit, numbers))
    for number, (begun, streamed, whole) in zip(numbers, visits, strict=True):
        expected = llm.generate(f"prompt {number}", SamplingParams(**some_settings(number)))[0].text
        assert streamed == whole == expected, some_settings(number)
        assert llm.generate(f"prompt {number}", GREEDY)[0].text.startswith(begun)


def test_a_model_is_loaded_anew_below_its_requests(server: TritonServer, client: Any, llm: LLM) -> None:
    """Those in flight end on the old instances, what comes meanwhile is answered by one or the other."""
    expected = llm.generate("hello", SLOW_GREEDY)[0].text
    with ThreadPoolExecutor(4) as threads:
        calls = [Call(server.grpc, FAULTY, inputs("hello", **SLOWLY)) for _ in range(2)]
        begun = [call.next().outputs["text_output"] for call in calls]
        os.utime(server.repository / FAULTY / "config.pbtxt")  # else Triton finds nothing to load
        loading = threads.submit(client.load_model, FAULTY)
        texts = list(threads.map(text_of, calls))
        loading.result()
        for call in calls:
            call.__exit__()
    assert [first + rest for first, rest in zip(begun, texts, strict=True)] == [expected] * 2
    with Call(server.grpc, FAULTY, inputs("hello", **SLOWLY)) as call:
        assert text_of(call) == expected


def test_nobody_waits_for_a_reader_that_does_not_read(server: TritonServer, llm: LLM) -> None:
    expected = llm.generate("hello", GREEDY)[0].text
    go, answers = threading.Event(), list[str]()

    def unread(result: Any, error: Exception | None) -> None:
        go.wait(600)
        answers.append("" if result is None else result.as_numpy("text_output").item().decode())

    with grpc.InferenceServerClient(server.grpc) as slow:
        slow.start_stream(unread)
        for _ in range(4):
            slow.async_stream_infer(PLAIN, inputs("hello", **ASKED))
        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(ask, server, PLAIN, inputs("hello", **ASKED)) for _ in range(4)]
            texts = ["".join(answer.outputs["text_output"] for answer in call.result()) for call in calls]
        wait_for(lambda: not metric(server, "draftwood_requests_running", model=PLAIN))
        assert not answers[1:]
        go.set()
        slow.stop_stream()
    assert texts == [expected] * 4
    assert sorted("".join(answers)) == sorted(4 * expected)  # of four requests, interleaved


def test_an_engine_that_fails_for_good_is_seen_by_a_small_request(server: TritonServer, client: Any) -> None:
    assert metric(server, "draftwood_engine_healthy", model=FAULTY) == 1 and canary(server, FAULTY)
    for _ in range(MAX_FAILURES):
        with pytest.raises(Refused, match="broken for good"):
            ask(server, FAULTY, inputs("hello", max_tokens=2, seed=BREAKS))
    wait_for(lambda: metric(server, "draftwood_engine_healthy", model=FAULTY) == 0)
    assert client.is_model_ready(FAULTY) and not canary(server, FAULTY)  # Triton 24.10 does not ask the model
    assert canary(server, PLAIN) and metric(server, "draftwood_engine_healthy", model=PLAIN) == 2  # of two instances
    client.unload_model(FAULTY)
    wait_for(lambda: not client.is_model_ready(FAULTY))
    client.load_model(FAULTY)
    assert canary(server, FAULTY)
    wait_for(lambda: metric(server, "draftwood_engine_healthy", model=FAULTY) == 1)


values = st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=4)
OTHERS = ("text_input", "sampling_parameters", "id", "parameters")
names = st.sampled_from([*sorted(SPECULATION), *TritonBody.model_fields, *TritonBody.neutral, *OTHERS])


@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(names, values | st.lists(values, max_size=3), max_size=4))
def test_whatever_is_posted_is_answered(server: TritonServer, body: dict[str, Any]) -> None:
    """An answer, or the client's error with its reason; 500 is what Triton itself has for JSON it cannot read."""
    status, text = post(server, f"{PLAIN}/generate", {"text_input": "hello", "max_tokens": 4} | body)
    assert (status == 200 and "text_output" in text) or (status in (400, 500) and len(text) > 20), (status, text)
    assert metric(server, "draftwood_requests_total", model=PLAIN, finish_reason="error") == 0


def test_sigterm_lets_the_server_finish_what_it_has(tiny_bundle: Path, tmp_path: Path, llm: LLM) -> None:
    with triton(tiny_bundle, tmp_path / "models", exit_timeout=120) as server:
        calls = [Call(server.grpc, FAULTY, inputs("hello", **SLOWLY)) for _ in range(2)]
        begun = [call.next().outputs["text_output"] for call in calls]
        assert server.pid is not None
        os.kill(server.pid, signal.SIGTERM)
        texts = [first + text_of(call) for first, call in zip(begun, calls, strict=True)]
        for call in calls:
            call.__exit__()
        assert server.wait() == 0
    assert texts == [llm.generate("hello", SLOW_GREEDY)[0].text] * 2
