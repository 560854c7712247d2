"""The endpoints /tokenize and /detokenize, with vLLM's format."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from threading import Event
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from ....models.errors import RequestError
from ...engines.shared.memory import check_text_memory
from ...prompt import too_long_error
from ...requests.async_llm import AsyncLLM
from ...text.chat_prompt import write_conversation
from ...text.conversation import ChatSettings
from ...text.tokenizer import token_texts
from .answers import as_json
from .chat_body import Message, Messages, conversation, tools_for_template
from .protocol import Body, TokenIds
from .streams import CLIENT_CLOSED, ClientGone, TimeLimit, while_connected
from .tool_use import Tools

OF_CONVERSATIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeBody(Body):
    """POST /tokenize. Either a text, which is tokenized as by /v1/completions, or a conversation, which is tokenized as
    by /v1/chat/completions."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = Field(True, description="for a text: add the begin-of-text token")
    add_generation_prompt: bool = Field(True, description="for a conversation: add the beginning of an answer")
    continue_final_message: bool = Field(False, description="for a conversation: end inside the last message")
    chat_template_kwargs: dict[str, Any] = Field({}, description="for a conversation: variables of the chat template")
    tools: Tools | None = Field(None, description="for a conversation: the tools that the model is told of")
    return_token_strs: bool = Field(False, description="also return the text of each token")

    def check(self) -> None:
        """Raises RequestError without exactly one of both, and for a field of the other one that asks for something."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either a prompt or messages")
        if self.messages is None:
            given = [name for name in OF_CONVERSATIONS if getattr(self, name) not in (None, *self.neutral[name])]
            if given:
                raise RequestError(f"{given[0]} is for a conversation: send messages, or leave it out")
        elif "add_special_tokens" in self.model_fields_set and self.add_special_tokens:
            raise RequestError("add_special_tokens is for a prompt: the chat template writes them, so leave it out")


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class TokensApi:
    """Both endpoints. other_model: returns the refusal of another model's name. request_seconds: time limit.

    Texts that are too long for the model are refused, as in completions: tokenizing megabytes takes many seconds.
    """

    def __init__(
        self,
        async_llm: AsyncLLM,
        other_model: Callable[[str | None], Response | None],
        request_seconds: float | None = None,
    ) -> None:
        self._texts = async_llm.texts
        self._tokenizer = async_llm.llm.tokenizer
        self._text_of = token_texts(self._tokenizer)
        self._max_length = async_llm.llm.bundle.manifest.max_length
        self._other_model = other_model
        self._request_seconds = request_seconds

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        return await self._answered(body.model, request, self._tokenized(body, request.state.client))

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        work = self._texts.compute(lambda _: self._detokenized(body), len(body.tokens), request.state.client)
        return await self._answered(body.model, request, work)

    async def _answered(self, model: str | None, request: Request, work: Coroutine[Any, Any, Response]) -> Response:
        """The result of `work`, unless the request is for another model, its client leaves or its time ends."""
        if refused := self._other_model(model):
            work.close()
            return refused
        try:
            return await while_connected(request, work, TimeLimit(self._request_seconds))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)

    async def _tokenized(self, body: TokenizeBody, client: str) -> Response:
        body.check()
        if body.messages is None:
            text, special = body.prompt or "", body.add_special_tokens
        else:
            text, special = await self._texts.write(partial(self._written, body.messages, body), client), False
        answer = partial(self._answer, text, special, body.return_token_strs)
        return await self._texts.compute(answer, len(text), client)

    def _written(self, messages: list[Message], body: TokenizeBody, given_up: Event) -> str:
        kwargs, tools = body.chat_template_kwargs, tools_for_template(body.tools)
        settings = ChatSettings(body.add_generation_prompt, body.continue_final_message, kwargs, tools)
        return write_conversation(self._tokenizer, conversation(messages), settings, given_up)

    def _answer(self, text: str, add_special_tokens: bool, with_texts: bool, given_up: Event) -> Response:
        tokens = self._encode(text, add_special_tokens, given_up)
        content: dict[str, Any] = {"count": len(tokens), "max_model_len": self._max_length, "tokens": tokens}
        if with_texts:
            content["token_strs"] = list(map(self._text_of, tokens))
        return as_json(content)

    def _encode(self, text: str, add_special_tokens: bool, given_up: Event) -> list[int]:
        if (least := self._tokenizer.fewest_tokens(text)) >= self._max_length:
            raise too_long_error(f"at least {least}", self._max_length)
        check_text_memory(text)
        return self._tokenizer.encode(text, add_special_tokens, given_up)

    def _detokenized(self, body: DetokenizeBody) -> Response:
        size = self._tokenizer.vocab_size
        if len(body.tokens) > self._max_length:
            raise too_long_error(str(len(body.tokens)), self._max_length)
        for token in body.tokens:
            if not 0 <= token < size:
                raise RequestError(f"{token} is not a token id between 0 and {size - 1}: leave it out")
        return as_json({"prompt": self._tokenizer.decode(body.tokens, skip_special_tokens=False)})
