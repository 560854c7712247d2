/* Any other processor: what the compiler makes of vectors of 16 bytes. */
#pragma once
#define WIDTH 4
#include "plain.h"

#define MOST_ROWS 2 /* of a tile */
#define MOST_SUMS 8 /* of its vectors */
#define ROWS_OF_STREAM 0 /* see isa_avx2.h */

/* In memory, exactly as it is: a compiler must not fuse a product with what is added to it afterwards. */
INLINE f32 settled(f32 value) { __asm__("" : "+m"(value)); return value; }

/* Integers from -128 to 127 as bytes. */
INLINE void store_bytes(int8_t *to, i32 value) {
    const i8 narrow = __builtin_convertvector(value, i8);
    memcpy(to, &narrow, sizeof narrow);
}

INLINE u32 wide_words(const uint16_t *at) {
    u16 words;
    memcpy(&words, at, sizeof words);
    return __builtin_convertvector(words, u32);
}

/* 16 bits as fp32. fp16's exponent and mantissa move up; a product corrects the bias, also of subnormals. */
INLINE f32 from_fp16(const uint16_t *at) {
    const u32 wide = wide_words(at);
    const f32 size = (f32)((wide & 0x7fff) << 13) * 0x1p112f;
    return (f32)((u32)size | (wide & 0x8000) << 16);
}

/* To each of `count` vectors of sums, four products in every lane: of an unsigned code, of which BYTE_ZERO is taken where
 * it has 8 bits; `row` holds codes from -127 to 127. Sums of a block of codes of 4 bits become integers by small_sums. */
#define BYTE_ZERO 0
INLINE void add_codes(const int count, i32 *sums, const i32 *codes, i32 row, const int bits) {
    for (int v = 0; v < count; v++)
        for (int byte = 0; byte < 4; byte++)
            sums[v] += ((i32)((u32)codes[v] >> 8 * byte) & 255) * (row << 24 - 8 * byte >> 24);
}
INLINE i32 small_sums(i32 sum) { return sum; }
