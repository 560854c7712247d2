"""Runs a kernel of a round over host memory, where a stand-in for a device keeps its allocations."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftwood.plugins.device_round.images import Image

from .execution import Launch
from .grid import parameter_bytes, run_grid
from .memory import GlobalMemory
from .parser import Program, parse

Block = NDArray[np.uint8]


@functools.cache
def program_of(text: str) -> Program:
    return parse(text)


def launch_on_host(image: Image, grid: tuple[int, int], values: Sequence[int], blocks: Sequence[Block]) -> None:
    """Run a launch over copies of the blocks that its addresses point into, and copy them back. A kernel that leaves
    the blocks is a fault."""
    program = program_of(image.text)
    types = image.types[: len(values)]
    used = {
        id(block): block
        for value, each in zip(values, types, strict=True)
        if (block := owner(value, each, blocks)) is not None
    }
    memory = GlobalMemory(sum(block.nbytes + 4096 for block in used.values()) + (1 << 14))
    places = {key: memory.reserve("a block", block.nbytes, alignment=256) for key, block in used.items()}
    for key, block in used.items():
        memory.fill(places[key], block)
    moved = []
    for value, each in zip(values, types, strict=True):
        block = owner(value, each, blocks)
        moved.append(value if block is None else places[id(block)] + value - block.ctypes.data)
    parameters = parameter_bytes(program, (argument.tobytes() for argument in image.arguments(moved)))
    run_grid(program, Launch((*grid, 1), image.threads, image.shared_bytes, parameters), memory)
    for key, block in used.items():
        block[:] = memory.get(places[key], block.nbytes)


def owner(value: int, kind: str, blocks: Sequence[Block]) -> Block | None:
    """The block that an address points into; None for a number, and for an address of nothing."""
    if not kind.startswith("*"):
        return None
    return next((block for block in blocks if 0 <= value - block.ctypes.data < block.nbytes), None)
