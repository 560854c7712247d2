"""Parses a body as JSON before FastAPI and pydantic read it, and in another thread if the body is long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders

from ....models.errors import RequestError
from ..json_text import parse

LONG_BODY = 1 << 16  # bytes; parsing this many takes about a millisecond


class JsonRequest(Request):
    """A request whose body is parsed by `json_text.parse`."""

    async def json(self) -> Any:
        """The body's content. Raises JSONDecodeError, which FastAPI turns into a RequestValidationError."""
        body = await self.body()
        if len(body) > LONG_BODY:
            return await asyncio.to_thread(content_of, body)
        return content_of(body)


class JsonRoute(APIRoute):
    """A route that passes a JsonRequest to its endpoint."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def with_json(request: Request) -> Response:
            scope = request.scope
            if is_of_no_other_page(request.headers):
                headers = MutableHeaders(raw=[*scope["headers"]])
                headers["content-type"] = "application/json"
                scope = {**scope, "headers": headers.raw}
            return await handle(JsonRequest(scope, request.receive))

        return with_json


def is_of_no_other_page(headers: Headers) -> bool:
    """Whether no page of another site can have sent a request, so that its body is JSON whatever it is called, as
    `curl -d` sends it. A browser sends an Origin with every POST of a page, and asks before one that is called JSON."""
    return "origin" not in headers and headers.get("sec-fetch-site", "none") in ("none", "same-origin")


def content_of(body: bytes) -> Any:
    try:
        return parse(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError("it is not UTF-8: send it as such, and not compressed", "", 0) from error
    except RequestError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error
