/* AVX2 with FMA and F16C, with or without AVX-VNNI: a panel is two registers. */
#pragma once
#include <immintrin.h>
#define WIDTH 8
#include "lanes.h"

#define MOST_ROWS 6  /* of a tile */
#define MOST_ROWS_LARGE 4 /* the same over codes of 8 bits and bf16: signs, and sums of even and odd inputs, need registers */
#define MOST_SUMS 8 /* of its vectors */
#define SUMS_BESIDE 8 /* so many leave registers for the weights of a step */
#define ROWS_OF_STREAM 1 /* so many rows of codes or bf16 meet one panel at a time: memory is read as one stream */

/* Of the first `size` numbers, or all of them. */
INLINE __m256i first_lanes(int size) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(size), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE void store_some(float *to, f32 value, int size) {
    if (size >= WIDTH) store(to, value); else _mm256_maskstore_ps(to, first_lanes(size), (__m256)value);
}
INLINE f32 load_some(const float *from, int size, float rest) {
    if (size >= WIDTH) return load(from);
    const __m256i mask = first_lanes(size);
    return (f32)_mm256_blendv_ps((__m256)splat(rest), _mm256_maskload_ps(from, mask), (__m256)mask);
}

/* The second one where either is no number. */
INLINE f32 larger(f32 a, f32 b) { return (f32)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE f32 smaller(f32 a, f32 b) { return (f32)_mm256_min_ps((__m256)a, (__m256)b); }

INLINE i32 larger_integer(i32 a, i32 b) { return (i32)_mm256_max_epi32((__m256i)a, (__m256i)b); }

/* The value in lanes whose bit is set, elsewhere LEAST. */
INLINE f32 only(uint16_t bits, f32 value) {
    const i32 each = {1, 2, 4, 8, 16, 32, 64, 128}, mask = (((i32){0} + bits) & each) == each;
    return (f32)_mm256_blendv_ps((__m256)splat(LEAST), (__m256)value, (__m256)mask);
}

/* The value in lanes where `place` is no smaller than `least`, elsewhere 0. */
INLINE f32 from_on(f32 place, float least, f32 value) {
    return (f32)_mm256_and_ps(_mm256_cmp_ps((__m256)place, (__m256)splat(least), _CMP_GE_OQ), (__m256)value);
}

/* A bit for each lane that is not smaller: what is no number has one, too. */
INLINE uint16_t not_below(f32 value, float least) {
    return (uint16_t)_mm256_movemask_ps(_mm256_cmp_ps((__m256)value, (__m256)splat(least), _CMP_NLT_UQ));
}

/* In a register, exactly as it is: a compiler must not fuse a product with what is added to it afterwards. */
INLINE f32 settled(f32 value) { __asm__("" : "+x"(value)); return value; }

/* Integers from -128 to 127 as bytes. */
INLINE void store_bytes(int8_t *to, i32 value) {
    const __m256i all = (__m256i)value;
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(words, words));
}

INLINE f32 from_bytes(const int8_t *at) {
    return (f32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
}

/* Numbers of 16 bits as fp32. */
INLINE f32 from_fp16(const uint16_t *at) { return (f32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }

/* To each of `count` vectors of sums, four products in every lane: of an unsigned code, of which BYTE_ZERO is taken where
 * it has 8 bits; `row` holds codes from -127 to 127. Sums of a block of codes of 4 bits become integers by small_sums. */
#if defined(__AVXVNNI__)
#define BYTE_ZERO 0
INLINE void add_codes(const int count, i32 *sums, const i32 *codes, i32 row, const int bits) {
    UNROLL(8) for (int v = 0; v < count; v++)
        sums[v] = (i32)_mm256_dpbusd_avx_epi32((__m256i)sums[v], (__m256i)codes[v], (__m256i)row);
}
INLINE i32 small_sums(i32 sum) { return sum; }
#else
#define BYTE_ZERO 128
#define MOST_SUMS_CODES 4 /* of a tile over codes: the signs of a code and its size need registers, too */
/* In a register at this place: a compiler would compute the products of a whole block first and store them. */
INLINE i32 at_once(__m256i value) { __asm__("" : "+x"(value)); return (i32)value; }

/* Pairs of products fit 16 bits: of 8 bits, those of |code| and the row's number with the code's sign. So do 16 products of
 * 4 bits, of at most 1905. Each step for all vectors before the next one: Zen 3 computes two products and then two sums
 * faster than both in turn. */
INLINE void add_codes(const int count, i32 *sums, const i32 *codes, i32 row, const int bits) {
    i32 part[VECTORS];
    __m256i code[VECTORS], size[VECTORS];
    UNROLL(8) for (int v = 0; v < count; v++) {
        code[v] = bits == 8 ? _mm256_xor_si256((__m256i)codes[v], _mm256_set1_epi8((char)0x80)) : (__m256i)codes[v];
        size[v] = bits == 8 ? _mm256_abs_epi8(code[v]) : code[v];
    }
    UNROLL(8) for (int v = 0; v < count; v++)
        part[v] = bits == 8 ? at_once(_mm256_sign_epi8((__m256i)row, code[v])) : row;
    UNROLL(8) for (int v = 0; v < count; v++) part[v] = at_once(_mm256_maddubs_epi16(size[v], (__m256i)part[v]));
    UNROLL(8) for (int v = 0; v < count && bits > 4; v++)
        part[v] = at_once(_mm256_madd_epi16((__m256i)part[v], _mm256_set1_epi16(1)));
    UNROLL(8) for (int v = 0; v < count; v++)
        sums[v] = at_once(bits == 4 ? _mm256_add_epi16((__m256i)sums[v], (__m256i)part[v]) : (__m256i)(sums[v] + part[v]));
}

/* The same with eight inputs at once: four products of 5 or 6 bits fit 16 bits, at most 4 * 63 * 127. */
#define EIGHTS 1
INLINE void add_eights(const int count, i32 *sums, const i32 *low, const i32 *high, i32 row, i32 other) {
    i32 part[VECTORS], more[VECTORS];
    UNROLL(8) for (int v = 0; v < count; v++) part[v] = at_once(_mm256_maddubs_epi16((__m256i)low[v], (__m256i)row));
    UNROLL(8) for (int v = 0; v < count; v++) more[v] = at_once(_mm256_maddubs_epi16((__m256i)high[v], (__m256i)other));
    UNROLL(8) for (int v = 0; v < count; v++) part[v] = at_once(_mm256_add_epi16((__m256i)part[v], (__m256i)more[v]));
    UNROLL(8) for (int v = 0; v < count; v++)
        part[v] = at_once(_mm256_madd_epi16((__m256i)part[v], _mm256_set1_epi16(1)));
    UNROLL(8) for (int v = 0; v < count; v++) sums[v] = at_once((__m256i)(sums[v] + part[v]));
}
INLINE i32 small_sums(i32 sum) { return (i32)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
#endif
