/* The thread pool of the CPU backend. The engine thread is worker 0; workers spin a little between
 * operations and sleep on a futex when no step runs. */
#ifndef KERNELS_CPU_POOL_H
#define KERNELS_CPU_POOL_H

#include "kernels/base.h"

struct pool;

status pool_create(struct pool **out, uint32_t n_threads,
                   bool pin); /* 0: usable CPUs, cgroup-aware */
void pool_destroy(struct pool *p);
uint32_t pool_threads(const struct pool *p);

/* Runs fn(arg, worker) once on every worker, 0 .. n - 1, and returns when all are done. */
void pool_run(struct pool *p, void (*fn)(void *arg, uint32_t worker), void *arg);

/* Inside fn: work items [0, n_items) are handed out in order; the next one, or n_items when there are
 * no more. pool_run resets the counter before fn starts. */
uint32_t pool_next(struct pool *p, uint32_t n_items);

/* Inside fn: every worker has come here before any goes on. */
void pool_barrier(struct pool *p, uint32_t worker);

/* After a barrier inside one fn, worker 0 may reset the counter, followed by another barrier. */
void pool_rewind(struct pool *p);

#endif
