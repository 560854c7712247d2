"""Rounds on the device over static caches: which shapes fit, which texts share one, and the caches afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from ....models import bindings
from ....models.errors import EngineError
from ....plugins.device_round.images import OFFER_BLOCK, PENDING, ROW_BLOCK
from ..base import KVCache, closed_error
from ..layout import PassShape, mask_columns
from ..rounds import BEST, RoundDraws, RoundOutcome, RoundRunner, Rounds, RoundShape, WholeRound
from .draws import Vocabulary
from .memory import CacheMemory, StaticPass
from .round import WORD, CachePlace, Names, Round, TextPlace

if TYPE_CHECKING:  # engine.py imports this module
    from .engine import StaticEngine

MAX_ROUNDS = 32  # shapes and numbers of texts whose graphs are kept
MAX_DRAWN = 8  # the same above temperature 0, where the buffers have rows of the vocabulary


class RoundCache(KVCache, Protocol):
    """A cache over which rounds run. StaticKVCache and SharedKVCache describe the methods."""

    def has_room(self, first: int, rows: int) -> bool: ...

    def place(self, columns: int) -> tuple[int, int]: ...

    def accept(self, length: int) -> None: ...


def can_run(engine: StaticEngine) -> bool:
    """Whether rounds can run over caches of this engine: it ranks tokens, no kernel has to hand states on, and one can
    move rows of this size."""
    row_bytes, states = engine.spec.model.head_dim * engine.program.cache_itemsize, engine.spec.model.state_size
    return bindings.TOP_IDS.name in engine.spec.outputs and row_bytes % WORD == 0 and not states


class StaticRounds(Rounds):
    """The rounds of a text over its caches."""

    def __init__(self, shared: SharedRounds, target: RoundCache, draft: RoundCache) -> None:
        self._shared, self._target, self._draft = shared, target, draft
        self.closed = False

    def fits(self, shape: RoundShape, num_pending: int) -> bool:
        depth, size, width = shape[:3]
        if not 0 < num_pending <= PENDING or not self._shared.runs(shape):
            return False
        if self._draft.length + num_pending != self._target.length + 1:
            return False
        if depth > 1 and not self._draft.has_room(PENDING + (depth - 2) * width, width):
            return False
        return self._draft.has_room(0, PENDING) and self._target.has_room(0, size + 1)

    def round(self, shape: RoundShape, pending: Sequence[int], draws: RoundDraws | None = None) -> WholeRound:
        return WholeRound(self._shared.runner(shape), self, self._target, tuple(pending), draws)

    def place(self, pending: tuple[int, ...], target_columns: int, draft_columns: int) -> TextPlace:
        """Where the text is, for a round with so many columns of all texts."""
        places = self._target.place(target_columns), self._draft.place(draft_columns)
        return TextPlace(self._target.length, pending, *places)

    def accept(self, outcome: RoundOutcome) -> None:
        length = self._target.length + 1
        self._target.accept(length + len(outcome.accepted))
        self._draft.accept(length + outcome.num_scored)

    def close(self) -> None:
        self.closed = True


class SharedRounds:
    """What the rounds over one pair of cache memories share: a trimmed draft's tokens, buffers and graphs. They run on
    the target's stream, one at a time. texts: the texts with caches in these memories, by the target's cache."""

    def __init__(self, target: StaticEngine, draft: StaticEngine, memories: tuple[CacheMemory, CacheMemory]) -> None:
        self.target, self.draft, self._memories = target, draft, memories
        self._runners: dict[RoundShape, StaticRunner] = {}
        self._rounds: dict[tuple[RoundShape, int], Round] = {}  # the latest one last
        kept = np.array(draft.spec.kept_tokens, np.int32)
        device, stream = target.device, target.stream
        self._names = Names(device.allocate(kept.nbytes), len(kept))
        columns = target.spec.model.num_logits, draft.spec.model.num_logits
        self._vocabulary = Vocabulary(*columns, self._names.memory.address, len(kept))
        if len(kept):
            block = device.allocate_pinned(kept.nbytes)
            block[:] = kept.view(np.uint8)
            device.upload(self._names.memory.address, block, stream)
            device.synchronize(stream)

    @property
    def is_joint(self) -> bool:
        """Whether texts share the memories."""
        return self.target.spec.max_batch > 1

    def runs(self, shape: RoundShape) -> bool:
        """Whether passes and kernels suffice for such rounds; those of several texts are run at temperature 0 alone."""
        if shape.verify != BEST and (self.is_joint or not self._vocabulary.fits):
            return False
        width, rows, ranked = shape.width, shape.size + 1, bindings.top_columns(self._vocabulary.draft)
        offers = shape.most_drawn if shape.is_tree else width**2
        if offers > OFFER_BLOCK or (width > ranked and not shape.is_tree):
            return False
        if rows > min(ROW_BLOCK, self.target.spec.max_width):
            return False
        return max(width, PENDING) <= self.draft.spec.max_width

    def runner(self, shape: RoundShape) -> StaticRunner:
        """Of all texts' rounds of this shape."""
        if shape not in self._runners:
            self._runners[shape] = StaticRunner(self, shape)
        return self._runners[shape]

    def most_texts(self, shape: RoundShape) -> int:
        """The most texts of a round: those whose rows fit one pass of the draft. The target's passes may be several."""
        fitting = self.draft.spec.max_width // max(shape.width, PENDING)
        return min(fitting, self.target.spec.max_batch, self.draft.spec.max_batch)

    def run(self, shape: RoundShape, rounds: Sequence[WholeRound]) -> list[RoundOutcome]:
        """Run a round of each of these texts, whose rounds are static ones."""
        target, draft = self.target, self.draft
        texts = [cast(StaticRounds, each.text) for each in rounds]
        with target.lock, draft.lock:
            for engine in (target, draft):
                if engine.closed:
                    raise closed_error(engine.spec)
            if any(text.closed for text in texts):
                raise EngineError("the rounds of this text were closed: open others over its caches")
            columns = self._columns(shape, len(texts))
            places = [text.place(each.pending, *columns) for text, each in zip(texts, rounds, strict=True)]
            if draft.has_queued_moves:  # on the draft's own stream
                draft.device.synchronize(draft.stream)
                draft.has_queued_moves = False
            outcomes = self._round(shape, len(texts)).run(places, rounds[0].draws)
            target.has_queued_moves = False
            for text, outcome in zip(texts, outcomes, strict=True):
                text.accept(outcome)
        return list(outcomes)

    def _round(self, shape: RoundShape, texts: int) -> Round:
        """The round of this shape, made on first use."""
        made = self._rounds.pop((shape, texts), None)
        is_best = shape.verify == BEST
        alike = [each for each in self._rounds if (each[0].verify == BEST) == is_best]
        most = MAX_ROUNDS if is_best else MAX_DRAWN
        for each in alike[: max(len(alike) + 1 - most, 0)]:
            del self._rounds[each]
        self._rounds[shape, texts] = made or self._made(shape, texts)
        return self._rounds[shape, texts]

    def _made(self, shape: RoundShape, texts: int) -> Round:
        targets, draft = self._passes(shape, texts)
        passes = [self._bound(1, rows, first, texts == 1 and not first) for rows, first in draft]
        scoring = [self._bound(0, rows, first) for rows, first in targets]
        caches = self._place(0), self._place(1)
        return Round(self.target.device, self.target.stream, shape, passes, scoring, caches, self._names, texts)

    def _passes(self, shape: RoundShape, texts: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Rows and first column of the target's passes, each of as many texts as fit, and of the draft's."""
        rows, width = shape.size + 1, shape.width
        fitting = self.target.spec.max_width // rows
        targets = [(min(fitting, texts - first) * rows, 0) for first in range(0, texts, fitting)]
        layers = [(width * texts, (PENDING + layer * width) * texts) for layer in range(shape.depth - 1)]
        return targets, [(PENDING * texts, 0), *layers]

    def _columns(self, shape: RoundShape, texts: int) -> tuple[int, int]:
        """Columns that the passes write in the caches of target and draft."""
        target, draft = (
            max(first + engine.spec.width_for(rows) for rows, first in passes)
            for engine, passes in zip((self.target, self.draft), self._passes(shape, texts), strict=True)
        )
        return target, draft

    def _bound(self, side: int, rows: int, first: int, last_only: bool = False) -> StaticPass:
        """A pass of `rows` rows after `first` columns. side: 0 for the target, 1 for the draft."""
        engine = (self.target, self.draft)[side]
        width = engine.spec.width_for(rows)
        columns = mask_columns(width, first + width, engine.program.max_columns)
        return self._memories[side].bind_pass(PassShape(width, columns, 1 if last_only else width))

    def _place(self, side: int) -> CachePlace:
        spec, memory = (self.target, self.draft)[side].spec, self._memories[side]
        num_logits = spec.model.num_logits
        ranked = bindings.top_columns(num_logits)
        return CachePlace(memory.parts, ranked, num_logits, spec.max_batch)


class StaticRunner(RoundRunner):
    """The rounds of one shape, of several texts at a time."""

    def __init__(self, shared: SharedRounds, shape: RoundShape) -> None:
        self.spec = shared.target.spec
        self._shared, self._shape = shared, shape

    def num_joint(self, rounds: Sequence[WholeRound]) -> int:
        return min(len(rounds), self._shared.most_texts(self._shape))

    def forward(self, rounds: Sequence[WholeRound]) -> list[RoundOutcome]:
        return self._shared.run(self._shape, rounds)
