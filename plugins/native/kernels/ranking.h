/* The most probable columns of a row of logits and their log-probabilities. */
#pragma once
#include <float.h>
#include <math.h>
#include "vector.h"

#define RUN 256 /* columns that are few enough to be added in fp32 */

/* A vector of columns; beyond the last one there is nothing. */
INLINE f32 columns(const float *logits, int from, int size) {
    return load_some(logits + from, size - from, -INFINITY);
}

/* The largest of the columns that are numbers: `larger` takes its second operand where one of them is none. */
static float highest(const float *logits, int size) {
    f32 most = splat(-INFINITY);
    for (int from = 0; from < size; from += WIDTH) most = larger(columns(logits, from, size), most);
    return largest(most);
}

/* Fill ids from `count` on with the lowest ids that are not there yet: columns of no probability, or no number. */
static void rank_rest(int count, int top, int64_t *ids, float *logprobs) {
    for (int64_t id = 0; count < top; id++) {
        int at = 0;
        while (at < count && ids[at] != id) at++;
        if (at == count) ids[count] = id, logprobs[count++] = -INFINITY;
    }
}

/* logits [size], ids and logprobs [top], top <= size, best first; of equal ones the lower id first. */
static void rank(const float *logits, int size, int top, int64_t *ids, float *logprobs) {
    const float peak = highest(logits, size);
    double total = 0;
    int count = 0;
    for (int first = 0; first < size; first += RUN) {
        f32 sum[PARTS] = {{0}};
        for (int from = first, part = 0; from < first + RUN && from < size; from += WIDTH, part = (part + 1) % PARTS) {
            const f32 value = columns(logits, from, size);
            sum[part] += power_of_two((value - peak) * LOG2_E);
            uint32_t likely = not_below(value, count == top ? logprobs[top - 1] : -FLT_MAX);
            for (; likely; likely &= likely - 1) {
                const int id = from + __builtin_ctz(likely);
                if (!(logits[id] > (count == top ? logprobs[top - 1] : -INFINITY))) continue;
                int at = count < top ? count++ : top - 1;
                for (; at > 0 && logits[id] > logprobs[at - 1]; at--)
                    logprobs[at] = logprobs[at - 1], ids[at] = ids[at - 1];
                logprobs[at] = logits[id];
                ids[at] = id;
            }
        }
        for (int lane = 0; lane < LANES; lane++) total += lane_of(sum, lane);
    }
    rank_rest(count, top, ids, logprobs);
    const float normalizer = peak + (float)log(total);
    for (int at = 0; at < top; at++) logprobs[at] -= normalizer;
}
