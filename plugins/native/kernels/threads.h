/* A pool of threads that go through a pass together, meeting at barriers. Between passes they spin for a while, since
 * the next pass mostly comes within microseconds, and then sleep. */
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define MOST_THREADS 64
#define BARRIER_SPINS 20000 /* then somebody else needs the core: yield */
#define IDLE_SPINS 4000     /* about 100 us */

struct pool {
    int threads, users;
    pthread_t workers[MOST_THREADS];
    pthread_mutex_t pass, sleep; /* one pass at a time; guards going to sleep */
    pthread_cond_t wake;
    atomic_int job, sleepers, closing; /* job: number of the current pass */
    void (*work)(struct pool *, void *);
    void *argument;
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int round;
    _Alignas(64) atomic_int next; /* unit of work to be claimed */
};

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The next unit of this phase that nobody has begun. */
static int claim(struct pool *pool) { return atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed); }

/* Wait until every thread is here; then the units are counted anew. */
static void barrier(struct pool *pool) {
    int round = atomic_load_explicit(&pool->round, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) + 1 == pool->threads) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
        atomic_store_explicit(&pool->round, round + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&pool->round, memory_order_acquire) == round; spins++)
        if (spins < BARRIER_SPINS) relax(); else sched_yield();
}

static void *worker(void *argument) {
    struct pool *pool = argument;
    for (int done = 0;;) {
        for (int spins = 0; spins < IDLE_SPINS && atomic_load_explicit(&pool->job, memory_order_acquire) == done; spins++)
            relax();
        pthread_mutex_lock(&pool->sleep);
        while (atomic_load(&pool->job) == done && !atomic_load(&pool->closing)) {
            pool->sleepers++;
            pthread_cond_wait(&pool->wake, &pool->sleep);
            pool->sleepers--;
        }
        pthread_mutex_unlock(&pool->sleep);
        if (atomic_load(&pool->closing)) return NULL;
        done++;
        pool->work(pool, pool->argument);
        barrier(pool);
    }
}

/* `work` on every thread, this one included; returns when all are through. The caller holds `pass`. */
static void together(struct pool *pool, void (*work)(struct pool *, void *), void *argument) {
    pool->work = work;
    pool->argument = argument;
    atomic_store(&pool->next, 0);
    atomic_fetch_add(&pool->job, 1);
    if (pool->threads > 1) {
        pthread_mutex_lock(&pool->sleep);
        if (pool->sleepers) pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->sleep);
    }
    work(pool, argument);
    barrier(pool);
}

/* The process's pool of that many threads. Engines share it: two pools would fight for the cores. */
static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static struct pool *pools[MOST_THREADS + 1];

static struct pool *open_pool(int threads) {
    pthread_mutex_lock(&registry);
    struct pool *pool = pools[threads];
    if (!pool && (pool = aligned_alloc(64, (sizeof *pool + 63) & ~63ul))) {
        memset(pool, 0, sizeof *pool);
        pthread_mutex_init(&pool->pass, NULL);
        pthread_mutex_init(&pool->sleep, NULL);
        pthread_cond_init(&pool->wake, NULL);
        pool->threads = 1;
        while (pool->threads < threads && !pthread_create(&pool->workers[pool->threads], NULL, worker, pool))
            pool->threads++;
        pools[threads] = pool;
    }
    if (pool) pool->users++;
    pthread_mutex_unlock(&registry);
    return pool;
}

static void close_pool(struct pool *pool) {
    pthread_mutex_lock(&registry);
    if (!--pool->users) {
        for (int threads = 1; threads <= MOST_THREADS; threads++)
            if (pools[threads] == pool) pools[threads] = NULL;
        pthread_mutex_lock(&pool->sleep);
        atomic_store(&pool->closing, 1);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->sleep);
        for (int thread = 1; thread < pool->threads; thread++) pthread_join(pool->workers[thread], NULL);
        free(pool);
    }
    pthread_mutex_unlock(&registry);
}
