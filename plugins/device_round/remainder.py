"""The token after a tree of drawn tokens, on the device, in the OpenAI Triton language: see `drawn_tree.py`, which
leaves the row where verification ends, and how the row's children were refused."""

import triton
import triton.language as tl

from . import images
from .drawing import BLOCK, BLOCKS, find
from .inputs import PENDING

ROWS = tl.constexpr(images.ROW_BLOCK)


@triton.jit
def remainder(weights, draft_weights, tree, refusals, stop, excesses, columns, blocks, size):
    """Grid (1, blocks): the sum of R over each block of tokens, at the row where verification ends."""
    block, row = tl.program_id(1), tl.load(stop)
    column = block * BLOCK + tl.arange(0, BLOCK)
    R = left_at(weights, draft_weights, tree, refusals, row, column, columns, size)
    tl.store(excesses + block, tl.sum(R, axis=0))


@triton.jit
def settle(weights, draft_weights, tree, refusals, stop, excesses, last, drawn, columns, blocks, size):
    """Grid (1,): draw the next token from R with the uniform number `last`."""
    row, block = tl.load(stop), tl.arange(0, BLOCKS)
    in_blocks = tl.load(excesses + block, mask=block < blocks, other=0.0)
    chosen, rest_of = find(in_blocks, tl.load(last) * tl.sum(in_blocks, axis=0), BLOCKS)
    column = chosen * BLOCK + tl.arange(0, BLOCK)
    R = left_at(weights, draft_weights, tree, refusals, row, column, columns, size)
    place, _ = find(R, rest_of, BLOCK)
    tl.store(drawn + row, ~(chosen * BLOCK + place).to(tl.int64))


@triton.jit
def left_at(weights, draft_weights, tree, refusals, row, column, columns, size):
    """R at these columns, after all children of a row were refused; up to a factor where it has none."""
    child = next_child(tree.row_parents, row, 0, size)
    scored = scored_at(tree.slots, tl.load(tree.row_nodes + row))
    R = tl.load(weights + row.to(tl.int64) * columns + column, mask=column < columns, other=0.0)
    R /= tl.where(child < ROWS, tl.load(refusals.norms + row), 1.0)
    Q = tl.load(draft_weights + scored.to(tl.int64) * columns + column, mask=column < columns, other=0.0)
    Q = tl.abs(Q)  # a drawn token has a minus sign
    while child < ROWS:
        S = tl.load(refusals.totals + child)
        excess = tl.maximum(tl.load(refusals.pis + child) * R - Q / tl.load(refusals.masses + child), 0.0)
        R = tl.where(S > 0, excess / S, R)
        Q = tl.where(column == tl.load(tree.tokens + tl.load(tree.row_nodes + child)), 0.0, Q)
        child = next_child(tree.row_parents, row, child, size)
    return R


@triton.jit
def scored_at(slots, node):
    """The number of a node among those that the draft scores, layer by layer, the root first; 0 for other nodes. The
    columns of scored nodes but the root, which has none, begin at PENDING."""
    slot = tl.load(slots + node, mask=node >= 0, other=-1)
    return tl.where(slot < 0, 0, slot + 1 - PENDING)


@triton.jit
def next_child(row_parents, row, after, size):
    """The first child of a row after row `after`; ROWS if there is none."""
    index = tl.arange(0, ROWS)
    parent = tl.load(row_parents + index, mask=index <= size, other=ROWS)
    return tl.min(tl.where((parent == row) & (index > after), index, ROWS), axis=0)
