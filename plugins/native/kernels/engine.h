/* What an engine holds: the model it is for, its threads, and room for the rows of a pass. */
#pragma once
#include "attention.h"
#include "threads.h"

#define INTERFACE 19 /* of these structures; see library.py */
#define STRIDE 128 /* rows of activations are filled up to whole blocks */
#define PHASES_OF_LAYER 11 /* at most */
#define PHASES_BESIDE 9 /* and one for each block of the head of SpecDec++ */
#define SHARES 2 /* of a matrix, for each thread */
#define MOST_AHEAD (1 << 17) /* bytes of the next matrix that a waiting thread fetches */
#define PARTS_OF_SCORES 4 /* for each thread, where one unit of attention is computed by several */
#define LEAST_PART 16 /* panels */
#define LEAST_SHARED 192 /* queries times panels of a kv head that are worth a phase of their own */

struct layer {
    const float *input_norm, *post_norm, *query_norm, *key_norm; /* the last two: of each head, or null */
    const float *output_norm, *down_norm; /* or null */
    const float *token_norm; /* of the first layer of a draft that reads states; else null */
    const float *cosine, *sine; /* [positions][pairs] */
    struct matrix qkv, output, gate_up, down; /* gate_up: panels of gate and up in turn */
    int32_t pairs; /* of numbers of a head that are rotated: 0, or as many as the tables have */
    int32_t local; /* whether rows see no more than the model's window */
    int32_t place; /* among the layers of which that is as true */
    int32_t tap; /* the place, from 1 on, of the rows after it in a row of states; or 0 */
    int32_t norm_first; /* whether the normed row replaces the row, before it is added to */
};

/* blocks, shift, odds, block: of SpecDec++'s head. window: tokens, or 0. gelu: whether it takes SiLU's place. taps: of
 * all layers. fusion: of a draft that reads states; else without weights. */
struct model {
    int32_t vocab, hidden, inner, layers, heads, kv_heads, head_dim, positions, blocks, window, gelu, taps;
    float epsilon, shift, attention_scale, residual_multiplier, logits_multiplier, embedding_multiplier;
    const float *norm, *odds;
    const struct layer *layer;
    const struct matrix *block;
    struct matrix head, embedding; /* one matrix where they are tied */
    struct matrix fusion;
};

/* What a token is drawn from. Of the row's softmax at this temperature, where `sums` is not null: sums, their total and
 * the row's largest logit; where `ids` is not null: the tokens that are at least `share` times as probable as the best,
 * and their weights, see sampling.h. At temperature 0: the best token alone. */
struct draw {
    double temperature, share, total;
    double *sums, *weights;
    int64_t *ids;
    float peak;
    int32_t room, count, best;
};

/* cache: of the layers that see everything; near: of those with a window. acceptance: [outputs] or null; ids, logprobs: [outputs][top] or null. slots: where the rows of
 * the pass go; null: from `start` on. draws: [drawn], of the outputs `draw_outputs`. given: of a draft that reads states,
 * [rows][fusion.inputs + hidden]. states: [rows][taps][hidden] or null. */
struct pass {
    int32_t rows, outputs, length, start, columns, top;
    const int64_t *tokens, *positions, *output_rows;
    const uint8_t *mask;
    struct cache cache;
    float *logits, *acceptance, *logprobs;
    int64_t *ids;
    const int64_t *slots, *draw_outputs;
    struct draw *draws;
    int32_t drawn;
    const float *given;
    float *states;
    struct cache near;
};

struct engine {
    struct model model;
    struct team *team;
    int most_rows, capacity;
    struct rows hidden, normed, merged, attended, gated, fused;
    int fuses; /* whether a row of this pass has states of the target */
    struct panel_mask mask;
    int *units, num_units; /* of a kv head's attention: the first query of each, and the end */
    int most_queries;      /* of a unit */
    int parts;             /* of the cache, whose scores are computed one by one */
    float *queries;        /* [kv_heads][rows of the pass][group][head_dim] */
    float *scores;         /* [threads][most_queries][odd_lines(capacity)], or of all queries where there are parts */
    float *peaks;          /* [units of all kv heads][parts][most_queries]: of scores */
};

static size_t phases_of(const struct model *model) {
    return (size_t)model->layers * PHASES_OF_LAYER + model->blocks + PHASES_BESIDE;
}

/* The cache of a kv head of a layer. */
static struct cache cache_of_layer(const struct model *model, const struct layer *layer, const struct pass *pass, int head) {
    const struct cache *all = layer->local ? &pass->near : &pass->cache;
    return head_of(all, model->head_dim, (size_t)layer->place * model->kv_heads + head);
}

static int padded(int size) { return (size + STRIDE - 1) / STRIDE * STRIDE; }

/* The queries that share a kv head, in a pass of so many rows. */
static float *queries_of(const struct engine *engine, int rows, int head) {
    const struct model *model = &engine->model;
    return engine->queries + (size_t)head * rows * (model->heads / model->kv_heads) * model->head_dim;
}

/* How many queries a unit of attention has at most: many, which read the cache seldom, as long as every thread has some. */
static int queries_at_once(const struct model *model, int rows, int threads) {
    const int64_t each = (int64_t)rows * model->heads / (threads * SHARES);
    if (each > MOST_QUERIES - MOST_ROWS) return MOST_QUERIES;
    return each < 1 ? MOST_ROWS : ((int)each + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS;
}

/* halves: whether instructions for bf16 meet the rows. */
static int allocate_rows(struct rows *rows, int count, int size, int halves) {
    const size_t cells = (size_t)count * padded(size), whole = (count + REGISTER_ROWS - 1) / REGISTER_ROWS;
    rows->stride = padded(size);
    if (halves) rows->halves = allocate(whole * REGISTER_ROWS * padded(size) * sizeof(uint16_t));
    rows->values = allocate(cells * sizeof(float));
    rows->codes = allocate(cells);
    rows->scales = allocate(cells / LANES * sizeof(float));
    rows->starts = allocate(cells / LANES * sizeof(int32_t));
    rows->totals = allocate(cells / LANES * sizeof(float));
    return (rows->halves || !halves) && rows->values && rows->codes && rows->scales && rows->starts && rows->totals;
}

static void free_rows(struct rows *rows) {
    release(rows->values), release(rows->halves), release(rows->codes), release(rows->scales), release(rows->starts), release(rows->totals);
}

/* Room for masks and scores over a cache of `capacity` slots. */
static int make_room(struct engine *engine, int capacity) {
    if (capacity <= engine->capacity) return 1;
    struct panel_mask *mask = &engine->mask;
    release(mask->bits), release(mask->runs), release(mask->counts), release(mask->nearest), release(engine->scores);
    mask->rows = engine->most_rows;
    mask->room = capacity / LANES / 2 + 1; /* runs do not touch */
    mask->bits = allocate((size_t)mask->rows * capacity / LANES * sizeof(uint16_t));
    mask->runs = allocate_untouched((size_t)(mask->rows + 1) * mask->room * sizeof(struct run));
    mask->counts = allocate(mask->rows * sizeof(int));
    mask->nearest = allocate(mask->rows * sizeof(int));
    const size_t rows = (size_t)engine->team->threads * engine->most_queries;
    engine->scores = allocate_untouched(rows * odd_lines(capacity) * sizeof(float));
    const int enough = mask->bits && mask->runs && mask->counts && mask->nearest && engine->scores;
    engine->capacity = enough ? capacity : 0;
    return engine->capacity;
}
