/* An engine under measurement: opened as the daemon opens it, spoken to through its mailbox as the daemon
 * speaks, on the calling thread. What is measured is the engine's own step, with its scheduler, its
 * sampling and its messages; HTTP alone is missing. */
#ifndef ENGINE_TOOL_BENCH_RUN_H
#define ENGINE_TOOL_BENCH_RUN_H

#include "engine/engine.h"

#include <semaphore.h>

struct bench_run {
    struct engine *engine;
    const struct engine_info *info;
    struct mailbox *mail;
    uint64_t last_id;
    sem_t woken;
};

/* One sequence to run. Prompts are random ids. */
struct bench_ask {
    uint32_t n_prompt;
    uint32_t n_filled; /* of them, positions with random K and V; 0: all are computed */
    uint32_t max_tokens;
    uint32_t feed; /* > 0: answers are drawn from so many ids, all alike; 0: greedy */
    uint64_t seed;
    struct sparse_choice sparse;
};

status bench_run_open(struct bench_run *r, const struct engine_config *cfg);
void bench_run_close(struct bench_run *r);
uint64_t bench_run_submit(struct bench_run *r, const struct bench_ask *a); /* its id, from 1 on */
void bench_run_cancel(struct bench_run *r, uint64_t id);
/* Hands messages to hear until it returns true. ERR_DEVICE: the engine ended; ERR_GONE: nothing came for
 * patience_s. */
typedef bool bench_hearer(void *arg, const struct msg_head *h);
status bench_run_listen(struct bench_run *r, bench_hearer *hear, void *arg, uint32_t patience_s);

#endif
