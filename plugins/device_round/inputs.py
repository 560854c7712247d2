"""The inputs of the passes of a round, written on the device, in the OpenAI Triton language: see models/bindings.py.

`state` is (length, count, pending tokens): `length`, the target's committed rows, is the position of the root, the last
committed token. `pending` are the one or two committed tokens that the draft has not read; the last one is the root. As
soon as it has read them, the draft has length + 1 committed rows.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns", "width"])
def pending_inputs(
    state,
    input_ids,
    position_ids,
    sequences,
    tree_mask,
    write_indices,
    output_rows,
    frontier,
    totals,
    values,
    tokens,
    parents,
    depths,
    slots,
    columns,
    width,
    COLUMNS: tl.constexpr,
):
    """Grid (T,): a draft pass over the pending tokens, a chain, whose output row is the root's. The root becomes node
    0, and the only node of the first frontier [width]."""
    row = tl.program_id(0)
    length, count = tl.load(state), tl.load(state + 1)
    committed = length + 1 - count
    is_pending = row < count
    tl.store(input_ids + row, tl.load(state + 2 + row, mask=is_pending, other=0).to(tl.int64))
    tl.store(position_ids + row, tl.where(is_pending, committed + row, 0).to(tl.int64))
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        visible = (column <= row) & is_pending
        tl.store(tree_mask + row * columns + column, visible.to(tl.uint8), mask=column < columns)
    if row == 0:
        place(sequences, write_indices, committed, 0)
        tl.store(output_rows, (count - 1).to(tl.int64))
        for node in range(width):
            tl.store(frontier + node, tl.where(node == 0, 0, -1))
        tl.store(totals, 1)
        tl.store(values, tl.full((), 0.0, tl.float64))
        tl.store(tokens, tl.load(state + 1 + count))
        tl.store(parents, -1)
        tl.store(depths, 0)
        tl.store(slots, -1)


@triton.jit(do_not_specialize=["rows", "columns", "read", "first"])
def tree_inputs(
    state,
    nodes,
    tokens,
    parents,
    depths,
    columns_of,
    input_ids,
    position_ids,
    sequences,
    tree_mask,
    write_indices,
    output_rows,
    rows,
    columns,
    read,
    first,
    COLUMNS: tl.constexpr,
):
    """Grid (T,): a pass over nodes[:rows], -1 for padding rows, which see nothing. Row i attends to the columns
    `columns_of` of its node and of the node's ancestors; -1: an ancestor is committed. `read`: committed rows of this
    cache beyond `length`. The pass writes its rows from speculative slot `first` on."""
    row = tl.program_id(0)
    length = tl.load(state)
    node = tl.load(nodes + row, mask=row < rows, other=-1)
    is_node = node >= 0
    position = length + tl.load(depths + node, mask=is_node, other=0)
    tl.store(input_ids + row, tl.load(tokens + node, mask=is_node, other=0).to(tl.int64))
    tl.store(position_ids + row, tl.where(is_node, position, 0).to(tl.int64))
    tl.store(output_rows + row, row.to(tl.int64))
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        visible = tl.zeros((COLUMNS,), tl.uint8)
        above = node
        while above >= 0:
            visible = tl.where(column == tl.load(columns_of + above), 1, visible).to(tl.uint8)
            above = tl.load(parents + above)
        tl.store(tree_mask + row * columns + column, visible, mask=column < columns)
    if row == 0:
        place(sequences, write_indices, length + read, first)


@triton.jit
def place(sequences, write_indices, committed, first):
    """The only sequence: `committed` rows, then the mask's columns; the rows of the pass go to column `first` on."""
    tl.store(sequences, 0)
    tl.store(sequences + 1, 0)
    tl.store(sequences + 2, committed)
    tl.store(sequences + 3, committed)
    tl.store(write_indices, (committed + first).to(tl.int64))
