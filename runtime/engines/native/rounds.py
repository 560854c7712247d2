"""Rounds of one request that the kernels run as a whole: the passes of draft and target, and what chooses tokens
between them (plugins/native/kernels/round.h). The host's growers and verifiers give the same texts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....models import bindings
from ....models.errors import EngineError
from ....plugins.native.library import DRAW, RUN, address
from ....plugins.native.round import (
    COUNTS,
    GIVEN,
    MOST_COLUMNS,
    MOST_KEPT,
    MOST_NODES,
    MOST_WIDTH,
    VERIFIERS,
    Cuts,
    Round,
)
from ...sampling.random import BLOCK
from ...sampling.sampler import wanted_by
from ..base import Engine, ForwardOutput, KVCache, Pass
from ..passes import causal_batch
from ..rounds import BEST, DrawSettings, RoundDraws, RoundOutcome, Rounds, RoundShape, TextRows

if TYPE_CHECKING:  # engine.py imports this module
    from .engine import NativeEngine, NativeKVCache

MOST_BYTES = 1 << 28  # of room for distributions: flat ones of large vocabularies are left to the host
MOST_PREPARED = 64  # shapes and settings that are kept
RESULTS = ("tokens", "parents", "depths", "accepted", "shares", "slots")  # by row, in this order
GREEDY = DrawSettings(0.0, 0.0, 0.0, 1.0, 0)
NO_DRAWS = RoundDraws(GREEDY, *[array("d")] * 4)


class RoundSize(NamedTuple):
    """What a round needs room for: rows of the target, those of them that may be truncated, outputs of the draft, and
    distributions of the draft's columns."""

    rows: int
    truncated: int
    outputs: int
    distributions: int

    @classmethod
    def of(cls, shape: RoundShape) -> RoundSize:
        rows = shape.size + 1
        nodes = shape.depth * shape.most_drawn if shape.is_tree else 0
        distributions = nodes + rows if shape.is_drawn else 0
        truncated, outputs = 0 if shape.verify == BEST else rows, 1 + (shape.depth - 1) * shape.width
        return cls(rows, truncated, outputs, distributions)

    def num_bytes(self, columns: tuple[int, int]) -> int:
        """Of distributions, and of lists of tokens and their probabilities. columns: V and N."""
        return 8 * (2 * self.truncated * columns[0] + (self.distributions + 2 * self.outputs) * columns[1])


class Buffers:
    """Memory that the rounds of one text share; each of them overwrites it. target: logits [rows, V], the sums of their
    softmaxes, and the tokens that truncation keeps [truncated, V]. draft: logits [outputs, N], and the likely or the
    best columns of each row. found: what Findings reads, and `slots` [rows]."""

    def __init__(self, size: RoundSize, columns: tuple[int, int]) -> None:
        """columns: V and N."""
        (rows, truncated, outputs, distributions), (target, draft) = size, columns
        self.size = size
        self.target_logits = np.empty((rows, target), np.float32)
        self.sums = np.empty((rows, -(-target // RUN)))
        self.kept_ids, self.kept_probs = np.empty((truncated, target), np.int64), np.empty((truncated, target))
        self.draft_logits = np.empty((outputs, draft), np.float32)
        self.ids, self.probs = np.empty((outputs, draft), np.int64), np.empty((outputs, draft))
        self.logprobs = np.empty((outputs, bindings.top_columns(draft)), np.float32)
        self.room = np.empty(distributions * (draft + 2) + max(columns))
        self.found = array("q", bytes(8 * (COUNTS + 2 + len(RESULTS) * rows)))


class Findings:
    """The numbers that rounds of up to R rows leave in a buffer: counts, seconds, and RESULTS but for the slots."""

    def __init__(self, rows: int) -> None:
        self.rows, self._unpack = rows, Struct(f"={COUNTS}q2d{4 * rows}q{rows}d").unpack_from

    def read(self, buffer: array[int], num_pending: int) -> RoundOutcome:
        """What a round has found."""
        numbers, rows = self._unpack(buffer), self.rows
        count, num_accepted, next_token, passes, scored, read, *_ = numbers[:COUNTS]
        tokens, parents, depths, paths, shares = range(COUNTS + 2, len(numbers), rows)
        token_ids, accepted = numbers[tokens : tokens + count], numbers[paths : paths + num_accepted]
        return RoundOutcome(
            token_ids,
            numbers[parents : parents + count],
            numbers[depths : depths + count],
            numbers[shares : shares + count],
            accepted,
            [*map(token_ids.__getitem__, accepted), next_token],
            read,
            numbers[COUNTS - 3 : COUNTS],
            1 + passes,
            num_pending + scored,
            numbers[COUNTS : COUNTS + 2],
        )


class Prepared(NamedTuple):
    """A round of one shape, with the same settings. wanted: the C structure. place: its address. findings: of its
    results. buffers, draws: what it points to."""

    wanted: Round
    place: int
    findings: Findings
    buffers: Buffers
    draws: tuple[NDArray[np.void], NDArray[np.void]]


class NativeRounds(Rounds):
    """The rounds of one text over its caches."""

    join = False
    end_early = True
    looks_up = True

    def __init__(
        self,
        engines: tuple[NativeEngine, NativeEngine],
        rows: tuple[TextRows, TextRows],
        storages: tuple[NativeKVCache, NativeKVCache],
    ) -> None:
        """engines, rows: of the target and of the draft. storages: of these rows."""
        self._engines, self._rows, self._storages = engines, rows, storages
        target, draft = (engine.spec for engine in engines)
        self._columns = target.model.num_logits, draft.model.num_logits
        self._names = np.array(draft.kept_tokens, np.int64) if draft.kept_tokens else None
        self._fitting: dict[RoundShape, bool] = {}
        self._most_draws: dict[RoundShape, tuple[int, int, int]] = {}
        self._buffers: Buffers | None = None
        self._structures = storages[0].structure, storages[1].structure
        self._prepared: dict[tuple[RoundShape, DrawSettings], Prepared] = {}
        self._next: tuple[RoundShape, Sequence[int], RoundDraws | None] | None = None
        batch = causal_batch(target, [0], 0)  # says nothing: a round has its own
        self._pass = Pass(RoundEngine(self, engines[0]), batch, rows[0].cache)

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
        return (
            self._fitting[shape]
            and 0 < num_pending <= min(self._engines[1].spec.max_width, MOST_WIDTH)
            and self._rows[0].has_room(shape.size + 1)
            and self._rows[1].has_room(num_pending + (shape.depth - 1) * shape.width)
        )

    def _has_passes(self, shape: RoundShape) -> bool:
        """Whether passes and kernels are wide enough, and the room for distributions is not too large."""
        (target, draft), size = self._engines, RoundSize.of(shape)
        nodes = 1 + shape.depth * (shape.size + shape.width)
        few = nodes + shape.size + 2 * MOST_WIDTH <= MOST_NODES and size.rows <= min(MOST_KEPT, target.spec.max_width)
        narrow = shape.width <= min(draft.spec.max_width, MOST_WIDTH) and max(self._columns) <= MOST_COLUMNS
        ranked = shape.is_drawn or shape.width <= bindings.top_columns(self._columns[1])
        return few and narrow and ranked and size.num_bytes(self._columns) <= MOST_BYTES

    def prepare(self, shape: RoundShape, pending: Sequence[int], draws: RoundDraws | None = None) -> Pass:
        """See Rounds.prepare."""
        self._next = shape, pending, draws
        return self._pass

    def run(self) -> None:
        """Run the prepared round. Raises EngineError as Engine.forward does."""
        if self._next is None:
            raise EngineError("the rounds of this text were closed: open others over its caches")
        (shape, pending, draws), (target, draft), (rows, drafted) = self._next, self._engines, self._rows
        num_pending = len(pending)
        own = rows.open_block(shape.size + 1)
        other = drafted.open_block(num_pending + (shape.depth - 1) * shape.width)
        settings, *numbers = draws or NO_DRAWS
        wanted, place, findings, buffers, _ = self._wanted(shape, settings)
        tokens = array("q", pending)  # lives as long as the round
        places = [each.buffer_info()[0] for each in numbers]
        slots = own.position, other.position, own.start, other.start, own.length, other.length
        visible = address(own.visible) or 0, address(other.visible) or 0
        GIVEN.pack_into(wanted, Round.pending.offset, num_pending, *slots, tokens.buffer_info()[0], *places, *visible)
        target.run_round(draft, place)
        self.outcome = found = findings.read(buffers.found, num_pending)
        try:
            rows.append([pending[-1], *found.written[:-1]])
            drafted.append([*pending, *found.written[: found.num_scored]])
        except BaseException:  # without memory; the loop may run this round again
            rows.cache.truncate(own.position)
            drafted.cache.truncate(other.position)
            raise

    def _wanted(self, shape: RoundShape, settings: DrawSettings) -> Prepared:
        """A round of this shape with these settings. The buffers are made anew where the shape needs larger ones."""
        storage, other = self._storages
        if self._structures != (storage.structure, other.structure):  # one has grown
            self._structures = storage.structure, other.structure
            self._prepared.clear()
        key = shape, settings
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) == MOST_PREPARED:
                self._prepared.clear()
            size, made = RoundSize.of(shape), self._buffers
            if made is None or any(least > there for least, there in zip(size, made.size, strict=True)):
                self._prepared.clear()
                size = size if made is None else RoundSize(*map(max, size, made.size))
                made = self._buffers = Buffers(size, self._columns)
            prepared = self._prepared[key] = self._describe(made, shape, settings)
        return prepared

    def _describe(self, buffers: Buffers, shape: RoundShape, settings: DrawSettings) -> Prepared:
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
        found, findings = buffers.found.buffer_info()[0], Findings(shape.size + 1)
        results = range(found + 8 * (COUNTS + 2), found + 8 * len(buffers.found), 8 * findings.rows)
        numbers = shape.depth, shape.size, shape.width, VERIFIERS.index(shape.verify), shape.is_drawn, shape.is_tree
        wanted = Round(*numbers, outputs=1 + (shape.depth - 1) * shape.width)
        wanted.counts, wanted.seconds = found, found + 8 * COUNTS
        for name, at in zip(RESULTS, results, strict=False):  # there may be room for larger rounds
            setattr(wanted, name, at)
        wanted.names, wanted.room = address(self._names), address(buffers.room)
        wanted.cuts = Cuts(top_p, min_p, top_k)
        wanted.target.cache, wanted.draft.cache = self._structures
        wanted.target.logits, wanted.target.draws = address(buffers.target_logits), address(target)
        wanted.draft.logits, wanted.draft.draws = address(buffers.draft_logits), address(draft)
        if not shape.is_drawn:
            wanted.draft.top = bindings.top_columns(self._columns[1])
            wanted.draft.ids, wanted.draft.logprobs = address(buffers.ids), address(buffers.logprobs)
        return Prepared(wanted, addressof(wanted), findings, buffers, (target, draft))

    def close(self) -> None:
        """See Rounds.close."""
        self._next = self._buffers = None
        self._prepared.clear()


class RoundEngine(Engine):
    """Runs the rounds of one text."""

    runs_rounds = True

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
