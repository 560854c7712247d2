"""Predicted seconds of a pass on a GPU, from the vendors' figures: for engines that were not measured, and for tables
that are marked as predicted."""

from __future__ import annotations

from typing import NamedTuple

from .cost import CostModel, HostCosts, PassCosts

SHARE_OF_BANDWIDTH = 0.85  # of the vendor's figure, that a pass of one row reaches on most GPUs
SHARE_OF_PEAK = 0.5  # of the arithmetic figure, for few rows
PASS_SECONDS = 3e-5  # of a graph's launch, its copies and the wait
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (0, 1 << 12, 1 << 15)


class Gpu(NamedTuple):
    """name: a part of what the driver says. bytes_per_second: of the memory. flops: dense, in half precision."""

    name: str
    memory_bytes: float
    bytes_per_second: float
    flops: float


GPUS = (
    Gpu("H100", 80e9, 3.35e12, 989e12),
    Gpu("H200", 141e9, 4.8e12, 989e12),
    Gpu("A100", 80e9, 2.04e12, 312e12),
    Gpu("L40S", 48e9, 0.864e12, 362e12),
    Gpu("RTX 4090", 24e9, 1.01e12, 165e12),
)
UNKNOWN = Gpu("", 24e9, 0.9e12, 150e12)


class PassSizes(NamedTuple):
    """What a pass of an engine reads. parameters: of all matrices that it multiplies with. weight_bytes: theirs.
    slot_bytes: keys and values of a committed token."""

    parameters: float
    weight_bytes: float
    slot_bytes: float


def gpu_named(name: str) -> Gpu:
    """The GPU whose name is part of a driver's name for a device; UNKNOWN for another."""
    return next((gpu for gpu in GPUS if gpu.name in name), UNKNOWN)


def pass_seconds(gpu: Gpu, sizes: PassSizes, rows: int, context: int) -> float:
    """The larger of the time for reading weights and cache, and the time for multiplying."""
    read = (sizes.weight_bytes + context * sizes.slot_bytes) / (SHARE_OF_BANDWIDTH * gpu.bytes_per_second)
    multiplied = 2 * sizes.parameters * rows / (SHARE_OF_PEAK * gpu.flops)
    return PASS_SECONDS + max(read, multiplied)


def predicted(gpu: Gpu, target: PassSizes, draft: PassSizes | None) -> CostModel:
    """Costs of a pair on a GPU."""

    def passes(sizes: PassSizes) -> PassCosts:
        seconds = tuple(tuple(pass_seconds(gpu, sizes, rows, context) for rows in WIDTHS) for context in CONTEXTS)
        return PassCosts(WIDTHS, CONTEXTS, seconds)

    own = None if draft is None else passes(draft)
    return CostModel(passes(target), own, HostCosts(5e-5, 1e-4, 1e-5), HostCosts(8e-5, 1.5e-4, 4e-5), {})
