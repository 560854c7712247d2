"""Rounds on the device over a pair of static caches: which shapes fit, and what the caches are afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ....models import bindings
from ....plugins.device_round.images import OFFER_BLOCK, ROW_BLOCK
from ..base import ForwardOutput, KVCache, Pass, TokenBatch, closed_error
from ..layout import PassShape, mask_columns
from ..rounds import BEST, RoundDraws, RoundEngine, RoundShape
from .draws import Vocabulary
from .memory import StaticPass
from .round import PENDING, WORD, CachePlace, Names, Round

if TYPE_CHECKING:  # engine.py imports this module
    from .engine import StaticEngine, StaticKVCache


class Side(NamedTuple):
    """An engine for one sequence, and one of its caches."""

    engine: StaticEngine
    cache: StaticKVCache

    @property
    def columns(self) -> int:
        """K: how many tokens of a row are ranked."""
        return bindings.top_columns(self.engine.spec.model.num_logits)

    def place(self) -> CachePlace:
        memory = self.cache.memory
        return CachePlace(memory.address, memory.geometry, self.columns, self.engine.spec.model.num_logits)

    def has_room(self, length: int, rows: int, first: int = 0) -> bool:
        """Whether a pass of `rows` rows fits behind `length` committed and `first` speculative rows."""
        if rows > self.engine.spec.max_width:
            return False
        seen = first + self.engine.spec.width_for(rows)
        return seen <= self.engine.program.max_columns and length + seen <= self.engine.spec.capacity

    def bound(self, rows: int, first: int = 0, last_only: bool = False) -> StaticPass:
        """The pass of `rows` rows behind `first` speculative rows."""
        width = self.engine.spec.width_for(rows)
        columns = mask_columns(width, first + width, self.engine.program.max_columns)
        return self.cache.memory.bind_pass(PassShape(width, columns, 1 if last_only else width))


def can_run(side: Side) -> bool:
    """Whether rounds can run over this cache: the engine ranks tokens, and the kernel can move rows of this size."""
    row_bytes = side.engine.spec.model.head_dim * side.engine.program.cache_itemsize
    return bindings.TOP_IDS.name in side.engine.spec.outputs and row_bytes % WORD == 0


class StaticRounds(RoundEngine):
    """The rounds of one pair of caches. They run on the target's stream, one at a time."""

    def __init__(self, target: Side, draft: Side) -> None:
        self.spec = target.engine.spec
        self._target, self._draft = target, draft
        self._rounds: dict[RoundShape, Round] = {}
        self._next: tuple[RoundShape, tuple[int, ...], RoundDraws | None] | None = None
        kept = np.array(draft.engine.spec.kept_tokens, np.int32)
        device, stream = target.engine.device, target.engine.stream
        self._names = Names(device.allocate(kept.nbytes), len(kept))
        columns = target.engine.spec.model.num_logits, draft.engine.spec.model.num_logits
        self._vocabulary = Vocabulary(*columns, self._names.memory.address, len(kept))
        if len(kept):
            block = device.allocate_pinned(kept.nbytes)
            block[:] = kept.view(np.uint8)
            device.upload(self._names.memory.address, block, stream)
            device.synchronize(stream)

    def fits(self, shape: RoundShape, num_pending: int) -> bool:
        """See RoundEngine.fits."""
        depth, size, width = shape[:3]
        if shape.verify != BEST and not self._vocabulary.fits:
            return False
        if not 0 < num_pending <= PENDING or width**2 > OFFER_BLOCK or width > self._draft.columns or size >= ROW_BLOCK:
            return False
        length = self._target.cache.length
        if self._draft.cache.length + num_pending != length + 1:
            return False
        if depth > 1 and not self._draft.has_room(length + 1, width, (depth - 2) * width):
            return False
        return self._draft.has_room(length + 1 - num_pending, PENDING) and self._target.has_room(length, size + 1)

    def prepare(self, shape: RoundShape, pending: Sequence[int], draws: RoundDraws | None = None) -> Pass:
        """See RoundEngine.prepare."""
        self._next = shape, tuple(pending), draws
        rows = len(pending)
        positions = self._target.cache.length + 1 - rows + np.arange(rows)
        batch = TokenBatch.pad(pending, positions, np.tri(rows, dtype=np.bool_), rows, True, True)
        return Pass(self, batch, self._target.cache)

    def score(self, batch: TokenBatch, cache: KVCache) -> ForwardOutput:
        """Run the prepared round. The output has no rows: its result is `outcome`."""
        assert self._next is not None, "no round was prepared"
        shape, pending, draws = self._next
        target, draft = self._target, self._draft
        with target.engine.lock, draft.engine.lock:
            for engine in (target.engine, draft.engine):
                if engine.closed:
                    raise closed_error(engine.spec)
            if shape not in self._rounds:
                self._rounds[shape] = self._made(shape)
            if draft.engine.has_queued_moves:  # on the draft's own stream
                draft.engine.device.synchronize(draft.engine.stream)
                draft.engine.has_queued_moves = False
            length = target.cache.length
            self.outcome = self._rounds[shape].run(length, pending, draws)
            target.engine.has_queued_moves = False
        target.cache.length = length + 1 + len(self.outcome.accepted)
        draft.cache.length = length + 1 + self.outcome.num_scored
        target.cache.speculative = draft.cache.speculative = 0
        return ForwardOutput(np.zeros((0, self.spec.model.num_logits), np.float32), None, None)

    def close(self) -> None:
        """Release the buffers; the caches are their owner's."""
        self._rounds.clear()

    def _made(self, shape: RoundShape) -> Round:
        target, draft = self._target, self._draft
        layers = [draft.bound(shape.width, layer * shape.width) for layer in range(shape.depth - 1)]
        passes = [draft.bound(PENDING, last_only=True), *layers]
        device, stream = target.engine.device, target.engine.stream
        caches = target.place(), draft.place()
        return Round(device, stream, shape, passes, target.bound(shape.size + 1), caches, self._names)
