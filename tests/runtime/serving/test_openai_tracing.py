"""Spans of requests: their names and numbers, their traces, and when there are none."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from answering import QuietHandler, answering
from serving import served, with_chat_template

from draftwood.cli.serve import spans_wanted, tracing
from draftwood.models.errors import ConfigError
from draftwood.runtime import LLM, SpeculativeConfig

pytest.importorskip("opentelemetry.sdk", reason="needs the [otel] extra")
httpx = pytest.importorskip("httpx", reason="needs httpx")
from inside import BODY, COMPLETIONS, post  # noqa: E402
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402 - only where it is installed
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes  # noqa: E402
from opentelemetry.trace import SpanKind  # noqa: E402

from draftwood.runtime.serving.openai.tracing import Tracing  # noqa: E402

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OF_ALL = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "draftwood", "gen_ai.request.model": "m"}
SPECULATIVE = "draftwood.speculative_decoding."


@pytest.fixture(scope="module")
def llm(tiny_bundle: Path) -> Iterator[LLM]:
    with LLM(tiny_bundle, SpeculativeConfig(budget="fixed"), threads=1) as llm:
        yield llm


def traced(
    llm: LLM, body: Mapping[str, Any], path: str = COMPLETIONS, **headers: str
) -> tuple[Any, list[ReadableSpan]]:
    """The answer to a request, and its spans."""
    spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    answer = post(llm, body, path, headers, trace=lambda app, model: Tracing(app, model, provider))
    return answer, list(spans.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_has_the_numbers_of_the_answer(llm: LLM, stream: bool) -> None:
    more = {"n": 2, "stream": stream, "top_p": 0.9} | ({"stream_options": {"include_usage": True}} if stream else {})
    answer, [span] = traced(llm, BODY | more, traceparent=f"00-{TRACE}-{PARENT}-01")
    assert answer.status_code == 200
    last = [line for line in answer.text.splitlines() if line][-2].removeprefix("data: ") if stream else answer.text
    content, found = json.loads(last), dict(span.attributes or {})
    assert span.name == "text_completion m" and span.kind is SpanKind.SERVER and span.status.is_unset
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT
    assert f"{span.context.trace_id:032x}" == TRACE
    seconds = found.pop("gen_ai.response.time_to_first_chunk")
    assert span.start_time is not None and span.end_time is not None
    assert isinstance(seconds, float) and 0 < seconds < 300 and span.end_time > span.start_time
    metrics = content["metrics"]["speculative_decoding"]
    assert metrics["num_draft_tokens"] > 0
    for name, value in metrics.items():
        assert found.pop(SPECULATIVE + name) == (tuple(value) if isinstance(value, list) else value), name
    usage = content["usage"]
    assert found == OF_ALL | {
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.id": content["id"],
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 40,
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "http.response.status_code": 200,
    }
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert {name for name in span.attributes or {} if name.startswith("gen_ai.")} <= known


def test_plain_decoding_has_no_acceptance_and_a_bad_traceparent_begins_a_trace(llm: LLM) -> None:
    _, [span] = traced(llm, BODY | {"speculative": False, "top_k": 3}, traceparent="00-nonsense")
    found = dict(span.attributes or {})
    assert span.parent is None and found["gen_ai.request.top_k"] == 3
    assert not [name for name in found if name.startswith(SPECULATIVE)]


def test_a_refused_request_is_no_error_of_the_server(llm: LLM) -> None:
    answer, [span] = traced(llm, BODY | {"n": "two"})
    assert answer.status_code == 400 and span.status.is_unset
    assert dict(span.attributes or {}) == OF_ALL | {"http.response.status_code": 400}
    _, [span] = traced(llm, {"messages": []}, "/v1/chat/completions")
    assert span.name == "chat m"
    assert traced(llm, {"prompt": "hello"}, "/tokenize")[1] == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_has_the_reason_of_the_answer(tiny_bundle: Path, tmp_path: Path, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "go"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "tool_choice": "required"}
    more = {"parallel_tool_calls": False, "max_tokens": 200, "temperature": 0, "stream": stream}
    with LLM(with_chat_template(tiny_bundle, tmp_path), threads=1) as llm:
        answer, [span] = traced(llm, body | more, "/v1/chat/completions")
    assert answer.status_code == 200 and '"finish_reason":"tool_calls"' in answer.text.replace(" ", "")
    assert dict(span.attributes or {})["gen_ai.response.finish_reasons"] == ("tool_calls",)


@pytest.mark.parametrize(("stream", "passes"), [(False, 0), (True, 0), (True, 6)])
def test_what_breaks_is_an_error_without_details(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool, passes: int
) -> None:
    """A 500, or the last event of a stream that has begun; and an error of the span."""
    score, left = llm.target.score, iter(range(passes))

    def breaking(*arguments: Any) -> Any:
        if next(left, None) is None:
            raise ZeroDivisionError("an address in memory")
        return score(*arguments)

    monkeypatch.setattr(llm.target, "score", breaking)
    with caplog.at_level(logging.ERROR):
        answer, [span] = traced(llm, BODY | {"stream": stream, "speculative": None})
    text, found = answer.text, dict(span.attributes or {})
    if passes:
        *chunks, text, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
        assert done == "[DONE]" and chunks and "an address in memory" in caplog.text
    assert answer.status_code == found["http.response.status_code"] == (200 if passes else 500)
    assert json.loads(text)["error"]["type"] == "server_error"
    assert found["error.type"] and not span.status.is_ok and not span.status.is_unset
    assert found["gen_ai.response.finish_reasons"] == ("error",)
    assert "memory" not in answer.text + span.to_json()


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    "option, variables, wanted",
    [
        (None, {}, False),
        (None, {"OTEL_SERVICE_NAME": "x"}, False),
        ("http://127.0.0.1:9", {}, True),
        (None, ENDPOINT, True),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9"}, True),
        (None, {"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (None, ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        ("http://127.0.0.1:9", ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_spans_are_sent_where_they_are_asked_for(option: str | None, variables: dict[str, str], wanted: bool) -> None:
    assert spans_wanted(option, variables) is wanted


def test_a_collector_gets_the_spans_before_the_server_ends(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received: list[bytes] = []

    class Collector(QuietHandler):
        def do_POST(self) -> None:
            received.append(self.body())
            self.reply()

    for name in ("OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Collector)) as address:
        options = ("--otlp-traces-endpoint", f"{address}/v1/traces", "--served-model-name", "m")
        with served(tiny_bundle, *options) as running:
            httpx.post(f"{running.url}/completions", json=BODY, timeout=30).raise_for_status()
            assert running.ask("/health")[0] == 200
            running.process.terminate()
            assert running.process.wait(60) == 0
    [sent] = map(ExportTraceServiceRequest.FromString, received)
    [resource] = sent.resource_spans
    [span] = resource.scope_spans[0].spans
    service = {item.key: item.value.string_value for item in resource.resource.attributes}["service.name"]
    assert (span.name, service) == ("text_completion m", "draftwood")


def test_without_its_packages_the_option_is_refused_and_the_variables_warn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "draftwood.runtime.serving.openai.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
    with pytest.raises(ConfigError, match=r"pip install .*\[otel\]'"), tracing("http://127.0.0.1:9"):
        pass
    for name, value in ENDPOINT.items():
        monkeypatch.setenv(name, value)
    with tracing(None) as trace:
        assert trace is None
    assert "no spans are sent" in capsys.readouterr().err
