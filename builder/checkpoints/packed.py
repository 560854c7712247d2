"""Quantised checkpoints: what their layouts have in common, and the TensorSource that dequantises their matrices. Each
layout is a file in this folder; `folder.py` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...models.errors import CheckpointError
from ...models.fields import brief
from .source import Stored, TensorSource

WORD = 32  # bits of the integers that values are packed into
WEIGHT = ".weight"
SCALES = ("F16", "BF16", "F32")  # dtypes of scales
MAX_GROUP = 1 << 20  # inputs that may share a scale
AT_A_TIME = 1 << 20  # numbers that are dequantised together; they fit the processor's cache
MAX_LISTED = 1 << 16  # modules that a config may list
OTHER_MODEL = "the two files belong to different models, download both again"


class PackedMatrix(NamedTuple):
    """A matrix as every layout stores it: weight = (values - zeros) * scales, each of the group of its input."""

    values: NDArray[Any]  # [out, in], integers or float8
    scales: NDArray[Any]  # [out, groups]
    zeros: NDArray[Any]  # [out, groups], or [1, 1], one for all
    group_of: NDArray[Any]  # [in], the group of each input

    def dequantised(self) -> NDArray[np.float32]:
        """fp32 [out, in]. The difference is exact. The product is exact, too, for scales in fp16 and bf16."""
        values, scales = self.values, self.scales.astype(np.float32, order="C")
        zeros = np.broadcast_to(np.asarray(self.zeros, np.float32, order="C"), scales.shape)
        weight = np.empty(values.shape, np.float32)
        columns = self.group_of if scales.shape[1] > 1 else slice(1)
        rows = max(1, AT_A_TIME // values.shape[1])
        with np.errstate(over="ignore", invalid="ignore"):  # Checkpoint.tensor refuses infinity
            for start in range(0, len(values), rows):
                part = slice(start, start + rows)
                weight[part] = values[part]
                weight[part] -= zeros[part][:, columns]
                weight[part] *= scales[part][:, columns]
        return weight


class Layout(Protocol):
    """How a checkpoint stores a quantised matrix [out, in] as several tensors of one module."""

    @property
    def name(self) -> str:
        """The name of the format, with the bits of a weight."""

    @property
    def listed(self) -> tuple[str, ...]:
        """Modules that config.json lists as not quantised: names, or patterns."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about what the checkpoint asks for and the build leaves out."""

    def shape(self, source: TensorSource, module: str) -> tuple[int, int] | None:
        """[out, in] of a module; None when it is not quantised. Reads no weights. Raises CheckpointError when the
        dtypes and shapes of its tensors contradict each other or the settings."""

    def matrix(self, source: TensorSource, module: str) -> PackedMatrix:
        """The matrix of a module whose `shape` is not None. Raises CheckpointError."""


class Dequantised:
    """A TensorSource over one with quantised matrices, which become fp32, computed as defined and rounded once."""

    def __init__(self, source: TensorSource, layout: Layout) -> None:
        self._source, self._layout = source, layout

    def stored(self, name: str) -> Stored | None:
        """Raises CheckpointError for a quantised matrix whose tensors contradict each other."""
        module, plain = name.removesuffix(WEIGHT), self._source.stored(name)
        shape = self._layout.shape(self._source, module) if name.endswith(WEIGHT) else None
        if shape is None:
            return plain
        if plain is not None and plain.is_read:
            raise CheckpointError(f"{module} is stored twice, packed and as {plain.dtype}: download it again")
        if module in self._layout.listed:
            raise CheckpointError(
                f"{module} is packed, and quantization_config in config.json lists it among the modules that are not: "
                f"{OTHER_MODEL}"
            )
        return Stored(shape, self._layout.name)

    def tensor(self, name: str) -> NDArray[Any]:
        module = name.removesuffix(WEIGHT)
        if name.endswith(WEIGHT) and self._layout.shape(self._source, module) is not None:
            return self._layout.matrix(self._source, module).dequantised()
        return self._source.tensor(name)


def unpacked(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """int32 [rows, words] -> uint8 [rows, words * 32 / bits], a word's lowest bits first. bits: 4 or 8."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    return octets if bits == 8 else np.stack((octets & 15, octets >> 4), -1).reshape(len(octets), -1)


def group_count(inputs: int, group_size: int) -> int:
    """Number of groups in a row. group_size: -1 is one group for all inputs."""
    return 1 if group_size == -1 else -(-inputs // group_size)


def in_order(inputs: int, group_size: int) -> NDArray[np.int64]:
    """The group of each input, int64 [in], when consecutive inputs share a group."""
    return np.arange(inputs) // (inputs if group_size == -1 else group_size)


def read_index(source: TensorSource, name: str, inputs: int, group_size: int) -> NDArray[Any]:
    """The group of each input, [in], by the tensor `name`; consecutive inputs share a group where there is none. Raises
    CheckpointError for a group that does not exist."""
    if source.stored(name) is None:
        return in_order(inputs, group_size)
    index, groups = source.tensor(name), group_count(inputs, group_size)
    if index.size and not 0 <= index.min() <= index.max() < groups:
        raise CheckpointError(
            f"tensor {name} names groups {index.min()} to {index.max()} of {groups}; the checkpoint is damaged"
        )
    return index


def require(
    source: TensorSource, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...], why: str = ""
) -> tuple[int, ...]:
    """The shape of a tensor. Raises CheckpointError unless the tensor exists and has one of the dtypes and one of the
    shapes. shapes: none allow any matrix. why: what requires the shapes, for the error."""
    found = source.stored(name)
    if found is None:
        raise CheckpointError(f"tensor {name} is missing; the checkpoint is incomplete")
    if found.dtype not in dtypes:
        raise CheckpointError(f"tensor {name} is {found.dtype} and should be {' or '.join(dtypes)}: download it again")
    right = found.shape in shapes if shapes else len(found.shape) == 2 and min(found.shape) > 0
    if not right:
        wanted = " or ".join(map(str, shapes)) or "of two dimensions"
        raise CheckpointError(
            f"tensor {name} has shape {brief(str(found.shape))}, and should be {wanted}{why}: config.json and the "
            "weights belong to different models, download both again"
        )
    return found.shape


class QuantizationConfig(NamedTuple):
    """Settings of a quantised checkpoint. Each method raises CheckpointError for a value that is not supported."""

    fields: Mapping[str, Any]
    method: str  # as error messages call it

    def bits(self, name: str, read: tuple[int, ...]) -> int:
        """A field that is one of the numbers of bits in `read`."""
        bits = self.fields.get(name)
        if isinstance(bits, bool) or not isinstance(bits, int) or bits not in read:
            raise self._refused(name, bits, f"{' and '.join(map(str, read))} bits are")
        return bits

    def one_of(self, name: str, *read: str) -> str:
        """A field that is one of `read`, in any case of letters; the first one is the default."""
        value = read[0] if self.fields.get(name) is None else self.fields[name]
        if not isinstance(value, str) or value.lower() not in read:
            raise self._refused(name, value, f"{', '.join(read)} {'is' if len(read) == 1 else 'are'}")
        return value.lower()

    def group_size(self) -> int:
        """Inputs that share a scale; -1 is all inputs of a row."""
        size = self.fields.get("group_size")
        if isinstance(size, bool) or not isinstance(size, int) or not (size == -1 or 1 <= size <= MAX_GROUP):
            raise CheckpointError(
                f"config.json: group_size must be -1 or a whole number from 1 to {MAX_GROUP}, found {brief(size)}"
            )
        return size

    def listed(self, name: str) -> tuple[str, ...]:
        """A field that lists modules; absent and null mean none."""
        listed = [] if self.fields.get(name) is None else self.fields[name]
        if not isinstance(listed, list) or len(listed) > MAX_LISTED or not all(isinstance(x, str) for x in listed):
            raise CheckpointError(f"config.json: {name} must be a list of names of modules, found {brief(listed)}")
        return tuple(listed)

    def refuse(self, *names: str) -> None:
        """Refuse fields that change what the tensors mean."""
        for name in names:
            if self.fields.get(name):
                raise CheckpointError(
                    f"config.json: {self.method} with {name} is not supported; use a checkpoint without it"
                )

    def _refused(self, name: str, value: Any, supported: str) -> CheckpointError:
        return CheckpointError(
            f"config.json: {self.method} with {name} {brief(value)} is not supported; {supported}: use such a "
            "checkpoint, or the unquantised one"
        )
