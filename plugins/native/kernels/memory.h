/* Memory from the beginning of a cache line on. */
#pragma once
#include <stdlib.h>
#include <string.h>
#if defined(_WIN32)
#include <malloc.h>
#endif

#define LINE 64 /* bytes */

/* Zeros, for `release` to free; null where there is no memory. */
static void *allocate(size_t bytes) {
    const size_t whole = (bytes + LINE - 1) / LINE * LINE;
#if defined(_WIN32)
    void *memory = _aligned_malloc(whole, LINE);
#else
    void *memory = aligned_alloc(LINE, whole);
#endif
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static void release(void *memory) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    free(memory);
#endif
}
