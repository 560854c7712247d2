/* Rows times a matrix, in panels of 16 outputs.
 *
 * A panel is read once and meets up to MOST_ROWS rows while it is in registers. Each (row, output) is one chain of
 * operations over the inputs, the same in every tile, so a row's result has the same bits whatever other rows a pass
 * has. */
#pragma once
#include "vector.h"

/* Of a tile: as many sums as registers hold. More panels at once are slower from one row on: more streams to fetch. */
#if defined(__AVX512F__)
#define MOST_ROWS 8
#else
#define MOST_ROWS 2
#endif
#define MOST_PANELS 2
#define CODE_BLOCK 32 /* inputs that share a scale: of integers */

enum format { FP32, FP16, BF16, INT8, INT4 };

/* [outputs, inputs]. Floats: panels [inputs][16]. Integers: unsigned codes (see plugins/native/packing.py) in panels of
 * [inputs / 4][16][4] or, two to a byte, [inputs / 8][16][4]; and numbers in fp16 for each block of inputs. Of 8 bits,
 * scales, [panels][inputs / block][16]: a weight is (code - 128) * scale. Of 4 bits, scales and then offsets,
 * [panels][inputs / block][2][16]: a weight is code * scale + offset. */
struct matrix {
    const void *weights, *scales;
    const float *bias; /* [16 * panels] or null */
    int32_t outputs, inputs, block, format;
};

/* Rows of activations. Integers meet `codes`, rounded by block; everything else the floats. */
struct rows {
    float *values; /* [rows][stride] */
    int8_t *codes; /* [rows][stride] */
    float *scales; /* [rows][stride / block]; a block's values are codes * scale */
    int32_t *sums; /* [rows][stride / block]: of the block's codes */
    float *totals; /* [rows][stride / block]: sum * scale */
    int32_t stride;
};

INLINE int panels_of(int outputs) { return (outputs + LANES - 1) / LANES; }

/* What a tile fetches of the next panels while it computes: processors do not look ahead over pages. Tiles of several
 * rows that meet the same panels one after the other fetch a share each, so that memory rests during none of them. */
struct ahead {
    const char *from;
    size_t pace; /* bytes for each step that a tile takes over its panels */
};

INLINE struct ahead share(const void *next, size_t panel, size_t step, int tile, int tiles) {
    return (struct ahead){(const char *)next + panel * tile / tiles, (step + tiles - 1) / tiles};
}

INLINE void fetch(struct ahead ahead, size_t panels, size_t steps) {
    __builtin_prefetch(ahead.from + panels + steps * ahead.pace, 0, 3);
}

/* Sixteen weights of one input as fp32. */
INLINE f32 widened(const void *weights, size_t index, const int format) {
    if (format == FP32) return load((const float *)weights + index);
    u16 half;
    memcpy(&half, (const uint16_t *)weights + index, sizeof half);
#if defined(__AVX512F__) /* said in its own words: gcc makes halves of it otherwise */
    if (format == BF16) return (f32)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
    return (f32)_mm512_cvtph_ps((__m256i)half);
#else
    if (format == BF16) return (f32)(__builtin_convertvector(half, u32) << 16);
    /* Exponent and mantissa move up; the product corrects the bias, and makes subnormals normal. */
    u32 wide = __builtin_convertvector(half, u32);
    f32 size = (f32)((wide & 0x7fff) << 13) * 0x1p112f;
    return (f32)((u32)size | (wide & 0x8000) << 16);
#endif
}

/* sums[r][p] += rows[r][0..inputs) * panels[p]; `panel` numbers lie between panels. */
INLINE void dense_tile(const int R, const int P, const float *const *rows, const void *weights, size_t panel,
                       struct ahead ahead, int inputs, const int format, f32 sums[][MOST_PANELS]) {
    f32 sum[MOST_ROWS][MOST_PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) sum[r][p] = sums[r][p];
    for (int k = 0; k < inputs; k++) {
        f32 weight[MOST_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            weight[p] = widened(weights, p * panel + (size_t)k * LANES, format);
            fetch(ahead, p * panel * (format == FP32 ? 4 : 2), k);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) sum[r][p] += weight[p] * rows[r][k];
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) sums[r][p] = sum[r][p];
}

/* Bytes of sixteen weights for one step of a tile: an input, or a vector of codes. */
INLINE size_t step_bytes(int format) { return format == FP16 || format == BF16 ? 2 * LANES : 4 * LANES; }

INLINE size_t panel_bytes(const struct matrix *matrix) {
    const int inputs_of_step = matrix->format == INT8 ? 4 : matrix->format == INT4 ? 8 : 1;
    return matrix->inputs / inputs_of_step * step_bytes(matrix->format);
}

/* The same over codes: whole blocks in integers, then one product with both scales. A code of 8 bits is 128 too large:
 * what that adds to a block is known from the sum of the row's codes. So is what the offsets beside 4 bits add. */
INLINE void integer_tile(const int R, const int P, const struct rows *x, int row, const struct matrix *matrix,
                         int panel, struct ahead ahead, const int bits, f32 sums[][MOST_PANELS]) {
    const int block = CODE_BLOCK, blocks = matrix->inputs / block;
    const size_t bytes = panel_bytes(matrix), of_block = bits == 4 ? 2 * LANES : LANES;
    const uint8_t *codes = (const uint8_t *)matrix->weights + panel * bytes;
    const uint16_t *scales = (const uint16_t *)matrix->scales + (size_t)panel * blocks * of_block;
    const int row_blocks = x->stride / block;
    const int8_t *values[MOST_ROWS];
    f32 sum[MOST_ROWS][MOST_PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        values[r] = x->codes + (size_t)(row + r) * x->stride;
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) sum[r][p] = (f32){0};
    }
    for (int b = 0; b < blocks; b++) {
        i32 whole[MOST_ROWS][MOST_PANELS];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int p = 0; p < P; p++)
                whole[r][p] = (i32){0} - (bits == 8 ? 128 * x->sums[(row + r) * row_blocks + b] : 0);
#pragma GCC unroll 4
        for (int step = 0; step < block; step += 32 / bits) {
            const int k = b * block + step;
            i32 low[MOST_PANELS], high[MOST_PANELS]; /* all low ones first: no product waits for the one before it */
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                memcpy(&low[p], codes + p * bytes + (size_t)k * LANES * bits / 8, sizeof low[p]);
                fetch(ahead, p * bytes, (size_t)k * bits / 32);
                if (bits == 4) {
                    high[p] = (i32)((u32)low[p] >> 4) & 0x0f0f0f0f;
                    low[p] &= 0x0f0f0f0f;
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) whole[r][p] = dot4(whole[r][p], low[p], values[r] + k);
            if (bits == 4)
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                    for (int p = 0; p < P; p++) whole[r][p] = dot4(whole[r][p], high[p], values[r] + k + 4);
        }
        f32 scale[MOST_PANELS], offset[MOST_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const size_t at = ((size_t)p * blocks + b) * of_block;
            scale[p] = widened(scales, at, FP16);
            if (bits == 4) offset[p] = widened(scales, at + LANES, FP16);
            __builtin_prefetch(scales + at + P * blocks * of_block, 0, 3); /* of the next panels */
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const size_t at = (row + r) * row_blocks + b;
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                const f32 product = __builtin_convertvector(whole[r][p], f32);
                sum[r][p] += product * (scale[p] * x->scales[at]);
                if (bits == 4) sum[r][p] += offset[p] * x->totals[at];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) sums[r][p] = sum[r][p];
}

/* Call with every number of rows and panels as constants, so that a tile's sums stay in registers. */
#define BOTH(R, panels, CALL) { if (panels == 2) CALL(R, 2) else CALL(R, 1) break; }
#if defined(__AVX512F__)
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
#else
#define EACH_TILE(rows, panels, CALL)                                                                                  \
    switch (rows) {                                                                                                    \
    case 1: BOTH(1, panels, CALL)                                                                                      \
    case 2: BOTH(2, panels, CALL)                                                                                      \
    }
#endif

/* sums = up to MOST_ROWS rows, from `row` on, times up to MOST_PANELS panels: tile number `tile` of those that meet
 * these panels. */
static void multiply(const struct matrix *matrix, const struct rows *x, int row, int rows, int panel, int panels,
                     int tile, int tiles, f32 sums[][MOST_PANELS]) {
    const float *values[MOST_ROWS];
    for (int r = 0; r < rows; r++) values[r] = x->values + (size_t)(row + r) * x->stride;
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) sums[r][p] = (f32){0};
    const size_t bytes = panel_bytes(matrix);
    const char *weights = (const char *)matrix->weights + panel * bytes;
    const struct ahead ahead = share(weights + panels * bytes, bytes, step_bytes(matrix->format), tile, tiles);
#define DENSE(R, P, FORMAT)                                                                                            \
    { dense_tile(R, P, values, weights, (size_t)matrix->inputs * LANES, ahead, matrix->inputs, FORMAT, sums); }
#define FP32_TILE(R, P) DENSE(R, P, FP32)
#define FP16_TILE(R, P) DENSE(R, P, FP16)
#define BF16_TILE(R, P) DENSE(R, P, BF16)
#define INT8_TILE(R, P) { integer_tile(R, P, x, row, matrix, panel, ahead, 8, sums); }
#define INT4_TILE(R, P) { integer_tile(R, P, x, row, matrix, panel, ahead, 4, sums); }
    switch (matrix->format) {
    case FP32: EACH_TILE(rows, panels, FP32_TILE) break;
    case FP16: EACH_TILE(rows, panels, FP16_TILE) break;
    case BF16: EACH_TILE(rows, panels, BF16_TILE) break;
    case INT8: EACH_TILE(rows, panels, INT8_TILE) break;
    case INT4: EACH_TILE(rows, panels, INT4_TILE) break;
    }
}

/* One row's codes: each block of inputs is divided by its largest magnitude / 127 and rounded. Filling is zero. */
static void round_row(const struct rows *x, int row, int inputs, int block) {
    const int blocks = x->stride / block;
    for (int b = 0; b * block < inputs; b++) {
        const float *values = x->values + (size_t)row * x->stride + b * block;
        f32 most = {0};
        for (int k = 0; k < block; k += LANES) {
            f32 value = load(values + k);
            most = larger(most, larger(value, -value));
        }
        float peak = largest(most), step = peak > 1e-30f ? 127.0f / peak : 0.0f;
        i32 sum = {0};
        for (int k = 0; k < block; k += LANES) {
            i32 code = nearest(load(values + k) * step);
            i8 narrow = __builtin_convertvector(code, i8);
            memcpy(x->codes + (size_t)row * x->stride + b * block + k, &narrow, sizeof narrow);
            sum += code;
        }
        x->scales[row * blocks + b] = peak / 127.0f;
        x->sums[row * blocks + b] = sum_of_lanes(sum);
        x->totals[row * blocks + b] = (float)x->sums[row * blocks + b] * x->scales[row * blocks + b];
    }
}
