"""The endpoints of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from ..openai.answers import as_json
from ..openai.api import OpenAIApi
from .answers import MessageAnswer
from .bodies import CountBody, MessagesBody


class MessagesApi:
    """Both endpoints, over those of a chat."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api

    async def create(self, body: MessagesBody, request: Request) -> Response:
        chat = body.chat()
        return await self._api.answer(chat, request, await self._api.read(chat, request), MessageAnswer)

    async def count(self, body: CountBody, request: Request) -> Response:
        (tokens,) = (await self._api.read(body.chat(), request)).prompts
        return as_json({"input_tokens": len(tokens)})
