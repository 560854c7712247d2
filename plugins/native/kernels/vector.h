/* Sixteen numbers at a time, in the vector extensions that gcc and clang have on every processor: AVX-512 takes one
 * register, others several. Nothing depends on a lane's place, so a row's result never depends on its neighbours. */
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16
#define LEAST (-3.0e38f) /* no score is smaller */
#define LOG2_E 1.44269504f
#define WHOLE_ZERO 12582912.0f /* 1.5 * 2^23: a number that is added to it is rounded to an integer */
#define INLINE static inline __attribute__((always_inline))

typedef float f32 __attribute__((vector_size(64)));
typedef int32_t i32 __attribute__((vector_size(64)));
typedef uint32_t u32 __attribute__((vector_size(64)));
typedef int8_t i8 __attribute__((vector_size(16)));
typedef uint16_t u16 __attribute__((vector_size(32)));

INLINE f32 load(const float *from) { f32 value; memcpy(&value, from, sizeof value); return value; }
INLINE void store(float *to, f32 value) { memcpy(to, &value, sizeof value); }
INLINE f32 splat(float value) { return value - (f32){0}; }
/* Of the first `size` numbers, or all of them. A copy of a size that is not known is a call, around which no register
 * keeps its value. */
#if defined(__AVX512F__)
INLINE uint16_t first_lanes(int size) { return (uint16_t)(size < LANES ? (1 << size) - 1 : 0xffff); }
INLINE void store_some(float *to, f32 value, int size) { _mm512_mask_storeu_ps(to, first_lanes(size), (__m512)value); }
INLINE f32 load_some(const float *from, int size, float rest) {
    return (f32)_mm512_mask_loadu_ps((__m512)splat(rest), first_lanes(size), from);
}
#else
INLINE void store_some(float *to, f32 value, int size) {
    if (size >= LANES) store(to, value); else memcpy(to, &value, size * sizeof(float));
}
INLINE f32 load_some(const float *from, int size, float rest) {
    if (size >= LANES) return load(from);
    f32 value = splat(rest);
    memcpy(&value, from, size * sizeof(float));
    return value;
}
#endif
INLINE f32 choose(i32 mask, f32 yes, f32 no) { return (f32)(((i32)yes & mask) | ((i32)no & ~mask)); }
/* The second one where either is no number. Compilers make sixteen comparisons of one of two registers. */
#if defined(__AVX512F__)
INLINE f32 larger(f32 a, f32 b) { return (f32)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX__)
INLINE f32 larger(f32 a, f32 b) {
    __m256 one[2], two[2];
    memcpy(one, &a, sizeof a);
    memcpy(two, &b, sizeof b);
    for (int half = 0; half < 2; half++) one[half] = _mm256_max_ps(one[half], two[half]);
    memcpy(&a, one, sizeof a);
    return a;
}
#else
INLINE f32 larger(f32 a, f32 b) { return choose(a > b, a, b); }
#endif

INLINE float largest(f32 value) {
    float most[LANES];
    store(most, value);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            most[lane] = most[lane + half] > most[lane] ? most[lane + half] : most[lane];
    return most[0];
}

INLINE int32_t sum_of_lanes(i32 value) {
    int32_t sum[LANES];
    memcpy(sum, &value, sizeof value);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sum[lane] += sum[lane + half];
    return sum[0];
}

/* The value in lanes whose bit is set, elsewhere LEAST. */
INLINE f32 only(uint16_t bits, f32 value) {
#if defined(__AVX512F__)
    return (f32)_mm512_mask_mov_ps((__m512)splat(LEAST), bits, (__m512)value);
#else
    const i32 each = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    return choose((((i32){0} + (int32_t)bits) & each) != 0, value, splat(LEAST));
#endif
}

/* The value in lanes where `place` is no smaller than `least`, elsewhere 0. */
INLINE f32 from_on(f32 place, float least, f32 value) {
#if defined(__AVX512F__)
    return (f32)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)place, (__m512)splat(least), _CMP_GE_OQ), (__m512)value);
#else
    return (f32)((i32)value & ~((i32)(place - least) >> 31)); /* the sign of the difference: no comparison */
#endif
}

/* A bit for each lane that is not smaller: what is no number has one, too. */
INLINE uint16_t not_below(f32 value, float least) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)value, (__m512)splat(least), _CMP_NLT_UQ);
#else
    uint16_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= (uint16_t)(!(value[lane] < least) << lane);
    return bits;
#endif
}

/* To the nearest integer, ties to even, for |value| < 2^22: the last bits of WHOLE_ZERO + value are the integer. A
 * compiler must not fuse the product that `value` may be with this sum: the product would then be rounded once instead
 * of twice, and near a tie the integer would depend on whether the processor has fused instructions. */
INLINE i32 nearest(f32 value) {
    __asm__("" : "+m"(value));
    return (i32)(value + WHOLE_ZERO) - (i32)splat(WHOLE_ZERO);
}

#define FAINT (-126.0f) /* 2^x is normal from here on */

/* 2^x for FAINT <= x <= 0, to 2e-7: 2^n times a polynomial on [-1/2, 1/2] (2^r's Taylor series). */
INLINE f32 normal_power_of_two(f32 x) {
    f32 n = x + WHOLE_ZERO;
    f32 r = x - (n - WHOLE_ZERO);
    f32 p = r * 1.5403530e-4f + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    return (f32)((i32)p + ((i32)n << 23));
}

/* The same for any x <= 0; where 2^x is smaller, and for what is no number, 2^FAINT. */
INLINE f32 power_of_two(f32 x) { return normal_power_of_two(larger(x, splat(FAINT))); }

/* x * sigmoid(x), without overflow on either side. */
INLINE f32 silu(f32 x) {
    f32 e = power_of_two(choose(x < 0, x, -x) * LOG2_E);
    return x * choose(x < 0, e, splat(1.0f)) / (e + 1.0f);
}

/* sum[lane] += four unsigned bytes of `codes[lane]` times four signed bytes: vpdpbusd. */
INLINE i32 dot4(i32 sum, i32 codes, const int8_t *four) {
    int32_t row;
    memcpy(&row, four, sizeof row);
#if defined(__AVX512VNNI__)
    return (i32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(row));
#elif defined(__AVXVNNI__)
    __m256i parts[2], words[2];
    memcpy(parts, &sum, sizeof sum);
    memcpy(words, &codes, sizeof codes);
    for (int half = 0; half < 2; half++)
        parts[half] = _mm256_dpbusd_avx_epi32(parts[half], words[half], _mm256_set1_epi32(row));
    memcpy(&sum, parts, sizeof sum);
    return sum;
#else
    for (int byte = 0; byte < 4; byte++) sum += ((i32)((u32)codes >> 8 * byte) & 255) * (int32_t)four[byte];
    return sum;
#endif
}
