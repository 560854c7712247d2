/* Verification of a round's tree, as runtime/speculation/verifier.py says: which of its rows the target accepts, and the
 * token that follows. */
#pragma once
#include "tree.h"
#include "truncation.h"

enum verify { BEST_TOKEN, MATCH, BLOCKWISE, TRAVERSAL, REJECTION };

#define UNREAD (-2) /* `count` and `total` of a row whose softmax no pass has prepared */

/* A tree of rows that were scored. rows: node of each. draws: of the target's softmax of each row, or UNREAD; logits
 * [count][size]. cuts: what they leave out. is_ready: whether p of a row was computed from its softmax. q: of the draft's
 * outputs. room: for residuals, and a row more.
 * Results: last: the last accepted row. token: that follows it. broken: whether a distribution is none. */
struct scored {
    const struct tree *tree;
    const int *rows;
    int count, size, last, broken;
    struct draw *draws;
    const float *logits;
    const struct cuts *cuts;
    uint8_t is_ready[MOST_KEPT];
    const struct candidates *q;
    double *room;
    struct stream tests, choices;
    int64_t token;
};

static const struct node *node_at(const struct scored *scored, int row) { return scored->tree->nodes + scored->rows[row]; }

/* The next child of a row behind row `after`, in draw order; 0 where there is none. */
static int next_child(const struct scored *scored, int row, int after) {
    for (int child = after + 1; child < scored->count; child++)
        if (node_at(scored, child)->parent == scored->rows[row]) return child;
    return 0;
}

/* p of a row. Where tokens are left out, its draw has the tokens that are left. */
static struct row row_at(struct scored *scored, int row) {
    struct draw *draw = scored->draws + row;
    const float *logits = scored->logits + (size_t)row * scored->size;
    if (draw->total == UNREAD && draw->count == UNREAD) prepare_draw(logits, scored->size, draw);
    const struct row p = {logits, scored->size, draw->peak, draw->temperature, draw->sums};
    const int is_broken = isnan(draw->total) || (draw->ids && draw->count < 1);
    if (is_broken && draw->ids) draw->ids[0] = 0, draw->weights[0] = draw->count = 1; /* any token */
    else if (draw->ids && !scored->is_ready[row]) leave_out(&p, draw, scored->cuts, scored->room);
    scored->is_ready[row] = 1;
    scored->broken |= is_broken;
    return p;
}

/* Draw a token from R, which has the tokens that are left alone. */
static void settle_kept(struct scored *scored, const struct draw *p, const struct offers *offers) {
    residual_of_kept(p, offers, scored->room);
    scored->token = p->ids[categorical(scored->room, p->count, &scored->choices)];
}

/* End behind a row, with a token that is drawn from its residual. */
static void settle(struct scored *scored, int row, const struct offers *offers) {
    const struct row p = row_at(scored, row);
    double masses[MOST_CATEGORIES * 2], chosen[RUN];
    int run = 0;
    scored->last = row;
    if (truncates(scored->cuts)) {
        settle_kept(scored, scored->draws + row, offers);
        return;
    }
    if (p.size > RUN) {
        draftwood_residual_runs(&p, offers, masses);
        run = categorical(masses, (p.size + RUN - 1) / RUN, &scored->choices);
    }
    const int columns = draftwood_residual_run(&p, offers, run, chosen);
    scored->token = run * RUN + categorical(chosen, columns, &scored->choices);
}

/* The same from p itself; at temperature 0 its best token. */
static void draw_token(struct scored *scored, int row) {
    double R[2] = {1, 0};
    scored->last = row;
    if (scored->draws[row].temperature == 0) {
        scored->token = scored->draws[row].best;
        scored->broken |= scored->token < 0;
        return;
    }
    row_at(scored, row);
    R[1] = truncates(scored->cuts) ? 1 : scored->draws[row].total;
    settle(scored, row, &(struct offers){NULL, 0, R});
}

/* R of a row before any rejection. */
static struct offers offers_at(struct scored *scored, int row) {
    const struct candidates *q = scored->q + node_at(scored, row)->output;
    const struct offers offers = {q->ids, q->count, scored->room};
    const struct row p = row_at(scored, row);
    scored->room += q->count + 2;
    if (truncates(scored->cuts)) offer_kept(scored->draws + row, &offers);
    else draftwood_offer(&p, &offers, scored->draws[row].total);
    return offers;
}

static int bernoulli(struct scored *scored, double probability) {
    return scored->tests.numbers[scored->tests.used++] < probability;
}

/* match_path */
static void match(struct scored *scored) {
    for (int row = 0, child; draw_token(scored, row), !scored->broken; row = child) {
        child = next_child(scored, row, row);
        while (child && node_at(scored, child)->token != scored->token) child = next_child(scored, row, child);
        if (!child) return;
    }
}

/* recursive_rejection */
static void reject_in_turn(struct scored *scored) {
    int row = 0, child;
    while ((child = next_child(scored, row, row))) {
        const struct offers R = offers_at(scored, row);
        for (; child; child = next_child(scored, row, child)) {
            const struct node *y = node_at(scored, child);
            if (bernoulli(scored, fmin(1, R.R[y->at] / y->R[y->at]))) break;
            draftwood_reject(&R, y->R, 1);
        }
        if (!child) {
            settle(scored, row, &R);
            return;
        }
        row = child;
    }
    draw_token(scored, row);
}

/* traversal_verification: whether the rows below this one, or it alone, were accepted. */
static int traverse(struct scored *scored, int row, double pi) {
    int child = next_child(scored, row, row);
    if (!child) {
        if (row && !bernoulli(scored, pi)) return 0;
        draw_token(scored, row);
        return 1;
    }
    const struct offers R = offers_at(scored, row);
    for (; child; child = next_child(scored, row, child)) {
        const struct node *y = node_at(scored, child);
        if (traverse(scored, child, fmin(1, pi * R.R[y->at] / y->R[y->at]))) return 1;
        pi = draftwood_reject(&R, y->R, pi);
    }
    if (row && !bernoulli(scored, pi)) return 0;
    settle(scored, row, &R);
    return 1;
}

/* block_verification */
static void verify_block(struct scored *scored) {
    const int gamma = scored->count - 1;
    double p[MOST_KEPT] = {1};
    struct offers residuals[MOST_KEPT];
    for (int i = 0; i < gamma; i++) {
        const struct node *x = node_at(scored, i + 1);
        residuals[i] = offers_at(scored, i);
        p[i + 1] = fmin(1, p[i] * residuals[i].R[x->at] / x->R[x->at]);
    }
    if (bernoulli(scored, p[gamma])) {
        draw_token(scored, gamma);
        return;
    }
    int tau = gamma - 1; /* h_0 is 1 */
    while (!bernoulli(scored, draftwood_reject(residuals + tau, node_at(scored, tau + 1)->R, p[tau])) && tau) tau--;
    settle(scored, tau, residuals + tau);
}

static void verify(struct scored *scored, enum verify how) {
    if (how == BLOCKWISE && scored->count > 1) verify_block(scored);
    else if (how == TRAVERSAL) traverse(scored, 0, 1);
    else if (how == REJECTION) reject_in_turn(scored);
    else match(scored);
}
