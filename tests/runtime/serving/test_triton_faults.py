"""A real tritonserver whose clients go away, wait or do not read, and whose models fail or are loaded anew."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bundling import ROOT
from serving import wait_for

from draftwood.runtime import LLM, SamplingParams
from draftwood.runtime.requests.health import MAX_FAILURES

pytest.importorskip("pytriton", reason="nvidia-pytriton, the [triton] extra, is not installed")
grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient, the [triton] extra, is not installed")

import triton_client as helper  # noqa: E402 - after the skips
from triton_client import FAIR, FAULTY, PLAIN, Call, Refused, ask, canary, inputs, metric, post, triton  # noqa: E402

from draftwood.runtime.serving.triton.server import TritonServer  # noqa: E402

GREEDY = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
ASKED = {"max_tokens": 200, "stream": True, "end_id": -1}
LONG = {**ASKED, "max_tokens": 900, "seed": helper.ENDLESS}  # minutes, if nobody ended it
SLOWLY = {**ASKED, "max_tokens": 40, "seed": helper.SLOW}  # a second or more
BRIEF = inputs("hello", max_tokens=2)


def running(server: TritonServer) -> float:
    return metric(server, "draftwood_requests_running", model=FAULTY)


def text_of(call: Call) -> str:
    return "".join(answer.outputs["text_output"] for answer in call.rest())


KILLED = """
import sys
sys.path.insert(0, {path!r})
from triton_client import Call, inputs
call = Call({server!r}, {model!r}, inputs("hello", **{settings!r}))
while True:
    call.next()
"""


@pytest.mark.parametrize("way", ["cancels", "is killed", "hangs up"])
def test_a_client_that_goes_away_frees_the_engine(tritonserver: TritonServer, way: str) -> None:
    before = metric(tritonserver, "draftwood_requests_total", model=FAULTY, finish_reason="abort")
    if way == "cancels":
        with Call(tritonserver.grpc, FAULTY, inputs("hello", **LONG)) as call:
            call.next()
            wait_for(lambda: running(tritonserver) == 1)
    elif way == "is killed":
        code = KILLED.format(
            path=str(ROOT / "tests" / "support"), server=tritonserver.grpc, model=FAULTY, settings=LONG
        )
        with subprocess.Popen([sys.executable, "-c", code]) as process:
            wait_for(lambda: running(tritonserver) == 1)
            process.kill()
    else:
        body = json.dumps({"text_input": "hello", **LONG}).encode()
        request = urllib.request.Request(f"http://{tritonserver.http}/v2/models/{FAULTY}/generate_stream", body)
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert answer.readline().startswith(b"data: ")
            wait_for(lambda: running(tritonserver) == 1)
    wait_for(lambda: running(tritonserver) == 0)
    assert metric(tritonserver, "draftwood_requests_total", model=FAULTY, finish_reason="abort") == before + 1


def test_more_requests_than_places_are_refused_and_deadlines_end_them(tritonserver: TritonServer) -> None:
    sent = inputs("hello", **LONG)
    with Call(tritonserver.grpc, FAULTY, sent) as first, Call(tritonserver.grpc, FAULTY, sent) as second:
        first.next()
        second.next()
        with Call(tritonserver.grpc, FAULTY, sent):
            wait_for(lambda: metric(tritonserver, "draftwood_requests_waiting", model=FAULTY) == 1)
            with pytest.raises(Refused, match="retry later"):
                ask(tritonserver, FAULTY, sent)
            assert canary(tritonserver, FAULTY)  # busy is not dead
    wait_for(lambda: running(tritonserver) == 0 == metric(tritonserver, "draftwood_requests_waiting", model=FAULTY))
    with pytest.raises(Refused, match=r"deadline of 0\.2 s"):
        ask(tritonserver, FAULTY, sent, timeout=0.2)
    late = post(tritonserver, f"{FAULTY}/generate", {"text_input": "hello", **LONG, "stream": False, "timeout": 200000})
    assert late[1] == '{"error":"the text was not finished within its deadline of 0.2 s"}'
    wait_for(lambda: running(tritonserver) == 0)


def test_what_fails_in_a_round_ends_that_request_only(tritonserver: TritonServer, triton_api: Any) -> None:
    with Call(tritonserver.grpc, FAULTY, inputs("other", **LONG | {"seed": helper.SLOW})) as other:
        with Call(tritonserver.grpc, FAULTY, inputs("hello", **ASKED | {"seed": helper.RAISES})) as call:
            call.next()
            with pytest.raises(Refused, match="the engine failed after 20 tokens"):
                call.rest()
        other.next()
    assert triton_api.is_model_ready(FAULTY)


@pytest.mark.parametrize("fault", [helper.DIES, helper.BREAKS], ids=["process", "engine"])
def test_a_model_that_fails_for_good_comes_back_by_unloading_and_loading(
    tritonserver: TritonServer, triton_api: Any, fault: int
) -> None:
    """A small request sees it: Triton 24.10 does not ask the model."""

    def healthy() -> float:
        return metric(tritonserver, "draftwood_engine_healthy", model=FAULTY)

    assert healthy() == 1 and canary(tritonserver, FAULTY)
    if fault == helper.DIES:
        dying = inputs("hello", **ASKED | {"seed": fault})
        with Call(tritonserver.grpc, FAULTY, dying) as call, pytest.raises(queue.Empty):
            wait_for(lambda: not helper.stubs(tritonserver, FAULTY))
            call.rest(wait=1.5)  # Triton 24.10 answers such a request never
        with pytest.raises(Refused, match="not healthy"):
            ask(tritonserver, FAULTY, BRIEF)
    else:
        for _ in range(MAX_FAILURES):
            with pytest.raises(Refused, match="broken for good"):
                ask(tritonserver, FAULTY, inputs("hello", max_tokens=2, seed=fault))
        wait_for(lambda: healthy() == 0)
    assert triton_api.is_model_ready(FAULTY) and not canary(tritonserver, FAULTY)
    assert (
        canary(tritonserver, PLAIN) and metric(tritonserver, "draftwood_engine_healthy", model=PLAIN) == 2
    )  # of two instances
    triton_api.unload_model(FAULTY)
    wait_for(lambda: not triton_api.is_model_ready(FAULTY))
    triton_api.load_model(FAULTY)
    assert canary(tritonserver, FAULTY) and len(ask(tritonserver, FAULTY, BRIEF)) == 1
    wait_for(lambda: healthy() == 1)


def test_a_model_is_loaded_anew_below_its_requests(
    tritonserver: TritonServer, triton_api: Any, served_llm: LLM
) -> None:
    """Those in flight end on the old instances, what comes meanwhile is answered by one or the other."""
    expected = served_llm.generate("hello", SHORT)[0].text
    with ThreadPoolExecutor(4) as threads:
        calls = [Call(tritonserver.grpc, FAULTY, inputs("hello", **SLOWLY)) for _ in range(2)]
        begun = [call.next().outputs["text_output"] for call in calls]
        os.utime(tritonserver.repository / FAULTY / "config.pbtxt")  # else Triton finds nothing to load
        loading = threads.submit(triton_api.load_model, FAULTY)
        texts = list(threads.map(text_of, calls))
        loading.result()
        for call in calls:
            call.__exit__()
    assert [first + rest for first, rest in zip(begun, texts, strict=True)] == [expected] * 2
    with Call(tritonserver.grpc, FAULTY, inputs("hello", **SLOWLY)) as call:
        assert text_of(call) == expected


def test_nobody_waits_for_a_reader_that_does_not_read(tritonserver: TritonServer, served_llm: LLM) -> None:
    expected = served_llm.generate("hello", GREEDY)[0].text
    go, answers = threading.Event(), list[str]()

    def unread(result: Any, error: Exception | None) -> None:
        go.wait(600)
        answers.append("" if result is None else result.as_numpy("text_output").item().decode())

    with grpc.InferenceServerClient(tritonserver.grpc) as slow:
        slow.start_stream(unread)
        for _ in range(4):
            slow.async_stream_infer(PLAIN, inputs("hello", **ASKED))
        with ThreadPoolExecutor(4) as threads:
            calls = [threads.submit(ask, tritonserver, PLAIN, inputs("hello", **ASKED)) for _ in range(4)]
            texts = ["".join(answer.outputs["text_output"] for answer in call.result()) for call in calls]
        wait_for(lambda: not metric(tritonserver, "draftwood_requests_running", model=PLAIN))
        assert not answers[1:]
        go.set()
        slow.stop_stream()
    assert texts == [expected] * 4
    assert sorted("".join(answers)) == sorted(4 * expected)  # of four requests, interleaved


Send = Callable[[TritonServer, str], object]  # by the prompt
ONE_ROUND = {"max_tokens": 2, "seed": helper.SLOW, "end_id": -1}


def streaming(**options: Any) -> Send:
    """Over gRPC."""
    return lambda server, prompt: ask(server, FAIR, inputs(prompt, **ONE_ROUND), **options)


def posting(**fields: Any) -> Send:
    return lambda server, prompt: post(server, f"{FAIR}/generate", {"text_input": prompt, **ONE_ROUND, **fields})


@pytest.mark.parametrize(
    ("many", "one"),
    [
        (streaming(client="many"), streaming(user="one")),
        (streaming(sequence="many"), streaming(sequence="one")),
        (posting(client="many"), posting(user="one")),
        (streaming(client="many", sequence=9), streaming(sequence=9)),  # a name decides before a sequence
    ],
    ids=["gRPC", "sequence", "HTTP", "both"],
)
def test_one_request_does_not_wait_for_all_of_anothers(
    tritonserver: TritonServer, triton_api: Any, begun: Path, many: Send, one: Send
) -> None:
    """The model decodes one request at a time; five come one after the other, while a longer one is decoded."""
    triton_api.load_model(FAIR)
    sent: list[Future[object]] = []

    def all_wait() -> bool:
        return metric(tritonserver, "draftwood_requests_waiting", model=FAIR) == len(sent)

    with ThreadPoolExecutor() as threads:
        with Call(tritonserver.grpc, FAIR, inputs("hello", **LONG)) as longer:
            longer.next()
            begun.write_text("")
            for name, request in [*[("m", many)] * 4, ("o", one)]:
                sent.append(threads.submit(request, tritonserver, name))
                wait_for(all_wait)
        for each in sent:
            each.result()
    assert begun.read_text().replace("\n", "") == "mommm"


def test_sigterm_lets_the_server_finish_what_it_has(tiny_bundle: Path, tmp_path: Path, served_llm: LLM) -> None:
    with triton(tiny_bundle, tmp_path / "models", exit_timeout=120) as server:
        calls = [Call(server.grpc, FAULTY, inputs("hello", **SLOWLY)) for _ in range(2)]
        begun = [call.next().outputs["text_output"] for call in calls]
        assert server.pid is not None
        os.kill(server.pid, signal.SIGTERM)
        texts = [first + text_of(call) for first, call in zip(begun, calls, strict=True)]
        for call in calls:
            call.__exit__()
        assert server.wait() == 0
    assert texts == [served_llm.generate("hello", SHORT)[0].text] * 2
