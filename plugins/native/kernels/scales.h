/* The numbers of a matrix of codes: a scale of each group of inputs and, of 5 and 4 bits, an offset. Of sixteen outputs
 * side by side they lie in fp16. Where a matrix has superblocks, they are products: of an integer of 8 bits and of a
 * number in fp16 for 256 inputs, which is exact in fp32. Such a superblock has those numbers, of scales and of offsets,
 * and then the integers of its groups. */
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

/* Bytes of a panel's numbers. */
INLINE size_t scales_of_panel(int inputs, int bits, int super) {
    return place_of_group(inputs, bits, super) - factor_bytes(bits, super);
}
