/* The most probable columns of a row of logits and their log-probabilities. */
#pragma once
#include <math.h>
#include "vector.h"

/* logits [size], ids and logprobs [top], best first; of equal ones the lower id first. */
static void rank(const float *logits, int size, int top, int64_t *ids, float *logprobs) {
    int count = 0;
    f32 most = splat(-3.0e38f);
    for (int from = 0; from < size; from += LANES) {
        f32 value = splat(-3.0e38f);
        memcpy(&value, logits + from, (size - from < LANES ? size - from : LANES) * sizeof(float));
        most = larger(most, value);
        const float least = count < top ? -3.0e38f : logprobs[top - 1];
        if (count == top && !(largest(value) > least)) continue;
        for (int lane = 0; lane < LANES && from + lane < size; lane++) {
            if (count == top && !(value[lane] > logprobs[top - 1])) continue;
            int at = count < top ? count++ : top - 1;
            for (; at > 0 && value[lane] > logprobs[at - 1]; at--) logprobs[at] = logprobs[at - 1], ids[at] = ids[at - 1];
            logprobs[at] = value[lane];
            ids[at] = from + lane;
        }
    }
    const float peak = largest(most);
    f64 total = {0};
    for (int from = 0; from < size; from += LANES) {
        f32 value = splat(-3.0e38f);
        memcpy(&value, logits + from, (size - from < LANES ? size - from : LANES) * sizeof(float));
        total += __builtin_convertvector(exponential(value - peak), f64);
    }
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    const float normalizer = peak + (float)log(sum);
    for (int at = 0; at < top; at++) logprobs[at] -= normalizer;
}
