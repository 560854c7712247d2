/* Keys and values of a text, in panels that attention reads: of a kv head of a layer, keys [slot / 16][head_dim][16]
 * and values [dim / 16][slot][16]. They are stored in fp32 or fp16, or as codes of 8 bits, which a slot's scale
 * multiplies. What is stored of a row depends on this row alone. */
#pragma once
#include "matrix.h"
#include "memory.h"

/* Of some layers, or of one kv head. key_scales, value_scales: [slots] of each head, or null where there are no codes.
 * panels: where each panel of slots lies, -1 for one that is not there; null: each in its place. */
struct cache {
    void *keys, *values;
    float *key_scales, *value_scales;
    const int32_t *panels;
    int32_t capacity, format;
};

static int lies_at(const struct cache *cache, int panel) { return cache->panels ? cache->panels[panel] : panel; }

static size_t keys_of(int head_dim, int capacity) { return (size_t)head_dim * capacity; }
static size_t values_of(int head_dim, int capacity) { return (size_t)panels_of(head_dim) * LANES * capacity; }

/* A kv head of a cache, counted through its layers. */
static struct cache head_of(const struct cache *all, int head_dim, size_t head) {
    const size_t bytes = number_bytes(all->format), slots = head * all->capacity;
    struct cache own = *all;
    own.keys = (char *)all->keys + head * keys_of(head_dim, all->capacity) * bytes;
    own.values = (char *)all->values + head * values_of(head_dim, all->capacity) * bytes;
    if (all->format == INT8) own.key_scales += slots, own.value_scales += slots;
    return own;
}

/* The largest number that is stored. What is infinite or no number is stored as this one: attention multiplies slots
 * that a row does not attend to by 0, which leaves no trace of a number, and of nothing else. */
#define MOST 3.4e38f

/* The largest magnitude of a row, at most MOST. */
static float peak_of(const float *row, int dim) {
    f32 most = {0};
    for (int d = 0; d < dim; d += WIDTH) {
        const f32 value = load_some(row + d, dim - d, 0), limit = splat(MOST);
        most = larger(most, smaller(larger(value, -value), limit));
    }
    return largest(most);
}

/* Store a row's numbers, `lane` of them between one and the next, and `panel` between every sixteenth. */
INLINE void put_numbers(const float *row, int dim, float step, void *to, size_t lane, size_t panel,
                        const enum format format) {
    const size_t bytes = number_bytes(format);
    for (int d = 0; d < dim; d += WIDTH) {
        const f32 value = load_some(row + d, dim - d, 0);
        char stored[sizeof(f32)];
        if (format == FP32) store((float *)stored, larger(smaller(value, splat(MOST)), splat(-MOST)));
        if (format == FP16) store_fp16((uint16_t *)stored, value);
        if (format == INT8) store_bytes((int8_t *)stored, nearest(value * step));
        char *at = (char *)to + (d / LANES * panel + d % LANES * lane) * bytes;
        for (int index = 0; index < WIDTH && d + index < dim; index++)
            memcpy(at + index * lane * bytes, stored + index * bytes, bytes);
    }
}

static void put_row(const float *row, int dim, void *to, size_t lane, size_t panel, float *scales, int slot,
                    int format) {
    if (format == FP32) put_numbers(row, dim, 0, to, lane, panel, FP32);
    if (format == FP16) put_numbers(row, dim, 0, to, lane, panel, FP16);
    if (format != INT8) return;
    const float peak = peak_of(row, dim);
    put_numbers(row, dim, peak > 1e-30f ? 127.0f / peak : 0.0f, to, lane, panel, INT8);
    scales[slot] = peak / 127.0f;
}

/* Store the key and the value of a row, [head_dim] each, in a slot of their head. */
static void put(const struct cache *head, int head_dim, int slot, const float *key, const float *value) {
    slot = lies_at(head, slot / LANES) * LANES + slot % LANES;
    const size_t bytes = number_bytes(head->format), panel = (size_t)(slot / LANES) * head_dim * LANES;
    char *to = (char *)head->keys + (panel + slot % LANES) * bytes;
    put_row(key, head_dim, to, LANES, LANES * LANES, head->key_scales, slot, head->format);
    to = (char *)head->values + (size_t)slot * LANES * bytes;
    put_row(value, head_dim, to, 1, (size_t)head->capacity * LANES, head->value_scales, slot, head->format);
}

/* What a slot has in `count` pieces of some bytes: from one piece to the next, from one slot of a panel to the next, and
 * from one panel of slots to the next there are so many bytes. */
struct pieces {
    char *first;
    int count;
    size_t piece, slot, panel;
};

/* Rows of a cache that go from slots to others, as they lie in memory. */
struct moved {
    struct cache cache;
    const int64_t *from, *to;
    int32_t rows, layers;
};

/* Copy the pieces of slots to others. kept: room for all of them. */
INLINE void move_pieces(struct pieces of, const size_t bytes, const struct moved *moved, char *kept) {
    for (int back = 0; back < 2; back++)
        for (int row = 0; row < moved->rows; row++) {
            const int64_t slot = back ? moved->to[row] : moved->from[row];
            char *at = of.first + slot / LANES * of.panel + slot % LANES * of.slot;
            for (int index = 0; index < of.count; index++, at += of.piece) {
                char *beside = kept + ((size_t)row * of.count + index) * bytes;
                memcpy(back ? at : beside, back ? beside : at, bytes);
            }
        }
}

INLINE void move_numbers(const struct cache *head, int dim, const struct moved *moved, char *kept,
                         const enum format format) {
    const size_t bytes = number_bytes(format), line = LANES * bytes, scale = sizeof(float);
    move_pieces((struct pieces){head->keys, dim, line, bytes, dim * line}, bytes, moved, kept);
    const struct pieces values = {head->values, panels_of(dim), head->capacity * line, line, LANES * line};
    move_pieces(values, line, moved, kept);
    for (int index = 0; index < 2 && format == INT8; index++) {
        float *scales = index ? head->value_scales : head->key_scales;
        move_pieces((struct pieces){(char *)scales, 1, 0, scale, LANES * scale}, scale, moved, kept);
    }
}

/* Move rows of a head. kept: room for them in fp32. */
static void move_head(const struct moved *moved, int dim, size_t index, char *kept) {
    const struct cache head = head_of(&moved->cache, dim, index);
    if (head.format == FP32) move_numbers(&head, dim, moved, kept, FP32);
    if (head.format == FP16) move_numbers(&head, dim, moved, kept, FP16);
    if (head.format == INT8) move_numbers(&head, dim, moved, kept, INT8);
}
