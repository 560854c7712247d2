"""LaunchPlan: kernel variant, blocks, splits and workspace of one attention call on a GPU; and its memory traffic.

A launch plan depends only on shapes and the size of the device, never on the contents of a tensor. Therefore it is made
once, and its launches can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from .op import SequenceRow

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}  # by Triton's name of a dtype
# Numbers in one block of keys: several blocks in flight fit into shared memory, and no variant of a head up to 128
# spills more than a few bytes of registers on 8.0. fp32 has no tensor cores, which costs registers.
TILE_ITEMS = {"fp32": 2048, "fp16": 8192, "bf16": 8192}
BLOCK_ROWS = 16  # the least tl.dot multiplies
MAX_HEAD_DIM = 256
# A split reads at least this many slots for each row of a block. It writes 4 · (D + 1) bytes of partial results for
# each row and head, which the reduction reads: about half of what the split reads of a cache in 16 bits.
SLOTS_PER_ROW = 4
BLOCKS_PER_MULTIPROCESSOR = 2
MAX_MULTIPROCESSORS = 256  # larger devices are used as if they had this many; workspaces are reserved for it
SPLIT_BLOCK = 16  # splits that the reduction reads at once
# How the compiler makes the reduction. Threads that hold copies of one sum store it to one place. Their last bits are
# equal only if no product is fused into a sum.
COMBINE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
GRID_LIMIT = 65535  # of a CUDA grid's second and third axis


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one call, checked. Raises ValueError.

    sequences N, heads H, kv_heads H_kv, rows T, columns S, capacity C, head_dim D; dtype of query, key, value and
    output.
    """

    sequences: int
    heads: int
    kv_heads: int
    rows: int
    columns: int
    capacity: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("sequences", "heads", "kv_heads", "rows", "columns", "capacity", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"TreeAttention: {name} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"TreeAttention: dtype {self.dtype!r} is unknown; choose one of {', '.join(ITEM_BYTES)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"TreeAttention: {self.heads} query heads do not divide among {self.kv_heads} key/value heads"
            )
        if self.head_dim > MAX_HEAD_DIM:
            raise ValueError(f"TreeAttention: head_dim {self.head_dim} is beyond the kernel's {MAX_HEAD_DIM}")
        if self.columns < self.rows:
            raise ValueError(
                f"TreeAttention: tree_mask has {self.columns} columns for {self.rows} rows; the rows of this pass are "
                "speculative rows too"
            )
        if self.sequences * self.kv_heads > GRID_LIMIT:
            raise ValueError(f"TreeAttention: more than {GRID_LIMIT} key/value heads in all sequences; take fewer")

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], dtype: str) -> Shape:
        """From the shapes of query, key, value, sequences and tree_mask. Raises ValueError where they disagree."""
        query, key, value, sequences, mask = (tuple(shape) for shape in shapes)
        if (len(query), len(key), len(sequences), len(mask)) != (4, 4, 2, 3):
            raise ValueError(
                "TreeAttention: expected query [1, H, T, D], key [1, H_kv, C, D], sequences [N, 4] and tree_mask "
                f"[1, T, S], not {query}, {key}, {sequences} and {mask}"
            )
        _, heads, rows, head_dim = query
        expected = {
            "query": (query, (1, heads, rows, head_dim)),
            "key": (key, (1, key[1], key[2], head_dim)),
            "value": (value, key),
            "sequences": (sequences, (sequences[0], len(SequenceRow._fields))),
            "tree_mask": (mask, (1, rows, mask[2])),
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                raise ValueError(f"TreeAttention: {name} is {found}, expected {wanted} beside a query of {query}")
        return cls(sequences[0], heads, key[1], rows, mask[2], key[2], head_dim, dtype)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Variant:
    """The compile-time parameters of one binary of the kernel. block_rows: rows of T times heads of a group."""

    head_dim: int
    group: int
    dtype: str
    block_rows: int

    @property
    def head_block(self) -> int:
        """head_dim padded to a power of two, at least the minimum of tl.dot."""
        return max(16, power_of_two(self.head_dim))

    @property
    def block_slots(self) -> int:
        """Cache slots per step."""
        return max(16, min(128 if self.block_rows <= 32 else 64, TILE_ITEMS[self.dtype] // self.head_block))

    @property
    def split_slots(self) -> int:
        """The least cache slots of a split."""
        return max(self.block_slots, SLOTS_PER_ROW * self.block_rows)

    @property
    def num_warps(self) -> int:
        return 8 if self.block_rows >= 128 or self.dtype == "fp32" else 4

    @property
    def constants(self) -> dict[str, int]:
        """The constexpr arguments of `kernel.tree_attention`."""
        return {
            "HEAD_DIM": self.head_dim,
            "HEAD_BLOCK": self.head_block,
            "GROUP": self.group,
            "BLOCK_M": self.block_rows,
            "BLOCK_N": self.block_slots,
            "SPLIT_BLOCKS": self.split_slots // self.block_slots,
        }

    @property
    def combined(self) -> Variant:
        """The variant that has the same reduction, which depends only on the head size and the dtype."""
        return Variant(self.head_dim, 1, self.dtype, BLOCK_ROWS)

    @property
    def combine_constants(self) -> dict[str, int]:
        """The constexpr arguments of `kernel.combine_splits`."""
        return {"HEAD_DIM": self.head_dim, "HEAD_BLOCK": self.head_block, "SPLIT_BLOCK": SPLIT_BLOCK}

    def num_stages(self, capability: int) -> int:
        """Software pipelining on a device of `capability` (80 for 8.0).

        n stages keep n - 1 blocks of keys and values in flight: as many as fit into a multiprocessor's shared memory
        with two programs.
        """
        tiles = 2 * self.block_slots * self.head_block * ITEM_BYTES[self.dtype]
        return 1 + max(1, min(3, shared_memory(capability) // BLOCKS_PER_MULTIPROCESSOR // tiles))


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """One call: the variant, the grid of the kernel and, with more than one split, of the reduction after it.

    workspace_bytes: for the partial results, 0 with one split; 16-byte aligned, uninitialised.
    """

    shape: Shape
    variant: Variant
    num_splits: int

    @property
    def grid(self) -> tuple[int, int, int]:
        row_blocks = -(-self.shape.rows * self.shape.group // self.variant.block_rows)
        return row_blocks, self.shape.sequences * self.shape.kv_heads, self.num_splits

    @property
    def combine_grid(self) -> tuple[int, int, int]:
        return self.shape.rows, self.shape.heads, 1

    @property
    def items(self) -> int:
        """Rows of all heads, H * T: the results of each split."""
        return self.shape.heads * self.shape.rows

    @property
    def partial_bytes(self) -> int:
        """The fp32 results [splits, H, T, D], which the workspace begins with."""
        return 4 * self.num_splits * self.items * self.shape.head_dim

    @property
    def logsum_bytes(self) -> int:
        """What follows them: [splits, H, T], fp32. The end of the workspace is `live` [H, T], int32."""
        return 4 * self.num_splits * self.items

    @property
    def workspace_bytes(self) -> int:
        if self.num_splits == 1:
            return 0
        return self.partial_bytes + self.logsum_bytes + 4 * self.items


@functools.lru_cache(maxsize=1024)
def plan_launch(shape: Shape, multiprocessors: int) -> LaunchPlan:
    """The launch plan of `shape` on a device with `multiprocessors`: as many splits as keep all of them busy.

    The number assumes that all rows belong to one sequence, because only the device knows the number of sequences. With
    more sequences the reductions take slightly longer than necessary; with fewer splits a single sequence would leave
    multiprocessors idle.
    """
    block_rows = row_block(shape.rows * shape.group, shape.head_dim, shape.dtype)
    variant = Variant(shape.head_dim, shape.group, shape.dtype, block_rows)
    blocks = -(-shape.rows * shape.group // block_rows) * shape.kv_heads
    room = BLOCKS_PER_MULTIPROCESSOR * min(multiprocessors, MAX_MULTIPROCESSORS) // blocks
    return LaunchPlan(shape, variant, max(1, min(room, -(-shape.capacity // variant.split_slots))))


def row_block(packed_rows: int, head_dim: int, dtype: str) -> int:
    """The block size for T * group packed rows: all in one if registers allow it, to read the cache once."""
    if dtype == "fp32":
        return BLOCK_ROWS
    return min(128 if head_dim <= 64 else 64, max(BLOCK_ROWS, power_of_two(packed_rows)))


def row_blocks(packed_rows: int, head_dim: int, dtype: str) -> tuple[int, ...]:
    """Every block size for up to `packed_rows` packed rows, for a library compiled ahead of time."""
    sizes, size = [], BLOCK_ROWS
    while size <= row_block(packed_rows, head_dim, dtype):
        sizes.append(size)
        size *= 2
    return tuple(sizes)


def workspace_bound(largest: Shape) -> int:
    """Workspace bytes that suffice for every call with at most the sizes of `largest`, on every device."""
    blocks, needed = row_blocks(largest.rows * largest.group, largest.head_dim, largest.dtype), 0
    for block in blocks:
        rows = largest.rows if block == blocks[-1] else min(largest.rows, block // largest.group)
        splits = -(-largest.capacity // Variant(largest.head_dim, largest.group, largest.dtype, block).split_slots)
        if splits > 1:
            by_device = BLOCKS_PER_MULTIPROCESSOR * MAX_MULTIPROCESSORS * block
            results = min(by_device, splits * largest.heads * rows)
            needed = max(needed, 4 * (results * (largest.head_dim + 1) + largest.heads * rows))
    return needed


def shared_memory(capability: int) -> int:
    """Bytes of shared memory of a multiprocessor for programs (CUDA C++ programming guide, technical table)."""
    sizes = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 110: 228, 120: 100, 121: 100}
    return 1024 * sizes.get(capability, min(sizes.values()))


def power_of_two(number: int) -> int:
    """The least power of two that is not smaller than `number`."""
    return 1 << (number - 1).bit_length()
