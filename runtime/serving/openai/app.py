"""The OpenAI-compatible HTTP application over AsyncLLM: completions, chat, models, health and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from ....models.errors import DraftwoodError, RequestError, shown
from ....models.release import own_version
from ...decoding.queue import max_client_places
from ...prepared import Prepared
from ...prompt import Prompt
from ...requests.async_llm import AsyncLLM, RequestStream
from ...sampling.params import SamplingParams
from ...speculation.config import SpeculativeConfig
from ...text.token_texts import TokenTexts
from ...text.writer import StreamChunk
from ..http.errors import Refusal, add_errors, refusal_of
from ..http.guard import REQUEST_ID, Limits, RequestGuard
from ..http.pages import add_pages
from ..json_text import pieces
from .answers import Answer, as_json, check_log_probabilities
from .chat_body import ChatBody
from .completion_body import COMPLETION_TOKENS, CompletionBody
from .explain import ExplainApi, add_explanations
from .formats import AnswerFormat, ChatFormat, CompletionFormat
from .protocol import GenerationBody, StreamOptions
from .route import JsonRoute
from .streams import CLIENT_CLOSED, ClientGone, Numbered, TimeLimit, merged, while_connected
from .tokens import TokensApi
from .tool_use import ToolUse, tool_use

ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}},
    "4XX": {"description": "refused", "content": {"application/json": {}}},
    "5XX": {"description": "not now", "content": {"application/json": {}}},
}
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # otherwise nginx would buffer events
log = logging.getLogger(__name__)


def create_app(
    async_llm: AsyncLLM,
    model: str,
    limits: Limits,
    request_seconds: float | None = None,
    allowed_origins: Sequence[str] = (),
    with_pages: bool = True,
    trace: Callable[[ASGIApp], ASGIApp] | None = None,
) -> ASGIApp:
    """The ASGI application.

    model: the model's name in requests. request_seconds: time limit of a request. allowed_origins: origins of web pages
    whose scripts may use the server, "*" for any. with_pages: whether there are web pages, see `http.pages`, and
    explanations for them. trace: adds a middleware that records spans, see `tracing`.
    """
    # Its pages would load other servers' scripts, and it would answer an address with a slash behind it by nothing.
    app = FastAPI(title="draftwood", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.route_class = JsonRoute
    add_errors(app)
    add_state(app, async_llm)
    api = OpenAIApi(async_llm, model, request_seconds)
    app.add_api_route("/v1/models", api.models, methods=["GET"], response_class=Response)
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"], response_class=Response, responses=ANSWERS)
    tokens = TokensApi(async_llm, api.other_model, request_seconds)
    posted: dict[str, Callable[..., Awaitable[Response]]] = {
        "/v1/completions": api.complete,
        "/v1/chat/completions": api.chat,
        "/tokenize": tokens.tokenize,
        "/detokenize": tokens.detokenize,
    }
    if with_pages:
        add_pages(app, async_llm.llm.get_default_sampling_params())
        add_explanations(app, ExplainApi(async_llm, api.other_model, request_seconds))
    for path, route in posted.items():
        app.add_api_route(path, route, methods=["POST"], response_class=Response, responses=ANSWERS)
    guard: ASGIApp = RequestGuard(app if trace is None else trace(app), limits, async_llm.metrics.record_answer)
    if limits.trusted_proxies:  # uvicorn has its own types of the ASGI protocol
        guard = cast(ASGIApp, ProxyHeadersMiddleware(cast(Any, guard), list(limits.trusted_proxies)))
    if not allowed_origins:
        return guard
    return CORSMiddleware(
        guard,
        allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("retry-after", REQUEST_ID),
    )


def add_state(app: FastAPI, async_llm: AsyncLLM) -> None:
    """Add the endpoints for orchestrators and Prometheus."""

    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_class=PlainTextResponse, responses=ANSWERS)
    async def health() -> Response:
        """Whether this process can answer requests. If not, it must be restarted."""
        return state("ok", async_llm.trouble)

    @app.head("/health/ready", include_in_schema=False)
    @app.get("/health/ready", response_class=PlainTextResponse, responses=ANSWERS)
    async def ready() -> Response:
        """Whether new requests should be sent to this process."""
        return state("ready", async_llm.trouble or (None if async_llm.accepting else "stopping"))

    @app.get("/version")
    async def release() -> dict[str, str]:
        return {"version": own_version()}

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(async_llm.to_prometheus(), media_type="text/plain; version=0.0.4; charset=utf-8")


def state(well: str, trouble: str | None) -> Response:
    return PlainTextResponse(trouble or well, 200 if trouble is None else 503)


class OpenAIApi:
    """The endpoints below /v1."""

    def __init__(self, async_llm: AsyncLLM, model: str, request_seconds: float | None) -> None:
        self._async_llm = async_llm
        self._llm = async_llm.llm
        self._request_seconds = request_seconds
        self._max_length = self._llm.bundle.manifest.max_length
        self._texts = TokenTexts(self._llm.tokenizer)
        self._card = {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "draftwood",
            "max_model_len": self._max_length,
        }

    async def models(self) -> Response:
        return as_json({"object": "list", "data": [self._card]})

    async def model(self, name: str) -> Response:
        return self.other_model(name) or as_json(self._card)

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        limit = TimeLimit(self._request_seconds)
        if refused := self.other_model(body.model):
            return refused
        config = self._checked(body, len(body.prompts))
        try:
            client = request.state.client
            reading = (self._async_llm.encode(each, client) for each in body.prompts)
            prompts = [await while_connected(request, each, limit) for each in reading]
            echoes = [await self._echo(prompt, client) if body.echo else None for prompt in body.prompts]
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)
        format = CompletionFormat(self._texts, body.logprobs is not None)
        return await self._answer(request, limit, body, config, format, prompts, echoes, COMPLETION_TOKENS)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        limit = TimeLimit(self._request_seconds)
        if refused := self.other_model(body.model):
            return refused
        config = self._checked(body, 1)
        use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, self._llm.tokenizer)
        try:
            settings = body.settings(told=use is not None)
            writing = self._async_llm.encode_chat(body.conversation, settings, request.state.client)
            prompt = await while_connected(request, writing, limit)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)
        format = ChatFormat(self._texts, body.logprobs, use)
        default_max_tokens = min(self._max_length, self._async_llm.max_tokens_behind(prompt))
        echoed = [body.echoed]
        return await self._answer(request, limit, body, config, format, [prompt], echoed, default_max_tokens, use)

    def other_model(self, name: str | None) -> Response | None:
        """The refusal if `name` is another model than this one; else None."""
        if name in (None, self._card["id"]):
            return None
        message = f"the model {shown(name)} does not exist; this server has {self._card['id']!r}"
        refusal = Refusal(404, message, param="model", code="model_not_found")
        return Response(refusal.body, refusal.status, refusal.headers)

    def _checked(self, body: GenerationBody, num_prompts: int) -> SpeculativeConfig | None:
        """Do all checks that need no computation. Returns the settings of speculation. Raises ConfigError or
        RequestError, also for more choices than one client may ever have."""
        body.check()
        running, total = self._async_llm.max_running, num_prompts * body.num_choices
        room = running + max_client_places(self._async_llm.max_requests - running)
        if total > room:
            raise RequestError(
                f"{total} choices are more than the {room} this server runs and queues for one client: "
                "send fewer prompts or a smaller n or best_of"
            )
        return self._llm.resolved(body.speculation())

    async def _echo(self, prompt: Prompt, client: str) -> str:
        if isinstance(prompt, str):
            return prompt
        return await self._async_llm.texts.compute(lambda _: self._llm.tokenizer.decode(prompt), len(prompt), client)

    async def _answer(
        self,
        request: Request,
        limit: TimeLimit,
        body: GenerationBody,
        config: SpeculativeConfig | None,
        format: AnswerFormat,
        prompts: Sequence[list[int]],
        echoes: Sequence[str | None],
        default_max_tokens: int,
        use: ToolUse | None = None,
    ) -> Response:
        """Generate the choices of each prompt, and send them whole or as a stream."""
        params = body.sampling_params(default_max_tokens)
        params = params if use is None else use.applied(params)
        check_log_probabilities(params, body.num_choices, [len(prompt) for prompt in prompts], self._max_length)
        request.state.params = params
        try:
            preparing = self._async_llm.prepare(params, request.state.client)
            prepared = await while_connected(request, preparing, limit)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)
        streams = await self._submit(body, request.state.client, limit, prompts, config, params, prepared)
        proposal = 0 if config is None else config.max_tokens
        echoed = [echo for echo in echoes for _ in range(body.num_choices)]
        best = None if body.num_choices == body.n else body.n
        shows_prompts = body.prompt_logprobs is not None
        model = str(self._card["id"])
        skips = params.skip_special_tokens
        answer = Answer(format, self._texts, model, prompts, echoed, proposal, best, shows_prompts, skips)
        request.state.answer = answer
        chunks = merged(streams, request.state.held, keeps=not body.stream)
        try:
            if not body.stream:
                return await while_connected(request, collected(answer, chunks))
            # Before the first chunk, an error can still be an HTTP status.
            first = await while_connected(request, anext(chunks))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)
        events = server_sent(answer, first, chunks, body.stream_options)
        return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)

    async def _submit(
        self,
        body: GenerationBody,
        client: str,
        limit: TimeLimit,
        prompts: Sequence[list[int]],
        config: SpeculativeConfig | None,
        params: SamplingParams,
        prepared: Prepared,
    ) -> list[RequestStream]:
        """Queue all choices, or none. Others have their turn between two of them, whose settings take time."""
        streams: list[RequestStream] = []
        choices, call = replace(params, n=body.num_choices).choices(), object()
        try:
            for prompt in prompts:
                for choice in choices:
                    stream = self._async_llm.generate(
                        prompt,
                        choice,
                        speculative=config,
                        deadline_s=limit.seconds,
                        arrived=limit.arrived,
                        client=client,
                        user=body.client,
                        cache_salt=body.cache_salt,
                        call=call,
                        prepared=prepared,
                    )
                    streams.append(stream)
                    await asyncio.sleep(0)
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        return streams


async def collected(answer: Answer, chunks: AsyncGenerator[Numbered, None]) -> Response:
    """The whole answer. Another thread writes it, because it may have many megabytes."""
    async with aclosing(chunks):
        async for index, chunk in chunks:
            answer.note(index, chunk)
    response = await asyncio.to_thread(answer.whole)
    answer.forget()
    return response


async def server_sent(
    answer: Answer, first: Numbered, chunks: AsyncGenerator[Numbered, None], options: StreamOptions
) -> AsyncIterator[bytes]:
    """The answer as server-sent events. An error after the first chunk is an event."""

    def sent(chunk: dict[str, Any], added: StreamChunk) -> bytes:
        if options.include_pieces:
            chunk["choices"][0]["pieces"] = [piece._asdict() for piece in added.pieces]
        return accounted(chunk)

    def accounted(chunk: dict[str, Any]) -> bytes:
        if options.include_usage:
            chunk["usage"] = answer.usage() if options.continuous_usage_stats else None
        return event(chunk)

    try:
        async with aclosing(chunks):
            for opening in answer.openings():
                yield accounted(opening)
            if chunk := answer.add(*first):
                yield sent(chunk, first.chunk)
            del first  # it may hold the log-probabilities of a long prompt
            async for index, added in chunks:
                if chunk := answer.add(index, added):
                    yield sent(chunk, added)
        if options.include_usage:
            yield event(answer.last())
    except Exception as error:
        if not isinstance(error, DraftwoodError):
            log.exception("a request failed while it was answered")
        answer.failure = type(error).__name__
        yield b"data: " + refusal_of(error).body + b"\n\n"
    yield b"data: [DONE]\n\n"


def event(content: Mapping[str, Any]) -> bytes:
    return f"data: {''.join(pieces(content))}\n\n".encode()
