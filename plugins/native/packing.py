"""The layout of a matrix for the kernels: panels of 16 outputs, in which the inputs follow each other.

A panel of fp32 or fp16 is [inputs, 16]. Of bf16, pairs of neighbouring inputs lie side by side, [inputs / 2, 16, 2], as
matrix registers take them; it is filled up to blocks of 32 inputs with zeros. Of codes, vpdpbusd takes four
neighbouring inputs of 16 outputs at once: a panel of 8 bits is [inputs / 4, 16, 4] bytes. Of fewer bits, a group of
inputs has its low halves two to a byte, [group / 8, 16, 4]: a byte's low half belongs to the first four of eight
inputs, its high half to the others. One vector [16, 4] with the upper bits of all fours follows, those of the first
four lowest. A group shares a scale, in fp16 or as kernels/scales.h says of superblocks. Codes of 8 and 6 bits are
stored unsigned, 128 or 32 larger than they are; those of 5 and 4 bits are unsigned, and a group's scales of 16 outputs
are followed by their offsets.
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
LAYOUT = "6"  # of a file of weights, the same for every processor; another one with every change of it


SUPERBLOCK = 256  # inputs that share the factor of their scales: kernels/scales.h
GROUPS = {8: 32, 6: 16, 5: 32, 4: 32}  # inputs that share a scale, by bits of a code: group_of in kernels/scales.h


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
    """int8 [N, K], of 8 and 6 bits signed -> uint8 [panels, K * bits / 32, 16, 4]. K: a multiple of 8, or the group."""
    unsigned = filled(codes).view(np.uint8) + np.uint8(0 if bits < 6 else 1 << bits - 1)
    fours = unsigned.view(np.uint32).reshape(-1, PANEL, unsigned.shape[1] // 4).transpose(0, 2, 1)  # four inputs each
    low, upper = fours & np.uint32(0x0F0F0F0F), fours >> np.uint32(4) & np.uint32(0x0F0F0F0F)
    packed = fours if bits == 8 else low[:, ::2] | low[:, 1::2] << np.uint32(4)
    if bits in (5, 6):
        each = GROUPS[bits] // 4  # fours of a group
        planes = upper[:, ::each].copy()
        for at in range(1, each):
            planes |= upper[:, at::each] << np.uint32(at * (bits - 4))
        halves = packed.reshape(len(packed), -1, each // 2, PANEL)
        packed = np.concatenate((halves, planes[:, :, None]), axis=2).reshape(len(packed), -1, PANEL)
    packed = np.ascontiguousarray(packed)
    return packed.view(np.uint8).reshape(*packed.shape, 4)


def fp16_panels(scales: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 [N, K] -> the bits of fp16 [panels, K, 16]."""
    return panels(scales.astype(np.float16)).view(np.uint16)


def fp16_pairs(scales: NDArray[np.float32], offsets: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 [N, K] each -> the bits of fp16 [panels, K, 2, 16]."""
    return np.stack([fp16_panels(scales), fp16_panels(offsets)], 2)


def superblock_bytes(bits: int, offsets: bool) -> int:
    """Bytes of a superblock's numbers of a panel: factors in fp16, and an integer of 8 bits for each group."""
    return (1 + offsets) * PANEL * (2 + SUPERBLOCK // GROUPS[bits])


def superblock_panels(
    scales: NDArray[np.float32], offsets: NDArray[np.float32] | None, factors: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """float32 [N, K / group] and [N, K / 256, 1 or 2] -> uint8 [panels, K / 256, superblock_bytes]. factors: see
    Blocks; of zero, all multiples are."""
    outputs, blocks, kinds = factors.shape
    numbers = np.stack([scales] if offsets is None else [scales, offsets], -1).reshape(outputs, blocks, -1, kinds)
    integers = np.divide(numbers, factors[:, :, None], out=np.zeros_like(numbers), where=factors[:, :, None] != 0)

    def laid(array: NDArray[Any]) -> NDArray[np.uint8]:
        """[N, K / 256, ...] -> [panels, K / 256, bytes]: sixteen outputs side by side."""
        lanes = np.moveaxis(filled(array).reshape(-1, PANEL, *array.shape[1:]), 1, -1)
        return np.ascontiguousarray(lanes).view(np.uint8).reshape(len(lanes), blocks, -1)

    return np.concatenate((laid(factors.astype(np.float16)), laid(integers.astype(np.int8))), 2)


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
