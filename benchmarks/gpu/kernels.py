"""The steps of a LLaMA between its large products, and those products for few rows, in the Triton language.

A compiler of engines fuses such steps; torch alone would launch forty kernels for a layer. Imported with
TRITON_INTERPRET=1 set, they run on host memory (`tests/benchmarks/test_gpu.py` compares them with torch).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# The values of a kernel have no Python types.

from __future__ import annotations

import triton
import triton.language as tl

SKINNY_ROWS = 16  # most rows of `skinny_product`, and the least that tl.dot multiplies


@triton.jit
def rms_norm(rows, weight, normed, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T,): rows, normed [T, SIZE]; weight [SIZE]. The mean is computed in fp32."""
    index = tl.arange(0, BLOCK)
    inside = index < SIZE
    row = tl.load(rows + tl.program_id(0) * SIZE + index, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / SIZE + epsilon)
    scaled = (row * scale).to(normed.dtype.element_ty) * tl.load(weight + index, mask=inside, other=0.0)
    tl.store(normed + tl.program_id(0) * SIZE + index, scaled, mask=inside)


@triton.jit(do_not_specialize=["capacity", "key_heads"])
def rotate_and_store(
    qkv, positions, cosines, sines, keys, values, first_slot, capacity, query_heads, key_heads, row_size,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (T, heads of q, k and v): queries of qkv [T, row_size] are rotated in place, keys are rotated into the cache
    [H_kv, capacity, D], values copied, at slot first_slot[0] + row. positions [T]; cosines, sines [positions, HALF]."""
    row, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, BLOCK)
    inside = index < HALF
    source = qkv + row * row_size + head * 2 * HALF + index
    first, second = tl.load(source, mask=inside), tl.load(source + HALF, mask=inside)
    slot = tl.load(first_slot) + row
    is_query, is_key = head < query_heads, head < query_heads + key_heads
    if is_key:
        table = tl.load(positions + row) * HALF + index
        cosine = tl.load(cosines + table, mask=inside).to(tl.float32)
        sine = tl.load(sines + table, mask=inside).to(tl.float32)
        one, two = first.to(tl.float32), second.to(tl.float32)
        first = (one * cosine - two * sine).to(first.dtype)
        second = (two * cosine + one * sine).to(second.dtype)
    cell = slot * 2 * HALF + index
    if is_query:
        tl.store(source, first, mask=inside)
        tl.store(source + HALF, second, mask=inside)
    elif is_key:
        target = keys + (head - query_heads).to(tl.int64) * capacity * 2 * HALF + cell
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
    else:
        target = values + (head - query_heads - key_heads).to(tl.int64) * capacity * 2 * HALF + cell
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)


@triton.jit
def gate(both, gated, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (T, blocks): both [T, 2 * SIZE] -> silu(first half) * second half, [T, SIZE]."""
    row = tl.program_id(0)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < SIZE
    source = both + row * 2 * SIZE + index
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32)
    tl.store(gated + row * SIZE + index, (first * tl.sigmoid(first) * second).to(gated.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def skinny_product(
    rows, weight, norm, residual, result, count, outputs, epsilon,
    INPUTS: tl.constexpr, NORMS: tl.constexpr, GATES: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of outputs,): rows [T <= 16, INPUTS] times weight [outputs, INPUTS] into result [T, outputs]. Each
    weight is read once. NORMS: of the rows' RMSNorm with the weight norm [INPUTS]. GATES: weight [2 * outputs, INPUTS],
    and the result is silu(first half) * second half. ADDS: plus residual [T, outputs]."""
    row, output = tl.arange(0, 16), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    is_row, is_output = row < count, output < outputs
    sums = tl.zeros((16, BLOCK_N), tl.float32)
    others = tl.zeros((16, BLOCK_N), tl.float32)
    squares = tl.zeros((16,), tl.float32)
    weights = weight + output[:, None].to(tl.int64) * INPUTS + column[None, :]
    inputs = rows + row[:, None] * INPUTS + column[None, :]
    for start in range(0, INPUTS, BLOCK_K):
        inside = (start + column < INPUTS)[None, :]
        left = tl.load(inputs + start, mask=is_row[:, None] & inside, other=0.0)
        if NORMS:
            wide = left.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            left = left * tl.load(norm + start + column, mask=start + column < INPUTS, other=0.0)[None, :]
        right = tl.load(weights + start, mask=is_output[:, None] & inside, other=0.0, eviction_policy="evict_first")
        sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
        if GATES:
            second = weights + outputs.to(tl.int64) * INPUTS + start
            right = tl.load(second, mask=is_output[:, None] & inside, other=0.0, eviction_policy="evict_first")
            others = tl.dot(left, tl.trans(right), others, input_precision="ieee")
    if NORMS:
        scale = tl.rsqrt(squares / INPUTS + epsilon)[:, None]
        sums *= scale
        others *= scale
    if GATES:
        sums = sums * tl.sigmoid(sums) * others
    cell, is_cell = row[:, None] * outputs + output[None, :], is_row[:, None] & is_output[None, :]
    if ADDS:
        sums += tl.load(residual + cell, mask=is_cell, other=0.0).to(tl.float32)
    tl.store(result + cell, sums.to(result.dtype.element_ty), mask=is_cell)
