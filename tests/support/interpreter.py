"""The attention kernel in Triton's interpreter, on host memory. Set TRITON_INTERPRET=1 before this file is imported."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from draftwood.plugins.tree_attention import kernel
from draftwood.plugins.tree_attention.launch import DTYPES
from draftwood.plugins.tree_attention.operands import Argument, Operands, Pointer, arguments
from draftwood.plugins.tree_attention.plan import LaunchPlan


class InterpreterLauncher:
    """Runs the kernel in Triton's interpreter on host memory, without a GPU. Set TRITON_INTERPRET=1 before this file is
    imported.

    bf16 is not supported: the interpreter of Triton 3.9 multiplies its bit patterns as if they were integers.
    """

    def __init__(self, multiprocessors: int = 1) -> None:
        self.multiprocessors = multiprocessors

    def launch(self, plan: LaunchPlan, operands: Operands, scale: float, stream: int) -> None:
        """See Launcher.launch; runs at once and ignores the stream. Raises ValueError for bf16."""
        if plan.variant.dtype == "bf16":
            raise ValueError("Triton's interpreter cannot multiply bf16: take fp16 or fp32")
        attention, combine = arguments(plan, operands, scale)
        kernel.tree_attention[plan.grid](*map(host_tensor, attention), **plan.variant.constants)
        if plan.num_splits > 1:
            kernel.combine_splits[plan.combine_grid](*map(host_tensor, combine), **plan.variant.combine_constants)


def host_tensor(argument: Argument) -> Tensor | int | float:
    """A torch tensor at a host address. The interpreter accepts only tensors, and uses only their address and dtype."""
    if not isinstance(argument, Pointer):
        return argument
    types = {name: dtype for dtype, name in DTYPES.items()} | {"i32": torch.int32, "u8": torch.uint8}
    dtype = types[argument.dtype]
    if not argument.address:
        return torch.empty(1, dtype=dtype)
    memory = (ctypes.c_char * dtype.itemsize).from_address(argument.address)
    return torch.frombuffer(memory, dtype=dtype)
