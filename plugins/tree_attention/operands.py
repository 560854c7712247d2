"""The operands of one launch, and their conversion to the arguments of both kernels for every launcher."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from .plan import LaunchPlan

ATTENTION, COMBINE = "tree_attention", "combine_splits"  # the functions of kernel.py
Strides = tuple[int, int]  # of the axes head and row, in elements; the head dimension is contiguous


class Operands(NamedTuple):
    """Addresses of the tensors of one call; key, value, sequences and tree_mask are contiguous.

    All but sequences and tree_mask are 16-byte aligned. workspace: at least `LaunchPlan.workspace_bytes`, 0 for none.
    """

    query: int
    key: int
    value: int
    sequences: int
    tree_mask: int
    output: int
    workspace: int
    query_strides: Strides
    output_strides: Strides


class Launcher(Protocol):
    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors of its device, for `plan_launch`."""

    def launch(self, plan: LaunchPlan, operands: Operands, scale: float, stream: int) -> None:
        """Enqueue one call and return before it has run. stream: a CUstream. Raises RuntimeError for CUDA errors."""


class Pointer:
    """An address with a dtype by Triton's name: the only properties of a tensor that Triton uses."""

    def __init__(self, address: int, dtype: str) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address


Argument = Pointer | int | float


class Arguments(NamedTuple):
    """Run-time arguments of both kernels, in the order of their parameters."""

    attention: tuple[Argument, ...]
    combine: tuple[Argument, ...]


def arguments(plan: LaunchPlan, operands: Operands, scale: float) -> Arguments:
    """The kernels' arguments; the workspace is divided into `partial`, `logsum` and `live` only here."""
    shape, dtype = plan.shape, plan.variant.dtype
    partial = Pointer(operands.workspace, "fp32")
    counted = operands.workspace + plan.partial_bytes + plan.logsum_bytes
    logsum = Pointer(operands.workspace + plan.partial_bytes, "fp32") if operands.workspace else partial
    live = Pointer(counted if operands.workspace else 0, "i32")
    output = Pointer(operands.output, dtype)
    attention: tuple[Argument, ...] = (
        Pointer(operands.query, dtype),
        Pointer(operands.key, dtype),
        Pointer(operands.value, dtype),
        Pointer(operands.sequences, "i32"),
        Pointer(operands.tree_mask, "u8"),
        output,
        partial,
        logsum,
        live,
        scale * math.log2(math.e),
        shape.capacity,
        shape.kv_heads,
        shape.rows,
        shape.columns,
        plan.num_splits,
        *operands.query_strides,
        *operands.output_strides,
    )
    return Arguments(attention, (partial, logsum, live, output, plan.num_splits, *operands.output_strides))
