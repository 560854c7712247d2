"""Runs a grid of a program: CTAs in order, several at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from . import transfers, warps, wgmma
from .execution import Launch, Machine, Run, reader
from .memory import Bytes, GlobalMemory
from .parser import Fault, Instruction, Program, Undefined
from .values import Compute, Values, resolve

LANES = 2048  # threads that run together, at least one CTA


def run_grid(program: Program, launch: Launch, memory: GlobalMemory) -> None:
    """Raises Fault for whatever the kernel does wrong."""
    if program.threads and program.threads != launch.threads:
        raise Fault(f"{program.entry} wants {program.threads} threads, not {launch.threads}")
    memory.next_launch()
    code = code_of(program)
    x, y, z = (np.arange(size) for size in launch.grid)
    places = np.stack(np.meshgrid(z, y, x, indexing="ij")[::-1], -1).reshape(-1, 3)  # x is the fastest
    alone = any(each.parts[0] == "wgmma" for each in program.instructions)  # registers in flight are a whole CTA's
    together = 1 if alone else max(1, LANES // launch.threads)
    with np.errstate(all="ignore"):
        for first in range(0, len(places), together):
            Machine(program, code, launch, memory, places[first : first + together], first).run()


def parameter_bytes(program: Program, values: Iterable[bytes]) -> Bytes:
    """The memory of a launch's parameters. Raises ValueError if the values are not those that the kernel declares."""
    result = np.zeros(sum(each.nbytes + 8 for each in program.parameters), np.uint8)
    for parameter, value in zip(program.parameters, values, strict=True):
        if len(value) != parameter.nbytes:
            raise ValueError(f"{parameter.name} has {parameter.nbytes} bytes, not {len(value)}")
        result[parameter.offset :][: len(value)] = np.frombuffer(value, np.uint8)
    return result


@functools.lru_cache(maxsize=64)
def code_of(program: Program) -> list[Run]:
    """What the instructions of a program do, one after the other."""
    return [decoded(each, program) for each in program.instructions]


def decoded(instruction: Instruction, program: Program) -> Run:
    """What an instruction does. Raises Undefined for one that the executor does not know."""
    if instruction.parts[0] in ("bra", "ret", "exit"):
        return lambda machine: None
    for special in (transfers.SPECIAL, warps.SPECIAL, wgmma.SPECIAL):
        if instruction.parts[0] in special:
            return special[instruction.parts[0]](instruction, program)
    try:
        operation = resolve(instruction.parts, len(instruction.operands) - 1)
    except KeyError:
        operation = None
    if operation is None:
        raise Undefined(f"{instruction.text}: no instruction that the executor knows")
    destination, *sources = instruction.operands
    assert isinstance(destination, str)
    readers = [reader(each, dtype, instruction) for each, dtype in zip(sources, operation.sources, strict=True)]
    return computed(operation.compute, readers, destination, program)


def computed(
    compute: Compute, readers: Sequence[Callable[[Machine], Values]], destination: str, program: Program
) -> Run:
    kind = program.kind(destination)

    def run(machine: Machine) -> None:
        machine.write(destination, kind, compute(*[read(machine) for read in readers]))

    return run
