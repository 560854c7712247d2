"""Runs the project's kernels by the executor: calls of tree attention."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from attention import SCALE, Case
from numpy.typing import NDArray

from draftwood.plugins.tree_attention.operands import ATTENTION, COMBINE, Argument, Operands, Pointer, arguments
from draftwood.plugins.tree_attention.plan import Variant, plan_launch

from .execution import Launch
from .grid import parameter_bytes, run_grid
from .images import Image, attention_image
from .memory import GlobalMemory

Images = Callable[[str, Variant], Image]


class Answer(NamedTuple):
    """output [1, H, T, D] fp32; read: which bytes of keys and of values were read, each [H_kv, C, D * item];
    split_traffic: bytes of the workspace that were written, and those that were read."""

    output: NDArray[np.float32]
    read: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    split_traffic: int


def for_capability(capability: int, portable: bool = False) -> Images:
    """The kernels of a device."""
    return lambda kernel, variant: attention_image(kernel, variant, capability, portable)


def attend(case: Case, images: Images) -> Answer:
    """One call of tree attention, as `DriverLauncher` launches it.

    Tensors are at addresses that are aligned as the contract says and no better, the mask at an odd one. The query is
    [1, H, T, D] and the output [1, T, H, D] in memory. What nobody wrote is NaN.
    """
    tensors, memory = case.tensors(), GlobalMemory(sizes(case))
    shape = tensors.shape()
    plan = plan_launch(shape, case.multiprocessors)
    query, key, value = (memory.put(name, bits(each)) for name, each in zip("qkv", tensors[:3], strict=True))
    nbytes = tensors.query.nbytes
    output = memory.reserve("the output", nbytes)
    operands = Operands(
        query,
        key,
        value,
        memory.put("the sequences", tensors.sequences.numpy(), alignment=4),
        memory.put("the tree mask", tensors.tree_mask.numpy(), alignment=1),
        output,
        memory.reserve("the workspace", plan.workspace_bytes) if plan.workspace_bytes else 0,
        (shape.rows * shape.head_dim, shape.head_dim),
        (shape.head_dim, shape.heads * shape.head_dim),
    )
    attention, combine = arguments(plan, operands, SCALE)
    launch(images(ATTENTION, plan.variant), plan.grid, attention, memory)
    if plan.num_splits > 1:
        launch(images(COMBINE, plan.variant.combined), plan.combine_grid, combine, memory)
    found = torch.from_numpy(memory.get(output, nbytes)).view(tensors.query.dtype).float().numpy()
    by_row = found.reshape(1, shape.rows, shape.heads, shape.head_dim)
    cache = shape.kv_heads, shape.capacity, -1
    read = [memory.read_bytes(address, tensors.key.nbytes).reshape(cache) for address in (key, value)]
    traffic = 0
    if plan.workspace_bytes:
        numbers = memory.get(operands.workspace, plan.workspace_bytes).view(np.uint32)
        fetched = memory.read_bytes(operands.workspace, plan.workspace_bytes)
        traffic = 4 * np.count_nonzero(numbers != np.uint32(0xFFFFFFFF)) + np.count_nonzero(fetched)
    return Answer(by_row.swapaxes(1, 2), (read[0], read[1]), traffic)


def sizes(case: Case) -> int:
    """Bytes of global memory that suffice for a case."""
    cache = 2 * case.kv_heads * case.capacity * case.head_dim
    rows = (2 + 66) * case.kv_heads * case.group * case.rows * (case.head_dim + 1)
    return 4 * (cache + rows) + case.rows * case.columns + (1 << 16)


def bits(tensor: torch.Tensor) -> NDArray[Any]:
    return tensor.contiguous().view(torch.uint8).numpy()


def launch(image: Image, grid: tuple[int, int, int], values: Sequence[Argument], memory: GlobalMemory) -> None:
    packed = [struct.pack(*as_bytes(value)) for value in (*values, Pointer(0, "u8"), Pointer(0, "u8"))]
    run_grid(
        image.program, Launch(grid, image.threads, image.shared_bytes, parameter_bytes(image.program, packed)), memory
    )


def as_bytes(value: Argument) -> tuple[str, int | float]:
    """As the driver launcher passes it: 8 bytes for an address, 4 for a number."""
    if isinstance(value, Pointer):
        return "<Q", value.address
    return ("<f", value) if isinstance(value, float) else ("<i", value)
