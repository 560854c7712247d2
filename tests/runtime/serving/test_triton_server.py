"""The model behind a real tritonserver: what clients of every kind send, get, cancel and break."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundling import ROOT
from serving import wait_for

from draftwood.runtime import LLM, SamplingParams, StructuredOutput

pytest.importorskip("pytriton", reason="nvidia-pytriton, the [triton] extra, is not installed")
client_errors = pytest.importorskip("tritonclient.utils", reason="tritonclient, the [triton] extra, is not installed")
grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient, the [triton] extra, is not installed")

from triton_client import (  # noqa: E402 - after the skips
    DIES,
    ENDLESS,
    FAULTY,
    OWN,
    PLAIN,
    RAISES,
    SLOW,
    Call,
    ask,
    canary,
    inputs,
    metric,
    post,
    stubs,
    tensor,
    triton,
)

from draftwood.runtime.serving.triton.server import TritonServer  # noqa: E402

Refused = client_errors.InferenceServerException
LONG = {"max_tokens": 900, "stream": True, "seed": ENDLESS, "end_id": -1}  # minutes, if nobody ended it


@pytest.fixture(scope="module")
def server(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
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


def test_it_says_what_it_is(server: TritonServer, client: Any) -> None:
    assert client.is_server_ready() and client.is_model_ready(PLAIN)
    metadata = client.get_model_metadata(PLAIN)
    assert {"text_input", "stop_words", "sampling_parameters"} <= {item.name for item in metadata.inputs}
    assert {"text_output", "acceptance_rate", "finish_reason"} <= {item.name for item in metadata.outputs}
    assert client.get_model_config(PLAIN).config.model_transaction_policy.decoupled
    with pytest.raises(Refused, match="decoupled"):
        client.infer(PLAIN, inputs("hello"))


def test_a_stream_has_a_response_per_round_and_a_whole_text_is_one(server: TritonServer, llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.7, seed=5, ignore_eos=True)
    expected = list(llm.stream("hello", params))
    sent = {"max_tokens": 24, "temperature": 0.7, "seed": 5, "end_id": -1}
    streamed = ask(server, PLAIN, inputs("hello", stream=True, **sent))
    assert [answer.outputs["text_output"] for answer in streamed] == [chunk.text for chunk in expected]
    assert [answer.final for answer in streamed] == [False] * (len(expected) - 1) + [True]
    (whole,) = ask(server, PLAIN, inputs("hello", **sent))
    assert whole.outputs["text_output"] == "hello" + "".join(chunk.text for chunk in expected)
    (without,) = ask(server, PLAIN, inputs("hello", exclude_input_in_output=True, **sent))
    assert without.outputs["text_output"] == "".join(chunk.text for chunk in expected)


def test_counts_reasons_and_acceptance_are_those_of_the_result(server: TritonServer, llm: LLM) -> None:
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


def test_speculation_is_a_request_parameter(server: TritonServer, llm: LLM) -> None:
    sent = inputs("hello", max_tokens=12, stream=True, end_id=-1)
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = list(llm.stream("hello", greedy, speculative=replace(OWN, grow="chain", max_draft_len=2)))
    changed = ask(server, PLAIN, sent, grow="chain", max_draft_len=2)
    assert [answer.outputs["text_output"] for answer in changed] == [chunk.text for chunk in expected]
    assert len(ask(server, PLAIN, sent, num_draft_tokens=0)) == 12
    with pytest.raises(Refused, match="lossless"):
        ask(server, PLAIN, sent, grow="topk", verify="block")


def test_a_form_is_demanded_as_of_the_http_server(server: TritonServer, llm: LLM) -> None:
    pytest.importorskip("llguidance", reason="needs the [structured] extra")
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=4, structured=StructuredOutput(regex="[ab]{3}c"))
    expected = llm.generate("hello", params)[0].text
    sent = {"max_tokens": 12, "temperature": 0.9, "seed": 4, "exclude_input_in_output": True}
    (answer,) = ask(server, PLAIN, inputs("hello", **sent), structured_outputs='{"regex": "[ab]{3}c"}')
    assert answer.outputs["text_output"] == expected and re.fullmatch("[ab]{3}c", expected)
    body = {"text_input": "x", "guided_choice": '["yes"]', "exclude_input_in_output": True}
    status, text = post(server, f"{PLAIN}/generate", body)
    assert status == 200 and json.loads(text)["text_output"] == "yes"
    with pytest.raises(Refused, match="regex"):
        ask(server, PLAIN, inputs("hello"), guided_regex="(")


def test_cancelling_frees_the_engine(server: TritonServer) -> None:
    before = metric(server, "draftwood_requests_total", model=FAULTY, finish_reason="abort")
    with Call(server.grpc, FAULTY, inputs("hello", **LONG)) as call:
        call.next()
        wait_for(lambda: running(server) == 1)
    wait_for(lambda: running(server) == 0)
    assert metric(server, "draftwood_requests_total", model=FAULTY, finish_reason="abort") == before + 1


def test_a_client_that_is_killed_frees_the_engine(server: TritonServer) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
from triton_client import Call, inputs
call = Call({server.grpc!r}, {FAULTY!r}, inputs("hello", **{LONG!r}))
while True:
    call.next()
"""
    client = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: running(server) == 1)
    finally:
        client.kill()
        client.wait()
    wait_for(lambda: running(server) == 0)


def test_a_reader_that_hangs_up_frees_the_engine(server: TritonServer) -> None:
    body = json.dumps({"text_input": "hello", **LONG}).encode()
    request = urllib.request.Request(f"http://{server.http}/v2/models/{FAULTY}/generate_stream", body)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.readline().startswith(b"data: ")
        wait_for(lambda: running(server) == 1)
    wait_for(lambda: running(server) == 0)


def test_more_requests_than_places_are_refused(server: TritonServer) -> None:
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


def test_a_deadline_ends_a_request(server: TritonServer) -> None:
    with pytest.raises(Refused, match=r"deadline of 0\.2 s"):
        ask(server, FAULTY, inputs("hello", **LONG), timeout=0.2)
    body = {"text_input": "hello", **LONG, "stream": False, "timeout": 200000}
    assert (
        post(server, f"{FAULTY}/generate", body)[1]
        == '{"error":"the text was not finished within its deadline of 0.2 s"}'
    )
    wait_for(lambda: running(server) == 0)


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        (inputs("hello", max_tokens=0), "max_tokens: Input should be greater"),
        (inputs("x" * 5000), "shorten it"),
        ([*inputs("hello"), tensor("nope", np.zeros((1, 1), np.int32))], "unexpected inference input 'nope'"),
        ([*inputs("hello"), tensor("top_k", np.zeros((1, 1), np.float32))], "data-type"),
        ([*inputs("hello"), tensor("top_k", np.zeros((1, 2), np.int32))], "unexpected shape"),
        ([tensor("text_input", np.array([[b"two"], [b"prompts"]], np.object_))], "batch"),
        ([tensor("max_tokens", np.array([[3]], np.int32))], "text_input"),
    ],
)
def test_bad_input_is_an_error_response(server: TritonServer, sent: list[Any], named: str) -> None:
    with pytest.raises(Refused, match=named):
        ask(server, PLAIN, sent)
    assert len(ask(server, PLAIN, inputs("hello", max_tokens=2))) == 1


def test_what_fails_in_a_round_ends_that_request_only(server: TritonServer, client: Any) -> None:
    with Call(server.grpc, FAULTY, inputs("other", **LONG | {"seed": SLOW})) as other:
        with Call(server.grpc, FAULTY, inputs("hello", max_tokens=50, stream=True, seed=RAISES, end_id=-1)) as call:
            call.next()
            with pytest.raises(Refused, match="the engine failed after 20 tokens"):
                call.rest()
        other.next()
    assert client.is_model_ready(FAULTY)


def test_http_generate(server: TritonServer, llm: LLM) -> None:
    expected = llm.generate("hello", SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))[0].text
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


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"text_input": "hello", "max_tokens": 0}, 400, "max_tokens"),
        ({"text_input": "hello", "temprature": 0.5}, 400, "did you mean temperature"),
        ({"text_input": 3}, 500, "string"),
        ({"max_tokens": 3}, 400, "text_input"),
        (b"{", 500, "JSON"),
    ],
)
def test_http_errors(server: TritonServer, body: dict[str, Any] | bytes, status: int, named: str) -> None:
    got, text = post(server, f"{PLAIN}/generate", body)
    assert (got, named in text) == (status, True), text


def test_a_model_whose_process_died_comes_back_by_unloading_and_loading(server: TritonServer, client: Any) -> None:
    dying = inputs("hello", max_tokens=50, stream=True, seed=DIES, end_id=-1)
    with Call(server.grpc, FAULTY, dying) as call, pytest.raises(queue.Empty):
        wait_for(lambda: not stubs(server, FAULTY))
        call.rest(wait=1.5)  # Triton 24.10 answers such a request never
    with pytest.raises(Refused, match="not healthy"):
        ask(server, FAULTY, inputs("hello", max_tokens=2))
    assert client.is_model_ready(FAULTY) and not canary(server, FAULTY)  # which is why a request must watch a model
    assert len(ask(server, PLAIN, inputs("hello", max_tokens=2))) == 1
    client.unload_model(FAULTY)
    wait_for(lambda: not client.is_model_ready(FAULTY))
    client.load_model(FAULTY)
    assert len(ask(server, FAULTY, inputs("hello", max_tokens=2))) == 1 and canary(server, FAULTY)


def test_metrics_add_up(server: TritonServer) -> None:
    names = ("vllm:spec_decode_num_draft_tokens_total", "draftwood_generation_tokens_total", "draftwood_requests_total")
    before = [metric(server, name, model=PLAIN) for name in names]
    flags = {"return_perf_metrics": True, "return_num_output_tokens": True}
    (answer,) = ask(server, PLAIN, inputs("hello", max_tokens=8, end_id=-1, **flags))
    added = [answer.outputs["total_draft_tokens"], 8, 1]
    wait_for(
        lambda: (
            [metric(server, name, model=PLAIN) for name in names] == [a + b for a, b in zip(before, added, strict=True)]
        )
    )
    first = metric(server, "draftwood_time_to_first_token_seconds_count", model=PLAIN)
    assert 0 < first <= metric(server, "draftwood_requests_total", model=PLAIN)
