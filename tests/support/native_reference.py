"""What the kernels' matrices of integers and of bf16 compute, in numpy: the oracle of
tests/plugins/test_native_kernels.py."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftwood.plugins.native.library import BLOCK
from draftwood.plugins.native.packing import MIN_HALF, PAIR_BLOCK


class Rounded(NamedTuple):
    """Rows [R, K] as integers. codes: [R, K / block, block] from -127 to 127; scales: [R, K / block]."""

    codes: NDArray[np.int32]
    scales: NDArray[np.float32]


def rounded(rows: NDArray[np.float32], block: int) -> Rounded:
    """Each block of a row divided by its largest magnitude / 127 and rounded, ties to even. Where a number of a block
    is infinite or none, its codes are 0, and its scale is no number."""
    blocks = rows.reshape(len(rows), -1, block)
    finite = np.isfinite(blocks).all(-1, keepdims=True)
    blocks = np.where(finite, blocks, np.float32(0))
    peaks = np.abs(blocks).max(-1)
    steps = np.divide(np.float32(127), peaks, out=np.zeros_like(peaks), where=peaks > 1e-30)
    scales = np.where(finite[..., 0], peaks / np.float32(127), np.float32(np.nan))
    return Rounded(np.rint(blocks * steps[..., None]).astype(np.int32), scales)


def linear(
    rows: NDArray[np.float32],
    codes: NDArray[np.int8],
    scales: NDArray[np.float32],
    offsets: NDArray[np.float32] | None = None,
) -> NDArray[np.float64]:
    """Rows [R, K] times a matrix [N, K] of `codes` with scales, and offsets or none, [N, K / group]: whole groups in
    integers, scaled and added in double precision, [R, N]."""
    outputs, groups = scales.shape
    x = rounded(rows, BLOCK)
    x = Rounded(x.codes.reshape(len(rows), groups, -1), x.scales.repeat(groups * BLOCK // codes.shape[1], 1))
    whole = np.einsum("rbk,nbk->rnb", x.codes, codes.reshape(outputs, groups, -1).astype(np.int32))
    both = scales[None].astype(np.float64) * x.scales[:, None]
    product = np.asarray((whole * both).sum(-1))
    if offsets is not None:
        product += (x.codes.sum(-1) * x.scales.astype(np.float64)) @ offsets.T.astype(np.float64)
    return product


def rounded_halves(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest numbers of bf16, ties to even; 0 where a number is smaller than MIN_HALF."""
    bits = rows.view(np.uint32)
    near = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.abs(rows) < MIN_HALF, np.float32(0), near.view(np.float32))


def linear_halves(rows: NDArray[np.float32], matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows [R, K] times a matrix [N, K], both of numbers of bf16, bit for bit, [R, N]. Of 32 inputs, products with even
    and with odd inputs are added apart, one after the other; then both sums together, and to the sum before."""
    result = np.zeros((len(rows), len(matrix)), np.float32)
    for first in range(0, rows.shape[1], PAIR_BLOCK):
        sums = [np.zeros_like(result), np.zeros_like(result)]
        for k in range(first, min(first + PAIR_BLOCK, rows.shape[1])):
            # A product has 16 bits and a sum 24: rounding to the 53 bits of a double first changes no result.
            product = np.outer(rows[:, k].astype(np.float64), matrix[:, k].astype(np.float64))
            sums[k % 2] = (sums[k % 2] + product).astype(np.float32)
        result += sums[0] + sums[1]
    return result
