/* Rows move to other slots, in all layers of a cache. */
#pragma once
#include "engine.h"

enum { FEW_MOVED = 64 };

/* kept: for every thread, `room` for the rows of a head. */
struct move {
    const struct model *model;
    const struct moved *moved;
    size_t room;
    char *kept;
};

static void move_heads(struct team *team, int thread, void *argument) {
    const struct move *move = argument;
    const int heads = move->moved->layers * move->model->kv_heads;
    struct cursor cursor = {team, thread};
    for (int taken; (taken = claim(&cursor, heads)) >= 0;)
        move_head(move->moved, move->model->head_dim, taken, move->kept + thread * move->room);
}

/* Copy rows to other slots, first those of moved[0]; 0, or 1 without memory, and then nothing has changed. */
int draftwood_move(struct engine *engine, const struct moved *moved, int count) {
    int most = 0;
    for (int index = 0; index < count; index++)
        if (moved[index].rows > most) most = moved[index].rows;
    if (!most) return 0;
    struct move move = {&engine->model, moved, (size_t)most * panels_of(engine->model.head_dim) * LANES * sizeof(float)};
    const int threads = most > FEW_MOVED ? engine->team->threads : 1; /* to wake the others takes longer */
    move.kept = allocate_untouched(threads * move.room);
    if (!move.kept) return 1;
    pthread_mutex_lock(&engine->team->pass);
    for (; move.moved < moved + count; move.moved++) {
        if (threads > 1) together(engine->team, 1, move_heads, &move);
        const int heads = threads > 1 ? 0 : move.moved->layers * engine->model.kv_heads;
        for (int head = 0; head < heads; head++) move_head(move.moved, engine->model.head_dim, head, move.kept);
    }
    pthread_mutex_unlock(&engine->team->pass);
    release(move.kept);
    return 0;
}
