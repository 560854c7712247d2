"""The model behind a real tritonserver: what clients of every kind send, get, cancel and break, alone and in crowds."""

from __future__ import annotations

import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundling import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import wait_for

from draftwood.runtime import LLM, SamplingParams, StructuredOutput
from draftwood.runtime.requests.health import MAX_FAILURES

pytest.importorskip("pytriton", reason="nvidia-pytriton, the [triton] extra, is not installed")
client_errors = pytest.importorskip("tritonclient.utils", reason="tritonclient, the [triton] extra, is not installed")
grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient, the [triton] extra, is not installed")

import triton_client as helper  # noqa: E402 - after the skips
from triton_client import FAIR, FAULTY, OWN, PLAIN, Call, ask, canary, inputs, metric, post, tensor, triton  # noqa: E402

from draftwood.runtime.serving.triton.request import SPECULATION, TritonBody  # noqa: E402
from draftwood.runtime.serving.triton.server import TritonServer  # noqa: E402

Refused = client_errors.InferenceServerException
GREEDY = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
SHORT = replace(GREEDY, max_tokens=40)
ASKED = {"max_tokens": 200, "stream": True, "end_id": -1}
LONG = {**ASKED, "max_tokens": 900, "seed": helper.ENDLESS}  # minutes, if nobody ended it
SLOWLY = {**ASKED, "max_tokens": 40, "seed": helper.SLOW}  # a second or more
BRIEF = inputs("hello", max_tokens=2)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompts in the order in which a model began their texts."""
    return tmp_path_factory.mktemp("begun") / "prompts"


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory, begun: Path) -> Iterator[TritonServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(helper.BEGUN, str(begun))
        with triton(tiny_bundle, tmp_path_factory.mktemp("triton") / "models") as running:
            yield running


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, OWN) as opened:
        yield opened


@pytest.fixture
def client(server: TritonServer) -> Iterator[Any]:
    with grpc.InferenceServerClient(server.grpc) as opened:
        yield opened


def running(server: TritonServer) -> float:
    return metric(server, "draftwood_requests_running", model=FAULTY)


def text_of(call: Call) -> str:
    return "".join(answer.outputs["text_output"] for answer in call.rest())


def test_it_says_what_it_is(client: Any) -> None:
    assert client.is_server_ready() and client.is_model_ready(PLAIN)
    metadata = client.get_model_metadata(PLAIN)
    assert {"text_input", "stop_words", "sampling_parameters"} <= {item.name for item in metadata.inputs}
    assert {"text_output", "acceptance_rate", "finish_reason"} <= {item.name for item in metadata.outputs}
    assert client.get_model_config(PLAIN).config.model_transaction_policy.decoupled
    with pytest.raises(Refused, match="decoupled"):
        client.infer(PLAIN, inputs("hello"))


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

    def visit(number: int) -> tuple[str, list[helper.Answer], str]:
        sent, prompt = some_settings(number), f"prompt {number}"
        words = {"stop_words": list(sent.pop("stop"))} if "stop" in sent else {}
        with Call(server.grpc, PLAIN, inputs(prompt, **ASKED)) as cancelled:
            begun = cancelled.next().outputs["text_output"]
        with pytest.raises(Refused, match=r"deadline of|retry later"):  # it has places for three
            ask(server, FAULTY, inputs(prompt, **SLOWLY), timeout=0.05)
        with pytest.raises(Refused, match="min_tokens"):
            ask(server, PLAIN, inputs(prompt, max_tokens=1, min_tokens=2))
        streamed = ask(server, PLAIN, inputs(prompt, stream=True, **sent, **words))
        alone = {"exclude_input_in_output": True} if number % 2 else {}
        (whole,) = ask(server, PLAIN, inputs(prompt, **alone, **sent, **words))
        return begun, streamed, whole.outputs["text_output"]

    with ThreadPoolExecutor(8) as threads:
        visits = list(threads.map(visit, range(12)))
    for number, (begun, streamed, whole) in enumerate(visits):
        expected = list(llm.stream(f"prompt {number}", SamplingParams(**some_settings(number))))
        assert [answer.outputs["text_output"] for answer in streamed] == [chunk.text for chunk in expected]
        assert [answer.final for answer in streamed] == [False] * (len(expected) - 1) + [True]
        assert whole == ("" if number % 2 else f"prompt {number}") + "".join(chunk.text for chunk in expected)
        assert llm.generate(f"prompt {number}", GREEDY)[0].text.startswith(begun)


def test_counts_reasons_and_acceptance_are_those_of_the_result(server: TritonServer, llm: LLM) -> None:
    names = ("vllm:spec_decode_num_draft_tokens_total", "draftwood_generation_tokens_total", "draftwood_requests_total")
    before = [metric(server, name, model=PLAIN) for name in names]
    result = llm.generate("hello", SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=0))[0]
    flags = {f"return_{name}": True for name in ("num_input_tokens", "num_output_tokens", "finish_reason", "log_probs")}
    (answer,) = ask(server, PLAIN, inputs("hello", max_tokens=16, end_id=-1, return_perf_metrics=True, **flags))
    outputs = answer.outputs
    assert outputs["num_input_tokens"] == len(result.prompt_token_ids)
    assert outputs["num_output_tokens"] == 16 and outputs["finish_reason"] == "length"
    assert outputs["total_draft_tokens"] == result.stats.num_draft_tokens > 0
    assert outputs["total_accepted_draft_tokens"] == result.stats.num_accepted_tokens
    assert outputs["acceptance_rate"] == pytest.approx(result.stats.acceptance_rate)
    assert result.logprobs is not None and result.outputs[0].cumulative_logprob is not None
    logprobs = [each[token].logprob for token, each in zip(result.token_ids, result.logprobs, strict=True)]
    assert outputs["output_log_probs"] == pytest.approx(logprobs, abs=1e-5)
    assert outputs["cum_log_probs"] == pytest.approx(result.outputs[0].cumulative_logprob, abs=1e-4)
    expected = [a + b for a, b in zip(before, (outputs["total_draft_tokens"], 16, 1), strict=True)]
    wait_for(lambda: [metric(server, name, model=PLAIN) for name in names] == expected)
    first = metric(server, "draftwood_time_to_first_token_seconds_count", model=PLAIN)
    assert 0 < first <= metric(server, "draftwood_requests_total", model=PLAIN)


def test_speculation_and_forms_are_parameters(server: TritonServer, llm: LLM) -> None:
    pytest.importorskip("llguidance", reason="needs the [structured] extra")
    sent, greedy = inputs("hello", max_tokens=12, stream=True, end_id=-1), replace(GREEDY, max_tokens=12)
    expected = list(llm.stream("hello", greedy, speculative=replace(OWN, grow="chain", max_draft_len=2)))
    changed = ask(server, PLAIN, sent, grow="chain", max_draft_len=2)
    assert [answer.outputs["text_output"] for answer in changed] == [chunk.text for chunk in expected]
    assert len(ask(server, PLAIN, sent, num_draft_tokens=0)) == 12
    drawn: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 4}
    form = llm.generate("hello", SamplingParams(**drawn, structured=StructuredOutput(regex="[ab]{3}c")))[0].text
    tensors = inputs("hello", exclude_input_in_output=True, **drawn)
    (answer,) = ask(server, PLAIN, tensors, structured_outputs='{"regex": "[ab]{3}c"}')
    assert answer.outputs["text_output"] == form and re.fullmatch("[ab]{3}c", form)


def test_http_generate(server: TritonServer, llm: LLM) -> None:
    expected = llm.generate("hello", replace(GREEDY, max_tokens=8))[0].text
    body = {"text_input": "hello", "max_tokens": 8, "ignore_eos": True, "stop_words": ["\x00"]}
    status, text = post(server, f"{PLAIN}/generate", body | {"exclude_input_in_output": True})
    assert status == 200 and json.loads(text)["text_output"] == expected
    status, text = post(server, f"{PLAIN}/generate_stream", body | {"stream": True, "return_finish_reason": True})
    events = [json.loads(line[len("data: ") :]) for line in text.splitlines() if line]
    assert status == 200 and len(events) > 1
    assert "".join(event["text_output"] for event in events) == expected
    assert events[-1]["finish_reason"] == "length"


def test_the_example_of_the_documentation_runs(server: TritonServer, llm: LLM) -> None:
    page = (ROOT / "docs" / "triton.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0].replace("localhost:8001", server.grpc)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == llm.generate("def main():", SamplingParams(temperature=0))[0].text


KILLED = """
import sys
sys.path.insert(0, {path!r})
from triton_client import Call, inputs
call = Call({server!r}, {model!r}, inputs("hello", **{settings!r}))
while True:
    call.next()
"""


@pytest.mark.parametrize("way", ["cancels", "is killed", "hangs up"])
def test_a_client_that_goes_away_frees_the_engine(server: TritonServer, way: str) -> None:
    before = metric(server, "draftwood_requests_total", model=FAULTY, finish_reason="abort")
    if way == "cancels":
        with Call(server.grpc, FAULTY, inputs("hello", **LONG)) as call:
            call.next()
            wait_for(lambda: running(server) == 1)
    elif way == "is killed":
        code = KILLED.format(path=str(ROOT / "tests" / "support"), server=server.grpc, model=FAULTY, settings=LONG)
        with subprocess.Popen([sys.executable, "-c", code]) as process:
            wait_for(lambda: running(server) == 1)
            process.kill()
    else:
        body = json.dumps({"text_input": "hello", **LONG}).encode()
        request = urllib.request.Request(f"http://{server.http}/v2/models/{FAULTY}/generate_stream", body)
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert answer.readline().startswith(b"data: ")
            wait_for(lambda: running(server) == 1)
    wait_for(lambda: running(server) == 0)
    assert metric(server, "draftwood_requests_total", model=FAULTY, finish_reason="abort") == before + 1


def test_more_requests_than_places_are_refused_and_deadlines_end_them(server: TritonServer) -> None:
    sent = inputs("hello", **LONG)
    with Call(server.grpc, FAULTY, sent) as first, Call(server.grpc, FAULTY, sent) as second:
        first.next()
        second.next()
        with Call(server.grpc, FAULTY, sent):
            wait_for(lambda: metric(server, "draftwood_requests_waiting", model=FAULTY) == 1)
            with pytest.raises(Refused, match="retry later"):
                ask(server, FAULTY, sent)
            assert canary(server, FAULTY)  # busy is not dead
    wait_for(lambda: running(server) == 0 == metric(server, "draftwood_requests_waiting", model=FAULTY))
    with pytest.raises(Refused, match=r"deadline of 0\.2 s"):
        ask(server, FAULTY, sent, timeout=0.2)
    late = post(server, f"{FAULTY}/generate", {"text_input": "hello", **LONG, "stream": False, "timeout": 200000})
    assert late[1] == '{"error":"the text was not finished within its deadline of 0.2 s"}'
    wait_for(lambda: running(server) == 0)


@pytest.mark.parametrize(
    ("sent", "parameters", "named"),
    [
        (inputs("hello", max_tokens=0), {}, "max_tokens: Input should be greater"),
        (inputs("hello"), {"guided_regex": "("}, "regex"),
        (inputs("hello"), {"grow": "topk", "verify": "block"}, "lossless"),
        (inputs("x" * 5000), {}, "shorten it"),
        ([*inputs("hello"), tensor("nope", np.zeros((1, 1), np.int32))], {}, "unexpected inference input 'nope'"),
        ([*inputs("hello"), tensor("top_k", np.zeros((1, 1), np.float32))], {}, "data-type"),
        ([*inputs("hello"), tensor("top_k", np.zeros((1, 2), np.int32))], {}, "unexpected shape"),
        ([tensor("text_input", np.array([[b"two"], [b"prompts"]], np.object_))], {}, "batch"),
        ([tensor("max_tokens", np.array([[3]], np.int32))], {}, "text_input is missing: send"),
    ],
)
def test_bad_input_is_an_error_response(
    server: TritonServer, sent: list[Any], parameters: dict[str, Any], named: str
) -> None:
    with pytest.raises(Refused, match=named):
        ask(server, PLAIN, sent, **parameters)
    assert len(ask(server, PLAIN, BRIEF)) == 1


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"text_input": "hello", "max_tokens": 0}, 400, "max_tokens"),
        ({"text_input": "hello", "temprature": 0.5}, 400, "did you mean temperature"),
        ({"text_input": 3}, 500, "string"),
        ({"max_tokens": 3}, 400, "text_input is missing"),
        (b"{", 500, "JSON"),
    ],
)
def test_http_errors(server: TritonServer, body: dict[str, Any] | bytes, status: int, named: str) -> None:
    got, text = post(server, f"{PLAIN}/generate", body)
    assert (got, named in text) == (status, True), text


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


def test_what_fails_in_a_round_ends_that_request_only(server: TritonServer, client: Any) -> None:
    with Call(server.grpc, FAULTY, inputs("other", **LONG | {"seed": helper.SLOW})) as other:
        with Call(server.grpc, FAULTY, inputs("hello", **ASKED | {"seed": helper.RAISES})) as call:
            call.next()
            with pytest.raises(Refused, match="the engine failed after 20 tokens"):
                call.rest()
        other.next()
    assert client.is_model_ready(FAULTY)


@pytest.mark.parametrize("fault", [helper.DIES, helper.BREAKS], ids=["process", "engine"])
def test_a_model_that_fails_for_good_comes_back_by_unloading_and_loading(
    server: TritonServer, client: Any, fault: int
) -> None:
    """A small request sees it: Triton 24.10 does not ask the model."""

    def healthy() -> float:
        return metric(server, "draftwood_engine_healthy", model=FAULTY)

    assert healthy() == 1 and canary(server, FAULTY)
    if fault == helper.DIES:
        dying = inputs("hello", **ASKED | {"seed": fault})
        with Call(server.grpc, FAULTY, dying) as call, pytest.raises(queue.Empty):
            wait_for(lambda: not helper.stubs(server, FAULTY))
            call.rest(wait=1.5)  # Triton 24.10 answers such a request never
        with pytest.raises(Refused, match="not healthy"):
            ask(server, FAULTY, BRIEF)
    else:
        for _ in range(MAX_FAILURES):
            with pytest.raises(Refused, match="broken for good"):
                ask(server, FAULTY, inputs("hello", max_tokens=2, seed=fault))
        wait_for(lambda: healthy() == 0)
    assert client.is_model_ready(FAULTY) and not canary(server, FAULTY)
    assert canary(server, PLAIN) and metric(server, "draftwood_engine_healthy", model=PLAIN) == 2  # of two instances
    client.unload_model(FAULTY)
    wait_for(lambda: not client.is_model_ready(FAULTY))
    client.load_model(FAULTY)
    assert canary(server, FAULTY) and len(ask(server, FAULTY, BRIEF)) == 1
    wait_for(lambda: healthy() == 1)


def test_a_model_is_loaded_anew_below_its_requests(server: TritonServer, client: Any, llm: LLM) -> None:
    """Those in flight end on the old instances, what comes meanwhile is answered by one or the other."""
    expected = llm.generate("hello", SHORT)[0].text
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
    server: TritonServer, client: Any, begun: Path, many: Send, one: Send
) -> None:
    """The model decodes one request at a time; five come one after the other, while a longer one is decoded."""
    client.load_model(FAIR)
    sent: list[Future[object]] = []

    def all_wait() -> bool:
        return metric(server, "draftwood_requests_waiting", model=FAIR) == len(sent)

    with ThreadPoolExecutor() as threads:
        with Call(server.grpc, FAIR, inputs("hello", **LONG)) as longer:
            longer.next()
            begun.write_text("")
            for name, request in [*[("m", many)] * 4, ("o", one)]:
                sent.append(threads.submit(request, server, name))
                wait_for(all_wait)
        for each in sent:
            each.result()
    assert begun.read_text().replace("\n", "") == "mommm"


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
    assert texts == [llm.generate("hello", SHORT)[0].text] * 2
