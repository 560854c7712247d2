"""The plugin's kernel on torch's CUDA tensors, launched by Triton."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from draftwood.plugins.tree_attention import kernel
from draftwood.plugins.tree_attention.operands import Operands, Strides, arguments
from draftwood.plugins.tree_attention.plan import COMBINE_OPTIONS, LaunchPlan, Shape, plan_launch, power_of_two

DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: Tensor, tree_mask: Tensor, scale: float
) -> Tensor:
    """Attention of tree rows over whole static caches on a GPU; shapes, dtypes and meaning as in `op.py`.

    query may have any strides whose last is 1; the other tensors are contiguous. Returns [1, H, T, D] as a view of
    [1, T, H, D], the order in which the output projection reads it. It runs on torch's current stream. It may be
    captured in a CUDA graph once a call of the same sizes has compiled the kernel; graphs captured on one stream share
    a workspace and must not run at the same time. Raises ValueError for tensors it cannot read.
    """
    tensors = (query, key, value, sequences, tree_mask)
    check(tensors)
    shape = Shape.of([tensor.shape for tensor in tensors], DTYPES[query.dtype])
    device = query.device
    launcher = torch_launcher(device)
    layout = plan_launch(shape, launcher.multiprocessors)
    stream = torch.cuda.current_stream(device).cuda_stream
    memory = workspace(power_of_two(max(1, layout.workspace_bytes)), device, stream)
    rows = (1, shape.rows, shape.heads, shape.head_dim)
    output = torch.empty(rows, dtype=query.dtype, device=device).transpose(1, 2)
    addresses = (tensor.data_ptr() for tensor in (*tensors, output, memory))
    operands = Operands._make((*addresses, strides(query), strides(output)))
    with torch.cuda.device(device):
        launcher.launch(layout, operands, scale, stream)
    return output


def check(tensors: tuple[Tensor, ...]) -> None:
    """Raises ValueError for devices, dtypes and strides that the kernel does not read."""
    query, key, value, sequences, tree_mask = tensors
    if query.device.type != "cuda" or any(tensor.device != query.device for tensor in tensors):
        devices = ", ".join(str(tensor.device) for tensor in tensors)
        raise ValueError(f"TreeAttention: all tensors must be on one CUDA device, not {devices}")
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"TreeAttention: query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; "
            f"cast them to one of {', '.join(map(str, DTYPES))}"
        )
    if sequences.dtype != torch.int32 or tree_mask.dtype != torch.bool:
        found = f"{sequences.dtype} and {tree_mask.dtype}"
        raise ValueError(f"TreeAttention: sequences and tree_mask must be int32 and bool, not {found}")
    if query.stride(-1) != 1 or not all(tensor.is_contiguous() for tensor in tensors[1:]):
        raise ValueError("TreeAttention: the caches, the sequences and the mask must be contiguous; pass whole caches")


def strides(rows: Tensor) -> Strides:
    _, head, row, _ = rows.stride()
    return head, row


@functools.cache
def torch_launcher(device: torch.device) -> TorchLauncher:
    properties = torch.cuda.get_device_properties(device)
    return TorchLauncher(10 * properties.major + properties.minor, properties.multi_processor_count)


@functools.cache
def workspace(size: int, device: torch.device, stream: int) -> Tensor:
    """Memory for the splits of all launch plans of one size class, which calls on one stream use in turn. It is never
    freed, because captured graphs contain its address."""
    return torch.empty(size, dtype=torch.uint8, device=device)


class TorchLauncher:
    """Launches by Triton's just-in-time compiler, on torch's current device."""

    def __init__(self, capability: int, multiprocessors: int) -> None:
        """capability: the device's, 90 for 9.0."""
        self._capability = capability
        self.multiprocessors = multiprocessors

    def launch(self, plan: LaunchPlan, operands: Operands, scale: float, stream: int) -> None:
        """See Launcher.launch; Triton launches on torch's current stream, which `stream` must be."""
        attention, combine = arguments(plan, operands, scale)
        variant = plan.variant
        options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages(self._capability)}
        kernel.tree_attention[plan.grid](*attention, **variant.constants, **options)
        if plan.num_splits > 1:
            kernel.combine_splits[plan.combine_grid](*combine, **variant.combine_constants, **COMBINE_OPTIONS)
