/* What an engine holds: the model it is for, its threads, and room for the rows of a pass. */
#pragma once
#include "attention.h"
#include "threads.h"

#define INTERFACE 4 /* of these structures; see library.py */
#define STRIDE 128 /* rows of activations are filled up to whole blocks */
#define PHASES_OF_LAYER 10 /* at most */
#define PHASES_BESIDE 6 /* and one for each block of the head of SpecDec++ */
#define SHARES 2 /* of a matrix, for each thread */

struct layer {
    const float *input_norm, *post_norm, *query_norm, *key_norm; /* the last two: of each head, or null */
    struct matrix qkv, output, gate_up, down; /* gate_up: panels of gate and up in turn */
    int32_t pairs; /* of numbers of a head that are rotated: 0, or as many as the tables have */
};

/* blocks, shift, odds, block: of SpecDec++'s head. */
struct model {
    int32_t vocab, hidden, inner, layers, heads, kv_heads, head_dim, positions, blocks;
    float epsilon, shift, attention_scale, residual_multiplier, logits_multiplier;
    const float *embedding, *norm, *cosine, *sine, *odds; /* cosine, sine: [positions][pairs] */
    const struct layer *layer;
    const struct matrix *block;
    struct matrix head;
};

/* keys, values: of all layers, see attention.h. acceptance: [outputs] or null; ids, logprobs: [outputs][top] or null. */
struct pass {
    int32_t rows, outputs, length, start, columns, capacity, top;
    const int64_t *tokens, *positions, *output_rows;
    const uint8_t *mask;
    float *keys, *values, *logits, *acceptance, *logprobs;
    int64_t *ids;
};

struct engine {
    struct model model;
    struct team *team;
    int most_rows, capacity;
    struct rows hidden, normed, merged, attended, gated;
    struct panel_mask mask;
    int *units, num_units; /* of attention: the first query of each, and the end */
    float *scores; /* [threads][MOST_QUERIES][odd_lines(capacity)] */
};

static size_t phases_of(const struct model *model) {
    return (size_t)model->layers * PHASES_OF_LAYER + model->blocks + PHASES_BESIDE;
}

static int padded(int size) { return (size + STRIDE - 1) / STRIDE * STRIDE; }

static size_t keys_of(const struct model *model, int capacity) { return (size_t)model->head_dim * capacity; }
static size_t values_of(const struct model *model, int capacity) {
    return (size_t)panels_of(model->head_dim) * LANES * capacity;
}

static int allocate_rows(struct rows *rows, int count, int size) {
    const size_t cells = (size_t)count * padded(size);
    rows->stride = padded(size);
    rows->values = allocate(cells * sizeof(float));
    rows->codes = allocate(cells);
    rows->scales = allocate(cells / LANES * sizeof(float));
    rows->sums = allocate(cells / LANES * sizeof(int32_t));
    rows->totals = allocate(cells / LANES * sizeof(float));
    return rows->values && rows->codes && rows->scales && rows->sums && rows->totals;
}

static void free_rows(struct rows *rows) {
    release(rows->values), release(rows->codes), release(rows->scales), release(rows->sums), release(rows->totals);
}

/* Room for masks and scores over a cache of `capacity` slots. */
static int make_room(struct engine *engine, int capacity) {
    if (capacity <= engine->capacity) return 1;
    release(engine->mask.bits), release(engine->scores);
    engine->mask.bits = allocate((size_t)engine->most_rows * capacity / LANES * sizeof(uint16_t));
    engine->scores = allocate((size_t)engine->team->threads * MOST_QUERIES * odd_lines(capacity) * sizeof(float));
    engine->capacity = engine->mask.bits && engine->scores ? capacity : 0;
    return engine->capacity;
}
