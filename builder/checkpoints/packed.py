"""Quantised checkpoints: what their layouts have in common, and the TensorSource that dequantises their matrices. Each
layout is a file in this folder; `quantised.py` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...models.errors import CheckpointError
from ...models.fields import brief
from .source import Stored, TensorSource

WORD = 32  # bits of the integers that values are packed into
WEIGHT = ".weight"
SCALES = ("F16", "BF16", "F32")  # dtypes of scales
MOST_GROUP = 1 << 20  # inputs that may share a scale
AT_A_TIME = 1 << 20  # numbers that are dequantised together; they fit the processor's cache
MOST_LISTED = 1 << 16  # modules that a config may list


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

    def weight(self, source: TensorSource, module: str) -> NDArray[np.float32]:
        """The dequantised matrix [out, in] of a module whose `shape` is not None. Raises CheckpointError."""


class Dequantised:
    """A TensorSource over one with quantised matrices. Each matrix becomes one fp32 tensor, computed as its format
    defines and rounded once."""

    def __init__(self, source: TensorSource, layout: Layout) -> None:
        self._source, self._layout = source, layout

    def stored(self, name: str) -> Stored | None:
        """See TensorSource.stored. Raises CheckpointError for a quantised matrix whose tensors contradict each
        other."""
        module = name.removesuffix(WEIGHT)
        shape = self._layout.shape(self._source, module) if name.endswith(WEIGHT) else None
        if shape is None:
            return self._source.stored(name)
        plain = self._source.stored(name)
        if plain is not None and plain.is_read:
            raise CheckpointError(f"{module} is stored twice, packed and as {plain.dtype}: download it again")
        if module in self._layout.listed:
            raise CheckpointError(
                f"{module} is packed, and quantization_config in config.json lists it among the modules that are not: "
                "the two files belong to different models, download both again"
            )
        return Stored(shape, self._layout.name)

    def tensor(self, name: str) -> NDArray[Any]:
        module = name.removesuffix(WEIGHT)
        if name.endswith(WEIGHT) and self._layout.shape(self._source, module) is not None:
            return self._layout.weight(self._source, module)
        return self._source.tensor(name)


def dequantised(
    values: NDArray[Any], scales: NDArray[Any], zeros: NDArray[Any] | int, index: NDArray[Any]
) -> NDArray[np.float32]:
    """Compute (values - zeros) * scales, fp32 [out, in].

    values: [out, in], integers or float8. scales: [out, groups]. zeros: [out, groups], or one for all. index: [in], the
    group of each input. The difference is exact. The product is exact, too, for scales in fp16 and bf16.
    """
    scales = scales.astype(np.float32, order="C")
    zeros = np.broadcast_to(np.asarray(zeros, np.float32, order="C"), scales.shape)
    weight = np.empty(values.shape, np.float32)
    columns = index if scales.shape[1] > 1 else slice(1)
    rows = max(1, AT_A_TIME // values.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):  # Checkpoint.tensor refuses infinity
        for start in range(0, len(values), rows):
            part = slice(start, start + rows)
            weight[part] = values[part]
            weight[part] -= zeros[part][:, columns]
            weight[part] *= scales[part][:, columns]
    return weight


def unpacked(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Unpack int32 [rows, words] into uint8 [rows, words * 32 / bits]. A word's lowest bits are its first value. bits:
    4 or 8."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    values = np.empty((len(octets), 2 * octets.shape[1]), np.uint8)
    values[:, 0::2] = octets & 15
    values[:, 1::2] = octets >> 4
    return values


def group_count(inputs: int, group_size: int) -> int:
    """Number of groups in a row. group_size: -1 is one group for all inputs."""
    return 1 if group_size == -1 else -(-inputs // group_size)


def in_order(inputs: int, group_size: int) -> NDArray[np.int64]:
    """The group of each input, int64 [in], when consecutive inputs share a group."""
    return np.arange(inputs) // (inputs if group_size == -1 else group_size)


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


def check_index(name: str, index: NDArray[Any], groups: int) -> NDArray[Any]:
    """Return the group of each input, [in]. Raises CheckpointError for a group that does not exist."""
    if index.size and not 0 <= index.min() <= index.max() < groups:
        raise CheckpointError(
            f"tensor {name} names groups {index.min()} to {index.max()} of {groups}; the checkpoint is damaged"
        )
    return index


def number_of_bits(config: Mapping[str, Any], name: str, method: str, read: tuple[int, ...]) -> int:
    """A field that is one of the numbers of bits in `read`. Raises CheckpointError."""
    bits = config.get(name)
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in read:
        raise CheckpointError(
            f"config.json: {method} with {name} {brief(bits)} is not supported; {' and '.join(map(str, read))} bits "
            "are: use such a checkpoint, or the unquantised one"
        )
    return bits


def size_of_group(config: Mapping[str, Any]) -> int:
    """The field `group_size`: inputs that share a scale; -1 is all inputs of a row. Raises CheckpointError."""
    size = config.get("group_size")
    if isinstance(size, bool) or not isinstance(size, int) or not (size == -1 or 1 <= size <= MOST_GROUP):
        raise CheckpointError(
            f"config.json: group_size must be -1 or a whole number from 1 to {MOST_GROUP}, found {brief(size)}"
        )
    return size


def listed_modules(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A field that lists modules; absent and null mean none. Raises CheckpointError."""
    listed = [] if config.get(name) is None else config[name]
    if not isinstance(listed, list) or len(listed) > MOST_LISTED or not all(isinstance(each, str) for each in listed):
        raise CheckpointError(f"config.json: {name} must be a list of names of modules, found {brief(listed)}")
    return tuple(listed)


def one_of(config: Mapping[str, Any], name: str, method: str, read: tuple[str, ...]) -> str:
    """A field that is one of `read`, in any case of letters; the first one is the default. Raises CheckpointError."""
    value = read[0] if config.get(name) is None else config[name]
    if not isinstance(value, str) or value.lower() not in read:
        raise CheckpointError(
            f"config.json: {method} with {name} {brief(value)} is not supported; {', '.join(read)} "
            f"{'is' if len(read) == 1 else 'are'}: use such a checkpoint, or the unquantised one"
        )
    return value.lower()


def refuse_set(config: Mapping[str, Any], method: str, names: tuple[str, ...]) -> None:
    """Raises CheckpointError for fields that change what the tensors mean."""
    for name in names:
        if config.get(name):
            raise CheckpointError(f"config.json: {method} with {name} is not supported; use a checkpoint without it")
