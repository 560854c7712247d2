/* What a tile fetches of the next panels while it computes: processors do not look ahead over pages. Tiles of several
 * rows that meet the same panels one after the other fetch a share each, so that memory rests during none of them. */
#pragma once
#include "lanes.h"

struct ahead {
    const char *from;
    size_t pace; /* bytes for each step that a tile takes over its panels */
};

INLINE struct ahead share(const void *next, size_t panel, size_t step, int tile, int tiles) {
    return (struct ahead){(const char *)next + panel * tile / tiles, (step + tiles - 1) / tiles};
}

/* Into the L1 cache, unless the L2 cache is better: on Intel's servers with AMX, and where compile.py says so. */
#if !defined(FETCHED) && defined(__AMX_TILE__)
#define FETCHED 2
#elif !defined(FETCHED)
#define FETCHED 3
#endif
INLINE void fetch(struct ahead ahead, size_t panels, size_t steps) {
    __builtin_prefetch(ahead.from + panels + steps * ahead.pace, 0, FETCHED);
}
