"""The answers of both OpenAI APIs: choices, log-probabilities, usage and metrics, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

from fastapi.responses import Response

from ...decoding.chunk import TokenLogprob
from ...decoding.stats import SpecDecodeStats
from ...text.tokenizer import Tokenizer, token_texts
from ...text.writer import StreamChunk
from ..json_text import pieces

KNOWN_TOKENS = 65536  # most cached token texts: the alternatives of a long answer are mostly the same tokens


class Part(NamedTuple):
    """A part of a choice's text, or all of it. offset: number of characters of the choice before this part."""

    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    offset: int = 0


class TokenTexts:
    """The texts of tokens in answers; shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(KNOWN_TOKENS)(token_texts(tokenizer))
        self.bytes = lru_cache(KNOWN_TOKENS)(self._bytes)

    def _bytes(self, token: int) -> tuple[int, ...] | None:
        """The UTF-8 bytes of the token; None if the token is only a part of a character."""
        alone = self._tokenizer.decode([token], skip_special_tokens=False)
        return None if "\ufffd" in alone else tuple(self.text(token).encode())


class AnswerFormat(Protocol):
    """The format of a choice in one of the two APIs. Log-probabilities are iterators, see `json_text.pieces`: a token
    with its alternatives takes a kilobyte as text and several as objects, and an answer may have 100,000 tokens."""

    prefix: str  # prefix of an answer's id
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice's first chunk, before any text; None if the API has no such chunk."""

    def chunk(self, index: int, part: Part) -> dict[str, Any]: ...

    def whole(self, index: int, part: Part) -> dict[str, Any]: ...


class CompletionFormat:
    """/v1/completions. logprobs: whether the request asked for log-probabilities."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, texts: TokenTexts, logprobs: bool) -> None:
        self._texts, self._logprobs = texts, logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, index: int, part: Part) -> dict[str, Any]:
        logprobs = self._written(part.logprobs, part.offset) if self._logprobs else None
        return {"index": index, "text": part.text, "logprobs": logprobs, "finish_reason": part.finish_reason}

    whole = chunk

    def _written(self, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Iterator[Any]]:
        tokens = [self._texts.text(item.token_id) for item in logprobs]
        return {
            "tokens": iter(tokens),
            "token_logprobs": (finite(item.logprob) for item in logprobs),
            "top_logprobs": (self._by_text(item.top) for item in logprobs),
            "text_offset": accumulate(map(len, tokens[:-1]), initial=offset) if tokens else iter(()),
        }

    def _by_text(self, top: Mapping[int, float]) -> dict[str, float]:
        """Alternatives by text. As in OpenAI's API, only the more probable of two tokens with the same text is
        shown."""
        shown: dict[str, float] = {}
        for token, logprob in top.items():
            shown.setdefault(self._texts.text(token), finite(logprob))
        return shown


class ChatFormat:
    """/v1/chat/completions. logprobs: whether the request asked for log-probabilities."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, logprobs: bool) -> None:
        self._texts, self._logprobs = texts, logprobs

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, part: Part) -> dict[str, Any]:
        delta = {"content": part.text} if part.text or part.finish_reason is None else {}
        return {"index": index, "delta": delta, **self._rest(part)}

    def whole(self, index: int, part: Part) -> dict[str, Any]:
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return {"index": index, "message": message, **self._rest(part)}

    def _rest(self, part: Part) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = {"content": map(self._with_alternatives, part.logprobs), "refusal": None}
        return {"logprobs": logprobs, "finish_reason": part.finish_reason}

    def _with_alternatives(self, item: TokenLogprob) -> dict[str, Any]:
        alternatives = [self._token(token, value) for token, value in item.top.items()]
        return {**self._token(item.token_id, item.logprob), "top_logprobs": alternatives}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": finite(logprob), "bytes": self._texts.bytes(token)}


@dataclass(slots=True)
class Choice:
    """The content of one choice so far. texts: of its chunks."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    offset: int = 0  # characters of its tokens' texts


class Answer:
    """Collects one answer, which is sent whole or in chunks."""

    def __init__(
        self,
        format: AnswerFormat,
        texts: TokenTexts,
        model: str,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
        proposal: int,
    ) -> None:
        """prompts: token ids of each prompt. echoes: text before each choice's own text, one per choice; the choices of
        a prompt are adjacent, and every prompt has equally many. proposal: most tokens of a proposal; 0 without
        speculation."""
        self.choices = [Choice(texts=[echo]) for echo in echoes]
        self._format, self._texts = format, texts
        self._head = {"id": format.prefix + uuid4().hex, "created": int(time.time()), "model": model}
        self._prompts = prompts
        self._proposal = proposal

    def openings(self) -> list[dict[str, Any]]:
        """The chunks before the first token: roles, and echoed prompts."""
        opening = [self._format.opening(index) for index in range(len(self.choices))]
        echoes = [
            self._format.chunk(index, Part(choice.texts[0], [], None))
            for index, choice in enumerate(self.choices)
            if choice.texts[0]
        ]
        return [self._chunk([choice]) for choice in (*opening, *echoes) if choice is not None]

    def note(self, index: int, chunk: StreamChunk) -> None:
        """Add the chunk of one round."""
        choice = self.choices[index]
        choice.texts.append(chunk.text)
        choice.logprobs += chunk.logprobs
        choice.num_tokens += len(chunk.token_ids)
        choice.finish_reason, choice.stats = chunk.finish_reason, chunk.stats

    def add(self, index: int, chunk: StreamChunk) -> dict[str, Any] | None:
        """Add the chunk of one round to an answer that is sent in chunks. Returns the chunk to send; None if there is
        no new text yet."""
        choice = self.choices[index]
        part = Part(chunk.text, chunk.logprobs, chunk.finish_reason, choice.offset)
        self.note(index, chunk._replace(text="", logprobs=[]))  # these are sent now and not needed later
        choice.offset += sum(len(self._texts.text(item.token_id)) for item in chunk.logprobs)
        if not (part.text or part.logprobs or part.finish_reason):
            return None
        return self._chunk([self._format.chunk(index, part)])

    def whole(self) -> Response:
        """The finished answer."""
        choices = [
            self._format.whole(index, Part("".join(choice.texts), choice.logprobs, choice.finish_reason))
            for index, choice in enumerate(self.choices)
        ]
        return as_json({**self._head, "object": self._format.whole_object, "choices": choices, **self._account()})

    def last(self) -> dict[str, Any]:
        """The chunk with usage and metrics."""
        return self._chunk([]) | self._account()

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self._format.chunk_object, "choices": choices}

    def usage(self) -> dict[str, Any]:
        """Token counts so far. Draft tokens count as predicted tokens; only accepted ones are part of the output."""
        prompt_tokens, tokens = sum(map(len, self._prompts)), sum(choice.num_tokens for choice in self.choices)
        used = {
            "prompt_tokens": prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        }
        if not self._proposal:
            return used
        accepted = sum(choice.stats.num_accepted_tokens for choice in self.choices)
        drafted = sum(choice.stats.num_draft_tokens for choice in self.choices)
        predicted = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return {**used, "completion_tokens_details": predicted}

    def _account(self) -> dict[str, Any]:
        if not self._proposal:
            return {"usage": self.usage()}
        stats = [choice.stats for choice in self.choices]
        return {"usage": self.usage(), "metrics": speculative_metrics(stats, self._proposal)}

    def _cached_tokens(self) -> int:
        """The number of prompt tokens that even the first choice of each prompt took from the cache."""
        each = len(self.choices) // len(self._prompts)
        cached = [choice.stats.num_cached_tokens for choice in self.choices]
        return sum(min(cached[first : first + each]) for first in range(0, len(cached), each))


def as_json(content: Mapping[str, Any]) -> Response:
    """A JSON response. It consumes the iterators of `content`."""
    return Response("".join(pieces(content)), media_type="application/json")


def finite(logprob: float) -> float:
    """`logprob`, or vLLM's number instead of -inf, because JSON has no infinity."""
    return max(logprob, -9999.0)


def speculative_metrics(stats: Sequence[SpecDecodeStats], max_tokens: int) -> dict[str, Any]:
    """vLLM's `metrics` of an answer, over all its choices. max_tokens: the most tokens a proposal may have.

    acceptance_histogram[j]: proposals of which j tokens were accepted; the sums over it are num_spec_steps and
    num_accepted_draft_tokens.
    """
    total = SpecDecodeStats()
    histogram = [0] * (max_tokens + 1)
    for each in stats:
        total.num_drafts += each.num_drafts
        total.num_draft_tokens += each.num_draft_tokens
        total.num_accepted_tokens += each.num_accepted_tokens
        for accepted, rounds in enumerate(each.accepted_per_round):
            histogram[accepted] += rounds
    return {
        "speculative_decoding": {
            "mean_acceptance_length": total.mean_acceptance_length,
            "draft_acceptance_rate": total.acceptance_rate,
            "acceptance_histogram": histogram,
            "num_accepted_draft_tokens": total.num_accepted_tokens,
            "num_draft_tokens": total.num_draft_tokens,
            "num_spec_steps": total.num_drafts,
            "num_spec_tokens": max_tokens,
        }
    }
