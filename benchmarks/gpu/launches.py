"""Launches the steps of `kernels.py` on CUDA tensors, and chooses between them and torch's products by measuring."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional

from . import kernels

# Outputs and inputs of a block of weights, and warps: what is tried.
TILES = ((16, 256, 4), (16, 512, 4), (32, 256, 4), (32, 128, 4), (64, 128, 4))
STAGES = 4  # blocks of weights in flight


class TritonSteps:
    """The steps of TorchSteps. tiles: the choice for each size of a matrix and number of rows, made at the first
    product, which no capture contains."""

    def __init__(self) -> None:
        self.tiles: dict[tuple[int, int, bool], tuple[int, int, int] | None] = {}

    def norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        count, size = rows.shape
        normed = torch.empty_like(rows)
        block = triton.next_power_of_2(size)
        kernels.rms_norm[(count,)](rows, weight, normed, epsilon, size, block, num_warps=8 if size > 2048 else 4)
        return normed

    def gate(self, both: Tensor) -> Tensor:
        count, size = both.shape[0], both.shape[1] // 2
        gated = torch.empty((count, size), dtype=both.dtype, device=both.device)
        block = 1024
        kernels.gate[(count, triton.cdiv(size, block))](both, gated, size, block)
        return gated

    def rotate_and_store(
        self, qkv: Tensor, positions: Tensor, tables: tuple[Tensor, ...], keys: Tensor, values: Tensor,
        first_slot: Tensor, query_heads: int,
    ) -> None:  # fmt: skip
        kv_heads, capacity, head_dim = keys.shape
        half = head_dim // 2
        sizes = capacity, query_heads, kv_heads, qkv.shape[1]
        grid = len(qkv), query_heads + 2 * kv_heads
        block = triton.next_power_of_2(half)
        kernels.rotate_and_store[grid](
            qkv, positions, *tables, keys, values, first_slot, *sizes, half, block, num_warps=1
        )

    def product(self, rows: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
        """rows [T, K] times weight [N, K], plus residual [T, N]."""
        if len(rows) > kernels.SKINNY_ROWS or rows.dtype == torch.float32:
            return by_torch(rows, weight, residual)
        key = (*weight.shape, residual is not None)
        if key not in self.tiles:
            self.tiles[key] = fastest(rows, weight, residual)
        tile = self.tiles[key]
        return by_torch(rows, weight, residual) if tile is None else skinny(rows, weight, residual, tile)


def by_torch(rows: Tensor, weight: Tensor, residual: Tensor | None) -> Tensor:
    return functional.linear(rows, weight) if residual is None else torch.addmm(residual, rows, weight.t())


def skinny(rows: Tensor, weight: Tensor, residual: Tensor | None, tile: tuple[int, int, int]) -> Tensor:
    outputs, inputs = weight.shape
    block_n, block_k, warps = tile
    result = torch.empty((len(rows), outputs), dtype=rows.dtype, device=rows.device)
    kernels.skinny_product[(triton.cdiv(outputs, block_n),)](
        rows, weight, result if residual is None else residual, result, len(rows), outputs,
        inputs, residual is not None, block_n, block_k, num_warps=warps, num_stages=STAGES,
    )  # fmt: skip
    return result


def fastest(rows: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[int, int, int] | None:
    """The tile whose product takes least, None for torch's. Other matrices are read in between, as in a pass: the
    weights must come from memory, not from the cache."""
    flush = torch.empty(1 << 29, dtype=torch.uint8, device=rows.device)
    seconds = {}
    for tile in (None, *TILES):
        times = []
        for _ in range(6):
            flush.zero_()
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begun.record()
            _ = by_torch(rows, weight, residual) if tile is None else skinny(rows, weight, residual, tile)
            ended.record()
            ended.synchronize()
            times.append(begun.elapsed_time(ended))
        seconds[tile] = min(times[1:])
    return min(seconds, key=lambda tile: seconds[tile])
