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
from .packed import (
    SCALES,
    dequantised,
    group_count,
    in_order,
    listed_modules,
    number_of_bits,
    one_of,
    refuse_set,
    require,
    size_of_group,
)
from .source import TensorSource

METHOD = "awq"
BITS, PER_WORD = 4, 8
PLACE = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of 8 consecutive outputs stands in their word


@dataclass(frozen=True, slots=True)
class Awq:
    """The Layout of AutoAWQ. Zero points are stored whatever the setting `zero_point` says. group_size: inputs that
    share a scale; -1: all inputs of a row."""

    group_size: int
    listed: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Awq:
        """Read `quantization_config`. Raises CheckpointError for settings that are not supported."""
        refuse_set(config, METHOD, ("dynamic", "adapter", "rotation"))
        for name in ("version", "format", "checkpoint_format"):  # the first is AutoAWQ's, the others GPTQModel's
            one_of(config, name, METHOD, ("gemm",))
        number_of_bits(config, "bits", METHOD, (BITS,))
        return cls(size_of_group(config), listed_modules(config, "modules_to_not_convert"))

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

    def weight(self, source: TensorSource, module: str) -> NDArray[np.float32]:
        values, zeros = (unpack_outputs(source.tensor(f"{module}.{name}")) for name in ("qweight", "qzeros"))
        index = in_order(values.shape[1], self.group_size)
        return dequantised(values, source.tensor(f"{module}.scales").T, zeros, index)


def unpack_outputs(words: NDArray[Any]) -> NDArray[np.uint8]:
    """Unpack int32 [rows, words] into codes of 4 bits, uint8 [outputs, rows]. The order in a word is PLACE."""
    turned = np.ascontiguousarray(words.T).view(np.uint32)
    values = np.empty((PER_WORD * len(turned), len(words)), np.uint8)
    for output, place in enumerate(PLACE):
        values[output::PER_WORD] = (turned >> np.uint32(BITS * place)) & np.uint32((1 << BITS) - 1)
    return values
