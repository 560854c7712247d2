"""DySpec's token tree, drawn on the device in the OpenAI Triton language: `DySpecLayers` of the runtime, ties included.

Values are log-values as there. reach [nodes]: the value of the first site below a node, as long as a token is expected
there; -inf otherwise. ranks [nodes]: siblings drawn before a node. A token is expected at each drawn site and at each
reach; a drawn site of rank 0 is its parent's reach. Since every draw adds a node, node n has the uniform number n - 1.
"""

import triton
import triton.language as tl

from . import images
from .drawing import BLOCK, BLOCKS, find, peak_of

RANKS, BINS = tl.constexpr(images.RANKS), tl.constexpr(images.BINS)
NODES = tl.constexpr(images.OFFER_BLOCK)
NEVER = tl.constexpr(float("-inf"))


@triton.jit
def grow(draft, uniforms, estimates, names, tree, sites, found, sizes, layer, width, size, rows, first_slot):
    """Grid (1,): draw a layer of tokens below the nodes frontier[layer, :width], at one site after the other, and
    choose those that the next draft pass scores.

    sums [rows, blocks], weights [rows, stride]: of the draft's tokens after these nodes. A token that was drawn is left
    out of the sums, and its weight gets a minus sign. estimates [RANKS, BINS, 2]: log a and log (1 - a) by rank and
    probability. first_slot: see `growth.expand`; -1 for the last layer. row_peaks [rows]: the peaks; 0 for rows without
    a node. num_drawn: of all layers.
    """
    total = tl.load(tree.totals + layer)
    first = total
    if layer == 0:
        tl.store(sites.reach, tl.full((), 0.0, tl.float64))
        tl.store(sites.ranks, 0)
        tl.store(found.shares, tl.full((), 1.0, tl.float64))
        tl.debug_barrier()
    for row in range(rows):
        is_scored = tl.load(tree.frontier + layer * width + row) >= 0
        tl.store(found.row_peaks + row, tl.where(is_scored, peak_of(draft.block_peaks, row, sizes.blocks), 0.0))
    index, block = tl.arange(0, NODES), tl.arange(0, BLOCKS)
    node = tl.load(tree.frontier + layer * width + index, mask=index < width, other=-1)
    site = tl.load(sites.reach + node, mask=node >= 0, other=NEVER)  # of the next draw below each node
    rank = tl.zeros((NODES,), tl.int32)

    log_v = tl.max(site, axis=0)
    is_drawn = log_v > NEVER
    while is_drawn:
        n = tl.min(tl.where((site == log_v) & (node >= 0), node, first), axis=0)
        row = tl.sum(tl.where(node == n, index, 0), axis=0)
        siblings = tl.sum(tl.where(node == n, rank, 0), axis=0)
        above, as_good = expected(tree, sites, total, log_v)
        is_drawn = tl.where(siblings > 0, as_good, above) < size
        if is_drawn:
            in_blocks = tl.load(draft.sums + row * sizes.blocks + block, mask=block < sizes.blocks, other=0.0)
            mass = tl.sum(in_blocks, axis=0)
            chosen, rest = find(in_blocks, tl.load(uniforms + total - 1) * mass, BLOCKS)
            column = chosen * BLOCK + tl.arange(0, BLOCK)
            token = tl.load(names + column, mask=(column < sizes.columns) & (sizes.num_names > 0), other=0)
            token = tl.where(sizes.num_names > 0, token, column)
            R = tl.load(draft.weights + row.to(tl.int64) * sizes.stride + token, mask=column < sizes.columns, other=0.0)
            R = tl.maximum(R, 0.0)
            place, _ = find(R, rest, BLOCK)
            is_y = tl.arange(0, BLOCK) == place
            y, weight = tl.sum(tl.where(is_y, token, 0), axis=0), tl.sum(tl.where(is_y, R, 0.0), axis=0)
            left = tl.sum(tl.where(is_y, 0.0, R), axis=0)
            is_exhausted = tl.sum(tl.where(block == chosen, left, in_blocks), axis=0) == 0
            cell = 2 * (tl.minimum(siblings, RANKS - 1) * BINS + bin_of(weight / mass))
            tl.debug_barrier()  # before the weight and the sum are replaced
            tl.store(draft.weights + row.to(tl.int64) * sizes.stride + y, -weight)
            tl.store(draft.sums + row * sizes.blocks + chosen, left)
            value = tl.load(tree.node_values + n)
            tl.store(tree.tokens + total, y)
            tl.store(tree.parents + total, n)
            tl.store(tree.depths + total, layer + 1)
            tl.store(tree.slots + total, -1)
            tl.store(tree.node_values + total, value + (log_v - value))  # rounded as the host rounds it
            tl.store(sites.reach + total, tl.where(first_slot < 0, NEVER, log_v + tl.load(estimates + cell)))
            tl.store(sites.ranks + total, siblings)
            tl.store(found.shares + total, weight / mass)
            tl.debug_barrier()
            following = tl.where(is_exhausted, NEVER, log_v + tl.load(estimates + cell + 1))
            site = tl.where(node == n, following, site)
            rank += (node == n).to(tl.int32)
            total += 1
            log_v = tl.max(site, axis=0)
            is_drawn = log_v > NEVER
    tl.store(tree.totals + layer + 1, total)
    tl.store(found.num_drawn, total - 1)
    if first_slot >= 0:
        next_frontier(tree, sites, layer + 1, first, total, width, size, first_slot)


@triton.jit
def next_frontier(tree, sites, layer, first, total, width, size, first_slot):
    """The layer's `width` greatest reaches below which a token is expected; at the others of them none is."""
    following, index = tree.frontier + layer * width, tl.arange(0, NODES)
    child = first + index
    mine = tl.load(sites.reach + child, mask=child < total, other=NEVER)
    above = tl.zeros((NODES,), tl.int32)  # expected tokens of greater value
    before = tl.zeros((NODES,), tl.int32)  # nodes of the layer that come first
    for other in range(total):
        theirs = tl.load(sites.reach + other)
        is_above = (tl.load(sites.ranks + other) > 0) & (tl.load(tree.node_values + other) > mine)
        above += (theirs > mine).to(tl.int32) + is_above.to(tl.int32)
        precedes = (theirs > mine) | ((theirs == mine) & (other < child))
        before += (precedes & (other >= first)).to(tl.int32)
    is_useful = (mine > NEVER) & (above < size)
    is_scored = is_useful & (before < width)
    useful = tl.sum(is_useful.to(tl.int32), axis=0)
    tl.debug_barrier()  # after all reaches were read
    tl.store(sites.reach + child, tl.full((NODES,), NEVER, tl.float64), mask=is_useful & (before >= width))
    tl.store(tree.slots + child, first_slot + before, mask=is_scored)
    tl.store(following + before, child, mask=is_scored)
    tl.store(following + index, tl.full((NODES,), -1, tl.int32), mask=(index >= useful) & (index < width))


@triton.jit
def expected(tree, sites, total, log_v):
    """The number of expected tokens of a greater value, and of at least this value."""
    above, as_good = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, total, NODES):
        node = start + tl.arange(0, NODES)
        inside = node < total
        is_drawn = tl.load(sites.ranks + node, mask=inside, other=0) > 0
        value = tl.where(is_drawn, tl.load(tree.node_values + node, mask=inside, other=NEVER), NEVER)
        open_site = tl.load(sites.reach + node, mask=inside, other=NEVER)
        above += tl.sum((value > log_v).to(tl.int32) + (open_site > log_v).to(tl.int32), axis=0)
        as_good += tl.sum((value >= log_v).to(tl.int32) + (open_site >= log_v).to(tl.int32), axis=0)
    return above, as_good


@triton.jit
def bin_of(share):
    """The bin of a probability: b for those in (2^-(b+1), 2^-b], and the last one for all smaller ones."""
    b = tl.arange(0, 16)
    border = ((1023 - b).to(tl.int64) << 52).to(tl.float64, bitcast=True)  # 2^-b
    return tl.sum(((b > 0) & (b < BINS) & (share <= border)).to(tl.int32), axis=0)
