/* The proposal of a round: a tree that grows layer by layer, as the growers of runtime/speculation/growers say, and its
 * rows for the target (token_tree.py). */
#pragma once
#include <math.h>
#include <stdint.h>

#define ROOT 0
#define MOST_NODES 1024
#define MOST_KEPT 256      /* rows of the target */
#define MOST_WIDTH 64      /* of a layer that the draft scores */
#define MOST_CATEGORIES 512 /* whose cumulative sums are computed at once: BLOCK of runtime/sampling/random.py */
#define RANKS 4            /* and bins, of the estimates: runtime/speculation/planning/calibration.py */
#define BINS 12

/* Uniform numbers from 0 to 1, and how many of them are used. */
struct stream {
    const double *numbers;
    int used;
};

/* q of a node that the draft has scored: its tokens, ascending, and their probabilities, without zeros. */
struct candidates {
    const int64_t *ids;
    const double *probs;
    int count;
};

/* slot: in the draft's cache, behind the committed rows; output: of the draft's outputs. Both are -1 for a node that it
 * has not scored. value, reach: logarithms of the node's own value, and of that of the site below it. share: the draft's
 * probability of the token among those that remained. R, at: the distribution from which it was drawn, and its place
 * there. */
struct node {
    int64_t token;
    int parent, depth, slot, output, at;
    double value, reach, share;
    const double *R;
};

/* Values of the tokens expected so far, ascending: `Best` of token_graph.py. */
struct best {
    int size, count;
    double values[2 * MOST_NODES];
};

/* layer: the nodes that were added last, `width` of which the draft scores next. room: for distributions. */
struct tree {
    int depth, size, width, count, in_layer, layer[MOST_NODES];
    struct node nodes[MOST_NODES];
    struct best best;
    double *room;
};

/* Draw an index, as SeededStream.categorical does. */
static int categorical(const double *weights, int count, struct stream *stream) {
    int first = 0;
    if (count > MOST_CATEGORIES) {
        double sums[MOST_CATEGORIES];
        const int blocks = (count + MOST_CATEGORIES - 1) / MOST_CATEGORIES;
        for (int block = 0; block < blocks; block++) {
            sums[block] = 0;
            for (int at = block * MOST_CATEGORIES; at < count && at < (block + 1) * MOST_CATEGORIES; at++)
                sums[block] += weights[at];
        }
        first = MOST_CATEGORIES * categorical(sums, blocks, stream);
        count = count - first < MOST_CATEGORIES ? count - first : MOST_CATEGORIES;
    }
    double total = 0, below = 0;
    for (int at = first; at < first + count; at++) total += weights[at];
    const double chosen = stream->numbers[stream->used++] * total;
    for (int at = first; at < first + count - 1; at++)
        if ((below += weights[at]) > chosen) return at;
    return first + count - 1;
}

static double least(const struct best *best) {
    return best->count >= best->size ? best->values[best->count - best->size] : -INFINITY;
}

static int admits(const struct best *best, double value) { return value > least(best); }

static int holds(const struct best *best, double value) { return value > -INFINITY && value >= least(best); }

static void offer(struct best *best, double value) {
    int at = best->count++;
    for (; at && best->values[at - 1] > value; at--) best->values[at] = best->values[at - 1];
    best->values[at] = value;
}

static void withdraw(struct best *best, double value) {
    int at = 0;
    while (best->values[at] < value) at++;
    for (best->count--; at < best->count; at++) best->values[at] = best->values[at + 1];
}

/* The root alone. */
static void plant(struct tree *tree, int64_t token) {
    tree->nodes[ROOT] = (struct node){.token = token, .parent = -1, .slot = -1, .output = -1, .share = 1};
    tree->count = 1;
    tree->in_layer = 0;
    tree->best.size = tree->size;
    tree->best.count = 0;
}

static struct node *add(struct tree *tree, int parent, int64_t token, double gain, double share) {
    struct node *node = tree->nodes + tree->count, *above = tree->nodes + parent;
    *node = (struct node){.token = token, .parent = parent, .depth = above->depth + 1, .slot = -1, .output = -1};
    node->value = above->value + gain;
    node->share = share;
    tree->layer[tree->in_layer++] = tree->count++;
    return node;
}

/* The first draw below the only node of a layer: StaticTree of baseline.py. */
static void draw_next(struct tree *tree, int parent, const struct candidates *q, struct stream *stream) {
    const int at = categorical(q->probs, q->count, stream);
    tree->in_layer = 0;
    struct node *node = add(tree, parent, q->ids[at], 0, q->probs[at]);
    node->R = q->probs;
    node->at = at;
}

/* Draw the layer below these nodes: DySpecLayers.expand of dyspec.py. q: of each of the nodes. estimates: log a and
 * log (1 - a) by rank and bin. */
static void draw_layer(struct tree *tree, const int *nodes, int count, const struct candidates *q, const double *estimates,
                       struct stream *stream) {
    double sites[MOST_WIDTH];
    const double *R[MOST_WIDTH];
    int rank[MOST_WIDTH], last[MOST_WIDTH];
    for (int each = 0; each < count; each++) {
        sites[each] = tree->nodes[nodes[each]].reach;
        R[each] = q[each].probs;
        rank[each] = 0;
    }
    tree->in_layer = 0;
    for (;;) {
        int top = -1;
        for (int each = 0; each < count; each++)
            if (rank[each] < q[each].count && sites[each] > -INFINITY &&
                (top < 0 || sites[each] > sites[top] || (sites[each] == sites[top] && nodes[each] < nodes[top])))
                top = each;
        if (top < 0) return;
        const double value = sites[top];
        if (!(rank[top] ? admits(&tree->best, value) : holds(&tree->best, value))) return;
        if (rank[top]) { /* without the token that was drawn last */
            double *rest = tree->room, sum = 0;
            tree->room += q[top].count;
            for (int at = 0; at < q[top].count; at++) sum += rest[at] = at == last[top] ? 0 : R[top][at];
            for (int at = 0; at < q[top].count; at++) rest[at] /= sum;
            R[top] = rest;
        }
        const int at = last[top] = categorical(R[top], q[top].count, stream);
        const int counted = rank[top] < RANKS ? rank[top] : RANKS - 1;
        const int bin = (int)-log2(fmax(R[top][at], 1e-9));
        const double *logs = estimates + 2 * (counted * BINS + (bin < BINS ? bin : BINS - 1));
        if (rank[top]++) offer(&tree->best, value); /* a node's first child was offered with the node */
        struct node *node = add(tree, nodes[top], q[top].ids[at], value - tree->nodes[nodes[top]].value, R[top][at]);
        node->R = R[top];
        node->at = at;
        node->reach = value + logs[0];
        if (node->depth < tree->depth) offer(&tree->best, node->reach);
        sites[top] = value + logs[1];
    }
}

/* Choose the layer below these nodes: BestFirst.expand of baseline.py. ids, logprobs: of the best tokens after each of
 * them, [count][columns]. names: of the columns, or null. */
static void choose_layer(struct tree *tree, const int *nodes, int count, const int64_t *ids, const float *logprobs,
                         int columns, const int64_t *names) {
    int order[MOST_WIDTH * MOST_WIDTH], found = 0;
    double values[MOST_WIDTH * MOST_WIDTH];
    for (int each = 0; each < count; each++)
        for (int choice = 0; choice < tree->width; choice++) {
            const double value = tree->nodes[nodes[each]].value + logprobs[each * columns + choice];
            int at = found++;
            for (; at && values[at - 1] < value; at--) values[at] = values[at - 1], order[at] = order[at - 1];
            values[at] = value, order[at] = each * columns + choice;
        }
    tree->in_layer = 0;
    for (int at = 0; at < found && admits(&tree->best, values[at]); at++) {
        const int64_t column = ids[order[at]];
        const double gain = logprobs[order[at]];
        offer(&tree->best, values[at]);
        add(tree, nodes[order[at] / columns], names ? names[column] : column, gain, exp(gain));
    }
}

/* The nodes of the last layer that the draft scores next: `frontier` of the same growers. Returns how many there are. */
static int frontier(struct tree *tree, int is_drawn, int is_chain, int *nodes) {
    int count = 0;
    if (!tree->in_layer || tree->nodes[tree->layer[0]].depth >= tree->depth) return 0;
    for (int each = 0; each < tree->in_layer; each++) {
        const struct node *node = tree->nodes + tree->layer[each];
        const double value = is_drawn ? node->reach : node->value;
        if (!(is_chain || (is_drawn ? holds(&tree->best, value) : admits(&tree->best, value)))) continue;
        int at = count++;
        for (; at; at--) {
            const struct node *before = tree->nodes + tree->layer[nodes[at - 1]];
            if ((is_drawn ? before->reach : before->value) >= value) break;
            nodes[at] = nodes[at - 1];
        }
        nodes[at] = each;
    }
    for (int each = 0; each < count; each++) nodes[each] = tree->layer[nodes[each]];
    for (; is_drawn && !is_chain && count > tree->width; count--) withdraw(&tree->best, tree->nodes[nodes[count - 1]].reach);
    return count < tree->width ? count : tree->width;
}

/* rows [size + 1]: the nodes that are kept, most valuable first, of equal ones the first; row_of [nodes]: the row of each
 * node, or -1. Returns how many rows there are. */
static int unroll(const struct tree *tree, int *rows, int *row_of) {
    int count = 1;
    for (int node = 0; node < tree->count; node++) row_of[node] = -1;
    rows[0] = row_of[ROOT] = ROOT;
    while (count <= tree->size) {
        int next = -1;
        for (int node = 1; node < tree->count; node++)
            if (row_of[node] < 0 && row_of[tree->nodes[node].parent] >= 0 &&
                (next < 0 || tree->nodes[node].value > tree->nodes[next].value))
                next = node;
        if (next < 0) break;
        row_of[next] = count;
        rows[count++] = next;
    }
    return count;
}
