/* NEON of 64-bit ARM, perhaps with products of bytes (dotprod) and row pairs (i8mm): a panel is four registers. */
#pragma once
#include <arm_neon.h>
#define WIDTH 4
#include "plain.h"

#define MOST_ROWS 4  /* of a tile */
#define MOST_SUMS 16 /* of its vectors */
#define ROWS_OF_STREAM 0 /* see isa_avx2.h */

/* In a register, exactly as it is: a compiler must not fuse a product with what is added to it afterwards. */
INLINE f32 settled(f32 value) { __asm__("" : "+w"(value)); return value; }

/* Integers from -128 to 127 as bytes. */
INLINE void store_bytes(int8_t *to, i32 value) {
    const int16x4_t words = vmovn_s32((int32x4_t)value);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    memcpy(to, &bytes, WIDTH);
}

/* Numbers of 16 bits as fp32. */
INLINE f32 from_fp16(const uint16_t *at) { return (f32)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at))); }

/* To each of `count` vectors of sums, four products in every lane: of an unsigned code, of which BYTE_ZERO is taken where
 * it has 8 bits; `row` holds codes from -127 to 127. Sums of a block of codes of 4 bits become integers by small_sums. */
#define BYTE_ZERO 128
INLINE i32 with_products(i32 sum, i32 codes, i32 row) {
    const int8x16_t code = (int8x16_t)codes, other = (int8x16_t)row;
#if defined(__ARM_FEATURE_DOTPROD)
    return (i32)vdotq_s32((int32x4_t)sum, code, other);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(code), vget_low_s8(other)), high = vmull_high_s8(code, other);
    return sum + (i32)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
}
INLINE void add_codes(const int count, i32 *sums, const i32 *codes, i32 row, const int bits) {
    const int32_t zero = bits == 8 ? (int32_t)0x80808080 : 0;
    UNROLL(8) for (int v = 0; v < count; v++) sums[v] = with_products(sums[v], codes[v] ^ zero, row);
}
INLINE i32 small_sums(i32 sum) { return sum; }

/* Of two rows and four outputs, products of eight inputs: `one` sums the first two outputs of both rows, `two` the
 * others, until they become each row's sums. The panels' order is no matter: registers are arranged. */
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define PAIRS 1
INLINE void add_pairs(i32 *one, i32 *two, i32 low, i32 high, const int8_t *row, const int8_t *other, const int bits) {
    const int32_t zero = bits == 8 ? (int32_t)0x80808080 : 0;
    const int8x16_t rows = vcombine_s8(vld1_s8(row), vld1_s8(other));
    const int32x4_t first = (int32x4_t)(low ^ zero), second = (int32x4_t)(high ^ zero);
    *one = (i32)vmmlaq_s32((int32x4_t)*one, rows, vreinterpretq_s8_s32(vzip1q_s32(first, second)));
    *two = (i32)vmmlaq_s32((int32x4_t)*two, rows, vreinterpretq_s8_s32(vzip2q_s32(first, second)));
}
INLINE void split_pairs(i32 *one, i32 *two) {
    const int64x2_t first = (int64x2_t)*one, second = (int64x2_t)*two;
    *one = (i32)vzip1q_s64(first, second), *two = (i32)vzip2q_s64(first, second);
}
#endif
