"""How a body becomes JSON: before FastAPI and pydantic see it, and beside the event loop where that takes long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from ...models.errors import RequestError
from .json_text import parsed

LONG_BODY = 1 << 16  # bytes; reading so many takes about a millisecond


class JsonRequest(Request):
    """A request whose body is read by `json_text.parsed`."""

    async def json(self) -> Any:
        """The body's content. Raises JSONDecodeError, which FastAPI makes a RequestValidationError of."""
        body = await self.body()
        if len(body) > LONG_BODY:
            return await asyncio.to_thread(content_of, body)
        return content_of(body)


class JsonRoute(APIRoute):
    """Hands JsonRequests to its endpoint."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def with_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return with_json


def content_of(body: bytes) -> Any:
    try:
        return parsed(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError("it is not UTF-8", "", 0) from error
    except RequestError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error
