/* The most probable columns of a row of logits and their log-probabilities. */
#pragma once
#include <math.h>
#include "vector.h"

#define RUN 256 /* columns that are few enough to be added in fp32 */

/* Sixteen columns; beyond the last one there is nothing. */
INLINE f32 columns(const float *logits, int from, int size) { return load_some(logits + from, size - from, LEAST); }

static float highest(const float *logits, int size) {
    f32 most = splat(LEAST);
    for (int from = 0; from < size; from += LANES) most = larger(most, columns(logits, from, size));
    return largest(most);
}

/* logits [size], ids and logprobs [top], best first; of equal ones the lower id first. */
static void rank(const float *logits, int size, int top, int64_t *ids, float *logprobs) {
    const float peak = highest(logits, size);
    double total = 0;
    int count = 0;
    for (int first = 0; first < size; first += RUN) {
        f32 sum = {0};
        for (int from = first; from < first + RUN && from < size; from += LANES) {
            const f32 value = columns(logits, from, size);
            sum += power_of_two((value - peak) * LOG2_E);
            uint32_t likely = at_least(value, count == top ? logprobs[top - 1] : LEAST / 2);
            for (; likely; likely &= likely - 1) {
                const int id = from + __builtin_ctz(likely);
                if (count == top && !(logits[id] > logprobs[top - 1])) continue;
                int at = count < top ? count++ : top - 1;
                for (; at > 0 && logits[id] > logprobs[at - 1]; at--)
                    logprobs[at] = logprobs[at - 1], ids[at] = ids[at - 1];
                logprobs[at] = logits[id];
                ids[at] = id;
            }
        }
        for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    }
    const float normalizer = peak + (float)log(total);
    for (int at = 0; at < top; at++) logprobs[at] -= normalizer;
}
