/* Rows of activations as a matrix multiplies them: in bf16, or as codes of 8 bits. */
#pragma once
#include "matrix.h"

/* A row's inputs in bf16: in place, and as pairs, with matrix registers beside the fifteen rows that share one. */
static void round_to_halves(const struct rows *x, int row, int from, int end) {
    float *values = x->values + (size_t)row * x->stride;
    const size_t first = (size_t)(row / REGISTER_ROWS) * x->stride * REGISTER_ROWS;
    for (int k = from; k < end; k += WIDTH) {
        const f32 value = rounded_half(load(values + k));
        store(values + k, value);
        if (HALF_PAIRS && x->halves) store_half_pairs(x->halves + (size_t)row * x->stride + k, value);
        if (HALF_PAIRS || !x->halves) continue;
        const u16 narrow = __builtin_convertvector((u32)value >> 16, u16);
        const size_t at = first + (size_t)(k / HALF_BLOCK * REGISTER_ROWS + row % REGISTER_ROWS) * HALF_BLOCK;
        memcpy(x->halves + at + k % HALF_BLOCK, &narrow, sizeof narrow);
    }
}

/* Codes of inputs of one row, for a matrix of that format: each block is divided by its largest magnitude / 127 and
 * rounded. Filling is zero. Where a number of a block is infinite or none, the block's scale is none, and so are all
 * products with it. */
static void round_to_codes(const struct rows *x, int row, int from, int end, int format) {
    const int blocks = x->stride / CODE_BLOCK;
    for (int b = from / CODE_BLOCK; b < end / CODE_BLOCK; b++) {
        const float *values = x->values + (size_t)row * x->stride + b * CODE_BLOCK;
        int8_t *codes = x->codes + (size_t)row * x->stride + b * CODE_BLOCK;
        i32 most = {0}, sum[2] = {{0}, {0}}; /* magnitudes have the order of their bits, and what is no number is the largest */
        for (int k = 0; k < CODE_BLOCK; k += WIDTH)
            most = larger_integer(most, (i32)load(values + k) & 0x7fffffff);
        const int32_t bits = largest_integer(most);
        if (bits >= INFINITE) {
            memset(codes, 0, CODE_BLOCK);
            x->scales[row * blocks + b] = x->totals[row * blocks + b] = __builtin_nanf("");
            continue;
        }
        float peak;
        memcpy(&peak, &bits, sizeof peak);
        const float step = peak > 1e-30f ? 127.0f / peak : 0.0f;
        for (int k = 0; k < CODE_BLOCK; k += WIDTH) {
            i32 code = nearest(load(values + k) * step);
            store_bytes(codes + k, code);
            sum[2 * k / CODE_BLOCK] += code;
        }
        x->scales[row * blocks + b] = peak / 127.0f;
        const int whole = sum_of_lanes(sum[0] + sum[1]);
        for (int half = 0; bits_of(format) == 6 && half < 2; half++)
            x->starts[2 * (row * blocks + b) + half] = -32 * sum_of_lanes(sum[half]);
        if (format == INT8) x->starts[row * blocks + b] = (BYTE_ZERO - 128) * whole;
        x->totals[row * blocks + b] = (float)whole * x->scales[row * blocks + b];
    }
}

/* Inputs of a row as the matrix multiplies them, from and to a multiple of ROUNDED. */
static void round_inputs(const struct rows *x, int row, int from, int end, const struct matrix *next) {
    if (next->format == BF16) round_to_halves(x, row, from, end);
    if (next->format >= INT8) round_to_codes(x, row, from, end, next->format);
}

/* A row as the matrix multiplies it. */
static void round_row(const struct rows *x, int row, const struct matrix *next) {
    round_inputs(x, row, 0, (next->inputs + ROUNDED - 1) / ROUNDED * ROUNDED, next);
}
