"""What the kernels' matrices of integers compute, in numpy: the oracle of tests/plugins/test_native_kernels.py."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rounded(NamedTuple):
    """Rows [R, K] as integers. codes: [R, K / block, block] from -127 to 127; scales: [R, K / block]."""

    codes: NDArray[np.int32]
    scales: NDArray[np.float32]


def rounded(rows: NDArray[np.float32], block: int) -> Rounded:
    """Each block of a row divided by its largest magnitude / 127 and rounded, ties to even."""
    blocks = rows.reshape(len(rows), -1, block)
    peaks = np.abs(blocks).max(-1)
    steps = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks > 1e-30)
    return Rounded(np.rint(blocks * steps[..., None]).astype(np.int32), peaks / np.float32(127))


def linear(
    rows: NDArray[np.float32],
    codes: NDArray[np.int8],
    scales: NDArray[np.float32],
    offsets: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """Rows [R, K] times a matrix [N, K] of `codes` with scales, and offsets or none, [N, K / block]: whole blocks in
    integers, scaled and added in double precision, [R, N]."""
    outputs, blocks = scales.shape
    x = rounded(rows, codes.shape[1] // blocks)
    whole = np.einsum("rbk,nbk->rnb", x.codes, codes.reshape(outputs, blocks, -1).astype(np.int32))
    both = scales[None].astype(np.float64) * x.scales[:, None]
    product = np.asarray((whole * both).sum(-1))
    if offsets is not None:
        product += (x.codes.sum(-1) * x.scales.astype(np.float64)) @ offsets.T.astype(np.float64)
    return product
