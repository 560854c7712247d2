/* Tree attention over a cache in panels: keys [kv head][slot / 16][head_dim][16], values [kv head][dim / 16][slot][16].
 *
 * Both products are tiles of matrix.h. A slot that a row does not see weighs exactly nothing, all numbers being
 * finite, and the sum of the weights does not depend on their order: so a row's result has the same bits wherever in
 * the cache its ancestors lie, as long as they lie in the order of the text. */
#pragma once
#include "matrix.h"

#define WHOLE 256 /* weights of 22 bits whose sum fits 31 */

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

/* sums[r][p] += rows[r] * panels: a tile of any size, in fp32. */
static void products(int count, int panels, const float *const *rows, const float *weights, size_t panel, int first,
                     int last, f32 sums[][MOST_PANELS]) {
    const struct ahead ahead = share(weights + panels * panel, 0, LANES * sizeof(float), 0, 1);
#define PRODUCT(R, P) { dense_tile(R, P, rows, weights, panel, ahead, first, last, FP32, sums); }
    EACH_TILE(count, panels, PRODUCT)
}

/* Up to MOST_ROWS queries of one kv head. queries, outputs: [count], each head_dim numbers; rows: whose mask each has.
 * keys, values: of that head, `capacity` slots. scores: [MOST_ROWS][capacity], room to work in. */
static void attend(int count, const float *const *queries, float *const *outputs, const int *rows,
                   const struct panel_mask *mask, const float *keys, const float *values, int head_dim, int capacity,
                   float *scores) {
    const size_t key_panel = (size_t)head_dim * LANES, value_panel = (size_t)capacity * LANES;
    const float *weights[MOST_ROWS];
    f32 most[MOST_ROWS];
    for (int r = 0; r < count; r++) most[r] = splat(LEAST), weights[r] = scores + (size_t)r * capacity;
    for (int first = 0, last; (last = next_run(mask, rows, count, &first)); first = last) {
        for (int panel = first, step; panel < last; panel += step) {
            f32 sums[MOST_ROWS][MOST_PANELS] = {0};
            step = last - panel < MOST_PANELS ? 1 : MOST_PANELS;
            products(count, step, queries, keys + panel * key_panel, key_panel, 0, head_dim, sums);
            for (int r = 0; r < count; r++)
                for (int p = 0; p < step; p++) {
                    i32 seen = lanes(mask->bits[(size_t)rows[r] * mask->panels + panel + p]);
                    f32 score = choose(seen, sums[r][p], splat(LEAST));
                    most[r] = larger(most[r], score);
                    store((float *)weights[r] + (panel + p) * LANES, score);
                }
        }
    }
    double totals[MOST_ROWS];
    for (int r = 0; r < count; r++) {
        const float peak = largest(most[r]);
        f64 total = {0};
        i32 sum = {0};
        int since = 0;
        for (int first = 0, last; (last = next_run(mask, rows, count, &first)); first = last)
            for (int panel = first; panel < last; panel++) {
                float *score = (float *)weights[r] + panel * LANES;
                i32 seen = lanes(mask->bits[(size_t)rows[r] * mask->panels + panel]);
                /* Whole multiples of 2^-22: their sum is exact in any order. */
                i32 weight = nearest(exponential(load(score) - peak) * 4194303.0f) & seen;
                store(score, __builtin_convertvector(weight, f32));
                sum += weight;
                if (++since < WHOLE) continue;
                total += __builtin_convertvector(sum, f64);
                sum = (i32){0}, since = 0;
            }
        total += __builtin_convertvector(sum, f64);
        totals[r] = 0;
        for (int lane = 0; lane < LANES; lane++) totals[r] += total[lane];
    }
    const int panels = panels_of(head_dim);
    for (int panel = 0, step; panel < panels; panel += step) {
        f32 sums[MOST_ROWS][MOST_PANELS] = {0};
        step = panels - panel < MOST_PANELS ? 1 : MOST_PANELS;
        for (int first = 0, last; (last = next_run(mask, rows, count, &first)); first = last)
            products(count, step, weights, values + panel * value_panel, value_panel, first * LANES, last * LANES,
                     sums);
        for (int r = 0; r < count; r++) {
            float share = (float)(1.0 / (totals[r] > 0 ? totals[r] : 1.0)); /* nothing is seen */
            for (int p = 0; p < step; p++) {
                const int from = (panel + p) * LANES;
                store_some(outputs[r] + from, sums[r][p] * share, head_dim - from);
            }
        }
    }
}
