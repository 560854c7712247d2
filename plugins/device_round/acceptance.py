"""Verification at temperature 0 and the commit of the accepted path, on the device, in the OpenAI Triton language."""

import triton
import triton.language as tl

from . import images
from .inputs import STATE

ROWS, WORDS = tl.constexpr(images.ROW_BLOCK), tl.constexpr(images.WORD_BLOCK)


@triton.jit
def verify(top_ids, tree, state, path, found, columns, size, depth, nodes, accepted_rows):
    """Grid (texts,): `match_best`. From the root go to the child with the target's most probable token, as long as
    there is one. top_ids [texts, size + 1, K = columns]: the target's tokens, best first. A number below 0 is ~ of a
    token that matches no child.

    summary [texts, 4]: number of accepted rows, the target's token after them, number of accepted rows that the draft
    has scored, number of rows. accepted [texts, depth]: the accepted rows. target_rows [texts, depth + 1], draft_rows
    [texts, accepted_rows]: the columns of the rows that will be committed; the draft's pending tokens are there
    already. moves [texts, 2]: how many. row_tokens, row_parents, row_depths, row_values [texts, size + 1]: the tree,
    for the host.
    """
    text, count_rows = tl.program_id(0), size + 1
    top_ids, row_nodes = top_ids + text * count_rows * columns, tree.row_nodes + text * count_rows
    tokens, parents, depths = tree.tokens + text * nodes, tree.parents + text * nodes, tree.depths + text * nodes
    values, rows, slots = tree.node_values + text * nodes, tree.rows + text * nodes, tree.slots + text * nodes
    row_tokens, row_parents = found.tokens + text * count_rows, found.parents + text * count_rows
    row_depths, row_values = found.depths + text * count_rows, found.row_values + text * count_rows
    accepted, target_rows = path.accepted + text * depth, path.target_rows + text * (depth + 1)
    pending = tl.load(state + text * STATE + 1)
    draft_rows = path.draft_rows + (text * accepted_rows + pending)

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
    tl.store(target_rows, text * count_rows)
    best = tl.load(top_ids).to(tl.int32)
    child = tl.max(tl.where((parent == 0) & (token == best), row, -1), axis=0)
    while child >= 0:
        tl.store(accepted + count, child)
        tl.store(target_rows + count + 1, text * count_rows + child)
        slot = tl.load(slots + tl.load(row_nodes + child))
        tl.store(draft_rows + count, slot)
        count += 1
        scored += (slot >= 0).to(tl.int32)  # only the last row of a path may not be scored
        best = tl.load(top_ids + child * columns).to(tl.int32)
        child = tl.max(tl.where((parent == child) & (token == best), row, -1), axis=0)
    summary, moves = path.summary + 4 * text, path.moves + 2 * text
    tl.store(summary, count)
    tl.store(summary + 1, tl.where(best < 0, ~best, best))
    tl.store(summary + 2, scored)
    tl.store(summary + 3, tl.sum(is_row.to(tl.int32), axis=0))
    tl.store(moves, count + 1)
    tl.store(moves + 1, pending + scored)


@triton.jit
def commit(cache, dropped, state, sources, moves, tensor_words, heads, capacity, row_words, most, read):
    """Grid (tensors * heads, texts * blocks of a row): append the rows of columns sources[text, :moves[text, read]] of
    a cache to the text's committed rows, in every plane. read: 0 for the target, 1 for the draft. most: the numbers of
    a text in `sources`. dropped [1]: slots that the cache no longer holds; others are numbered from the next one on.
    Sources ascend, and none stands before its place, so no row is overwritten before it is read."""
    blocks = tl.cdiv(row_words, WORDS)
    text, plane = tl.program_id(1) // blocks, tl.program_id(0)
    state, sources = state + text * STATE, sources + text * most
    gone = tl.load(dropped).to(tl.int32)
    start = tl.load(state + 4 + 2 * read) + tl.load(state) + read * (1 - tl.load(state + 1)) - gone
    first_column = tl.load(state + 5 + 2 * read) - gone
    word = tl.program_id(1) % blocks * WORDS + tl.arange(0, WORDS)
    base = cache + (plane // heads) * tensor_words + (plane % heads).to(tl.int64) * capacity * row_words
    for i in range(tl.load(moves + 2 * text + read)):
        source, target = first_column + tl.load(sources + i), start + i
        if source != target:
            row = tl.load(base + source.to(tl.int64) * row_words + word, mask=word < row_words)
            tl.store(base + target.to(tl.int64) * row_words + word, row, mask=word < row_words)
