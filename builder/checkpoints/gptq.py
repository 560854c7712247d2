"""Matrices as AutoGPTQ and GPTQModel store them (their `qlinear` modules; checkpoint formats gptq and gptq_v2).

qweight: int32 [in * bits / 32, out], packed along the inputs. qzeros: int32 [groups, out * bits / 32]. scales:
[groups, out]. g_idx: int32 [in], the group of each input. weight[o, i] = scales[g, o] * (qweight[i, o] - qzeros[g, o]).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

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

METHOD = "gptq"
V1, V2 = "gptq", "gptq_v2"


@dataclass(frozen=True, slots=True)
class Gptq:
    """The Layout of GPTQ."""

    bits: int
    group_size: int  # inputs that share a scale; -1: all inputs of a row
    order: bool  # `desc_act`: inputs were sorted by their activations, so that only g_idx says their groups
    less_one: bool  # zero points are stored minus one, as in format v1
    listed: tuple[str, ...] = ()  # always empty: these settings list no plain modules
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Gptq:
        """Read `quantization_config`. Raises CheckpointError for settings that are not supported."""
        config = QuantizationConfig(fields, METHOD)
        config.refuse("dynamic", "adapter", "rotation", "is_marlin_format")
        config.one_of("pack_dtype", "int32")
        formats = {config.one_of(name, V1, V2) for name in ("checkpoint_format", "format") if name in fields}
        if len(formats) > 1:
            raise CheckpointError("config.json: checkpoint_format and format of gptq differ: download it again")
        return cls(config.bits("bits", (4, 8)), config.group_size(), switch(fields, "desc_act"), formats != {V2})

    @property
    def name(self) -> str:
        return f"{METHOD} of {self.bits} bits"

    def shape(self, source: TensorSource, module: str) -> tuple[int, int] | None:
        if source.stored(f"{module}.qweight") is None:
            return None
        rows, outputs = require(source, f"{module}.qweight", ("I32",))
        inputs = rows * (WORD // self.bits)
        groups, why = group_count(inputs, self.group_size), f" with group_size {self.group_size}"
        require(source, f"{module}.scales", SCALES, (groups, outputs), why=why)
        if outputs * self.bits % WORD:
            raise CheckpointError(f"{module}: {outputs} outputs of {self.bits} bits do not fill 32-bit words")
        require(source, f"{module}.qzeros", ("I32",), (groups, outputs * self.bits // WORD), why=why)
        if self.order or source.stored(f"{module}.g_idx") is not None:
            require(source, f"{module}.g_idx", ("I32",), (inputs,))
        return outputs, inputs

    def matrix(self, source: TensorSource, module: str) -> PackedMatrix:
        words = source.tensor(f"{module}.qzeros").view(np.uint32)
        if self.less_one:
            # GPTQModel subtracts the ones from whole words, so a zero point of 0 borrows from the next one. Adding
            # the ones to whole words, with carry, is the inverse.
            words = words + np.uint32(sum(1 << shift for shift in range(0, WORD, self.bits)))
        values = unpacked(source.tensor(f"{module}.qweight").T, self.bits)
        name, inputs = f"{module}.g_idx", values.shape[1]
        index = read_index(source, name, inputs, self.group_size)
        if not self.order and not np.array_equal(index, in_order(inputs, self.group_size)):
            raise CheckpointError(
                f"tensor {name} reorders inputs, and desc_act in config.json says that nothing does: {OTHER_MODEL}"
            )
        return PackedMatrix(values, source.tensor(f"{module}.scales").T, unpacked(words, self.bits).T, index)
