"""The token trees of a round at temperature 0, grown on the device: the draft's best-first tree and its best tokens, in
the OpenAI Triton language. `expand` and `unroll` are `BestFirst` and `unroll` of the runtime, ties included.

A round has one or several texts, each with a tree of its own. Arrays have a first axis for the texts.

Nodes are numbered in creation order; node 0 is the root. `values` fp64: a node's log-probability, the sum of the
log-probabilities on its path. An order by value means: the greater value first, and the earlier node of equal values.
A position in this order is counted, not sorted: it is the number of values that come before.
"""

import triton
import triton.language as tl

from . import images

OFFERS, NODES = tl.constexpr(images.OFFER_BLOCK), tl.constexpr(images.NODE_BLOCK)


@triton.jit
def expand(
    ranking, names, lists, values, table, columns, layer, width, size, num_names, first_slot, nodes, layers, ranked
):
    """Grid (texts,): add a layer of nodes, and choose those that the next draft pass scores.

    The draft scored the nodes frontier[text, layer, :width], -1 where there is none; top_ids and top_logprobs [rows, K
    = columns] are its most probable tokens, best first, `ranked` rows for each text. Each node offers its first `width`
    tokens. A token is admitted if fewer than `size` admitted ones, of this and earlier layers, are as probable. The
    next frontier is the most probable admitted nodes below which a token could be admitted. totals[text, layer + 1]:
    the number of nodes. names [num_names]: the token of each column of a trimmed draft. slots [texts, nodes]: the
    columns of scored nodes in the draft's masks, from `first_slot` on, `width` for each text; -1 for other nodes, and
    for all of them if `first_slot` is -1. layers: depth + 1.
    """
    text = tl.program_id(0)
    frontier, totals = lists.frontier + text * layers * width, lists.totals + text * layers
    values += text * nodes
    total = tl.load(totals + layer)
    this, following = frontier + layer * width, frontier + (layer + 1) * width
    offer = tl.arange(0, OFFERS)
    row, rank = offer // width, offer % width
    node = tl.load(this + row, mask=row < width, other=-1)
    offered = node >= 0
    first_cell = text * ranked * columns
    cell = first_cell + row * columns + rank
    # At most 0, whatever the ranking's rounding is: a child is never better than its parent.
    gain = tl.minimum(tl.load(ranking.top_logprobs + cell, mask=offered, other=float("-inf")), 0.0).to(tl.float64)
    value = tl.load(values + node, mask=offered, other=float("-inf")) + gain

    before = tl.zeros((OFFERS,), tl.int32)  # offers that precede this one in the order by value
    as_good = tl.zeros((OFFERS,), tl.int32)  # offers of at least this value, itself included
    for other in range(width * width):
        above = tl.load(this + other // width)
        other_cell = first_cell + other // width * columns + other % width
        other_gain = tl.load(ranking.top_logprobs + other_cell, mask=above >= 0, other=0.0)
        other_value = tl.load(values + above, mask=above >= 0, other=float("-inf"))
        other_value += tl.minimum(other_gain, 0.0).to(tl.float64)
        before += ((other_value > value) | ((other_value == value) & (other < offer))).to(tl.int32)
        as_good += (other_value >= value).to(tl.int32)
    earlier = tl.zeros((OFFERS,), tl.int32)  # nodes of at least this value, in earlier layers
    for other in range(1, total):
        earlier += (tl.load(values + other) >= value).to(tl.int32)

    admitted = offered & (value > float("-inf")) & (earlier + before < size)
    useful = admitted & (earlier + as_good < size)
    scored = useful & (before < width) & (first_slot >= 0)
    column = tl.load(ranking.top_ids + cell, mask=admitted, other=0).to(tl.int32)
    token = tl.load(names + column, mask=admitted & (num_names > 0), other=0)
    tl.store(values + total + before, value, mask=admitted)
    child = text * nodes + total + before
    tl.store(table.tokens + child, tl.where(num_names > 0, token, column), mask=admitted)
    tl.store(table.parents + child, node, mask=admitted)
    tl.store(table.depths + child, tl.full((OFFERS,), layer + 1, tl.int32), mask=admitted)
    tl.store(table.slots + child, tl.where(scored, first_slot + text * width + before, -1), mask=admitted)
    num_useful = tl.sum(useful.to(tl.int32), axis=0)
    tl.store(following + offer, tl.where(offer < num_useful, total + offer, -1), mask=offer < width)
    tl.store(totals + layer + 1, total + tl.sum(admitted.to(tl.int32), axis=0))


@triton.jit
def unroll(totals, values, rows, row_nodes, layer, size, nodes):
    """Grid (blocks of all possible nodes and rows, texts): the root and the `size` nodes of the greatest values become
    the rows of a tree, in the order by value, which is an order with parents first. totals[text, layer]: the number of
    nodes, in the last layer. rows [texts, nodes]: the row of each node, -1 for none. row_nodes [texts, size + 1]: the
    inverse, -1 for rows that are not used."""
    text = tl.program_id(1)
    values, rows, row_nodes = values + text * nodes, rows + text * nodes, row_nodes + text * (size + 1)
    total = tl.load(totals + text * (layer + 1) + layer)
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    value = tl.load(values + node, mask=node < total, other=0.0)
    before = tl.zeros((NODES,), tl.int32)
    for other in range(1, total):
        other_value = tl.load(values + other)
        before += ((other_value > value) | ((other_value == value) & (other < node))).to(tl.int32)
    row = tl.where(node == 0, 0, before + 1)
    kept = (node < total) & (row <= size)
    tl.store(rows + node, tl.where(kept, row, -1), mask=node < total)
    tl.store(row_nodes + row, node, mask=kept)
    tl.store(row_nodes + node, tl.full((NODES,), -1, tl.int32), mask=(node >= total) & (node <= size))
