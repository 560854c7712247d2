"""The answers of both OpenAI APIs: choices, usage and metrics, whole or in chunks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from fastapi.responses import Response

from ....models.errors import RequestError
from ...decoding.chunk import TokenLogprob
from ...decoding.stats import SpecDecodeStats
from ...sampling.params import SamplingParams
from ...sampling.thought import Thought
from ...text.token_texts import Offsets, TokenTexts
from ...text.writer import StreamChunk
from ..http.errors import refusal_of
from ..json_text import pieces
from .bodies import StreamOptions
from .formats import AnswerFormat, Part

MAX_LOGPROBS = 1 << 18  # log-probabilities of an answer, see streams.LOGPROB_BYTES


def check_log_probabilities(params: SamplingParams, choices: int, lengths: Sequence[int], context: int) -> None:
    """Raises RequestError where the answer could have more than MAX_LOGPROBS log-probabilities. choices: of each
    prompt. lengths: tokens of the prompts. context: the most tokens of a prompt and its text."""
    texts = sum(min(params.max_tokens, max(0, context - length)) for length in lengths)
    asked = ((params.logprobs, texts), (params.prompt_logprobs, sum(lengths)))
    count = choices * sum((1 + alternatives) * tokens for alternatives, tokens in asked if alternatives is not None)
    if count > MAX_LOGPROBS:
        raise RequestError(
            f"the answer could have {count} log-probabilities and may have {MAX_LOGPROBS}: ask for fewer "
            "alternatives, choices or prompts, or for a smaller max_tokens"
        )


@dataclass(slots=True)
class Choice:
    """The content of one choice so far."""

    offsets: Offsets  # of its tokens
    echo: str | None = None  # text of the prompt that the next chunk begins with
    texts: list[str] = field(default_factory=list)  # of its chunks
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    logprob: float = 0.0  # of all its tokens together, as far as the request has log-probabilities
    num_tokens: int = 0
    num_drafted: int = 0  # sums over its chunks; `stats` may be ahead of them, and counts tokens after a stop, too
    num_proposed: int = 0
    thought: Thought | None = None  # what is left of it
    num_thought: int = 0  # its tokens
    finish_reason: str | None = None
    stopped: str | None = None  # the stop string that ended the text
    stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)


class Answer:
    """Collects one answer, which is sent whole or as events. done: the last event."""

    prefix = ""  # of ids, instead of the format's
    media = "text/event-stream"
    opens = True  # whether there are events before the first token
    keeps = False  # whether it keeps its chunks where it is sent as events
    done = b"data: [DONE]\n\n"

    def __init__(
        self,
        format: AnswerFormat,
        texts: TokenTexts,
        model: str,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str | None],
        proposal: int,
        best: int | None = None,
        shows_prompts: bool = False,
        skips_special: bool = True,
        thought: Thought | None = None,
        options: StreamOptions = StreamOptions(),  # noqa: B008 - nobody changes it
    ) -> None:
        """prompts: token ids of each prompt. echoes: text before each choice's own text, one per choice; the choices of
        a prompt are adjacent, and every prompt has equally many. proposal: most tokens of a proposal; 0 without
        speculation. best: the whole answer has only this many choices per prompt, those with the highest mean
        log-probability. shows_prompts: the whole answer has vLLM's `prompt_logprobs`. skips_special: special tokens
        have no text. thought: see Thought; None if the answer has none. options: of the events."""
        of_choices = (prompts[index * len(prompts) // len(echoes)] for index in range(len(echoes)))
        self.choices = [
            Choice(Offsets(texts, prompt, echo, skips_special), echo, thought=thought)
            for prompt, echo in zip(of_choices, echoes, strict=True)
        ]
        self._best, self._shows_prompts, self._options = best, shows_prompts, options
        self.thinks = thought is not None
        self._format, self._texts = format, texts
        self.id = (self.prefix or format.prefix) + uuid4().hex
        self.first_token_at: float | None = None  # by time.perf_counter
        self.failure: str | None = None  # the type of the error that ended a stream
        self.model, self.created = model, int(time.time())
        self._head = {"id": self.id, "created": self.created, "model": model}
        self._prompts = prompts
        self._proposal = proposal

    def opened(self) -> Iterator[bytes]:
        """The events before the first token, which name the roles."""
        for index in range(len(self.choices) if self.opens else 0):
            if (choice := self._format.opening(index)) is not None:
                yield self._accounted(self._chunk([choice]))

    def added(self, index: int, chunk: StreamChunk) -> Iterator[bytes]:
        """The events of one round."""
        if written := self.add(index, chunk):
            if self._options.include_pieces:
                written["choices"][0]["pieces"] = [piece._asdict() for piece in chunk.pieces]
            yield self._accounted(written)

    def ended(self) -> Iterator[bytes]:
        """The events at the end."""
        if self._options.include_usage:
            yield event(self.last())
        yield self.done

    def failed(self, error: Exception) -> Iterator[bytes]:
        """The events after an error, at the end."""
        yield b"data: " + refusal_of(error).body + b"\n\n"
        yield self.done

    def _accounted(self, chunk: dict[str, Any]) -> bytes:
        if self._options.include_usage:
            chunk["usage"] = self.usage() if self._options.continuous_usage_stats else None
        return event(chunk)

    def note(self, index: int, chunk: StreamChunk) -> None:
        """Add the chunk of one round."""
        part = self._begin(index, chunk)
        choice = self.choices[index]
        choice.texts.append(part.text)
        choice.logprobs += part.logprobs
        choice.prompt_logprobs = choice.prompt_logprobs or chunk.prompt_logprobs

    def forget(self) -> None:
        """Free what `whole` has written. What `account` says stays."""
        for choice in self.choices:
            choice.texts, choice.logprobs, choice.prompt_logprobs = [], [], None

    def _begin(self, index: int, chunk: StreamChunk) -> Part:
        """Count a chunk. Returns its text and log-probabilities, after those of the echo in the first chunk. The echo
        of a chat is one message, which has none: the prompt's tokens are more than its text."""
        choice = self.choices[index]
        part = Part(chunk.text, chunk.logprobs, chunk.finish_reason, choice.offsets)
        choice.num_tokens += len(chunk.token_ids)
        choice.num_drafted += chunk.num_drafted
        choice.num_proposed += chunk.num_proposed
        self.first_token_at = self.first_token_at or time.perf_counter()
        choice.logprob += sum(item.logprob for item in chunk.logprobs)
        choice.finish_reason, choice.stopped, choice.stats = chunk.finish_reason, chunk.stopped, chunk.stats
        if choice.thought is not None:
            count, choice.thought = choice.thought.count(chunk.token_ids)
            choice.num_thought += count
        if choice.echo is None:
            return part
        echo, choice.echo = choice.echo, None
        if not (chunk.prompt_logprobs and self._format.has_prompts):
            return part._replace(text=echo + part.text)
        known = [item for item in chunk.prompt_logprobs if item is not None]
        first = self._prompts[index * len(self._prompts) // len(self.choices)][0]
        before = [TokenLogprob(first, math.nan, {}), *known]
        return part._replace(text=echo + part.text, logprobs=[*before, *part.logprobs])

    def add(self, index: int, chunk: StreamChunk) -> dict[str, Any] | None:
        """Add the chunk of one round to an answer that is sent in chunks. Returns the chunk to send; None if there is
        no new text yet."""
        part = self._begin(index, chunk)
        if not (part.text or part.logprobs or part.finish_reason):
            return None
        written = self._format.chunk(index, part)
        if written is None:
            return None
        self.choices[index].finish_reason = written["finish_reason"]
        return self._chunk([written])

    def whole(self) -> Response:
        """The finished answer."""
        chosen = self._chosen()
        parts = [
            Part("".join(each.texts), each.logprobs, each.finish_reason, each.offsets, self._written_prompt(each))
            for each in chosen
        ]
        choices = [self._format.whole(index, part) for index, part in enumerate(parts)]
        for choice, written in zip(chosen, choices, strict=True):
            choice.finish_reason = written["finish_reason"]  # a call of a tool has its own
        shown = self._shows_prompts and not self._format.has_prompts
        rest = {"prompt_logprobs": parts[0].prompt} if shown else {}
        head = {**self._head, "object": self._format.whole_object}
        return as_json({**head, "choices": choices, **rest, **self.account()})

    def _chosen(self) -> list[Choice]:
        """The choices that the whole answer shows."""
        each = len(self.choices) // len(self._prompts)
        groups = [self.choices[first : first + each] for first in range(0, len(self.choices), each)]
        if self._best is None:
            return self.choices
        ranked = (sorted(group, key=lambda choice: -choice.logprob / max(1, choice.num_tokens)) for group in groups)
        return [choice for group in ranked for choice in group[: self._best]]

    def _written_prompt(self, choice: Choice) -> Iterator[Any] | None:
        return map(self._texts.prompt_entry, choice.prompt_logprobs or ()) if self._shows_prompts else None

    def last(self) -> dict[str, Any]:
        """The chunk with usage and metrics."""
        return self._chunk([]) | self.account()

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
        details = {"reasoning_tokens": sum(choice.num_thought for choice in self.choices)} if self.thinks else {}
        if not self._proposal:
            return used | ({"completion_tokens_details": details} if details else {})
        accepted = sum(choice.num_drafted for choice in self.choices)
        proposed = sum(choice.num_proposed for choice in self.choices)
        predicted = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": proposed - accepted}
        return {**used, "completion_tokens_details": details | predicted}

    def account(self) -> dict[str, Any]:
        """Usage and, with speculation, metrics."""
        if not self._proposal:
            return {"usage": self.usage()}
        stats = [choice.stats for choice in self.choices]
        return {"usage": self.usage(), "metrics": speculative_metrics(stats, self._proposal)}

    def _cached_tokens(self) -> int:
        """The number of prompt tokens that even the first choice of each prompt took from the cache."""
        each = len(self.choices) // len(self._prompts)
        cached = [choice.stats.num_cached_tokens for choice in self.choices]
        return sum(min(cached[first : first + each]) for first in range(0, len(cached), each))


def as_json(content: Mapping[str, Any] | list[dict[str, Any]]) -> Response:
    """A JSON response. It consumes the iterators of `content`."""
    return Response("".join(pieces(content)), media_type="application/json")


def event(content: Mapping[str, Any], name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {''.join(pieces(content))}\n\n".encode()


def speculative_metrics(stats: Sequence[SpecDecodeStats], max_tokens: int) -> dict[str, Any]:
    """vLLM's `metrics` of an answer, over all its choices. max_tokens: the most tokens a proposal may have.

    acceptance_histogram[j]: proposals of which j tokens were accepted; the sums over it are num_spec_steps and
    num_accepted_draft_tokens.
    """
    total = SpecDecodeStats(accepted_per_round=[0] * (max_tokens + 1))
    for each in stats:
        total.add(each)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": total.mean_acceptance_length,
            "draft_acceptance_rate": total.acceptance_rate,
            "acceptance_histogram": total.accepted_per_round,
            "num_accepted_draft_tokens": total.num_accepted_tokens,
            "num_draft_tokens": total.num_draft_tokens,
            "num_spec_steps": total.num_drafts,
            "num_spec_tokens": max_tokens,
        }
    }
