/* Digests of what the kernels compute, one a line, for comparison between instruction sets (test_native_digests.py). */
#include "native_models.h"
#include <stdio.h>

static uint64_t digest;

static void take(const void *bytes, size_t count) { /* FNV-1a */
    for (size_t at = 0; at < count; at++) digest = (digest ^ ((const uint8_t *)bytes)[at]) * 0x100000001b3u;
}

static void tell(const char *what, int detail) {
    printf("%s %d %016llx\n", what, detail, (unsigned long long)digest);
    digest = 0xcbf29ce484222325u;
}

static void digest_products(enum format format) {
    for (int rows = 1; rows <= 33; rows += rows < 9 ? 1 : 8)
        for (int outputs = 15; outputs <= 81; outputs += 22) {
            const int block = has_superblocks(format) ? SUPERBLOCK : 96;
            const int inputs = format < INT8 ? 40 + outputs : outputs / 15 * block;
            struct matrix matrix = matrix_of(outputs, inputs, format, rows % 2);
            float *values = numbers((size_t)rows * inputs), *result = malloc((size_t)rows * outputs * sizeof(float));
            for (int at = 0; at < inputs; at += 7) values[at] *= 30;
            for (int at = 3; at < inputs; at += 11) values[at] *= 1e-17f; /* some of them count as 0 in bf16 */
            if (draftwood_linear(&matrix, values, rows, result)) exit(1);
            take(result, (size_t)rows * outputs * sizeof(float));
            free_matrix(matrix), free(values), free(result);
        }
    tell("products", format);
}

/* Passes of 1, 2, ... rows, each a tree after what the ones before it left in the cache. */
static void digest_passes(struct shape shape, int most, int capacity) {
    struct model model = model_of(shape);
    struct engine *engine = draftwood_open(&model, most, 2);
    struct cache cache = cache_of(shape, capacity), near = near_of(shape, capacity);
    const size_t heads = (size_t)shape.layers * shape.kv_heads, bytes = number_bytes(shape.stored);
    float *logits = malloc((size_t)most * shape.vocab * sizeof(float)), accepted[64], logprobs[64 * 8];
    int64_t tokens[64], positions[64], outputs[64], ids[64 * 8];
    for (int rows = 1, length = 0; rows <= most && length + rows <= capacity; length += rows, rows++) {
        uint8_t mask[64 * 64] = {0};
        for (int row = 0; row < rows; row++) {
            tokens[row] = (row * 5 + rows) % shape.vocab, outputs[row] = rows - 1 - row;
            positions[row] = (length + row) % shape.positions;
            for (int column = 0; column <= row; column++)
                mask[row * rows + column] = column == row || column % 3 < rows % 3;
        }
        struct pass pass = {rows, rows, length, length, rows, 8, tokens, positions, outputs, mask, cache, logits,
                            shape.blocks ? accepted : NULL, logprobs, ids};
        pass.near = near;
        if (!engine || draftwood_forward(engine, &pass)) exit(1);
        take(logits, (size_t)rows * shape.vocab * sizeof(float));
        take(ids, rows * 8 * sizeof *ids);
    }
    take(cache.keys, heads * keys_of(shape.head_dim, capacity) * bytes);
    take(cache.values, heads * values_of(shape.head_dim, capacity) * bytes);
    take(near.keys, heads * keys_of(shape.head_dim, capacity) * bytes);
    if (cache.key_scales) take(cache.key_scales, heads * capacity * sizeof(float));
    if (cache.value_scales) take(cache.value_scales, heads * capacity * sizeof(float));
    tell("passes", shape.format);
    take(logprobs, 8 * sizeof(float));
    if (shape.blocks) take(accepted, sizeof(float));
    tell("probabilities", shape.format);
    draftwood_close(engine);
    free_cache(cache), free_cache(near), free(logits), free_model(model);
}

static void digest_sampling(int size) {
    float *logits = numbers(size), *weights = malloc(size * sizeof(float));
    double *sums = malloc((size + RUN - 1) / RUN * sizeof *sums);
    for (int at = 0; at < size; at++) logits[at] = at % 11 == 3 ? -INFINITY : 20 * logits[at];
    for (float temperature = 0.01f; temperature < 10; temperature *= 3) {
        float peak;
        const double total = draftwood_softmax(logits, size, temperature, sums, &peak);
        const struct row row = {logits, size, peak, temperature, sums};
        const int64_t ids[] = {0, size / 2 + 1, size - 1};
        double R[5], masses[4], chosen[RUN];
        const struct offers offers = {ids, size > 4 ? 3 : 1, R};
        take(&total, sizeof total), take(sums, (size + RUN - 1) / RUN * sizeof *sums);
        draftwood_offer(&row, &offers, total);
        const double offered[] = {0.2, 0.3, 0.1}, pi = draftwood_reject(&offers, offered, 0.6);
        take(&pi, sizeof pi), take(R, (offers.count + 2) * sizeof *R);
        draftwood_residual_runs(&row, &offers, masses);
        take(masses, (size + RUN - 1) / RUN * sizeof *masses);
        take(chosen, draftwood_residual_run(&row, &offers, (size - 1) / RUN, chosen) * sizeof *chosen);
        draftwood_weigh(logits, size, 20, temperature, weights);
        take(weights, size * sizeof(float));
    }
    tell("softmax", size);
    free(logits), free(weights), free(sums);
}

static void digest_rounding(int outputs, int blocks) {
    const size_t inputs = (size_t)blocks * CODE_BLOCK, count = outputs * inputs;
    const float shares[] = {0.7f, 0.8f, 0.9f, 1.0f};
    float *weights = numbers(count), *feedback = numbers(CODE_BLOCK * CODE_BLOCK), *left = calloc(count, sizeof(float));
    float *scales = malloc(count * sizeof(float)), *offsets = malloc(count * sizeof(float));
    uint8_t *codes = malloc(count);
    for (int bits = 4; bits <= 5; bits++) {
        draftwood_round(weights, outputs, (int)inputs, bits, shares, 4, blocks == 1 ? feedback : NULL, codes, scales,
                        offsets, blocks == 1 ? left : NULL);
        take(codes, count), take(scales, count / CODE_BLOCK * sizeof(float)), take(left, count * sizeof(float));
        take(offsets, count / CODE_BLOCK * sizeof(float));
    }
    for (int bits = 6; bits <= 8; bits += 2) {
        draftwood_round_signed(weights, outputs, (int)inputs, bits, (int8_t *)codes, scales);
        take(codes, count), take(scales, count / group_of(bits) * sizeof(float));
    }
    tell("rounding", outputs);
    free(weights), free(feedback), free(left), free(scales), free(offsets), free(codes);
}

int main(void) {
    digest = 0xcbf29ce484222325u;
    const struct shape shapes[] = {
        {41, 64, 64, 2, 4, 2, 16, 300, 0, INT6, 8, 1, FP16}, {31, 96, 32, 1, 32, 1, 2, 300, 0, INT5, 1, 0, INT8},
        {33, 34, 18, 2, 6, 2, 18, 300, 2, FP16, 7, 1, FP16}, {16, 32, 16, 1, 8, 1, 16, 300, 0, BF16, 8, 0, FP32},
        {95, 64, 64, 2, 4, 2, 16, 300, 3, INT8, 8, 1, FP16}, {31, 96, 32, 1, 32, 1, 2, 300, 0, INT4, 1, 0, INT8},
        {71, 48, 80, 2, 6, 3, 40, 200, 1, FP32, 20, 1, FP32}, {71, 48, 80, 2, 6, 3, 40, 200, 0, FP32, 20, 0, INT8},
        {15, 64, 64, 2, 4, 2, 16, 300, 0, INT4, 8, 1, FP16, 19}, {31, 256, 256, 1, 16, 4, 16, 300, 0, INT6_K, 8, 1, FP16},
    };
    for (int format = FP32; format <= INT4_K; format++) digest_products(format);
    for (int at = 0; at < 10; at++) digest_passes(shapes[at], 18, 256);
    for (int size = 1; size < 1000; size = size * 3 + 7) digest_sampling(size);
    digest_rounding(37, 3), digest_rounding(19, 1);
    return 0;
}
