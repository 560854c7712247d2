/* The numbers of a matrix of codes: of each group of inputs a scale and, of 5 and 4 bits, an offset, in fp16:
 * [panels][inputs / group][1 or 2][16]. Where there are superblocks, each is a product, exact in fp32, of a signed integer
 * of 8 bits and of a factor for 256 inputs in fp16. Of a superblock of a panel, [1 or 2][16] factors are followed by the
 * integers, [256 / group][1 or 2][16]. */
#pragma once
#include "vector.h"

#define CODE_BLOCK 32  /* inputs that share a scale: of rows in integers, and of most matrices */
#define SUPERBLOCK 256 /* inputs that share the factor of their scales */

INLINE int has_superblocks(int format) { return format > INT4; }
INLINE int bits_of(int format) {
    const int plain = has_superblocks(format) ? format - INT6_K + INT6 : format;
    return plain == INT8 ? 8 : plain == INT6 ? 6 : plain == INT5 ? 5 : 4;
}
INLINE int group_of(int bits) { return bits == 6 ? CODE_BLOCK / 2 : CODE_BLOCK; } /* inputs that share a scale */
INLINE int has_offsets(int bits) { return bits < 6; }

/* Bytes of a group's numbers of sixteen outputs, and of the factors before those of a superblock. */
INLINE size_t group_bytes(int bits, int super) { return LANES * (1 + has_offsets(bits)) * (super ? 1 : 2); }
INLINE size_t factor_bytes(int bits, int super) { return super ? LANES * (1 + has_offsets(bits)) * 2 : 0; }

/* Where the numbers of a panel's group begin, from its first input on. */
INLINE size_t place_of_group(int input, int bits, int super) {
    const size_t factors = (size_t)(input / SUPERBLOCK + 1) * factor_bytes(bits, super);
    return factors + (size_t)(input / group_of(bits)) * group_bytes(bits, super);
}

/* Bytes of so many inputs' numbers: of a panel, or of whole superblocks. */
INLINE size_t scale_bytes(int inputs, int bits, int super) {
    return place_of_group(inputs, bits, super) - factor_bytes(bits, super);
}

/* Of a vector of outputs, a group's scales or offsets. */
INLINE f32 scales_at(const uint8_t *from, f32 factor, const int super) {
    return super ? from_bytes((const int8_t *)from) * factor : from_fp16((const uint16_t *)from);
}
