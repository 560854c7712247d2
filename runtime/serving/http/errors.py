"""All errors in OpenAI's form."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ....models.errors import ConfigError, RequestError
from ...engines.shared.memory import OutOfMemoryError
from ...requests.async_llm import DeadlineError, QueueFullError, ShutdownError
from ...sampling.structured import at

FIELD = re.compile(r"(?!(?:str|int|float|bool)$)[a-z_]+")  # pydantic lists the branches of a union among the fields
PLACES = "this server has /v1/chat/completions, /v1/completions and what /openapi.json lists"
MAX_SHOWN = 200  # characters of a client's text that are quoted
RETRY_SECONDS = 1  # the shortest running requests end about this soon


class Refusal(NamedTuple):
    """An error as an answer. retry_after: seconds after which a retry may succeed. closing: whether the answer also
    closes the connection. allow: the methods that the address has, if the request had another."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    closing: bool = False
    allow: str | None = None

    @property
    def body(self) -> bytes:
        """The JSON in ASCII, because a message may quote half of a surrogate pair, which UTF-8 cannot express."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

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
    """The error of a body. Of several errors, and of the branches of a union, the most specific one is reported: an
    error of a present value of the right type. What is too long was not read to its end."""
    worst = max(error.errors(), key=lambda it: (it["type"] == "too_long", len(it["loc"]), specific(it["type"])))
    if worst["type"] == "json_invalid":
        return Refusal(400, f"the body is not valid JSON: {worst['ctx']['error']}")
    *fields, last = worst["loc"]
    names = [name for name in fields[1:] if isinstance(name, int) or FIELD.fullmatch(name)]
    if worst["type"] == "extra_forbidden":
        place = at("", *names, last)
        return Refusal(400, f"{place} is not supported by this server: leave it out", param=place)
    if fields and (isinstance(last, int) or FIELD.fullmatch(last)):
        names.append(last)
    if not names:
        return Refusal(400, "the body must be a JSON object, sent with Content-Type: application/json")
    return Refusal(400, f"{at('', *names)}: {worst['msg']}", param=str(names[0]))


def specific(kind: str) -> int:
    """How specific a kind of pydantic's errors is; greater is more specific."""
    return 0 if kind.endswith("_type") else 1 if kind == "missing" else 2


def add_errors(app: FastAPI) -> None:
    """Make every error of `app` a Refusal."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            refusal = invalid(error)
        elif isinstance(error, HTTPException):
            asked = f"{request.method} {request.url.path}"[:MAX_SHOWN]
            allow = (error.headers or {}).get("Allow")
            refusal = Refusal(error.status_code, f"{error.detail}: {asked}; {PLACES}", allow=allow)
        else:
            refusal = refusal_of(error)
        return Response(refusal.body, refusal.status, refusal.headers)

    expected = (RequestError, ConfigError, QueueFullError, ShutdownError, DeadlineError, MemoryError, OutOfMemoryError)
    for kind in (*expected, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
