"""All errors in OpenAI's form, in Anthropic's, or in Ollama's."""

from __future__ import annotations

import json
from typing import NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from ....models.errors import ConfigError, DraftwoodError, RequestError, shown
from ...engines.shared.memory import OutOfMemoryError
from ...requests.async_llm import DeadlineError, QueueFullError, ShutdownError
from ...requests.models import NotOpened
from ..body import problem_of
from ..waiting import ClientGone

PLACES = "this server has /v1/chat/completions, /v1/messages, /v1/responses, /api/chat and what /openapi.json lists"
MESSAGES, OLLAMA = "/v1/messages", "/api/"  # the addresses of Anthropic's and of Ollama's API begin so
KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
KINDS |= {503: "overloaded_error", 504: "timeout_error"}
MAX_SHOWN = 200  # characters of a client's text that are quoted
CLIENT_CLOSED = 499  # nginx' status for requests whose client has disconnected
RETRY_SECONDS = 1  # the shortest running requests end about this soon


class UnknownModel(DraftwoodError):
    """A request names no model of the server, or none where it has several."""

    def __init__(self, name: object, own: str) -> None:
        super().__init__(f"the model {shown(name)} does not exist; this server has {own!r}")


class Refusal(NamedTuple):
    """An error as an answer."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None  # seconds after which a retry may succeed
    closing: bool = False  # whether the answer also closes the connection
    allow: str | None = None  # the methods that the address has, if the request had another

    @property
    def body(self) -> bytes:
        """The JSON in ASCII, because a message may quote half of a surrogate pair, which UTF-8 cannot express."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    @property
    def as_message(self) -> bytes:
        """The same in Anthropic's form."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return json.dumps({"type": "error", "error": {"type": kind, "message": self.message}}).encode()

    @property
    def as_line(self) -> bytes:
        """The same in Ollama's form."""
        return json.dumps({"error": self.message}).encode()

    def body_for(self, path: str) -> bytes:
        """The JSON in the form of an address' API."""
        if path.startswith(OLLAMA):
            return self.as_line
        return self.as_message if path.startswith(MESSAGES) else self.body

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.allow is not None:
            headers["allow"] = self.allow
        if self.closing:
            headers["connection"] = "close"
        return headers


def refusal_of(error: Exception) -> Refusal:
    """The answer to an exception. Only errors of the client are described to the client."""
    if isinstance(error, (RequestError, ConfigError)):
        return Refusal(400, str(error))
    if isinstance(error, UnknownModel):
        return Refusal(404, str(error), param="model", code="model_not_found")
    if isinstance(error, NotOpened):
        return Refusal(503, str(error), "server_error", code="model_not_opened")
    if isinstance(error, QueueFullError):
        return Refusal(429, str(error), "rate_limit_error", code="queue_full", retry_after=RETRY_SECONDS)
    if isinstance(error, (MemoryError, OutOfMemoryError)):
        message = str(error) or "there is too little memory for this request just now: send it again later"
        return Refusal(503, message, "server_error", code="out_of_memory", retry_after=RETRY_SECONDS)
    if isinstance(error, ShutdownError):
        return Refusal(503, str(error), "server_error", code="shutting_down", retry_after=RETRY_SECONDS)
    if isinstance(error, DeadlineError):
        return Refusal(504, str(error), "server_error", code="deadline_exceeded")
    return Refusal(500, "the server failed to answer this request; its log says why", "server_error")


def invalid(error: RequestValidationError) -> Refusal:
    """The refusal of a body, whose errors have "body" before their places."""
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        return Refusal(400, f"the body is not valid JSON: {errors[0]['ctx']['error']}")
    problem = problem_of([{**each, "loc": each["loc"][1:]} for each in errors])
    return Refusal(400, problem.message, param=problem.param)


def methods_of(request: Request) -> str:
    """The methods that the request's address has. Starlette names those of its first route."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = [route.methods or () for route in routes if route.matches(request.scope)[0] != Match.NONE]
    return ", ".join(sorted(set[str]().union(*found)))


def add_errors(app: FastAPI) -> None:
    """Make every error of `app` a Refusal."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone):
            return Response(status_code=CLIENT_CLOSED)
        if isinstance(error, RequestValidationError):
            refusal = invalid(error)
        elif isinstance(error, HTTPException):
            asked = f"{request.method} {request.url.path}"[:MAX_SHOWN]
            allow = methods_of(request) if error.status_code == 405 else None
            refusal = Refusal(error.status_code, f"{error.detail}: {asked}; {PLACES}", allow=allow)
        else:
            refusal = refusal_of(error)
        return Response(refusal.body_for(request.url.path), refusal.status, refusal.headers)

    of_requests = (RequestError, ConfigError, UnknownModel, ClientGone, RequestValidationError, HTTPException)
    of_load = (QueueFullError, ShutdownError, DeadlineError, MemoryError, OutOfMemoryError)
    for kind in (*of_requests, *of_load, Exception):
        app.add_exception_handler(kind, answer)
