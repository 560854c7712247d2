"""Launches the steps of `kernels.py` on CUDA tensors, and chooses between them and torch's products by measuring."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional

from . import kernels
from .model import ProductStep

Tile = tuple[int, int, int, int]
# Outputs and inputs of a block of weights, warps, and blocks in flight: what is tried.
TILES: tuple[Tile, ...] = (
    (16, 256, 4, 4), (16, 256, 2, 5), (16, 512, 4, 3), (16, 128, 2, 6), (32, 256, 4, 3), (32, 128, 4, 5),
    (64, 128, 4, 4),
)  # fmt: skip


class TritonSteps:
    """The steps of TorchSteps. tiles: the choice for each size of a matrix and number of rows, made at the first
    product, which no capture contains."""

    def __init__(self) -> None:
        self.tiles: dict[tuple[object, ...], Tile | None] = {}

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

    def product(self, rows: Tensor, weight: Tensor, step: ProductStep) -> Tensor:
        """See TorchSteps.product."""
        if len(rows) > kernels.SKINNY_ROWS or rows.dtype == torch.float32:
            return self.by_torch(rows, weight, step)
        key = weight.shape, step.norm is None, step.gates, step.residual is None
        if key not in self.tiles:
            self.tiles[key] = self._fastest(rows, weight, step)
        tile = self.tiles[key]
        return self.by_torch(rows, weight, step) if tile is None else skinny(rows, weight, step, tile)

    def by_torch(self, rows: Tensor, weight: Tensor, step: ProductStep) -> Tensor:
        if step.norm is not None:
            rows = self.norm(rows, step.norm, step.epsilon)
        if step.residual is not None:
            return torch.addmm(step.residual, rows, weight.t())
        found = functional.linear(rows, weight)
        return self.gate(found) if step.gates else found

    def _fastest(self, rows: Tensor, weight: Tensor, step: ProductStep) -> Tile | None:
        """The tile whose product takes least, None for torch's. Other memory is written in between: the weights must
        come from memory, not from the cache."""
        flush = torch.empty(1 << 29, dtype=torch.uint8, device=rows.device)
        seconds = dict[Tile | None, float]()
        for tile in (None, *TILES):
            times = []
            for _ in range(8):
                flush.zero_()
                begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begun.record()
                _ = self.by_torch(rows, weight, step) if tile is None else skinny(rows, weight, step, tile)
                ended.record()
                ended.synchronize()
                times.append(begun.elapsed_time(ended))
            seconds[tile] = min(times[1:])
        return min(seconds, key=lambda tile: seconds[tile])


def skinny(rows: Tensor, weight: Tensor, step: ProductStep, tile: Tile) -> Tensor:
    outputs, inputs = weight.shape[0] // (2 if step.gates else 1), weight.shape[1]
    block_n, block_k, warps, stages = tile
    result = torch.empty((len(rows), outputs), dtype=rows.dtype, device=rows.device)
    norm, residual = (result if each is None else each for each in (step.norm, step.residual))
    kernels.skinny_product[(triton.cdiv(outputs, block_n),)](
        rows, weight, norm, residual, result, len(rows), outputs, step.epsilon,
        inputs, step.norm is not None, step.gates, step.residual is not None, block_n, block_k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return result
