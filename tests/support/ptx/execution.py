"""The machine: the threads of several CTAs go through a program in lockstep, one instruction at a time.

Where a branch divides the threads, those at the lowest instruction go first, until they meet the others again. A
barrier that only some threads of a CTA reach, and an instruction of a warp that only some of its threads execute, are
faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .memory import CTA, THREAD_BITS, WARP, Bytes, GlobalMemory, Numbers, Products, SharedMemory, Touch
from .parser import Address, Divergent, InFlight, Instruction, Operand, Program, Undefined, Vector
from .values import TYPES, Values

Mask = NDArray[np.bool_]
Run = Callable[["Machine"], None]

SHARED = "global_smem"  # the symbol of a launch's shared memory, at its address 0
UNWRITTEN = 0xA5A5A5A5A5A5A5A5  # what threads find that skipped the first write to a register


@dataclass(frozen=True, slots=True)
class Launch:
    """threads: of a CTA. parameters: their bytes, at the program's offsets."""

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    parameters: Bytes


class Machine:
    """Some CTAs of a grid. registers: by name, the bits of all threads; a pair of fp32 is one 64-bit register."""

    def __init__(
        self,
        program: Program,
        code: Sequence[Run],
        launch: Launch,
        memory: GlobalMemory,
        places: Numbers,
        first_cta: int,
    ) -> None:
        self.program, self.code, self.memory, self.launch = program, code, memory, launch
        self.ctas, self.threads = len(places), launch.threads
        count = self.ctas * self.threads
        self.count = count
        self.shared = SharedMemory(launch.shared_bytes, self.ctas, self.threads)
        thread = np.tile(np.arange(self.threads), self.ctas)
        self.registers: dict[str, Values] = {"%tid.x": thread.astype(np.uint32)}
        self.registers |= {"%laneid": (thread % 32).astype(np.uint32)}
        self.registers |= {f"%tid.{axis}": np.zeros(count, np.uint32) for axis in "yz"}
        for axis, index, size in zip("xyz", places.T, launch.grid, strict=True):
            self.registers[f"%ctaid.{axis}"] = np.repeat(index, self.threads).astype(np.uint32)
            self.registers[f"%nctaid.{axis}"] = np.full(count, size, np.uint32)
        self.registers["%ntid.x"] = np.full(count, self.threads, np.uint32)
        self._who = (first_cta + 1 + np.repeat(np.arange(self.ctas), self.threads) << CTA) + thread
        self.barriers: Numbers = self._who >> CTA << CTA  # stamps of each thread's last barrier
        self.warp_barriers: Numbers = self.barriers  # the same of a barrier of its warp
        self.step = 0
        self.alive: Mask = np.ones(count, np.bool_)
        self.active: Mask = self.alive
        self.partial = False  # whether living threads are not active
        self.products = Products()
        self.proxy_fences: Numbers = np.zeros(count, np.int64)  # stamps of each thread's last fence

    def run(self) -> None:
        position, group, waiting = 0, self.alive, dict[int, Mask]()
        instructions, labels = self.program.instructions, self.program.labels
        while True:
            if position in waiting:
                group = group | waiting.pop(position)
            instruction = instructions[position]
            self.step += 1
            active, name = group, instruction.parts[0]
            if instruction.predicate:
                chosen = self.register(instruction.predicate, instruction)
                active = group & (~chosen if instruction.negated else chosen)
            position += 1
            if name == "bra":
                assert isinstance(instruction.operands[0], str)
                target, stay = labels[instruction.operands[0]], group & ~active
                position, group = divided(waiting, (target, active), (position, stay))
            elif name in ("ret", "exit"):
                self.alive = self.alive & ~active
                if not self.alive.any():
                    break
                position, group = divided(waiting, (position, group & ~active))
            elif not instruction.predicate or active.any():
                self.active = active
                self.partial = bool(waiting) or bool(instruction.predicate)
                self.code[position - 1](self)
        self.shared.end()

    def register(self, name: str, instruction: Instruction) -> Values:
        try:
            return self.registers[name]
        except KeyError:
            if name in self.products.results:
                raise InFlight(f"{instruction.text}: {name} belongs to a product that nobody awaited") from None
            raise Undefined(f"{instruction.text}: {name} was never written") from None

    def write(self, name: str, kind: type[np.generic], values: Values) -> None:
        """Into the active threads' register, whose bits are of `kind`: fp32 by its bits, integers extended."""
        if values.dtype.itemsize == np.dtype(kind).itemsize or values.dtype.kind == "f":
            values = np.ascontiguousarray(values).view(kind)
        else:
            values = values.astype(kind)
        if values.shape != (self.count,):
            values = np.broadcast_to(values, self.count).copy()
        if self.partial:
            before = self.registers.get(name)
            if before is None:
                before = np.full(self.count, UNWRITTEN, np.uint64).astype(kind)
            values = np.where(self.active, values, before)
        self.registers[name] = values

    @property
    def stamps(self) -> Numbers:
        """Of all threads, now."""
        return self._who + (self.step << THREAD_BITS)

    def touch(self, threads: Numbers, text: str) -> Touch:
        now, barriers, warp_barriers = self.stamps, self.barriers, self.warp_barriers
        return Touch(now[threads, None], barriers[threads, None], warp_barriers[threads, None], text)

    def whole(self, size: int, text: str) -> Mask:
        """Which groups of `size` threads (of a warp, of a CTA) are active. Raises Divergent for a part of one."""
        if not self.partial and self.active.all():
            return np.ones(len(self.active) // size, np.bool_)
        groups = self.active.reshape(-1, size)
        some: Mask = groups.any(1)
        missing = (self.alive & ~self.active).reshape(-1, size).any(1)
        if (some & missing).any():
            raise Divergent(f"{text}: only some of {size} threads execute this together")
        return some

    def barrier(self, text: str) -> None:
        """Of whole CTAs; threads that have ended are not waited for."""
        self.whole(self.threads, text)
        self.barriers = np.where(self.active, self._now, self.barriers)

    def warp_barrier(self, text: str) -> None:
        """Of whole warps."""
        self.whole(WARP, text)
        self.warp_barriers = np.where(self.active, self._now, self.warp_barriers)

    @property
    def _now(self) -> Numbers:
        """The stamps of all threads' CTAs."""
        return self._who >> CTA << CTA | self.step << THREAD_BITS


def divided(waiting: dict[int, Mask], *groups: tuple[int, Mask]) -> tuple[int, Mask]:
    """Adds groups of threads to those that wait at an instruction; takes the group at the lowest one."""
    for position, group in groups:
        if group.any():
            waiting[position] = waiting[position] | group if position in waiting else group
    lowest = min(waiting)
    return lowest, waiting.pop(lowest)


def reader(operand: Operand, dtype: type[np.generic], instruction: Instruction) -> Callable[[Machine], Values]:
    """Reads a register or a number as `dtype`: one value per thread, or one for all."""
    assert isinstance(operand, str)
    if operand.startswith("%") or (operand.isidentifier() and operand != SHARED and "_param_" not in operand):
        bits = np.dtype(dtype)
        unsigned = np.dtype(f"u{bits.itemsize}")

        def read(machine: Machine) -> Values:
            values = machine.register(operand, instruction)
            if values.dtype.itemsize > bits.itemsize and bits.kind != "f":
                values = values.astype(unsigned)
            return values.view(bits)

        return read
    constant = number(operand, dtype)
    return lambda machine: constant


def number(text: str, dtype: type[np.generic]) -> Values:
    """A literal: floating point by its bits (0f3F800000), integers in any base, or the address of shared memory."""
    if text == SHARED:
        return np.zeros((), dtype)
    if text.startswith(("0f", "0d")):
        return np.array(int(text[2:], 16), np.uint32 if text[1] == "f" else np.uint64).view(dtype)
    value, kind = int(text.rstrip("U"), 0), np.dtype(dtype)
    if kind.kind == "b":
        return np.array(bool(value))
    return np.array(value & (1 << 8 * kind.itemsize) - 1, f"u{kind.itemsize}").view(dtype)


def address(operand: Operand, dtype: type[np.generic], instruction: Instruction) -> Callable[[Machine], Numbers]:
    """Reads an address: of shared memory as uint32, of global memory as uint64."""
    assert isinstance(operand, Address)
    if not operand.base or operand.base == SHARED:
        return lambda machine: np.full(machine.count, operand.offset, np.int64)
    base = reader(operand.base, dtype, instruction)
    return lambda machine: base(machine).astype(np.int64) + operand.offset


def registers(operand: Operand) -> tuple[str, ...]:
    """The registers of a vector, or the one."""
    assert not isinstance(operand, Address)
    return operand.items if isinstance(operand, Vector) else (operand,)


def numpy_type(kind: str, instruction: Instruction) -> type[np.generic]:
    if kind not in TYPES:
        raise Undefined(f"{instruction.text}: no type that the executor knows")
    return TYPES[kind]
