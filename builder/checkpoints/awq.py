"""Matrices as AutoAWQ's WQLinear_GEMM stores them.

qweight: int32 [in, out / 8], packed along the outputs in the order PLACE. qzeros: int32 [groups, out / 8] likewise.
scales: [groups, out]. weight[o, i] = scales[g, o] * (qweight[i, o] - qzeros[g, o]).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.errors import CheckpointError
from .packed import SCALES, PackedMatrix, QuantizationConfig, group_count, in_order, require, unpacked
from .source import TensorSource

METHOD = "awq"
BITS, PER_WORD = 4, 8
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of 8 consecutive outputs stands in their word


@dataclass(frozen=True, slots=True)
class Awq:
    """The Layout of AutoAWQ. Zero points are stored whatever the setting `zero_point` says."""

    group_size: int  # inputs that share a scale; -1: all inputs of a row
    listed: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Awq:
        """Read `quantization_config`. Raises CheckpointError for settings that are not supported."""
        config = QuantizationConfig(fields, METHOD)
        config.refuse("dynamic", "adapter", "rotation")
        for name in ("version", "format", "checkpoint_format"):  # the first is AutoAWQ's, the others GPTQModel's
            config.one_of(name, "gemm")
        config.bits("bits", (BITS,))
        return cls(config.group_size(), config.listed("modules_to_not_convert"))

    @property
    def name(self) -> str:
        return f"{METHOD} of {BITS} bits"

    def shape(self, source: TensorSource, module: str) -> tuple[int, int] | None:
        if source.stored(f"{module}.qweight") is None:
            return None
        inputs, words = require(source, f"{module}.qweight", ("I32",))
        if self.group_size != -1 and inputs % self.group_size:
            raise CheckpointError(f"{module}: {inputs} inputs do not divide into groups of {self.group_size}")
        groups, why = group_count(inputs, self.group_size), f" with group_size {self.group_size}"
        require(source, f"{module}.qzeros", ("I32",), (groups, words), why=why)
        require(source, f"{module}.scales", SCALES, (groups, words * PER_WORD), why=why)
        return words * PER_WORD, inputs

    def matrix(self, source: TensorSource, module: str) -> PackedMatrix:
        values, zeros = (outputs_of(source.tensor(f"{module}.{name}")) for name in ("qweight", "qzeros"))
        index = in_order(values.shape[1], self.group_size)
        return PackedMatrix(values, source.tensor(f"{module}.scales").T, zeros, index)


def outputs_of(words: NDArray[Any]) -> NDArray[np.uint8]:
    """Unpack int32 [rows, words] into codes of 4 bits, uint8 [outputs, rows]."""
    codes = unpacked(words, BITS).reshape(len(words), -1, PER_WORD)[..., PLACE]
    return np.ascontiguousarray(codes.reshape(len(words), -1).T)
