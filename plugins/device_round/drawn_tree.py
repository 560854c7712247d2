"""Verification of a tree of drawn tokens on the device, in the OpenAI Triton language: `traversal_verification` and
`recursive_rejection` of the runtime, with their symbols.

R is the residual of the target's distribution at a row, and D the distribution from which a child was drawn: the
draft's without the siblings before it. offers [nodes that the draft has scored, V]: the tokens that the draft can draw,
as columns, and their weights. All other tokens of a row keep their proportions, so only their sum is computed. How a
child was refused is kept: its mass (the sum of the draft's weights), pi and S. From these numbers R can be computed
anew for every token of the row where verification ends.
"""

import triton
import triton.language as tl

from . import images
from .drawing import BLOCK, mass_of, peak_of, weights_at
from .remainder import ROWS, next_child, scored_at

UNUSED = tl.constexpr(-2)  # the parent of a row without a node
LIST_BLOCK = tl.constexpr(images.LIST_BLOCK)


@triton.jit
def prepare(
    scores, draft_weights, row_nodes, rows, parents, slots, weights, rest, row_parents, row_peaks, columns, blocks
):
    """Grid (size + 1, blocks): the target's weights [rows, V], and rest [rows, blocks], those of the tokens that the
    draft cannot draw there. draft_weights: [scored nodes, V]. row_parents [rows]: -1 for the root."""
    row, block = tl.program_id(0), tl.program_id(1)
    node = tl.load(row_nodes + row)
    scored = scored_at(slots, node)
    column = block * BLOCK + tl.arange(0, BLOCK)
    peak = peak_of(scores.block_peaks, row, blocks)
    bound, last = tl.load(scores.bounds + row), tl.load(scores.lasts + row)
    weight = weights_at(scores.logits + row.to(tl.int64) * columns, column, columns, peak, scores.settings, bound, last)
    Q = tl.load(draft_weights + scored.to(tl.int64) * columns + column, mask=column < columns, other=0.0)
    tl.store(weights + row.to(tl.int64) * columns + column, weight, mask=column < columns)
    tl.store(rest + row * blocks + block, tl.sum(tl.where(Q == 0, weight, 0.0), axis=0))
    if block == 0:
        parent = tl.load(parents + node, mask=node >= 0, other=-1)
        parent = tl.load(rows + parent, mask=parent >= 0, other=-1)
        tl.store(row_parents + row, tl.where(node >= 0, parent, UNUSED))
        tl.store(row_peaks + row, peak)


@triton.jit
def refuse(
    weights, rest, offers, tree, scratch, refusals, chances, columns, blocks, width, num_names, size, is_traversal
):
    """Grid (1,): what each child is tested with, if its elder siblings were refused, and how it is refused itself: its
    masses, pis and totals [rows]. chances [rows]: in a traversal pi of a row, after all its children were refused; else
    the probability that the row is accepted. norms [rows]: the target's mass. width: the draft's columns."""
    index = tl.arange(0, ROWS)
    tl.store(chances + index, tl.full((ROWS,), 1.0, tl.float64), mask=index <= size)
    tl.debug_barrier()
    for row in range(size):
        child = next_child(tree.row_parents, row, 0, size)
        if child < ROWS:
            pi = tl.where(is_traversal > 0, tl.load(chances + row), 1.0)
            scored = scored_at(tree.slots, tl.load(tree.row_nodes + row))
            count, list_at = tl.load(offers.counts + scored), scored.to(tl.int64) * width
            own, columns_at = offers.weights + list_at, offers.columns + list_at
            R_others = mass_of(rest, row, blocks)
            target = weights + row.to(tl.int64) * columns
            weight = begin(target, own, columns_at, offers.names, scratch, count, num_names)
            tl.store(refusals.norms + row, weight + R_others)
            scale = 1.0 / (weight + R_others)
            R_others *= scale
            while child < ROWS:
                y = tl.load(tree.tokens + tl.load(tree.row_nodes + child))
                mass, ratio = offered(scratch, columns_at, offers.names, y, count, num_names, scale)
                tl.store(chances + child, tl.minimum(pi * ratio, 1.0))
                S = refused(scratch, columns_at, offers.names, y, count, num_names, pi * scale, mass)
                S += pi * R_others
                tl.store(refusals.masses + child, mass)
                tl.store(refusals.pis + child, pi)
                tl.store(refusals.totals + child, S)
                scale = tl.where(S > 0, 1.0 / S, 0.0)
                R_others *= pi * scale
                if is_traversal > 0:
                    pi = tl.where(S == 0, (pi == 1).to(tl.float64), S / (S + (1.0 - pi)))
                child = next_child(tree.row_parents, row, child, size)
            if is_traversal > 0:
                tl.debug_barrier()
                tl.store(chances + row, pi)
            tl.debug_barrier()


@triton.jit
def traverse(chances, tests, row_nodes, row_parents, tokens, drawn, num_tests, stop, size):
    """Grid (1,): traversal verification tests the rows from the leaves up with the uniform numbers `tests`. num_tests:
    how many it used. stop: the row where it ends. drawn: see `chain.accept`."""
    row, test, is_down, accepted = 0, 0, True, -1
    while accepted < 0:
        child = next_child(row_parents, row, 0, size)
        if is_down & (child < ROWS):
            row = child
        else:
            is_accepted = (row == 0) | (tl.load(tests + test, mask=test < size, other=0.0) < tl.load(chances + row))
            test += (row > 0).to(tl.int32)
            accepted = tl.where(is_accepted, row, -1)
            parent = tl.load(row_parents + row)
            sibling = next_child(row_parents, parent, row, size)
            is_down = sibling < ROWS
            row = tl.where(is_down, sibling, parent)
    tl.store(num_tests, test)
    end_at(accepted, row_parents, row_nodes, tokens, drawn, stop)


@triton.jit
def reject(chances, tests, row_nodes, row_parents, tokens, drawn, num_tests, stop, size):
    """Grid (1,): recursive rejection (DySpec, Algorithm 3) tests the children from the root down, as above."""
    row, test = 0, 0
    child = next_child(row_parents, row, 0, size)
    while child < ROWS:
        is_accepted = tl.load(tests + test) < tl.load(chances + child)
        test += 1
        row = tl.where(is_accepted, child, row)
        child = next_child(row_parents, row, tl.where(is_accepted, 0, child), size)
    tl.store(num_tests, test)
    end_at(row, row_parents, row_nodes, tokens, drawn, stop)


@triton.jit
def begin(target, own, columns_at, names, scratch, count, num_names):
    """residual, remaining: the target's and draft's weights of what the draft can draw. Returns the target's sum."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, count, LIST_BLOCK):
        place = start + tl.arange(0, LIST_BLOCK)
        token = token_at(columns_at, names, place, count, num_names)
        weight = tl.load(target + token, mask=place < count, other=0.0)
        tl.store(scratch.residual + place, weight, mask=place < count)
        tl.store(scratch.remaining + place, tl.load(own + place, mask=place < count, other=0.0), mask=place < count)
        total += tl.sum(weight, axis=0)
    tl.debug_barrier()
    return total


@triton.jit
def offered(scratch, columns_at, names, y, count, num_names, scale):
    """The draft's mass for token y, and R[y] / D[y]. `residual` times `scale` is R."""
    mass, R, D = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for start in range(0, count, LIST_BLOCK):
        place = start + tl.arange(0, LIST_BLOCK)
        is_y = (token_at(columns_at, names, place, count, num_names) == y) & (place < count)
        weight = tl.load(scratch.remaining + place, mask=place < count, other=0.0)
        mass += tl.sum(weight, axis=0)
        D += tl.sum(tl.where(is_y, weight, 0.0), axis=0)
        R += tl.sum(tl.load(scratch.residual + place, mask=is_y, other=0.0), axis=0)
    return mass, R * scale * mass / D


@triton.jit
def refused(scratch, columns_at, names, y, count, num_names, scale, mass):
    """`residual` becomes max(residual * scale - D, 0); `remaining` loses token y. Returns the sum of `residual`."""
    S, inverse = tl.full((), 0.0, tl.float64), 1.0 / mass
    for start in range(0, count, LIST_BLOCK):
        place = start + tl.arange(0, LIST_BLOCK)
        is_y = token_at(columns_at, names, place, count, num_names) == y
        D = tl.load(scratch.remaining + place, mask=place < count, other=0.0) * inverse
        excess = tl.load(scratch.residual + place, mask=place < count, other=0.0) * scale - D
        excess = tl.where(place < count, tl.maximum(excess, 0.0), 0.0)
        S += tl.sum(excess, axis=0)
        tl.debug_barrier()
        tl.store(scratch.residual + place, excess, mask=place < count)
        tl.store(scratch.remaining + place, tl.full((LIST_BLOCK,), 0.0, tl.float64), mask=is_y & (place < count))
    tl.debug_barrier()
    return S


@triton.jit
def token_at(columns_at, names, place, count, num_names):
    """The tokens of these places of a list of the draft's columns."""
    column = tl.load(columns_at + place, mask=place < count, other=0)
    return tl.where(num_names > 0, tl.load(names + column, mask=(place < count) & (num_names > 0), other=0), column)


@triton.jit
def end_at(row, row_parents, row_nodes, tokens, drawn, stop):
    """Verification ends at this row: on its path, `drawn` gets each next row's token."""
    tl.store(stop, row)
    while row > 0:
        parent = tl.load(row_parents + row)
        tl.store(drawn + parent, tl.load(tokens + tl.load(row_nodes + row)).to(tl.int64))
        row = parent
