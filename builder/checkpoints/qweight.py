"""Matrices as AutoAWQ (WQLinear_GEMM), AutoGPTQ and GPTQModel (their `qlinear` modules) store them.

weight[o, i] = scales[g, o] * (value[i, o] - zero[g, o]), where g is the group of input i.
scales: [groups, out]. qzeros: int32 [groups, out * bits / 32], packed along the outputs.
AWQ: qweight: int32 [in, out / 8], packed along the outputs. Both are in the order PLACE.
GPTQ: qweight: int32 [in * bits / 32, out], packed along the inputs. g_idx: int32 [in], the group of each input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.errors import CheckpointError
from ...models.fields import switch
from .packed import (
    OTHER_MODEL,
    SCALES,
    WORD,
    PackedMatrix,
    QuantizationConfig,
    group_count,
    in_order,
    read_index,
    require,
    unpacked,
)
from .source import TensorSource

AWQ, GPTQ = "awq", "gptq"
V1, V2 = "gptq", "gptq_v2"  # checkpoint formats of GPTQ
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ puts each of 8 consecutive outputs in their word


@dataclass(frozen=True, slots=True)
class Qweight:
    """The Layout of both. AWQ stores zero points whatever its setting `zero_point` says."""

    method: str  # AWQ | GPTQ
    bits: int
    group_size: int  # inputs that share a scale; -1: all inputs of a row
    listed: tuple[str, ...] = ()  # of AWQ alone
    order: bool = False  # GPTQ's `desc_act`: inputs were sorted by activations, so that only g_idx says their groups
    less_one: bool = False  # zero points are stored minus one, as in GPTQ's format v1
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.method} of {self.bits} bits"

    def shape(self, source: TensorSource, module: str) -> tuple[int, int] | None:
        if source.stored(f"{module}.qweight") is None:
            return None
        rows, columns = require(source, f"{module}.qweight", ("I32",))
        each = WORD // self.bits  # values of a word
        outputs, inputs = (columns * each, rows) if self.method == AWQ else (columns, rows * each)
        if self.method == AWQ and self.group_size != -1 and inputs % self.group_size:
            raise CheckpointError(f"{module}: {inputs} inputs do not divide into groups of {self.group_size}")
        if outputs % each:
            raise CheckpointError(f"{module}: {outputs} outputs of {self.bits} bits do not fill 32-bit words")
        groups, why = group_count(inputs, self.group_size), f" with group_size {self.group_size}"
        require(source, f"{module}.scales", SCALES, (groups, outputs), why=why)
        require(source, f"{module}.qzeros", ("I32",), (groups, outputs // each), why=why)
        if self.order or (self.method == GPTQ and source.stored(f"{module}.g_idx") is not None):
            require(source, f"{module}.g_idx", ("I32",), (inputs,))
        return outputs, inputs

    def matrix(self, source: TensorSource, module: str) -> PackedMatrix:
        words, zeros = (source.tensor(f"{module}.{name}") for name in ("qweight", "qzeros"))
        if self.less_one:
            # GPTQModel subtracts the ones from whole words, so a zero point of 0 borrows from the next one. Adding
            # the ones to whole words, with carry, is the inverse.
            zeros = zeros.view(np.uint32) + np.uint32(sum(1 << shift for shift in range(0, WORD, self.bits)))
        values = self._outputs(words) if self.method == AWQ else unpacked(words.T, self.bits)
        scales, zeros = source.tensor(f"{module}.scales").T, self._outputs(zeros)
        return PackedMatrix(values, scales, zeros, self._groups(source, module, values.shape[1]))

    def _outputs(self, words: NDArray[Any]) -> NDArray[np.uint8]:
        """Unpack int32 [rows, words], packed along the outputs, into uint8 [outputs, rows]."""
        codes = unpacked(words, self.bits)
        if self.method == AWQ:
            codes = codes.reshape(len(words), -1, len(PLACE))[..., PLACE].reshape(len(words), -1)
        return np.ascontiguousarray(codes.T)

    def _groups(self, source: TensorSource, module: str, inputs: int) -> NDArray[Any]:
        """The group of each input, [in]. Raises CheckpointError."""
        expected, name = in_order(inputs, self.group_size), f"{module}.g_idx"
        if self.method == AWQ:
            return expected
        groups = read_index(source, name, inputs, self.group_size)
        if not self.order and not np.array_equal(groups, expected):
            raise CheckpointError(
                f"tensor {name} reorders inputs, and desc_act in config.json says that nothing does: {OTHER_MODEL}"
            )
        return groups


def read_awq(fields: Mapping[str, Any]) -> Qweight:
    """Read `quantization_config`. Raises CheckpointError for settings that are not supported."""
    config = QuantizationConfig(fields, AWQ)
    config.refuse("dynamic", "adapter", "rotation")
    for name in ("version", "format", "checkpoint_format"):  # the first is AutoAWQ's, the others GPTQModel's
        config.one_of(name, "gemm")
    return Qweight(AWQ, config.bits("bits", (4,)), config.group_size(), config.listed("modules_to_not_convert"))


def read_gptq(fields: Mapping[str, Any]) -> Qweight:
    """Read `quantization_config`. Raises CheckpointError for settings that are not supported."""
    config = QuantizationConfig(fields, GPTQ)
    config.refuse("dynamic", "adapter", "rotation", "is_marlin_format")
    config.one_of("pack_dtype", "int32")
    formats = {config.one_of(name, V1, V2) for name in ("checkpoint_format", "format") if name in fields}
    if len(formats) > 1:
        raise CheckpointError("config.json: checkpoint_format and format of gptq differ: download it again")
    bits, order = config.bits("bits", (4, 8)), switch(fields, "desc_act")
    return Qweight(GPTQ, bits, config.group_size(), order=order, less_one=formats != {V2})
