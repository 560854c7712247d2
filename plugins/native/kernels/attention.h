/* Tree attention over a cache in panels: keys [kv head][slot / 16][head_dim][16], values [kv head][dim / 16][slot][16].
 *
 * Both products are tiles of matrix.h. A slot that a row does not see weighs exactly nothing, all numbers being
 * finite, and the sum of the weights does not depend on their order: so a row's result has the same bits wherever in
 * the cache its ancestors lie, as long as they lie in the order of the text. */
#pragma once
#include "matrix.h"

#define MOST_WEIGHT 4194303.0f /* of 22 bits */
#define WHOLE 256 /* such weights' sum fits 31 */
#define MOST_QUERIES (8 * MOST_ROWS) /* that meet a panel of the cache one tile after the other */
#define BLOCK 128 /* slots whose values stay in the first cache meanwhile */

/* Room for a row of scores: an odd number of lines, so that rows do not meet in a few sets of the first cache. */
INLINE size_t odd_lines(int capacity) { return (size_t)(capacity / LANES | 1) * LANES; }

/* What every row of a pass sees, by panels of 16 slots. */
struct panel_mask {
    uint16_t *bits; /* [rows][panels]: bit i of a panel is its slot i */
    int panels;
};

/* length: committed slots, seen by all. mask: bytes [rows][columns], of the slots behind them. */
static void pack_mask(const struct panel_mask *packed, int row, const uint8_t *mask, int length, int columns) {
    uint16_t *bits = packed->bits + (size_t)row * packed->panels;
    memset(bits, 0, packed->panels * sizeof *bits);
    memset(bits, 0xff, length / LANES * sizeof *bits);
    if (length % LANES) bits[length / LANES] = (uint16_t)((1 << length % LANES) - 1);
    mask += (size_t)row * columns;
    for (int column = 0; column < columns; column++) {
        int slot = length + column;
        bits[slot / LANES] |= (uint16_t)((mask[column] != 0) << slot % LANES);
    }
}

/* Whether two rows see much the same panels. Rows of different requests do not: together each would pay for both. */
static int similar_masks(const struct panel_mask *mask, int row, int other) {
    const uint16_t *one = mask->bits + (size_t)row * mask->panels, *two = mask->bits + (size_t)other * mask->panels;
    int both = 0, either = 0;
    for (int panel = 0; panel < mask->panels; panel++) {
        both += one[panel] && two[panel];
        either += one[panel] || two[panel];
    }
    return 2 * (either - both) <= both + 4;
}

/* The next run of panels from `panel` on that any of the rows sees; returns its end, or 0 when there is none. */
static int next_run(const struct panel_mask *mask, const int *rows, int count, int *panel) {
    int end = 0;
    for (int at = *panel; at < mask->panels; at++) {
        uint16_t any = 0;
        for (int r = 0; r < count && !any; r++) any = mask->bits[(size_t)rows[r] * mask->panels + at];
        if (any && !end) *panel = at;
        if (any) end = at + 1;
        if (!any && end) break;
    }
    return end;
}

/* sums[r][p] += rows[r][from..from + inputs) * panels[p], in tiles; `next`: what comes after these panels. */
static void products(int count, int panels, const float *const *rows, int from, int inputs, const float *weights,
                     size_t panel, const float *next, f32 sums[][VECTORS]) {
    const int tiles = (count + MOST_ROWS - 1) / MOST_ROWS;
    const size_t of_input = LANES * sizeof(float);
    for (int tile = 0; tile < tiles; tile++) {
        const int first = count * tile / tiles, size = count * (tile + 1) / tiles - first;
        const struct ahead ahead = share(next, inputs * of_input, of_input, tile, tiles);
        const float *values[MOST_ROWS];
        for (int r = 0; r < size; r++) values[r] = rows[first + r] + from;
        for (int p = 0, step; p < panels; p += step) {
            step = panels_at_once(size, panels - p);
#define PRODUCT(R, P)                                                                                                  \
    { dense_tile(R, P, values, weights + p * panel, panel, ahead, inputs, FP32, sums[first] + p * PARTS); }
            EACH_TILE(size, step, PRODUCT)
        }
    }
}

/* Scores become weights, multiples of 2^-22, whose sum is exact in any order. */
static uint64_t weigh(float *scores, int size, f32 peak) {
    uint64_t total = 0;
    for (int first = 0; first < size; first += WHOLE * LANES) {
        const int last = first + WHOLE * LANES < size ? first + WHOLE * LANES : size;
        u32 sum = {0};
        for (int slot = first; slot < last; slot += WIDTH) {
            f32 weight = power_of_two(load(scores + slot) - peak) * MOST_WEIGHT + WHOLE_ZERO;
            store(scores + slot, weight - WHOLE_ZERO);
            sum += (u32)weight - (u32)splat(WHOLE_ZERO);
        }
        for (int lane = 0; lane < WIDTH; lane++) total += sum[lane];
    }
    return total;
}

/* Up to MOST_QUERIES queries of one kv head. queries, outputs: [count], each head_dim numbers; rows: whose mask each
 * has. keys, values: of that head, `capacity` slots. scores: [MOST_QUERIES][odd_lines(capacity)], room
 * to work in. */
static void attend(int count, const float *const *queries, float *const *outputs, const int *rows,
                   const struct panel_mask *mask, const float *keys, const float *values, int head_dim, int capacity,
                   float *scores) {
    const size_t key_panel = (size_t)head_dim * LANES, value_panel = (size_t)capacity * LANES;
    const float *weights[MOST_QUERIES];
    f32 most[MOST_QUERIES], sums[MOST_QUERIES][VECTORS];
    uint64_t totals[MOST_QUERIES] = {0};
    for (int r = 0; r < count; r++) most[r] = splat(LEAST / 2), weights[r] = scores + (size_t)r * odd_lines(capacity);
    for (int first = 0, last; (last = next_run(mask, rows, count, &first)); first = last)
        for (int panel = first, step; panel < last; panel += step) {
            const float *from = keys + panel * key_panel;
            step = last - panel < MOST_PANELS ? 1 : MOST_PANELS;
            memset(sums, 0, count * sizeof *sums);
            products(count, step, queries, 0, head_dim, from, key_panel, from + step * key_panel, sums);
            for (int r = 0; r < count; r++)
                for (int v = 0; v < step * PARTS; v++) {
                    const uint16_t bits = mask->bits[(size_t)rows[r] * mask->panels + panel + v / PARTS];
                    f32 score = only(bits >> v % PARTS * WIDTH, sums[r][v]);
                    most[r] = larger(most[r], score);
                    store((float *)weights[r] + panel * LANES + v * WIDTH, score);
                }
        }
    for (int r = 0; r < count; r++) most[r] = splat(largest(most[r]));
    for (int first = 0, last; (last = next_run(mask, rows, count, &first)); first = last)
        for (int r = 0; r < count; r++)
            totals[r] += weigh((float *)weights[r] + first * LANES, (last - first) * LANES, most[r]);
    const int panels = panels_of(head_dim);
    for (int panel = 0, step; panel < panels; panel += step) {
        step = panels - panel < MOST_PANELS ? 1 : MOST_PANELS;
        memset(sums, 0, count * sizeof *sums);
        for (int first = 0, last; (last = next_run(mask, rows, count, &first)); first = last)
            for (int slot = first * LANES, end; slot < last * LANES; slot = end) {
                const float *from = values + panel * value_panel + (size_t)slot * LANES;
                end = last * LANES - slot < BLOCK ? last * LANES : slot + BLOCK;
                products(count, step, weights, slot, end - slot, from, value_panel, from + BLOCK * LANES, sums);
            }
        for (int r = 0; r < count; r++) {
            float share = (float)(1.0 / (double)(totals[r] ? totals[r] : 1)); /* nothing is seen */
            for (int v = 0; v < step * PARTS; v++) {
                const int from = panel * LANES + v * WIDTH;
                store_some(outputs[r] + from, sums[r][v] * share, head_dim - from);
            }
        }
    }
}
