/* From a row of logits to what a token is drawn from: of one row on the caller's own thread, or in a pass. */
#pragma once
#include <math.h>
#include "engine.h"
#include "ranking.h"

/* e^((logits - peak) / temperature) of a vector of columns; `numbers` becomes NaN where a logit is.
 *
 * Differences are halved: that of two finite numbers may overflow. A temperature below 1.5e-38 or above 1e38, whose
 * reciprocal fp32 does not hold, is taken for that. */
INLINE float factor_of(double temperature) { return (float)fmax(fmin(2 * LOG2_E / temperature, 2e38), FLT_MIN); }
INLINE f32 weighed(f32 column, float peak, float factor, f32 *numbers) {
    const f32 power = (column * 0.5f - peak * 0.5f) * factor, limited = larger(splat(FAINT), power);
    *numbers += limited;
    return from_on(power, FAINT, normal_power_of_two(limited));
}

/* sums [size / RUN, rounded up]: of every RUN of the row's weights, e^((logits - their largest) / temperature); returns
 * the sum of all. peak: the largest logit. NaN when a logit is NaN or plus infinity, or all are minus infinity: then the
 * other results mean nothing. */
double draftwood_softmax(const float *logits, int size, double temperature, double *sums, float *peak) {
    const float factor = factor_of(temperature);
    f32 numbers = {0};
    double total = 0;
    *peak = highest(logits, size);
    if (!isfinite(*peak)) return NAN;
    for (int first = 0; first < size; first += RUN) {
        f32 sum[PARTS] = {{0}};
        for (int from = first, part = 0; from < first + RUN && from < size; from += WIDTH, part = (part + 1) % PARTS)
            sum[part] += weighed(columns(logits, from, size), *peak, factor, &numbers);
        double of_run = 0;
        for (int lane = 0; lane < LANES; lane++) of_run += lane_of(sum, lane);
        total += sums[first / RUN] = of_run;
    }
    for (int lane = 0; lane < WIDTH; lane++)
        if (isnan(numbers[lane])) return NAN;
    return total;
}

/* weights [count] of some of a row's columns, which are numbers; peak: the largest of the row. */
void draftwood_weigh(const float *some, int count, float peak, double temperature, float *weights) {
    const float factor = factor_of(temperature);
    f32 numbers = {0};
    for (int from = 0; from < count; from += WIDTH)
        store_some(weights + from, weighed(columns(some, from, count), peak, factor, &numbers), count - from);
}

/* ids, weights [room]: the same of those alone that are at least `share` times as probable as the best, in their order,
 * as many as there is room for; returns how many there are, none that has no probability, or -1 where softmax returns
 * NaN. 0 < share <= 1. */
int draftwood_likely(const float *logits, int size, double temperature, double share, int room, int64_t *ids,
                     double *weights) {
    const float peak = highest(logits, size), factor = factor_of(temperature);
    const float least = (float)fmax(peak + temperature * log(share), -FLT_MAX);
    f32 numbers = {0};
    int count = 0;
    if (!isfinite(peak)) return -1;
    for (int first = 0; first < size; first += WIDTH) {
        const f32 column = columns(logits, first, size);
        uint32_t left = not_below(column, least);
        if (!left) continue;
        const f32 weight = weighed(column, peak, factor, &numbers);
        for (; left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            if (!(column[lane] <= peak)) return -1;
            if (count++ >= room) continue;
            ids[count - 1] = first + lane;
            weights[count - 1] = weight[lane];
        }
    }
    return count;
}

/* The first column of the largest logit; -1 where softmax returns NaN. */
static int best_of(const float *logits, int size) {
    const float peak = highest(logits, size);
    int best = -1;
    if (!isfinite(peak)) return -1;
    for (int first = 0; first < size; first += WIDTH) {
        const f32 column = columns(logits, first, size);
        for (uint32_t left = not_below(column, peak); left; left &= left - 1) {
            const int lane = __builtin_ctz(left);
            if (!(column[lane] <= peak)) return -1;
            if (best < 0) best = first + lane;
        }
    }
    return best;
}

/* What a pass computes of a row of logits for the choice of a token, as far as there is room for it. */
static void prepare_draw(const float *logits, int size, struct draw *draw) {
    if (draw->temperature == 0) draw->best = best_of(logits, size);
    if (draw->sums) draw->total = draftwood_softmax(logits, size, draw->temperature, draw->sums, &draw->peak);
    if (draw->ids)
        draw->count =
            draftwood_likely(logits, size, draw->temperature, draw->share, draw->room, draw->ids, draw->weights);
}
