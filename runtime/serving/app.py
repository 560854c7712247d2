"""The HTTP application over AsyncLLM: OpenAI's, Anthropic's and Ollama's APIs, models, health and metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from ...models.release import own_version
from ..requests.async_llm import AsyncLLM
from ..requests.models import Models
from .anthropic.api import MessagesApi
from .http.errors import add_errors
from .http.guard import REQUEST_ID, STORED, Limits, RequestGuard
from .http.pages import add_pages
from .ollama.api import OllamaApi, add_models
from .openai.api import OpenAIApi
from .openai.explain import ExplainApi
from .openai.infill import InfillApi
from .openai.responses import ResponsesApi, StoredResponses
from .openai.route import JsonRoute
from .openai.tokens import TokensApi
from .several import SeveralModels

Trace = Callable[[ASGIApp, str], ASGIApp]  # by the name of the model
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "refused", "content": {"application/json": {}}},
    "5XX": {"description": "not now", "content": {"application/json": {}}},
}
MEDIA: dict[str, dict[str, Any]] = {"application/json": {}, "text/event-stream": {}, "application/x-ndjson": {}}
ANSWERS = {200: {"content": MEDIA}, **REFUSALS}
POSTED = frozenset(("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"))
POSTED |= {"/v1/responses", "/infill", "/tokenize", "/detokenize", "/api/chat", "/api/generate", "/api/show"}
PAGES = {200: {"content": {"text/html": {}}}, **REFUSALS}


def create_app(
    async_llm: AsyncLLM,
    model: str,
    limits: Limits,
    request_seconds: float | None = None,
    allowed_origins: Sequence[str] = (),
    with_pages: bool = True,
    trace: Trace | None = None,
    stored_responses: int = 0,
) -> ASGIApp:
    """The ASGI application of one model.

    model: the model's name in requests. request_seconds: time limit of a request. allowed_origins: origins of web pages
    whose scripts may use the server, "*" for any. with_pages: whether there are web pages, see `http.pages`, and
    explanations for them. trace: adds a middleware that records spans, see `tracing`. stored_responses: how many
    answers of /v1/responses are kept for later requests.
    """
    stored = StoredResponses(stored_responses)
    app = model_app(async_llm, model, request_seconds, with_pages, stored)
    add_state(app, async_llm, stored)
    add_models(app, lambda: {model: async_llm.llm})
    traced = app if trace is None else trace(app, model)
    return guarded(traced, limits, async_llm.metrics.record_answer, allowed_origins)


def create_app_of_several(
    models: Models,
    limits: Limits,
    request_seconds: float | None = None,
    allowed_origins: Sequence[str] = (),
    trace: Trace | None = None,
    stored_responses: int = 0,
) -> ASGIApp:
    """The same of several models, without pages."""
    app, stored = new_app(), StoredResponses(stored_responses)
    add_state(app, models, stored)
    add_models(app, lambda: models.opened)

    def make(async_llm: AsyncLLM, name: str) -> ASGIApp:
        made = model_app(async_llm, name, request_seconds, False, stored)
        return made if trace is None else trace(made, name)

    return guarded(
        SeveralModels(models, app, POSTED, make, request_seconds), limits, models.metrics.record_answer, allowed_origins
    )


def new_app() -> FastAPI:
    """Without pages of its own, which would load other servers' scripts; and an address that ends with a slash would be
    answered by nothing."""
    app = FastAPI(title="draftwood", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.router.route_class = JsonRoute
    return app


def model_app(
    async_llm: AsyncLLM, model: str, request_seconds: float | None, with_pages: bool, stored: StoredResponses
) -> FastAPI:
    """The endpoints of one model."""
    app = new_app()
    add_errors(app)
    api = OpenAIApi(async_llm, model, request_seconds)
    tokens, explain, messages = TokensApi(api), ExplainApi(api), MessagesApi(api)
    responses, ollama = ResponsesApi(api, stored), OllamaApi(api)
    app.add_api_route("/v1/models", api.models, methods=["GET"], response_class=Response)
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"], response_class=Response, responses=ANSWERS)
    posted: dict[str, Callable[..., Awaitable[Response]]] = {
        "/v1/completions": api.complete,
        "/v1/chat/completions": api.chat,
        "/v1/messages": messages.create,
        "/v1/messages/count_tokens": messages.count,
        "/v1/responses": responses.create,
        "/infill": InfillApi(api).infill,
        "/tokenize": tokens.tokenize,
        "/detokenize": tokens.detokenize,
        "/api/chat": ollama.chat,
        "/api/generate": ollama.generate,
        "/api/show": ollama.show,
    }
    assert posted.keys() == POSTED
    explained: dict[str, Callable[..., Awaitable[Response]]] = {
        "/v1/completions/explain": explain.completion,
        "/v1/chat/completions/explain": explain.chat,
    }
    if with_pages:
        add_pages(app, async_llm.llm.get_default_sampling_params())
        for path, route in explained.items():
            app.add_api_route(path, route, methods=["POST"], response_class=Response, responses=PAGES)
    for path, route in posted.items():
        app.add_api_route(path, route, methods=["POST"], response_class=Response, responses=ANSWERS)
    return app


def guarded(app: ASGIApp, limits: Limits, count: Callable[[int], None], allowed_origins: Sequence[str] = ()) -> ASGIApp:
    """The application behind the checks of requests. count: see RequestGuard."""
    guard: ASGIApp = RequestGuard(app, limits, count)
    if limits.trusted_proxies:  # uvicorn has its own types of the ASGI protocol
        guard = cast(ASGIApp, ProxyHeadersMiddleware(cast(Any, guard), list(limits.trusted_proxies)))
    if not allowed_origins:
        return guard
    return CORSMiddleware(
        guard,
        allowed_origins,
        allow_methods=("DELETE", "GET", "POST"),
        allow_headers=("*",),
        expose_headers=("retry-after", REQUEST_ID),
    )


def add_state(app: FastAPI, async_llm: AsyncLLM | Models, stored: StoredResponses) -> None:
    """Add the endpoints for orchestrators and Prometheus, and those of responses that any model wrote."""
    for method, answer in (("GET", stored.send), ("DELETE", stored.delete)):
        app.add_api_route(f"{STORED}{{name}}", answer, methods=[method], response_class=Response, responses=ANSWERS)

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
