"""What one thread computes from registers alone: integers, floating point, conversions, selections, bit fields.

Every function takes and gives arrays of one value per thread. A pair of fp32 (`f32x2`) is two neighbours in one array.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]
Compute = Callable[..., Values]

TYPES: dict[str, type[np.generic]] = {
    **{f"{kind}{8 * size}": getattr(np, f"uint{8 * size}") for kind in "bu" for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": getattr(np, f"int{8 * size}") for size in (1, 2, 4, 8)},
    "f32": np.float32,
    "f32x2": np.float32,
    "f64": np.float64,
    "pred": np.bool_,
}
HALVES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
MIN_NORMAL = np.float32(2.0**-126)


class Operation(NamedTuple):
    """The types of the sources, and what is computed from them."""

    sources: tuple[type[np.generic], ...]
    compute: Compute


def resolve(parts: tuple[str, ...], sources: int) -> Operation | None:
    """The operation of an opcode with so many sources; None for one that is not computed from registers alone."""
    name, kind = parts[0], parts[-1]
    if name == "cvt":
        return conversion(parts[-2], kind)
    if name == "cvta":
        return Operation((np.uint64,), np.copy)
    if kind not in TYPES:
        return None
    dtype = TYPES[kind]
    floating = dtype in (np.float32, np.float64)
    flushed = flush if "ftz" in parts else same
    if name in ("add", "sub", "mul", "div", "min", "max") and floating:
        function = FLOATING[name]
        return Operation((dtype,) * sources, lambda *values: flushed(functools.reduce(function, values)))
    if name == "fma":
        exact = FUSED[dtype]
        return Operation((dtype,) * 3, lambda x, y, z: flushed(exact(flushed(x), flushed(y), flushed(z))))
    if name in UNARY and floating:
        return Operation((dtype,), lambda x: flushed(UNARY[name](flushed(x))))
    if name == "selp":
        return Operation((dtype, dtype, np.bool_), lambda x, y, which: np.where(which, x, y))
    if name == "setp":
        return Operation((dtype, dtype), ORDERED_NOT_EQUAL if floating and parts[1] == "ne" else COMPARISONS[parts[1]])
    if name in ("mul", "mad") and parts[1] in ("wide", "hi"):
        return wide(name, parts[1], dtype)
    if name == "mad":
        return Operation((dtype,) * 3, lambda x, y, z: x * y + z)
    if name in ("shl", "shr"):
        return Operation((dtype, np.uint32), shift_left if name == "shl" else shift_right)
    if name in INTEGER:
        return Operation((dtype, dtype), INTEGER[name])
    if name in SINGLE:
        return Operation((dtype,), SINGLE[name])
    if name == "bfe":
        return Operation((dtype, np.uint32, np.uint32), bit_field)
    if name == "prmt":
        return Operation((np.uint32,) * 3, permute)
    return None


def same(values: Values) -> Values:
    return values


def flush(values: Values) -> Values:
    """Subnormal numbers become zero."""
    return np.where(np.abs(values) < MIN_NORMAL, np.copysign(np.float32(0), values), values)


def fused(x: Values, y: Values, z: Values) -> Values:
    """A product of two fp32 is exact in fp64."""
    return np.asarray(x.astype(np.float64) * y + z, np.float32)


def fused_double(x: Values, y: Values, z: Values) -> Values:
    """With 64 bits of a mantissa, where a GPU keeps all: rarely the last bit of the result differs."""
    return np.asarray(x.astype(np.longdouble) * y + z, np.float64)


def divide(x: Values, y: Values) -> Values:
    """Integer division towards zero. A zero divisor gives the dividend here; PTX leaves it open."""
    y = np.where(y == 0, y.dtype.type(1), y)
    quotient: Values = (x - np.fmod(x, y)) // y
    return quotient


def shift_left(x: Values, count: Values) -> Values:
    bits = 8 * x.dtype.itemsize
    return np.where(count < bits, x << np.minimum(count, bits - 1).astype(x.dtype), x.dtype.type(0))


def shift_right(x: Values, count: Values) -> Values:
    """Arithmetic for signed types; a count beyond the width leaves nothing, or the sign."""
    bits = 8 * x.dtype.itemsize
    shifted = x >> np.minimum(count, bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(count < bits, shifted, x.dtype.type(0))


def bit_field(x: Values, position: Values, length: Values) -> Values:
    """`length` bits from `position`, with their sign for signed types."""
    value = (x.astype(np.int64) & 0xFFFFFFFF) >> position.astype(np.int64)
    value &= (np.int64(1) << length.astype(np.int64)) - 1
    if x.dtype.kind == "i":
        top = np.int64(1) << np.maximum(length.astype(np.int64) - 1, 0)
        value = (value ^ top) - top
    return value.astype(x.dtype)


def permute(low: Values, high: Values, selector: Values) -> Values:
    """Four of the eight bytes; the lower three bits of each nibble choose one, the fourth takes its sign."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    result: Values = np.zeros(np.broadcast(low, high, selector).shape, np.uint32)
    for place in range(4):
        nibble = selector >> np.uint32(4 * place) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (nibble & np.uint32(7)).astype(np.uint64))).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte >> np.uint32(7), np.uint32(255), np.uint32(0))
        result |= np.where(nibble >> np.uint32(3), sign, byte) << np.uint32(8 * place)
    return result


def wide(name: str, form: str, dtype: type[np.generic]) -> Operation:
    """Products in twice the width: all of it (`wide`) or its upper half (`hi`)."""
    double = np.dtype(f"{np.dtype(dtype).kind}{2 * np.dtype(dtype).itemsize}").type
    if form == "hi":
        bits = 8 * np.dtype(dtype).itemsize
        return Operation(
            (dtype, dtype), lambda x, y: (x.astype(double) * y.astype(double) >> double(bits)).astype(dtype)
        )
    if name == "mad":
        return Operation((dtype, dtype, double), lambda x, y, z: x.astype(double) * y.astype(double) + z)
    return Operation((dtype, dtype), lambda x, y: x.astype(double) * y.astype(double))


def conversion(target: str, source: str) -> Operation | None:
    half = target.removesuffix("x2")
    if half in HALVES and source == "f32":
        if target.endswith("x2"):  # the first source becomes the upper half
            return Operation(
                (np.float32,) * 2, lambda high, low: rounded(low, half) | rounded(high, half) << np.uint32(16)
            )
        return Operation((np.float32,), lambda x: rounded(x, half).astype(np.uint16))
    if source in HALVES and target == "f32":
        return Operation((np.uint16,), lambda x: x.view(HALVES[source]).astype(np.float32))
    if target in TYPES and source in TYPES:
        to = TYPES[target]
        return Operation((TYPES[source],), lambda x: x.astype(to))
    return None


def rounded(values: Values, half: str) -> Values:
    """fp32 to the bits of a 16-bit type, to nearest even, in the lower half of a word."""
    return values.astype(HALVES[half]).view(np.uint16).astype(np.uint32)


def ordered_not_equal(x: Values, y: Values) -> Values:
    return (x < y) | (x > y)


def unordered(compare: Compute) -> Compute:
    """True if a number is NaN, too; `compare` is the opposite."""
    return lambda x, y: ~compare(x, y)


ORDERED_NOT_EQUAL: Compute = ordered_not_equal
FUSED: dict[type[np.generic], Compute] = {np.float32: fused, np.float64: fused_double}
FLOATING: dict[str, Compute] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.fmin,
    "max": np.fmax,
}
UNARY: dict[str, Compute] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "neg": np.negative,
    "abs": np.abs,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
}
INTEGER: dict[str, Compute] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
    "div": divide,
    "rem": np.fmod,
}
SINGLE: dict[str, Compute] = {"not": np.invert, "neg": np.negative, "abs": np.abs}
COMPARISONS: dict[str, Compute] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "neu": operator.ne,
    "equ": unordered(ordered_not_equal),
    "ltu": unordered(operator.ge),
    "leu": unordered(operator.gt),
    "gtu": unordered(operator.le),
    "geu": unordered(operator.lt),
    "num": lambda x, y: (x == x) & (y == y),
}
