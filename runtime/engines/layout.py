"""Tensors of a pass packed into one block of memory, so that they cross to a device, or back, in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...models import bindings
from ...models.bindings import Binding
from ...models.errors import EngineError
from .base import EngineSpec, TokenBatch

ALIGNMENT = 256  # bytes; what cudaMalloc guarantees, and TensorRT expects of an address


class PassShape(NamedTuple):
    """What the buffers of a pass depend on: its rows, the columns of its mask, and how many rows are scored."""

    width: int
    columns: int
    outputs: int

    @classmethod
    def of(cls, batch: TokenBatch, limit: int) -> PassShape:
        """The shape that runs a batch."""
        width, seen = batch.mask.shape
        return cls(width, mask_columns(width, seen, limit), len(batch.output_rows))


def mask_columns(width: int, seen: int, limit: int) -> int:
    """Columns of the mask of a pass of `width` rows that see `seen` speculative slots: the width doubled until it
    reaches them, or `limit`. A draft that appends pass after pass then needs few shapes, and masked columns cost almost
    nothing."""
    columns = width
    while columns < seen:
        columns *= 2
    return max(seen, min(columns, limit))


class TensorSlice(NamedTuple):
    """Where one tensor lies in its block."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Layout(NamedTuple):
    """Tensors by name, each at an aligned offset; in order, so that a copy may stop inside the last one."""

    fields: Mapping[str, TensorSlice]
    nbytes: int

    @classmethod
    def of(cls, items: Sequence[Binding], spec: EngineSpec, shape: PassShape) -> Layout:
        model = spec.model
        axes = {
            "B": 1,
            "4": 4,
            "N": spec.max_batch,
            "T": shape.width,
            "S": shape.columns,
            "R": shape.outputs,
            "V": model.vocab_size,
            "K": bindings.top_columns(model.vocab_size),
        }
        fields: dict[str, TensorSlice] = {}
        end = 0
        for item in items:
            field = TensorSlice(np.dtype(item.dtype), tuple(axes[axis] for axis in item.shape), end)
            fields[item.name] = field
            end = align(end + field.nbytes)
        return cls(fields, end)

    @classmethod
    def inputs(cls, spec: EngineSpec, shape: PassShape) -> Layout:
        return cls.of(bindings.inputs(bindings.COMPACT), spec, shape)

    @classmethod
    def outputs(cls, spec: EngineSpec, shape: PassShape) -> Layout:
        """The logits come last: padding rows at their end need not be copied."""
        return cls.of(bindings.outputs(spec.outputs), spec, shape)

    def views(self, block: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """The tensors in a block of `nbytes` bytes; they share its memory."""
        return {
            name: block[field.offset : field.offset + field.nbytes].view(field.dtype).reshape(field.shape)
            for name, field in self.fields.items()
        }

    def needed_bytes(self, rows: int, ranking_only: bool) -> int:
        """Bytes from the start that hold everything about the first `rows` scored rows, or all but their logits."""
        logits = self.fields[bindings.LOGITS.name]
        if ranking_only and bindings.TOP_IDS.name in self.fields:
            return logits.offset
        return logits.offset + min(rows, logits.shape[1]) * logits.shape[2] * logits.dtype.itemsize


def check_growth(spec: EngineSpec, capacity: int) -> None:
    """A graph holds addresses and a plan sizes: a static cache has all its slots at once, and never more. Raises
    EngineError when more are asked for."""
    if capacity > spec.capacity:
        raise EngineError(
            f"the {spec.role} engine's caches have {spec.capacity} slots and cannot grow to {capacity}: "
            "run fewer requests at a time, or rebuild with a larger --max-length"
        )


def align(nbytes: int) -> int:
    """The next size at which something else may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
