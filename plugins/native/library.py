"""The compiled kernels: C structures and functions of kernels/llama.c, through ctypes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, addressof, c_char, c_char_p, c_double, c_float, c_int, c_int32, c_void_p
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .packing import GROUPS, PANEL
from .processor import KernelError, available
from .residual import Offers, Row, bind_residual

INTERFACE = 19  # what these structures say, as kernels/engine.h has it: one more with every change of either
# `enum format`, by precision
FORMATS = ("fp32", "fp16", "bf16", "int8", "int6", "int5", "int4", "int6k", "int5k", "int4k")
NO_MEMORY = 1
REFUSALS = {  # of draftwood_forward
    NO_MEMORY: "no memory for a pass: run fewer requests at a time",
    2: "a token is outside the vocabulary",
    3: "a position is beyond the engine's rotary table: rebuild with a larger --max-length",
    4: "a row is scored that the pass does not have",
    5: "a pass has no rows, or more than the engine",
    7: "the draft reads states, and the pass has none",
}
BLOCK = 32  # inputs of a row that share a scale: kernels/matrix.h
STRIDE = 128  # numbers, to whose multiples rows of activations are filled up: kernels/engine.h
SHARES = np.linspace(0.8, 1.0, 4, dtype=np.float32)  # of a block's span that the search for its scale begins with
map_buffer: Callable[[Any], c_char] = c_char.from_buffer  # looked up once: a pass asks for some twenty addresses
FEW = 4096  # likely tokens; a flat distribution has thousands
RUN = 256  # columns whose weights have a sum of their own: kernels/ranking.h


class Codes(NamedTuple):
    """A matrix [N, K] in blocks of 32 inputs: codes * scales + offsets. codes: int8 [N, K] from 0 on; scales and
    offsets: float32 [N, K / 32], fp16 numbers."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32]


class SignedCodes(NamedTuple):
    """codes * scales: codes int8 [N, K]; scales float32 [N, K / group], fp16 numbers, of groups of inputs."""

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]


class Matrix(Structure):
    """`struct matrix`: addresses and shape of one packed matrix."""

    _fields_ = [
        *((name, c_void_p) for name in ("weights", "scales", "bias")),
        *((name, c_int32) for name in ("outputs", "inputs", "format")),
    ]


class Layer(Structure):
    """`struct layer`."""

    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("output_norm", "down_norm", "token_norm", "cosine", "sine")),
        *((name, Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_int32) for name in ("pairs", "local", "place", "tap", "norm_first")),
    ]


class Model(Structure):
    """`struct model`."""

    _fields_ = [
        *(
            (name, c_int32)
            for name in (
                *("vocab", "hidden", "inner", "layers", "heads", "kv_heads", "head_dim", "positions", "blocks"),
                *("window", "gelu", "taps"),
            )
        ),
        *(
            (name, c_float)
            for name in (
                *("epsilon", "shift", "attention_scale"),
                *("residual_multiplier", "logits_multiplier", "embedding_multiplier"),
            )
        ),
        *((name, c_void_p) for name in ("norm", "odds")),
        ("layer", POINTER(Layer)),
        ("block", POINTER(Matrix)),
        ("head", Matrix),
        ("embedding", Matrix),
        ("fusion", Matrix),
    ]


def row_bytes(model: Model, rows: int) -> int:
    """The bytes that `draftwood_open` takes for `rows` rows, see allocate_rows in kernels/engine.h."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    joined = 2 * model.hidden if model.fusion.inputs else model.hidden
    hidden, normed, merged, attended, gated, fused = (
        -(-size // STRIDE) * STRIDE
        for size in (model.hidden, joined, query + 2 * key, query, model.inner, model.fusion.inputs)
    )
    numbers = hidden + normed + merged + attended + gated + fused
    of_each = (4 + 1) * numbers + 3 * 4 * numbers // PANEL  # with codes, and what belongs to a block of them
    halves = 2 * (normed + attended + gated + fused) if FORMATS[model.head.format] == "bf16" else 0
    return int(rows * (of_each + halves + 4 * query + 4 * model.heads // model.kv_heads))


class Cache(Structure):
    """`struct cache`."""

    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "panels")),
        *((name, c_int32) for name in ("capacity", "format")),
    ]


class Moved(Structure):
    """`struct moved`: rows of a cache of so many layers that go to other slots, as they lie in memory."""

    _fields_ = [("cache", Cache), ("from", c_void_p), ("to", c_void_p), ("rows", c_int32), ("layers", c_int32)]

    @classmethod
    def of(cls, cache: Cache, layers: int, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> Moved:
        rows, slots = np.ascontiguousarray(rows), np.ascontiguousarray(slots)
        moved = cls(cache, address(rows), address(slots), len(rows), layers)
        moved.kept = rows, slots
        return moved


DRAW = np.dtype(  # `struct draw`: what a pass computes of an output row's softmax, see kernels/engine.h
    [
        *((name, np.float64) for name in ("temperature", "share", "total")),
        *((name, np.uint64) for name in ("sums", "weights", "ids")),
        *(("peak", np.float32), ("room", np.int32), ("count", np.int32), ("best", np.int32)),
    ],
    align=True,
)


HEAD = Struct("5i")  # of `struct pass`: one call of Python's for five fields


class Pass(Structure):
    """`struct pass`."""

    _fields_ = [
        *((name, c_int32) for name in ("rows", "outputs", "length", "start", "columns", "top")),
        *((name, c_void_p) for name in ("tokens", "positions", "output_rows", "mask")),
        ("cache", Cache),
        *((name, c_void_p) for name in ("logits", "acceptance", "logprobs", "ids", "slots", "draw_outputs", "draws")),
        ("drawn", c_int32),
        *((name, c_void_p) for name in ("given", "states")),
        ("near", Cache),
    ]


def address(array: NDArray[Any] | None) -> int | None:
    """Where an array's numbers lie. Somebody else keeps it alive."""
    if array is None:
        return None
    try:
        return addressof(map_buffer(array))  # in a fifth of the time of array.ctypes
    except (TypeError, ValueError):  # the array is read-only, or empty
        return array.ctypes.data


class NativeLibrary:
    def __init__(self, path: Path) -> None:
        """Raises KernelError when the file cannot be loaded, or was compiled for another processor."""
        try:
            self._library = ctypes.CDLL(str(path.resolve()))
            instructions = self._library.draftwood_instructions
        except (OSError, AttributeError) as error:
            raise KernelError(f"{path} cannot be loaded here ({error}): delete it, and it is made anew") from error
        interface = getattr(self._library, "draftwood_interface", lambda: 1)()
        if interface != INTERFACE:
            raise KernelError(f"{path} was compiled for another release of draftwood: delete it")
        instructions.restype = c_char_p
        self.instructions: tuple[str, ...] = tuple(instructions().decode().split())
        if missing := set(self.instructions) - available(self.instructions):
            raise KernelError(
                f"{path} was compiled for a processor with {', '.join(sorted(missing))}, which this one lacks: "
                "delete it, and it is made anew"
            )
        self._library.draftwood_open.restype = c_void_p
        self._library.draftwood_open.argtypes = [POINTER(Model), c_int, c_int]
        self._library.draftwood_close.argtypes = [c_void_p]
        self._library.draftwood_close.restype = None
        # Runs a `Pass` on a handle; 0, or one of REFUSALS. Other Python threads go on meanwhile.
        self.forward = self._library.draftwood_forward
        self.forward.argtypes = [c_void_p, POINTER(Pass)]
        self._library.draftwood_linear.argtypes = [POINTER(Matrix), c_void_p, c_int, c_void_p]
        self._library.draftwood_round.restype = None
        self._library.draftwood_round.argtypes = [
            *(c_void_p, c_int, c_int, c_int, c_void_p, c_int),
            *[c_void_p] * 5,
        ]
        self._library.draftwood_round_signed.restype = None
        self._library.draftwood_round_signed.argtypes = [c_void_p, c_int, c_int, c_int, *[c_void_p] * 2]
        self._library.draftwood_move.argtypes = [c_void_p, POINTER(Moved), c_int]
        # These calls keep the GIL: they are shorter than the 5 ms that getting it back may take.
        self._brief = brief = ctypes.PyDLL(str(path.resolve()))
        brief.draftwood_softmax.restype = c_double
        brief.draftwood_softmax.argtypes = [c_void_p, c_int, c_double, c_void_p, POINTER(c_float)]
        brief.draftwood_weigh.restype = None
        brief.draftwood_weigh.argtypes = [c_void_p, c_int, c_float, c_double, c_void_p]
        brief.draftwood_likely.argtypes = [c_void_p, c_int, c_double, c_double, c_int, *[c_void_p] * 2]
        self.reject, self.residual_runs, self.residual_run, self._offer = bind_residual(brief)

    def open(self, model: Model, rows: int, threads: int) -> int:
        """A handle for passes of up to `rows` rows. Raises KernelError without memory."""
        handle = self._library.draftwood_open(model, rows, threads)
        if not handle:
            raise KernelError(
                f"no memory for passes of {rows} rows, or too many layers ({model.layers}) for these kernels"
            )
        return int(handle)

    def close(self, handle: int) -> None:
        self._library.draftwood_close(handle)

    def move(self, handle: int, moved: Sequence[Moved]) -> None:
        """Copy rows to other slots. Raises MemoryError, and then nothing has changed."""
        if self._library.draftwood_move(handle, (Moved * len(moved))(*moved), len(moved)):
            raise MemoryError(f"no memory to move {max(each.rows for each in moved)} cache rows")

    def linear(self, matrix: Matrix, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 [R, inputs] times one packed matrix: [R, outputs]. Raises KernelError without memory."""
        rows = np.ascontiguousarray(rows, np.float32)
        result = np.zeros((len(rows), matrix.outputs), np.float32)
        if self._library.draftwood_linear(matrix, address(rows), len(rows), address(result)):
            raise KernelError(f"no memory for {len(rows)} rows")
        return result

    def round_to_codes(self, matrix: NDArray[np.float32], bits: int = 4) -> Codes:
        """Round a matrix [N, K] to 4 or 5 bits in blocks of 32 inputs. Each block gets the scale and the offset, among
        many, that leave the smallest square error."""
        matrix = whole_blocks(matrix)
        result = empty_codes(*matrix.shape)
        self._round(matrix, bits, None, result, None)
        return result

    def round_signed(self, matrix: NDArray[np.float32], bits: int) -> SignedCodes:
        """Round a matrix [N, K] to 8 or 6 bits. A group of inputs gets the scale by which its largest weight fits."""
        matrix = whole_blocks(matrix)
        (outputs, inputs), codes = matrix.shape, np.empty(matrix.shape, np.int8)
        scales = np.empty((outputs, inputs // GROUPS[bits]), np.float32)
        self._library.draftwood_round_signed(address(matrix), outputs, inputs, bits, address(codes), address(scales))
        return SignedCodes(codes, scales)

    def round_block(
        self, block: NDArray[np.float32], feedback: NDArray[np.float32], bits: int = 4
    ) -> tuple[Codes, NDArray[np.float32]]:
        """One block [N, 32] likewise, its inputs one after the other: what rounding leaves of input k, times
        feedback[k, j], is taken from every later input j, before that is rounded. feedback: [32, 32]. Returns the codes
        and what was left, [N, 32]."""
        block, feedback = np.ascontiguousarray(block, np.float32), np.ascontiguousarray(feedback, np.float32)
        if block.shape[1] != BLOCK or feedback.shape != (BLOCK, BLOCK):
            raise KernelError(f"{block.shape} with {feedback.shape} is no block of {BLOCK} inputs")
        result, left = empty_codes(*block.shape), np.empty_like(block)
        self._round(block, bits, feedback, result, left)
        return result, left

    def _round(
        self,
        matrix: NDArray[np.float32],
        bits: int,
        feedback: NDArray[np.float32] | None,
        result: Codes,
        left: NDArray[np.float32] | None,
    ) -> None:
        given = (address(matrix), *matrix.shape, bits, address(SHARES), len(SHARES), address(feedback))
        self._library.draftwood_round(*given, *(address(array) for array in result), address(left))

    def softmax(self, logits: NDArray[np.float32], temperature: float, sums: NDArray[np.float64]) -> tuple[float, Row]:
        """The sum of exp((logits - max) / temperature) over a row [V], and the row for further calls. sums: set to the
        sums of every RUN. The arrays must live as long as the row. Raises KernelError when a logit is NaN or +inf, or
        all are -inf."""
        row, peak = Row(address(logits), len(logits), 0.0, temperature, address(sums)), c_float()
        if math.isnan(total := self._brief.draftwood_softmax(row.logits, row.size, temperature, row.sums, peak)):
            raise KernelError("a logit is NaN or infinite")
        row.peak = peak.value
        return float(total), row

    def offer(self, row: Row, offers: Offers, total: float) -> None:
        """Compute R of a row whose sum is `total`. Raises KernelError for ids that are no ascending columns."""
        if self._offer(row, offers, total):
            raise KernelError("the offered tokens are no ascending columns of the row")

    def weigh(
        self, some: NDArray[np.float32], peak: float, temperature: float, weights: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Write the weights of some of a row's logits [N] to `weights` [N], exp((logits - peak) /
        temperature), where `peak` is the largest logit of the row; returns them. All are numbers or -inf."""
        self._brief.draftwood_weigh(address(some), len(some), peak, temperature, address(weights))
        return weights

    def likely(
        self, logits: NDArray[np.float32], temperature: float, share: float, room: int = FEW
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Tokens at least `share` times as probable as the best one: ids [K], ascending, and exp as above [K]. room:
        for how many of them memory is taken at first. Raises KernelError as `softmax` does."""
        ids, weights = np.empty(room, np.int64), np.empty(room)
        settings = len(logits), temperature, share, room
        count = self._brief.draftwood_likely(address(logits), *settings, address(ids), address(weights))
        if count < 0:
            raise KernelError("a logit is NaN or infinite")
        if count > room:
            return self.likely(logits, temperature, share, count)
        return ids[:count], weights[:count]


def whole_blocks(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a matrix [N, K] as C reads it. Raises KernelError if its inputs do not divide into blocks."""
    if matrix.shape[1] % BLOCK:
        raise KernelError(f"{matrix.shape[1]} inputs are no blocks of {BLOCK}")
    return np.ascontiguousarray(matrix, np.float32)


def empty_codes(outputs: int, inputs: int) -> Codes:
    blocks = (outputs, inputs // BLOCK)
    return Codes(np.empty((outputs, inputs), np.int8), np.empty(blocks, np.float32), np.empty(blocks, np.float32))
