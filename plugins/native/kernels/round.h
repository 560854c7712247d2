/* A round as a whole: the draft grows a tree, the target scores it, and the accepted rows are found
 * (runtime/engines/native/rounds.py). */
#pragma once
#include <time.h>
#include "commit.h"
#include "verification.h"

#define NO_MEMORY 1 /* refusals, see library.py */
#define NO_NUMBERS 6
#define NO_ROOM 7

/* depth, size, width, verify, is_drawn, is_tree: see RoundShape of runtime/engines/rounds.py. pending: the tokens that
 * the draft reads first, the root last. positions: of the first rows of target and draft. outputs: of the draft, for
 * which there is room. starts, lengths: of their passes. visible: by slot from `length` to `start`, whether the text
 * sees it; null where there are none. target, draft: passes without rows, with room for their results: `logits`, `draws`,
 * and for chosen tokens `ids` and `logprobs`. names: of the draft's columns, or null. numbers: for the draft, for tests,
 * and for the target's own tokens. room: for distributions, and a row more of either model. cuts: the tokens that are left out; the target's draws then have room for a row, too.
 *
 * Both caches have the accepted rows behind the committed ones afterwards, as far as the draft has scored them.
 * counts: see COUNTS. seconds: of the passes of draft and target. tokens, parents, depths, slots, shares [size + 1]: of the
 * rows; slots: in the draft's cache, behind the committed rows. accepted [depth]: rows. */
struct round {
    int32_t depth, size, width, verify, is_drawn, is_tree, outputs, pending, positions[2], starts[2], lengths[2];
    const int64_t *pending_tokens;
    const double *numbers[3], *estimates;
    const uint8_t *visible[2];
    struct pass target, draft;
    const int64_t *names;
    double *room;
    struct cuts cuts;
    int64_t *counts, *tokens, *parents, *depths, *slots, *accepted;
    double *seconds, *shares;
};

/* ROWS, ACCEPTED: of the tree. NEXT: the token behind the accepted rows. PASSES, SCORED: of the draft behind its first pass,
 * and their rows. READ: accepted rows that the draft has scored. USED: of each kind of numbers. */
enum counts { ROWS, ACCEPTED, NEXT, PASSES, SCORED, READ, USED, COUNTS = USED + 3 };

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int time_pass(struct engine *engine, const struct pass *pass, double *seconds) {
    const double begun = seconds_now();
    const int refusal = draftwood_forward(engine, pass);
    *seconds += seconds_now() - begun;
    return refusal;
}

/* The probabilities of the tokens that the draft may draw after an output; 0 where its logits are no numbers. */
static int candidates_of(const struct round *round, const struct tree *tree, int output, struct candidates *q) {
    struct draw *draw = round->draft.draws + output;
    if (draw->count < 1 || draw->count > draw->room) return 0;
    shorten(draw, &round->cuts, tree->room);
    for (int at = 0; round->names && at < draw->count; at++) draw->ids[at] = round->names[draw->ids[at]];
    *q = (struct candidates){draw->ids, draw->weights, draw->count};
    return 1;
}

/* The mask of a pass's rows behind `slots` others of this round, of which they see none yet; null without memory. */
static uint8_t *mask_of(struct pass *pass, const uint8_t *visible, int slots) {
    const int before = pass->start - slots - pass->length;
    pass->columns = before + slots + pass->rows;
    uint8_t *mask = allocate((size_t)pass->rows * pass->columns);
    for (int row = 0; mask && before && row < pass->rows; row++)
        memcpy(mask + (size_t)row * pass->columns, visible, before);
    pass->mask = mask;
    return mask;
}

/* The draft's pass over `count` nodes, whose outputs begin at `first`; the root is the last of the pending tokens. */
static int score_layer(struct engine *draft, struct round *round, struct tree *tree, const int *nodes, int count,
                       int first) {
    const int is_root = nodes[0] == ROOT, rows = is_root ? round->pending : count;
    const int slots = is_root ? 0 : round->pending + first - 1;
    int64_t tokens[MOST_WIDTH], positions[MOST_WIDTH], outputs[MOST_WIDTH], each[MOST_WIDTH];
    struct pass pass = round->draft;
    pass.start += slots, pass.rows = rows;
    uint8_t *mask = mask_of(&pass, round->visible[1], slots);
    if (!mask) return NO_MEMORY;
    for (int row = 0; row < rows; row++) {
        uint8_t *visible = mask + (size_t)(row + 1) * pass.columns - slots - rows;
        outputs[row] = is_root ? rows - 1 : row;
        memset(visible, 1, is_root ? row + 1 : round->pending);
        tokens[row] = is_root ? round->pending_tokens[row] : tree->nodes[nodes[row]].token;
        positions[row] = round->positions[1] + (is_root ? row : round->pending - 1 + tree->nodes[nodes[row]].depth);
        if (is_root) continue;
        tree->nodes[nodes[row]].slot = slots + row;
        for (int node = nodes[row]; node != ROOT; node = tree->nodes[node].parent) visible[tree->nodes[node].slot] = 1;
    }
    for (int at = 0; at < count; at++) {
        tree->nodes[nodes[at]].output = first + at;
        each[at] = at;
    }
    round->counts[PASSES] += !is_root, round->counts[SCORED] += is_root ? 0 : count;
    pass.outputs = count, pass.tokens = tokens, pass.positions = positions, pass.output_rows = outputs;
    pass.logits += (size_t)first * draft->model.head.outputs;
    if (round->is_drawn) {
        pass.draws += first, pass.drawn = count, pass.draw_outputs = each;
    } else {
        pass.ids += (size_t)first * pass.top, pass.logprobs += (size_t)first * pass.top;
    }
    const int refusal = time_pass(draft, &pass, round->seconds);
    release(mask);
    return refusal;
}

/* Grow the tree; 0, or a refusal. q: set for the draft's outputs. */
static int grow(struct engine *draft, struct round *round, struct tree *tree, struct candidates *q, struct stream *stream) {
    const int is_chain = round->is_drawn && !round->is_tree;
    int nodes[MOST_NODES] = {ROOT}, count = 1, first = 0;
    plant(tree, round->pending_tokens[round->pending - 1]);
    if (round->is_drawn) offer(&tree->best, 0); /* the root's first child */
    for (; count; first += count, count = frontier(tree, round->is_drawn, is_chain, nodes)) {
        if (first + count > round->outputs) return NO_ROOM;
        const int refusal = score_layer(draft, round, tree, nodes, count, first);
        if (refusal) return refusal;
        for (int each = 0; round->is_drawn && each < count; each++)
            if (!candidates_of(round, tree, first + each, q + first + each)) return NO_NUMBERS;
        if (is_chain) draw_next(tree, nodes[0], q + first, stream);
        else if (round->is_drawn) draw_layer(tree, nodes, count, q + first, round->estimates, stream);
        else
            choose_layer(tree, nodes, count, round->draft.ids + (size_t)first * round->draft.top,
                         round->draft.logprobs + (size_t)first * round->draft.top, round->draft.top, round->names);
        if (tree->count > MOST_NODES - 2 * MOST_WIDTH - tree->size) return NO_ROOM;
    }
    return 0;
}

/* The target's pass over the rows of the tree; it prepares what is drawn from on the path of first children. */
static int score_rows(struct engine *target, struct round *round, const struct tree *tree, const int *rows,
                      const int *row_of) {
    const int count = (int)round->counts[ROWS];
    int64_t positions[MOST_KEPT], path[MOST_KEPT], each[MOST_KEPT];
    struct draw prepared[MOST_KEPT];
    struct pass pass = round->target;
    pass.rows = pass.outputs = count;
    uint8_t *mask = mask_of(&pass, round->visible[0], 0);
    if (!mask) return NO_MEMORY;
    for (int row = 0; row < count; row++) {
        uint8_t *visible = mask + (size_t)(row + 1) * pass.columns - count;
        const struct node *node = tree->nodes + rows[row];
        round->tokens[row] = node->token;
        round->parents[row] = row ? row_of[node->parent] : -1;
        round->depths[row] = node->depth;
        round->slots[row] = node->slot;
        round->shares[row] = node->share;
        positions[row] = round->positions[0] + node->depth;
        for (int at = row; at >= 0; at = (int)round->parents[at]) visible[at] = 1;
        pass.draws[row].total = pass.draws[row].count = UNREAD;
        each[row] = row;
    }
    pass.tokens = round->tokens, pass.positions = positions, pass.output_rows = each;
    pass.drawn = count, pass.draw_outputs = each;
    if (pass.draws->temperature != 0) {
        pass.drawn = 0;
        for (int row = 0, last = 0; row < count; row++)
            if (!row || round->parents[row] == last) {
                prepared[pass.drawn] = pass.draws[row];
                path[pass.drawn++] = last = row;
            }
        pass.draws = prepared, pass.draw_outputs = path;
    }
    const int refusal = time_pass(target, &pass, round->seconds + 1);
    release(mask);
    for (int at = 0; pass.draws == prepared && at < pass.drawn; at++) round->target.draws[path[at]] = prepared[at];
    return refusal;
}

/* Move slots of a round to its first ones, in this order. The first of them may be there already. */
static int move_behind(struct engine *engine, const struct pass *pass, const int64_t *slots, int count) {
    int64_t moved[MOST_WIDTH + MOST_KEPT];
    int placed = 0;
    while (placed < count && slots[placed] == placed) placed++;
    for (int at = placed; at < count; at++) moved[at - placed] = pass->start + slots[at];
    return draftwood_move(engine, &pass->cache, pass->start + placed, moved, count - placed);
}

/* Keep the accepted rows in both caches. */
static int keep_accepted(struct engine *target, struct engine *draft, struct round *round) {
    int64_t kept[MOST_KEPT] = {0}, read[MOST_WIDTH + MOST_KEPT], *counts = round->counts;
    int accepted = (int)counts[ACCEPTED], scored = round->pending;
    for (int at = 0; at < scored; at++) read[at] = at;
    for (int at = 0; at < accepted; at++) {
        const int64_t row = kept[at + 1] = round->accepted[at];
        if (round->slots[row] >= 0) read[scored++] = round->slots[row]; /* the last layer was not scored */
    }
    counts[READ] = scored - round->pending;
    return move_behind(target, &round->target, kept, accepted + 1) || move_behind(draft, &round->draft, read, scored);
}

/* Run a round; 0, or one of library.py's REFUSALS. The caller has checked that the slots are there. */
int draftwood_run_round(struct engine *target, struct engine *draft, struct round *round) {
    struct tree tree;
    struct candidates q[MOST_NODES];
    struct stream draws = {round->numbers[0], 0};
    int rows[MOST_KEPT], row_of[MOST_NODES];
    tree.depth = round->depth, tree.size = round->size, tree.width = round->width, tree.room = round->room;
    round->target.start = round->starts[0], round->target.length = round->lengths[0];
    round->draft.start = round->starts[1], round->draft.length = round->lengths[1];
    round->seconds[0] = round->seconds[1] = 0;
    memset(round->counts, 0, COUNTS * sizeof *round->counts);
    if (round->size >= MOST_KEPT || round->width > MOST_WIDTH) return NO_ROOM;
    if (round->pending < 1 || round->pending > MOST_WIDTH) return NO_ROOM;
    int refusal = grow(draft, round, &tree, q, &draws);
    if (refusal) return refusal;
    round->counts[ROWS] = unroll(&tree, rows, row_of);
    if ((refusal = score_rows(target, round, &tree, rows, row_of))) return refusal;
    struct scored scored = {.tree = &tree, .rows = rows, .count = (int)round->counts[ROWS]};
    scored.size = target->model.head.outputs;
    scored.draws = round->target.draws, scored.logits = round->target.logits, scored.cuts = &round->cuts;
    scored.q = q, scored.room = tree.room;
    scored.tests.numbers = round->numbers[1], scored.choices.numbers = round->numbers[2];
    verify(&scored, round->verify);
    if (scored.broken) return NO_NUMBERS;
    int64_t *counts = round->counts, at = counts[ACCEPTED] = tree.nodes[rows[scored.last]].depth;
    for (int64_t row = scored.last; row; row = round->parents[row]) round->accepted[--at] = row;
    counts[NEXT] = scored.token;
    counts[USED] = draws.used, counts[USED + 1] = scored.tests.used, counts[USED + 2] = scored.choices.used;
    return keep_accepted(target, draft, round);
}
