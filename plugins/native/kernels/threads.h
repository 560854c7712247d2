/* A team of threads that works through the phases of a pass.
 *
 * A phase is a number of units, and whoever is there takes the next one. Nobody waits for a thread that has not begun:
 * a phase is over when its units are done, however many threads did them. So a busy machine makes a pass slower, but
 * seldom stops it. Between passes the helpers spin for a while, since the next one mostly comes within
 * microseconds, and then sleep. */
#pragma once
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include "memory.h"

#define MOST_THREADS 1024
#define MOST_PHASES 4096
#define WAIT_SPINS 20000 /* then somebody else needs the core: yield */
#define IDLE_SPINS 40000 /* about 1 ms: longer than the host takes between the passes of a round */

struct phase {
    _Alignas(64) atomic_int next, done; /* units */
};

struct team {
    int threads, users;
    pthread_t helpers[MOST_THREADS];
    pthread_mutex_t pass, sleep; /* one pass at a time; guards going to sleep */
    pthread_cond_t wake;
    atomic_int job, sleepers, closing; /* job: number of the last pass */
    _Alignas(64) atomic_int open;      /* that number, as long as one may join */
    _Alignas(64) atomic_int helping;
    void (*work)(struct team *, int thread, void *);
    void *argument;
    struct phase phases[MOST_PHASES];
    atomic_int *shares; /* [MOST_PHASES][threads]: units that were taken of each thread's own share */
};

/* Where a thread is in a pass. ahead, end: what it reads later, and fetches while it waits. */
struct cursor {
    struct team *team;
    int thread, phase, mine; /* mine: units of this phase that it took */
    const char *ahead, *end;
};

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Wait until all units of this phase are done; returns -1. */
static int complete(struct cursor *cursor, int units) {
    struct phase *phase = &cursor->team->phases[cursor->phase];
    if (cursor->mine) atomic_fetch_add_explicit(&phase->done, cursor->mine, memory_order_acq_rel);
    for (int spins = 0; atomic_load_explicit(&phase->done, memory_order_acquire) < units;)
        if (cursor->ahead < cursor->end) __builtin_prefetch(cursor->ahead, 0, 2), cursor->ahead += LINE;
        else if (spins < WAIT_SPINS) relax(), spins++;
        else sched_yield();
    cursor->phase++;
    cursor->mine = 0;
    return -1;
}

/* This phase's next unit; after the last, waits for all and returns -1: the next call begins the next phase. */
static int claim(struct cursor *cursor, int units) {
    struct phase *phase = &cursor->team->phases[cursor->phase];
    const int unit = atomic_fetch_add_explicit(&phase->next, 1, memory_order_relaxed);
    if (unit >= units) return complete(cursor, units);
    cursor->mine++;
    return unit;
}

/* The first of the units that are a thread's own share, in every pass the same. */
static int first_own(int units, int thread, int threads) { return (int)((int64_t)units * thread / threads); }

/* The same in another order: first the units of the thread's own share, then what other threads have left. */
static int claim_own(struct cursor *cursor, int units) {
    const int threads = cursor->team->threads;
    atomic_int *shares = cursor->team->shares + (size_t)cursor->phase * threads;
    for (int more = 0; more < threads; more++) {
        const int owner = (cursor->thread + more) % threads, first = first_own(units, owner, threads);
        const int count = first_own(units, owner + 1, threads) - first;
        if (atomic_load_explicit(&shares[owner], memory_order_relaxed) >= count) continue;
        const int taken = atomic_fetch_add_explicit(&shares[owner], 1, memory_order_relaxed);
        if (taken >= count) continue;
        cursor->mine++;
        return first + taken;
    }
    return complete(cursor, units);
}

struct helper {
    struct team *team;
    int thread;
};

static void *help(void *argument) {
    const struct helper self = *(struct helper *)argument;
    struct team *team = self.team;
    free(argument);
    for (int seen = 0;;) {
        for (int spins = 0; spins < IDLE_SPINS; spins++, relax())
            if (atomic_load_explicit(&team->job, memory_order_acquire) != seen) break;
        pthread_mutex_lock(&team->sleep);
        while (atomic_load(&team->job) == seen && !atomic_load(&team->closing)) {
            team->sleepers++;
            pthread_cond_wait(&team->wake, &team->sleep);
            team->sleepers--;
        }
        pthread_mutex_unlock(&team->sleep);
        if (atomic_load(&team->closing)) return NULL;
        seen = atomic_load(&team->job);
        atomic_fetch_add(&team->helping, 1);
        if (atomic_load(&team->open) == seen) team->work(team, self.thread, team->argument);
        atomic_fetch_sub(&team->helping, 1);
    }
}

/* `work` on this thread and every helper in time, until all units are done and no helper is left. Needs `pass`. */
static void together(struct team *team, int phases, void (*work)(struct team *, int, void *), void *argument) {
    for (int phase = 0; phase < phases; phase++) {
        atomic_store_explicit(&team->phases[phase].next, 0, memory_order_relaxed);
        atomic_store_explicit(&team->phases[phase].done, 0, memory_order_relaxed);
        for (int thread = 0; thread < team->threads; thread++)
            atomic_store_explicit(&team->shares[phase * team->threads + thread], 0, memory_order_relaxed);
    }
    team->work = work;
    team->argument = argument;
    if (team->threads > 1) {
        const int last = atomic_load(&team->job), job = last == INT_MAX ? 1 : last + 1; /* never 0: closed */
        atomic_store(&team->open, job);
        atomic_store(&team->job, job);
        pthread_mutex_lock(&team->sleep);
        if (team->sleepers) pthread_cond_broadcast(&team->wake);
        pthread_mutex_unlock(&team->sleep);
    }
    work(team, 0, argument);
    atomic_store(&team->open, 0);
    for (int spins = 0; atomic_load(&team->helping);)
        if (spins < WAIT_SPINS) relax(), spins++; else sched_yield();
}

/* This library's team of so many threads. Engines share it: two such teams would fight for the cores. */
static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static struct team *teams[MOST_THREADS + 1];

static struct team *new_team(int threads) {
    struct team *team = allocate(sizeof *team);
    if (team && !(team->shares = allocate((size_t)MOST_PHASES * threads * sizeof *team->shares))) release(team), team = NULL;
    return team;
}

static struct team *open_team(int threads) {
    pthread_mutex_lock(&registry);
    struct team *team = teams[threads];
    if (!team && (team = new_team(threads))) {
        pthread_mutex_init(&team->pass, NULL);
        pthread_mutex_init(&team->sleep, NULL);
        pthread_cond_init(&team->wake, NULL);
        for (team->threads = 1; team->threads < threads; team->threads++) {
            struct helper *helper = malloc(sizeof *helper);
            if (!helper) break;
            *helper = (struct helper){team, team->threads};
            if (pthread_create(&team->helpers[team->threads], NULL, help, helper)) {
                free(helper);
                break;
            }
        }
        teams[threads] = team;
    }
    if (team) team->users++;
    pthread_mutex_unlock(&registry);
    return team;
}

static void close_team(struct team *team) {
    pthread_mutex_lock(&registry);
    if (!--team->users) {
        for (int threads = 1; threads <= MOST_THREADS; threads++)
            if (teams[threads] == team) teams[threads] = NULL;
        pthread_mutex_lock(&team->sleep);
        atomic_store(&team->closing, 1);
        pthread_cond_broadcast(&team->wake);
        pthread_mutex_unlock(&team->sleep);
        for (int thread = 1; thread < team->threads; thread++) pthread_join(team->helpers[thread], NULL);
        release(team->shares), release(team);
    }
    pthread_mutex_unlock(&registry);
}
