"""The endpoints /tokenize and /detokenize, with vLLM's format."""

from __future__ import annotations

from threading import Event
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from ....models.errors import RequestError
from ...prompt import encode_text, too_long_error
from ...text.chat_prompt import write_conversation
from ...text.conversation import ChatSettings
from ...text.tokenizer import token_texts
from ..body import TokenIds
from .answers import as_json
from .api import OpenAIApi
from .bodies import Messages, ModelBody, chat_settings, conversation
from .tool_use import Tools

OF_CONVERSATIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeBody(ModelBody):
    """POST /tokenize. Either a text, which is tokenized as by /v1/completions, or a conversation, which is tokenized as
    by /v1/chat/completions."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = Field(True, description="for a text: add the begin-of-text token")
    add_generation_prompt: bool = Field(True, description="for a conversation: add the beginning of an answer")
    continue_final_message: bool = Field(False, description="for a conversation: end inside the last message")
    chat_template_kwargs: dict[str, Any] = Field({}, description="for a conversation: variables of the chat template")
    tools: Tools | None = Field(None, description="for a conversation: the tools that the model is told of")
    return_token_strs: bool = Field(False, description="also return the text of each token")

    @property
    def settings(self) -> ChatSettings:
        """Raises RequestError."""
        begins, continues = self.add_generation_prompt, self.continue_final_message
        return chat_settings(begins, continues, self.chat_template_kwargs, self.tools)

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


class DetokenizeBody(ModelBody):
    """POST /detokenize."""

    tokens: TokenIds


class TokensApi:
    """Both endpoints. Texts that are too long for the model are refused, as in completions: tokenizing megabytes takes
    many seconds."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api, self._texts = api, api.async_llm.texts
        self._tokenizer = api.async_llm.llm.tokenizer
        self._text_of = token_texts(self._tokenizer)
        self._max_length = api.async_llm.llm.bundle.manifest.max_length

    async def tokenize(self, body: TokenizeBody, request: Request) -> Response:
        limit = self._api.begin(body.model)
        body.check()
        return await self._api.while_connected(request, self._tokenized(body, request.state.client), limit)

    async def detokenize(self, body: DetokenizeBody, request: Request) -> Response:
        limit = self._api.begin(body.model)
        work = self._texts.compute(lambda given_up: self._text(body), len(body.tokens), request.state.client)
        return await self._api.while_connected(request, work, limit)

    async def _tokenized(self, body: TokenizeBody, client: str) -> Response:
        text = body.prompt or ""
        if body.messages is not None:
            messages, settings = conversation(body.messages), body.settings
            text = await self._texts.write(
                lambda given_up: write_conversation(self._tokenizer, messages, settings, given_up), client
            )
        return await self._texts.compute(lambda given_up: self._tokens(text, body, given_up), len(text), client)

    def _tokens(self, text: str, body: TokenizeBody, given_up: Event) -> Response:
        special = body.messages is None and body.add_special_tokens
        tokens = encode_text(self._tokenizer, text, self._max_length, special, given_up)
        content: dict[str, Any] = {"count": len(tokens), "max_model_len": self._max_length, "tokens": tokens}
        if body.return_token_strs:
            content["token_strs"] = list(map(self._text_of, tokens))
        return as_json(content)

    def _text(self, body: DetokenizeBody) -> Response:
        size = self._tokenizer.vocab_size
        if len(body.tokens) > self._max_length:
            raise too_long_error(str(len(body.tokens)), self._max_length)
        for token in body.tokens:
            if not 0 <= token < size:
                raise RequestError(f"{token} is not a token id between 0 and {size - 1}: leave it out")
        return as_json({"prompt": self._tokenizer.decode(body.tokens, skip_special_tokens=False)})
