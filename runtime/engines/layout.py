"""Tensors of a pass in one block of memory, so that one copy moves all of them to or from a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...models import bindings
from ...models.bindings import Binding
from ...models.errors import EngineError
from .base import EngineSpec, TokenBatch

ALIGNMENT = 256  # bytes; cudaMalloc guarantees this alignment, and TensorRT requires it


class PassShape(NamedTuple):
    """The sizes that determine the buffers of a pass: rows, columns of the mask, and rows with an output."""

    width: int
    columns: int
    outputs: int

    @classmethod
    def of(cls, batch: TokenBatch, limit: int) -> PassShape:
        """The shape of the pass for a batch. limit: the most columns that a mask can have."""
        width, seen = batch.mask.shape
        return cls(width, mask_columns(width, seen, limit), len(batch.output_rows))


def mask_columns(width: int, seen: int, limit: int) -> int:
    """Columns of the mask of a pass of `width` rows that attend to `seen` speculative slots: the width, doubled until
    it reaches `seen`, and at most `limit`. A draft that appends several passes then needs few shapes. Masked columns
    cost almost nothing."""
    columns = width
    while columns < seen:
        columns *= 2
    return max(seen, min(columns, limit))


class TensorSlice(NamedTuple):
    """The type and place of one tensor in a block. offset: in bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Layout(NamedTuple):
    """Tensors by name, each at an aligned offset, in this order, so a copy may end within the last one."""

    fields: Mapping[str, TensorSlice]
    nbytes: int

    @classmethod
    def of(cls, items: Sequence[Binding], spec: EngineSpec, shape: PassShape, capacity: int = 0) -> Layout:
        """The layout of these inputs or outputs. capacity: of the cache, for a mask over all of it."""
        axes = axis_sizes(spec, shape, capacity)
        return cls.packed({item.name: (item.dtype, tuple(axes[axis] for axis in item.shape)) for item in items})

    @classmethod
    def packed(cls, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Layout:
        """Tensors by name, with numpy's name of their type and their shape."""
        fields: dict[str, TensorSlice] = {}
        end = 0
        for name, (dtype, shape) in tensors.items():
            fields[name] = TensorSlice(np.dtype(dtype), shape, end)
            end = align(end + fields[name].nbytes)
        return cls(fields, end)

    @classmethod
    def inputs(cls, spec: EngineSpec, shape: PassShape) -> Layout:
        return cls.of(bindings.inputs(bindings.COMPACT, spec.model.reads is not None), spec, shape)

    @classmethod
    def outputs(cls, spec: EngineSpec, shape: PassShape) -> Layout:
        """The layout of the outputs. The logits are last, so a copy can leave out their padding rows."""
        return cls.of(bindings.outputs(spec.outputs), spec, shape)

    def views(self, block: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """The tensors as views of a block of `nbytes` bytes."""
        return {
            name: block[field.offset : field.offset + field.nbytes].view(field.dtype).reshape(field.shape)
            for name, field in self.fields.items()
        }

    def needed_bytes(self, rows: int, ranking_only: bool) -> int:
        """The number of bytes, from the start, that hold the results of the first `rows` output rows. With
        `ranking_only` the logits are left out if the layout has a ranking."""
        logits = self.fields[bindings.LOGITS.name]
        if ranking_only and bindings.TOP_IDS.name in self.fields:
            return logits.offset
        return logits.offset + min(rows, logits.shape[1]) * logits.shape[2] * logits.dtype.itemsize


def axis_sizes(spec: EngineSpec, shape: PassShape, capacity: int) -> dict[str, int]:
    """The sizes of the axes of a pass's tensors, by the names of `models/bindings.py`."""
    model = spec.model
    return {
        "1": 1,
        "B": 1,
        "4": 4,
        "C": capacity,
        "N": spec.max_batch,
        "T": shape.width,
        "S": shape.columns,
        "R": shape.outputs,
        "V": model.num_logits,
        "K": bindings.top_columns(model.num_logits),
        "I": model.state_inputs,
        "O": model.state_size,
    }


def check_growth(spec: EngineSpec, capacity: int) -> None:
    """Raises EngineError when a static cache should grow to more than the engine's `capacity` slots. A static cache has
    a fixed size, because a CUDA graph holds its addresses and a TensorRT plan its shape."""
    if capacity > spec.capacity:
        raise EngineError(
            f"the {spec.role} engine's caches have {spec.capacity} slots and cannot grow to {capacity}: "
            "run fewer requests at a time, or rebuild with a larger --max-length"
        )


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
