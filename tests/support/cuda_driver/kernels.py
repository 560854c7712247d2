"""What a module holds: PTX, which the executor runs, or a function of the host that stands for a kernel."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ptx.execution import Launch
from ptx.grid import parameter_bytes, run_grid
from ptx.memory import GUARD, GlobalMemory
from ptx.parser import Program, parse

from .memory import ALIGNMENT, Block, Memory

STATIC_SHARED = 48 << 10  # bytes of shared memory that a launch may have without a function attribute


class Launched(NamedTuple):
    """A launch. values: the bytes of each parameter, as they were when the host launched."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    values: tuple[bytes, ...]


class Kernel(NamedTuple):
    """sizes: bytes of each parameter."""

    name: str
    sizes: tuple[int, ...]
    run: Callable[[Launched, Memory], None]


@functools.cache
def ptx_kernel(text: str) -> Kernel:
    """Raises ValueError for text without a kernel."""
    program = parse(text)
    sizes = tuple(parameter.nbytes for parameter in program.parameters)
    return Kernel(program.entry, sizes, lambda launched, memory: execute(program, launched, memory))


def pointed(values: Sequence[bytes], memory: Memory) -> list[Block]:
    """The blocks that parameters point into."""
    addresses = (int.from_bytes(value, "little") for value in values if len(value) == 8)
    found = {block.span.start: block for address in addresses if (block := memory.find(address)) is not None}
    return list(found.values())


def execute(program: Program, launched: Launched, memory: Memory) -> None:
    """Run PTX over copies of the blocks that its parameters point into. Raises the executor's faults."""
    blocks = pointed(launched.values, memory)
    machine = GlobalMemory(sum(block.content.nbytes + GUARD + 4 * ALIGNMENT for block in blocks) + 2 * GUARD)
    places = {}
    for block in blocks:
        places[block.span] = machine.reserve(f"{block.kind} memory", block.content.nbytes, ALIGNMENT)
        machine.fill(places[block.span], block.content)

    def moved(value: bytes) -> bytes:
        block = memory.find(int.from_bytes(value, "little")) if len(value) == 8 else None
        if block is None:
            return value
        return (places[block.span] + int.from_bytes(value, "little") - block.span.start).to_bytes(8, "little")

    parameters = parameter_bytes(program, map(moved, launched.values))
    threads = launched.block[0] * launched.block[1] * launched.block[2]
    run_grid(program, Launch(launched.grid, threads, launched.shared_bytes, parameters), machine)
    for block in blocks:
        block.content[:] = machine.get(places[block.span], block.content.nbytes)


def parameter_values(pointers: int, sizes: Sequence[int]) -> tuple[bytes, ...]:
    """The values that an array of addresses points to."""
    addresses = (ctypes.c_uint64 * len(sizes)).from_address(pointers)
    return tuple(ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True))
