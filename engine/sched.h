/* The scheduler: which sequences compute which rows in the next step. Engine thread only.
 *
 * Decode first: every running answer gets its row. What is left of the step's rows goes to prompts
 * in chunks, the shortest remainder first; one that younger prompts have passed with as many rows as it
 * has, and with MAX_BYPASS steps' rows at least, is served before the others, oldest first. So a long
 * prompt delays running answers by at most one chunk, short prompts pass long ones, and none waits for
 * ever. Where the device has chunks of its own (`whole`), large ones and answers take turns: a step of answers,
 * with short prompts, then one of prompts alone. A step has at most SPILLED_CHUNKS chunks of SPILLED
 * sequences: those of many conversations that come back at once would hold the first token of each until all
 * of them are read from DRAM.
 *
 * A prompt that HBM cannot hold is read layer by layer (layer_major.h), a unit of it behind each step's rows, several
 * where there are none, and the last one in a step of its own. The same rule for younger prompts holds.
 *
 * Blocks: a sequence is admitted when its prompt and a first stretch of output fit beside what those
 * already running will still need by the same rule; or, where sequences attend by plan, when all of
 * them can live with what they cannot do without. Running sequences that outgrow HBM are spilled, then
 * paused, then preempted (engine/residence.h): who is preempted goes back to its place in the queue with
 * its tokens. Who was preempted MAX_PREEMPTIONS times comes back only when its whole length fits, counts
 * with its whole length from then on, and is not preempted again: so preemptions are bounded, and
 * everything ends.
 *
 * Tenants (tenant.h): admission takes them by their counters, the smallest first, and inside a tenant by priority,
 * then by order; prompts of several go in the same order of counters. A tenant at a bound of its own is passed over;
 * who does not fit for want of common room holds back everybody. Where somebody told of two tenants at least,
 * there is a reserve: who has more than its share by weight of the seats or of HBM is admitted only while an
 * eighth of both stays free behind it. Counters alone say who is next, not when: nobody is preempted for a newcomer,
 * so one tenant's long answers in all seats would hold up another's first token until one of them ends. With the
 * reserve a quiet tenant finds a seat whenever it comes, for an eighth of the machine at most, and only while
 * nobody within its share wants it. What those that run grow by is not held back by it.
 *
 * Sealing (cache/kv.h): no step of a sequence that attends by plan crosses a border, nor the end of its
 * prompt; what is due is sealed before the first row behind the border. On a loose backend rows of the
 * prompt, which attend everything, do cross borders where HBM has room for them: only the order of their
 * sums can tell. Several rows that attend by plan go in one step only when a RESIDENT sequence computes
 * again what it had before a preemption. */
#ifndef ENGINE_SCHED_H
#define ENGINE_SCHED_H

#include "engine/queue.h"
#include "engine/tenant.h"

enum {
    SCHED_MAX_BYPASS = 8, /* steps full of younger prompts pass even a short one */
    SCHED_MAX_PREEMPTIONS = 2,
    SCHED_FIRST_OUTPUT = 256, /* output tokens whose blocks must be there at admission */
    SCHED_SCORED_ROWS = 64,   /* prompt rows per step whose logits are wanted (prompt_logprobs) */
    SCHED_SPILLED_CHUNKS = 1, /* prompt chunks per step that read what is before them from DRAM */
    SCHED_RESERVE = 8, /* 1/RESERVE of seats and of HBM blocks is for tenants within their share */
};

enum { SCHED_NOT_BLOCKED = UINT32_MAX };

struct sched {
    struct kv *kv;
    struct attention *at;        /* seals; NULL: nothing attends by plan */
    uint32_t max_seqs, max_rows; /* per step */
    /* Chunks of prompts that the device is quickest with: so many rows from a multiple of them on. Then prompts have so
     * many rows of a step, whatever decodes beside them, and max_rows has room for both. The owner's to set; 0: any. */
    uint32_t whole;
    bool prompts_turn; /* a chunk had to wait for a step without answers: the next one */
    bool prefix_caching;
    struct queue queue; /* who waits */
    struct tenants tenants;
    struct sequence **running; /* [n_running], in order of admission */
    struct sequence **plan;    /* [n_plan] of running: in the step, decodes first */
    uint32_t n_running, n_plan;
    uint32_t plan_rows, plan_decodes;
    struct sequence *deep; /* whose prompt is read layer by layer (layer_major.h); NULL: nobody's */
    uint32_t plan_units;   /* of it, behind the plan's rows */
    uint64_t n_deep;       /* there were so far */
    size_t row_bytes;      /* of the residual stream. The owner's to set; 0: never layer by layer */
    bool plan_fills; /* the step makes rows up and computes nothing: no other sequences are in it */
    uint32_t blocked_at;      /* kv_available when the queue's head last did not fit; NOT_BLOCKED */
    uint32_t blocked_dram;    /* kv_dram_available then */
    uint32_t blocked_tenant;  /* whose it is, */
    int32_t blocked_priority; /* and its priority */
    status why_refused;       /* of the last sequence that was */
    uint64_t preemptions, queried_tokens, cached_tokens;

    /* residence.c */
    uint64_t n_steps;               /* since start: planned, or launched ahead */
    uint64_t spilled_at, looked_at; /* when the last spill was; when budgets were last looked at */
    uint64_t n_retired;             /* times somebody running had to go, one way or another */
    uint64_t segments_sealed, segments_found;
    double headroom; /* most predicted time to fetch misses, as a share of step_us; 0: off */
    bool loose;      /* the backend's */
    double fetch_us, step_us;    /* per byte of a page; a step's, lately. The owner measures */
    struct budget_claim *claims; /* [max_seqs] scratch */
};

void sched_init(struct sched *s, struct kv *kv, struct attention *at, uint32_t max_seqs,
                uint32_t max_rows, bool prefix_caching);
void sched_fini(struct sched *s); /* destroys every sequence */
/* Most rows that prompts have in a step. */
uint32_t sched_chunk(const struct sched *s);

void sched_submit(struct sched *s, struct sequence *q);
struct sequence *sched_find(const struct sched *s, uint64_t id); /* NULL: unknown */
/* Takes it out of queue and table, closes its blocks, state DONE. The caller destroys it. */
void sched_remove(struct sched *s, struct sequence *q);

/* Decides the next step: plan[] and every member's n_scheduled > 0. Admits, spills, pauses and preempts
 * as needed. Sequences that could not be opened at all are handed to refuse(arg, q, why), which must remove
 * them: ERR_FULL, larger than the arenas can ever hold; ERR_MEMORY; the text is in err_text(). Returns
 * false if there is nothing to compute. */
bool sched_plan(struct sched *s, uint64_t now_us, void (*admitted)(void *arg, struct sequence *q),
                void (*refuse)(void *arg, struct sequence *q, status why), void *arg);

/* So many rows of q, from position `from` on, have been computed, and a token of its answer drawn, or not: its
 * tenant is charged for what it was not charged for before. Not where the step failed. */
void sched_charge(struct sched *s, struct sequence *q, uint32_t from, uint32_t rows, bool token);

/* For admit.c: the one door of sequence states. WAITING -> RUNNING -> WAITING (preempted) or PAUSED -> RUNNING or
 * WAITING (preempted after all), any -> DONE. */
void sched_move(struct sched *s, struct sequence *q, enum sequence_state to);

/* For residence.c: takes it out of the step being planned, ... */
void sched_unplan(struct sched *s, const struct sequence *q);
/* ... and out of the running ones: PAUSED keeps its blocks (the caller paused them), WAITING gives them
 * up and counts as a preemption. */
void sched_retire(struct sched *s, struct sequence *q, enum sequence_state to);
bool sched_is_pinned(const struct sequence *q);

/* Rows of q that attend by plan in a step from its n_computed on; false: they attend everything. */
static inline bool sched_attends_by_plan(const struct sequence *q)
{
    return q->in != NULL && q->kv.n_segments > 0 && q->n_computed >= q->n_prompt;
}

#endif
