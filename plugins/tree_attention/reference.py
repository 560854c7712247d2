"""TreeAttention in numpy: the oracle that the ONNX body, the kernel and the plugin are tested against."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def tree_attention(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    cache_lengths: NDArray[np.int32],
    tree_mask: NDArray[np.bool_],
    scale: float,
) -> NDArray[np.float32]:
    """Attention of T tree rows over a cache, row by row, in fp64; shapes and meaning as in `op.py`.

    Returns [B, H, T, D], fp32. Reads no slot that no row of the sequence and head sees.
    """
    batch, heads, rows, head_dim = query.shape
    group = heads // key.shape[1]
    output = np.zeros((batch, heads, rows, head_dim), np.float32)
    for sequence, head, row in np.ndindex(batch, heads, rows):
        slots = visible_slots(int(cache_lengths[sequence]), tree_mask[sequence, row], key.shape[2])
        if not slots.size:
            continue
        keys = key[sequence, head // group, slots].astype(np.float64)
        scores = keys @ query[sequence, head, row].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        output[sequence, head, row] = weights @ value[sequence, head // group, slots].astype(np.float64) / weights.sum()
    return output


def visible_slots(cache_length: int, row_mask: NDArray[np.bool_], capacity: int) -> NDArray[np.intp]:
    """Slots one row sees: the committed ones, then those its mask names; none beyond the cache's capacity."""
    slots: NDArray[np.intp] = np.concatenate([np.arange(cache_length), cache_length + np.flatnonzero(row_mask)])
    visible: NDArray[np.intp] = slots[slots < capacity]
    return visible
