/* Tree attention over a cache in panels, see cache.h.
 *
 * Both products are tiles of matrix.h. A slot that a row does not see weighs exactly nothing, all numbers being
 * finite, and the sum of the weights does not depend on their order: so a row's result has the same bits wherever in
 * the cache its ancestors lie, as long as they lie in the order of the text. */
#pragma once
#include "cache.h"

#define MOST_WEIGHT 4194303.0f /* of 22 bits */
#define MOST_QUERIES (8 * MOST_ROWS) /* that meet a panel of the cache one tile after the other */
#define NEAR_TILES 5 /* that meet a panel: for fewer, bringing it near takes longer than it saves */
#define BLOCK 128 /* slots whose weights and values stay in the L1 cache meanwhile */
#define MOST_HELD 4096 /* slots, of which sums of weights fit 32 bits in each lane */
#define MIXED 8 /* panels of values that are weighted by the same weights */

/* Room for a row of scores: an odd number of lines, so that rows do not meet in a few sets of the L1 cache. */
INLINE size_t odd_lines(int capacity) { return (size_t)(capacity / LANES | 1) * LANES; }

/* Panels of a cache, from `first` to `end`. */
struct run {
    int first, end;
};

/* What every row of a pass sees, by panels of 16 slots. */
struct panel_mask {
    uint16_t *bits; /* [rows][panels]: bit i of a panel is its slot i */
    struct run *runs; /* [rows + 1][room]: the panels of each row, ascending; the last row is room to work in */
    int *counts, panels, rows, room; /* counts: [rows], of runs */
    int *nearest; /* [rows]: the first slot that a row sees where there is a window */
};

/* The first of the last `window` slots that a row sees: slots ascend in the text. 0 where it sees fewer. */
static int first_in_window(const struct panel_mask *packed, int row, int window) {
    const uint16_t *bits = packed->bits + (size_t)row * packed->panels;
    const struct run *runs = packed->runs + (size_t)row * packed->room, *run = runs + packed->counts[row];
    while (run-- > runs)
        for (int panel = run->end - 1; panel >= run->first; panel--) {
            int seen = __builtin_popcount(bits[panel]);
            if (seen < window) {
                window -= seen;
                continue;
            }
            for (int lane = 0;; lane++)
                if (bits[panel] >> lane & 1 && seen-- == window) return panel * LANES + lane;
        }
    return 0;
}

/* length: committed slots, seen by all. mask: bytes [rows][columns], of the slots after them. window: or 0. */
static void pack_mask(const struct panel_mask *packed, int row, const uint8_t *mask, int length, int columns,
                      int window) {
    uint16_t *bits = packed->bits + (size_t)row * packed->panels;
    struct run *runs = packed->runs + (size_t)row * packed->room;
    const int whole = length / LANES;
    int count = whole > 0;
    mask += (size_t)row * columns;
    runs[0] = (struct run){0, whole};
    memset(bits, 0xff, whole * sizeof *bits);
    memset(bits + whole, 0, (packed->panels - whole) * sizeof *bits);
    for (int panel = whole; panel < packed->panels; panel++) {
        const int from = panel * LANES - length;
        uint64_t any[2] = {1, 1};
        if (from >= 0 && from + LANES <= columns) memcpy(any, mask + from, sizeof any);
        if (!(any[0] | any[1])) continue; /* nearly all, where many texts share the cache */
        for (int lane = 0, column = from; lane < LANES && column < columns; lane++, column++)
            bits[panel] |= (uint16_t)((column < 0 || mask[column]) << lane);
        if (!bits[panel]) continue;
        if (count && runs[count - 1].end == panel) runs[count - 1].end++;
        else runs[count++] = (struct run){panel, panel + 1};
    }
    packed->counts[row] = count;
    packed->nearest[row] = window ? first_in_window(packed, row, window) : 0;
}

/* Whether two rows see much the same panels. Rows of different requests do not: together each would pay for both. */
static int similar_masks(const struct panel_mask *mask, int row, int other) {
    const struct run *one = mask->runs + (size_t)row * mask->room, *two = mask->runs + (size_t)other * mask->room;
    const struct run *last = one + mask->counts[row], *end = two + mask->counts[other];
    int both = 0, single = 0;
    for (const struct run *run = one; run < last; run++) single += run->end - run->first;
    for (const struct run *run = two; run < end; run++) single += run->end - run->first;
    while (one < last && two < end) {
        const int first = one->first > two->first ? one->first : two->first;
        const int least = one->end < two->end ? one->end : two->end;
        if (first < least) both += least - first;
        if (one->end == least) one++;
        else two++;
    }
    return 2 * (single - 2 * both) <= both + 4;
}

/* Add the panels of row `other` to those of `row`. */
static void join_runs(const struct panel_mask *mask, int row, int other) {
    struct run *joined = mask->runs + (size_t)mask->rows * mask->room, *own = mask->runs + (size_t)row * mask->room;
    const struct run *one = own, *two = mask->runs + (size_t)other * mask->room;
    const struct run *last = one + mask->counts[row], *end = two + mask->counts[other];
    int count = 0;
    while (one < last || two < end) {
        const struct run next = two == end || (one < last && one->first <= two->first) ? *one++ : *two++;
        if (!count || joined[count - 1].end < next.first) joined[count++] = next;
        else if (joined[count - 1].end < next.end) joined[count - 1].end = next.end;
    }
    memcpy(own, joined, count * sizeof *own);
    mask->counts[row] = count;
}

/* Some inputs of up to MOST_PANELS panels as fp32, [panels][NEAREST][16]; `next`: what comes after these. */
INLINE void bring_near(int panels, int inputs, const char *weights, size_t panel, const char *next,
                       const enum format format, float *near) {
    const size_t bytes = number_bytes(format);
    for (int p = 0; p < panels; p++) {
        const char *then = next + p * panel * bytes;
        UNROLL(4) for (int k = 0; k < inputs; k++) {
            UNROLL(4) for (int at = k * LANES; at < (k + 1) * LANES; at += WIDTH)
                store(near + p * NEAREST * LANES + at, widened(weights, p * panel + at, format));
            if (k * LANES * bytes % LINE == 0) __builtin_prefetch(then + k * LANES * bytes, 0, 3);
        }
    }
}

/* sums[r][p] += rows[r][0..inputs) * panels[p]; `apart` and `panel` numbers lie between them; `next`: what comes after
 * these panels. Panels that many tiles meet are brought near first. */
static void products(int count, int panels, const float *rows, size_t apart, int inputs, const char *weights,
                     size_t panel, const char *next, int format, f32 sums[][VECTORS]) {
    const int tiles = (count + MOST_ROWS - 1) / MOST_ROWS;
    const size_t bytes = number_bytes(format), of_input = LANES * bytes;
    _Alignas(LINE) float near[MOST_PANELS * NEAREST * LANES];
    for (int from = 0, size; from < inputs; from += size) {
        const char *here = weights + from * of_input, *then = next + from * of_input;
        size = tiles < NEAR_TILES || inputs - from < NEAREST ? inputs - from : NEAREST;
        if (tiles >= NEAR_TILES) {
            if (format == FP32) bring_near(panels, size, here, panel, then, FP32, near);
            if (format == FP16) bring_near(panels, size, here, panel, then, FP16, near);
            if (format == INT8) bring_near(panels, size, here, panel, then, INT8, near);
        }
        for (int tile = 0; tile < tiles; tile++) {
            const int first = count * tile / tiles, some = count * (tile + 1) / tiles - first;
            const float *values = rows + first * apart + from;
            const struct ahead ahead = share(then, size * of_input, of_input, tile, tiles);
            for (int p = 0, step; p < panels; p += step) {
                f32 *to = sums[first] + p * PARTS;
                step = panels_at_once(MOST_SUMS, some, panels - p);
                if (tiles >= NEAR_TILES)
                    near_products(some, step, values, apart, near + p * NEAREST * LANES, size, to);
                else
                    dense_products(some, step, values, apart, here + p * panel * bytes, panel, ahead, size, format, to);
            }
        }
    }
}

/* Up to MOST_QUERIES queries of one kv head. queries: [count][head_dim]; outputs: [count], each head_dim numbers; rows:
 * whose mask each has. runs: the panels that any of them sees, from `least` on. nearest: the first slot that each sees.
 * scores: room to work in, a row of `stride` for each query. */
struct unit {
    const struct panel_mask *mask;
    struct cache head;
    const struct run *runs;
    int num_runs, head_dim, count, least, rows[MOST_QUERIES], nearest[MOST_QUERIES];
    const float *queries;
    float *outputs[MOST_QUERIES], *scores;
    size_t stride;
};

/* How many of these panels of a cache lie one after the other, of the first `most`; 1 for one that is not there. */
static int lie_together(const struct cache *head, int panel, int most) {
    int count = head->panels ? 1 : most;
    while (count < most && lies_at(head, panel) >= 0 && lies_at(head, panel + count) == lies_at(head, panel) + count)
        count++;
    return count;
}

/* The scores of panels from `first` to `end` of the cache; peaks: [count], the largest of each query. */
static void score(const struct unit *unit, int first, int end, float *peaks) {
    const size_t key_panel = (size_t)unit->head_dim * LANES, bytes = number_bytes(unit->head.format);
    if (first < unit->least) first = unit->least;
    f32 most[MOST_QUERIES], sums[MOST_QUERIES][VECTORS];
    for (int r = 0; r < unit->count; r++) most[r] = splat(LEAST / 2);
    for (const struct run *run = unit->runs; run < unit->runs + unit->num_runs; run++) {
        const int last = run->end < end ? run->end : end;
        for (int panel = run->first > first ? run->first : first, step; panel < last; panel += step) {
            const int place = lies_at(&unit->head, panel);
            step = lie_together(&unit->head, panel, last - panel < MOST_PANELS ? 1 : MOST_PANELS);
            if (place < 0) continue; /* no row of the unit has it in its window */
            const char *from = (const char *)unit->head.keys + place * key_panel * bytes;
            const float *scales = unit->head.key_scales ? unit->head.key_scales + place * LANES : NULL;
            memset(sums, 0, unit->count * sizeof *sums);
            products(unit->count, step, unit->queries, unit->head_dim, unit->head_dim, from, key_panel,
                     from + step * key_panel * bytes, unit->head.format, sums);
            for (int r = 0; r < unit->count; r++)
                UNROLL(4) for (int v = 0; v < step * PARTS; v++) {
                    const int beyond = unit->nearest[r] - (panel + v / PARTS) * LANES; /* lanes before the window */
                    const uint32_t all = beyond <= 0 ? 0xffffu : beyond < LANES ? 0xffffu << beyond : 0;
                    const uint16_t seen =
                        unit->mask->bits[(size_t)unit->rows[r] * unit->mask->panels + panel + v / PARTS] & all;
                    if (scales) sums[r][v] *= load(scales + v * WIDTH);
                    const f32 value = only(seen >> v % PARTS * WIDTH, sums[r][v]);
                    most[r] = larger(most[r], value);
                    store(unit->scores + r * unit->stride + panel * LANES + v * WIDTH, value);
                }
        }
    }
    for (int r = 0; r < unit->count; r++) peaks[r] = largest(most[r]);
}

/* Weights of up to BLOCK scores, multiples of 2^-22, times values' scales, if any; adds their sum, which is exact. */
static void weigh(const float *scores, int size, f32 peak, const float *scales, float *weights, u32 *sum) {
    for (int slot = 0; slot < size; slot += WIDTH) {
        const f32 weight = power_of_two(load(scores + slot) - peak) * MOST_WEIGHT + WHOLE_ZERO;
        store(weights + slot, weight - WHOLE_ZERO);
        *sum += (u32)weight - (u32)splat(WHOLE_ZERO);
    }
    for (int slot = 0; scales && slot < size; slot += WIDTH)
        store(weights + slot, load(weights + slot) * load(scales + slot));
}

/* Add sums of lanes to totals, and begin new ones. */
static void gather(int count, u32 *sums, uint64_t *totals) {
    for (int r = 0; r < count; r++) {
        for (int lane = 0; lane < WIDTH; lane++) totals[r] += sums[r][lane];
        sums[r] = (u32){0};
    }
}

/* The weighted values of panels from `first` to `end` of a head, at most MIXED of them. peaks: of each query's scores. */
static void mix(const struct unit *unit, int first, int end, const float *peaks) {
    const size_t value_panel = (size_t)unit->head.capacity * LANES, bytes = number_bytes(unit->head.format);
    const int pairs = (end - first + 1) / MOST_PANELS;
    f32 sums[MIXED / MOST_PANELS][MOST_QUERIES][VECTORS];
    float block[MOST_QUERIES][BLOCK];
    uint64_t totals[MOST_QUERIES] = {0};
    u32 parts[MOST_QUERIES] = {{0}}; /* of totals, of `held` slots */
    int held = 0;
    for (int pair = 0; pair < pairs; pair++) memset(sums[pair], 0, unit->count * sizeof *sums[pair]);
    for (const struct run *run = unit->runs; run < unit->runs + unit->num_runs; run++)
        for (int slot = (run->first > unit->least ? run->first : unit->least) * LANES, size; slot < run->end * LANES;
             slot += size) {
            const int place = lies_at(&unit->head, slot / LANES) * LANES;
            size = run->end * LANES - slot < BLOCK ? run->end * LANES - slot : BLOCK;
            size = lie_together(&unit->head, slot / LANES, size / LANES) * LANES;
            if (place < 0) continue;
            const float *scales = unit->head.value_scales ? unit->head.value_scales + place : NULL;
            if ((held += size) > MOST_HELD) gather(unit->count, parts, totals), held = size;
            for (int r = 0; r < unit->count; r++)
                weigh(unit->scores + r * unit->stride + slot, size, splat(peaks[r]), scales, block[r], &parts[r]);
            for (int pair = 0; pair < pairs; pair++) {
                const int panel = first + pair * MOST_PANELS, step = end - panel < MOST_PANELS ? 1 : MOST_PANELS;
                const char *at = (const char *)unit->head.values + (panel * value_panel + (size_t)place * LANES) * bytes;
                products(unit->count, step, block[0], BLOCK, size, at, value_panel, at + BLOCK * LANES * bytes,
                         unit->head.format, sums[pair]);
            }
        }
    gather(unit->count, parts, totals);
    for (int pair = 0; pair < pairs; pair++)
        for (int r = 0; r < unit->count; r++) {
            const float share = (float)(1.0 / (double)(totals[r] ? totals[r] : 1)); /* nothing is seen */
            const int panel = first + pair * MOST_PANELS, step = end - panel < MOST_PANELS ? 1 : MOST_PANELS;
            for (int v = 0; v < step * PARTS; v++) {
                const int at = panel * LANES + v * WIDTH;
                store_some(unit->outputs[r] + at, sums[pair][r][v] * share, unit->head_dim - at);
            }
        }
}

/* All of a unit's attention. */
static void attend(const struct unit *unit) {
    const int panels = panels_of(unit->head_dim);
    float peaks[MOST_QUERIES];
    score(unit, 0, unit->mask->panels, peaks);
    for (int first = 0; first < panels; first += MIXED)
        mix(unit, first, first + MIXED < panels ? first + MIXED : panels, peaks);
}
