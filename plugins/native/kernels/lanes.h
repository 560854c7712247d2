/* Vectors of WIDTH numbers, as wide as a register of the processor, in the vector extensions of gcc and clang. Included
 * by the file of an instruction set, isa_*.h, which says how wide that is. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 16               /* of a panel, on every processor */
#define PARTS (LANES / WIDTH)  /* vectors that hold them */
#define MOST_PANELS 2          /* of a tile. More at once are slower from one row on: more streams to fetch */
#define VECTORS (MOST_PANELS * PARTS)
#define LEAST (-3.0e38f) /* no score is smaller */
#define INLINE static inline __attribute__((always_inline))
#define PRAGMA(words) _Pragma(#words)
#define UNROLL(times) PRAGMA(GCC unroll times) /* the loop that follows */

enum format { FP32, FP16, BF16, INT8, INT6, INT5, INT4, INT6_K, INT5_K, INT4_K }; /* K: with superblocks, see scales.h */

typedef float f32 __attribute__((vector_size(4 * WIDTH)));
typedef int32_t i32 __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t u32 __attribute__((vector_size(4 * WIDTH)));
typedef int8_t i8 __attribute__((vector_size(WIDTH)));
typedef uint16_t u16 __attribute__((vector_size(2 * WIDTH)));

INLINE f32 load(const float *from) { f32 value; memcpy(&value, from, sizeof value); return value; }
INLINE void store(float *to, f32 value) { memcpy(to, &value, sizeof value); }
INLINE f32 splat(float value) { return value - (f32){0}; }
INLINE f32 choose(i32 mask, f32 yes, f32 no) { return (f32)(((i32)yes & mask) | ((i32)no & ~mask)); }

/* Four neighbouring codes of a row, in every lane. */
INLINE i32 repeated(const int8_t *four) {
    int32_t word;
    memcpy(&word, four, sizeof word);
    return (i32){0} + word;
}

/* Up to eight rows of numbers, `apart`, and a tile's place in them. Of more than four rows, two addresses and two
 * distances, which a compiler must keep: for the eight addresses that it prefers there are too few registers. */
struct beside {
    const float *first, *fifth;
    size_t apart, thrice;
};

INLINE struct beside beside(const float *rows, size_t apart, const int R) {
    struct beside at = {rows, rows + 4 * apart, apart, 3 * apart};
    if (R > 4) __asm__("" : "+r"(at.thrice));
    return at;
}
INLINE const float *place_of(struct beside at, int r) {
    return (r < 4 ? at.first : at.fifth) + (r % 4 < 3 ? r % 4 * at.apart : at.thrice);
}
INLINE float number_of(struct beside at, int r) { return *place_of(at, r); }
/* The same 32 bits in every lane, whatever they are. */
INLINE u32 word_of(struct beside at, int r) {
    uint32_t word;
    memcpy(&word, place_of(at, r), sizeof word);
    return (u32){0} + word;
}
INLINE void advance(struct beside *at, int inputs, const int R) {
    at->first += inputs, at->fifth += inputs;
    if (R > 4) __asm__("" : "+r"(at->first), "+r"(at->fifth));
}
