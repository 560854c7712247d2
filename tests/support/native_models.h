/* Random matrices and models for programs that drive the kernels, the same on every processor. Every array is allocated
 * with its exact size. */
#pragma once
#include "llama.c"

static uint32_t state = 1;
static float number(void) { /* from -1 to 1 */
    state = state * 1664525u + 1013904223u;
    return (float)(int32_t)state / 2147483648.0f;
}

/* Exactly `count` numbers. */
static float *numbers(size_t count) {
    float *values = malloc(count * sizeof(float));
    for (size_t at = 0; at < count; at++) values[at] = number();
    return values;
}

/* A matrix of random weights. */
static struct matrix matrix_of(int outputs, int inputs, enum format format, int biased) {
    struct matrix matrix = {.outputs = outputs, .inputs = inputs, .format = format};
    const size_t bytes = panels_of(outputs) * panel_bytes(&matrix);
    uint8_t *weights = malloc(bytes);
    for (size_t at = 0; at < bytes; at++) weights[at] = (uint8_t)(128 + 128 * number());
    for (size_t at = 0; at < bytes / 2 && format < INT8; at++) { /* of each size up to 1/8 */
        const float value = number() / 8;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (format == BF16) ((uint16_t *)weights)[at] = bits >> 16;
        if (format == FP16) ((uint16_t *)weights)[at] = bits >> 16 & 0x8000 | (bits >> 13 & 0x3ff) | 0x2400;
        if (format == FP32 && at < bytes / 4) ((float *)weights)[at] = value;
    }
    matrix.weights = weights;
    if (format >= INT8) {
        const size_t scales = panels_of(outputs) * scale_bytes(inputs, bits_of(format), has_superblocks(format));
        uint16_t *halves = malloc(scales); /* about 2^-12 */
        for (size_t at = 0; at < scales / sizeof *halves; at++) halves[at] = (uint16_t)(0x0c00 + 127 * number());
        matrix.scales = halves;
    }
    if (biased) matrix.bias = numbers(panels_of(outputs) * LANES);
    return matrix;
}

static void free_matrix(struct matrix matrix) {
    free((void *)matrix.weights), free((void *)matrix.scales), free((void *)matrix.bias);
}

struct shape {
    int vocab, hidden, inner, layers, heads, kv_heads, head_dim, positions, blocks;
    enum format format;
    int pairs, normed; /* pairs: that rotate, in every other layer; normed: whether heads and what layers add are */
    enum format stored; /* keys and values */
    int window; /* of every other layer; with GELU */
    int reads; /* rows of its target beside each other, if it is a draft that reads them */
};

static struct cache cache_of(struct shape shape, int capacity) {
    const size_t heads = (size_t)shape.layers * shape.kv_heads, bytes = number_bytes(shape.stored);
    struct cache cache = {calloc(heads * keys_of(shape.head_dim, capacity), bytes),
                          calloc(heads * values_of(shape.head_dim, capacity), bytes), NULL, NULL, NULL, capacity,
                          shape.stored};
    if (shape.stored != INT8) return cache;
    cache.key_scales = calloc(heads * capacity, sizeof(float));
    cache.value_scales = calloc(heads * capacity, sizeof(float));
    return cache;
}

/* Of the layers with a window: each panel lies elsewhere, the last one first, two and two of them together. */
static struct cache near_of(struct shape shape, int capacity) {
    struct cache near = cache_of(shape, capacity);
    const int count = capacity / LANES;
    int32_t *panels = malloc(count * sizeof *panels);
    for (int panel = 0; panel < count; panel++) panels[panel] = count % 2 ? panel : (count - 1 - panel) ^ 1;
    near.panels = panels;
    return near;
}

static void free_cache(struct cache cache) {
    free(cache.keys), free(cache.values), free(cache.key_scales), free(cache.value_scales), free((void *)cache.panels);
}

static struct model model_of(struct shape shape) {
    struct model model = {shape.vocab, shape.hidden, panels_of(shape.inner) * LANES, shape.layers, shape.heads,
                          shape.kv_heads, shape.head_dim, shape.positions, shape.blocks, shape.window,
                          shape.window > 0, 0, 1e-5f, 0.5f, 0.25f, 0.5f, 2, 1.5f, 0, 0, 0, 0, {0}, {0}};
    const int query = shape.heads * shape.head_dim, key = shape.kv_heads * shape.head_dim;
    const int whole = panels_of(shape.hidden) * LANES, head = panels_of(shape.head_dim) * LANES;
    model.embedding = matrix_of(shape.vocab, shape.hidden, shape.format, 0);
    model.norm = numbers(whole);
    const float *cosine = numbers((size_t)shape.positions * shape.pairs);
    const float *sine = numbers((size_t)shape.positions * shape.pairs);
    model.odds = shape.blocks ? numbers(whole) : NULL;
    struct layer *layers = malloc(shape.layers * sizeof *layers);
    for (int index = 0; index < shape.layers; index++)
        layers[index] = (struct layer){numbers(whole), numbers(whole),
                                       shape.normed ? numbers(head) : NULL, shape.normed ? numbers(head) : NULL,
                                       shape.normed ? numbers(whole) : NULL, shape.normed ? numbers(whole) : NULL, NULL,
                                       cosine, sine,
                                       matrix_of(query + 2 * key, shape.hidden, shape.format, index % 2),
                                       matrix_of(shape.hidden, query, shape.format, 0),
                                       matrix_of(2 * model.inner, shape.hidden, shape.format, 0),
                                       matrix_of(shape.hidden, shape.inner, shape.format, 1),
                                       index % 2 ? 0 : shape.pairs, shape.window && index % 2,
                                       shape.window ? index / 2 : index};
    struct matrix *blocks = malloc(shape.blocks * sizeof *blocks);
    for (int index = 0; index < shape.blocks; index++) blocks[index] = matrix_of(shape.hidden, shape.hidden, FP32, 1);
    if (shape.reads) {
        free_matrix(layers->qkv), layers->qkv = matrix_of(query + 2 * key, 2 * shape.hidden, shape.format, 0);
        layers->token_norm = numbers(whole), layers->norm_first = shape.reads % 2, layers[shape.layers - 1].tap = 1;
        model.fusion = matrix_of(shape.hidden, shape.reads * shape.hidden, shape.format, 0), model.taps = 1;
    }
    model.layer = layers, model.block = blocks;
    model.head = matrix_of(shape.vocab, shape.hidden, shape.format, 0);
    return model;
}

static void free_model(struct model model) {
    for (int index = 0; index < model.layers; index++) {
        const struct layer *layer = &model.layer[index];
        free((void *)layer->input_norm), free((void *)layer->post_norm);
        free((void *)layer->query_norm), free((void *)layer->key_norm);
        free((void *)layer->output_norm), free((void *)layer->down_norm), free((void *)layer->token_norm);
        if (!index) free((void *)layer->cosine), free((void *)layer->sine);
        free_matrix(layer->qkv), free_matrix(layer->output), free_matrix(layer->gate_up), free_matrix(layer->down);
    }
    for (int index = 0; index < model.blocks; index++) free_matrix(model.block[index]);
    free((void *)model.layer), free((void *)model.block), free_matrix(model.head);
    free_matrix(model.embedding), free_matrix(model.fusion), free((void *)model.norm), free((void *)model.odds);
}
