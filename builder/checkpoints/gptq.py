"""Matrices as AutoGPTQ and GPTQModel store them (their `qlinear` modules; checkpoint formats gptq and gptq_v2).

qweight: int32 [in * bits / 32, out], packed along the inputs. qzeros: int32 [groups, out * bits / 32]. scales:
[groups, out]. g_idx: int32 [in], the group of each input. weight[o, i] = scales[g, o] * (qweight[i, o] - qzeros[g, o]).
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
    SCALES,
    WORD,
    check_index,
    dequantised,
    group_count,
    in_order,
    number_of_bits,
    one_of,
    refuse_set,
    require,
    size_of_group,
    unpacked,
)
from .source import TensorSource

METHOD = "gptq"
BITS = (4, 8)
V1, V2 = "gptq", "gptq_v2"
CHANGE_THE_TENSORS = ("dynamic", "adapter", "rotation", "is_marlin_format")


@dataclass(frozen=True, slots=True)
class Gptq:
    """The Layout of GPTQ. group_size: inputs that share a scale; -1: all inputs of a row. order: whether the inputs
    were sorted by their activations (`desc_act`), so that only g_idx says which group an input belongs to. less_one:
    whether zero points are stored minus one, as in format v1."""

    bits: int
    group_size: int
    order: bool
    less_one: bool
    listed: tuple[str, ...] = ()  # always empty: these settings list no plain modules
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Gptq:
        """Read `quantization_config`. Raises CheckpointError for settings that are not supported."""
        refuse_set(config, METHOD, CHANGE_THE_TENSORS)
        one_of(config, "pack_dtype", METHOD, ("int32",))
        formats = {one_of(config, name, METHOD, (V1, V2)) for name in ("checkpoint_format", "format") if name in config}
        if len(formats) > 1:
            raise CheckpointError("config.json: checkpoint_format and format of gptq differ: download it again")
        bits = number_of_bits(config, "bits", METHOD, BITS)
        return cls(bits, size_of_group(config), switch(config, "desc_act"), formats != {V2})

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

    def weight(self, source: TensorSource, module: str) -> NDArray[np.float32]:
        words = source.tensor(f"{module}.qzeros").view(np.uint32)
        if self.less_one:
            # GPTQModel subtracts the ones from whole words, so a zero point of 0 borrows from the next one. Adding
            # the ones to whole words, with carry, is the inverse.
            words = words + np.uint32(sum(1 << shift for shift in range(0, WORD, self.bits)))
        scales, zeros = source.tensor(f"{module}.scales").T, unpacked(words, self.bits).T
        values = unpacked(source.tensor(f"{module}.qweight").T, self.bits)
        return dequantised(values, scales, zeros, self._index(source, module, values.shape[1], scales.shape[1]))

    def _index(self, source: TensorSource, module: str, inputs: int, groups: int) -> NDArray[Any]:
        name, expected = f"{module}.g_idx", in_order(inputs, self.group_size)
        if source.stored(name) is None:
            return expected
        index = check_index(name, source.tensor(name), groups)
        if not self.order and not np.array_equal(index, expected):
            raise CheckpointError(
                f"tensor {name} reorders inputs, and desc_act in config.json says that nothing does: "
                "the two files belong to different models, download both again"
            )
        return index
