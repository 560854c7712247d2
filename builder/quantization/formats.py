"""Weight-only formats: a matrix as small integers with one scale per block of neighbouring inputs.

    weight[n, k] = codes[n, k] * scales[n, k // block]                    codes: signed integers of 4 to 8 bits
    weight[n, k] = codes[n, k] * scales[n, k // 32] + offsets[n, k // 32]    codes: 0 to 15 or 31 (native alone)

fp8 is the first one with floating-point codes (E4M3: 3 bits of mantissa, up to 448), for GPUs that multiply them.

On a CPU activations, norms, biases and a graph's embedding stay fp32; on a GPU they, and the scales, are fp16. There
is no per-tensor dynamic int8 (one scale for all rows of a pass): a row's logits would depend on its siblings, by 10 %,
and a verified token would no longer be the one that plain decoding gives.

Everything is computed one tensor at a time. `QuantizedCheckpoint.tensor` is what a CPU's engine holds, bit for bit,
so that the reference runs on exactly the engine's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...models import bindings
from ...models.errors import CheckpointError, ConfigError
from ...models.layers import EMBEDDING_WEIGHT, HEAD_WEIGHT, network_of
from ...plugins.native.cache import open_kernels
from ...plugins.native.compile import CompilerError
from ...plugins.native.library import NativeLibrary
from ...plugins.native.processor import KernelError
from ...runtime.engines.backends import BACKENDS, BLOCKS, Backend
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.source import Blocks
from ..parallel import in_parts

CLIPPING = np.linspace(0.7, 1.0, 13, dtype=np.float32)  # shares of a block's largest magnitude that are tried
LARGEST_E4M3, LARGEST_FP16 = 448, 65504
HALF = dict(zip(bindings.HALF, (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)), strict=True))


class Quantized(NamedTuple):
    """A matrix [N, K]."""

    codes: NDArray[Any]  # int8 or E4M3 [N, K], within the range of the format
    scales: NDArray[np.float32]  # [N, K / block]
    offsets: NDArray[np.float32] | None = None  # as scales, what is added in each block; None adds nothing
    factors: NDArray[np.float32] | None = None  # of superblocks, see Blocks; None: scales and offsets are as stored

    def dequantized(self) -> NDArray[np.float32]:
        """float32 [N, K]: what DequantizeLinear computes from these codes and scales, bit for bit."""
        rows, blocks = self.scales.shape
        codes = self.codes.reshape(rows, blocks, -1)
        weights = np.empty(codes.shape, np.float32)

        def fill(part: slice) -> None:
            np.multiply(codes[part].astype(np.float32), self.scales[part, :, None], out=weights[part])
            if self.offsets is not None:
                weights[part] += self.offsets[part, :, None]

        in_parts(rows, self.codes.shape[1], fill)
        return weights.reshape(self.codes.shape)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    bits: int  # 8 or 4; of the native kernels' formats 6 and 5, too
    block: int = BLOCKS[0]  # the most inputs that share a scale, one of BLOCKS, or 16
    scale_bytes: int = 4  # 2 for the native kernels' formats, which have fp16 scales
    offset: bool = False  # a block has one, too; the native kernels' formats have them at 5 and 4 bits
    superblocks: bool = False  # only what a file stores so can be held
    floating: bool = False  # codes are E4M3 numbers instead of integers
    others: Mapping[str, WeightFormat] = field(default_factory=dict)  # of matrices with another one, by their tensors
    embedding: bool = False  # whether the embedding is rounded, too, as the projection is

    def of(self, name: str) -> WeightFormat:
        return self.others.get(name, self)

    @property
    def precision(self) -> str:
        return bindings.FP8 if self.floating else f"int{self.bits}{'k' * self.superblocks}"

    def block_of(self, name: str, inputs: int) -> int:
        """How many of a matrix's inputs share a scale. Raises ConfigError when no block divides them."""
        if inputs % BLOCKS[-1] == 0:  # rows have blocks of this size, whatever the matrix has
            return next((block for block in BLOCKS if block <= self.block and inputs % block == 0), self.block)
        raise ConfigError(
            f"{name} has {inputs} inputs, no multiple of {BLOCKS[-1]}, and cannot be stored in blocks: "
            "build this model with --precision fp32"
        )

    @property
    def largest(self) -> float:
        """The largest weight that every block can hold, by its scale and offset in fp16."""
        if self.floating:
            return LARGEST_E4M3 * LARGEST_FP16
        if self.scale_bytes != 2:
            return np.inf
        return LARGEST_FP16 if self.offset else (2 ** (self.bits - 1) - 1) * LARGEST_FP16

    def check_size(self, name: str, part: NDArray[np.float32]) -> None:
        """Raises CheckpointError for rows of a matrix with a weight that the format cannot hold."""
        if max(part.max(initial=0), -part.min(initial=0)) > self.largest:
            told = f"{name} has weights too large for {self.precision}"
            raise CheckpointError(f"{told}: build with --precision bf16 or fp32")

    def keep(self, blocks: Blocks, block: int) -> Quantized | None:
        """What a checkpoint rounded before, in this format with so many inputs in a block; None where the format has
        other blocks, or no room for the offsets."""
        zero = 0 if self.offset or blocks.bits == 8 else 1 << blocks.bits - 1
        if not (self.offset or np.array_equal(blocks.offsets, -zero * blocks.scales)):
            return None
        bits, codes, scales, offsets, factors = blocks if self.superblocks else blocks.in_fp16()
        more, rest = divmod(codes.shape[1], scales.shape[1] * block)  # codes of 4 bits are codes of 8 bits, too
        if self.floating or bits > self.bits or not more or rest or not np.isfinite(scales).all():
            return None
        scales, offsets = scales.repeat(more, 1), offsets.repeat(more, 1)
        if not self.offset:
            return Quantized(codes - np.int8(zero), scales, None, factors)
        exact = self.superblocks or np.array_equal(offsets, offsets.astype(np.float16))
        return Quantized(codes, scales, offsets, factors) if exact and codes.min(initial=0) >= 0 else None

    def quantize(self, name: str, matrix: NDArray[Any]) -> Quantized:
        """Round a matrix of floats [N, K] to codes. Each block takes the scale, and the offset where the format has
        one, among a few, that leave the smallest square error. Raises CheckpointError where a weight is too large for
        the format, and ConfigError where the native kernels cannot be had, which round to their own formats."""
        rows, inputs = matrix.shape
        block = self.block_of(name, inputs)
        shape = (rows, inputs // block)
        offsets = np.empty(shape, np.float32) if self.offset else None
        codes = np.empty((rows, inputs), ml_dtypes.float8_e4m3fn if self.floating else np.int8)
        result = Quantized(codes, np.empty(shape, np.float32), offsets)
        library = rounding_kernels() if self.scale_bytes == 2 else None

        def rounded(part: NDArray[np.float32]) -> Quantized:
            if self.floating:
                return rounded_to_e4m3(part, block)
            if library is None:
                return rounded_by_numpy(part, self.bits, block)
            return Quantized(*(library.round_to_codes if self.offset else library.round_signed)(part, self.bits))

        def fill(part: slice) -> None:
            weights = matrix[part].astype(np.float32, copy=False)
            self.check_size(name, weights)
            found = rounded(weights)
            for whole, own in zip(result, found, strict=True):
                if whole is not None and own is not None:
                    whole[part] = own

        in_parts(rows, inputs, fill)
        return result


def rounding_kernels() -> NativeLibrary:
    """The kernels that round matrices. Raises ConfigError where this machine cannot have them."""
    try:
        return open_kernels()
    except (CompilerError, KernelError) as error:
        raise ConfigError(str(error)) from error


def rounded_by_numpy(matrix: NDArray[np.float32], bits: int, block: int) -> Quantized:
    """A matrix [N, K] with a float32 scale for each block of inputs: at 8 bits the one by which the largest weight
    fits, at 4 the best of a few smaller ones."""
    largest = 2 ** (bits - 1) - 1
    rows, inputs = matrix.shape
    blocks = matrix.reshape(rows, -1, block)
    peaks = np.abs(blocks).max(-1)
    least = np.full(peaks.shape, np.inf, np.float32)
    scales = np.ones(peaks.shape, np.float32)
    codes = np.zeros(blocks.shape, np.int8)
    for share in CLIPPING if bits == 4 else CLIPPING[-1:]:
        scale = np.where(peaks > 0, share * peaks / np.float32(largest), np.float32(1))
        found = np.clip(np.rint(blocks / scale[..., None]), -largest - 1, largest)
        error = np.square(found * scale[..., None] - blocks).sum(-1)
        better = error < least
        least[better], scales[better], codes[better] = error[better], scale[better], found[better]
    return Quantized(codes.reshape(rows, inputs), scales)


def rounded_to_e4m3(matrix: NDArray[np.float32], block: int) -> Quantized:
    """A matrix [N, K] with a scale for each block of inputs, by which the block's largest weight becomes the largest
    code. Scales are fp16 numbers, as the graph stores them: those of E4M3 are small, and lose more by that."""
    blocks = matrix.reshape(len(matrix), -1, block)
    peaks = np.abs(blocks).max(-1)
    largest = np.float32(LARGEST_E4M3)
    least = np.finfo(np.float16).smallest_subnormal
    scales = np.maximum((peaks / largest).astype(np.float16), least).astype(np.float32)
    codes = np.clip(blocks / scales[..., None], -largest, largest)  # E4M3 has no infinity: what is beyond is NaN
    return Quantized(codes.reshape(matrix.shape).astype(ml_dtypes.float8_e4m3fn), scales)


def format_of(backend: Backend, precision: str) -> WeightFormat:
    """The format in which a backend stores matrices of a low-bit precision."""
    of_head = backend.heads.get(precision)
    others = {} if of_head is None else dict.fromkeys((EMBEDDING_WEIGHT, HEAD_WEIGHT), format_of(backend, of_head))
    return WeightFormat(
        bindings.BITS[precision],
        backend.blocks[precision],
        backend.scale_bytes,
        precision in backend.offsets,
        precision in bindings.SUPERBLOCKS,
        floating=precision == bindings.FP8,
        others=others,
        embedding=backend.rounds_embedding,
    )


FORMATS = {
    (backend.name, precision): format_of(backend, precision)
    for backend in BACKENDS.values()
    for precision in backend.blocks
}


class QuantizedCheckpoint:
    """A checkpoint seen through a weight format: every tensor as fp32, matrices rounded to the format.

    Two things are put in order on the way, and change no result: a feed-forward size that is no multiple of the
    block is filled up with channels of zeros, and an embedding that is also the vocabulary projection is stored twice
    where only the projection is quantised.
    """

    def __init__(
        self, source: Checkpoint, form: WeightFormat, rounded: Mapping[str, Quantized] = MappingProxyType({})
    ) -> None:
        """rounded: matrices of this view that were rounded before; the others are rounded here, each time they are
        read. Raises ConfigError when a matrix cannot be stored in blocks."""
        self.source, self.form, self._rounded = source, form, rounded
        block = max(form.block, BLOCKS[-1])
        inner = -(-source.config.intermediate_size // block) * block
        tied = source.config.tie_embeddings and form.embedding
        self.config = replace(source.config, intermediate_size=inner, tie_embeddings=tied)
        self._shapes = network_of(self.config).tensors()
        self._recent: dict[str, Quantized] = {}  # of two layers
        for name, shape in self._shapes.items():
            if self.rounds(name):
                form.of(name).block_of(name, shape[1])

    def rounds(self, name: str) -> bool:
        """Whether a tensor is stored in the format."""
        return len(self._shapes[name]) == 2 and (self.form.embedding or name != EMBEDDING_WEIGHT)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor, fp32, as the engine has it. Raises CheckpointError as the source does."""
        return self.quantized(name).dequantized() if self.rounds(name) else self.stored(name)

    def quantized(self, name: str) -> Quantized:
        """Codes, scales and offsets of a matrix: the checkpoint's own where the format can hold them. Those of the last
        two layers are kept: while one is packed, the one before is compared."""
        if (known := self._rounded.get(name) or self._recent.get(name)) is not None:
            return known
        layers = list(dict.fromkeys(map(layer_of, tuple(self._recent))))
        if len(layers) > 1 and layer_of(name) not in layers:
            self._recent = {other: found for other, found in self._recent.items() if layer_of(other) != layers[0]}
        kept = self._kept(name)
        self._recent[name] = self.form.of(name).quantize(name, self._filled(name)) if kept is None else kept
        return self._recent[name]

    def _kept(self, name: str) -> Quantized | None:
        """The codes with which a checkpoint stores a matrix, None where this format cannot hold them."""
        blocks, form = self.source.blocks(stored_name(self.source, name)), self.form.of(name)
        kept = None if blocks is None else form.keep(blocks, form.block_of(name, self._shapes[name][1]))
        if kept is None:
            return None
        rows, inputs = self._shapes[name]
        missing = (0, rows - len(kept.codes)), (0, inputs - kept.codes.shape[1])
        ends = missing[0], (0, missing[1][1] * kept.scales.shape[1] // kept.codes.shape[1])
        offsets = None if kept.offsets is None else np.pad(kept.offsets, ends)
        blank = missing[0], (0, 0), (0, 0)
        factors = None if kept.factors is None else np.pad(kept.factors, blank, constant_values=1.0)
        return Quantized(np.pad(kept.codes, missing), np.pad(kept.scales, ends, constant_values=1.0), offsets, factors)

    def stored(self, name: str) -> NDArray[np.float32]:
        """A tensor before rounding, in the shape it has here."""
        return widened(self._filled(name))

    def _filled(self, name: str) -> NDArray[Any]:
        """The same in the type that the source has it in."""
        stored = self.source.tensor(stored_name(self.source, name))
        padding = [(0, size - have) for size, have in zip(self._shapes[name], stored.shape, strict=True)]
        return np.pad(stored, padding) if any(map(any, padding)) else stored


class RoundedCheckpoint:
    """A checkpoint whose matrices are stored in 16 bits. The weights of what was trained in that type lose nothing."""

    def __init__(self, source: Checkpoint, precision: str) -> None:
        self.source, self.precision, self.dtype = source, precision, HALF[precision]
        self.config = source.config

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor, fp32, as the engine has it: norms and biases keep their precision. Raises CheckpointError."""
        stored = self.source.tensor(stored_name(self.source, name))
        return widened(self.half(name)) if stored.ndim == 2 else widened(stored)

    def half(self, name: str) -> NDArray[Any]:
        """A matrix in 16 bits. Raises CheckpointError as the source does, and where a weight is too large for fp16."""
        with np.errstate(over="ignore"):
            rounded = converted(self.source.tensor(stored_name(self.source, name)), self.dtype)
        if self.precision == "fp16" and not np.isfinite(rounded).all():
            raise CheckpointError(f"{name} has weights too large for fp16: build with --precision bf16 or fp32")
        return rounded


Weights = Checkpoint | QuantizedCheckpoint | RoundedCheckpoint


def stored_as(
    checkpoint: Checkpoint,
    backend: Backend,
    precision: str,
    rounded: Mapping[str, Quantized] = MappingProxyType({}),
    form: WeightFormat | None = None,
) -> Weights:
    """A checkpoint as a backend stores it. rounded: see QuantizedCheckpoint. form: in place of the precision's."""
    if form := form or FORMATS.get((backend.name, precision)):
        return QuantizedCheckpoint(checkpoint, form, rounded)
    if precision in HALF and not backend.is_compiled:  # stored in 16 bits, the rest in fp32
        return RoundedCheckpoint(checkpoint, precision)
    return checkpoint


def layer_of(name: str) -> str:
    """The module of a tensor's layer by the tensor's name, "model.layers.3" for instance; else its own."""
    return ".".join(name.split(".")[:3])


def converted(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array of floats in another type, by way of fp32; itself where it has that type."""
    if array.dtype == dtype:
        return array
    result = np.empty(array.shape, dtype)

    def fill(part: slice) -> None:
        result[part] = array[part].astype(np.float32, copy=False)

    in_parts(len(array), array[:1].size, fill)
    return result


def widened(array: NDArray[Any]) -> NDArray[np.float32]:
    return converted(array, np.dtype(np.float32))


def stored_name(source: Checkpoint, name: str) -> str:
    """The tensor of the checkpoint that a name reads: the embedding, where the vocabulary projection is tied to it."""
    return EMBEDDING_WEIGHT if name == HEAD_WEIGHT and source.config.tie_embeddings else name
