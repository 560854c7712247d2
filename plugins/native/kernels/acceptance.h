/* The last layer of SpecDec++'s head (models/acceptance_head.py), folded into one row. */
#pragma once
#include <math.h>
#include "vector.h"

/* 1 / (1 + e^-(row * odds + shift)): the probability that the target accepts the token a row belongs to. */
INLINE float acceptance(const float *row, const float *odds, int size, float shift) {
    f32 products = {0};
    for (int k = 0; k < size; k += LANES) products += load(row + k) * load(odds + k);
    float sum = shift;
    for (int lane = 0; lane < LANES; lane++) sum += products[lane];
    return 1.0f / (1.0f + expf(-sum));
}
