/* Numbers in the registers of the processor at hand: the words of its instruction set, isa_*.h, and what is said in
 * them everywhere. A register holds WIDTH numbers, a panel's sixteen lie in PARTS of them. Sums over numbers are kept
 * by sixteen lanes on every processor, and nothing depends on a lane's place, so results have the same bits everywhere
 * and a row's never depend on its neighbours. */
#pragma once
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "isa_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "isa_avx2.h"
#elif defined(__aarch64__)
#include "isa_neon.h"
#else
#include "isa_generic.h"
#endif

#ifndef EIGHTS /* instructions that gain from two products of 5 or 6 bits at once */
#define EIGHTS 0
INLINE void add_eights(const int count, i32 *sums, const i32 *low, const i32 *high, i32 row, i32 other) {}
#endif

#ifndef PAIRS /* instructions that multiply two rows at once */
#define PAIRS 0
INLINE void add_pairs(i32 *one, i32 *two, i32 low, i32 high, const int8_t *row, const int8_t *other, const int bits) {}
INLINE void split_pairs(i32 *one, i32 *two) {}
#endif

#ifndef HALF_PAIRS /* instructions that multiply pairs of bf16 */
#define HALF_PAIRS 0
INLINE f32 add_half_pairs(f32 sum, u32 weights, u32 row) { return sum; }
INLINE void store_half_pairs(uint16_t *to, f32 value) {}
#endif

#if defined(__AMX_BF16__) && defined(__linux__) && WIDTH == LANES
#include "isa_amx.h"
#else
#define MATRIX_REGISTERS 0
static int registers_allowed(void) { return 0; }
static void open_registers(void) {}
static void close_registers(void) {}
INLINE void register_tile(const int T, const int P, const uint16_t *halves, size_t of_rows, const char *weights,
                          size_t panel, const char *next, int lines, int blocks, f32 *sums) {}
#endif
#define REGISTER_ROWS 16 /* of a matrix register */
#define MOST_TILE (MATRIX_REGISTERS ? 2 * REGISTER_ROWS : MOST_ROWS) /* rows of a tile */
#define REGISTERS_FROM 5 /* rows: fewer are faster in vectors */

/* A weight that several products use: compilers for x86 would read it anew for each of them. */
#ifdef SUMS_BESIDE
INLINE f32 read_once(f32 weight) { return settled(weight); }
#else
#define SUMS_BESIDE MOST_SUMS
INLINE f32 read_once(f32 weight) { return weight; }
#endif

#define LOG2_E 1.44269504f
#define WHOLE_ZERO 12582912.0f /* 1.5 * 2^23: a number that is added to it is rounded to an integer */

/* Bytes of a number that is stored by itself: of a cache, or of weights that are no codes. */
INLINE size_t number_bytes(int format) { return format == FP32 ? 4 : format == INT8 ? 1 : 2; }

/* A vector of such numbers as fp32, from number `index` on. */
INLINE f32 widened(const void *weights, size_t index, const enum format format) {
    if (format == FP32) return load((const float *)weights + index);
    if (format == INT8) return from_bytes((const int8_t *)weights + index);
    return from_fp16((const uint16_t *)weights + index);
}

/* One of the sixteen numbers in PARTS vectors. */
INLINE float lane_of(const f32 *vectors, int lane) { return vectors[lane / WIDTH][lane % WIDTH]; }

/* Lane i ^ half in lane i: written out, because compilers make of a loop over lanes what it says. */
#define FOUR(lane, half) (lane) ^ (half), (lane + 1) ^ (half), (lane + 2) ^ (half), (lane + 3) ^ (half)
#if WIDTH == 16
#define OTHERS(half) FOUR(0, half), FOUR(4, half), FOUR(8, half), FOUR(12, half)
#elif WIDTH == 8
#define OTHERS(half) FOUR(0, half), FOUR(4, half)
#else
#define OTHERS(half) FOUR(0, half)
#endif
#ifdef __clang__
#define SWAPPED(value, half) __builtin_shufflevector(value, value, OTHERS((half) % WIDTH))
#else
#define SWAPPED(value, half) __builtin_shuffle(value, (i32){OTHERS((half) % WIDTH)})
#endif

INLINE float largest(f32 value) {
    if (WIDTH > 8) value = larger(SWAPPED(value, 8), value);
    if (WIDTH > 4) value = larger(SWAPPED(value, 4), value);
    value = larger(SWAPPED(value, 2), value);
    return larger(SWAPPED(value, 1), value)[0];
}

INLINE int32_t largest_integer(i32 value) {
    if (WIDTH > 8) value = larger_integer(SWAPPED(value, 8), value);
    if (WIDTH > 4) value = larger_integer(SWAPPED(value, 4), value);
    value = larger_integer(SWAPPED(value, 2), value);
    return larger_integer(SWAPPED(value, 1), value)[0];
}

INLINE int32_t sum_of_lanes(i32 value) {
    if (WIDTH > 8) value += SWAPPED(value, 8);
    if (WIDTH > 4) value += SWAPPED(value, 4);
    value += SWAPPED(value, 2);
    return (value + SWAPPED(value, 1))[0];
}

/* To the nearest integer, ties to even, for |value| < 2^22: the last bits of WHOLE_ZERO + value are the integer. Fused
 * with this sum, the product that `value` may be would be rounded once instead of twice, and near a tie the integer
 * would depend on whether a compiler does that. */
INLINE i32 nearest(f32 value) { return (i32)(settled(value) + WHOLE_ZERO) - (i32)splat(WHOLE_ZERO); }

#define LEAST_NORMAL 0x38800000u /* fp16 number, 2^-14, as fp32 */

/* The nearest fp16 numbers, ties to even, at most the largest one. */
INLINE f32 rounded_fp16(f32 value) {
    const u32 bits = (u32)value, sign = bits & 0x80000000u, size = bits & 0x7fffffff;
    const u32 normal = (size + 0xfff + (size >> 13 & 1)) & ~(u32){0} << 13;
    const f32 tiny = __builtin_convertvector(nearest(choose((i32)(size < LEAST_NORMAL), value, splat(0)) * 0x1p24f), f32);
    const u32 most = (u32){0} + 0x477fe000u; /* 65504 */
    const u32 held = (u32)choose((i32)(normal > most), (f32)most, (f32)normal);
    return choose((i32)(size < LEAST_NORMAL), tiny * 0x1p-24f, (f32)(held | sign));
}

/* Those in 16 bits each. */
INLINE void store_fp16(uint16_t *to, f32 value) {
    const u32 bits = (u32)rounded_fp16(value), size = bits & 0x7fffffff;
    const i32 tiny = nearest(choose((i32)(size < LEAST_NORMAL), (f32)size, splat(0)) * 0x1p24f);
    const u32 normal = (size >> 13) - (112 << 10); /* exponents of fp16 begin so much later */
    const u16 narrow = __builtin_convertvector((u32)choose((i32)(size < LEAST_NORMAL), (f32)tiny, (f32)normal) |
                                               (bits >> 16 & 0x8000), u16);
    memcpy(to, &narrow, sizeof narrow);
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

/* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), which is x * sigmoid of twice the argument of tanh. */
INLINE f32 gelu(f32 x) {
    f32 at = x * (1.5957691f + 0.071354816f * x * x);
    f32 e = power_of_two(choose(at < 0, at, -at) * LOG2_E);
    return x * choose(at < 0, e, splat(1.0f)) / (e + 1.0f);
}
