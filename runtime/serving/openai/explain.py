"""Explains how a request is answered: the same bodies as for completions, answered with `explain_html`'s page."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from ....models.errors import RequestError
from ...inspection.explain import RoundRecorder
from ...inspection.explain_html import to_html
from ...text.tokenizer import token_texts
from ..http.pages import page
from .api import OpenAIApi, PreparedRequest
from .bodies import ChatBody, CompletionBody, GenerationBody

MAX_TOKENS = 512  # of an explained text: the page shows every round
MAX_NODES = 10_000  # a page of about 8 MB; later rounds are left out, and the page says so


class ExplainApi:
    """Both endpoints.

    With the seed of an earlier request the text is that request's text, so the rounds of an answer can be looked at
    afterwards, and requests that nobody looks at cost nothing.
    """

    def __init__(self, api: OpenAIApi) -> None:
        self._api, self._tokenizer = api, api.async_llm.llm.tokenizer
        self._text_of = token_texts(self._tokenizer)

    async def completion(self, body: CompletionBody, request: Request) -> Response:
        """The rounds of a completion, drawn on a page."""
        if len(body.prompts) != 1:
            raise RequestError("an explanation takes one prompt, not several")
        return await self._explained(body, request, await self._api.read(body, request))

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """The rounds of an answer in a conversation, drawn on a page."""
        return await self._explained(body, request, await self._api.read(body, request, MAX_TOKENS))

    async def _explained(self, body: GenerationBody, request: Request, asked: PreparedRequest) -> Response:
        if body.stream or body.num_choices != 1:
            raise RequestError("an explanation is one page about one text: leave out stream, n and best_of")
        if not 1 <= asked.params.max_tokens <= MAX_TOKENS:
            raise RequestError(f"max_tokens: an explanation has at least one and at most {MAX_TOKENS} tokens")
        return await self._api.while_connected(request, self._page(body, request.state.client, asked), asked.limit)

    async def _page(self, body: GenerationBody, client: str, asked: PreparedRequest) -> Response:
        recorder, (prompt,) = RoundRecorder(self._text_of, MAX_NODES), asked.prompts
        stream = self._api.submit(body, client, asked, prompt, observe=recorder.observe)
        try:
            async for chunk in stream:
                stats = chunk.stats
        finally:
            await stream.aclose()

        def written() -> Response:
            text = self._tokenizer.decode(prompt, skip_special_tokens=False)
            return page(to_html(recorder.explanation(text, asked.config, asked.params, stats)))

        return await self._api.async_llm.texts.compute(lambda given_up: written(), len(prompt), client)
