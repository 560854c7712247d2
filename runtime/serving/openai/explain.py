"""Explains how a request is answered: the same bodies as for completions, answered with `explain_html`'s page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ....models.errors import RequestError
from ...inspection.explain import RoundRecorder
from ...inspection.explain_html import to_html
from ...requests.async_llm import AsyncLLM
from ...sampling.params import SamplingParams
from ...text.tokenizer import token_texts
from ..http.pages import page
from .chat_body import ChatBody
from .completion_body import COMPLETION_TOKENS, CompletionBody
from .protocol import GenerationBody
from .streams import CLIENT_CLOSED, ClientGone, TimeLimit, while_connected
from .tool_use import tool_use

MAX_TOKENS = 512  # of an explained text: the page shows every round
MAX_NODES = 10_000  # a page of about 8 MB; later rounds are left out, and the page says so


class ExplainApi:
    """Both endpoints. other_model: returns the refusal of another model's name. request_seconds: a request's time
    limit.

    With the seed of an earlier request the text is that request's text, so the rounds of an answer can be looked at
    afterwards, and requests that nobody looks at cost nothing.
    """

    def __init__(
        self,
        async_llm: AsyncLLM,
        other_model: Callable[[str | None], Response | None],
        request_seconds: float | None,
    ) -> None:
        self._async_llm, self._llm = async_llm, async_llm.llm
        self._other_model, self._request_seconds = other_model, request_seconds
        self._text_of = token_texts(self._llm.tokenizer)

    async def completion(self, body: CompletionBody, request: Request) -> Response:
        """The rounds of a completion, drawn on a page."""
        limit = TimeLimit(self._request_seconds)
        if refused := self._other_model(body.model):
            return refused
        if len(body.prompts) != 1:
            raise RequestError("an explanation takes one prompt, not several")
        try:
            reading = self._async_llm.encode(body.prompts[0], request.state.client)
            prompt = await while_connected(request, reading, limit)
            params = body.sampling_params(COMPLETION_TOKENS)
            return await while_connected(request, self._explained(body, params, prompt, request.state.client, limit))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """The rounds of an answer in a conversation, drawn on a page."""
        limit = TimeLimit(self._request_seconds)
        if refused := self._other_model(body.model):
            return refused
        use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, self._llm.tokenizer)
        try:
            settings = body.settings(told=use is not None)
            writing = self._async_llm.encode_chat(body.conversation, settings, request.state.client)
            prompt = await while_connected(request, writing, limit)
            params = body.sampling_params(min(MAX_TOKENS, self._async_llm.max_tokens_behind(prompt)))
            params = params if use is None else use.applied(params)
            return await while_connected(request, self._explained(body, params, prompt, request.state.client, limit))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)

    async def _explained(
        self, body: GenerationBody, params: SamplingParams, prompt: Sequence[int], client: str, limit: TimeLimit
    ) -> Response:
        body.check()
        if body.stream or body.num_choices != 1:
            raise RequestError("an explanation is one page about one text: leave out stream, n and best_of")
        if not 1 <= params.max_tokens <= MAX_TOKENS:
            raise RequestError(f"max_tokens: an explanation has at least one and at most {MAX_TOKENS} tokens")
        config = self._llm.resolved(body.speculation())
        prepared = await self._async_llm.prepare(params, client)
        recorder = RoundRecorder(self._text_of, MAX_NODES)
        stream = self._async_llm.generate(
            list(prompt),
            params,
            speculative=config,
            deadline_s=limit.seconds,
            arrived=limit.arrived,
            client=client,
            user=body.client,
            cache_salt=body.cache_salt,
            prepared=prepared,
            observe=recorder.observe,
        )
        try:
            async for chunk in stream:
                stats = chunk.stats
        finally:
            await stream.aclose()

        def written(given_up: Event) -> Response:
            text = self._llm.tokenizer.decode(prompt, skip_special_tokens=False)
            return page(to_html(recorder.explanation(text, config, params, stats)))

        return await self._async_llm.texts.compute(written, len(prompt), client)


def add_explanations(app: FastAPI, api: ExplainApi) -> None:
    """Add both endpoints, below those that they explain."""
    answers: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/html": {}}},
        "4XX": {"description": "refused", "content": {"application/json": {}}},
        "5XX": {"description": "not now", "content": {"application/json": {}}},
    }
    app.add_api_route(
        "/v1/completions/explain", api.completion, methods=["POST"], response_class=Response, responses=answers
    )
    app.add_api_route(
        "/v1/chat/completions/explain", api.chat, methods=["POST"], response_class=Response, responses=answers
    )
