"""What top-k and top-p leave of rows, on the device, in the OpenAI Triton language. For rows see `drawing.py`.

Both keep the greatest weights, and of equal ones the first, so that a bound and a column describe what they keep.
"""

import triton
import triton.language as tl

from .drawing import BLOCK, BLOCKS, LEVELS, is_of, mass_of, peak_of, weights_at

BITS = tl.constexpr(62)  # of a weight in [0, 1]


@triton.jit
def gather(scores, likely, counts, found, found_weights, found_columns, columns, blocks, every):
    """Grid (rows, blocks): found_weights, found_columns [rows, V] get the tokens of a level of each row in order, found
    [rows] their number. The level is the first one that has enough tokens for top-k, or enough mass for top-p alone;
    every: all tokens of positive weight."""
    row, block = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, BLOCKS)
    mass, top_k = tl.load(scores.settings + 2) * mass_of(scores.sums, row, blocks), tl.load(scores.settings + 3)
    level = LEVELS - 1
    for less in tl.static_range(1, LEVELS):
        other = row * LEVELS + LEVELS - 1 - less
        number = tl.sum(tl.load(counts + other * blocks + index, mask=index < blocks, other=0), axis=0)
        is_enough = tl.where(top_k > 0, number >= top_k, mass_of(likely, other, blocks) >= mass)
        level = tl.where(is_enough & (every == 0), LEVELS - 1 - less, level)
    number = tl.load(counts + (row * LEVELS + level) * blocks + index, mask=index < blocks, other=0)
    column = block * BLOCK + tl.arange(0, BLOCK)
    peak = peak_of(scores.block_peaks, row, blocks)
    logits = scores.logits + row.to(tl.int64) * columns
    bound, last = tl.load(scores.bounds + row), tl.load(scores.lasts + row)
    weight = weights_at(logits, column, columns, peak, scores.settings, bound, last)
    kept = is_of(weight, level)
    before = tl.sum(tl.where(index < block, number, 0), axis=0)
    place = row.to(tl.int64) * columns + before + tl.cumsum(kept.to(tl.int32), axis=0) - 1
    tl.store(found_weights + place, weight, mask=kept)
    tl.store(found_columns + place, column, mask=kept)
    if block == 0:
        tl.store(found + row, tl.sum(number, axis=0))


@triton.jit
def cut(settings, sums, bounds, lasts, found, found_weights, found_columns, columns, blocks):
    """Grid (rows,): the bound of top-k, then that of top-p among the tokens that top-k has left: the greatest weight
    such that it and the greater ones are k tokens, or have the mass, together. The bits of weights are ordered as
    weights are, so the bound is found bit by bit."""
    row = tl.program_id(0)
    count, top_p, top_k = tl.load(found + row), tl.load(settings + 2), tl.load(settings + 3)
    weights, tokens = found_weights + row.to(tl.int64) * columns, found_columns + row.to(tl.int64) * columns
    mass = mass_of(sums, row, blocks)
    bound, last = tl.full((), -1.0, tl.float64), columns
    for step in range(2):
        is_count = step == 0
        if tl.where(is_count, (top_k > 0) & (count > top_k), top_p < 1):
            needed = tl.where(is_count, top_k, top_p * mass)
            total = tl.full((), -1.0, tl.float64)
            least = tl.full((), 0, tl.int64)
            bit = BITS - 1
            while (bit >= 0) & (total != needed):
                higher = least | (tl.full((), 1, tl.int64) << bit)
                total = reached(weights, tokens, count, higher, bound, last, is_count)
                least = tl.where(total >= needed, higher, least)
                bit -= 1
            total = reached(weights, tokens, count, least + 1, bound, last, is_count)
            end = tl.where(least.to(tl.float64, bitcast=True) == bound, last, columns)
            for start in range(0, count, BLOCK):
                value, token, weight = values_at(weights, tokens, start, count, bound, last, is_count)
                tie = tl.where(weight.to(tl.int64, bitcast=True) == least, value, 0.0)
                is_enough = (tie > 0) & (total + tl.cumsum(tie, axis=0) >= needed)
                end = tl.minimum(end, tl.min(tl.where(is_enough, token, columns), axis=0))
                total += tl.sum(tie, axis=0)
            bound, last = least.to(tl.float64, bitcast=True), end
        if is_count & (top_k > 0):
            mass = reached(weights, tokens, count, tl.full((), 0, tl.int64), bound, last, False)
    tl.store(bounds + row, bound)
    tl.store(lasts + row, last)


@triton.jit
def reached(weights, tokens, count, least, bound, last, is_count):
    """The sum of the values of the tokens whose weights have at least these bits."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        value, _, weight = values_at(weights, tokens, start, count, bound, last, is_count)
        total += tl.sum(tl.where(weight.to(tl.int64, bitcast=True) >= least, value, 0.0), axis=0)
    return total


@triton.jit
def values_at(weights, tokens, start, count, bound, last, is_count):
    """What the tokens of these places add, their numbers and weights. Each one adds its weight, or 1 if they are
    counted; nothing if an earlier bound leaves it out."""
    place = start + tl.arange(0, BLOCK)
    weight = tl.load(weights + place, mask=place < count, other=0.0)
    token = tl.load(tokens + place, mask=place < count, other=0)
    kept = (place < count) & ((weight > bound) | ((weight == bound) & (token <= last)))
    return tl.where(kept, tl.where(is_count, 1.0, weight), 0.0), token, weight
