"""Predicted seconds of a pass, from what a device reads and multiplies: where none were measured."""

from __future__ import annotations

from typing import NamedTuple

from .cost import CostModel, HostCosts, PassCosts

SHARE_OF_BANDWIDTH = 0.85  # of the vendor's figure, that a pass of one row reaches on most GPUs
SHARE_OF_PEAK = 0.5  # of the arithmetic figure, for few rows
PASS_SECONDS = 3e-5  # of a graph's launch, its copies and the wait
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 128)
CONTEXTS = (0, 1 << 12, 1 << 15)


class Device(NamedTuple):
    """name: a part of the driver's, of a GPU. bytes_per_second: of the memory. flops: dense, a GPU's in fp16."""

    name: str
    bytes_per_second: float
    flops: float


GPUS = (
    Device("H100", 3.35e12, 989e12),
    Device("H200", 4.8e12, 989e12),
    Device("A100", 2.04e12, 312e12),
    Device("L40S", 0.864e12, 362e12),
    Device("RTX 4090", 1.01e12, 165e12),
)
UNKNOWN_GPU = Device("", 0.9e12, 150e12)
# A small server's core: on two of a Zen 4 a row of 1.5B weights in 4 bits takes 6 ms, on two of a Zen 3 twice as long.
CORE_FLOPS = 350e9


class PassSizes(NamedTuple):
    """What a pass of an engine reads. parameters: of all matrices that it multiplies with. weight_bytes: theirs.
    slot_bytes: keys and values of a committed token."""

    parameters: float
    weight_bytes: float
    slot_bytes: float


def gpu_named(name: str) -> Device:
    """The GPU whose name is part of a driver's name for a device; UNKNOWN_GPU for another."""
    return next((gpu for gpu in GPUS if gpu.name in name), UNKNOWN_GPU)


def processor(cores: int) -> Device:
    """A small server's processor."""
    return Device("", 36e9, CORE_FLOPS * cores)


def pass_seconds(device: Device, sizes: PassSizes, rows: int, context: int) -> float:
    """The larger of the time for reading weights and cache, and the time for multiplying."""
    read = (sizes.weight_bytes + context * sizes.slot_bytes) / (SHARE_OF_BANDWIDTH * device.bytes_per_second)
    multiplied = 2 * sizes.parameters * rows / (SHARE_OF_PEAK * device.flops)
    return PASS_SECONDS + max(read, multiplied)


def predicted(device: Device, target: PassSizes, draft: PassSizes | None) -> CostModel:
    def passes(sizes: PassSizes) -> PassCosts:
        seconds = tuple(tuple(pass_seconds(device, sizes, rows, context) for rows in WIDTHS) for context in CONTEXTS)
        return PassCosts(WIDTHS, CONTEXTS, seconds)

    own = None if draft is None else passes(draft)
    return CostModel(passes(target), own, HostCosts(5e-5, 1e-4, 1e-5), HostCosts(8e-5, 1.5e-4, 4e-5), {})
