"""Block verification of a drawn chain on the device, in the OpenAI Triton language: `block_verification` of the
runtime, with its symbols.

P: the target's distribution at a row, weights of `drawing.py` over their sum. Q: the draft's, `weights` [depth, V] over
`masses` [depth + 1]. Row i of the target is of node i.
"""

import triton
import triton.language as tl

from .drawing import BLOCK, BLOCKS, find, mass_of, peak_of, weights_at


@triton.jit
def chances(scores, weights, masses, tokens, pi, row_peaks, columns, blocks, depth):
    """Grid (1,): pi[i], the probability that the first i tokens are accepted together."""
    p = tl.full((), 1.0, tl.float64)
    tl.store(pi, p)
    for row in range(depth):
        peak = peak_of(scores.block_peaks, row, blocks)
        x = tl.load(tokens + row + 1)
        bound, last = tl.load(scores.bounds + row), tl.load(scores.lasts + row)
        P = weights_at(scores.logits + row.to(tl.int64) * columns, x, columns, peak, scores.settings, bound, last)
        P /= mass_of(scores.sums, row, blocks)
        Q = tl.load(weights + row.to(tl.int64) * columns + x) / tl.load(masses + row)
        p = tl.minimum(p * P / Q, 1.0)
        tl.store(pi + row + 1, p)
        tl.store(row_peaks + row, peak)
    tl.store(row_peaks + depth, peak_of(scores.block_peaks, depth, blocks))


@triton.jit
def excess(scores, weights, masses, pi, excesses, columns, blocks):
    """Grid (depth, blocks): the sum of max(p P - Q, 0) over each block of tokens."""
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    peak, mass = peak_of(scores.block_peaks, row, blocks), mass_of(scores.sums, row, blocks)
    bound, last = tl.load(scores.bounds + row), tl.load(scores.lasts + row)
    weight = weights_at(scores.logits + row.to(tl.int64) * columns, column, columns, peak, scores.settings, bound, last)
    over = residual(weight / mass, weights, masses, pi, row, column, columns, column < columns)
    tl.store(excesses + row * blocks + block, tl.sum(over, axis=0))


@triton.jit
def accept(scores, weights, masses, pi, excesses, tests, last, tokens, drawn, columns, blocks, depth):
    """Grid (1,): tests from the last token to the first with the uniform numbers `tests`, then the next token with
    `last`. drawn [depth + 1]: the next node's token at the root and at accepted rows, at the last of them ~ of the next
    token."""
    block = tl.arange(0, BLOCKS)
    tau, test = depth, 1
    p = tl.load(pi + depth)
    S = tl.full((), 0.0, tl.float64)
    h = p
    while (tau > 0) & (tl.load(tests + test - 1) >= h):
        tau -= 1
        test += 1
        p = tl.load(pi + tau)
        S = mass_of(excesses, tau, blocks)
        h = tl.where(S == 0, (p == 1).to(tl.float64), S / (S + (1.0 - p)))
    for row in range(tau):
        tl.store(drawn + row, tl.load(tokens + row + 1).to(tl.int64))

    is_target = S == 0  # all tokens are accepted, or P = Q
    peak, mass = peak_of(scores.block_peaks, tau, blocks), mass_of(scores.sums, tau, blocks)
    inside = block < blocks
    share = tl.load(scores.sums + tau * blocks + block, mask=inside, other=0.0)
    over = tl.load(excesses + tau * blocks + block, mask=inside & (tau < depth), other=0.0)
    at = tl.load(last) * tl.where(is_target, mass, S)
    chosen, rest = find(tl.where(is_target, share, over), at, BLOCKS)
    column = chosen * BLOCK + tl.arange(0, BLOCK)
    bound, greatest = tl.load(scores.bounds + tau), tl.load(scores.lasts + tau)
    weight = weights_at(
        scores.logits + tau.to(tl.int64) * columns, column, columns, peak, scores.settings, bound, greatest
    )
    over = residual(weight / mass, weights, masses, pi, tau, column, columns, (column < columns) & (tau < depth))
    place, _ = find(tl.where(is_target, weight, over), rest, BLOCK)
    tl.store(drawn + tau, ~(chosen * BLOCK + place).to(tl.int64))


@triton.jit
def residual(P, weights, masses, pi, row, column, columns, inside):
    """max(p P - Q, 0) at these columns."""
    Q = tl.load(weights + row.to(tl.int64) * columns + column, mask=inside, other=0.0) / tl.load(masses + row)
    return tl.where(inside, tl.maximum(tl.load(pi + row) * P - Q, 0.0), 0.0)
