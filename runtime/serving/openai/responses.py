"""OpenAI's Responses API, over the endpoint of a chat; and the responses that are kept for later requests."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ....models.errors import RequestError, shown
from .answers import as_json
from .api import OpenAIApi
from .responses_answer import ResponseAnswer
from .responses_body import ResponsesBody, add_items
from .translated import Turns

STORED_CHARACTERS = 64 << 20  # of all that is kept


class StoredResponse(NamedTuple):
    """A response, and the turns up to its end, without instructions."""

    client: str
    response: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int  # characters


class StoredResponses:
    """The latest responses, as many as fit. A client sees its own ones."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = Lock()  # whole answers end in threads of their own

    def keep(self, client: str, turns: Turns, response: dict[str, Any]) -> None:
        """Keep a response, in the place of the oldest ones where there is no room."""
        add_items(turns, response["output"])
        messages = turns.messages
        size = sum(len(str(each)) for each in (*messages, response))
        with self._lock:
            self._kept[response["id"]] = StoredResponse(client, response, messages, size)
            while len(self._kept) > self.most or sum(each.size for each in self._kept.values()) > STORED_CHARACTERS:
                self._kept.popitem(last=False)

    def turns(self, client: str, name: str | None) -> Turns:
        """The turns up to the end of a response; none without a name. Raises RequestError."""
        if name is None:
            return Turns()
        if not self.most:
            raise RequestError(
                "previous_response_id: this server stores no responses: start it with --stored-responses, or send the "
                "earlier items in input"
            )
        kept = self._own(client, name)
        if kept is None:
            raise RequestError(
                f"previous_response_id: {shown(name)} is not stored, or no longer: send the earlier items in input"
            )
        return Turns(kept.messages)

    async def send(self, name: str, request: Request) -> Response:
        """A stored response, whole. Another thread writes it, because it may have megabytes."""
        if asked := next(iter(request.query_params), None):
            raise RequestError(f"{shown(asked)}: a stored response is sent whole and as it was: leave it out")
        return await asyncio.to_thread(as_json, self._found(name, request).response)

    async def delete(self, name: str, request: Request) -> Response:
        """Responses that went on from it stay."""
        self._found(name, request)
        with self._lock:
            self._kept.pop(name, None)
        return as_json({"id": name, "object": "response", "deleted": True})

    def _own(self, client: str, name: str) -> StoredResponse | None:
        kept = self._kept.get(name)
        return None if kept is None or kept.client != client else kept

    def _found(self, name: str, request: Request) -> StoredResponse:
        if (kept := self._own(request.state.client, name)) is None:
            raise HTTPException(404, f"the response {shown(name)} is not stored, or no longer")
        return kept


class ResponsesApi:
    """The endpoint that makes responses."""

    def __init__(self, api: OpenAIApi, stored: StoredResponses) -> None:
        self._api, self._stored = api, stored

    async def create(self, body: ResponsesBody, request: Request) -> Response:
        client = request.state.client
        turns = self._stored.turns(client, body.previous_response_id)
        chat = body.chat(turns)
        keep = partial(self._stored.keep, client, turns) if body.store and self._stored.most else None
        write = partial(ResponseAnswer, body=body, finished=keep)
        return await self._api.answer(chat, request, await self._api.read(chat, request), write)
