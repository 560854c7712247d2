"""The HTTP application over several models: each request goes to the application of the model that it names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from json import JSONDecodeError

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...models.errors import DraftwoodError, RequestError
from ..requests.async_llm import AsyncLLM
from ..requests.models import Models
from .body import NO_OBJECT
from .http.errors import CLIENT_CLOSED, UnknownModel, add_errors, refusal_of
from .http.guard import refuse, replay
from .openai.answers import as_json
from .openai.route import LONG_BODY, content_of
from .waiting import ClientGone, TimeLimit, disconnected, while_connected


class SeveralModels:
    """An ASGI application. paths: of the applications of models; everything else is the same for all."""

    def __init__(
        self,
        models: Models,
        app: FastAPI,
        paths: frozenset[str],
        make: Callable[[AsyncLLM, str], ASGIApp],
        request_seconds: float | None,
    ) -> None:
        """app: gets the lists of models. make: the application of one model, which is open. request_seconds: the most
        for which a request waits for its model."""
        self._request_seconds = request_seconds
        self._models, self._app, self._paths, self._make = models, app, paths, make
        self._made: dict[AsyncLLM, ASGIApp] = {}
        self._created = int(time.time())
        add_errors(app)
        app.add_api_route("/v1/models", self.list, methods=["GET"], response_class=Response)
        app.add_api_route("/v1/models/{name:path}", self.one, methods=["GET"], response_class=Response)

    async def list(self) -> Response:
        return as_json({"object": "list", "data": [self._card(name) for name in self._models.states]})

    async def one(self, name: str) -> Response:
        if name not in self._models.states:
            raise self._unknown(name)
        return as_json(self._card(name))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        body = (await receive())["body"]  # all of it, see RequestGuard
        try:
            name = await self._named(body)
            async with AsyncExitStack() as stack:
                opening = stack.enter_async_context(self._models.using(name))
                async_llm = await while_connected(opening, disconnected(receive), TimeLimit(self._request_seconds))
                if async_llm not in self._made:
                    opened = self._models.opened.values()  # the applications of closed ones would keep their memory
                    self._made = {each: made for each, made in self._made.items() if each.llm in opened}
                    self._made[async_llm] = self._make(async_llm, name)
                await self._made[async_llm](scope, replay(body, receive), send)
        except (DraftwoodError, MemoryError) as error:  # before the application of a model, which answers its own
            await refuse(refusal_of(error), send, scope["path"])
        except ClientGone:
            await Response(status_code=CLIENT_CLOSED)(scope, receive, send)

    async def _named(self, body: bytes) -> str:
        """The model that a body names."""
        try:
            content = await asyncio.to_thread(content_of, body) if len(body) > LONG_BODY else content_of(body)
        except JSONDecodeError as error:
            raise RequestError(f"the body is not valid JSON: {error.msg}") from error
        if not isinstance(content, dict):
            raise RequestError(NO_OBJECT)
        name = content.get("model")
        if isinstance(name, str) and name not in self._models.states:
            name = name.removesuffix(":latest")  # Ollama's clients name a tag
        if not isinstance(name, str) or name not in self._models.states:
            raise self._unknown(name)
        return name

    def _unknown(self, name: object) -> UnknownModel:
        return UnknownModel(name, " ".join(self._models.states))

    def _card(self, name: str) -> dict[str, object]:
        state = self._models.states[name]
        return {"id": name, "object": "model", "created": self._created, "owned_by": "draftwood", "state": state}
