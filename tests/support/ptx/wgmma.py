"""What a warp group (four warps) does: asynchronous products of matrices in shared memory (sm_90).

A product D [64, N] += A [64, 16] B [16, N] runs until its group is awaited. Until then nobody may touch its
accumulators, change its registers of A, or write the bytes of shared memory that it reads. What threads wrote must have
been fenced for the asynchronous proxy, and the registers by `wgmma.fence`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .execution import Machine, Run, reader, registers
from .memory import IN_FLIGHT, THREADS, WARP, Bytes, Numbers, Touch
from .parser import Instruction, Operand, Program, Race, Undefined, Vector
from .values import HALVES, Values
from .warps import halves, literal

GROUP = 128  # threads of a warp group
STEP = 16  # depth of a product
SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row of the pattern, by the descriptor's mode
TILE = 8  # rows of the pattern


class Description(NamedTuple):
    """A matrix in shared memory: its start, the distances in bytes of patterns along both axes, bytes of a pattern's
    row."""

    start: int
    leading: int
    stride: int
    row_bytes: int


def described(bits: int, text: str) -> Description:
    """From the 64 bits of a matrix descriptor (PTX ISA, "Matrix Descriptor Format")."""
    if bits >> 49 & 7:
        raise Undefined(f"{text}: the executor knows no descriptor with a base offset")
    start, leading, stride = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    return Description(start, leading, stride, SWIZZLES[bits >> 62])


def places(matrix: Description, length: int, transposed: bool) -> Numbers:
    """Addresses [length, 16] of a matrix's values of 16 bits: `length` along M or N, 16 along K.

    Patterns are 8 rows of `row_bytes`. A row goes along K or, `transposed`, along M or N; `stride` leads to the next 8
    rows, `leading` to the next pattern along a row. Without a swizzle, the transposed form exchanges these two.
    """
    outer, inner = np.arange(length)[:, None], np.arange(STEP)[None, :]
    along, across = (outer, inner) if transposed else (inner, outer)
    stride, leading = matrix.stride, matrix.leading
    if transposed and matrix.row_bytes == 16:
        stride, leading = leading, stride
    column = 2 * along
    offset = across // TILE * stride + across % TILE * matrix.row_bytes
    offset = offset + column // matrix.row_bytes * leading + column % matrix.row_bytes
    address = matrix.start + offset
    # The pattern: bits 4 to 6 of an address are exchanged by its bits 7 to 9, as many as the row has.
    return np.asarray(address ^ (address >> 7 & matrix.row_bytes // 16 - 1) << 4)


def shared_values(machine: Machine, group: int, addresses: Numbers, half: str, touch: Touch) -> tuple[Values, Numbers]:
    """fp32 [length, 16], and the places of its bytes, checked like a read by all threads of the group."""
    shared, threads = machine.shared, np.full(addresses.size, group * GROUP)
    rows = shared.places(threads, addresses.ravel(), 2, touch.text)
    everyone = touch._replace(stamps=machine.stamps[threads, None] | THREADS, barriers=machine.barriers[threads, None])
    writers = shared.bytes.writers.reshape(-1, 2).take(rows // 2, 0)
    shared.bytes.check(writers, everyone, "wrote what this reads")
    if (writers > machine.proxy_fences[threads, None]).any():
        raise Race(f"{touch.text}: what threads wrote was not fenced for the asynchronous proxy")
    content: Bytes = shared.bytes.content.reshape(-1, 2).take(rows // 2, 0)
    return content.view(HALVES[half]).astype(np.float32).reshape(addresses.shape), rows


def product(instruction: Instruction, program: Program) -> Run:
    text, half = instruction.text, instruction.parts[-1]
    shape = re.fullmatch(r"m64n(\d+)k16", instruction.parts[4])
    if instruction.parts[1] != "mma_async" or shape is None or instruction.parts[5:] != ("f32", half, half):
        raise Undefined(f"{text}: no product that the executor knows")
    width, names = int(shape[1]), registers(instruction.operands[0])
    left, right, keep, *immediates = instruction.operands[1:]
    scale_a, scale_b, *transposed = [literal(each) for each in immediates]
    if (scale_a, scale_b) != (1, 1):
        raise Undefined(f"{text}: the executor knows no negated product")
    descriptor, accumulate = scalar(right, np.uint64, instruction), scalar(keep, np.bool_, instruction)
    of_left = None if isinstance(left, Vector) else scalar(left, np.uint64, instruction)
    trans_a, trans_b = (False, *transposed) if len(transposed) == 1 else transposed
    kind = program.kind(names[0])

    def run(machine: Machine) -> None:
        machine.whole(GROUP, text)
        state, groups = machine.products, machine.count // GROUP
        touch = machine.touch(np.zeros(1, np.int64), text)
        columns = np.empty((groups, width, STEP), np.float32)
        rows = np.empty((groups, 64, STEP), np.float32)
        for group in range(groups):
            at = places(described(int(descriptor(machine)[group * GROUP]), text), width, bool(trans_b))
            columns[group], read = shared_values(machine, group, at, half, touch)
            state.reading.append(read)
            if of_left is not None:
                at = places(described(int(of_left(machine)[group * GROUP]), text), 64, bool(trans_a))
                rows[group], read = shared_values(machine, group, at, half, touch)
                state.reading.append(read)
        if isinstance(left, Vector):
            rows[:] = left_of_registers(machine, left, half, instruction)
        machine.shared.bytes.readers.reshape(-1, 2)[np.concatenate(state.reading) // 2] = IN_FLIGHT
        before = [state.take(machine.registers, name, text) for name in names]
        result = (rows @ columns.swapaxes(1, 2)).reshape(groups, 4, 2, 8, width // 8, 4, 2)
        # [groups, warps, upper and lower rows, row, eight columns, pair, column] -> thread = 4 * row + pair
        fragments = result.transpose(4, 2, 6, 0, 1, 3, 5).reshape(len(names), machine.count)
        added = accumulate(machine)
        for name, old, values in zip(names, before, fragments, strict=True):
            if added.any():
                if old is None:
                    raise Undefined(f"{text}: {name} was never written")
                values = np.where(added, values + old.view(np.float32), values)
            state.results[name] = np.ascontiguousarray(values).view(kind), state.committed

    return run


def scalar(operand: Operand, dtype: type[np.generic], instruction: Instruction) -> Callable[[Machine], Values]:
    """A value for each thread."""
    read = reader(operand, dtype, instruction)
    return lambda machine: np.broadcast_to(read(machine), machine.count)


def left_of_registers(machine: Machine, left: Vector, half: str, instruction: Instruction) -> Values:
    """A [groups, 64, 16] from four registers of each thread; they may not change until the product ends."""
    rows = np.empty((machine.count // WARP, 16, STEP), np.float32)
    for index, name in enumerate(left.items):
        low, far = 8 * (index % 2), 8 * (index // 2)
        values = machine.register(name, instruction)
        machine.products.read(values, name, instruction.text)
        rows[:, low : low + 8, far : far + 8] = halves(values, half)
    return rows.reshape(-1, 64, STEP)


def group_operation(instruction: Instruction, program: Program) -> Run:
    """The fence of registers, the end of a group of products, and waiting for groups."""
    form = instruction.parts[1]
    if form == "mma_async":
        return product(instruction, program)
    if form == "fence":
        return lambda machine: machine.products.fence(machine.registers)
    if form == "commit_group":
        return lambda machine: machine.products.commit()
    if form == "wait_group":
        pending = literal(instruction.operands[0])
        return lambda machine: machine.products.wait(
            pending, machine.registers, machine.shared.bytes, machine.stamps[0] | THREADS, instruction.text
        )
    raise Undefined(f"{instruction.text}: no operation of warp groups that the executor knows")


def fence(instruction: Instruction, program: Program) -> Run:
    """fence.proxy.async: what these threads wrote to shared memory becomes visible to asynchronous products."""
    if instruction.parts[:3] != ("fence", "proxy", "async"):
        raise Undefined(f"{instruction.text}: no fence that the executor knows")

    def run(machine: Machine) -> None:
        machine.whole(machine.threads, instruction.text)
        machine.proxy_fences = np.where(machine.active, machine.stamps, machine.proxy_fences)

    return run


SPECIAL = {"wgmma": group_operation, "fence": fence}
