"""OpenAI's Responses API, over the endpoint of a chat; and the responses that are kept for later requests."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import Response

from ....models.errors import RequestError, shown
from .api import OpenAIApi
from .responses_answer import ResponseAnswer
from .responses_body import ResponsesBody, add_items
from .translated import Turns

STORED_CHARACTERS = 64 << 20  # of all that is kept


class StoredResponse(NamedTuple):
    """A response, and the turns up to its end, without instructions."""

    client: str
    messages: list[dict[str, Any]]
    size: int  # characters


class StoredResponses:
    """The latest responses, as many as fit. A client sees its own ones."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()

    def keep(self, client: str, turns: Turns, response: dict[str, Any]) -> None:
        """Keep a response, in the place of the oldest ones where there is no room."""
        add_items(turns, response["output"])
        messages = turns.messages
        self._kept[response["id"]] = StoredResponse(client, messages, sum(len(str(each)) for each in messages))
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
        kept = self._kept.get(name)
        if kept is None or kept.client != client:
            raise RequestError(
                f"previous_response_id: {shown(name)} is not stored, or no longer: send the earlier items in input"
            )
        return Turns(kept.messages)


class ResponsesApi:
    """The endpoint."""

    def __init__(self, api: OpenAIApi, stored: int) -> None:
        """stored: the most responses that are kept."""
        self._api, self._stored = api, StoredResponses(stored)

    async def create(self, body: ResponsesBody, request: Request) -> Response:
        client = request.state.client
        turns = self._stored.turns(client, body.previous_response_id)
        chat = body.chat(turns)
        keep = partial(self._stored.keep, client, turns) if body.store and self._stored.most else None
        write = partial(ResponseAnswer, body=body, finished=keep)
        return await self._api.answer(chat, request, await self._api.read(chat, request), write)
