/* Rows times a matrix, by all threads, and what becomes of the products. */
#pragma once
#include "engine.h"
#include "inputs.h"

/* What becomes of a tile's sums: they are stored, or added to what is there, times a factor; or are gate and up in turn,
 * for SiLU or GELU; or their SiLU is added to the row that was multiplied. */
enum ending { STORE, ADD, GATE, GATE_GELU, RESIDUAL };
INLINE int gates(const enum ending ending) { return ending == GATE || ending == GATE_GELU; }

INLINE void finish(const struct matrix *matrix, const enum ending ending, float factor, int panel, int panels,
                   const f32 *sums, const float *row, float *result) {
    f32 sum[VECTORS];
    for (int v = 0; v < panels * PARTS; v++) {
        sum[v] = sums[v];
        if (matrix->bias) sum[v] += load(matrix->bias + panel * LANES + v * WIDTH);
    }
    for (int v = 0; v < panels * PARTS; v++) {
        const int column = panel * LANES + v * WIDTH;
        if (ending == STORE) store_some(result + column, sum[v] * factor, matrix->outputs - column);
        if (ending == ADD) store(result + column, load(result + column) + sum[v] * factor);
        if (ending == RESIDUAL) store(result + column, load(row + column) + silu(sum[v]));
        if (gates(ending) && v >= PARTS) { /* panels of gate and up in turn */
            const f32 gate = ending == GATE ? silu(sum[v - PARTS]) : gelu(sum[v - PARTS]);
            store(result + panel / 2 * LANES + v % PARTS * WIDTH, gate * sum[v]);
        }
    }
}

/* Panels that are finished together: two are multiplied at once, of gate and up as many as are rounded at once. */
INLINE int whole_panels(const enum ending ending) { return gates(ending) ? 2 * ROUNDED / LANES : MOST_PANELS; }

/* How panels are cut into units: each has as many `pieces`, of `size` panels that stay together, or one more. */
struct division {
    int panels, size, pieces, units;
};

INLINE struct division cut_panels(const struct matrix *matrix, const enum ending ending, int threads) {
    const int panels = panels_of(matrix->outputs), shares = threads * SHARES;
    const int size = panels <= shares && !gates(ending) ? 1 : whole_panels(ending), pieces = (panels + size - 1) / size;
    return (struct division){panels, size, pieces, pieces < shares ? pieces : shares};
}

/* The first panel of a unit. */
INLINE int unit_panel(const struct division *of, int unit) {
    const int panel = (int)((int64_t)of->pieces * unit / of->units) * of->size;
    return panel < of->panels ? panel : of->panels;
}

/* Let the thread fetch the beginning of its share of a matrix while it waits before that. */
static void expect(struct cursor *cursor, const struct matrix *matrix, const enum ending ending) {
    const struct division all = cut_panels(matrix, ending, cursor->team->threads);
    const int first = unit_panel(&all, first_own(all.units, cursor->thread, cursor->team->threads));
    const size_t bytes = panel_bytes(matrix), rest = (all.panels - first) * bytes;
    cursor->ahead = (const char *)matrix->weights + first * bytes;
    cursor->end = cursor->ahead + (rest < MOST_AHEAD ? rest : MOST_AHEAD);
}

/* rows of `from` times the matrix; every thread takes a unit of panels at a time, for as long as there are any. next:
 * of gate and up, the matrix for which the results are rounded. */
static void linear(struct cursor *cursor, const struct matrix *matrix, const struct rows *from, int rows,
                   const struct rows *to, const enum ending ending, float factor, const struct matrix *next) {
    const struct tiles tiles = tiles_of(matrix, from, rows);
    const struct division all = cut_panels(matrix, ending, cursor->team->threads);
    const int whole = whole_panels(ending);
    f32 sums[MOST_TILE][VECTORS];
    for (int unit; (unit = claim_own(cursor, all.units)) >= 0;) {
        const int end = unit_panel(&all, unit + 1);
        for (int panel = unit_panel(&all, unit), step; panel < end; panel += step) {
            step = end - panel < MOST_PANELS ? 1 : MOST_PANELS;
            for (int tile = 0; tile < tiles.count; tile++) {
                const int row = tile_row(&tiles, tile), count = tile_row(&tiles, tile + 1) - row;
                multiply(matrix, from, &tiles, tile, panel, step, sums[0]);
                for (int r = 0; r < count; r++)
                    finish(matrix, ending, factor, panel, step, sums[r],
                           from->values + (size_t)(row + r) * from->stride, to->values + (size_t)(row + r) * to->stride);
            }
            const int first = panel / whole * whole, done = panel + step == first + whole || panel + step == end;
            for (int row = 0; gates(ending) && done && row < rows; row++)
                round_inputs(to, row, first * LANES / 2, first * LANES / 2 + ROUNDED, next);
        }
    }
}
