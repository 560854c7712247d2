/* What min-p, top-k and top-p leave of a row's distribution: `_truncate` and `_cut` of runtime/sampling/sampler.py. And the
 * residual of that: KeptResidual of runtime/sampling/weights.py. A distribution p is a `struct draw`: tokens, ascending,
 * their weights, and their count. */
#pragma once
#include "residual.h"

/* A request's settings. A top_p of 1, a top_k of 0 and a min_p of 0 leave no token out. */
struct cuts {
    double top_p, min_p;
    int32_t top_k;
};

static int truncates(const struct cuts *cuts) { return cuts->top_p < 1 || cuts->min_p > 0 || cuts->top_k > 0; }

/* Move a value of a heap down to its place. */
static void sink(double *heap, int count, int at) {
    const double value = heap[at];
    for (int below; (below = 2 * at + 1) < count; at = below) {
        below += below + 1 < count && heap[below + 1] > heap[below];
        if (heap[below] <= value) break;
        heap[at] = heap[below];
    }
    heap[at] = value;
}

/* heap [count]: the same values, the largest first. */
static void pile(const double *values, int count, double *heap) {
    memcpy(heap, values, count * sizeof *heap);
    for (int at = count / 2; at--;) sink(heap, count, at);
}

/* Take the largest value off. */
static double pop(double *heap, int *count) {
    const double largest = *heap;
    *heap = heap[--*count];
    sink(heap, *count, 0);
    return largest;
}

/* Keep the `count` largest weights, which are at least `least`; of equal ones the first. */
static void keep(struct draw *p, double least, int count) {
    int kept = 0, equal = count;
    for (int at = 0; at < p->count; at++) equal -= p->weights[at] > least;
    for (int at = 0; at < p->count; at++) {
        const double weight = p->weights[at];
        if (weight < least || (weight == least && equal-- <= 0)) continue;
        p->ids[kept] = p->ids[at];
        p->weights[kept++] = weight;
    }
    p->count = kept;
}

/* heap: room for as many numbers as there are weights. */
static void keep_top(struct draw *p, int count, double *heap) {
    int left = p->count;
    double least = 0;
    if (count >= left) return;
    pile(p->weights, left, heap);
    for (int taken = 0; taken < count; taken++) least = pop(heap, &left);
    keep(p, least, count);
}

/* The largest weights, until their sum is `mass`. */
static void keep_nucleus(struct draw *p, double mass, double *heap) {
    int left = p->count, count = 1;
    pile(p->weights, left, heap);
    double least = pop(heap, &left), sum = least;
    for (; left && sum < mass; count++) sum += least = pop(heap, &left);
    keep(p, least, count);
}

/* `_cut`: of weights that are not sorted out yet, to probabilities. */
static void shorten(struct draw *p, const struct cuts *cuts, double *heap) {
    if (cuts->top_k) keep_top(p, cuts->top_k, heap);
    if (cuts->top_p < 1) keep_nucleus(p, cuts->top_p * sum_of(p->weights, p->count), heap);
    divide(p->weights, p->count);
}

static void list_all(struct draw *p, int size) {
    for (int id = 0; id < size; id++) p->ids[id] = id;
    p->count = size;
}

/* Logits are compared, not weights: these may be equal where logits are not. */
static void cut_by_logit(const struct row *row, struct draw *p, const struct cuts *cuts, double *heap) {
    const double share = p->share * p->share;
    if (p->count < cuts->top_k)
        p->count = draftwood_likely(row->logits, row->size, row->temperature, share, p->room, p->ids, p->weights);
    if (p->count < cuts->top_k) list_all(p, row->size);
    for (int at = 0; at < p->count; at++) p->weights[at] = row->logits[p->ids[at]];
    keep_top(p, cuts->top_k, heap);
    double peak = -INFINITY;
    for (int at = 0; at < p->count; at++) peak = fmax(peak, p->weights[at]);
    for (int at = 0; at < p->count; at++) p->weights[at] = exp((p->weights[at] - peak) / row->temperature);
    shorten(p, cuts, heap);
}

/* Top-p alone needs the mass of all tokens, and all of them where the likely ones have too little of it. */
static void cut_by_mass(const struct row *row, struct draw *p, double mass, double *heap) {
    const struct offers none = {NULL, 0, NULL};
    if (sum_of(p->weights, p->count) < mass) {
        list_all(p, row->size);
        for (int first = 0, at = 0; first < row->size; first += RUN)
            weigh_others(row, first, &none, &at, p->weights + first);
    }
    keep_nucleus(p, mass, heap);
    divide(p->weights, p->count);
}

/* From the likely tokens of a row to what is left of its distribution. p has room for the whole row, and so has heap. */
static void leave_out(const struct row *row, struct draw *p, const struct cuts *cuts, double *heap) {
    if (cuts->min_p > 0) shorten(p, cuts, heap);
    else if (cuts->top_k) cut_by_logit(row, p, cuts, heap);
    else cut_by_mass(row, p, cuts->top_p * p->total, heap);
}

/* The place of a token among the offered ones, or -1. Tokens are asked for in ascending order, `at` being 0 at first. */
static int offered_at(const struct offers *offers, int64_t id, int *at) {
    while (*at < offers->count && offers->ids[*at] < id) ++*at;
    return *at < offers->count && offers->ids[*at] == id ? *at : -1;
}

/* R before any rejection. Of offered tokens that were left out it is 0. */
static void offer_kept(const struct draw *p, const struct offers *offers) {
    double *R = offers->R, others = 0;
    memset(R, 0, offers->count * sizeof *R);
    for (int token = 0, at = 0; token < p->count; token++) {
        const int place = offered_at(offers, p->ids[token], &at);
        if (place < 0) others += p->weights[token];
        else R[place] = p->weights[token];
    }
    R[offers->count] = R[offers->count + 1] = others;
}

/* chosen [p->count]: R of every token that is left. */
static void residual_of_kept(const struct draw *p, const struct offers *offers, double *chosen) {
    const double weight = offers->R[offers->count + 1], scale = weight > 0 ? offers->R[offers->count] / weight : 0;
    for (int token = 0, at = 0; token < p->count; token++) {
        const int place = offered_at(offers, p->ids[token], &at);
        chosen[token] = place < 0 ? p->weights[token] * scale : offers->R[place];
    }
}
