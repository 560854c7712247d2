"""The layout of a matrix for the kernels: panels of 16 outputs, in which the inputs follow each other.

A panel of fp32 or fp16 is [inputs, 16]. Of bf16, pairs of neighbouring inputs lie side by side, [inputs / 2, 16, 2], as
matrix registers take them; it is filled up to blocks of 32 inputs with zeros. Of codes, vpdpbusd takes four
neighbouring inputs of 16 outputs at once: a panel is [inputs / 4, 16, 4] bytes. Codes of 4 bits lie two to a byte,
[inputs / 8, 16, 4]: a byte's low half belongs to the first four of eight inputs, its high half to the others. Codes of
8 bits are stored unsigned, 128 larger than they are, and their scales, one for a block of inputs, as fp16; codes of 4
bits are unsigned, and a block's scales of 16 outputs are followed by their offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PANEL = 16  # outputs; lanes of a vector in kernels/vector.h
PAIR_BLOCK = 32  # inputs of bf16 whose products are added apart: kernels/bf16.h
MIN_HALF = 2.0**-56  # smaller numbers of bf16 count as 0: kernels/bf16.h
MIN_BITS = int(np.float32(MIN_HALF).view(np.uint32)) >> 16
LAYOUT = "4"  # of a file of weights, the same for every processor; another one with every change of it


def whole_panels(size: int) -> int:
    """A number of outputs filled up to whole panels."""
    return -(-size // PANEL) * PANEL


def filled(rows: NDArray[Any]) -> NDArray[Any]:
    """Rows of zeros appended up to whole panels: [N, ...] -> [16 * panels, ...]."""
    missing = -len(rows) % PANEL
    return np.concatenate((rows, np.zeros((missing, *rows.shape[1:]), rows.dtype))) if missing else rows


def panels(matrix: NDArray[Any]) -> NDArray[Any]:
    """[N, K] -> [panels, K, 16]."""
    outputs = filled(matrix)
    return np.ascontiguousarray(outputs.reshape(-1, PANEL, outputs.shape[1]).transpose(0, 2, 1))


def pair_panels(halves: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """The bits of bf16 [N, K] -> [panels, 16 * blocks, 16, 2]. Numbers that count as 0 become 0."""
    outputs, inputs = halves.shape
    rows = np.zeros((whole_panels(outputs), -(-inputs // PAIR_BLOCK) * PAIR_BLOCK), np.uint16)
    rows[:outputs, :inputs] = np.where(halves & 0x7FFF < MIN_BITS, np.uint16(0), halves)
    pairs = rows.view(np.uint32).reshape(-1, PANEL, rows.shape[1] // 2).transpose(0, 2, 1)
    return np.ascontiguousarray(pairs).view(np.uint16).reshape(*pairs.shape, 2)


def code_panels(codes: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """int8 [N, K] -> uint8 [panels, K / 4, 16, 4], or of codes from 0 to 15 [panels, K / 8, 16, 4]. K is a multiple of
    8."""
    unsigned = filled(codes).view(np.uint8)
    if bits == 8:
        unsigned = unsigned ^ np.uint8(128)
    fours = unsigned.view(np.uint32).reshape(-1, PANEL, unsigned.shape[1] // 4).transpose(0, 2, 1)  # four inputs each
    packed = np.ascontiguousarray(fours) if bits == 8 else fours[:, ::2] | fours[:, 1::2] << np.uint32(4)
    return np.ascontiguousarray(packed).view(np.uint8).reshape(*packed.shape, 4)


def fp16_panels(scales: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 [N, K] -> the bits of fp16 [panels, K, 16]."""
    return panels(scales.astype(np.float16)).view(np.uint16)


def fp16_pairs(scales: NDArray[np.float32], offsets: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 [N, K] each -> the bits of fp16 [panels, K, 2, 16]."""
    return np.stack([fp16_panels(scales), fp16_panels(offsets)], 2)


def alternated(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """The panels of two matrices of one shape in turn, still as rows: [2 * 16 * panels, ...]."""
    parts = [filled(part).reshape(-1, 1, PANEL, *part.shape[1:]) for part in (first, second)]
    merged: NDArray[Any] = np.concatenate(parts, axis=1)
    return merged.reshape((-1, *merged.shape[3:]))


def flat(vector: NDArray[Any]) -> NDArray[np.float32]:
    """A vector as fp32, filled up to whole panels."""
    return np.ascontiguousarray(filled(np.asarray(vector, np.float32)))


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Matrices over one input as one."""
    return np.concatenate(parts)
