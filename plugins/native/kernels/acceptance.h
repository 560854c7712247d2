/* The last layer of SpecDec++'s head (models/acceptance_head.py), folded into one row. */
#pragma once
#include <math.h>
#include "vector.h"

/* 1 / (1 + e^-(row * odds + shift)): the probability that the target accepts the token a row belongs to. */
INLINE float acceptance(const float *row, const float *odds, int size, float shift) {
    f32 products[PARTS] = {{0}};
    for (int k = 0; k < size; k += LANES)
        UNROLL(4) for (int part = 0; part < PARTS; part++)
            products[part] += load(row + k + part * WIDTH) * load(odds + k + part * WIDTH);
    float sum = shift;
    for (int lane = 0; lane < LANES; lane++) sum += lane_of(products, lane);
    return 1.0f / (1.0f + expf(-sum));
}
