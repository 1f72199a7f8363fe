/* The thread pool: every worker runs once, items are handed out once, barriers hold, and idle workers
 * use no processor. */
#include "kernels/cpu/pool.h"
#include "tests/tap.h"

#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

enum { ITEMS = 1000, ROUNDS = 20000, PHASES = 50 };

struct shared {
    struct pool *pool;
    atomic_uint runs[64];
    atomic_uint items[ITEMS];
    atomic_uint phase_count[PHASES];
    atomic_bool broken;
    uint32_t plain; /* written by worker 0 before a barrier, read by all after it */
};

static void take_items(void *arg, uint32_t worker)
{
    struct shared *s = arg;
    atomic_fetch_add(&s->runs[worker], 1);
    for (uint32_t i; (i = pool_next(s->pool, ITEMS)) < ITEMS;)
        atomic_fetch_add(&s->items[i], 1);
}

static void every_worker_runs_and_every_item_is_taken_once(struct shared *s)
{
    pool_run(s->pool, take_items, s);
    pool_run(s->pool, take_items, s);
    bool right = true;
    for (uint32_t i = 0; i < 64; i++)
        right &= atomic_load(&s->runs[i]) == (i < pool_threads(s->pool) ? 2u : 0u);
    ok(right, "every worker runs a function exactly once");
    right = true;
    for (uint32_t i = 0; i < ITEMS; i++)
        right &= atomic_load(&s->items[i]) == 2;
    ok(right, "every item is taken exactly once per run");
}

static void walk_phases(void *arg, uint32_t worker)
{
    struct shared *s = arg;
    uint32_t n = pool_threads(s->pool);
    for (uint32_t p = 0; p < PHASES; p++) {
        if (worker == 0)
            s->plain = p;
        atomic_fetch_add(&s->phase_count[p], 1);
        pool_barrier(s->pool, worker);
        if (atomic_load(&s->phase_count[p]) % n != 0 || s->plain != p)
            atomic_store(&s->broken, true);
        pool_barrier(s->pool, worker);
    }
}

static void nobody_passes_a_barrier_early(struct shared *s)
{
    for (int i = 0; i < 200; i++)
        pool_run(s->pool, walk_phases, s);
    ok(!atomic_load(&s->broken), "nobody passes a barrier before all have come");
}

static void rewind_once(void *arg, uint32_t worker)
{
    struct shared *s = arg;
    take_items(arg, worker);
    pool_barrier(s->pool, worker);
    if (worker == 0)
        pool_rewind(s->pool);
    pool_barrier(s->pool, worker);
    take_items(arg, worker);
}

static void items_start_again_after_a_rewind(struct shared *s)
{
    for (uint32_t i = 0; i < ITEMS; i++)
        atomic_store(&s->items[i], 0);
    pool_run(s->pool, rewind_once, s);
    bool right = true;
    for (uint32_t i = 0; i < ITEMS; i++)
        right &= atomic_load(&s->items[i]) == 2;
    ok(right, "after a rewind between barriers all items are handed out again");
}

static void count_run(void *arg, uint32_t worker)
{
    atomic_fetch_add(&((struct shared *)arg)->runs[worker], 1);
}

/* Pauses of random length between runs, so that workers are found spinning, asleep and in between. */
static void no_wake_up_is_lost(struct shared *s)
{
    for (uint32_t i = 0; i < 64; i++)
        atomic_store(&s->runs[i], 0);
    uint32_t r = 1;
    for (int i = 0; i < ROUNDS; i++) {
        pool_run(s->pool, count_run, s);
        r = r * 1664525u + 1013904223u;
        for (volatile uint32_t k = 0; k < (r >> 20) && i % 4 == 0; k++)
            ;
        if (i % 500 == 0)
            usleep(200);
    }
    bool right = true;
    for (uint32_t i = 0; i < pool_threads(s->pool); i++)
        right &= atomic_load(&s->runs[i]) == ROUNDS;
    ok(right, "20,000 runs with pauses between lose no wake-up");
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void idle_workers_sleep(struct shared *s)
{
    pool_run(s->pool, count_run, s);
    usleep(20000);
    double before = cpu_seconds();
    usleep(200000);
    ok(cpu_seconds() - before < 0.01, "idle workers use no processor time");
}

static void there_are_never_more_threads_than_cpus(void)
{
    struct pool *p = NULL;
    cpu_set_t before, now, one;
    ok(pool_create(&p, 1000, false) == OK && pool_threads(p) <= sysconf(_SC_NPROCESSORS_ONLN),
       "1,000 threads asked: not more than there are CPUs");
    pool_destroy(p);
    sched_getaffinity(0, sizeof before, &before);
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++)
        if (CPU_ISSET(i, &before))
            CPU_SET(i, &one);
    sched_setaffinity(0, sizeof one, &one);
    ok(pool_create(&p, 0, false) == OK && pool_threads(p) == 1,
       "a process bound to one CPU gets one thread");
    pool_destroy(p);
    sched_setaffinity(0, sizeof before, &before);
    ok(pool_create(&p, 0, true) == OK, "a pool may be pinned");
    pool_destroy(p);
    sched_getaffinity(0, sizeof now, &now);
    ok(CPU_EQUAL(&before, &now), "closing a pinned pool frees its caller again");
}

int main(void)
{
    static struct shared s;
    if (pool_create(&s.pool, 0, false) != OK) {
        printf("Bail out! %s\n", err_text());
        return 1;
    }
    every_worker_runs_and_every_item_is_taken_once(&s);
    nobody_passes_a_barrier_early(&s);
    items_start_again_after_a_rewind(&s);
    no_wake_up_is_lost(&s);
    idle_workers_sleep(&s);
    pool_destroy(s.pool);
    there_are_never_more_threads_than_cpus();
    return tap_done();
}
