"""The target writes its own training text: many conversations at a time, decoded plainly.

An instruct model asks and answers itself: it continues its chat template up to the user's turn with a question, and
then answers. A base model continues its begin-of-text token. Questions are drawn at temperature 1; answers have the
temperatures of ANSWER_TEMPERATURES in turn, because a draft serves requests at every temperature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...runtime.decoding.chunk import TokenChunk
from ...runtime.decoding.decoder import SpeculativeDecoder
from ...runtime.decoding.request import Request
from ...runtime.decoding.scheduler import Scheduler
from ...runtime.decoding.stats import SpecDecodeStats
from ...runtime.sampling.params import SamplingParams
from ...runtime.sampling.random import seeded_streams
from ...runtime.sampling.sampler import Sampler
from ...runtime.sampling.softmax import softmax_of
from .conversation import Layout
from .state import ANSWER, ANSWER_TEMPERATURES, GIVEN, QUESTION, TextStore, WrittenText, id_type
from .target import COLUMNS, TextTarget, TopSelector, TopTokens, recorded

TOP_P = 0.95  # of questions and of answers above temperature 0
SECOND_TURNS = 3  # one of so many conversations has a second question
PERIODS = 48  # a text that repeats up to so many tokens LOOPS times ends
LOOPS = 4
CHECK_TOKENS = 16  # tokens between two checks for repetition


class TextLimits(NamedTuple):
    """Bounds of a text, in tokens."""

    question: int = 160
    answer: int = 448
    opening: int = 24  # the beginning of a base model's text, which counts as its question

    def longest(self, layout: Layout, questions: Sequence[Sequence[int]]) -> int:
        """The most tokens of a text."""
        asked = max(map(len, questions), default=self.question if layout.is_chat else self.opening)
        turn = asked + len(layout.after) + self.answer
        again = 0 if layout.between is None or questions else len(layout.between) + turn
        return len(layout.before) + turn + again


class TextCounts(NamedTuple):
    """What was written since the start."""

    texts: int = 0  # stored ones
    tokens: int = 0
    dropped: int = 0  # texts without an answer


@dataclass(eq=False, slots=True)
class Draft:
    """A text in progress."""

    number: int
    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    rows: list[TopTokens | None] = field(default_factory=list)
    question: int | None = None
    turn: int = 0  # questions that were answered
    states: list[NDArray[np.float16]] = field(default_factory=list)  # of every token but the last one

    def give(self, tokens: Sequence[int]) -> None:
        """Append tokens of the template or the user. A special token with which the target has just ended its own part
        is not repeated."""
        ended = bool(self.kinds) and self.kinds[-1] != GIVEN
        tokens = tokens[1:] if ended and tokens and self.tokens[-1] == tokens[0] else tokens
        self.write(tokens, GIVEN, [None] * len(tokens))

    def write(self, tokens: Sequence[int], kind: int, rows: Sequence[TopTokens | None]) -> None:
        """Append tokens that the target wrote, with its distributions."""
        self.tokens += tokens
        self.kinds += [kind] * len(tokens)
        self.rows += rows

    def finish(self, vocab_size: int) -> WrittenText:
        """The text as it is stored."""
        assert self.question is not None
        empty = TopTokens(np.zeros(COLUMNS, id_type(vocab_size)), np.full(COLUMNS, -np.inf, np.float16), 1.0)
        rows = [row or empty for row in self.rows]
        states = np.concatenate(self.states or [np.zeros((0, 0), np.float16)])[: len(self.tokens) - 1]
        return WrittenText(
            self.number,
            self.question,
            np.array(self.tokens, np.uint32),
            np.array(self.kinds, np.uint8),
            np.stack([row.ids for row in rows]),
            np.stack([row.logprobs for row in rows]),
            np.array([row.tail for row in rows], np.float16),
            np.pad(states, ((0, len(self.tokens) - len(states)), (0, 0))),
        )


@dataclass(eq=False, slots=True, kw_only=True)
class Segment(Request[TokenChunk]):
    """A part of a text that the target is writing: a question or an answer."""

    text: Draft
    kind: int
    rows: list[TopTokens]
    shown: list[NDArray[np.float16]]  # the states of its passes, which begin with the text anew
    written: list[int] = field(default_factory=list)


class TextWriter:
    """Writes texts until it is stopped."""

    def __init__(
        self,
        target: TextTarget,
        layout: Layout,
        store: TextStore,
        questions: Sequence[Sequence[int]] = (),
        requests: int = 32,
        seed: int = 0,
        limits: TextLimits = TextLimits(),  # noqa: B008 - a NamedTuple
    ) -> None:
        """questions: of the user, as token ids; without any the target asks itself. requests: texts written at a
        time. Reads the numbers and questions of the stored texts."""
        self._target, self._layout, self._store = target, layout, store
        self._questions, self._seed, self._limits = questions, seed, limits
        self._select = TopSelector(softmax_of(target.pool), target.vocab_size, COLUMNS).select
        self._known: set[int] = set()
        self._next = 0
        for text in store.read():
            self._known.add(text.question)
            self._next = max(self._next, text.number + 1)
        self._scheduler: Scheduler[TokenChunk]
        self._scheduler = Scheduler(requests, pools=(target.pool,), slots=target.budget)
        self._requests = requests

    def write(self, stopped: Callable[[], bool]) -> Iterator[TextCounts]:
        """Write until `stopped` returns True; yields the counts so far after every text. Texts in progress are then
        lost. Raises ConfigError when a text cannot be stored."""
        texts = tokens = dropped = 0
        try:
            while not stopped():
                while self._scheduler.queue.num_running < self._requests:
                    self._scheduler.add(self._begin())
                for event in self._scheduler.step():
                    if event.error is not None:
                        raise event.error
                    segment = event.request
                    assert isinstance(segment, Segment)
                    if event.chunk is None or not self._advance(segment, event.chunk):
                        continue
                    following = self._follow(segment)
                    if following is not None:
                        self._scheduler.add(following)
                    elif segment.text.turn:
                        done = segment.text.finish(self._target.vocab_size)
                        self._store.add(done)
                        texts, tokens = texts + 1, tokens + len(done.tokens)
                        yield TextCounts(texts, tokens, dropped)
                    else:
                        dropped += 1
        finally:
            for request in self._scheduler.queue:
                self._scheduler.remove(request)

    def _advance(self, segment: Segment, chunk: TokenChunk) -> bool:
        """Add a chunk to a segment; returns whether the segment has ended."""
        segment.written += chunk.token_ids
        if chunk.finish_reason is not None:
            return True
        count = len(segment.written)
        if segment.kind == QUESTION or count % CHECK_TOKENS or not is_repeating(segment.written):
            return False
        self._scheduler.remove(segment)
        return True

    def _begin(self) -> Segment:
        """The first segment of the next text."""
        text = Draft(self._next)
        self._next += 1
        text.give(self._layout.before)
        if not self._questions:
            return self._segment(text, QUESTION)
        asked = self._questions[text.number % len(self._questions)]
        text.question = fingerprint(asked)
        text.give(asked)
        text.give(self._layout.after)
        return self._segment(text, self._answer_kind(text))

    def _answer_kind(self, text: Draft) -> int:
        """The temperature of an answer: each in turn. A question of the user is answered once at each temperature, and
        after that above 0 only, because its answer at temperature 0 is always the same."""
        count = len(ANSWER_TEMPERATURES)
        if not self._questions:
            return ANSWER + text.number % count
        turn, question = divmod(text.number, len(self._questions))
        return ANSWER + ((question + turn) % count if turn < count else 1 + turn % (count - 1))

    def _follow(self, segment: Segment) -> Segment | None:
        """The segment after one that has ended; None where the text ends. A text without an answer is dropped."""
        text, layout = segment.text, self._layout
        rows, text.states = segment.rows[: len(segment.written)], segment.shown
        if segment.kind != QUESTION:
            text.write(segment.written, segment.kind, rows)
            text.turn += 1
            again = text.turn == 1 and not self._questions and text.number % SECOND_TURNS == 0
            if not again or layout.between is None or segment.written[-1] not in self._target.eos:
                return None
            text.give(layout.between)
            return self._segment(text, QUESTION)
        asked = self._asked(segment.written)
        if not asked:
            return None
        if text.question is None:
            text.question = fingerprint(asked)
            if text.question in self._known:
                return None
            self._known.add(text.question)
        text.write(asked, QUESTION, rows[: len(asked)])
        text.give(layout.after)
        return self._segment(text, self._answer_kind(text))

    def _asked(self, written: list[int]) -> list[int]:
        """The question that was written, with the token that ends it where the template begins its next part with
        this token. Empty for one that did not end."""
        after = self._layout.after
        if not after:
            return [] if written[-1] in self._target.eos else written
        end = next((at for at in range(len(written)) if written[at : at + len(after)] == after), None)
        if end is not None:
            return written[:end]
        if written[-1] == after[0]:
            return written if len(written) > 1 else []
        return written[:-1] if written[-1] in self._target.eos else []

    def _segment(self, text: Draft, kind: int) -> Segment:
        limits, eos = self._limits, self._target.eos
        if kind == QUESTION:
            length, temperature = limits.question if self._layout.is_chat else limits.opening, 1.0
        else:
            length, temperature = limits.answer, ANSWER_TEMPERATURES[kind - ANSWER]
        seed = int(np.random.SeedSequence((self._seed, text.number, len(text.tokens))).generate_state(1)[0])
        top_p = TOP_P if temperature else 1.0
        params = SamplingParams(max_tokens=length, temperature=temperature, top_p=top_p, seed=seed)
        pool, stats, rows = self._target.pool, SpecDecodeStats(), list[TopTokens]()
        shown = list[NDArray[np.float16]]()
        decoder = SpeculativeDecoder(pool, None, None, pool.spec.capacity, eos)
        sampler = Sampler(params, text.tokens, eos, self._target.vocab_size)
        steps = decoder.steps(list(text.tokens), sampler, seeded_streams(seed), stats)
        steps = recorded(steps, self._select, rows, shown if pool.spec.model.taps else None)
        slots = self._target.budget.needed(len(text.tokens), length)
        return Segment(
            steps=steps,
            write=lambda chunk: chunk,
            num_slots=slots,
            stats=stats,
            text=text,
            kind=kind,
            rows=rows,
            shown=shown,
        )


def fingerprint(tokens: Sequence[int]) -> int:
    """A hash of 64 bits that is the same in every process."""
    content = np.array(tokens, np.uint32).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def is_repeating(tokens: Sequence[int]) -> bool:
    """Whether a text ends with LOOPS equal parts of 1 to PERIODS tokens."""
    for period in range(1, PERIODS + 1):
        part = tokens[-period:]
        end = len(tokens)
        if end >= LOOPS * period and all(
            tokens[end - turn * period - period : end - turn * period] == part for turn in range(1, LOOPS)
        ):
            return True
    return False
