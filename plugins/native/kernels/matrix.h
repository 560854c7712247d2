/* Rows times a matrix, in panels of 16 outputs.
 *
 * A panel is read once and meets up to MOST_ROWS rows while it is in registers. Each (row, output) is one chain of
 * operations over the inputs, the same in every tile, so a row's result has the same bits whatever other rows a pass
 * has. */
#pragma once
#include "bf16.h"
#include "scales.h"

#define INFINITE 0x7f800000 /* the bits of infinity; those of what is no number are larger */
#define ROUNDED 32    /* inputs that are rounded at once, whole blocks of codes and of bf16 */
#if !defined(MOST_ROWS_SMALL)
#define MOST_ROWS_SMALL MOST_ROWS
#endif
#if !defined(MOST_ROWS_LARGE)
#define MOST_ROWS_LARGE MOST_ROWS
#endif
#if !defined(MOST_SUMS_CODES)
#define MOST_SUMS_CODES MOST_SUMS
#endif

/* [outputs, inputs]. Floats: panels [inputs][16], of bf16 [inputs / 2][16][2]. Integers: unsigned codes in panels of
 * [inputs * bits / 32][16][4] bytes (see plugins/native/packing.py), and numbers for each group of inputs (see scales.h). Of
 * 8 and 6 bits a weight is (code - zero) * scale, of 5 and 4 bits code * scale + offset. */
struct matrix {
    const void *weights, *scales;
    const float *bias; /* [16 * panels] or null */
    int32_t outputs, inputs, format;
};

/* Rows of activations. Integers meet `codes`, rounded by block, bf16 meets `values` that were rounded or, where there are
 * instructions for it, `halves`; everything else meets `values`. */
struct rows {
    float *values; /* [rows][stride] */
    uint16_t *halves; /* of bf16; null: no instructions for them. Where there are matrix registers
                       * [rows / 16][stride / 32][16][32], else [rows][stride], see store_half_pairs */
    int8_t *codes; /* [rows][stride] */
    float *scales; /* [rows][stride / block]; a block's values are codes * scale */
    int32_t *starts; /* [rows][stride / group]: what a group's sum of products begins with, of a matrix without offsets */
    float *totals; /* [rows][stride / block]: sum of the block's codes * scale */
    int32_t stride;
};

INLINE int panels_of(int outputs) { return (outputs + LANES - 1) / LANES; }

/* sums[r][p] += rows[r][0..inputs) * panels[p], `apart` and `panel` apart. fetching: whether something is ahead. */
INLINE void dense_tile(const int R, const int P, const float *rows, size_t apart, const void *weights, size_t panel,
                       const int fetching, struct ahead ahead, int inputs, const enum format format, f32 *sums) {
    const int V = P * PARTS;
    struct beside at = beside(rows, apart, R);
    f32 sum[MOST_ROWS][VECTORS];
    UNROLL(8) for (int r = 0; r < R; r++)
        UNROLL(8) for (int v = 0; v < V; v++) sum[r][v] = sums[r * VECTORS + v];
    for (int k = 0; k < inputs; k++) {
        f32 weight[VECTORS];
        UNROLL(8) for (int v = 0; v < V; v++) {
            weight[v] = widened(weights, v / PARTS * panel + (size_t)k * LANES + v % PARTS * WIDTH, format);
            if (R * V <= SUMS_BESIDE) weight[v] = read_once(weight[v]);
            if (fetching && v % PARTS == 0) fetch(ahead, v / PARTS * panel * number_bytes(format), k);
        }
        UNROLL(8) for (int r = 0; r < R; r++)
            UNROLL(8) for (int v = 0; v < V; v++) sum[r][v] += weight[v] * number_of(at, r);
        advance(&at, 1, R);
    }
    UNROLL(8) for (int r = 0; r < R; r++)
        UNROLL(8) for (int v = 0; v < V; v++) sums[r * VECTORS + v] = sum[r][v];
}

/* Bytes of sixteen weights for one step of a tile: an input, a pair of inputs, or a vector of codes. */
INLINE size_t step_bytes(int format) { return LANES * (format == FP16 ? 2 : 4); }

INLINE size_t panel_bytes(const struct matrix *matrix) {
    if (matrix->format == BF16) return half_blocks(matrix->inputs) * BLOCK_BYTES;
    if (matrix->format >= INT8) return (size_t)matrix->inputs * LANES * bits_of(matrix->format) / 8;
    return matrix->inputs * step_bytes(matrix->format);
}

/* Of eight inputs of a vector of outputs, whose codes begin at `codes`: bytes of the first four, or of the others. first:
 * their place in the group, whose upper bits are in one vector after the lower halves. */
INLINE i32 four_codes(const uint8_t *codes, const int first, const int others, const int bits) {
    i32 bytes, upper;
    memcpy(&bytes, codes + (bits == 8 && others ? LANES * 4 : 0), sizeof bytes);
    if (bits == 8) return bytes;
    bytes = (others ? (i32)((u32)bytes >> 4) : bytes) & 0x0f0f0f0f;
    if (bits == 4) return bytes;
    memcpy(&upper, codes + (group_of(bits) - first) / 8 * LANES * 4, sizeof upper);
    const int lower = (first / 4 + others) * (bits - 4); /* bits of a byte that belong to the fours before these */
    upper = lower < 4 ? upper << (4 - lower) : (i32)((u32)upper >> (lower - 4));
    return bytes | (upper & (bits == 6 ? 0x30303030 : 0x10101010));
}

/* whole[r][v] += one group's products in integers, from input `k` of `values` and of the codes on. */
INLINE void group_products(const int R, const int P, const int8_t *const *values, const uint8_t *codes, size_t panel,
                           int k, struct ahead ahead, const int bits, i32 whole[][VECTORS]) {
    const int V = P * PARTS, paired = PAIRS ? R / 2 * 2 : 0; /* rows that are multiplied two by two */
    const int eights = EIGHTS && (bits == 5 || bits == 6);
    const struct ahead next = {ahead.from + (size_t)k * bits / 32 * ahead.pace, ahead.pace};
    UNROLL(4) for (int i = 0, end = k + group_of(bits); k < end; k += 8, i += 8) {
        const uint8_t *from = codes + (size_t)k * LANES * bits / 8;
        if (bits == 5 || bits == 6) from += i * LANES / 2 - i * LANES * bits / 8; /* the upper bits follow */
        UNROLL(2) for (int line = i * bits / 32; line < (i + 8) * bits / 32; line++)
            UNROLL(8) for (int p = 0; p < P; p++) fetch(next, p * panel, line);
        UNROLL(8) for (int r = 0; r < paired; r += 2)
            UNROLL(8) for (int v = 0; v < V; v++) {
                const uint8_t *at = from + v / PARTS * panel + v % PARTS * sizeof(i32);
                add_pairs(&whole[r][v], &whole[r + 1][v], four_codes(at, i, 0, bits), four_codes(at, i, 1, bits),
                          values[r] + k, values[r + 1] + k, bits);
            }
        i32 four[2][VECTORS]; /* no product waits for the one before it */
        UNROLL(2) for (int others = 0; others < 2 && paired < R; others++) {
            UNROLL(8) for (int v = 0; v < V; v++)
                four[others][v] = four_codes(from + v / PARTS * panel + v % PARTS * sizeof(i32), i, others, bits);
            UNROLL(8) for (int r = paired; r < R && !eights; r++)
                add_codes(V, whole[r], four[others], repeated(values[r] + k + 4 * others), bits);
        }
        UNROLL(8) for (int r = 0; r < R && eights; r++)
            add_eights(V, whole[r], four[0], four[1], repeated(values[r] + k), repeated(values[r] + k + 4));
    }
    UNROLL(8) for (int r = 0; r < R; r++)
        UNROLL(8) for (int v = 0; v < V; v++) {
            if (r < paired && r % 2 == 0) split_pairs(&whole[r][v], &whole[r + 1][v]);
            if (bits == 4) whole[r][v] = small_sums(whole[r][v]);
        }
}

/* The same over codes: whole groups in integers, then one product with both scales. A code of 8 bits is 128 too large, one
 * of 6 bits 32: what that adds to a group is known from the sum of the row's codes. So is what offsets add. */
INLINE void integer_tile(const int R, const int P, const struct rows *x, int row, const struct matrix *matrix,
                         int panel, struct ahead ahead, const int bits, const int super, f32 *sums) {
    const int V = P * PARTS, group = group_of(bits), groups = matrix->inputs / group, offsets = has_offsets(bits);
    const int row_blocks = x->stride / CODE_BLOCK, row_groups = x->stride / group;
    const int size = super ? 1 : 2, span = super ? SUPERBLOCK : group; /* of a number; inputs whose numbers lie together */
    const size_t bytes = (size_t)matrix->inputs * LANES * bits / 8, apart = scale_bytes(matrix->inputs, bits, super);
    const uint8_t *codes = (const uint8_t *)matrix->weights + panel * bytes;
    const uint8_t *scales = (const uint8_t *)matrix->scales + panel * apart;
    const int8_t *values[MOST_ROWS];
    f32 sum[MOST_ROWS][VECTORS], factor[VECTORS][2] = {{{0}}}; /* of scales and offsets */
    UNROLL(8) for (int r = 0; r < R; r++) {
        values[r] = x->codes + (size_t)(row + r) * x->stride;
        UNROLL(8) for (int v = 0; v < V; v++) sum[r][v] = (f32){0};
    }
    for (int g = 0; g < groups; g++) {
        i32 whole[MOST_ROWS][VECTORS];
        UNROLL(8) for (int r = 0; r < R; r++)
            UNROLL(8) for (int v = 0; v < V; v++)
                whole[r][v] = (i32){0} + (offsets ? 0 : x->starts[(row + r) * row_groups + g]);
        group_products(R, P, values, codes, bytes, g * group, ahead, bits, whole);
        const uint8_t *numbers = scales + place_of_group(g * group, bits, super);
        if (g * group % span == 0) {
            const uint8_t *from = numbers - factor_bytes(bits, super);
            UNROLL(2) for (int p = 0; p < P; p++) /* of the next panels */
                UNROLL(8) for (int line = 0; line < scale_bytes(span, bits, super); line += 64)
                    __builtin_prefetch(from + (P + p) * apart + line, 0, FETCHED);
            UNROLL(8) for (int v = 0; v < V && super; v++) {
                const uint16_t *halves = (const uint16_t *)(from + v / PARTS * apart) + v % PARTS * WIDTH;
                factor[v][0] = from_fp16(halves);
                if (offsets) factor[v][1] = from_fp16(halves + LANES);
            }
        }
        f32 scale[VECTORS], offset[VECTORS];
        UNROLL(8) for (int v = 0; v < V; v++) {
            const uint8_t *from = numbers + v / PARTS * apart + v % PARTS * WIDTH * size;
            scale[v] = scales_at(from, factor[v][0], super);
            if (offsets) offset[v] = scales_at(from + LANES * size, factor[v][1], super);
        }
        UNROLL(8) for (int r = 0; r < R; r++) {
            const size_t at = (row + r) * row_blocks + g * group / CODE_BLOCK;
            UNROLL(8) for (int v = 0; v < V; v++) {
                const f32 product = __builtin_convertvector(whole[r][v], f32);
                sum[r][v] += product * (scale[v] * x->scales[at]);
                if (offsets) sum[r][v] += offset[v] * x->totals[at];
            }
        }
    }
    UNROLL(8) for (int r = 0; r < R; r++)
        UNROLL(8) for (int v = 0; v < V; v++) sums[r * VECTORS + v] = sum[r][v];
}

/* Panels that a tile of so many rows takes at once: their sums, at most `most`, must fit the registers. */
INLINE int panels_at_once(int most, int rows, int panels) {
    return panels > 1 && rows * VECTORS <= most ? MOST_PANELS : 1;
}

/* Call with every number of rows and panels as constants, so that a tile's sums stay in registers. */
#define BOTH(R, panels, CALL)                                                                                          \
    if (R > MOST_ROWS) break;                                                                                          \
    if (R * VECTORS <= MOST_SUMS && panels == 2) CALL(R, 2) else CALL(R, 1)                                            \
    break;
#define EACH_TILE(rows, panels, CALL)                                                                                  \
    switch (rows) {                                                                                                    \
    case 1: BOTH(1, panels, CALL)                                                                                      \
    case 2: BOTH(2, panels, CALL)                                                                                      \
    case 3: BOTH(3, panels, CALL)                                                                                      \
    case 4: BOTH(4, panels, CALL)                                                                                      \
    case 5: BOTH(5, panels, CALL)                                                                                      \
    case 6: BOTH(6, panels, CALL)                                                                                      \
    case 7: BOTH(7, panels, CALL)                                                                                      \
    case 8: BOTH(8, panels, CALL)                                                                                      \
    }

/* dense_tile for any number of rows and panels, and any format of numbers. */
static void dense_products(int count, int panels, const float *rows, size_t apart, const void *weights, size_t panel,
                           struct ahead ahead, int inputs, int format, f32 *sums) {
#define DENSE(R, P, FORMAT) { dense_tile(R, P, rows, apart, weights, panel, 1, ahead, inputs, FORMAT, sums); }
#define FP32_TILE(R, P) DENSE(R, P, FP32)
#define FP16_TILE(R, P) DENSE(R, P, FP16)
#define BYTE_TILE(R, P) DENSE(R, P, INT8)
    switch (format) {
    case FP32: EACH_TILE(count, panels, FP32_TILE) break;
    case FP16: EACH_TILE(count, panels, FP16_TILE) break;
    case INT8: EACH_TILE(count, panels, BYTE_TILE) break;
    }
}

/* integer_tile for any number of rows and panels: functions of their own, in which a compiler finds registers. */
#define INTEGER_TILE(R, P) { integer_tile(R, P, x, row, matrix, panel, ahead, bits, super, sums); }
#define PRODUCTS_OF(NAME, BITS, SUPER)                                                                                 \
    static __attribute__((noinline)) void NAME(int rows, int panels, const struct rows *x, int row,                    \
                                               const struct matrix *matrix, int panel, struct ahead ahead, f32 *sums) { \
        enum { bits = BITS, super = SUPER };                                                                           \
        EACH_TILE(rows, panels, INTEGER_TILE)                                                                          \
    }
PRODUCTS_OF(products_of_8, 8, 0)
PRODUCTS_OF(products_of_6, 6, 0)
PRODUCTS_OF(products_of_5, 5, 0)
PRODUCTS_OF(products_of_4, 4, 0)
PRODUCTS_OF(super_products_of_6, 6, 1)
PRODUCTS_OF(super_products_of_5, 5, 1)
PRODUCTS_OF(super_products_of_4, 4, 1)

#define NEAREST 128 /* inputs of panels that are brought near at once: two panels take a third of the L1 cache */

/* The same over panels of fp32 that lie in the L1 cache, NEAREST inputs each. */
static void near_products(int count, int panels, const float *rows, size_t apart, const float *near, int inputs,
                          f32 *sums) {
    const struct ahead none = {0};
#define NEAR_TILE(R, P) { dense_tile(R, P, rows, apart, near, NEAREST * LANES, 0, none, inputs, FP32, sums); }
    EACH_TILE(count, panels, NEAR_TILE)
}

/* How a matrix meets rows: in `count` tiles of up to `most` rows, which begin at multiples of `step`. */
struct tiles {
    int rows, count, most, step;
};

static struct tiles tiles_of(const struct matrix *matrix, const struct rows *x, int rows) {
    const int of_codes = matrix->format > INT8 ? MOST_ROWS_SMALL : MOST_ROWS_LARGE;
    struct tiles tiles = {rows, 0, matrix->format < BF16 ? MOST_ROWS : of_codes, 1};
    if (MATRIX_REGISTERS && x->halves && matrix->format == BF16 && rows >= REGISTERS_FROM)
        tiles.most = MOST_TILE, tiles.step = REGISTER_ROWS;
    tiles.count = (rows + tiles.most - 1) / tiles.most;
    return tiles;
}

/* The first row of a tile. */
INLINE int tile_row(const struct tiles *tiles, int tile) {
    const int row = (tiles->rows + tiles->step - 1) / tiles->step * tile / tiles->count * tiles->step;
    return row < tiles->rows ? row : tiles->rows;
}

/* multiply in matrix registers. */
static void multiply_registers(const struct matrix *matrix, const struct rows *x, int row, int rows, int panel,
                               int panels, int tile, int tiles, f32 *sums) {
    const size_t bytes = panel_bytes(matrix), of_rows = (size_t)x->stride * REGISTER_ROWS;
    const uint16_t *halves = x->halves + row / REGISTER_ROWS * of_rows;
    const char *weights = (const char *)matrix->weights + panel * bytes;
    const char *next = weights + panels * bytes + bytes * tile / tiles;
    const int blocks = half_blocks(matrix->inputs), lines = ((int)BLOCK_BYTES / 64 + tiles - 1) / tiles;
#define REGISTER_TILE(T, P) register_tile(T, P, halves, of_rows * 2, weights, bytes, next, lines, blocks, sums)
    if (rows > REGISTER_ROWS && panels > 1) REGISTER_TILE(2, 2);
    else if (rows > REGISTER_ROWS) REGISTER_TILE(2, 1);
    else if (panels > 1) REGISTER_TILE(1, 2);
    else REGISTER_TILE(1, 1);
}

/* sums = the rows of a tile times up to MOST_PANELS panels. Of a row, sums has VECTORS. */
static void multiply(const struct matrix *matrix, const struct rows *x, const struct tiles *cut, int tile, int panel,
                     int panels, f32 *sums) {
    const int row = tile_row(cut, tile), rows = tile_row(cut, tile + 1) - row, tiles = cut->count;
    if (cut->step > 1) {
        multiply_registers(matrix, x, row, rows, panel, panels, tile, tiles, sums);
        return;
    }
    const float *values = x->values + (size_t)row * x->stride;
    const float *pairs = HALF_PAIRS && x->halves ? (const float *)(x->halves + (size_t)row * x->stride) : NULL;
    for (int v = 0; v < rows * VECTORS; v++) sums[v] = (f32){0};
    const size_t bytes = panel_bytes(matrix);
    const char *weights = (const char *)matrix->weights + panel * bytes;
    /* Floats of one row and one panel would wait for each other's sums; several tiles share what is near by now. */
    const int stream = rows <= ROWS_OF_STREAM && tiles == 1 && matrix->format >= BF16;
    const int most = stream ? 1 : panels, sums_of_tile = matrix->format < INT8 ? MOST_SUMS : MOST_SUMS_CODES;
    const char *next = weights + most * bytes;
    for (int p = 0, step; p < panels; p += step, weights += step * bytes, next += step * bytes, sums += step * PARTS) {
        const struct ahead ahead = share(next, bytes, step_bytes(matrix->format), tile, tiles);
        step = panels_at_once(sums_of_tile, rows, most < panels - p ? most : panels - p);
#define BF16_TILE(R, P) { half_tile(R, P, 0, values, x->stride, weights, bytes, ahead, matrix->inputs, sums); }
#define PAIR_TILE(R, P) { half_tile(R, P, 1, pairs, x->stride / 2, weights, bytes, ahead, matrix->inputs, sums); }
        switch (matrix->format) {
        case BF16:
            if (HALF_PAIRS && pairs) EACH_TILE(rows, step, PAIR_TILE)
            else EACH_TILE(rows, step, BF16_TILE)
            break;
        case INT8: products_of_8(rows, step, x, row, matrix, panel + p, ahead, sums); break;
        case INT6: products_of_6(rows, step, x, row, matrix, panel + p, ahead, sums); break;
        case INT5: products_of_5(rows, step, x, row, matrix, panel + p, ahead, sums); break;
        case INT4: products_of_4(rows, step, x, row, matrix, panel + p, ahead, sums); break;
        case INT6_K: super_products_of_6(rows, step, x, row, matrix, panel + p, ahead, sums); break;
        case INT5_K: super_products_of_5(rows, step, x, row, matrix, panel + p, ahead, sums); break;
        case INT4_K: super_products_of_4(rows, step, x, row, matrix, panel + p, ahead, sums); break;
        default:
            dense_products(rows, step, values, x->stride, weights, (size_t)matrix->inputs * LANES, ahead,
                           matrix->inputs, matrix->format, sums);
        }
    }
}
