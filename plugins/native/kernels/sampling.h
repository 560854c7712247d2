/* From a row of logits to what a token is drawn from, on the caller's own thread. */
#pragma once
#include <math.h>
#include "ranking.h"

#define FAINT (-87.0f) /* e^x below it is nothing */

static float highest(const float *logits, int size) {
    f32 most = splat(LEAST);
    for (int from = 0; from < size; from += LANES) most = larger(most, columns(logits, from, size));
    return largest(most);
}

/* weights [size] = e^((logits - their largest) / temperature); returns their sum. */
double draftwood_softmax(const float *logits, int size, double temperature, float *weights) {
    const float peak = highest(logits, size), factor = (float)fmin(1.0 / temperature, 1e38);
    double total = 0;
    for (int first = 0; first < size; first += RUN) {
        f32 sum = {0}; /* of few enough columns for fp32 */
        for (int from = first; from < first + RUN && from < size; from += LANES) {
            f32 power = (columns(logits, from, size) - peak) * factor;
            f32 weight = choose(power < FAINT, splat(0), exponential(power));
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
    for (int first = 0; first < size; first += RUN) {
        const int last = first + RUN < size ? first + RUN : size;
        if (highest(logits + first, last - first) < least) continue;
        for (int id = first; id < last; id++) {
            if (!(logits[id] >= least) || count++ >= room) continue;
            ids[count - 1] = id;
            weights[count - 1] = exp(((double)logits[id] - peak) / temperature);
        }
    }
    return count;
}
