/* The most probable columns of a row of logits and their log-probabilities. */
#pragma once
#include <math.h>
#include "vector.h"

#define RUN 256 /* columns that are skipped together when none of them is among the best */

/* Sixteen columns; beyond the last one there is nothing. */
INLINE f32 columns(const float *logits, int from, int size) { return load_some(logits + from, size - from, LEAST); }

/* logits [size], ids and logprobs [top], best first; of equal ones the lower id first. */
static void rank(const float *logits, int size, int top, int64_t *ids, float *logprobs) {
    float peak = LEAST;
    int count = 0;
    for (int first = 0; first < size; first += RUN) {
        const int last = first + RUN < size ? first + RUN : size;
        f32 most = splat(LEAST);
        for (int from = first; from < last; from += LANES) most = larger(most, columns(logits, from, size));
        const float best = largest(most);
        if (best > peak) peak = best;
        if (count == top && !(best > logprobs[top - 1])) continue;
        for (int id = first; id < last; id++) {
            if (count == top && !(logits[id] > logprobs[top - 1])) continue;
            int at = count < top ? count++ : top - 1;
            for (; at > 0 && logits[id] > logprobs[at - 1]; at--)
                logprobs[at] = logprobs[at - 1], ids[at] = ids[at - 1];
            logprobs[at] = logits[id];
            ids[at] = id;
        }
    }
    f64 total = {0};
    for (int first = 0; first < size; first += RUN) {
        f32 sum = {0}; /* of few enough columns for fp32 */
        for (int from = first; from < first + RUN && from < size; from += LANES)
            sum += exponential(columns(logits, from, size) - peak);
        total += __builtin_convertvector(sum, f64);
    }
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    const float normalizer = peak + (float)log(sum);
    for (int at = 0; at < top; at++) logprobs[at] -= normalizer;
}
