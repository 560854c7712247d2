"""Verification at temperature 0 and the commit of the accepted path, on the device, in the OpenAI Triton language."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns", "size"])
def verify(
    top_ids,
    row_nodes,
    tokens,
    parents,
    depths,
    values,
    rows,
    slots,
    summary,
    accepted,
    draft_rows,
    row_tokens,
    row_parents,
    row_depths,
    row_values,
    columns,
    size,
    ROWS: tl.constexpr,
):
    """Grid (1,): `match_best`. From the root go to the child with the target's most probable token, as long as there is
    one. top_ids [rows, K = columns]: the target's tokens, best first. A number below 0 is ~ of a token that matches no
    child.

    summary: number of accepted rows, the target's token after them, number of accepted rows that the draft has scored,
    number of rows. accepted: the accepted rows. draft_rows: the slots of the scored ones, counted from the target's
    `length` as rows are. row_tokens, row_parents, row_depths, row_values [size + 1]: the tree, for the host.
    """
    row = tl.arange(0, ROWS)
    node = tl.load(row_nodes + row, mask=row <= size, other=-1)
    is_row = node >= 0
    token = tl.load(tokens + node, mask=is_row, other=-1)
    above = tl.load(parents + node, mask=is_row, other=-1)
    parent = tl.load(rows + above, mask=above >= 0, other=-1)
    tl.store(row_tokens + row, token, mask=is_row)
    tl.store(row_parents + row, parent, mask=is_row)
    tl.store(row_depths + row, tl.load(depths + node, mask=is_row, other=0), mask=is_row)
    tl.store(row_values + row, tl.load(values + node, mask=is_row, other=0.0), mask=is_row)

    count, scored = 0, 0
    best = tl.load(top_ids).to(tl.int32)
    child = tl.max(tl.where((parent == 0) & (token == best), row, -1), axis=0)
    while child >= 0:
        tl.store(accepted + count, child)
        slot = tl.load(slots + tl.load(row_nodes + child))
        tl.store(draft_rows + count, slot + 1)
        count += 1
        scored += (slot >= 0).to(tl.int32)  # only the last row of a path may not be scored
        best = tl.load(top_ids + child * columns).to(tl.int32)
        child = tl.max(tl.where((parent == child) & (token == best), row, -1), axis=0)
    tl.store(summary, count)
    tl.store(summary + 1, tl.where(best < 0, ~best, best))
    tl.store(summary + 2, scored)
    tl.store(summary + 3, tl.sum(is_row.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["tensor_words", "heads", "capacity", "row_words"])
def commit(cache, state, sources, count, tensor_words, heads, capacity, row_words, WORDS: tl.constexpr):
    """Grid (tensors * heads, blocks of a row): move row length + sources[i] of a cache to row length + 1 + i, for i
    below `count`, in every plane. Sources ascend, so no row is overwritten before it is read."""
    length, moves = tl.load(state), tl.load(count)
    plane = tl.program_id(0)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    base = cache + (plane // heads) * tensor_words + (plane % heads).to(tl.int64) * capacity * row_words
    for i in range(moves):
        source = (length + tl.load(sources + i)).to(tl.int64) * row_words
        target = (length + 1 + i).to(tl.int64) * row_words
        tl.store(base + target + word, tl.load(base + source + word, mask=word < row_words), mask=word < row_words)
