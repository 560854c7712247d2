"""TextWriter: converts chunks of tokens to chunks of text while a text is generated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..decoding.chunk import COMPLETE, STOP, TokenChunk, TokenLogprob
from ..decoding.stats import SpecDecodeStats
from ..sampling.params import SamplingParams
from .detokenizer import IncrementalDetokenizer, StopChecker, StopResult
from .tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """Text of one token, or the part of the text that is final, and whether the draft proposed the token."""

    text: str
    drafted: bool


class StreamChunk(NamedTuple):
    """The text of one round."""

    text: str  # may be empty while a character or a possible stop string is incomplete
    token_ids: list[int]
    pieces: list[TextPiece]
    logprobs: list[TokenLogprob]
    finish_reason: str | None  # None before the last chunk, else "stop" or "length"
    stats: SpecDecodeStats  # the request's; later rounds change it
    prompt_logprobs: list[TokenLogprob | None] | None = None  # see TokenChunk
    num_drafted: int = 0  # how many of `token_ids` the draft proposed
    num_proposed: int = 0  # all tokens that the round proposed
    stopped: str | None = None  # the stop string that ended the text, if one did


class TextWriter:
    """Converts chunks of tokens to chunks of text: only whole characters, and no part of a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt, params.skip_special_tokens)
        self._keeps_stop = params.include_stop_str_in_output
        self._stop = StopChecker(params.stop, self._keeps_stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._count = self._num_proposed = 0
        self._stopped: str | None = None
        self._held: deque[TextPiece] = deque()  # decoded text that may be the beginning of a stop string

    def write(self, chunk: TokenChunk, stats: SpecDecodeStats) -> StreamChunk:
        """The text of one chunk. A stop string ends the text at the token that completes the stop string. A token that
        ends the text has no text itself, unless the text keeps what stopped it, as in vLLM."""
        reason = STOP if chunk.finish_reason == COMPLETE else chunk.finish_reason
        kept = len(chunk.token_ids)
        silent = chunk.finish_reason == STOP and not self._keeps_stop
        deltas = self._detokenizer.push(chunk.token_ids[: kept - silent])
        pieces = [TextPiece(delta, index < chunk.num_drafted) for index, delta in enumerate(deltas)]
        if self._stop is None:
            if reason is not None:
                pieces.append(TextPiece(self._detokenizer.finish(), False))
            pieces = [piece for piece in pieces if piece.text]
        else:
            place, pieces = self._until_stop(self._stop, pieces, reason is not None)
            if place is not None:
                kept, reason = min(kept, place + 1), STOP
        stats.num_tokens -= len(chunk.token_ids) - kept
        proposed, self._num_proposed = stats.num_draft_tokens - self._num_proposed, stats.num_draft_tokens
        return StreamChunk(
            text="".join([piece.text for piece in pieces]),
            token_ids=chunk.token_ids[:kept],
            pieces=pieces,
            logprobs=chunk.logprobs[:kept],
            finish_reason=reason,
            stats=stats,
            prompt_logprobs=chunk.prompt_logprobs,
            num_drafted=min(kept, chunk.num_drafted),
            num_proposed=proposed,
            stopped=self._stopped,
        )

    def _until_stop(
        self, checker: StopChecker, pieces: Sequence[TextPiece], ends: bool
    ) -> tuple[int | None, list[TextPiece]]:
        """The piece that completes a stop string, and the pieces of final text. ends: whether no text follows."""
        released = ""
        for place, piece in enumerate(pieces):
            self._count += 1
            text, stopped = self._check(checker, piece)
            released += text
            if stopped:
                return place, list(self._take(len(released)))
        if ends:
            text, stopped = self._check(checker, TextPiece(self._detokenizer.finish(), False))
            released += text if stopped else text + checker.finish()
            return len(pieces) if stopped else None, list(self._take(len(released)))
        return None, list(self._take(len(released)))

    def _check(self, checker: StopChecker, piece: TextPiece) -> StopResult:
        """The final text, and whether a stop string ends the text, which is possible only after `min_tokens`."""
        self._held.append(piece)
        if self._count <= self._min_tokens:
            return StopResult(checker.pass_over(piece.text), None)
        found = checker.push(piece.text)
        self._stopped = found.stopped
        return found

    def _take(self, length: int) -> Iterator[TextPiece]:
        """The pieces of the next `length` characters."""
        while length > 0:
            piece = self._held.popleft()
            if len(piece.text) > length:
                self._held.appendleft(TextPiece(piece.text[length:], piece.drafted))
                piece = TextPiece(piece.text[:length], piece.drafted)
            length -= len(piece.text)
            if piece.text:
                yield piece
