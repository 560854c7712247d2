"""The attention kernel on a GPU: results against the numpy oracle, time against torch's attention and the floor."""

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
from draftwood.plugins.tree_attention.op import SequenceRow
from draftwood.plugins.tree_attention.plan import ITEM_BYTES, Shape
from draftwood.plugins.tree_attention.reference import tree_attention as oracle

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# ||out - oracle|| / ||oracle||. Small enough to detect tf32, Triton's default for products of fp32 matrices.
OUTPUT_TOLERANCES = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1.5e-2}
REPEATS, ROUNDS = 20, 7  # calls in a captured graph; replays of the graph
SETS = 4  # of inputs, used in turn: a single set might stay in the GPU's cache


class AttentionInputs(NamedTuple):
    """The tensors of one call; see `plugins/tree_attention/op.py`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sequences: torch.Tensor
    tree_mask: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)


def list_shapes(dtype: str) -> list[Shape]:
    """Shapes with different groups of heads, head sizes, one to 64 rows, rows of earlier passes, long caches, and
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


def draw_inputs(shape: Shape, lengths: Sequence[int], seed: int, device: str) -> AttentionInputs:
    """Random inputs on the device. lengths: committed slots of each sequence.

    Each sequence has a region of the cache. The speculative rows of all sequences follow the committed slots of the
    last one; each sequence has equally many rows. Slots that no row sees are NaN, so that reading one is noticed.
    """
    generator = torch.Generator(device).manual_seed(seed)
    draw = partial(torch.randn, generator=generator, device=device, dtype=TORCH_DTYPES[shape.dtype])
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
    return AttentionInputs(query, key, value, described, (chances < 0.4) | own)  # a row sees itself


def compute_oracle(given: AttentionInputs, scale: float) -> NDArray[np.float32]:
    """The oracle's output for the inputs as the device holds them, rounded to their dtype."""
    query, key, value = (tensor.float().cpu().numpy() for tensor in given[:3])
    return oracle(query, key, value, given.sequences.cpu().numpy(), given.tree_mask.cpu().numpy(), scale)


def measure_error(attend: Attend, shape: Shape, seed: int, device: str) -> float:
    """||out - oracle|| / ||oracle|| of one call. The region of the last sequence is full."""
    rng = np.random.default_rng(seed)
    room = (shape.capacity - shape.columns) // shape.sequences
    lengths = [*(int(rng.integers(0, room)) for _ in range(shape.sequences - 1)), room]
    given = draw_inputs(shape, lengths, seed, device)
    found = attend(*given, given.scale).float().cpu().numpy()
    wanted = compute_oracle(given, given.scale)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def check_numerics(attend: Attend, cases: Sequence[Shape], device: str) -> Findings:
    """Compare the kernel with the oracle on every shape."""
    errors = {}
    for seed, shape in enumerate(cases):
        error = errors[format_shape(shape)] = measure_error(attend, shape, seed, device)
        limit = OUTPUT_TOLERANCES[shape.dtype]
        require(
            error < limit, f"{format_shape(shape)} differs by {error:.1e} of the oracle's norm, more than {limit:.0e}"
        )
    worst = {
        dtype: max((error for name, error in errors.items() if name.startswith(dtype)), default=None)
        for dtype in TORCH_DTYPES
    }
    text = ", ".join(f"{dtype} {error:.1e}" for dtype, error in worst.items() if error is not None)
    return Findings(f"{len(errors)} shapes; largest relative error {text}", {"relative_error": errors})


def format_shape(shape: Shape) -> str:
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


def bytes_moved(shape: Shape, lengths: Sequence[int]) -> int:
    """The least memory traffic of one call: each committed slot once, each column of the mask once (for any number of
    sequences), query and output once, mask once.

    lengths: committed slots of each sequence. Divided by a device's bandwidth it is the least time a call can take.
    """
    item = ITEM_BYTES[shape.dtype]
    slots = min(sum(lengths) + shape.columns, shape.capacity)
    cache = 2 * slots * shape.kv_heads * shape.head_dim * item
    rows = 2 * shape.heads * shape.rows * shape.head_dim * item
    return cache + rows + shape.rows * shape.columns + 4 * len(SequenceRow._fields) * shape.sequences


def measure_speed(attend: Attend, bandwidth: float) -> Findings:
    """Measure the kernel, torch's attention with the same mask, and the floor: the time to move the bytes once."""
    if not torch.cuda.is_available():
        raise NotPossible("no CUDA device")
    figures: dict[str, Any] = {}
    for (heads, kv_heads), rows, length in SPEED_CASES:
        shape = Shape(1, heads, kv_heads, rows, rows, length + 256, 128, "fp16")
        given = [draw_inputs(shape, [length], seed, "cuda") for seed in range(SETS)]
        kernel = time_calls([partial(attend, *each, each.scale) for each in given])
        torchs = time_calls([make_torch_baseline(each, length + rows) for each in given])
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


def make_torch_baseline(given: AttentionInputs, visible: int) -> Callable[[], torch.Tensor]:
    """A call of torch's attention over the visible slots, with a prepared mask. Heads that share keys become rows of
    one matrix: torch's fused kernels accept that, but not `enable_gqa` with a mask."""
    batch, heads, rows, head_dim = given.query.shape
    kv_heads = given.key.shape[1]
    mask = torch.zeros((batch, 1, rows, visible), dtype=given.query.dtype, device=given.query.device)
    mask[:, 0, :, visible - rows :].masked_fill_(~given.tree_mask, -torch.inf)
    mask = mask.repeat(1, 1, heads // kv_heads, 1)
    query = given.query.reshape(batch, kv_heads, -1, head_dim)
    keys, values = given.key[:, :, :visible], given.value[:, :, :visible]
    return lambda: functional.scaled_dot_product_attention(query, keys, values, mask).view_as(given.query)


def time_calls(calls: Sequence[Callable[[], torch.Tensor]]) -> float:
    """Seconds of one call: the median over replays of a CUDA graph of REPEATS calls."""
    torch.cuda.synchronize()  # the inputs are complete
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
