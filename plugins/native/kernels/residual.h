/* The residual R of a row's softmax after rejections of offered tokens (runtime/sampling/weights.py, Residual), and
 * draws from it: a run of columns, then one of them. Only the offered tokens' runs are read again. */
#pragma once
#include "sampling.h"

#define CANCELLED 1e-6 /* a difference below this share of its operands has lost too many digits */

/* A row, as `draftwood_softmax` left it. */
struct row {
    const float *logits;
    int32_t size;
    float peak;
    double temperature;
    const double *sums;
};

/* Tokens that may be offered, ascending. R [count + 2]: R of each, that of all others together, and the others' weight
 * in the softmax. */
struct offers {
    const int64_t *ids;
    int32_t count;
    double *R;
};

static double sum_of(const double *values, int count) {
    double sums[8] = {0}, sum = 0;
    for (int at = 0; at < count; at++) sums[at % 8] += values[at];
    for (int at = 0; at < 8; at++) sum += sums[at];
    return sum;
}

/* weights [RUN] of columns from `first` on, 0 for offered ones, of which `at` moves on. Returns how many columns. */
static int weigh_others(const struct row *row, int first, const struct offers *offers, int *at, double *weights) {
    const int count = row->size - first < RUN ? row->size - first : RUN;
    float single[RUN];
    draftwood_weigh(row->logits + first, count, row->peak, row->temperature, single);
    for (int column = 0; column < count; column++) weights[column] = single[column];
    for (; *at < offers->count && offers->ids[*at] < first + count; ++*at) weights[offers->ids[*at] - first] = 0;
    return count;
}

/* weights [count] of some tokens; returns their sum. */
static double weigh_tokens(const struct row *row, const int64_t *ids, int count, double *weights) {
    float logits[WIDTH], single[WIDTH];
    for (int first = 0; first < count; first += WIDTH) {
        const int some = count - first < WIDTH ? count - first : WIDTH;
        for (int at = 0; at < some; at++) logits[at] = row->logits[ids[first + at]];
        draftwood_weigh(logits, some, row->peak, row->temperature, single);
        for (int at = 0; at < some; at++) weights[first + at] = single[at];
    }
    return sum_of(weights, count);
}

/* By run, the weights of the tokens that are not offered; returns their sum. masses: null, or where they are stored. */
static double sum_others(const struct row *row, const struct offers *offers, double *masses) {
    double total = 0, weights[RUN];
    for (int first = 0, at = 0; first < row->size; first += RUN) {
        int begin = at;
        double mass = row->sums[first / RUN];
        while (at < offers->count && offers->ids[at] < first + RUN) at++;
        if (begin < at) {
            const double others = mass - weigh_tokens(row, offers->ids + begin, at - begin, weights);
            mass = others < CANCELLED * mass ? sum_of(weights, weigh_others(row, first, offers, &begin, weights)) : others;
        }
        total += mass;
        if (masses) masses[first / RUN] = mass;
    }
    return total;
}

/* R of a row before any rejection; total: of its softmax. Returns -1 for ids that do not ascend or are no columns. */
int draftwood_offer(const struct row *row, const struct offers *offers, double total) {
    const int count = offers->count;
    double *R = offers->R;
    for (int at = 0; at < count; at++)
        if (offers->ids[at] < 0 || offers->ids[at] >= row->size || (at && offers->ids[at] <= offers->ids[at - 1])) return -1;
    const double offered = weigh_tokens(row, offers->ids, count, R);
    double others = total - offered;
    if (others < CANCELLED * total) others = sum_others(row, offers, NULL);
    for (int at = 0; at < count; at++) R[at] /= offered + others;
    R[count] = others / (offered + others);
    R[count + 1] = others;
    return 0;
}

/* R' = norm(max(pi R - offered, 0)) in place of R, for `offered` [count]. Returns pi' = S / (S + 1 - pi), where S is the
 * sum before normalising; nothing changes where S is 0. */
double draftwood_reject(const struct offers *offers, const double *offered, double pi) {
    const int count = offers->count;
    double *R = offers->R, S = 0;
    for (int at = 0; at < count; at++) {
        const double excess = fma(pi, R[at], -offered[at]);
        S += excess > 0 ? excess : 0;
    }
    S = fma(pi, R[count], S);
    if (S == 0) return pi == 1;
    for (int at = 0; at < count; at++) {
        const double excess = fma(pi, R[at], -offered[at]);
        R[at] = excess > 0 ? excess / S : 0;
    }
    R[count] = pi * R[count] / S;
    return S / (S + (1 - pi));
}

static void divide(double *values, int count) {
    const double sum = sum_of(values, count);
    for (int at = 0; at < count; at++) values[at] /= sum;
}

/* masses [size / RUN, rounded up]: the part of R in each run. */
void draftwood_residual_runs(const struct row *row, const struct offers *offers, double *masses) {
    const double *R = offers->R, weight = sum_others(row, offers, masses);
    const double scale = weight > 0 ? R[offers->count] / weight : 0;
    const int runs = (row->size + RUN - 1) / RUN;
    for (int run = 0; run < runs; run++) masses[run] *= scale;
    for (int at = 0; at < offers->count; at++) masses[offers->ids[at] / RUN] += R[at];
    divide(masses, runs);
}

/* chosen [RUN]: R of a run's columns, as a distribution; returns how many columns there are. */
int draftwood_residual_run(const struct row *row, const struct offers *offers, int run, double *chosen) {
    const int first = run * RUN;
    int at = 0;
    while (at < offers->count && offers->ids[at] < first) at++;
    const int begin = at, columns = weigh_others(row, first, offers, &at, chosen);
    const double weight = offers->R[offers->count + 1], scale = weight > 0 ? offers->R[offers->count] / weight : 0;
    for (int column = 0; column < columns; column++) chosen[column] *= scale;
    for (int token = begin; token < at; token++) chosen[offers->ids[token] - first] = offers->R[token];
    divide(chosen, columns);
    return columns;
}
