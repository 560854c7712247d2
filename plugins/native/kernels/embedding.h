/* A token's embedding: a row of a packed matrix, which is looked up. */
#pragma once
#include "matrix.h"

/* The number of a panel's lane in a vector of fp16 that begins at `from`. */
INLINE float half_at(const uint16_t *from, int lane) {
    const f32 part = from_fp16(from + lane / WIDTH * WIDTH);
    return part[lane % WIDTH];
}

INLINE float from_bf16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* values[0..size) = a row of a matrix, in any format except INT4, times `factor`. */
static void look_up(const struct matrix *matrix, int64_t row, int size, float factor, float *values) {
    const int lane = (int)(row % LANES), blocks = matrix->inputs / CODE_BLOCK;
    const size_t panel = (size_t)(row / LANES);
    const void *weights = (const char *)matrix->weights + panel * panel_bytes(matrix);
    const uint16_t *halves = weights, *scales = (const uint16_t *)matrix->scales + panel * blocks * LANES;
    const uint8_t *codes = weights;
    float scale = 0;
    for (int k = 0; k < size; k++) {
        if (matrix->format == INT8 && k % CODE_BLOCK == 0) scale = half_at(scales + k / CODE_BLOCK * LANES, lane);
        const float value = matrix->format == FP32   ? ((const float *)weights)[k * LANES + lane]
                            : matrix->format == FP16 ? half_at(halves + k * LANES, lane)
                            : matrix->format == BF16 ? from_bf16(halves[(k / 2 * LANES + lane) * 2 + k % 2])
                                                     : (float)(codes[(k / 4 * LANES + lane) * 4 + k % 4] - 128) * scale;
        values[k] = value * factor;
    }
}
