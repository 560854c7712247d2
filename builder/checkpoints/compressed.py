"""Matrices as compressed-tensors (the format of vLLM's llm-compressor) stores them: integers and float8.

pack-quantized: weight_packed: int32 [out, in * bits / 32], packed along the inputs. A value v is stored as
v + 2^(bits-1). weight_shape: int64 [2]. weight_zero_point: int32 [out * bits / 32, groups], packed along the outputs.
int-quantized, float-quantized and naive-quantized: weight: int8 or float8_e4m3fn [out, in]. weight_zero_point: int8.
All: weight_scale: [out, groups], [1], or one for each block. weight_g_idx: int32 [in], the group of each input.
weight[o, i] = weight_scale[o, g] * (value[o, i] - weight_zero_point[o, g]).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...models.errors import CheckpointError
from ...models.fields import brief, switch
from .packed import (
    SCALES,
    WORD,
    check_index,
    dequantised,
    in_order,
    listed_modules,
    number_of_bits,
    one_of,
    refuse_set,
    require,
    size_of_group,
    unpacked,
)
from .safetensors import FLOAT8
from .source import TensorSource

METHOD = "compressed-tensors"
PACKED, MIXED = "pack-quantized", "mixed-precision"
FORMATS = (PACKED, "int-quantized", "float-quantized", "naive-quantized", MIXED)
STATUSES = ("compressed", "frozen")  # older releases write the second one
INT, FLOAT = "int", "float"
TENSOR, CHANNEL, GROUP, BLOCK = "tensor", "channel", "group", "block"
BITS = {INT: (4, 8), FLOAT: (8,)}
MOST_GROUPS = 64  # entries of config_groups
MOST_BLOCK = 1 << 20  # rows or columns of a block that shares a scale


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the matrices of one config group are stored. packed: whether values are packed into 32-bit words. symmetric:
    whether there are no zero points. block: rows and columns that share a scale; -1 columns are a whole row."""

    packed: bool
    kind: str  # INT | FLOAT
    bits: int
    symmetric: bool
    strategy: str
    block: tuple[int, int]

    @classmethod
    def read(cls, group: Mapping[str, Any], form: str) -> Scheme:
        """Read one entry of `config_groups`. form: the format of an entry that names none. Raises CheckpointError for
        settings that are not supported."""
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise CheckpointError(
                f"config.json: {METHOD} with a config group without weights, {brief(weights)}, is not supported; use a "
                "checkpoint whose weights are quantised, or the unquantised one"
            )
        form = one_of({"format": group.get("format") or form}, "format", METHOD, FORMATS)
        kind = one_of(weights, "type", METHOD, (INT, FLOAT))
        bits = number_of_bits({"num_bits": 8} | weights, "num_bits", f"{METHOD} of type {kind}", BITS[kind])
        strategy = strategy_of(weights)
        if form == PACKED and (kind == FLOAT or strategy in (TENSOR, BLOCK)):
            raise CheckpointError(f"config.json: {PACKED} holds no weights of type {kind} with strategy {strategy}")
        block = (1, size_of_group(weights)) if strategy == GROUP else (1, -1)
        if strategy == BLOCK:
            block = size_of_block(weights.get("block_structure"))
        symmetric = weights.get("symmetric") is None or switch(weights, "symmetric")
        return cls(form == PACKED, kind, bits, symmetric, strategy, block)

    @property
    def name(self) -> str:
        return f"{self.kind}{self.bits} by {self.strategy}"

    def scale_shapes(self, outputs: int, inputs: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that weight_scale may have; empty when the inputs do not divide into groups."""
        rows, columns = self.block
        if self.strategy == TENSOR:
            return (1,), (), (1, 1)
        if self.strategy == BLOCK:
            return ((-(-outputs // rows), -(-inputs // columns)),)
        if columns == -1:
            return (outputs, 1), (outputs,)
        return () if inputs % columns else ((outputs, inputs // columns),)

    def fits(self, outputs: int, inputs: int, source: TensorSource, module: str) -> bool:
        """Whether a module's tensors have the dtypes and shapes of this scheme."""
        kind = "I32" if self.packed else "I8" if self.kind == INT else FLOAT8
        stored, scale = (source.stored(f"{module}.{name}") for name in (self.values, "weight_scale"))
        if stored is None or scale is None or stored.dtype != kind:
            return False
        columns = -(-inputs * self.bits // WORD) if self.packed else inputs
        if stored.shape != (outputs, columns) or scale.shape not in self.scale_shapes(outputs, inputs):
            return False
        zeros = source.stored(f"{module}.weight_zero_point")
        if zeros is None:
            return self.symmetric
        words = (-(-outputs * self.bits // WORD), *scale.shape[1:])
        packed = self.packed and len(scale.shape) == 2 and zeros[:2] == (words, "I32")
        return self.kind == INT and (packed or zeros[:2] == (scale.shape, "I8"))

    @property
    def values(self) -> str:
        """Name of the tensor that holds a module's values."""
        return "weight_packed" if self.packed else "weight"


@dataclass(frozen=True, slots=True)
class Compressed:
    """The Layout of compressed-tensors. schemes: those of the config groups, each once."""

    schemes: tuple[Scheme, ...]
    listed: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Compressed:
        """Read `quantization_config`. Raises CheckpointError for settings that are not supported."""
        refuse_set(config, METHOD, ("transform_config", "moe_sparsity_config"))
        sparsity = config.get("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise CheckpointError(f"config.json: {METHOD} with sparsity_config is not supported; 'dense' is")
        one_of(config, "quantization_status", METHOD, STATUSES)
        form = one_of({"format": config.get("format") or "none"}, "format", METHOD, FORMATS)
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not 0 < len(groups) <= MOST_GROUPS:
            raise CheckpointError(
                f"config.json: config_groups must be an object of 1 to {MOST_GROUPS} groups, found {brief(groups)}"
            )
        if not all(isinstance(group, dict) for group in groups.values()):
            raise CheckpointError("config.json: config_groups must hold objects; names of presets are not supported")
        schemes = tuple(dict.fromkeys(Scheme.read(group, form) for group in groups.values()))
        return cls(schemes, listed_modules(config, "ignore"), tuple(left_out(config, groups)))

    @property
    def name(self) -> str:
        return f"{METHOD}, {' and '.join(scheme.name for scheme in self.schemes)}"

    def shape(self, source: TensorSource, module: str) -> tuple[int, int] | None:
        if source.stored(f"{module}.weight_packed") is not None:
            shape = self._packed_shape(source, module)
        elif source.stored(f"{module}.weight_scale") is not None:
            outputs, inputs = require(source, f"{module}.weight", ("I8", FLOAT8))
            shape = outputs, inputs
        else:
            return None
        self._scheme(source, module, *shape)
        require(source, f"{module}.weight_scale", SCALES, source_shape(source, f"{module}.weight_scale"))
        if source.stored(f"{module}.weight_g_idx") is not None:
            require(source, f"{module}.weight_g_idx", ("I32",), (shape[1],))
        return shape

    def weight(self, source: TensorSource, module: str) -> NDArray[np.float32]:
        shape = self.shape(source, module)
        assert shape is not None
        outputs, inputs = shape
        scheme = self._scheme(source, module, outputs, inputs)
        values = source.tensor(f"{module}.{scheme.values}")
        if scheme.packed:
            values = signed(values, scheme.bits)[:, :inputs]
        scales = source.tensor(f"{module}.weight_scale")
        zeros: NDArray[Any] | int = 0
        if source.stored(f"{module}.weight_zero_point") is not None:
            zeros = source.tensor(f"{module}.weight_zero_point")
            if zeros.dtype == np.int32:
                zeros = signed(zeros.T, scheme.bits).T[:outputs]
            zeros = by_group(zeros, scheme, outputs)
        index = self._index(source, module, scheme, inputs)
        return dequantised(values, by_group(scales, scheme, outputs), zeros, index)

    def _packed_shape(self, source: TensorSource, module: str) -> tuple[int, int]:
        """[out, in] as the tensor weight_shape says. This tensor has to be read: no header says it."""
        name = f"{module}.weight_shape"
        require(source, name, ("I64", "I32"), (2,))
        outputs, inputs = (int(size) for size in source.tensor(name))
        words = require(source, f"{module}.weight_packed", ("I32",))
        if outputs != words[0] or not 0 < inputs <= words[1] * WORD:
            raise CheckpointError(f"tensor {name} says {outputs} x {inputs}, but its words are {words}: it is damaged")
        return outputs, inputs

    def _scheme(self, source: TensorSource, module: str, outputs: int, inputs: int) -> Scheme:
        """The first scheme that fits a module's tensors. All schemes that fit give the same numbers. Raises
        CheckpointError when none fits."""
        for scheme in self.schemes:
            if scheme.fits(outputs, inputs, source, module):
                return scheme
        names = ("weight_packed", "weight", "weight_scale", "weight_zero_point")
        stored = {name: source.stored(f"{module}.{name}") for name in names}
        found = ", ".join(f"{name} {each.dtype} {each.shape}" for name, each in stored.items() if each is not None)
        raise CheckpointError(
            f"{module} has {found}, which is not {self.name}, as config.json has it: "
            "the two files belong to different models, download both again"
        )

    def _index(self, source: TensorSource, module: str, scheme: Scheme, inputs: int) -> NDArray[Any]:
        name, size = f"{module}.weight_g_idx", scheme.block[1]
        if source.stored(name) is None:
            return in_order(inputs, size)
        return check_index(name, source.tensor(name), 1 if size == -1 else -(-inputs // size))


def by_group(numbers: NDArray[Any], scheme: Scheme, outputs: int) -> NDArray[Any]:
    """Expand scales or zero points from their stored shape to [out, groups]."""
    if scheme.strategy == TENSOR:
        return np.broadcast_to(numbers.reshape(1, 1), (outputs, 1))
    if scheme.strategy == BLOCK:
        return numbers.repeat(min(scheme.block[0], outputs), axis=0)[:outputs]
    return numbers.reshape(outputs, -1)


def signed(words: NDArray[Any], bits: int) -> NDArray[np.int16]:
    """Unpack int32 [rows, words] into int16 [rows, words * 32 / bits], whose least value is -2^(bits-1)."""
    return unpacked(words, bits).astype(np.int16) - (1 << (bits - 1))


def source_shape(source: TensorSource, name: str) -> tuple[int, ...]:
    """The shape of a tensor that exists."""
    stored = source.stored(name)
    assert stored is not None
    return stored.shape


def strategy_of(weights: Mapping[str, Any]) -> str:
    """The field `strategy`; without it, the strategy that the group size implies. Raises CheckpointError."""
    size = weights.get("group_size")
    implied = TENSOR if size is None else CHANNEL if size == -1 else GROUP
    name = "strategy"
    return one_of({name: weights.get(name) or implied}, name, METHOD, (TENSOR, CHANNEL, GROUP, BLOCK))


def size_of_block(block: Any) -> tuple[int, int]:
    """Rows and columns of the field `block_structure`. Raises CheckpointError."""
    whole = isinstance(block, list) and all(isinstance(size, int) and not isinstance(size, bool) for size in block)
    if not whole or len(block) != 2 or not all(1 <= size <= MOST_BLOCK for size in block):
        raise CheckpointError(
            f"config.json: block_structure must be two numbers from 1 to {MOST_BLOCK}, found {brief(block)}"
        )
    return block[0], block[1]


def left_out(config: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each rounding that the checkpoint asks for and no engine does."""
    for name in ("input_activations", "output_activations"):
        if any(group.get(name) for group in groups.values()):
            yield f"its {name.replace('_', ' ')} are not rounded as config.json asks: they are more exact"
    if config.get("kv_cache_scheme"):
        yield "its keys and values are not rounded as kv_cache_scheme in config.json asks: they are more exact"
