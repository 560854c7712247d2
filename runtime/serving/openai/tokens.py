"""The endpoints /tokenize and /detokenize, with vLLM's format."""

from __future__ import annotations

from threading import Event
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ....models.errors import RequestError
from ...prompt import encode_text, too_long_error
from ...text.chat_prompt import write_conversation
from ...text.tokenizer import token_texts
from .answers import as_json
from .api import OpenAIApi
from .bodies import DetokenizeBody, TokenizeBody, chat_settings, conversation


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
            messages, settings = conversation(body.messages), chat_settings(body, body.tools)
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
