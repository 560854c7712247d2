/* From a row of logits to what a token is drawn from, on the caller's own thread. */
#pragma once
#include <math.h>
#include "ranking.h"

#define FAINT (-126.0f) /* 2^x below it is nothing */

/* weights [size] = e^((logits - their largest) / temperature); returns their sum. */
double draftwood_softmax(const float *logits, int size, double temperature, float *weights) {
    const float peak = highest(logits, size), factor = (float)fmin(LOG2_E / temperature, 1e38);
    double total = 0;
    for (int first = 0; first < size; first += RUN) {
        f32 sum = {0};
        for (int from = first; from < first + RUN && from < size; from += LANES) {
            f32 power = (columns(logits, from, size) - peak) * factor;
            f32 weight = choose(power < FAINT, splat(0), power_of_two(power));
            store_some(weights + from, weight, size - from);
            sum += weight;
        }
        for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    }
    return total;
}

/* ids, weights [room]: the same of those alone that are at least `share` times as probable as the best, in their order,
 * as many as there is room for; returns how many there are. */
int draftwood_likely(const float *logits, int size, double temperature, double share, int room, int64_t *ids,
                     double *weights) {
    const float peak = highest(logits, size), least = (float)(peak + temperature * log(share));
    int count = 0;
    for (int first = 0; first < size; first += LANES) {
        f32 value = columns(logits, first, size);
        for (uint32_t left = at_least(value, least); left; left &= left - 1) {
            const int id = first + __builtin_ctz(left);
            if (count++ >= room) continue;
            ids[count - 1] = id;
            weights[count - 1] = exp(((double)logits[id] - peak) / temperature);
        }
    }
    return count;
}
