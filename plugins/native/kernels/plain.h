/* What the vector extensions of gcc and clang say well enough where there are no instructions for parts of a vector. */
#pragma once
#include "lanes.h"

INLINE i32 numbered(void) { /* lanes, from 0 on */
    i32 lanes = {0};
    for (int lane = 0; lane < WIDTH; lane++) lanes[lane] = lane;
    return lanes;
}

/* Of the first `size` numbers, or all of them. */
INLINE void store_some(float *to, f32 value, int size) {
    if (size >= WIDTH) store(to, value);
    else for (int lane = 0; lane < size; lane++) to[lane] = value[lane];
}
INLINE f32 load_some(const float *from, int size, float rest) {
    if (size >= WIDTH) return load(from);
    f32 value = splat(rest);
    for (int lane = 0; lane < size; lane++) value[lane] = from[lane];
    return value;
}

INLINE f32 from_bytes(const int8_t *at) {
    i8 narrow;
    memcpy(&narrow, at, sizeof narrow);
    return __builtin_convertvector(__builtin_convertvector(narrow, i32), f32);
}

/* The second one where either is no number. */
INLINE f32 larger(f32 a, f32 b) { return choose(a > b, a, b); }
INLINE f32 smaller(f32 a, f32 b) { return choose(a < b, a, b); }

INLINE i32 larger_integer(i32 a, i32 b) { return (i32)choose(a > b, (f32)a, (f32)b); }

/* The value in lanes whose bit is set, elsewhere LEAST. */
INLINE f32 only(uint16_t bits, f32 value) {
    return choose((((i32){0} + bits) >> numbered() & 1) != 0, value, splat(LEAST));
}

/* The value in lanes where `place` is no smaller than `least`, elsewhere 0. */
INLINE f32 from_on(f32 place, float least, f32 value) { return choose(place >= least, value, splat(0)); }

/* A bit for each lane that is not smaller: what is no number has one, too. */
INLINE uint16_t not_below(f32 value, float least) {
    const i32 bits = ~(value < least) & (i32){0} + 1 << numbered();
    int32_t all = 0;
    for (int lane = 0; lane < WIDTH; lane++) all |= bits[lane];
    return (uint16_t)all;
}
