"""The attention kernel of a GPU check: its numbers against the numpy oracle, its time against torch and the floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from benchmarks.gpu.report import Findings, NotPossible, require
from draftwood.plugins.tree_attention.operands import Operands as KernelOperands
from draftwood.plugins.tree_attention.plan import Shape, bytes_moved, plan
from draftwood.plugins.tree_attention.reference import tree_attention as oracle

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES_BY_TORCH = {dtype: name for name, dtype in DTYPES.items()}
# ||out - oracle|| / ||oracle||. Triton multiplies fp32 matrices in tf32 unless told otherwise, which this would show.
TOLERANCES = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1.5e-2}
REPEATS, ROUNDS = 20, 7  # calls in a captured graph, and how often it is timed
SETS = 4  # of operands, used in turn: one alone might stay in the cache


class Operands(NamedTuple):
    """Of one call; see `plugins/tree_attention/op.py`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sequences: torch.Tensor
    tree_mask: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)


def shapes(dtype: str) -> list[Shape]:
    """What a kernel can get wrong: groups of heads, head sizes, one to 64 rows, rows of earlier passes, long caches,
    several sequences."""
    sizes = [
        (1, 4, 4, 1, 1, 256, 64),
        (1, 4, 2, 8, 8, 300, 64),
        (2, 8, 1, 5, 9, 1024, 128),
        (1, 16, 16, 8, 8, 4096, 128),
        (1, 8, 2, 64, 64, 4096, 128),
        (8, 32, 8, 64, 128, 16384, 128),
        (1, 6, 2, 12, 48, 777, 96),
        (3, 2, 1, 3, 5, 390, 256),
        (1, 4, 2, 16, 32, 16384, 128),
        (1, 3, 1, 2, 4, 64, 12),
    ]
    return [Shape(*size, dtype) for size in sizes]


def interpreted_shapes() -> list[Shape]:
    """Small enough for the interpreter; with splits, groups, several sequences, and rows of earlier passes."""
    sizes = [(1, 4, 2, 3, 5, 96, 32), (3, 2, 2, 4, 6, 900, 16), (1, 3, 1, 2, 4, 64, 12)]
    return [Shape(*size, dtype) for size in sizes for dtype in ("fp32", "fp16")]


def interpreted(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: torch.Tensor,
    tree_mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The kernel on host memory; TRITON_INTERPRET must have been 1 when it was imported."""
    from draftwood.plugins.tree_attention.launch import InterpreterLauncher, strides

    tensors = (query, key, value, sequences, tree_mask)
    shape = Shape.of([tensor.shape for tensor in tensors], DTYPES_BY_TORCH[query.dtype])
    launcher = InterpreterLauncher(multiprocessors=4)
    layout = plan(shape, launcher.multiprocessors)
    output = torch.full_like(query, torch.nan)
    workspace = torch.full((max(1, layout.workspace_bytes),), 255, dtype=torch.uint8)
    addresses = [tensor.data_ptr() for tensor in (*tensors, output, workspace)]
    launcher.launch(layout, KernelOperands._make((*addresses, strides(query), strides(output))), scale, 0)
    return output


def operands(shape: Shape, lengths: Sequence[int], seed: int, device: str) -> Operands:
    """Random operands, made on the device: a region of the cache for each sequence, the speculative rows of all behind
    the last one's committed slots, rows dealt out evenly. Slots that nobody sees are NaN: what reads one shows."""
    generator = torch.Generator(device).manual_seed(seed)
    draw = partial(torch.randn, generator=generator, device=device, dtype=DTYPES[shape.dtype])
    query = draw((1, shape.heads, shape.rows, shape.head_dim))
    key, value = (draw((1, shape.kv_heads, shape.capacity, shape.head_dim)) for _ in range(2))
    region = (shape.capacity - shape.columns) // shape.sequences
    tree_slot = region * (shape.sequences - 1) + lengths[-1]
    hidden = torch.ones(shape.capacity, dtype=torch.bool, device=device)
    hidden[tree_slot : tree_slot + shape.columns] = False
    sequences = []
    for number, length in enumerate(lengths):
        hidden[number * region : number * region + length] = False
        sequences.append((number * shape.rows // shape.sequences, number * region, length, tree_slot))
    key[:, :, hidden] = value[:, :, hidden] = torch.nan
    chances = torch.rand((1, shape.rows, shape.columns), generator=generator, device=device)
    own = torch.eye(shape.rows, shape.columns, dtype=torch.bool, device=device).roll(shape.columns - shape.rows, 1)
    described = torch.tensor(sequences, dtype=torch.int32, device=device)
    return Operands(query, key, value, described, (chances < 0.4) | own)  # a row sees itself


def expected(given: Operands, scale: float) -> NDArray[np.float32]:
    """The oracle's answer to what the device really holds: rounded inputs, widened."""
    query, key, value = (tensor.float().cpu().numpy() for tensor in given[:3])
    return oracle(query, key, value, given.sequences.cpu().numpy(), given.tree_mask.cpu().numpy(), scale)


def relative_error(attend: Attend, shape: Shape, seed: int, device: str) -> float:
    """||out - oracle|| / ||oracle|| of one call in which the last sequence's region is full."""
    rng = np.random.default_rng(seed)
    room = (shape.capacity - shape.columns) // shape.sequences
    lengths = [*(int(rng.integers(0, room)) for _ in range(shape.sequences - 1)), room]
    given = operands(shape, lengths, seed, device)
    found = attend(*given, given.scale).float().cpu().numpy()
    wanted = expected(given, given.scale)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def numerics(attend: Attend, cases: Sequence[Shape], device: str) -> Findings:
    """Compare every case with the oracle."""
    errors = {}
    for seed, shape in enumerate(cases):
        error = errors[label(shape)] = relative_error(attend, shape, seed, device)
        limit = TOLERANCES[shape.dtype]
        require(error < limit, f"{label(shape)} differs by {error:.1e} of the oracle's norm, more than {limit:.0e}")
    worst = {
        dtype: max((error for name, error in errors.items() if name.startswith(dtype)), default=None)
        for dtype in DTYPES
    }
    text = ", ".join(f"{dtype} {error:.1e}" for dtype, error in worst.items() if error is not None)
    return Findings(f"{len(errors)} shapes; largest relative error {text}", {"relative_error": errors})


def label(shape: Shape) -> str:
    return (
        f"{shape.dtype} N={shape.sequences} H={shape.heads}:{shape.kv_heads} T={shape.rows} S={shape.columns} "
        f"C={shape.capacity} D={shape.head_dim}"
    )


# 7B of LLaMA 2, whose heads share nothing, and 8B of LLaMA 3, with groups of four; fp16.
SPEED_CASES = [
    (heads, rows, length)
    for heads in ((32, 32), (32, 8))
    for rows, length in ((1, 512), (8, 512), (8, 2048), (8, 8192), (64, 2048), (64, 8192))
]


def speed(attend: Attend, bandwidth: float) -> Findings:
    """Microseconds of the kernel, of torch's attention with the same mask, and of moving the bytes once."""
    if not torch.cuda.is_available():
        raise NotPossible("no CUDA device")
    figures: dict[str, Any] = {}
    for (heads, kv_heads), rows, length in SPEED_CASES:
        shape = Shape(1, heads, kv_heads, rows, rows, length + 256, 128, "fp16")
        given = [operands(shape, [length], seed, "cuda") for seed in range(SETS)]
        kernel = timed([partial(attend, *each, each.scale) for each in given])
        torchs = timed([baseline(each, length + rows) for each in given])
        floor = bytes_moved(shape, [length]) / bandwidth
        figures[f"H={heads}:{kv_heads} T={rows} length={length}"] = {
            "kernel_us": round(1e6 * kernel, 2),
            "torch_us": round(1e6 * torchs, 2),
            "floor_us": round(1e6 * floor, 2),
        }
    ratios = [each["torch_us"] / each["kernel_us"] for each in figures.values()]
    shares = [each["floor_us"] / each["kernel_us"] for each in figures.values()]
    summary = (
        f"{min(ratios):.1f} to {max(ratios):.1f} times torch's attention (median {median(ratios):.1f}), "
        f"{min(shares):.0%} to {max(shares):.0%} of the memory floor"
    )
    return Findings(summary, {"kernel_time": figures})


def baseline(given: Operands, visible: int) -> Callable[[], torch.Tensor]:
    """torch's own attention over the visible slots, the mask ready-made. Heads that share keys are rows of one matrix,
    which its fused kernels can take, unlike `enable_gqa` with a mask."""
    batch, heads, rows, head_dim = given.query.shape
    kv_heads = given.key.shape[1]
    mask = torch.zeros((batch, 1, rows, visible), dtype=given.query.dtype, device=given.query.device)
    mask[:, 0, :, visible - rows :].masked_fill_(~given.tree_mask, -torch.inf)
    mask = mask.repeat(1, 1, heads // kv_heads, 1)
    query = given.query.reshape(batch, kv_heads, -1, head_dim)
    keys, values = given.key[:, :, :visible], given.value[:, :, :visible]
    return lambda: functional.scaled_dot_product_attention(query, keys, values, mask).view_as(given.query)


def timed(calls: Sequence[Callable[[], torch.Tensor]]) -> float:
    """Seconds of one call: the median over replays of a CUDA graph of many, in turn."""
    torch.cuda.synchronize()  # the operands are there
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch declares no types there
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(REPEATS):
            calls[index % len(calls)]()
    seconds: list[float] = []
    with torch.cuda.stream(stream):
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1000 / REPEATS)
    return median(seconds)
