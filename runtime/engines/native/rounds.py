"""Rounds of one request that the kernels run as a whole: the passes of draft and target, and what chooses tokens
between them (plugins/native/kernels/round.h). The host's growers and verifiers give the same texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....models import bindings
from ....models.errors import EngineError
from ....plugins.native.library import DRAW, RUN, address
from ....plugins.native.round import (
    COUNTS,
    MOST_COLUMNS,
    MOST_KEPT,
    MOST_NODES,
    MOST_WIDTH,
    NUMBERS,
    SHAPE,
    VERIFIERS,
    Cuts,
    Round,
)
from ...sampling.random import BLOCK
from ...sampling.sampler import wanted_by
from ..base import Engine, ForwardOutput, KVCache, Pass
from ..passes import causal_batch
from ..rounds import BEST, RoundDraws, RoundOutcome, Rounds, RoundShape

if TYPE_CHECKING:  # engine.py imports this module
    from .engine import NativeEngine, NativeKVCache

MOST_BYTES = 1 << 28  # of room for distributions: flat ones of large vocabularies are left to the host
MOST_PREPARED = 64  # shapes and settings that are kept
ESTIMATES = 96  # of a drawn tree: logarithms by rank and bin, see RoundDraws
Settings = tuple[float, float, float, float, int]  # the first five of RoundDraws
LISTS = ("tokens", "parents", "depths", "slots", "accepted")  # by row, in this order
GREEDY: Settings = (0.0, 0.0, 0.0, 1.0, 0)


class RoundSize(NamedTuple):
    """What a round needs room for: rows of the target, those of them that may be truncated, outputs of the draft, and
    distributions of the draft's columns. numbers: uniform ones, and estimates."""

    rows: int
    truncated: int
    outputs: int
    distributions: int
    numbers: int

    @classmethod
    def of(cls, shape: RoundShape, most_draws: Sequence[int]) -> RoundSize:
        rows = shape.size + 1
        nodes = shape.depth * shape.most_drawn if shape.is_tree else 0
        distributions = nodes + rows if shape.is_drawn else 0
        truncated, outputs = 0 if shape.verify == BEST else rows, 1 + (shape.depth - 1) * shape.width
        return cls(rows, truncated, outputs, distributions, sum(most_draws) + ESTIMATES)

    def num_bytes(self, columns: tuple[int, int]) -> int:
        """Of distributions, and of lists of tokens and their probabilities. columns: V and N."""
        return 8 * (2 * self.truncated * columns[0] + (self.distributions + 2 * self.outputs) * columns[1])


class Buffers:
    """Memory that the rounds of one text share; each of them overwrites it. target: logits [rows, V], the sums of their
    softmaxes, and the tokens that truncation keeps [truncated, V]. draft: logits [outputs, N], and the likely or the
    best columns of each row. found: the counts, then tokens, parents, depths, slots and accepted rows [5, rows];
    measured: seconds [2] and shares [rows]."""

    def __init__(self, size: RoundSize, columns: tuple[int, int]) -> None:
        """columns: V and N."""
        (rows, truncated, outputs, distributions, numbers), (target, draft) = size, columns
        self.size = size
        self.target_logits = np.empty((rows, target), np.float32)
        self.sums = np.empty((rows, -(-target // RUN)))
        self.kept_ids, self.kept_probs = np.empty((truncated, target), np.int64), np.empty((truncated, target))
        self.draft_logits = np.empty((outputs, draft), np.float32)
        self.ids, self.probs = np.empty((outputs, draft), np.int64), np.empty((outputs, draft))
        self.logprobs = np.empty((outputs, bindings.top_columns(draft)), np.float32)
        self.room = np.empty(distributions * (draft + 2) + max(columns))
        self.numbers = np.empty(numbers)
        self.pending = np.empty(MOST_WIDTH, np.int64)
        self.found, self.measured = np.empty(COUNTS + 5 * rows, np.int64), np.empty(2 + rows)


class Prepared(NamedTuple):
    """A round of one shape and with the same settings. wanted: the C structure. verify: its place in
    VERIFIERS. buffers, draws: what it points to."""

    wanted: Round
    verify: int
    buffers: Buffers
    draws: tuple[NDArray[np.void], NDArray[np.void]]


class NativeRounds(Rounds):
    """The rounds of one text over its caches."""

    join = False
    end_early = True
    looks_up = True

    def __init__(self, engines: tuple[NativeEngine, NativeEngine], caches: tuple[NativeKVCache, NativeKVCache]) -> None:
        """engines, caches: of the target and of the draft."""
        self._engines, self._caches = engines, caches
        target, draft = (engine.spec for engine in engines)
        self._columns = target.model.num_logits, draft.model.num_logits
        self._names = np.array(draft.kept_tokens, np.int64) if draft.kept_tokens else None
        self._fitting: dict[RoundShape, bool] = {}
        self._most_draws: dict[RoundShape, tuple[int, int, int]] = {}
        self._buffers: Buffers | None = None
        self._prepared: dict[tuple[RoundShape, Settings], Prepared] = {}
        self._batch = causal_batch(target, [0], 0)  # says nothing: the round has its own
        self._next: tuple[RoundShape, Sequence[int], RoundDraws | None] | None = None
        self._engine = RoundEngine(self, engines[0])

    def most_draws(self, shape: RoundShape) -> tuple[int, int, int]:
        """See Rounds.most_draws. Of many columns, a block or a run is drawn first, as by the host."""
        if shape not in self._most_draws:
            (draft, tests, last), (columns, drafted) = shape.most_draws, self._columns
            of_run = levels(-(-columns // RUN)) if columns > RUN else 0
            self._most_draws[shape] = draft * levels(drafted), tests, last * (of_run + 1)
        return self._most_draws[shape]

    def fits(self, shape: RoundShape, num_pending: int) -> bool:
        """See Rounds.fits."""
        if shape not in self._fitting:
            self._fitting[shape] = self._has_passes(shape)
        (target, draft), (cache, drafts) = self._engines, self._caches
        return (
            self._fitting[shape]
            and 0 < num_pending <= min(draft.spec.max_width, MOST_WIDTH)
            and cache.length + shape.size + 1 <= target.spec.capacity
            and drafts.length + num_pending + (shape.depth - 1) * shape.width <= draft.spec.capacity
        )

    def _has_passes(self, shape: RoundShape) -> bool:
        """Whether passes and kernels are wide enough, and the room for distributions is not too large."""
        (target, draft), size = self._engines, RoundSize.of(shape, ())
        nodes = 1 + shape.depth * (shape.size + shape.width)
        few = nodes + shape.size + 2 * MOST_WIDTH <= MOST_NODES and size.rows <= min(MOST_KEPT, target.spec.max_width)
        narrow = shape.width <= min(draft.spec.max_width, MOST_WIDTH) and max(self._columns) <= MOST_COLUMNS
        ranked = shape.is_drawn or shape.width <= bindings.top_columns(self._columns[1])
        return few and narrow and ranked and size.num_bytes(self._columns) <= MOST_BYTES

    def prepare(self, shape: RoundShape, pending: Sequence[int], draws: RoundDraws | None = None) -> Pass:
        """See Rounds.prepare."""
        self._next = shape, pending, draws
        return Pass(self._engine, self._batch, self._caches[0])

    def run(self) -> None:
        """Run the prepared round. Raises EngineError as Engine.forward does."""
        if self._next is None:
            raise EngineError("the rounds of this text were closed: open others over its caches")
        (shape, pending, draws), (target, draft), (cache, drafts) = self._next, self._engines, self._caches
        outputs, num_pending = 1 + (shape.depth - 1) * shape.width, len(pending)
        cache.make_room(shape.size + 1)
        drafts.make_room(num_pending + outputs - 1)
        wanted, verify, buffers, _ = self._wanted(shape, draws)
        buffers.pending[:num_pending] = pending
        if draws is not None:
            given = [*draws.draft, *draws.tests, *draws.last, *draws.estimates]
            buffers.numbers[: len(given)] = given
        numbers = shape.depth, shape.size, shape.width, verify, shape.is_drawn, shape.is_tree, num_pending, outputs
        SHAPE.pack_into(wanted, 0, *numbers)
        for each, of in ((wanted.target, cache), (wanted.draft, drafts)):
            each.length, each.cache = of.length, of.structure
        target.run_round(draft, wanted)
        self.outcome = self._commit(buffers, num_pending)

    def _commit(self, buffers: Buffers, num_pending: int) -> RoundOutcome:
        """Commit the accepted rows in both caches. Returns what the round has found."""
        (cache, drafts), found, (rows, *_) = self._caches, buffers.found.tolist(), buffers.size
        count, num_accepted, next_token, passes, scored, *used = found[:COUNTS]
        tokens, parents, depths, slots, accepted = (found[at : at + count] for at in range(COUNTS, len(found), rows))
        del accepted[num_accepted:]
        read = [slots[row] for row in accepted]
        if read and read[-1] < 0:  # the last layer was not scored
            read.pop()
        cache.speculative, drafts.speculative = count, num_pending + scored
        cache.commit([0, *accepted])
        drafts.commit([*range(num_pending), *read])
        draft_seconds, target_seconds, *shares = buffers.measured[: 2 + count].tolist()
        tree = tuple(tokens), tuple(parents), tuple(depths), tuple(shares)
        drafts_used, tests_used, last_used = used
        numbers, seconds = (drafts_used, tests_used, last_used), (draft_seconds, target_seconds)
        path = tuple(accepted), next_token, len(read)
        return RoundOutcome(*tree, *path, numbers, 1 + passes, num_pending + scored, seconds)

    def _wanted(self, shape: RoundShape, draws: RoundDraws | None) -> Prepared:
        """A round of this shape with these settings. The buffers are made anew where the shape needs larger ones."""
        settings = GREEDY if draws is None else draws[:5]
        key = shape, settings
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) == MOST_PREPARED:
                self._prepared.clear()
            size, made = RoundSize.of(shape, self.most_draws(shape)), self._buffers
            if made is None or any(least > there for least, there in zip(size, made.size, strict=True)):
                self._prepared.clear()
                size = size if made is None else RoundSize(*map(max, size, made.size))
                made = self._buffers = Buffers(size, self._columns)
            prepared = self._prepared[key] = self._describe(made, shape, settings)
        return prepared

    def _describe(self, buffers: Buffers, shape: RoundShape, settings: Settings) -> Prepared:
        temperature, draft_share, min_p, top_p, top_k = settings
        top_k = top_k if top_k < self._columns[0] else 0
        asked, size = wanted_by(temperature, top_p, top_k, min_p), buffers.size
        target, draft = np.zeros(size.rows, DRAW), np.zeros(size.outputs, DRAW)
        target["temperature"], draft["temperature"] = temperature, temperature
        target["share"], draft["share"] = asked.share, draft_share
        target["room"], draft["room"] = self._columns
        if asked.weights:
            target["sums"] = rows_of(buffers.sums)
        if asked.share:
            target["ids"][: size.truncated] = rows_of(buffers.kept_ids)
            target["weights"][: size.truncated] = rows_of(buffers.kept_probs)
        draft["ids"], draft["weights"] = rows_of(buffers.ids), rows_of(buffers.probs)
        found, rows, measured = address(buffers.found) or 0, 8 * buffers.size.rows, address(buffers.measured) or 0
        lists = range(found + 8 * COUNTS, found + 8 * COUNTS + 5 * rows, rows)
        wanted = Round(counts=found, seconds=measured, shares=measured + 16, **dict(zip(LISTS, lists, strict=True)))
        places = [address(buffers.numbers) or 0]
        for count in self.most_draws(shape):
            places.append(places[-1] + 8 * count)
        NUMBERS.pack_into(wanted, Round.numbers.offset, *places)
        wanted.names, wanted.room = address(self._names), address(buffers.room)
        wanted.cuts = Cuts(top_p, min_p, top_k)
        wanted.pending_tokens = address(buffers.pending)
        wanted.target.logits, wanted.target.draws = address(buffers.target_logits), address(target)
        wanted.draft.logits, wanted.draft.draws = address(buffers.draft_logits), address(draft)
        if not shape.is_drawn:
            wanted.draft.top = bindings.top_columns(self._columns[1])
            wanted.draft.ids, wanted.draft.logprobs = address(buffers.ids), address(buffers.logprobs)
        return Prepared(wanted, VERIFIERS.index(shape.verify), buffers, (target, draft))

    def close(self) -> None:
        """See Rounds.close."""
        self._next = self._buffers = None
        self._prepared.clear()


class RoundEngine(Engine):
    """Runs the rounds of one text."""

    def __init__(self, rounds: NativeRounds, target: NativeEngine) -> None:
        self.spec = target.spec
        self._rounds = rounds
        self._output = ForwardOutput(np.zeros((0, target.spec.model.num_logits), np.float32), None, None)

    def new_cache(self) -> KVCache:
        """Raises EngineError: rounds run over caches that are open."""
        raise EngineError("rounds have no caches of their own: open those of the target and of the draft")

    def forward(self, passes: Sequence[Pass]) -> list[ForwardOutput]:
        """Run the prepared round. The output has no rows: the result is Rounds.outcome."""
        self._rounds.run()
        return [self._output]

    def close(self) -> None:
        """Nothing: the engines of target and draft are their owner's."""


def levels(count: int) -> int:
    """How many numbers SeededStream.categorical takes for so many categories, up to BLOCK²."""
    return 1 if count <= BLOCK else 2


def rows_of(buffer: NDArray[np.generic]) -> NDArray[np.uint64]:
    """The addresses of the rows of a buffer."""
    return ((address(buffer) or 0) + buffer.strides[0] * np.arange(len(buffer))).astype(np.uint64)
