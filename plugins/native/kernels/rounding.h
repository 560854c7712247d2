/* Weights rounded to codes in blocks of inputs. At 8 and 6 bits a block has an fp16 scale by which its largest weight
 * fits. At 5 and 4 bits it has the scale and the offset, both fp16, that leave the smallest square error. A vector
 * of outputs at a time: a lane belongs to one of them, so nothing is added across lanes. */
#pragma once
#include "matrix.h"

#define SMALLEST_SCALE 0x1p-24f /* of fp16 */
#define FITS 5 /* of scale and offset, of which each has the codes of the one before */

/* To the nearest integer, as `nearest` does and for the same numbers, but still floats. */
INLINE f32 whole(f32 value) { return (settled(value) + WHOLE_ZERO) - WHOLE_ZERO; }

struct affine {
    f32 scale, offset;
};

/* The code of a weight, from 0 to `largest`. A compiler may fuse product and sum: near a tie both codes are as good. */
INLINE f32 code_of(f32 weight, struct affine by, f32 inverse, float largest) {
    const f32 at = (weight - by.offset) * inverse + WHOLE_ZERO;
    return smaller(larger(at, splat(WHOLE_ZERO)), splat(WHOLE_ZERO + largest)) - WHOLE_ZERO;
}

/* The codes that `by` gives a block: returns the squares of what they leave. next: the line of least squares through the
 * weights over them, or `by` where there is none. sum: of the weights. */
INLINE f32 fit(const f32 *weights, f32 sum, struct affine by, float largest, struct affine *next) {
    const f32 inverse = 1.0f / by.scale;
    const float count = CODE_BLOCK;
    f32 error = {0}, code_sum = {0}, square_sum = {0}, product_sum = {0};
    UNROLL(4) for (int k = 0; k < CODE_BLOCK; k++) {
        const f32 code = code_of(weights[k], by, inverse, largest), left = code * by.scale - (weights[k] - by.offset);
        error += left * left, code_sum += code, square_sum += code * code, product_sum += code * weights[k];
    }
    const f32 spread = count * square_sum - code_sum * code_sum, rise = count * product_sum - code_sum * sum;
    const i32 fits = (spread > 0) & (rise > 0);
    const f32 scale = rise / choose(fits, spread, splat(1));
    const f32 offset = (sum - scale * code_sum) / count;
    *next = (struct affine){choose(fits, scale, by.scale), choose(fits, offset, by.offset)};
    return error;
}

/* One block of WIDTH outputs. shares: of the distance from the smallest weight to the largest, which are tried. */
static struct affine search_affine(const f32 *weights, const float *shares, int count, float largest) {
    f32 least = weights[0], most = weights[0], sum = weights[0];
    for (int k = 1; k < CODE_BLOCK; k++) {
        least = smaller(least, weights[k]), most = larger(most, weights[k]), sum += weights[k];
    }
    const f32 smallest = splat(SMALLEST_SCALE);
    struct affine best = {smallest, rounded_fp16(least)};
    f32 error = splat(INFINITY);
    for (int at = 0; at < count; at++) {
        struct affine by;
        by.scale = (most - least) * (shares[at] / largest);
        by.offset = least * 0.5f + most * 0.5f - by.scale * (largest / 2);
        for (int turn = 0; turn < FITS; turn++) {
            const struct affine held = {larger(rounded_fp16(by.scale), smallest), rounded_fp16(by.offset)};
            const f32 left = fit(weights, sum, held, largest, &by);
            const i32 better = left < error;
            error = choose(better, left, error);
            best.scale = choose(better, held.scale, best.scale), best.offset = choose(better, held.offset, best.offset);
        }
    }
    return best;
}

/* A block of up to WIDTH outputs, by inputs; lanes without an output are zero. */
INLINE void gather_block(const float *weights, int lanes, int inputs, int group, f32 *block) {
    memset(block, 0, group * sizeof *block);
    for (int lane = 0; lane < lanes; lane++)
        for (int k = 0; k < group; k++) block[k][lane] = weights[(size_t)lane * inputs + k];
}

/* The next larger positive fp16 numbers: subnormal ones are multiples of the smallest, others have 10 bits. */
INLINE f32 next_fp16(f32 value) { return larger(value + splat(SMALLEST_SCALE), (f32)((u32)value + 0x2000)); }

/* The least scale of blocks by which largest weights have codes up to `largest`: the nearest may be too small. */
INLINE f32 scale_of(f32 peak, float largest) {
    const f32 near = larger(rounded_fp16(choose(peak > 0, peak / largest, splat(1))), splat(SMALLEST_SCALE));
    return choose(whole(smaller(peak / near, splat(200))) > largest, smaller(next_fp16(near), splat(65504)), near);
}

/* A matrix of floats [outputs][inputs] as signed codes [outputs][inputs] of 8 or 6 bits, with scales
 * [outputs][inputs / group] of fp16 numbers. */
void draftwood_round_signed(const float *weights, int outputs, int inputs, int bits, int8_t *codes, float *scales) {
    const int group = group_of(bits), blocks = inputs / group;
    const float largest = (float)((1 << (bits - 1)) - 1);
    for (int output = 0; output < outputs; output += WIDTH)
        for (int b = 0; b < blocks; b++) {
            const int lanes = outputs - output < WIDTH ? outputs - output : WIDTH;
            const size_t first = (size_t)output * inputs + b * group;
            f32 block[CODE_BLOCK], peak = {0};
            gather_block(weights + first, lanes, inputs, group, block);
            for (int k = 0; k < group; k++) peak = larger(peak, larger(block[k], -block[k]));
            const f32 scale = scale_of(peak, largest);
            for (int k = 0; k < group; k++) {
                const f32 code = whole(smaller(larger(block[k] / scale, splat(-largest - 1)), splat(largest)));
                for (int lane = 0; lane < lanes; lane++) codes[first + (size_t)lane * inputs + k] = (int8_t)code[lane];
            }
            for (int lane = 0; lane < lanes; lane++) scales[(size_t)(output + lane) * blocks + b] = scale[lane];
        }
}

/* A matrix of floats [outputs][inputs] as codes [outputs][inputs] of 5 or 4 bits from 0 on, with scales and offsets,
 * [outputs][inputs / 32], of fp16 numbers.
 *
 * feedback: [32][32], or null; for a matrix of one block. What rounding leaves of input k is then taken from the inputs
 * j > k, times feedback[k][j], before those are rounded, and is written to left, [outputs][32]. */
void draftwood_round(const float *weights, int outputs, int inputs, int bits, const float *shares, int count,
                     const float *feedback, uint8_t *codes, float *scales, float *offsets, float *left) {
    const int blocks = inputs / CODE_BLOCK;
    const float largest = (float)((1 << bits) - 1);
    for (int output = 0; output < outputs; output += WIDTH)
        for (int b = 0; b < blocks; b++) {
            const int lanes = outputs - output < WIDTH ? outputs - output : WIDTH;
            const size_t first = (size_t)output * inputs + b * CODE_BLOCK;
            f32 block[CODE_BLOCK];
            gather_block(weights + first, lanes, inputs, CODE_BLOCK, block);
            const struct affine by = search_affine(block, shares, count, largest);
            const f32 inverse = 1.0f / by.scale;
            for (int k = 0; k < CODE_BLOCK; k++) {
                const f32 code = code_of(block[k], by, inverse, largest), rest = block[k] - (code * by.scale + by.offset);
                for (int j = k + 1; feedback && j < CODE_BLOCK; j++) block[j] -= rest * feedback[k * CODE_BLOCK + j];
                for (int lane = 0; lane < lanes; lane++) {
                    codes[first + (size_t)lane * inputs + k] = (uint8_t)code[lane];
                    if (feedback) left[first + (size_t)lane * inputs + k] = rest[lane];
                }
            }
            for (int lane = 0; lane < lanes; lane++) {
                scales[(size_t)(output + lane) * blocks + b] = by.scale[lane];
                offsets[(size_t)(output + lane) * blocks + b] = by.offset[lane];
            }
        }
}
