"""OpenTelemetry spans of the endpoints that generate, with the names of the gen_ai semantic conventions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...sampling.params import SamplingParams
from .answers import Answer

OPERATIONS = dict.fromkeys(("/v1/completions", "/api/generate"), "text_completion")
OPERATIONS |= dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"), "chat")
W3C = TraceContextTextMapPropagator()


class Tracing:
    """ASGI middleware: a span for each POST to one of OPERATIONS, from the complete body to the end of the answer.

    The span belongs to the trace of the request's `traceparent`, if it has one. It has no text of prompt or answer. The
    application puts `params` and `answer` into the scope's state.
    """

    def __init__(self, app: ASGIApp, model: str, provider: TracerProvider) -> None:
        self._app = app
        self._model = model
        self._tracer = provider.get_tracer("draftwood")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 500

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        state = scope.setdefault("state", {})
        asked = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "draftwood",
            "gen_ai.request.model": self._model,
        }
        with self._tracer.start_as_current_span(
            f"{operation} {self._model}",
            W3C.extract(Headers(scope=scope)),
            SpanKind.SERVER,
            asked,
            record_exception=False,  # its message may contain the user's text
            set_status_on_exception=False,
        ) as span:
            try:
                await self._app(scope, receive, send_noted)
            finally:
                note(span, status, begin, state)


def note(span: Span, status: int, begin: float, state: Mapping[str, Any]) -> None:
    """Add what is known at the end of a request. begin: of the span, by time.perf_counter."""
    span.set_attribute("http.response.status_code", status)
    params: SamplingParams | None = state.get("params")
    answer: Answer | None = state.get("answer")
    failure = str(status) if status >= 500 else None
    if params is not None:
        span.set_attributes(request_attributes(params))
    if answer is not None:
        failure = answer.failure or failure
        span.set_attributes(answer_attributes(answer, "error" if failure else "abort"))
        if answer.first_token_at is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", answer.first_token_at - begin)
    if failure is not None:
        span.set_attribute("error.type", failure)
        span.set_status(StatusCode.ERROR)


def request_attributes(params: SamplingParams) -> dict[str, Any]:
    """The settings of a request. A limit that removes no token is left out."""
    asked: dict[str, Any] = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
    }
    return {**asked, "gen_ai.request.top_k": params.top_k} if params.top_k else asked


def answer_attributes(answer: Answer, cut_off: str) -> dict[str, Any]:
    """Token counts, vLLM's numbers of speculative decoding, and the reasons for the ends of the choices. cut_off: the
    reason of a choice that has no end."""
    account = answer.account()
    usage, speculative = account["usage"], account.get("metrics", {}).get("speculative_decoding", {})
    return {
        "gen_ai.response.id": answer.id,
        "gen_ai.response.finish_reasons": [choice.finish_reason or cut_off for choice in answer.choices],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        **{f"draftwood.speculative_decoding.{name}": value for name, value in speculative.items()},
    }


@contextmanager
def sending(endpoint: str | None) -> Iterator[TracerProvider]:
    """A provider whose spans go to a collector by OTLP over HTTP, in the background; at the end the last ones are sent.

    endpoint: the collector's address for traces; None: that of the standard variables. These also set the headers, the
    sampling and the name of the service, which is `draftwood` by default.
    """
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "draftwood"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    try:
        yield provider
    finally:
        provider.shutdown()
