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
from .packed import OTHER_MODEL, SCALES, WORD, PackedMatrix, QuantizationConfig, read_index, require, unpacked
from .safetensors import FLOAT8
from .source import TensorSource

METHOD = "compressed-tensors"
PACKED, MIXED = "pack-quantized", "mixed-precision"
FORMATS = (PACKED, "int-quantized", "float-quantized", "naive-quantized", MIXED)
STATUSES = ("compressed", "frozen")  # older releases write the second one
INT, FLOAT = "int", "float"
TENSOR, CHANNEL, GROUP, BLOCK = "tensor", "channel", "group", "block"
BITS = {INT: (4, 8), FLOAT: (8,)}
MAX_GROUPS = 64  # entries of config_groups
MAX_BLOCK = 1 << 20  # rows or columns of a block that shares a scale


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the matrices of one config group are stored."""

    packed: bool  # into 32-bit words
    kind: str  # INT | FLOAT
    bits: int
    symmetric: bool  # there are no zero points
    strategy: str
    block: tuple[int, int]  # rows and columns that share a scale; -1 columns are a whole row

    @classmethod
    def read(cls, group: Mapping[str, Any], form: str) -> Scheme:
        """Read one entry of `config_groups`. form: the format of an entry that names none. Raises CheckpointError."""
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise CheckpointError(
                f"config.json: {METHOD} with a config group without weights, {brief(weights)}, is not supported; use a "
                "checkpoint whose weights are quantised, or the unquantised one"
            )
        size = weights.get("group_size")
        strategy = weights.get("strategy") or (TENSOR if size is None else CHANNEL if size == -1 else GROUP)
        defaults = {"num_bits": 8} | weights | {"format": group.get("format") or form, "strategy": strategy}
        config = QuantizationConfig(defaults, METHOD)
        form, kind = config.one_of("format", *FORMATS), config.one_of("type", INT, FLOAT)
        bits = config._replace(method=f"{METHOD} of type {kind}").bits("num_bits", BITS[kind])
        strategy = config.one_of("strategy", TENSOR, CHANNEL, GROUP, BLOCK)
        if form == PACKED and (kind == FLOAT or strategy in (TENSOR, BLOCK)):
            raise CheckpointError(f"config.json: {PACKED} holds no weights of type {kind} with strategy {strategy}")
        block = (1, config.group_size()) if strategy == GROUP else (1, -1)
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

    def by_group(self, numbers: NDArray[Any], outputs: int) -> NDArray[Any]:
        """Expand scales or zero points from their stored shape to [out, groups]."""
        if self.strategy == TENSOR:
            return np.broadcast_to(numbers.reshape(1, 1), (outputs, 1))
        if self.strategy == BLOCK:
            return numbers.repeat(min(self.block[0], outputs), axis=0)[:outputs]
        return numbers.reshape(outputs, -1)

    @property
    def values(self) -> str:
        """Name of the tensor that holds a module's values."""
        return "weight_packed" if self.packed else "weight"


@dataclass(frozen=True, slots=True)
class Compressed:
    schemes: tuple[Scheme, ...]  # of the config groups, each once
    listed: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Compressed:
        """Read `quantization_config`. Raises CheckpointError for settings that are not supported."""
        config = QuantizationConfig({**fields, "format": fields.get("format") or "none"}, METHOD)
        config.refuse("transform_config", "moe_sparsity_config")
        sparsity = fields.get("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise CheckpointError(f"config.json: {METHOD} with sparsity_config is not supported; 'dense' is")
        config.one_of("quantization_status", *STATUSES)
        form, groups = config.one_of("format", *FORMATS), fields.get("config_groups")
        if not isinstance(groups, dict) or not 0 < len(groups) <= MAX_GROUPS:
            raise CheckpointError(
                f"config.json: config_groups must be an object of 1 to {MAX_GROUPS} groups, found {brief(groups)}"
            )
        if not all(isinstance(group, dict) for group in groups.values()):
            raise CheckpointError("config.json: config_groups must hold objects; names of presets are not supported")
        schemes = tuple(dict.fromkeys(Scheme.read(group, form) for group in groups.values()))
        return cls(schemes, config.listed("ignore"), tuple(left_out(fields, groups)))

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
        scheme = self._scheme(source, module, *shape)
        require(source, f"{module}.weight_scale", SCALES, *scheme.scale_shapes(*shape))
        if source.stored(f"{module}.weight_g_idx") is not None:
            require(source, f"{module}.weight_g_idx", ("I32",), (shape[1],))
        return shape

    def matrix(self, source: TensorSource, module: str) -> PackedMatrix:
        shape = self.shape(source, module)
        assert shape is not None
        (outputs, inputs), scheme = shape, self._scheme(source, module, *shape)
        values, zeros = source.tensor(f"{module}.{scheme.values}"), np.zeros((1, 1), np.int16)
        if scheme.packed:
            values = signed(values, scheme.bits)[:, :inputs]
        if source.stored(f"{module}.weight_zero_point") is not None:
            zeros = source.tensor(f"{module}.weight_zero_point")
            if zeros.dtype == np.int32:
                zeros = signed(zeros.T, scheme.bits).T[:outputs]
            zeros = scheme.by_group(zeros, outputs)
        scales = scheme.by_group(source.tensor(f"{module}.weight_scale"), outputs)
        return PackedMatrix(
            values, scales, zeros, read_index(source, f"{module}.weight_g_idx", inputs, scheme.block[1])
        )

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
        """The first scheme that fits a module's tensors; all that fit give the same numbers. Raises CheckpointError."""
        for scheme in self.schemes:
            if scheme.fits(outputs, inputs, source, module):
                return scheme
        names = ("weight_packed", "weight", "weight_scale", "weight_zero_point")
        stored = {name: source.stored(f"{module}.{name}") for name in names}
        found = ", ".join(f"{name} {each.dtype} {each.shape}" for name, each in stored.items() if each is not None)
        raise CheckpointError(f"{module} has {found}, which is not {self.name}, as config.json has it: {OTHER_MODEL}")


def signed(words: NDArray[Any], bits: int) -> NDArray[np.int16]:
    """Unpack int32 [rows, words] into int16 [rows, words * 32 / bits], whose least value is -2^(bits-1)."""
    return unpacked(words, bits).astype(np.int16) - (1 << (bits - 1))


def size_of_block(block: Any) -> tuple[int, int]:
    """Rows and columns of the field `block_structure`. Raises CheckpointError."""
    whole = isinstance(block, list) and all(isinstance(size, int) and not isinstance(size, bool) for size in block)
    if not whole or len(block) != 2 or not all(1 <= size <= MAX_BLOCK for size in block):
        raise CheckpointError(
            f"config.json: block_structure must be two numbers from 1 to {MAX_BLOCK}, found {brief(block)}"
        )
    return block[0], block[1]


def left_out(config: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each rounding that the checkpoint asks for and no engine does."""
    for name in ("input_activations", "output_activations"):
        if any(group.get(name) for group in groups.values()):
            yield f"its {name.replace('_', ' ')} are not rounded as config.json asks: they are more exact"
    if config.get("kv_cache_scheme"):
        yield "its keys and values are not rounded as kv_cache_scheme in config.json asks: they are more exact"
