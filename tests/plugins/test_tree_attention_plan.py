"""How calls are laid out: every row once, never too many splits, always enough workspace."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from bundling import ROOT
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.kernel import bytes_moved
from draftwood.plugins.tree_attention.plan import (
    BLOCKS_PER_MULTIPROCESSOR,
    ITEM_BYTES,
    Shape,
    plan_launch,
    row_block,
    row_blocks,
    shared_memory,
    workspace_bound,
)

LLAMA = Shape(1, 32, 8, 16, 16, 8192, 128, "fp16")


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads, rows = draw(st.integers(1, 16)), draw(st.integers(1, 512))
    return Shape(
        sequences=draw(st.integers(1, 32)),
        heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        rows=rows,
        columns=rows + draw(st.integers(0, 64)),
        capacity=draw(st.integers(1, 65536)),
        head_dim=draw(st.integers(1, 256)),
        dtype=draw(st.sampled_from(sorted(ITEM_BYTES))),
    )


@given(shapes(), st.integers(1, 400))
def test_every_row_is_in_exactly_one_block_and_splits_stay_in_bounds(shape: Shape, multiprocessors: int) -> None:
    layout = plan_launch(shape, multiprocessors)
    blocks, heads, splits = layout.grid
    packed = shape.rows * shape.group
    assert (blocks - 1) * layout.variant.block_rows < packed <= blocks * layout.variant.block_rows
    assert heads == shape.sequences * shape.kv_heads
    assert splits == 1 or blocks * shape.kv_heads * splits <= BLOCKS_PER_MULTIPROCESSOR * multiprocessors
    assert splits == 1 or (splits - 1) * layout.variant.split_slots < shape.capacity
    assert layout.variant.block_rows in row_blocks(packed, shape.head_dim, shape.dtype)
    assert (layout.workspace_bytes > 0) == (splits > 1)


@given(shapes(), st.data())
def test_the_workspace_of_the_largest_call_is_enough_for_smaller_ones(largest: Shape, data: st.DataObject) -> None:
    smaller = replace(
        largest,
        sequences=data.draw(st.integers(1, largest.sequences)),
        rows=data.draw(st.integers(1, largest.rows)),
    )
    multiprocessors = data.draw(st.integers(1, 400))
    assert plan_launch(smaller, multiprocessors).workspace_bytes <= workspace_bound(largest)


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_blocks_in_flight_fit_into_shared_memory(head_dim: int, dtype: str, capability: int) -> None:
    for block in row_blocks(512, head_dim, dtype):
        variant = plan_launch(
            replace(LLAMA, head_dim=head_dim, dtype=dtype, rows=block, heads=8, columns=block), 1
        ).variant
        assert variant.block_rows == row_block(block, head_dim, dtype)
        tiles = 2 * variant.block_slots * variant.head_block * ITEM_BYTES[dtype]
        assert (variant.num_stages(capability) - 1) * tiles <= shared_memory(capability) // BLOCKS_PER_MULTIPROCESSOR


def test_a_long_cache_is_split_over_the_device_however_many_sequences_share_it() -> None:
    assert plan_launch(LLAMA, 132).num_splits == 32
    assert plan_launch(replace(LLAMA, capacity=256), 132).num_splits == 1
    assert plan_launch(replace(LLAMA, sequences=8), 132).grid == (1, 64, 32)


def test_the_floors_of_measured_times_count_these_bytes() -> None:
    """docs/internals/gpu.md: heads of Llama-3.1-8B, and of Llama-2-7B, at the bandwidth that the page names."""
    text = (ROOT / "docs" / "internals" / "gpu.md").read_text(encoding="utf-8").split("### Times of attention")[1]
    text, bandwidth = text.split("\n### ")[0], 4.46e12
    assert f"{bandwidth / 1e12} TB/s" in text
    rows = [
        [cell.strip() for cell in line.split("|")[1:]] for line in text.splitlines() if re.search(r"\| \d+\.", line)
    ]
    assert len(rows) == 8
    kv_heads = 0
    for heads, rows_of_pass, context, floor, *_ in rows:
        kv_heads = int(heads.split()[2]) if heads else kv_heads
        length, count = int(context.replace(",", "")), int(rows_of_pass)
        shape = replace(LLAMA, kv_heads=kv_heads, rows=count, columns=count, capacity=length + 256)
        assert float(floor) == round(1e6 * bytes_moved(shape, [length]) / bandwidth, 1)


def test_heads_of_a_group_share_a_block() -> None:
    assert plan_launch(LLAMA, 132).grid == (1, 8, 32)
    assert plan_launch(LLAMA, 132).variant.block_rows == 64


def test_bytes_moved_counts_the_cache_once_per_key_value_head() -> None:
    rows = 2 * 32 * 16 * 128 * 2
    assert bytes_moved(LLAMA, [1000]) == 2 * 8 * 1016 * 128 * 2 + rows + 16 * 16 + 16
    assert bytes_moved(LLAMA, [8192]) == 2 * 8 * 8192 * 128 * 2 + rows + 16 * 16 + 16
    two = replace(LLAMA, sequences=2)
    assert bytes_moved(two, [600, 400]) == bytes_moved(LLAMA, [1000]) + 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 30}, "30 query heads do not divide among 8"),
        ({"head_dim": 512}, "head_dim 512 is beyond"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"columns": 15}, "15 columns for 16 rows"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"sequences": 10_000}, "take fewer"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(LLAMA, **change)


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (0, (1, 8, 128), "expected query"),
        (1, (2, 2, 64, 128), "key is"),
        (2, (1, 2, 65, 128), "value is"),
        (3, (2, 3), "sequences is"),
        (0, (2, 8, 4, 128), "query is"),
        (4, (1, 5, 4), "tree_mask is"),
    ],
)
def test_shapes_that_disagree_are_refused(position: int, wrong: tuple[int, ...], message: str) -> None:
    inputs: list[tuple[int, ...]] = [(1, 8, 4, 128), (1, 2, 64, 128), (1, 2, 64, 128), (3, 4), (1, 4, 4)]
    assert Shape.of(inputs, "fp16") == Shape(3, 8, 2, 4, 4, 64, 128, "fp16")
    inputs[position] = wrong
    with pytest.raises(ValueError, match=message):
        Shape.of(inputs, "fp16")
