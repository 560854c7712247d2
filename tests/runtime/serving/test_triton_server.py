"""The model after a real tritonserver: what clients of every kind send, get, cancel and break, alone and in crowds."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bundling import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import wait_for

from draftwood.runtime import LLM, SamplingParams, StructuredOutput

pytest.importorskip("pytriton", reason="nvidia-pytriton, the [triton] extra, is not installed")
pytest.importorskip("tritonclient.grpc", reason="tritonclient, the [triton] extra, is not installed")

import triton_client as helper
from triton_client import FAULTY, OWN, PLAIN, Call, Refused, ask, inputs, metric, post, tensor

from draftwood.runtime.serving.triton.request import SPECULATION, TritonBody
from draftwood.runtime.serving.triton.server import TritonServer

GREEDY = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
ASKED = {"max_tokens": 200, "stream": True, "end_id": -1}
SLOWLY = {**ASKED, "max_tokens": 40, "seed": helper.SLOW}  # a second or more
BRIEF = inputs("hello", max_tokens=2)


def test_it_says_what_it_is(triton_api: Any) -> None:
    assert triton_api.is_server_ready() and triton_api.is_model_ready(PLAIN)
    metadata = triton_api.get_model_metadata(PLAIN)
    assert {"text_input", "stop_words", "sampling_parameters"} <= {item.name for item in metadata.inputs}
    assert {"text_output", "acceptance_rate", "finish_reason"} <= {item.name for item in metadata.outputs}
    assert triton_api.get_model_config(PLAIN).config.model_transaction_policy.decoupled
    with pytest.raises(Refused, match="decoupled"):
        triton_api.infer(PLAIN, inputs("hello"))


def some_settings(number: int) -> dict[str, Any]:
    """Of one request: SamplingParams' names, and the same ones every time."""
    draw = random.Random(number)
    chosen: dict[str, Any] = {"max_tokens": draw.randint(1, 40), "seed": number, "temperature": draw.choice([0.0, 0.8])}
    chosen["top_k"] = 4  # with all candidates, one draw in ten thousand falls upon a rounding edge
    for name, values in (("top_p", [0.9]), ("repetition_penalty", [1.25]), ("min_tokens", [1]), ("stop", [("e", "a")])):
        if draw.random() < 0.4:
            chosen[name] = draw.choice(values)
    return chosen


def test_a_crowd_gets_what_each_would_get_alone(tritonserver: TritonServer, served_llm: LLM) -> None:
    """Eight clients at a time: streams and whole texts, some cancelled, some out of time, some refused."""

    def visit(number: int) -> tuple[str, list[helper.Answer], str]:
        sent, prompt = some_settings(number), f"prompt {number}"
        words = {"stop_words": list(sent.pop("stop"))} if "stop" in sent else {}
        with Call(tritonserver.grpc, PLAIN, inputs(prompt, **ASKED)) as cancelled:
            begun = cancelled.next().outputs["text_output"]
        with pytest.raises(Refused, match=r"deadline of|retry later"):  # it has places for three
            ask(tritonserver, FAULTY, inputs(prompt, **SLOWLY), timeout=0.05)
        with pytest.raises(Refused, match="min_tokens"):
            ask(tritonserver, PLAIN, inputs(prompt, max_tokens=1, min_tokens=2))
        streamed = ask(tritonserver, PLAIN, inputs(prompt, stream=True, **sent, **words))
        alone = {"exclude_input_in_output": True} if number % 2 else {}
        (whole,) = ask(tritonserver, PLAIN, inputs(prompt, **alone, **sent, **words))
        return begun, streamed, whole.outputs["text_output"]

    with ThreadPoolExecutor(8) as threads:
        visits = list(threads.map(visit, range(12)))
    for number, (begun, streamed, whole) in enumerate(visits):
        expected = list(served_llm.stream(f"prompt {number}", SamplingParams(**some_settings(number))))
        assert [answer.outputs["text_output"] for answer in streamed] == [chunk.text for chunk in expected]
        assert [answer.final for answer in streamed] == [False] * (len(expected) - 1) + [True]
        assert whole == ("" if number % 2 else f"prompt {number}") + "".join(chunk.text for chunk in expected)
        assert served_llm.generate(f"prompt {number}", GREEDY)[0].text.startswith(begun)


def test_counts_reasons_and_acceptance_are_those_of_the_result(tritonserver: TritonServer, served_llm: LLM) -> None:
    names = ("vllm:spec_decode_num_draft_tokens_total", "draftwood_generation_tokens_total", "draftwood_requests_total")
    before = [metric(tritonserver, name, model=PLAIN) for name in names]
    result = served_llm.generate("hello", SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, logprobs=0))[0]
    flags = {f"return_{name}": True for name in ("num_input_tokens", "num_output_tokens", "finish_reason", "log_probs")}
    (answer,) = ask(tritonserver, PLAIN, inputs("hello", max_tokens=16, end_id=-1, return_perf_metrics=True, **flags))
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
    wait_for(lambda: [metric(tritonserver, name, model=PLAIN) for name in names] == expected)
    first = metric(tritonserver, "draftwood_time_to_first_token_seconds_count", model=PLAIN)
    assert 0 < first <= metric(tritonserver, "draftwood_requests_total", model=PLAIN)


def test_speculation_and_forms_are_parameters(tritonserver: TritonServer, served_llm: LLM) -> None:
    sent, greedy = inputs("hello", max_tokens=12, stream=True, end_id=-1), replace(GREEDY, max_tokens=12)
    expected = list(served_llm.stream("hello", greedy, speculative=replace(OWN, grow="chain", max_draft_len=2)))
    changed = ask(tritonserver, PLAIN, sent, grow="chain", max_draft_len=2)
    assert [answer.outputs["text_output"] for answer in changed] == [chunk.text for chunk in expected]
    assert len(ask(tritonserver, PLAIN, sent, num_draft_tokens=0)) == 12
    drawn: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "seed": 4}
    form = served_llm.generate("hello", SamplingParams(**drawn, structured=StructuredOutput(regex="[ab]{3}c")))[0].text
    tensors = inputs("hello", exclude_input_in_output=True, **drawn)
    (answer,) = ask(tritonserver, PLAIN, tensors, structured_outputs='{"regex": "[ab]{3}c"}')
    assert answer.outputs["text_output"] == form and re.fullmatch("[ab]{3}c", form)


def test_http_generate(tritonserver: TritonServer, served_llm: LLM) -> None:
    expected = served_llm.generate("hello", replace(GREEDY, max_tokens=8))[0].text
    body = {"text_input": "hello", "max_tokens": 8, "ignore_eos": True, "stop_words": ["\x00"]}
    status, text = post(tritonserver, f"{PLAIN}/generate", body | {"exclude_input_in_output": True})
    assert status == 200 and json.loads(text)["text_output"] == expected
    status, text = post(tritonserver, f"{PLAIN}/generate_stream", body | {"stream": True, "return_finish_reason": True})
    events = [json.loads(line[len("data: ") :]) for line in text.splitlines() if line]
    assert status == 200 and len(events) > 1
    assert "".join(event["text_output"] for event in events) == expected
    assert events[-1]["finish_reason"] == "length"


def test_the_example_of_the_documentation_runs(tritonserver: TritonServer, served_llm: LLM) -> None:
    page = (ROOT / "docs" / "triton.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0].replace("localhost:8001", tritonserver.grpc)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == served_llm.generate("def main():", SamplingParams(temperature=0))[0].text


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
    tritonserver: TritonServer, sent: list[Any], parameters: dict[str, Any], named: str
) -> None:
    with pytest.raises(Refused, match=named):
        ask(tritonserver, PLAIN, sent, **parameters)
    assert len(ask(tritonserver, PLAIN, BRIEF)) == 1


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
def test_http_errors(tritonserver: TritonServer, body: dict[str, Any] | bytes, status: int, named: str) -> None:
    got, text = post(tritonserver, f"{PLAIN}/generate", body)
    assert (got, named in text) == (status, True), text


values = st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=4)
OTHERS = ("text_input", "sampling_parameters", "id", "parameters")
names = st.sampled_from([*sorted(SPECULATION), *TritonBody.model_fields, *TritonBody.neutral, *OTHERS])


@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(names, values | st.lists(values, max_size=3), max_size=4))
def test_whatever_is_posted_is_answered(tritonserver: TritonServer, body: dict[str, Any]) -> None:
    """An answer, or the client's error with its reason; 500 is what Triton itself has for JSON it cannot read."""
    status, text = post(tritonserver, f"{PLAIN}/generate", {"text_input": "hello", "max_tokens": 4} | body)
    assert (status == 200 and "text_output" in text) or (status in (400, 500) and len(text) > 20), (status, text)
    assert metric(tritonserver, "draftwood_requests_total", model=PLAIN, finish_reason="error") == 0
