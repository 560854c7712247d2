/* Products of rows and weights that are both numbers of bf16, in the order of AMX's matrix registers, which every
 * processor keeps: of 32 inputs, the products with even and with odd inputs have a sum each, which begins with 0. Both
 * sums are added, and the result is added to the sum over the inputs before. A product of two such numbers is exact.
 *
 * Numbers below LEAST_HALF count as 0, weights (packing.py) and rows. The others are multiples of 2^-63, products and
 * sums multiples of 2^-126, and so none is subnormal: AMX would take it for 0, other instructions would not. */
#pragma once
#include "ahead.h"
#include "vector.h"

#define HALF_BLOCK 32        /* inputs whose products are added apart; panels are filled up to whole blocks */
#define LEAST_HALF 0x1p-56f
#define BLOCK_BYTES (HALF_BLOCK * LANES * sizeof(uint16_t)) /* of weights: [HALF_BLOCK / 2][16][2] */

INLINE int half_blocks(int inputs) { return (inputs + HALF_BLOCK - 1) / HALF_BLOCK; }

/* The nearest numbers of bf16, ties to even; what is no number stays none. */
INLINE f32 rounded_half(f32 value) {
    const u32 bits = (u32)value, near = (bits + 0x7fff + (bits >> 16 & 1)) & ~(u32){0} << 16;
    const f32 size = (f32)(bits & 0x7fffffff), kept = choose(size < LEAST_HALF, splat(0), (f32)near);
    return choose(value != value, splat(__builtin_nanf("")), kept);
}

/* sums[r][p] = rows[r][0..inputs) * panels[p]; `apart` numbers lie between rows, `panel` bytes between panels. Of a row,
 * sums has VECTORS. Of a block, first all even inputs: so a tile has no more sums than other tiles of its size.
 *
 * paired: by instructions that add two products one after the other, those of upper numbers first. `rows` has pairs then,
 * as store_half_pairs writes them: of four inputs a, b, c, d, a above c and b above d. So even and odd inputs keep sums of
 * their own, which meet their products in the same order. */
INLINE void half_tile(const int R, const int P, const int paired, const float *rows, size_t apart, const char *weights,
                      size_t panel, struct ahead ahead, int inputs, f32 *sums) {
    const int V = P * PARTS;
    struct beside at[2] = {beside(rows, apart, R), beside(rows + 1, apart, R)};
    for (int pair = 0; pair < half_blocks(inputs) * HALF_BLOCK / 2; pair += HALF_BLOCK / 2) {
        f32 sum[2][MOST_ROWS][VECTORS];
        UNROLL(2) for (int odd = 0; odd < 2; odd++) {
            UNROLL(8) for (int r = 0; r < R; r++)
                UNROLL(8) for (int v = 0; v < V; v++) sum[odd][r][v] = (f32){0};
            UNROLL(2) for (int k = pair; k < pair + HALF_BLOCK / 2; k += 1 + paired) {
                f32 weight[VECTORS];
                UNROLL(8) for (int v = 0; v < V; v++) {
                    u32 both, then = {0};
                    const char *from = weights + v / PARTS * panel + (k * PARTS + v % PARTS) * sizeof both;
                    memcpy(&both, from, sizeof both);
                    if (paired) memcpy(&then, from + PARTS * sizeof both, sizeof both);
                    weight[v] = (f32)(odd ? (both & 0xffff0000u) | then >> 16 : both << 16 | (then & 0xffffu));
                    if (!paired) weight[v] = read_once(weight[v]);
                    if (v % PARTS == 0 && (paired || !odd)) fetch(ahead, v / PARTS * panel, paired ? k + odd : k);
                }
                UNROLL(8) for (int r = 0; r < R; r++)
                    UNROLL(8) for (int v = 0; v < V; v++)
                        if (paired) sum[odd][r][v] = add_half_pairs(sum[odd][r][v], (u32)weight[v], word_of(at[odd], r));
                        else sum[odd][r][v] += weight[v] * number_of(at[odd], r);
                advance(&at[odd], 2, R);
            }
        }
        UNROLL(8) for (int r = 0; r < R; r++)
            UNROLL(8) for (int v = 0; v < V; v++) sums[r * VECTORS + v] += sum[0][r][v] + sum[1][r][v];
    }
}
