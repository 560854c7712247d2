"""What the 32 threads of a warp do together: exchange of values, matrices of 8 x 8 in shared memory, products."""

from __future__ import annotations

import numpy as np

from .execution import Machine, Run, address, number, reader, registers
from .memory import WARP, Numbers
from .parser import Instruction, Program, Undefined
from .values import HALVES, TYPES, Values


def shuffle(instruction: Instruction, program: Program) -> Run:
    """shfl.sync: the value of another thread of the warp."""
    form = instruction.parts[2]
    destination, source, lane, *_ = instruction.operands
    if form not in ("bfly", "idx", "up") or not isinstance(destination, str):
        raise Undefined(f"{instruction.text}: no exchange that the executor knows")
    value, other = reader(source, np.uint32, instruction), reader(lane, np.uint32, instruction)
    kind = program.kind(destination)

    def run(machine: Machine) -> None:
        machine.whole(WARP, instruction.text)
        own = machine.registers["%laneid"]
        lanes = own ^ other(machine) if form == "bfly" else np.broadcast_to(other(machine), own.shape)
        if form == "up":  # the first threads keep their own
            lanes = np.where(own < lanes, own, own - lanes)
        places = np.arange(machine.count) // WARP * WARP + (lanes & np.uint32(31)).astype(np.int64)
        machine.write(destination, kind, value(machine)[places])

    return run


def reduction(instruction: Instruction, program: Program) -> Run:
    """redux.sync: one number of all threads of the warp. Of floats, one that is no NaN where there is one."""
    operation, of = instruction.parts[2], TYPES.get(instruction.parts[3], np.void)
    functions: dict[str, np.ufunc] = {"max": np.fmax, "min": np.fmin}
    if of in (np.int32, np.uint32):
        functions = functions | {"add": np.add, "or": np.bitwise_or, "and": np.bitwise_and}
    destination, source, *_ = instruction.operands
    is_known = operation in functions and of in (np.int32, np.uint32, np.float32)
    if not is_known or not isinstance(destination, str):
        raise Undefined(f"{instruction.text}: no reduction that the executor knows")
    value, function, kind = reader(source, of, instruction), functions[operation], program.kind(destination)

    def run(machine: Machine) -> None:
        machine.whole(WARP, instruction.text)
        machine.write(destination, kind, np.repeat(function.reduce(value(machine).reshape(-1, WARP), 1), WARP))

    return run


def rows_of(instruction: Instruction, machine: Machine, addresses: Numbers, matrices: int) -> tuple[Numbers, Numbers]:
    """The threads that give the addresses of the matrices' rows, warp after warp, and these addresses."""
    warps = np.flatnonzero(machine.whole(WARP, instruction.text))
    threads = (warps[:, None] * WARP + np.arange(8 * matrices)).ravel()
    return threads, addresses[threads]


def load_matrices(instruction: Instruction, program: Program) -> Run:
    """ldmatrix: thread l gets words l of 8 rows of 16 bytes, or of the transposed 8 x 8 values of 16 bits."""
    names = registers(instruction.operands[0])
    places = address(instruction.operands[1], np.uint32, instruction)
    check_matrices(instruction)

    def run(machine: Machine) -> None:
        threads, addresses = rows_of(instruction, machine, places(machine), len(names))
        found = machine.shared.read(threads, addresses, 16, machine.touch(threads, instruction.text))
        matrices = found.view(np.uint16).reshape(-1, len(names), 8, 8)
        if "trans" in instruction.parts:
            matrices = matrices.swapaxes(2, 3)
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, len(names), WARP)
        for index, name in enumerate(names):
            values = np.zeros(machine.count, np.uint32)
            values.reshape(-1, WARP)[threads[:: 8 * len(names)] // WARP] = words[:, index]
            machine.write(name, program.kind(name), values)

    return run


def store_matrices(instruction: Instruction, program: Program) -> Run:
    """stmatrix: the inverse of ldmatrix."""
    places = address(instruction.operands[0], np.uint32, instruction)
    sources = [reader(name, np.uint32, instruction) for name in registers(instruction.operands[1])]
    check_matrices(instruction)

    def run(machine: Machine) -> None:
        threads, addresses = rows_of(instruction, machine, places(machine), len(sources))
        words = np.stack([read(machine).reshape(-1, WARP) for read in sources], 1)
        matrices = words[threads[:: 8 * len(sources)] // WARP].view(np.uint16).reshape(-1, len(sources), 8, 8)
        if "trans" in instruction.parts:
            matrices = matrices.swapaxes(2, 3)
        values = np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, 16)
        machine.shared.write(threads, addresses, values, machine.touch(threads, instruction.text))

    return run


def check_matrices(instruction: Instruction) -> None:
    if instruction.parts[1:4] != ("sync", "aligned", "m8n8") or instruction.parts[-1] != "b16":
        raise Undefined(f"{instruction.text}: no matrices that the executor knows")


def halves(words: Values, half: str) -> Values:
    """[warps, 8, 8] fp32: row l / 4 and columns 2 * (l % 4) and the next are of thread l."""
    values: Values = words.view(HALVES[half]).astype(np.float32).reshape(-1, 8, 8)
    return values


def product(instruction: Instruction, program: Program) -> Run:
    """mma m16n8k16: D = A B + C, with A [16, 16] and B [16, 8] in 16 bits, C and D [16, 8] in fp32."""
    half = instruction.parts[-2]
    if instruction.parts != ("mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", half, half, "f32"):
        raise Undefined(f"{instruction.text}: no product that the executor knows")
    d, a, b, c = (registers(each) for each in instruction.operands)
    left, right = ([reader(name, np.uint32, instruction) for name in each] for each in (a, b))
    added = [reader(name, np.float32, instruction) for name in c]
    kind = program.kind(d[0])

    def run(machine: Machine) -> None:
        machine.whole(WARP, instruction.text)
        warps = machine.count // WARP
        rows = np.empty((warps, 16, 16), np.float32)
        for index, read in enumerate(left):  # upper left, lower left, upper right, lower right
            low, far = 8 * (index % 2), 8 * (index // 2)
            rows[:, low : low + 8, far : far + 8] = halves(read(machine), half)
        columns = np.concatenate([halves(read(machine), half) for read in right], 2)  # [warps, n, k]
        quarters = (rows @ columns.swapaxes(1, 2)).reshape(warps, 2, WARP, 2)  # upper and lower rows, two columns each
        results = [quarters[:, i // 2, :, i % 2].ravel() + read(machine) for i, read in enumerate(added)]
        for name, values in zip(d, results, strict=True):
            machine.write(name, kind, values)

    return run


def literal(operand: object) -> int:
    assert isinstance(operand, str)
    return int(number(operand, np.uint32))


SPECIAL = {
    "shfl": shuffle,
    "redux": reduction,
    "ldmatrix": load_matrices,
    "stmatrix": store_matrices,
    "mma": product,
}
