"""Draws from rows of logits above temperature 0, on the device, in the OpenAI Triton language.

A row's weights are exp((logit - peak) / temperature) in fp64, and 0 for logits below peak + offset, and for what top-k
and top-p leave out: weights below bounds[row], and those equal to it in columns above lasts[row]. `settings` are
(temperature, offset, top-p, top-k); top-k 0 keeps all tokens. A row is cut into blocks. The sum of its weights is the
sum of the blocks' sums, always in the same order, so that every kernel finds the same number. The token of a uniform
number u is the first whose cumulative weight exceeds u times the sum: first its block, then its place in the block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import images

LEVELS = tl.constexpr(images.LEVELS)
BLOCK, BLOCKS = tl.constexpr(images.TOKEN_BLOCK), tl.constexpr(images.MAX_BLOCKS)


@triton.jit
def peaks(logits, block_peaks, columns, blocks):
    """Grid (rows, blocks): the largest logit of each block of logits [rows, V = columns]; +inf if one is NaN."""
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row.to(tl.int64) * columns + column, mask=column < columns, other=float("-inf"))
    tl.store(block_peaks + row * blocks + block, tl.max(tl.where(logit == logit, logit, float("inf")), axis=0))


@triton.jit
def weigh(scores, weights, names, likely, counts, columns, blocks, num_names, stride, is_cut):
    """Grid (rows, blocks): the sum of the weights of each block. is_cut: whether `cut` has found the bounds; else there
    are none. weights [rows, stride]: of each token, if `stride` is not 0; names [num_names]: the token of each column
    of a trimmed draft. likely, counts [rows, LEVELS, blocks]: sum and number of the weights of each level.
    """
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    bound = tl.load(scores.bounds + row, mask=is_cut > 0, other=-1.0)
    last = tl.load(scores.lasts + row, mask=is_cut > 0, other=0)
    peak = peak_of(scores.block_peaks, row, blocks)
    weight = weights_at(scores.logits + row.to(tl.int64) * columns, column, columns, peak, scores.settings, bound, last)
    tl.store(scores.sums + row * blocks + block, tl.sum(weight, axis=0))
    token = tl.where(num_names > 0, tl.load(names + column, mask=inside & (num_names > 0), other=0), column)
    tl.store(weights + row.to(tl.int64) * stride + token, weight, mask=inside & (stride > 0))
    for level in tl.static_range(LEVELS):
        is_likely, place = is_of(weight, level), (row * LEVELS + level) * blocks + block
        tl.store(likely + place, tl.sum(tl.where(is_likely, weight, 0.0), axis=0))
        tl.store(counts + place, tl.sum(is_likely.to(tl.int32), axis=0))
    if (block == 0) & (is_cut == 0):
        tl.store(scores.bounds + row, tl.full((), -1.0, tl.float64))
        tl.store(scores.lasts + row, 0)


@triton.jit
def extend(scores, uniforms, names, tree, masses, shares, row_peaks, columns, blocks, num_names, layer, slot):
    """Grid (1,): draw the token of a chain's node layer + 1 from logits [V = columns], and make it the next frontier.
    slot: of the node in the draft's cache; -1 if the draft will not score it. masses[layer]: the sum of the weights;
    shares[layer]: the token's probability; row_peaks[layer]: the peak. All values are equal, so rows stand in the order
    of creation."""
    peak = peak_of(scores.block_peaks, 0, blocks)
    mass = mass_of(scores.sums, 0, blocks)
    block = tl.arange(0, BLOCKS)
    in_blocks = tl.load(scores.sums + block, mask=block < blocks, other=0.0)
    chosen, rest = find(in_blocks, tl.load(uniforms + layer) * mass, BLOCKS)
    column = chosen * BLOCK + tl.arange(0, BLOCK)
    bound, last = tl.load(scores.bounds), tl.load(scores.lasts)
    weight = weights_at(scores.logits, column, columns, peak, scores.settings, bound, last)
    place, _ = find(weight, rest, BLOCK)
    column = chosen * BLOCK + place
    share = tl.sum(tl.where(tl.arange(0, BLOCK) == place, weight, 0.0), axis=0) / mass
    token = tl.where(num_names > 0, tl.load(names + column, mask=num_names > 0, other=0), column)
    child = layer + 1
    tl.store(tree.tokens + child, token)
    tl.store(tree.parents + child, layer)
    tl.store(tree.depths + child, child)
    tl.store(tree.slots + child, slot)
    tl.store(tree.node_values + child, tl.full((), 0.0, tl.float64))
    tl.store(tree.frontier + child, child)
    tl.store(tree.totals + child, child + 1)
    tl.store(masses + layer, mass)
    tl.store(shares + layer, share)
    tl.store(row_peaks + layer, peak)


@triton.jit
def draw(scores, uniforms, row_nodes, depths, drawn, row_peaks, columns, blocks, size):
    """Grid (size + 1,): draw a token after each row. Rows of one depth share a number: one is on the accepted path."""
    row = tl.program_id(0)
    node = tl.load(row_nodes + row)
    uniform = tl.load(uniforms + tl.load(depths + node, mask=node >= 0, other=0))
    peak = peak_of(scores.block_peaks, row, blocks)
    block = tl.arange(0, BLOCKS)
    at = uniform * mass_of(scores.sums, row, blocks)
    chosen, rest = find(tl.load(scores.sums + row * blocks + block, mask=block < blocks, other=0.0), at, BLOCKS)
    column = chosen * BLOCK + tl.arange(0, BLOCK)
    bound, last = tl.load(scores.bounds + row), tl.load(scores.lasts + row)
    weight = weights_at(scores.logits + row.to(tl.int64) * columns, column, columns, peak, scores.settings, bound, last)
    place, _ = find(weight, rest, BLOCK)
    tl.store(drawn + row, (chosen * BLOCK + place).to(tl.int64))
    tl.store(row_peaks + row, peak)


@triton.jit
def peak_of(block_peaks, row, blocks):
    block = tl.arange(0, BLOCKS)
    return tl.max(tl.load(block_peaks + row * blocks + block, mask=block < blocks, other=float("-inf")), axis=0)


@triton.jit
def mass_of(sums, row, blocks):
    block = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0), axis=0)


@triton.jit
def is_of(weight, level):
    """Whether a weight belongs to a level: not far below the peak's, farther below, or above 0."""
    return (weight > 0) & (weight >= tl.where(level == 0, 1e-4, tl.where(level == 1, 1e-8, 0.0)))


@triton.jit
def weights_at(logits, column, columns, peak, settings, bound, last):
    """The weights of these columns; 0 outside of the row."""
    logit = tl.load(logits + column, mask=column < columns, other=float("-inf"))
    temperature, offset = tl.load(settings), tl.load(settings + 1)
    least = (peak.to(tl.float64) + offset).to(tl.float32)
    weight = tl.exp((logit.to(tl.float64) - peak.to(tl.float64)) / temperature)
    kept = (logit >= least) & (column < columns) & ((weight > bound) | ((weight == bound) & (column <= last)))
    return tl.where(kept, weight, 0.0)


@triton.jit
def find(weights, at, COUNT: tl.constexpr):
    """The first index whose cumulative weight exceeds `at`, and what `at` exceeds the weights before it by. Never an
    index of weight 0: a rounding error at the end selects the last of the others."""
    index = tl.arange(0, COUNT)
    positive = weights > 0
    first = tl.min(tl.where(positive & (tl.cumsum(weights, axis=0) > at), index, COUNT), axis=0)
    chosen = tl.minimum(first, tl.max(tl.where(positive, index, 0), axis=0))
    return chosen, at - tl.sum(tl.where(index < chosen, weights, 0.0), axis=0)
