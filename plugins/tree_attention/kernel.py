"""Tree attention over a static cache, in the OpenAI Triton language: one pass over keys and values, then a reduction.

The query heads that share a key/value head, times a sequence's rows, form the rows of one matrix (GQA packing): a key
or value is read once per key/value head and block of rows, and only for rows of its own sequence. Long texts are cut
into splits, each with its own softmax, and `combine_splits` combines their results (Flash-Decoding). The rows, slots
and splits of a program depend on `sequences` on the device, but the grid does not, so that a launch can be captured in
a CUDA graph: programs that a short text does not need end at once.

Scores are in units of log2, so that the exponential is one instruction. If this file is imported with
TRITON_INTERPRET=1 set, the code runs on host memory, and the process cannot compile it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Not specialised when equal to 1 or divisible by 16: one binary serves every width and context.
RUNTIME = ["capacity", "kv_heads", "rows", "columns", "num_splits"]


@triton.jit(do_not_specialize=RUNTIME)
def tree_attention(
    query,
    key,
    value,
    sequences,
    tree_mask,
    output,
    partial,
    logsum,
    live,
    log2_scale,
    capacity,
    kv_heads,
    rows,
    columns,
    num_splits,
    query_head,
    query_row,
    output_head,
    output_row,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
):
    """Grid (row blocks, N * H_kv, splits). A sequence that needs one split gets its `output`; others get `partial` and
    `logsum` of their splits. `live` says how many splits those are, unless the grid has one.

    query, output [H, T, D] by the strides given, in elements; key, value [H_kv, C, D], contiguous; sequences [N, 4];
    tree_mask [T, S], one byte each; partial [splits, H, T, D] and logsum [splits, H, T], fp32; live [H, T], int32.
    SPLIT_BLOCKS: the least blocks of slots in a split.
    """
    sequence = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    split = tl.program_id(2)
    # All indices are clamped, because a build measures kernels on arbitrary contents.
    entry = sequences + 4 * sequence
    first_row = tl.minimum(tl.maximum(tl.load(entry), 0), rows)
    is_last = (sequence + 1) * kv_heads == tl.num_programs(1)
    end_row = tl.minimum(tl.load(entry + 4, mask=is_last == 0, other=rows), rows)
    packed = tl.program_id(0) * BLOCK_M
    if packed >= (end_row - first_row) * GROUP:
        return  # the grid has programs for all rows in any single sequence

    # The committed slots and the mask's columns are numbered consecutively, independently of their place in the cache.
    first_slot = tl.minimum(tl.maximum(tl.load(entry + 1), 0), capacity)
    length = tl.minimum(tl.maximum(tl.load(entry + 2), 0), capacity - first_slot)
    tree_slot = tl.minimum(tl.maximum(tl.load(entry + 3), 0), capacity)
    end = length + tl.minimum(columns, capacity - tree_slot)
    blocks = tl.cdiv(end, BLOCK_N)
    committed_blocks = length // BLOCK_N
    blocks_per_split = tl.maximum(tl.cdiv(blocks, num_splits), SPLIT_BLOCKS)
    num_live = tl.maximum(tl.cdiv(blocks, blocks_per_split), 1)
    if split >= num_live:
        return
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, blocks)

    packed += tl.arange(0, BLOCK_M)
    row = first_row + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    dim = tl.arange(0, HEAD_BLOCK)
    in_head = (dim < HEAD_DIM)[None, :]
    in_rows = (row < end_row)[:, None]
    offsets = head * query_head + row * query_row
    queries = tl.load(query + offsets[:, None] + dim[None, :], mask=in_rows & in_head, other=0.0)

    cache = kv_head.to(tl.int64) * capacity * HEAD_DIM
    key += cache
    value += cache
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    attended = tl.zeros((BLOCK_M, HEAD_BLOCK), tl.float32)

    # Every row attends to every slot of these blocks: no mask is read.
    for block in range(first, tl.minimum(last, committed_blocks)):
        slot = first_slot + block * BLOCK_N + tl.arange(0, BLOCK_N)
        tile = slot[:, None] * HEAD_DIM + dim[None, :]
        keys = tl.load(key + tile, mask=in_head, other=0.0)
        values = tl.load(value + tile, mask=in_head, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * log2_scale
        peak, total, attended = accumulate(scores, values, peak, total, attended)

    for block in range(tl.maximum(first, committed_blocks), last):
        number = block * BLOCK_N + tl.arange(0, BLOCK_N)
        column = number - length
        slot = tl.where(column < 0, first_slot + number, tree_slot + column)
        within = (number < end)[None, :]
        committed = (column < 0)[None, :]
        cell = row[:, None] * columns + column[None, :]
        marked = tl.load(tree_mask + cell, mask=in_rows & within & (column >= 0)[None, :], other=0)
        visible = in_rows & within & (committed | (marked != 0))
        seen = tl.max(visible.to(tl.int32), axis=0)
        if tl.max(seen, axis=0) > 0:
            # Slots to which none of these rows attends are not read.
            wanted = (seen > 0)[:, None] & in_head
            tile = slot[:, None] * HEAD_DIM + dim[None, :]
            keys = tl.load(key + tile, mask=wanted, other=0.0)
            values = tl.load(value + tile, mask=wanted, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * log2_scale
            scores = tl.where(visible, scores, float("-inf"))
            peak, total, attended = accumulate(scores, values, peak, total, attended)

    divisor = tl.where(total == 0.0, 1.0, total)
    attended = attended / divisor[:, None]
    if (num_splits > 1) & (split == 0):
        tl.store(live + head * rows + row, tl.full((BLOCK_M,), 0, tl.int32) + num_live, mask=row < end_row)
    if num_live == 1:
        offsets = head * output_head + row * output_row
        result = attended.to(output.dtype.element_ty)
        tl.store(output + offsets[:, None] + dim[None, :], result, mask=in_rows & in_head)
    else:
        item = (split * kv_heads * GROUP + head) * rows + row
        tl.store(logsum + item, peak + tl.log2(divisor), mask=row < end_row)
        written = in_rows & in_head & (total > 0.0)[:, None]
        tl.store(partial + item[:, None] * HEAD_DIM + dim[None, :], attended, mask=written)


@triton.jit
def accumulate(scores, values, peak, total, attended):
    """One step of the online softmax. A row without visible slots so far keeps -inf, 0 and zeros, without NaN."""
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weights, axis=1)
    attended = tl.dot(weights.to(values.dtype), values, attended * decay[:, None], input_precision="ieee")
    return new_peak, total, attended


@triton.jit(do_not_specialize=["num_splits"])
def combine_splits(
    partial,
    logsum,
    live,
    output,
    num_splits,
    output_head,
    output_row,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    """Grid (T, H): weight the splits' results by their share of the softmax. Nothing else is read, and results without
    visible slots are not: a row of one split is finished already."""
    row, head = tl.program_id(0), tl.program_id(1)
    item = head * tl.num_programs(0) + row
    items = tl.num_programs(0) * tl.num_programs(1)
    num_live = tl.minimum(tl.load(live + item), num_splits)
    if num_live <= 1:
        return
    dim = tl.arange(0, HEAD_BLOCK)
    in_head = dim < HEAD_DIM
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    attended = tl.zeros((HEAD_BLOCK,), tl.float32)
    for start in range(0, num_live, SPLIT_BLOCK):
        split = start + tl.arange(0, SPLIT_BLOCK)
        share = tl.load(logsum + split * items + item, mask=split < num_live, other=float("-inf"))
        tile = (split * items + item)[:, None] * HEAD_DIM + dim[None, :]
        wanted = (share > float("-inf"))[:, None] & in_head[None, :]
        results = tl.load(partial + tile, mask=wanted, other=0.0)
        new_peak = tl.maximum(peak, tl.max(share, axis=0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(share - base)
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, axis=0)
        attended = attended * decay + tl.sum(results * weights[:, None], axis=0)
        peak = new_peak
    attended = attended / tl.where(total == 0.0, 1.0, total)
    offsets = head * output_head + row * output_row
    tl.store(output + offsets + dim, attended.to(output.dtype.element_ty), mask=in_head)
