"""TreeAttention in numpy: the oracle for tests of the ONNX body, the kernel and the plugin."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .op import SequenceRow


def tree_attention(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    sequences: NDArray[np.int32],
    tree_mask: NDArray[np.bool_],
    scale: float,
) -> NDArray[np.float32]:
    """Attention of T tree rows over a cache, row by row, in fp64; shapes and meaning as in `op.py`.

    Returns [1, H, T, D], fp32. Slots that are invisible to all rows of a sequence and head are not read.
    """
    _, heads, rows, head_dim = query.shape
    group = heads // key.shape[1]
    output = np.zeros((1, heads, rows, head_dim), np.float32)
    for head, row in np.ndindex(heads, rows):
        slots = visible_slots(sequence_of(row, sequences), tree_mask[0, row], key.shape[2])
        if not slots.size:
            continue
        keys = key[0, head // group, slots].astype(np.float64)
        scores = keys @ query[0, head, row].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        output[0, head, row] = weights @ value[0, head // group, slots].astype(np.float64) / weights.sum()
    return output


def sequence_of(row: int, sequences: NDArray[np.int32]) -> SequenceRow:
    """The sequence of a row: the last sequence that begins at this row or before."""
    found: list[int] = sequences[sequences[:, 0] <= row][-1].tolist()
    return SequenceRow._make(found)


def visible_slots(sequence: SequenceRow, row_mask: NDArray[np.bool_], capacity: int) -> NDArray[np.intp]:
    """The visible slots of a row: the committed ones, then those of its mask; none beyond the cache's capacity."""
    committed = np.arange(sequence.first_slot, sequence.first_slot + sequence.length)
    slots: NDArray[np.intp] = np.concatenate([committed, sequence.tree_slot + np.flatnonzero(row_mask)])
    visible: NDArray[np.intp] = slots[slots < capacity]
    return visible
