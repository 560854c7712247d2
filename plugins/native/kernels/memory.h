/* Memory from the beginning of a cache line on. */
#pragma once
#include <stdlib.h>
#include <string.h>
#if defined(_WIN32)
#include <malloc.h>
#endif

#define LINE 64 /* bytes */

/* For `release`; null without memory. Large pieces get their pages near the thread that first writes there. */
static void *allocate_untouched(size_t bytes) {
    const size_t whole = (bytes + LINE - 1) / LINE * LINE;
#if defined(_WIN32)
    return _aligned_malloc(whole, LINE);
#else
    return aligned_alloc(LINE, whole);
#endif
}

/* Zeros. */
static void *allocate(size_t bytes) {
    void *memory = allocate_untouched(bytes);
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
