/* Whose the sequences are: what each tenant is entitled to, what it has, and its virtual token counter. Engine
 * thread only; no clocks, no messages, no blocks: the scheduler counts here and asks here (sched.h).
 *
 * The counter `served` is that of VTC (Sheng et al., Fairness in Serving Large Language Models, arXiv 2401.00588): a
 * row of a prompt that is computed costs 1, a token of an answer 2, each divided by the tenant's weight. Rows that
 * the prefix cache had are free, and so is what a preemption makes us compute again: that is our doing, not
 * service. Who has the smallest counter goes first. Nothing is taken from anybody for it: where one tenant alone
 * wants the machine, it has it.
 *
 * Two departures from the paper. It charges a prompt when it is admitted; we charge rows when they are computed, since
 * a step may fail and a request be cancelled, and reckon at admission with the rows that those who run have
 * still to compute (`pending`). And a tenant's requests go by priority, then by order.
 *
 * Of two tenants that always want something neither is served more than 2 max(L, 2 M) ahead of the other, with prompts
 * of at most L rows and M rows of blocks (their theorem 4.4). So that who wants nothing saves nothing up, the
 * counter of a tenant that had no sequence and gets one is lifted to the smallest of those that have some, or,
 * where nobody has, to that of whoever had one last. The paper looks at who waits in the queue; here a request
 * that is seated waits as well, for rows of steps. And a tenant that always has a little, which is never idle,
 * is lifted to `unit`, max(L, 2 M), below the smallest of the others: by the theorem nobody who waited all the time
 * is farther behind.
 *
 * Only tenant 0 exists unless the API says otherwise. Numbers are the API's to give (MAX_TENANTS, message.h). */
#ifndef ENGINE_TENANT_H
#define ENGINE_TENANT_H

#include "engine/sequence.h"

enum {
    TENANT_PROMPT_COST = 1, /* of a row, */
    TENANT_OUTPUT_COST = 2, /* of a token */
    TENANT_TELL_US = 100000 /* between two times that a busy tenant's state is told */
};
enum { TENANT_NO_BOUND = UINT32_MAX };

struct tenant {
    /* What it is entitled to. */
    double weight;          /* > 0 */
    uint32_t max_running;   /* sequences; TENANT_NO_BOUND */
    uint32_t max_blocks[2]; /* by tier; TENANT_NO_BOUND */
    bool counted;           /* its weight is in total_weight */
    bool told;              /* somebody said what it is entitled to */
    /* What it has. */
    uint32_t n_running, n_waiting, n_paused; /* sequences; paused ones are waiting, too */
    uint32_t paused_blocks,
        paused_claims;  /* in DRAM, of paused ones: blocks, and what they may become */
    uint32_t blocks[2]; /* by tier, when residence_weigh looked last */
    double served;
    uint64_t pending; /* rows of prompts that run and are not computed yet; valid while admitting */
    uint64_t prompt_tokens, output_tokens, cached_tokens, preemptions; /* since start */
    bool changed;                                                      /* since it was told of; */
    uint64_t told_us;                                                  /* when that was */
};

struct tenants {
    struct tenant *of; /* [MAX_TENANTS] */
    uint32_t *active;  /* [n_active] those that have sequences */
    uint32_t *changed; /* [n_changed] */
    uint32_t n_active, n_changed;
    uint32_t n_told;     /* how many somebody told of */
    uint32_t last;       /* who became idle last */
    double unit;         /* weighted tokens that one may be ahead of another. The owner's to set */
    double total_weight; /* of all that were told of or ever had a sequence */
};

void tenants_init(struct tenants *ts, double unit);
void tenants_fini(struct tenants *ts);

struct tenant_bounds {
    double weight;          /* > 0 */
    uint32_t max_running;   /* TENANT_NO_BOUND: none */
    uint32_t max_blocks[2]; /* by tier, the same */
};
/* From now on. */
void tenants_entitle(struct tenants *ts, uint32_t t, const struct tenant_bounds *b);

/* A sequence of it comes (WAITING), and goes from one state to the next. */
void tenants_arrive(struct tenants *ts, uint32_t t);
void tenants_move(struct tenants *ts, uint32_t t, enum sequence_state from, enum sequence_state to);

/* Rows of a prompt were computed for the first time, tokens of an answer drawn. */
void tenants_charge(struct tenants *ts, uint32_t t, uint32_t prompt_rows, uint32_t output_tokens);
/* Rows that were found, and need not be computed; a sequence has to be computed again. */
void tenants_count_cached(struct tenants *ts, uint32_t t, uint32_t rows);
void tenants_count_preemption(struct tenants *ts, uint32_t t);

/* Its counter as if what is pending were computed. */
double tenants_reckoned(const struct tenants *ts, uint32_t t);
/* Of the machine, by weight, among all that there are. */
double tenants_share(const struct tenants *ts, uint32_t t);
/* The same, among those that have sequences; it has. */
double tenants_share_now(const struct tenants *ts, uint32_t t);

/* The next tenant that should be told of, at or behind changed[*i], which the caller sets to 0 first; false: no more.
 * Each at most once in TENANT_TELL_US, and at once when it has become idle. It counts as told then. */
bool tenants_next_due(struct tenants *ts, uint64_t now_us, uint32_t *i, uint32_t *t);

#endif
