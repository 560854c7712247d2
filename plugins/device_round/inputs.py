"""The inputs of the passes of a round, written on the device, in the OpenAI Triton language: see models/bindings.py.

A round has one or several texts, whose rows follow one another in each pass: as many rows for every text, of which
unused ones are padding. `state` [texts, STATE]: length, count, the pending tokens, and for the caches of target and
draft each the first slot of the text's rows and the slot of the masks' first column. `length`, the target's committed
rows, is the position of the root, the last committed token. `count`: of the one or two committed tokens that the draft
has not read, the last of which is the root; its cache has length + 1 - count committed rows. Speculative rows stand
after the committed rows of the only text, or in an area for all texts.
"""

import triton
import triton.language as tl

from . import images

PENDING = tl.constexpr(images.PENDING)
STATE = tl.constexpr(images.STATE)
COLUMNS = tl.constexpr(images.COLUMN_BLOCK)


@triton.jit
def pending_inputs(
    state, inputs, lists, values, table, columns, width, nodes, layers, accepted, outputs, texts, sequence_rows
):
    """Grid (T,): a draft pass over the pending tokens, a chain for each text, in the first columns. Output row i is
    the root of text i; further ones are not read. The root becomes node 0, and the only node of the first frontier
    [width]. draft_rows [texts, accepted]: begins with the columns of the pending tokens, which will be committed."""
    row = tl.program_id(0)
    text, place = row // PENDING, row % PENDING
    state += text * STATE
    is_text = text < texts
    length, count = tl.load(state, mask=is_text, other=0), tl.load(state + 1, mask=is_text, other=0)
    committed = length + 1 - count
    is_pending = place < count
    tl.store(inputs.input_ids + row, tl.load(state + 2 + place, mask=is_pending, other=0).to(tl.int64))
    tl.store(inputs.position_ids + row, tl.where(is_pending, committed + place, 0).to(tl.int64))
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        visible = (column <= row) & (column >= row - place) & is_pending
        tl.store(inputs.tree_mask + row * columns + column, visible.to(tl.uint8), mask=column < columns)
    if is_pending:
        tl.store(lists.draft_rows + text * accepted + place, row)
    if (row >= texts) & (row < outputs):
        tl.store(inputs.output_rows + row, tl.zeros((), tl.int64))
    locate(state, inputs, row, text, is_text & (place == 0), committed, 6, 0, texts, sequence_rows)
    if is_text & (place == 0):
        tl.store(inputs.output_rows + text, (row + count - 1).to(tl.int64))
        for node in range(width):
            tl.store(lists.frontier + text * layers * width + node, tl.where(node == 0, 0, -1))
        tl.store(lists.totals + text * layers, 1)
        tl.store(values + text * nodes, tl.full((), 0.0, tl.float64))
        tl.store(table.tokens + text * nodes, tl.load(state + 1 + count))
        tl.store(table.parents + text * nodes, -1)
        tl.store(table.depths + text * nodes, 0)
        tl.store(table.slots + text * nodes, -1)


@triton.jit
def tree_inputs(
    state, row_nodes, table, inputs, rows, columns, read, first, chosen, nodes, spread, texts, sequence_rows
):
    """Grid (T,): a pass over row_nodes[text, :rows] of each text, -1 for padding rows, which see nothing. chosen: the
    numbers of a text in row_nodes. Row i attends to the columns of its node and of the node's ancestors: `slots`
    of these nodes, plus `spread` for each text before; -1: an ancestor is no column. read: 1 for the draft, whose rows
    also attend to the columns of the pending tokens; 0 for the target. The pass writes its rows from column `first`
    on."""
    row = tl.program_id(0)
    text, place = row // rows, row % rows
    is_text = text < texts
    state += text * STATE
    tokens, parents, depths = table.tokens + text * nodes, table.parents + text * nodes, table.depths + text * nodes
    columns_of = table.slots + text * nodes
    length = tl.load(state, mask=is_text, other=0)
    pending = read * tl.load(state + 1, mask=is_text, other=0)
    node = tl.load(row_nodes + text * chosen + place, mask=is_text, other=-1)
    is_node = node >= 0
    position = length + tl.load(depths + node, mask=is_node, other=0)
    tl.store(inputs.input_ids + row, tl.load(tokens + node, mask=is_node, other=0).to(tl.int64))
    tl.store(inputs.position_ids + row, tl.where(is_node, position, 0).to(tl.int64))
    tl.store(inputs.output_rows + row, row.to(tl.int64))
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        unread = column - text * PENDING
        visible = (is_node & (unread >= 0) & (unread < pending)).to(tl.uint8)
        above = node
        while above >= 0:
            seen = tl.load(columns_of + above)
            visible = tl.where((column == seen + text * spread) & (seen >= 0), 1, visible).to(tl.uint8)
            above = tl.load(parents + above)
        tl.store(inputs.tree_mask + row * columns + column, visible, mask=column < columns)
    is_first, committed = is_text & (place == 0), length + read - pending
    locate(state, inputs, row, text, is_first, committed, 4 + 2 * read, first, texts, sequence_rows)


@triton.jit
def locate(state, inputs, row, text, is_first, committed, places, first, texts, sequence_rows):
    """Where a text is: its rows of the pass begin at `row`; the fields of `state` from `places` on say where its slots
    and the masks' columns are. All rows of the pass go to column `first` on. sequence_rows: of `sequences`; texts that
    a pass lacks have no rows."""
    if is_first:
        tl.store(inputs.sequences + 4 * text, row)
        tl.store(inputs.sequences + 4 * text + 1, tl.load(state + places))
        tl.store(inputs.sequences + 4 * text + 2, committed)
        tl.store(inputs.sequences + 4 * text + 3, tl.load(state + places + 1))
    if row == 0:
        tl.store(inputs.write_indices, (tl.load(state + places + 1) + first).to(tl.int64))
        for other in range(texts, sequence_rows):
            tl.store(inputs.sequences + 4 * other, tl.num_programs(0))
            for field in range(1, 4):
                tl.store(inputs.sequences + 4 * other + field, 0)
