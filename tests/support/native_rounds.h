/* Rounds as a whole, of every shape and verifier, for native_edges.c: every array has its exact size. */
#pragma once
#include "native_models.h"

struct proposal {
    int depth, size, width, is_drawn, is_tree;
    enum verify verify;
};

static const struct proposal PROPOSALS[] = {
    {1, 1, 1, 0, 0, BEST_TOKEN}, {4, 4, 1, 0, 0, BEST_TOKEN}, {3, 9, 3, 0, 0, BEST_TOKEN}, {6, 3, 2, 0, 0, MATCH},
    {1, 1, 1, 1, 0, BLOCKWISE}, {4, 4, 1, 1, 0, BLOCKWISE},   {4, 4, 1, 1, 0, MATCH},      {3, 9, 3, 1, 1, TRAVERSAL},
    {5, 12, 4, 1, 1, REJECTION}, {2, 5, 3, 1, 1, MATCH},      {7, 2, 1, 1, 1, TRAVERSAL},
};

/* None at first. */
static const struct cuts CUTS[] = {
    {1, 0, 0}, {0.9, 0, 0}, {0.999999, 0, 0}, {1e-6, 0, 0}, {1, 0, 1}, {0.7, 0, 3}, {1, 0, 1000}, {1, 0.5, 0}, {0.95, 1e-9, 9},
};

/* One round behind `length` rows and `pending` tokens; returns what draftwood_run_round does. */
static int run_proposal(struct engine *target, struct engine *draft, struct cache caches[2], int length, int pending,
                        const struct proposal *what, double temperature, const struct cuts *cuts, const int64_t *names) {
    const int rows = what->size + 1, vocab = target->model.vocab, columns = draft->model.head.outputs;
    const int outputs = 1 + (what->depth - 1) * what->width, runs = (vocab + RUN - 1) / RUN;
    const int drawn = what->depth * (what->is_tree ? what->size + what->width : 1) * 2, top = columns < 8 ? columns : 8;
    const int cells = (what->is_drawn ? (drawn + rows) * (columns + 2) : 0) + vocab, most[] = {drawn, rows + what->depth, 3 * rows};
    struct round round = {what->depth, what->size, what->width, what->verify, what->is_drawn, what->is_tree, outputs, pending,
                          {length, length + 1 - pending}};
    struct draw *target_draws = calloc(rows, sizeof *target_draws), *draft_draws = calloc(outputs, sizeof *draft_draws);
    double *sums = malloc((size_t)rows * runs * sizeof *sums), *probs = malloc((size_t)outputs * columns * sizeof *probs);
    int64_t *ids = malloc((size_t)outputs * columns * sizeof *ids), *lists[5];
    double *kept = malloc((size_t)rows * vocab * sizeof *kept);
    int64_t *kept_ids = malloc((size_t)rows * vocab * sizeof *kept_ids);
    for (int row = 0; row < rows; row++) {
        struct draw *draw = target_draws + row;
        *draw = (struct draw){.temperature = temperature, .share = cuts->min_p > 0 ? cuts->min_p : 1e-4, .room = vocab};
        if (temperature && !(cuts->min_p > 0 || cuts->top_k)) draw->sums = sums + row * runs;
        if (truncates(cuts)) draw->ids = kept_ids + row * vocab, draw->weights = kept + row * vocab;
    }
    for (int output = 0; output < outputs; output++)
        draft_draws[output] = (struct draw){.temperature = temperature, .share = 1e-4, .room = columns,
                                            .ids = ids + output * columns, .weights = probs + output * columns};
    double *numbers_of[3], *estimates = malloc(2 * RANKS * BINS * sizeof *estimates);
    for (int kind = 0; kind < 3; kind++) {
        round.numbers[kind] = numbers_of[kind] = malloc(most[kind] * sizeof(double));
        for (int at = 0; at < most[kind]; at++) numbers_of[kind][at] = 0.5 + 0.4999 * number();
    }
    for (int at = 0; at < 2 * RANKS * BINS; at++) estimates[at] = log(0.5 + 0.45 * number());
    for (int list = 0; list < 5; list++) lists[list] = malloc((list == 4 ? what->depth : rows) * sizeof(int64_t));
    int64_t *tokens = malloc(pending * sizeof *tokens), *counts = malloc(COUNTS * sizeof *counts);
    for (int at = 0; at < pending; at++) tokens[at] = at % vocab;
    double *seconds = malloc(2 * sizeof *seconds), *shares = malloc(rows * sizeof *shares), *room = malloc(cells * sizeof *room);
    float *logits = malloc((size_t)rows * vocab * sizeof *logits), *drafted = malloc((size_t)outputs * columns * sizeof *drafted);
    float *logprobs = malloc((size_t)outputs * top * sizeof *logprobs);
    round.target = (struct pass){.length = length, .start = length, .cache = caches[0], .logits = logits, .draws = target_draws};
    round.draft = (struct pass){.length = length + 1 - pending, .start = length + 1 - pending, .cache = caches[1], .logits = drafted, .draws = draft_draws};
    if (!what->is_drawn) round.draft.top = top, round.draft.ids = ids, round.draft.logprobs = logprobs;
    round.pending_tokens = tokens, round.names = names, round.estimates = estimates, round.room = room;
    round.cuts = *cuts;
    round.tokens = lists[0], round.parents = lists[1], round.depths = lists[2], round.slots = lists[3], round.accepted = lists[4];
    round.counts = counts, round.seconds = seconds, round.shares = shares;
    const int refusal = draftwood_run_round(target, draft, &round);
    if (!refusal) {
        check(counts[ROWS] >= 1 && counts[ROWS] <= rows && counts[ACCEPTED] <= what->depth, "a round's rows", what->size);
        check(counts[NEXT] >= 0 && counts[NEXT] < vocab, "a round's token", what->size);
        for (int64_t row = 1; row < counts[ROWS]; row++)
            check(round.parents[row] < row && round.depths[row] == round.depths[round.parents[row]] + 1, "a tree", what->size);
        for (int64_t at = 0, row = 0; at < counts[ACCEPTED]; row = round.accepted[at++])
            check(round.parents[round.accepted[at]] == row, "a path", what->size);
        for (int kind = 0; kind < 3; kind++) check(counts[USED + kind] <= most[kind], "numbers", kind);
    }
    for (int kind = 0; kind < 3; kind++) free(numbers_of[kind]);
    for (int list = 0; list < 5; list++) free(lists[list]);
    free(target_draws), free(draft_draws), free(sums), free(probs), free(ids), free(estimates), free(tokens), free(counts);
    free(seconds), free(shares), free(room), free(logits), free(drafted), free(logprobs), free(kept), free(kept_ids);
    return refusal;
}

/* Every proposal, of a draft with as many columns as tokens, and of a trimmed one. */
static void check_rounds(struct shape shape, struct shape trimmed, int threads) {
    struct model models[] = {model_of(shape), model_of(shape), model_of(trimmed)};
    int64_t *names = malloc(trimmed.vocab * sizeof *names);
    for (int column = 0; column < trimmed.vocab; column++) names[column] = shape.vocab - trimmed.vocab + column;
    models[2].vocab = shape.vocab; /* of tokens; it has fewer columns */
    free((void *)models[2].embedding);
    models[2].embedding = numbers((size_t)shape.vocab * shape.hidden);
    struct engine *engines[] = {draftwood_open(models, 16, threads), draftwood_open(models + 1, 16, threads),
                                draftwood_open(models + 2, 16, threads)};
    struct cache caches[] = {cache_of(shape, 64), cache_of(shape, 64)};
    for (int which = 1; which < 3; which++)
        for (int at = 0; at < (int)(sizeof PROPOSALS / sizeof *PROPOSALS); at++)
            for (int pending = 1; pending <= 3; pending++) {
                const int is_greedy = PROPOSALS[at].verify == BEST_TOKEN;
                const double temperature = is_greedy ? 0 : pending == 2 ? 50 : 0.7;
                for (int which_cuts = 0; which_cuts < (is_greedy ? 1 : (int)(sizeof CUTS / sizeof *CUTS)); which_cuts++)
                    check(!run_proposal(engines[0], engines[which], caches, 5, pending, PROPOSALS + at, temperature,
                                        CUTS + which_cuts, which == 2 ? names : NULL), "a round", at);
            }
    const struct proposal wide = {2, MOST_KEPT, 2, 0, 0, BEST_TOKEN};
    check(run_proposal(engines[0], engines[1], caches, 5, 1, &wide, 0, CUTS, NULL) == NO_ROOM, "a wide tree", MOST_KEPT);
    for (int at = 0; at < 3; at++) draftwood_close(engines[at]), free_model(models[at]);
    free_cache(caches[0]), free_cache(caches[1]), free(names);
}
