"""Checkpoints whose matrices are stored in a few bits: what their layouts have in common, and the TensorSource that
dequantises them. A layout is a file beside this one; `quantised.py` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...models.config import brief
from ...models.errors import CheckpointError
from .source import Stored, TensorSource

WORD = 32  # bits of the integers that values are packed into
WEIGHT = ".weight"
SCALES = ("F16", "BF16", "F32")  # dtypes of scales
MOST_GROUP = 1 << 20  # inputs that may share a scale
AT_A_TIME = 1 << 20  # numbers that are dequantised at once: they stay in a processor's cache
MOST_LISTED = 1 << 16  # modules that a config may list


class Layout(Protocol):
    """How a checkpoint stores a matrix [out, in] as several tensors of one module."""

    @property
    def name(self) -> str:
        """What people call it, with its bits."""

    @property
    def listed(self) -> tuple[str, ...]:
        """Entries of config.json for modules that are stored plainly: names, or patterns."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the checkpoint asks for beyond its weights, and is left out."""

    def shape(self, source: TensorSource, module: str) -> tuple[int, int] | None:
        """[out, in] of a module; None where it is stored plainly. Reads no weights. Raises CheckpointError unless all
        its tensors have the dtypes and shapes that belong together."""

    def weight(self, source: TensorSource, module: str) -> NDArray[np.float32]:
        """The matrix [out, in] of a module for which `shape` found one. Raises CheckpointError."""


class Dequantised:
    """A TensorSource over one with packed matrices: each is one fp32 tensor, the product that its format defines,
    rounded once."""

    def __init__(self, source: TensorSource, layout: Layout) -> None:
        self._source, self._layout = source, layout

    def stored(self, name: str) -> Stored | None:
        """Raises CheckpointError for a packed matrix whose tensors do not belong together."""
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
    """(values - zeros) * scales as fp32 [out, in].

    values: [out, in], integers or float8. scales: [out, groups]. zeros: [out, groups], or one for all. index: [in], the
    group of each input. The difference is exact; so is the product of an fp16 or bf16 scale.
    """
    scales = scales.astype(np.float32, order="C")
    zeros = np.broadcast_to(np.asarray(zeros, np.float32, order="C"), scales.shape)
    weight = np.empty(values.shape, np.float32)
    columns = index if scales.shape[1] > 1 else slice(1)
    rows = max(1, AT_A_TIME // values.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):  # who reads the tensor refuses infinity
        for start in range(0, len(values), rows):
            part = slice(start, start + rows)
            weight[part] = values[part]
            weight[part] -= zeros[part][:, columns]
            weight[part] *= scales[part][:, columns]
    return weight


def unpacked(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """int32 [rows, words] -> [rows, words * 32 / bits]: the lowest bits of a word are its first value. bits: 4 or 8."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    values = np.empty((len(octets), 2 * octets.shape[1]), np.uint8)
    values[:, 0::2] = octets & 15
    values[:, 1::2] = octets >> 4
    return values


def group_count(inputs: int, group_size: int) -> int:
    """Groups of a row; -1 is one group for all."""
    return 1 if group_size == -1 else -(-inputs // group_size)


def in_order(inputs: int, group_size: int) -> NDArray[np.int64]:
    """The group of each input where neighbours share one."""
    return np.arange(inputs) // (inputs if group_size == -1 else group_size)


def require(
    source: TensorSource, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...], why: str = ""
) -> tuple[int, ...]:
    """The shape of a tensor. Raises CheckpointError unless it is there, and has one of the dtypes and of the shapes.
    shapes: none for any matrix. why: what asks for them."""
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
    """The group of each input. Raises CheckpointError for groups that are not there."""
    if index.size and not 0 <= index.min() <= index.max() < groups:
        raise CheckpointError(
            f"tensor {name} names groups {index.min()} to {index.max()} of {groups}; the checkpoint is damaged"
        )
    return index


def number_of_bits(config: Mapping[str, Any], name: str, method: str, read: tuple[int, ...]) -> int:
    bits = config.get(name)
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in read:
        raise CheckpointError(
            f"config.json: {method} with {name} {brief(bits)} is not supported; {' and '.join(map(str, read))} bits "
            "are: use such a checkpoint, or the unquantised one"
        )
    return bits


def size_of_group(config: Mapping[str, Any]) -> int:
    """Inputs that share a scale; -1 is all of a row."""
    size = config.get("group_size")
    if isinstance(size, bool) or not isinstance(size, int) or not (size == -1 or 1 <= size <= MOST_GROUP):
        raise CheckpointError(
            f"config.json: group_size must be -1 or a whole number from 1 to {MOST_GROUP}, found {brief(size)}"
        )
    return size


def listed_modules(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of modules; absent and null mean none."""
    listed = [] if config.get(name) is None else config[name]
    if not isinstance(listed, list) or len(listed) > MOST_LISTED or not all(isinstance(each, str) for each in listed):
        raise CheckpointError(f"config.json: {name} must be a list of names of modules, found {brief(listed)}")
    return tuple(listed)


def one_of(config: Mapping[str, Any], name: str, method: str, read: tuple[str, ...]) -> str:
    """A field whose default is the first of `read`; upper case is as good."""
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
