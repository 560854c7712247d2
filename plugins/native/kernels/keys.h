/* Queries, keys and values of a pass: turned by position, and put into the cache. */
#pragma once
#include "norms.h"

/* head := head times `factor`, the first 2 * `pairs` rotated by position: halves as Hugging Face stores them. */
static void rotate(float *head, const float *cosine, const float *sine, int pairs, int dim, float factor) {
    for (int d = 0; d < pairs; d++) {
        float low = head[d], high = head[d + pairs];
        head[d] = fmaf(low, cosine[d], -(high * sine[d])) * factor; /* says which of the products is rounded */
        head[d + pairs] = fmaf(high, cosine[d], low * sine[d]) * factor;
    }
    for (int d = 2 * pairs; d < dim; d++) head[d] *= factor;
}

/* Spread every number over the `run` numbers of its part of a head, by a Walsh-Hadamard transform. A product of two
 * heads that are spread is `run` times as large, and otherwise the same. Some models' keys have a few numbers that are a
 * hundred times as large as the others (those of Qwen2.5, by its biases), which codes with one scale would lose. */
static void spread(float *head, int dim, int run) {
    for (int half = 1; half < run; half *= 2)
        for (int first = 0; first < dim; first += 2 * half)
            for (int d = first; d < first + half; d++) {
                const float low = head[d], high = head[d + half];
                head[d] = low + high, head[d + half] = low - high;
            }
}

/* Subtract a key's bias from it where position turns it by less than half a radian in 1,024 tokens: this changes all
 * scores of a query by the same number. */
static void shift(float *key, const struct layer *layer, const float *bias, int dim, int positions) {
    for (int d = 0; d < dim; d++) {
        int slow = 1;
        for (int position = 1; d < 2 * layer->pairs && position <= 1024 && position < positions; position *= 4)
            slow = slow && layer->cosine[position * layer->pairs + d % layer->pairs] > 0.88f;
        if (slow) key[d] -= bias[d];
    }
}

/* Normalize, where the layer does, and rotate the queries and keys of one kv head of a layer; queries come to lie
 * side by side, keys and values go into the cache. By head, since rows share the cache's lines. */
static void remember(const struct engine *engine, const struct layer *layer, const struct pass *pass, int head) {
    const struct model *model = &engine->model;
    const int dim = model->head_dim, pairs = layer->pairs, group = model->heads / model->kv_heads;
    const struct cache own = cache_of_layer(model, layer, pass, head);
    const int run = own.format == INT8 ? dim & -dim : 1; /* the largest power of two that divides dim */
    float *query = queries_of(engine, pass->rows, head);
    for (int row = 0; row < pass->rows; row++) {
        const float *cosine = layer->cosine + pass->positions[row] * pairs;
        const float *sine = layer->sine + pass->positions[row] * pairs;
        float *from = engine->merged.values + (size_t)row * engine->merged.stride;
        float *key = from + (model->heads + head) * dim, *value = key + model->kv_heads * dim;
        memcpy(query, from + head * group * dim, (size_t)group * dim * sizeof(float));
        for (int q = 0; q < group; q++, query += dim) {
            if (layer->query_norm) normalize_head(query, layer->query_norm, dim, model->epsilon);
            rotate(query, cosine, sine, pairs, dim, LOG2_E * model->attention_scale / (float)run);
            spread(query, dim, run);
        }
        if (layer->key_norm) normalize_head(key, layer->key_norm, dim, model->epsilon);
        rotate(key, cosine, sine, pairs, dim, 1.0f);
        if (own.format == INT8 && layer->qkv.bias)
            shift(key, layer, layer->qkv.bias + (model->heads + head) * dim, dim, model->positions);
        spread(key, dim, run);
        put(&own, dim, pass->slots ? (int)pass->slots[row] : pass->start + row, key, value);
    }
}
