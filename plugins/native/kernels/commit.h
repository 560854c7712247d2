/* Rows move to other slots, in all layers of a cache. */
#pragma once
#include "engine.h"

enum { FEW_MOVED = 64 };

/* rows: in `slots`, which go to those from `to` on. kept: for every thread, room for the rows of a head. */
struct move {
    const struct model *model;
    const struct cache *cache;
    const int64_t *slots;
    int to, rows;
    size_t room;
    char *kept;
};

static void move_heads(struct team *team, int thread, void *argument) {
    const struct move *move = argument;
    const int heads = move->model->layers * move->model->kv_heads, dim = move->model->head_dim;
    struct cursor cursor = {team, thread};
    for (int taken; (taken = claim(&cursor, heads)) >= 0;) {
        const struct cache head = head_of(move->cache, dim, taken);
        move_head(&head, dim, move->to, move->slots, move->rows, move->kept + thread * move->room);
    }
}

/* Copy the rows in `slots`, in that order, to those from `first` on in every layer; 0, or 1 without memory. */
int draftwood_move(struct engine *engine, const struct cache *cache, int first, const int64_t *slots, int count) {
    if (!count) return 0;
    struct move move = {&engine->model, cache, slots, first, count};
    move.room = (size_t)count * panels_of(engine->model.head_dim) * LANES * sizeof(float);
    const int threads = count > FEW_MOVED ? engine->team->threads : 1; /* to wake the others takes longer */
    move.kept = allocate_untouched(threads * move.room);
    if (!move.kept) return 1;
    pthread_mutex_lock(&engine->team->pass);
    if (threads > 1) together(engine->team, 1, move_heads, &move);
    const int heads = threads > 1 ? 0 : engine->model.layers * engine->model.kv_heads;
    for (int head = 0; head < heads; head++) {
        const struct cache part = head_of(cache, engine->model.head_dim, head);
        move_head(&part, engine->model.head_dim, first, slots, count, move.kept);
    }
    pthread_mutex_unlock(&engine->team->pass);
    release(move.kept);
    return 0;
}
