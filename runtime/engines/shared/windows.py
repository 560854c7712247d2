"""What a pool keeps for layers with a window, and whether a sequence finds there what its next rows see."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ....models.errors import EngineError
from ..base import Pass
from ..cache import NearRows
from .prefix import PrefixTree
from .sequence import NO_SLOTS, PANEL, PooledKVCache


def forget(
    near: NearRows, sequences: Collection[PooledKVCache], prefixes: PrefixTree | None, used: int, retained: int
) -> None:
    """Keep what the next rows of open sequences see, and the panels of `retained` other slots: the ends of beginnings
    that some of them share, then those of the latest ended ones. used: slots in use."""
    needed = [slots for each in sequences for slots in (each.slots[-near.window :], each.speculative_slots)]
    if prefixes is not None:
        counts = np.zeros(used, np.int64)  # of open sequences, by slot
        for each in sequences:
            counts[each.slots] += 1
        held = near.held[:used]
        latest = [prefixes.latest(np.flatnonzero(held & each)) for each in (counts > 1, counts == 0)]
        panels, order = np.unique(np.concatenate(latest) // PANEL, return_index=True)
        needed.append(panels[np.argsort(order)][: retained // PANEL] * PANEL)
    near.keep(np.concatenate((NO_SLOTS, *needed)))


def num_usable(near: NearRows, cache: PooledKVCache, known: Sequence[int]) -> int:
    """How many of the slots `known` a sequence may take over: after them it finds all that its next row sees."""
    path = np.concatenate((cache.slots, cache.speculative_slots, np.array(known, np.int64)))
    return max(0, near.usable(path) - cache.length - cache.speculative)


def check_windows(near: NearRows, passes: Iterable[Pass], sequences: Iterable[PooledKVCache]) -> None:
    """Raises EngineError where a row of a pass would see a row of its sequence that was dropped."""
    for (_, batch, *_), sequence in zip(passes, sequences, strict=True):
        first = batch.position_ids[: batch.num_tokens].min() - near.window + 1
        if not near.held[sequence.slots[max(0, first) :]].all():
            raise EngineError("rows were dropped that a window still reaches: read the text anew")
