"""The endpoint /infill, in llama.cpp's format, which editors speak."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field, StringConstraints

from ....models.errors import RequestError
from ...decoding.stats import SpecDecodeStats
from ...prompt import Prompt
from ...sampling.params import LARGEST_COUNT, SamplingParams
from ...text.infill import File, Infill
from ...text.writer import StreamChunk
from ..body import Strict
from .answers import Answer, as_json
from .api import OpenAIApi
from .bodies import IGNORED, MAX_CHOICES, MAX_PROMPTS, NEUTRAL, CompletionBody

MAX_FIELDS, MAX_FIELD = 64, 200  # names of an answer's fields, and characters of one


class Extra(Strict):
    """Another file, or a part of it. time: when llama.vim took it, which has no effect."""

    text: str
    filename: str = "tmp"
    time: Any = None


class InfillBody(CompletionBody):
    """POST /infill. The text stands between `input_prefix` with `prompt` and `input_suffix`."""

    # Hints for llama.cpp's slots, and limits by a clock, under which a text would depend on the machine's load.
    ignored = IGNORED | {"n_indent", "n_keep", "t_max_predict_ms", "t_max_prompt_ms"}
    neutral = {**NEUTRAL, "n_probs": (0,), "return_tokens": (False,), "lora": ([],)}  # noqa: RUF012 - as above
    default_tokens = None

    prompt: str = Field("", description="the end of the prefix, which the answer continues")
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[Extra], Field(fail_fast=True, max_length=MAX_PROMPTS)] = Field([])
    n: int = Field(1, ge=1, le=MAX_CHOICES, alias="n_cmpl", description="with several texts the answer is a list")
    n_predict: int | None = Field(None, ge=-1, le=LARGEST_COUNT, description="default -1: as the context has room for")
    response_fields: (
        Annotated[
            list[Annotated[str, StringConstraints(max_length=MAX_FIELD)]],
            Field(fail_fast=True, max_length=MAX_FIELDS),
        ]
        | None
    ) = Field(None, description="only these fields, such as content or timings/prompt_n")

    @property
    def token_limit(self) -> int | None:
        """0, with which editors have a prompt read before they need it, writes one token that is not sent."""
        return self.max_tokens if self.n_predict in (None, -1) else max(1, self.n_predict or 0)

    @property
    def prompts(self) -> list[Prompt | Infill]:
        files = [File(extra.filename, extra.text) for extra in self.input_extra]
        return [Infill(self.input_prefix + self.prompt, self.input_suffix, files)]

    def check(self) -> None:
        super().check()
        if self.best_of is not None or self.echo or self.logprobs is not None or self.prompt_logprobs is not None:
            raise RequestError("/infill has texts alone: leave out best_of, echo, logprobs and prompt_logprobs")
        if self.suffix or self.model_fields_set & {"stream_options"}:
            raise RequestError("suffix and stream_options are of /v1/completions: send input_suffix, or leave them out")
        if self.max_tokens is not None and self.n_predict is not None:
            raise RequestError("n_predict is max_tokens by another name: send one of them")


class Asked(NamedTuple):
    """What an answer needs of its request."""

    params: SamplingParams
    fields: Sequence[str] | None
    reads: bool  # whether only the prompt is to be read


class InfillAnswer(Answer):
    """Texts with llama.cpp's fields."""

    done = b""

    def __init__(self, asked: Asked, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._asked = asked
        self._held: list[list[int]] = [[] for _ in self.choices]  # tokens of a character that is incomplete

    def add(self, index: int, chunk: StreamChunk) -> dict[str, Any] | None:
        self._held[index] += chunk.token_ids
        if (written := super().add(index, chunk)) is None:
            return None
        (choice,) = written["choices"]
        tokens, self._held[index] = self._held[index], []
        return self._written(index, choice["text"], tokens, chunk.finish_reason)

    def whole(self) -> Response:
        texts = [self._written(i, "".join(each.texts), [], each.finish_reason) for i, each in enumerate(self.choices)]
        return as_json(texts if len(texts) > 1 else texts[0])

    def _written(self, index: int, text: str, tokens: Sequence[int], reason: str | None) -> dict[str, Any]:
        choice, evaluated = self.choices[index], sum(map(len, self._prompts))
        predicted = 0 if self._asked.reads else choice.num_tokens
        content: dict[str, Any] = {"index": index, "content": text if predicted else ""}
        content |= {"tokens": list(tokens)[:predicted], "id_slot": 0, "stop": reason is not None}
        content |= {"tokens_predicted": predicted, "tokens_evaluated": evaluated}
        if reason is not None:
            params, word = self._asked.params, choice.stopped
            content |= {
                "model": self._head["model"],
                "generation_settings": {
                    "n_predict": params.max_tokens,
                    **{name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")},
                },
                "truncated": False,
                "stop_type": "limit" if reason == "length" else "eos" if word is None else "word",
                "stopping_word": word or "",
                "tokens_cached": choice.stats.num_cached_tokens,
                "timings": self._timings(choice.stats),
            }
        found = {name: at(content, name) for name in self._asked.fields or ()}
        return content if self._asked.fields is None else {name: it for name, it in found.items() if it is not None}

    def _timings(self, stats: SpecDecodeStats) -> dict[str, Any]:
        read = sum(map(len, self._prompts)) - stats.num_cached_tokens
        timings: dict[str, Any] = {"cache_n": stats.num_cached_tokens}
        measured = ("prompt", read, stats.prompt_seconds), ("predicted", stats.num_tokens, stats.decode_seconds)
        for name, count, seconds in measured:
            timings |= {
                f"{name}_n": count,
                f"{name}_ms": 1e3 * seconds,
                f"{name}_per_token_ms": 1e3 * seconds / max(1, count),
                f"{name}_per_second": count / seconds if seconds else 0.0,
            }
        return timings | {"draft_n": stats.num_draft_tokens, "draft_n_accepted": stats.num_accepted_tokens}


class InfillApi:
    """The endpoint."""

    def __init__(self, api: OpenAIApi) -> None:
        self._api = api

    async def infill(self, body: InfillBody, request: Request) -> Response:
        asked = await self._api.read(body, request)
        known = Asked(asked.params, body.response_fields, reads=body.n_predict == 0)
        return await self._api.answer(body, request, asked, partial(InfillAnswer, known))


def at(content: Any, place: str) -> Any:
    """The item of nested objects at a place such as timings/prompt_n; None if there is none."""
    for name in place.split("/"):
        content = content.get(name) if isinstance(content, dict) else None
    return content
