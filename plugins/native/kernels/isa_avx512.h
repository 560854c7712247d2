/* AVX-512 (F, BW, DQ, VL), with or without VNNI: a panel is one register. */
#pragma once
#include <immintrin.h>
#define WIDTH 16
#include "lanes.h"

#define MOST_ROWS 8  /* of a tile */
#define MOST_ROWS_SMALL 7 /* the same over codes of fewer than 8 bits: their parts and offsets need registers, too */
#define MOST_SUMS 16 /* of its vectors */
#define SUMS_BESIDE 15 /* so many leave registers for the weights of a step */
#define ROWS_OF_STREAM 4 /* see isa_avx2.h */

/* Of the first `size` numbers, or all of them. */
INLINE uint16_t first_lanes(int size) { return (uint16_t)(size < LANES ? (1 << size) - 1 : 0xffff); }
INLINE void store_some(float *to, f32 value, int size) { _mm512_mask_storeu_ps(to, first_lanes(size), (__m512)value); }
INLINE f32 load_some(const float *from, int size, float rest) {
    return (f32)_mm512_mask_loadu_ps((__m512)splat(rest), first_lanes(size), from);
}

/* The second one where either is no number. */
INLINE f32 larger(f32 a, f32 b) { return (f32)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE f32 smaller(f32 a, f32 b) { return (f32)_mm512_min_ps((__m512)a, (__m512)b); }

INLINE i32 larger_integer(i32 a, i32 b) { return (i32)_mm512_max_epi32((__m512i)a, (__m512i)b); }

/* The value in lanes whose bit is set, elsewhere LEAST. */
INLINE f32 only(uint16_t bits, f32 value) {
    return (f32)_mm512_mask_mov_ps((__m512)splat(LEAST), bits, (__m512)value);
}

/* The value in lanes where `place` is no smaller than `least`, elsewhere 0. */
INLINE f32 from_on(f32 place, float least, f32 value) {
    return (f32)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)place, (__m512)splat(least), _CMP_GE_OQ), (__m512)value);
}

/* A bit for each lane that is not smaller: what is no number has one, too. */
INLINE uint16_t not_below(f32 value, float least) {
    return _mm512_cmp_ps_mask((__m512)value, (__m512)splat(least), _CMP_NLT_UQ);
}

/* In a register, exactly as it is: a compiler must not fuse a product with what is added to it afterwards. */
INLINE f32 settled(f32 value) { __asm__("" : "+v"(value)); return value; }

/* Integers from -128 to 127 as bytes. */
INLINE void store_bytes(int8_t *to, i32 value) {
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)value));
}

INLINE f32 from_bytes(const int8_t *at) {
    return (f32)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
}

/* Numbers of 16 bits as fp32. */
INLINE f32 from_fp16(const uint16_t *at) { return (f32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }

/* Where there are no matrix registers: products of pairs of bf16, of each lane's upper numbers first. */
#if defined(__AVX512BF16__) && !(defined(__AMX_BF16__) && defined(__linux__))
#define HALF_PAIRS 1
INLINE f32 add_half_pairs(f32 sum, u32 weights, u32 row) {
    return (f32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)row);
}

/* Numbers of bf16 in fp32, of each four a, b, c, d two pairs: c below a, d below b. */
INLINE void store_half_pairs(uint16_t *to, f32 value) {
    const __m512i numbers = (__m512i)value, lower = _mm512_srli_epi32(numbers, 16);
    const __m512i pairs = _mm512_or_si512(numbers, _mm512_shuffle_epi32(lower, _MM_PERM_BADC));
    _mm256_storeu_si256((__m256i *)to, _mm512_castsi512_si256(_mm512_maskz_compress_epi64(0x55, pairs)));
}
#endif

/* To each of `count` vectors of sums, four products in every lane: of an unsigned code, of which BYTE_ZERO is taken where
 * it has 8 bits; `row` holds codes from -127 to 127. Sums of a block of codes of 4 bits become integers by small_sums. */
#if defined(__AVX512VNNI__)
#define BYTE_ZERO 0
INLINE void add_codes(const int count, i32 *sums, const i32 *codes, i32 row, const int bits) {
    UNROLL(8) for (int v = 0; v < count; v++)
        sums[v] = (i32)_mm512_dpbusd_epi32((__m512i)sums[v], (__m512i)codes[v], (__m512i)row);
}
INLINE i32 small_sums(i32 sum) { return sum; }
#else
#define BYTE_ZERO 128
/* Pairs of products fit 16 bits: of 8 bits, those of |code| and the row's number with the code's sign. So do 16 products of
 * 4 bits, of at most 1905. */
INLINE void add_codes(const int count, i32 *sums, const i32 *codes, i32 row, const int bits) {
    UNROLL(8) for (int v = 0; v < count; v++) {
        if (bits < 8) {
            const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes[v], (__m512i)row);
            if (bits == 4) sums[v] = (i32)_mm512_add_epi16((__m512i)sums[v], pairs);
            else sums[v] += (i32)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
            continue;
        }
        const __m512i code = _mm512_xor_si512((__m512i)codes[v], _mm512_set1_epi8((char)0x80));
        const __mmask64 negative = _mm512_movepi8_mask(code);
        const __m512i other = _mm512_mask_sub_epi8((__m512i)row, negative, _mm512_setzero_si512(), (__m512i)row);
        const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(code), other);
        sums[v] += (i32)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
    }
}
INLINE i32 small_sums(i32 sum) { return (i32)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)); }
#endif
