"""Moves between registers, parameters, global and shared memory; barriers, and asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .execution import Machine, Run, address, number, numpy_type, reader, registers
from .parser import Address, Instruction, OutOfBounds, Program, Undefined, Vector
from .values import Values

SPACES: dict[str, type[np.generic]] = {"global": np.uint64, "shared": np.uint32}


def load(instruction: Instruction, program: Program) -> Run:
    space, kind = instruction.parts[1], instruction.parts[-1]
    if space == "param":
        return parameter(instruction, program)
    dtype = numpy_type(kind, instruction)
    width, names = np.dtype(dtype).itemsize, registers(instruction.operands[0])
    places = address(instruction.operands[1], SPACES[space], instruction)
    kinds = [program.kind(name) for name in names]

    def run(machine: Machine) -> None:
        threads = np.flatnonzero(machine.active)
        source = places(machine)[threads]
        touch = machine.touch(threads, instruction.text)
        if space == "global":
            found = machine.memory.read(source, width * len(names), touch)
        else:
            found = machine.shared.read(threads, source, width * len(names), touch)
        values = np.zeros((len(names), machine.count), dtype)
        values[:, threads] = found.view(dtype).T
        for name, kind, row in zip(names, kinds, values, strict=True):
            machine.write(name, kind, row)

    return run


def store(instruction: Instruction, program: Program) -> Run:
    space, dtype = instruction.parts[1], numpy_type(instruction.parts[-1], instruction)
    places = address(instruction.operands[0], SPACES[space], instruction)
    sources = [reader(name, dtype, instruction) for name in registers(instruction.operands[1])]

    def run(machine: Machine) -> None:
        threads = np.flatnonzero(machine.active)
        columns = [np.broadcast_to(read(machine), machine.count)[threads] for read in sources]
        values = np.stack(columns, 1).view(np.uint8)
        target, touch = places(machine)[threads], machine.touch(threads, instruction.text)
        if space == "global":
            machine.memory.write(target, values, touch)
        else:
            machine.shared.write(threads, target, values, touch)

    return run


def parameter(instruction: Instruction, program: Program) -> Run:
    """A parameter by its name or, inside an array, by an address made from it."""
    dtype, (name,) = numpy_type(instruction.parts[-1], instruction), registers(instruction.operands[0])
    kind, where = program.kind(name), instruction.operands[1]
    assert isinstance(where, Address)
    width, offsets = np.dtype(dtype).itemsize, {each.name: each.offset for each in program.parameters}

    def run(machine: Machine) -> None:
        if where.base in offsets:
            begin = offsets[where.base] + where.offset
            machine.write(name, kind, np.full(machine.count, machine.launch.parameters[begin:][:width].view(dtype)[0]))
            return
        begin_of = np.where(machine.active, address(where, np.uint64, instruction)(machine), 0)
        if (begin_of < 0).any() or (begin_of + width > len(machine.launch.parameters)).any():
            raise OutOfBounds(f"{instruction.text}: outside the launch's parameters")
        found = machine.launch.parameters[begin_of[:, None] + np.arange(width)]
        machine.write(name, kind, found.view(dtype)[:, 0])

    return run


def move(instruction: Instruction, program: Program) -> Run:
    """A copy, the bits of two halves into one register, or of one register into two halves."""
    target, source = instruction.operands
    dtype = numpy_type(instruction.parts[-1], instruction)
    offsets = {each.name: each.offset for each in program.parameters}
    if isinstance(source, str) and source in offsets:  # its address
        return put(target, program, lambda machine: np.full(machine.count, offsets[source], np.uint64))
    if isinstance(source, Vector):
        half = np.dtype(f"u{np.dtype(dtype).itemsize // len(source.items)}").type
        parts = [reader(each, half, instruction) for each in source.items]
        return put(
            target,
            program,
            lambda machine: (
                np.stack([np.broadcast_to(part(machine), machine.count) for part in parts], 1).view(dtype).ravel()
            ),
        )
    read = reader(source, dtype, instruction) if isinstance(source, str) else None
    assert read is not None
    if isinstance(target, Vector):
        return unpack(target, read, program, np.dtype(f"u{np.dtype(dtype).itemsize // len(target.items)}").type)
    return put(target, program, lambda machine: np.broadcast_to(read(machine), machine.count).copy())


def unpack(target: Vector, read: Callable[[Machine], Values], program: Program, half: type[np.generic]) -> Run:
    def run(machine: Machine) -> None:
        halves = np.ascontiguousarray(read(machine)).view(half).reshape(machine.count, -1)
        for name, column in zip(target.items, halves.T, strict=True):
            if name != "_":
                machine.write(name, program.kind(name), column.copy())

    return run


def put(target: object, program: Program, read: Callable[[Machine], Values]) -> Run:
    assert isinstance(target, str)
    kind = program.kind(target)
    return lambda machine: machine.write(target, kind, read(machine))


def asynchronous(instruction: Instruction, program: Program) -> Run:
    """cp.async: a copy of `size` bytes, of zeros where the fourth operand is 0; its groups and their ends."""
    form = instruction.parts[2]
    if form == "commit_group":
        return lambda machine: machine.shared.commit(np.flatnonzero(machine.active))
    if form == "wait_group":
        (count,) = registers(instruction.operands[0])
        pending = int(number(count, np.uint32))
        return lambda machine: machine.shared.wait(machine.active, pending, machine.stamps)
    if instruction.parts[1:3] not in (("async", "ca"), ("async", "cg")):
        raise Undefined(f"{instruction.text}: no copy that the executor knows")
    target, source, size, *rest = instruction.operands
    assert isinstance(size, str)
    nbytes = int(number(size, np.uint32))
    to, origin = address(target, np.uint32, instruction), address(source, np.uint64, instruction)
    wanted = reader(rest[0], np.uint32, instruction) if rest else None

    def run(machine: Machine) -> None:
        threads = np.flatnonzero(machine.active)
        sizes = np.full(len(threads), nbytes)
        if wanted is not None:
            sizes = np.broadcast_to(wanted(machine), machine.count)[threads]
        if not np.isin(sizes, (0, nbytes)).all():
            raise Undefined(f"{instruction.text}: the executor copies all bytes or none")
        read = sizes > 0
        values = np.zeros((len(threads), nbytes), np.uint8)
        loading = threads[read]
        values[read] = machine.memory.read(origin(machine)[loading], nbytes, machine.touch(loading, instruction.text))
        machine.shared.copy(threads, to(machine)[threads], values, machine.touch(threads, instruction.text))

    return run


def barrier(instruction: Instruction, program: Program) -> Run:
    if instruction.parts == ("bar", "warp", "sync"):
        return lambda machine: machine.warp_barrier(instruction.text)
    if instruction.parts not in (("bar", "sync"), ("barrier", "sync"), ("barrier", "cta", "sync")):
        raise Undefined(f"{instruction.text}: no barrier that the executor knows")
    return lambda machine: machine.barrier(instruction.text)


SPECIAL = {"ld": load, "st": store, "mov": move, "cp": asynchronous, "bar": barrier, "barrier": barrier}
