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

/* The code of an input and a lane of a panel, see four_codes. */
INLINE int code_at(const uint8_t *codes, int k, int lane, int bits) {
    const int group = group_of(bits), four = k % group / 4;
    const uint8_t *from = codes + (size_t)(k / group) * (group * bits / 8) * LANES + lane * 4 + k % 4;
    if (bits == 8) return from[four * LANES * 4];
    const int low = from[four / 2 * LANES * 4] >> four % 2 * 4 & 15, rest = bits - 4;
    return rest ? low | (from[group / 8 * LANES * 4] >> four * rest & ((1 << rest) - 1)) << 4 : low;
}

/* values[0..size) = a row of a matrix, in any format, times `factor`. */
static void look_up(const struct matrix *matrix, int64_t row, int size, float factor, float *values) {
    const int lane = (int)(row % LANES), bits = bits_of(matrix->format), group = group_of(bits);
    const int offsets = has_offsets(bits), zero = offsets ? 0 : 1 << (bits - 1), super = has_superblocks(matrix->format);
    const size_t panel = (size_t)(row / LANES);
    const void *weights = (const char *)matrix->weights + panel * panel_bytes(matrix);
    const uint16_t *halves = weights;
    const uint8_t *scales = (const uint8_t *)matrix->scales + panel * scale_bytes(matrix->inputs, bits, super);
    float scale = 0, offset = 0; /* a product with a code is exact: to fuse it with the sum changes no bit */
    for (int k = 0; k < size; k++) {
        if (matrix->format >= INT8 && k % group == 0) {
            const uint8_t *from = scales + place_of_group(k, bits, super);
            const uint16_t *factors = (const uint16_t *)(scales + scale_bytes(k - k % SUPERBLOCK, bits, super));
            scale = super ? (int8_t)from[lane] * half_at(factors, lane) : half_at((const uint16_t *)from, lane);
            from += group_bytes(bits, super) / 2, factors += LANES;
            if (offsets) offset = super ? (int8_t)from[lane] * half_at(factors, lane) : half_at((const uint16_t *)from, lane);
        }
        const float value = matrix->format == FP32   ? ((const float *)weights)[k * LANES + lane]
                            : matrix->format == FP16 ? half_at(halves + k * LANES, lane)
                            : matrix->format == BF16 ? from_bf16(halves[(k / 2 * LANES + lane) * 2 + k % 2])
                                                     : (float)(code_at(weights, k, lane, bits) - zero) * scale + offset;
        values[k] = value * factor;
    }
}
