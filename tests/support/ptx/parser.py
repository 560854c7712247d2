"""Reads the PTX text of one kernel (PTX ISA 9, the part that compilers of this project emit); what a kernel may do
wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

WIDTHS = {"pred": 1, "b8": 1, "b16": 2, "b32": 4, "b64": 8, "f32": 4, "f64": 8, "u32": 4, "u64": 8}
KINDS: dict[str, type[np.generic]] = {
    "b16": np.uint16,
    "b32": np.uint32,
    "b64": np.uint64,
    "f32": np.uint32,
    "pred": np.bool_,
}
INSTRUCTION = re.compile(
    r"(?:@(?P<negated>!?)(?P<predicate>[%\w]+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)", re.S
)
PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.(\w+)(?: \.ptr \.global \.align \d+)? (\w+)(?:\[(\d+)\])?")
REGISTERS = re.compile(r"\.reg \.(\w+)\s+([^;]+);")


class Address(NamedTuple):
    """[base + offset]; base: a register, a symbol, or empty."""

    base: str
    offset: int


class Vector(NamedTuple):
    """{a, b, …}"""

    items: tuple[str, ...]


Operand = str | Address | Vector  # a str is a register, a number or a symbol


@dataclass(frozen=True, slots=True)
class Instruction:
    text: str
    parts: tuple[str, ...]  # of the opcode, which are separated by dots
    operands: tuple[Operand, ...]
    predicate: str  # a register, empty for none
    negated: bool


class Parameter(NamedTuple):
    """nbytes at `offset` of the parameters' memory."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Program:
    """One kernel. threads: of a CTA, 0 if the kernel leaves it open. labels: a label's next instruction."""

    entry: str
    target: str
    threads: int
    parameters: tuple[Parameter, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    kinds: dict[str, type[np.generic]]  # of registers, by their name without its number

    def kind(self, register: str) -> type[np.generic]:
        """The numpy type that holds a register's bits."""
        return self.kinds[register.rstrip("0123456789") if register.startswith("%") else register]


def parse(text: str) -> Program:
    """Raises ValueError for text without a kernel, and Undefined for declarations that are not known."""
    text = re.sub(r"//[^\n]*", "", text.rstrip("\0"))
    head = re.search(r"\.entry (\w+)\s*\((.*?)\)(.*?)\{", text, re.S)
    target = re.search(r"\.target (\w+)", text)
    if head is None or target is None:
        raise ValueError("this text holds no PTX kernel")
    threads = re.search(r"\.reqntid (\d+)", head[3])
    body = text[head.end() : text.rindex("}")]
    kinds: dict[str, type[np.generic]] = {}
    for kind, names in REGISTERS.findall(body):
        kinds |= {re.sub(r"<\d+>", "", name).strip(): KINDS[kind] for name in names.split(",")}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in body.split(";"):
        rest = statement.strip()
        while found := re.match(r"([$\w]+):|[{}]", rest):
            if found[1]:
                labels[found[1]] = len(instructions)
            rest = rest[found.end() :].strip()
        if rest and not rest.startswith((".reg", ".pragma")):
            instructions.append(instruction(rest))
    return Program(
        head[1], target[1], int(threads[1]) if threads else 0, parameters(head[2]), tuple(instructions), labels, kinds
    )


def parameters(text: str) -> tuple[Parameter, ...]:
    found, offset = [], 0
    for kind, name, count in PARAMETER.findall(text):
        width = WIDTHS[kind]
        offset += -offset % width
        found.append(Parameter(name, offset, width * int(count or 1)))
        offset += found[-1].nbytes
    return tuple(found)


def instruction(text: str) -> Instruction:
    found = INSTRUCTION.fullmatch(text)
    if found is None:
        raise Undefined(f"{text}: no instruction that the executor knows")
    operands = tuple(operand(each) for each in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", found["operands"]))
    parts = tuple(found["opcode"].replace("::", "_").split("."))
    return Instruction(" ".join(text.split()), parts, operands, found["predicate"] or "", bool(found["negated"]))


def operand(text: str) -> Operand:
    if text.startswith("{"):
        return Vector(tuple(each.strip() for each in text[1:-1].split(",")))
    if not text.startswith("["):
        return text
    found = re.fullmatch(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\d+)\s*)?\]", text)
    if found is None:
        raise Undefined(f"{text}: no address that the executor knows")
    return Address(found[1], int(found[2] or 0))


class Fault(Exception):
    """A kernel broke a rule of the machine; the message begins with the instruction."""


class OutOfBounds(Fault):
    """An address outside every allocation, or a write to one that is only read."""


class Misaligned(Fault):
    """An address that is no multiple of the access's size."""


class Race(Fault):
    """Two threads touched the same byte, at least one of them wrote, and no barrier lies between."""


class InFlight(Fault):
    """Bytes or registers of an asynchronous operation were touched before its end was awaited."""


class Divergent(Fault):
    """Threads that must execute an instruction together did not."""


class Undefined(Fault):
    """A register was read before it was written, or an instruction is not known to the executor."""
