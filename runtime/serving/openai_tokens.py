"""Text to tokens and back over HTTP, as vLLM has it: /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi.responses import Response
from pydantic import Field

from ...models.errors import RequestError
from ..conversation import to_template
from ..prompt import too_long
from ..tokenizer import Tokenizer
from .openai_answers import as_json
from .openai_protocol import Body, Message, TokenIds, conversation


class TokenizeBody(Body):
    """POST /tokenize. Either a text, which gets the tokens that /v1/completions would put around it, or a conversation,
    which gets what /v1/chat/completions makes of it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, fail_fast=True)
    add_special_tokens: bool = Field(True, description="of a text: whether it begins with the begin-of-text token")
    add_generation_prompt: bool = Field(True, description="of a conversation: whether an answer begins at its end")
    return_token_strs: bool = Field(False, description="every token's own text, too")


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class TokensApi:
    """Both endpoints. other_model: the refusal of a model's name.

    What could never fit the model is refused, as in completions: to read megabytes of text takes many seconds.
    """

    def __init__(
        self, tokenizer: Tokenizer, max_length: int, other_model: Callable[[str | None], Response | None]
    ) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._other_model = other_model

    async def tokenize(self, body: TokenizeBody) -> Response:
        if refused := self._other_model(body.model):
            return refused
        return await asyncio.to_thread(self._tokenized, body)

    async def detokenize(self, body: DetokenizeBody) -> Response:
        if refused := self._other_model(body.model):
            return refused
        return await asyncio.to_thread(self._detokenized, body)

    def _tokenized(self, body: TokenizeBody) -> Response:
        tokens = self._tokens(body)
        content: dict[str, Any] = {"count": len(tokens), "max_model_len": self._max_length, "tokens": tokens}
        if body.return_token_strs:
            content["token_strs"] = [self._tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        return as_json(content)

    def _tokens(self, body: TokenizeBody) -> list[int]:
        if body.prompt is not None and body.messages is None:
            return self._encode(body.prompt, body.add_special_tokens)
        if body.messages is None or body.prompt is not None:
            raise RequestError("send either a prompt or messages")
        messages = to_template(conversation(body.messages))
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=body.add_generation_prompt)
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if (least := self._tokenizer.fewest_tokens(text)) >= self._max_length:
            raise too_long(f"at least {least}", self._max_length)
        return self._tokenizer.encode(text, add_special_tokens)

    def _detokenized(self, body: DetokenizeBody) -> Response:
        size = self._tokenizer.vocab_size
        if len(body.tokens) > self._max_length:
            raise too_long(str(len(body.tokens)), self._max_length)
        for token in body.tokens:
            if not 0 <= token < size:
                raise RequestError(f"{token} is not a token id between 0 and {size - 1}: leave it out")
        return as_json({"prompt": self._tokenizer.decode(body.tokens, skip_special_tokens=False)})
