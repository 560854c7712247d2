"""RequestOutput: the finished texts of one prompt, in the shape of vLLM's results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..decoding.chunk import TokenLogprob
from ..decoding.stats import SpecDecodeStats
from .writer import StreamChunk


class Logprob(NamedTuple):
    """The natural log-probability of a token, see TokenLogprob."""

    logprob: float
    rank: int | None  # its place among the reported alternatives, from 1 on; None for one that is not among them
    decoded_token: str  # its text


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished text."""

    index: int
    text: str  # without stop strings, and without the text of a token that ended it
    token_ids: list[int]  # the output tokens, including the token that ended the text
    cumulative_logprob: float | None  # the sum over the tokens
    # For each token those of the token and of the alternatives, by token id, the token first; None if they were not
    # requested.
    logprobs: list[dict[int, Logprob]] | None
    # "stop" (end of text, stop token, stop string) or "length" (max_tokens, context limit); of a `ChatSession` also
    # "interrupted".
    finish_reason: str
    stats: SpecDecodeStats

    def to_dict(self) -> dict[str, Any]:
        """All fields, JSON-ready: -9999 stands for a log-probability of -inf, as in vLLM's answers."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {"stats": self.stats.to_dict(), "logprobs": json_ready(self.logprobs)}


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The texts of one prompt. The properties are those of the first text."""

    request_id: str  # a number, of which an LLM gives each prompt another
    prompt: str | None  # as the chat template wrote it for a conversation; None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # `SamplingParams.n` texts
    # Of every token, as in CompletionOutput, None for the first one; None if they were not requested.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields of the first text, and the prompt's tokens, JSON-ready."""
        prompt = {"prompt_token_ids": self.prompt_token_ids, "prompt_logprobs": json_ready(self.prompt_logprobs)}
        return self.outputs[0].to_dict() | prompt

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def stats(self) -> SpecDecodeStats:
        return self.outputs[0].stats


def completion_of(chunks: Sequence[StreamChunk], text_of: Callable[[int], str], index: int = 0) -> CompletionOutput:
    """Join all chunks of one text. text_of: the text of a token, see `token_texts`."""
    logprobs = [each for chunk in chunks for each in chunk.logprobs]
    return CompletionOutput(
        index=index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        cumulative_logprob=sum(each.logprob for each in logprobs) if logprobs else None,
        logprobs=[by_token(each, text_of) for each in logprobs] if logprobs else None,
        finish_reason=chunks[-1].finish_reason or "length",
        stats=chunks[-1].stats,
    )


def output_of(
    number: int,
    prompt: str | None,
    token_ids: list[int],
    texts: Sequence[Sequence[StreamChunk]],
    text_of: Callable[[int], str],
) -> RequestOutput:
    """The texts of one prompt. texts: the chunks of each. number: see RequestOutput.request_id."""
    read = texts[0][0].prompt_logprobs
    return RequestOutput(
        str(number),
        prompt,
        token_ids,
        [completion_of(chunks, text_of, index) for index, chunks in enumerate(texts)],
        None if read is None else [None if each is None else by_token(each, text_of) for each in read],
    )


def json_ready(logprobs: Sequence[dict[int, Logprob] | None] | None) -> list[dict[int, Any] | None] | None:
    """Log-probabilities as JSON has them."""
    if logprobs is None:
        return None
    return [None if each is None else entry_of(each) for each in logprobs]


def entry_of(known: dict[int, Logprob]) -> dict[int, Any]:
    """The log-probabilities of one position as JSON has them."""
    return {token: one._asdict() | {"logprob": finite(one.logprob)} for token, one in known.items()}


def finite(logprob: float) -> float | None:
    """`logprob`, or vLLM's number for -inf, which JSON lacks; None for NaN, of the first token of a prompt."""
    return None if math.isnan(logprob) else max(logprob, -9999.0)


def by_token(given: TokenLogprob, text_of: Callable[[int], str]) -> dict[int, Logprob]:
    """The log-probabilities of one position, by token id."""
    ranks = {token: rank for rank, token in enumerate(given.top, start=1)}
    values = {given.token_id: given.logprob, **given.top}
    return {token: Logprob(value, ranks.get(token), text_of(token)) for token, value in values.items()}
