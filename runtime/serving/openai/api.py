"""The endpoints below /v1: from a body to an answer, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from ....models.errors import DraftwoodError, RequestError
from ...decoding.queue import max_client_places
from ...prompt import Prompt
from ...requests.async_llm import AsyncLLM, RequestStream
from ...sampling.params import SamplingParams
from ...sampling.thought import Thought
from ...speculation.config import SpeculativeConfig
from ...structured.grammars import Prepared
from ...text.infill import Infill, Infilling
from ...text.token_texts import TokenTexts
from ..http.errors import UnknownModel
from ..waiting import TimeLimit, disconnected, while_connected
from .answers import Answer, as_json, check_log_probabilities
from .bodies import ChatBody, CompletionBody, GenerationBody
from .content import ContentForm
from .formats import AnswerFormat, ChatFormat, CompletionFormat
from .streams import Numbered, merged
from .tool_use import tool_use

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # otherwise nginx would buffer events
T = TypeVar("T")
log = logging.getLogger(__name__)


class PreparedRequest(NamedTuple):
    """A request whose texts were read; nothing is generated yet."""

    limit: TimeLimit
    prompts: list[list[int]]
    echoes: list[str | None]  # of each prompt: the text before an answer's own
    config: SpeculativeConfig | None
    params: SamplingParams
    prepared: Prepared
    format: AnswerFormat


class OpenAIApi:
    """The endpoints of one model."""

    def __init__(self, async_llm: AsyncLLM, model: str, request_seconds: float | None) -> None:
        """model: its name in requests. request_seconds: time limit of a request."""
        self.async_llm, self.name = async_llm, model
        self._llm = async_llm.llm
        self._request_seconds = request_seconds
        self._max_length = self._llm.bundle.manifest.max_length
        self._texts = TokenTexts(self._llm.tokenizer)
        self._card = {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "draftwood",
            "max_model_len": self._max_length,
        }

    async def models(self) -> Response:
        return as_json({"object": "list", "data": [self._card]})

    async def model(self, name: str) -> Response:
        self.begin(name)
        return as_json(self._card)

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        return await self.answer(body, request, await self.read(body, request))

    async def chat(self, body: ChatBody, request: Request) -> Response:
        return await self.answer(body, request, await self.read(body, request))

    def begin(self, model: str | None) -> TimeLimit:
        """The time of a request for a model. Raises UnknownModel for another one than this."""
        if model not in (None, self.name, f"{self.name}:latest"):  # Ollama's clients name a tag
            raise UnknownModel(model, self.name)
        return TimeLimit(self._request_seconds)

    async def while_connected(self, request: Request, work: Coroutine[Any, Any, T], limit: TimeLimit | None) -> T:
        """See `while_connected`. The body must have been read before."""
        return await while_connected(work, disconnected(request.receive), limit)

    async def read(
        self, body: CompletionBody | ChatBody, request: Request, most_tokens: int | None = None
    ) -> PreparedRequest:
        """Check a request and read its texts. most_tokens: of an answer without a limit of its own. Raises ConfigError
        or RequestError."""
        limit, client, content = self.begin(body.model), request.state.client, ContentForm()
        config = self._checked(body, 1 if isinstance(body, ChatBody) else len(body.prompts))
        format: AnswerFormat
        if isinstance(body, ChatBody):
            use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, self._llm.tokenizer)
            writing = self.async_llm.encode_chat(body.conversation, body.settings(told=use is not None), client)
            prompts = [await self.while_connected(request, writing, limit)]
            content = ContentForm(self._thought(body, prompts[0]), use, body.include_reasoning)
            shown = content._replace(thought=None) if body.stream_options.include_pieces else content
            if body.echoed is not None and shown.thought is not None:
                raise RequestError("echo: this model begins with a thought: leave it out, or turn thinking off")
            echoes, format = [body.echoed], ChatFormat(self._texts, body.logprobs, shown)
            default = min(most_tokens or self._max_length, self._room(prompts[0]))
        else:
            reading = (self.async_llm.encode(each, client) for each in body.prompts)
            prompts = [await self.while_connected(request, each, limit) for each in reading]
            echoes = [await self._echo(prompt, client) if body.echo else None for prompt in body.prompts]
            format, room = CompletionFormat(self._texts, body.logprobs is not None), self._room(prompts[0])
            default = room if body.default_tokens is None else body.default_tokens
        params = self._with_marks(body.sampling_params(default), content)
        if isinstance(body, CompletionBody) and any(isinstance(each, Infill) for each in body.prompts):
            ends = Infilling(self._llm.tokenizer).ends
            params = replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *ends))))
        check_log_probabilities(params, body.num_choices, [len(prompt) for prompt in prompts], self._max_length)
        request.state.params = params
        prepared = await self.while_connected(request, self.async_llm.prepare(params, client), limit)
        return PreparedRequest(
            limit, prompts, echoes, config, params, prepared._replace(thought=content.thought), format
        )

    def _thought(self, body: ChatBody, prompt: Sequence[int]) -> Thought | None:
        """The thought that an answer may begin with."""
        reasoning = self._llm.reasoning
        return None if reasoning is None else reasoning.thought(prompt, body.continued, body.thought_budget)

    def _with_marks(self, params: SamplingParams, content: ContentForm) -> SamplingParams:
        """The parameters of a request whose answer has thoughts and calls. Raises RequestError."""
        if content.thought is not None and self._llm.reasoning is not None and self._llm.reasoning.is_special:
            params = replace(params, skip_special_tokens=False)
        return params if content.use is None else content.use.applied(params)

    def submit(
        self, body: GenerationBody, client: str, asked: PreparedRequest, prompt: Sequence[int], **more: Any
    ) -> RequestStream:
        """Queue one text. more: settings of `AsyncLLM.generate` in the place of these."""
        options: dict[str, Any] = {
            "sampling_params": asked.params,
            "speculative": asked.config,
            "deadline_s": asked.limit.seconds,
            "arrived": asked.limit.arrived,
            "client": client,
            "user": body.client,
            "cache_salt": body.cache_salt,
            "prepared": asked.prepared,
        }
        return self.async_llm.generate(list(prompt), **options | more)

    def _checked(self, body: GenerationBody, num_prompts: int) -> SpeculativeConfig | None:
        """Do all checks that need no computation. Returns the settings of speculation. Raises ConfigError or
        RequestError, also for more choices than one client may ever have."""
        body.check()
        running, total = self.async_llm.max_running, num_prompts * body.num_choices
        room = running + max_client_places(self.async_llm.max_requests - running)
        if total > room:
            raise RequestError(
                f"{total} choices are more than the {room} this server runs and queues for one client: "
                "send fewer prompts or a smaller n or best_of"
            )
        return self._llm.resolved(body.speculation())

    def _room(self, prompt: Sequence[int]) -> int:
        """The most tokens after a prompt."""
        return min(self._max_length, self.async_llm.max_tokens_after(prompt))

    async def _echo(self, prompt: Prompt | Infill, client: str) -> str:
        if isinstance(prompt, str):
            return prompt
        assert not isinstance(prompt, Infill), "CompletionBody.check refuses it"
        return await self.async_llm.texts.compute(lambda _: self._llm.tokenizer.decode(prompt), len(prompt), client)

    async def answer(
        self, body: GenerationBody, request: Request, asked: PreparedRequest, write: Callable[..., Answer] = Answer
    ) -> Response:
        """Generate the choices of each prompt, and send them whole or as a stream. write: opens the answer."""
        streams = await self._submit_all(body, request.state.client, asked)
        answer = write(
            asked.format,
            self._texts,
            self.name,
            asked.prompts,
            [echo for echo in asked.echoes for _ in range(body.num_choices)],
            proposal=0 if asked.config is None else asked.config.max_tokens,
            best=None if body.num_choices == body.n else body.n,
            shows_prompts=body.prompt_logprobs is not None,
            skips_special=asked.params.skip_special_tokens,
            thought=asked.prepared.thought,
            options=body.stream_options,
        )
        request.state.answer = answer
        chunks = merged(streams, request.state.held, keeps=answer.keeps or not body.stream)
        if not body.stream:
            return await self.while_connected(request, collected(answer, chunks), None)
        # Before the first chunk, an error can still be an HTTP status.
        first = await self.while_connected(request, anext(chunks), None)
        return StreamingResponse(server_sent(answer, first, chunks), media_type=answer.media, headers=STREAM_HEADERS)

    async def _submit_all(self, body: GenerationBody, client: str, asked: PreparedRequest) -> list[RequestStream]:
        """Queue all choices, or none. Others have their turn between two of them, whose settings take time."""
        streams: list[RequestStream] = []
        choices, call = replace(asked.params, n=body.num_choices).choices(), object()
        try:
            for prompt in asked.prompts:
                for choice in choices:
                    streams.append(self.submit(body, client, asked, prompt, sampling_params=choice, call=call))
                    await asyncio.sleep(0)
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        return streams


async def collected(answer: Answer, chunks: AsyncGenerator[Numbered, None]) -> Response:
    """The whole answer. Another thread writes it, because it may have many megabytes."""
    async with aclosing(chunks):
        async for index, chunk in chunks:
            answer.note(index, chunk)
    response = await asyncio.to_thread(answer.whole)
    answer.forget()
    return response


async def server_sent(answer: Answer, first: Numbered, chunks: AsyncGenerator[Numbered, None]) -> AsyncIterator[bytes]:
    """The answer as server-sent events, or lines. An error after the first chunk is an event."""
    try:
        async with aclosing(chunks):
            for each in answer.opened():
                yield each
            for each in answer.added(*first):
                yield each
            del first  # it may hold the log-probabilities of a long prompt
            async for index, added in chunks:
                for each in answer.added(index, added):
                    yield each
        for each in answer.ended():
            yield each
    except Exception as error:
        if not isinstance(error, DraftwoodError):
            log.exception("a request failed while it was answered")
        answer.failure = type(error).__name__
        for each in answer.failed(error):
            yield each
