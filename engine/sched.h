/* The scheduler: which sequences compute which rows in the next step. Engine thread only.
 *
 * Decode first: every running answer gets its row. What is left of the step's rows goes to prompts
 * in chunks, the shortest remainder first; one that younger prompts have overtaken MAX_BYPASS times
 * is served before those that were not, oldest first. So a long prompt delays running answers by at
 * most one chunk, short prompts pass long ones, and none waits for ever.
 *
 * Blocks: a sequence is admitted when its prompt and a first stretch of output fit beside what those
 * already running will still need by the same rule. Running sequences that outgrow the arena preempt
 * the youngest, which goes back to its place in the queue with its tokens. Who was preempted
 * MAX_PREEMPTIONS times comes back only when its whole length fits, counts with its whole length
 * from then on, and is not preempted again: so preemptions are bounded, and everything ends. */
#ifndef ENGINE_SCHED_H
#define ENGINE_SCHED_H

#include "engine/sequence.h"

enum {
    SCHED_MAX_BYPASS = 8,
    SCHED_MAX_PREEMPTIONS = 2,
    SCHED_FIRST_OUTPUT = 256, /* output tokens whose blocks must be there at admission */
    SCHED_SCORED_ROWS = 64,   /* prompt rows per step whose logits are wanted (prompt_logprobs) */
};

enum { SCHED_NOT_BLOCKED = UINT32_MAX };

struct sched {
    struct kv *kv;
    uint32_t max_seqs, max_rows; /* per step */
    bool prefix_caching;
    struct sequence *first, *last; /* waiting, in order of submission */
    struct sequence **running;     /* [n_running], in order of admission */
    struct sequence **plan;        /* [n_plan] of running: in the step, decodes first */
    uint32_t n_running, n_waiting, n_plan;
    uint32_t plan_rows, plan_decodes;
    struct sequence **buckets; /* id table */
    uint32_t n_buckets;
    uint32_t n_sequences;
    uint32_t blocked_at; /* kv_available when the queue's head last did not fit; NOT_BLOCKED */
    uint64_t preemptions, queried_tokens, cached_tokens;
};

void sched_init(struct sched *s, struct kv *kv, uint32_t max_seqs, uint32_t max_rows,
                bool prefix_caching);
void sched_fini(struct sched *s); /* destroys every sequence */

void sched_submit(struct sched *s, struct sequence *q);
struct sequence *sched_find(const struct sched *s, uint64_t id); /* NULL: unknown */
/* Takes it out of queue and table, closes its blocks, state DONE. The caller destroys it. */
void sched_remove(struct sched *s, struct sequence *q);

/* Decides the next step: plan[] and every member's n_scheduled > 0. Admits and preempts as needed.
 * Sequences that could not be opened at all (no memory, larger than the arena) are handed to
 * refuse(arg, q), which must remove them. Returns false if there is nothing to compute. */
bool sched_plan(struct sched *s, uint64_t now_us, void (*admitted)(void *arg, struct sequence *q),
                void (*refuse)(void *arg, struct sequence *q), void *arg);

#endif
