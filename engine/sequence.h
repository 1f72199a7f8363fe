/* One running generation: its tokens, its blocks, where it is. Owned by the engine thread.
 *
 * `tokens` holds prompt and output together; `n_computed` of them have K and V in blocks. What is
 * left to compute is one token while decoding, more while prefilling; a preempted sequence starts
 * again from nothing with the same tokens, so preemption and prefill are one path. A sequence that attends
 * by plan computes its prompt densely and everything behind it by plan, the second time too. */
#ifndef ENGINE_SEQUENCE_H
#define ENGINE_SEQUENCE_H

#include "engine/attention.h"
#include "engine/message.h"

enum sequence_state {
    SEQUENCE_WAITING, /* no blocks; in the queue */
    SEQUENCE_PAUSED,  /* all blocks in DRAM; in the queue */
    SEQUENCE_RUNNING, /* open in the cache */
    SEQUENCE_DONE,    /* MSG_DONE sent; about to be freed */
};

struct sequence {
    uint64_t id, leader; /* leader 0: none */
    uint64_t order;      /* of submission: larger is younger */
    uint32_t tenant;     /* whose it is (engine/tenant.h) */
    int32_t priority;    /* inside its tenant: the smaller goes first */
    enum sequence_state state;
    struct sequence *next, *prev;    /* in the waiting queue */
    struct sequence *next_in_bucket; /* in the id table */
    struct kv_seq kv;

    uint32_t *tokens; /* [max_rows] prompt, then output */
    uint32_t n_prompt, n_tokens, n_computed;
    uint32_t max_tokens, min_tokens;
    uint32_t n_scored;    /* prompt tokens whose log-probability was reported, the first counted */
    uint32_t n_scheduled; /* rows of the step being planned or run */
    uint32_t n_wanted;    /* rows for which room is being made, while it is */
    uint32_t n_filled;    /* of the prompt: positions with random K and V (msg_submit) */
    uint32_t n_charged;   /* leading positions that the tenant was charged for, or found */
    uint32_t paused[2];   /* while PAUSED: DRAM blocks that it has, and that it may come to have */
    uint64_t passed_rows; /* of its tenant's younger prompts, in steps in which it got none */

    struct sample_params params;
    int32_t logprobs, prompt_logprobs; /* -1: none */
    const uint32_t *stop_ids;          /* [n_stop] */
    const uint32_t *bias_ids;          /* [n_bias] */
    const float *bias;
    uint32_t n_stop, n_bias;
    uint64_t salt[2];
    bool is_proven;  /* a finite logit was seen behind the prompt since these rows were computed */
    bool is_private; /* alone it has no room for copies: no hits, and nothing is offered */
    bool is_stuck;   /* alone and private it did not get on: refused instead of opened again */
    bool
        was_seen; /* the cache was asked for its prompt: that counts as a use once, however long it waits */
    struct sparse_choice sparse; /* zeros: dense */
    /* What follows from it and from the length (never from load) at submission; NULL: dense. */
    const struct sparse_instance *in; /* held: attention_release */
    struct attention_seq *keeps;
    struct layer_major *layers; /* its prompt is being read layer by layer; NULL: it is not */
    bool by_chunks;             /* that was tried, and there was no room for it */
    bool waits_for_layers;      /* it is to be read so, when nobody else is */
    uint32_t n_light_misses;    /* of the step just run, for MSG_TOKEN */
    bool planned;               /* so was the step just run */

    uint32_t n_cached, n_preempted;
    uint64_t submitted_us, scheduled_us, first_us, last_us;
};

/* Copies the message with its arrays into one piece of memory; NULL: no memory. */
struct sequence *sequence_create(const struct msg_submit *m, uint64_t order, uint64_t now_us);
/* Its blocks must be closed. at: what its instance is from; NULL where it has none. */
void sequence_destroy(struct sequence *s, struct attention *at);

static inline uint32_t sequence_n_output(const struct sequence *s)
{
    return s->n_tokens - s->n_prompt;
}

static inline uint32_t sequence_left(const struct sequence *s)
{
    return s->n_tokens - s->n_computed;
}

/* A row that only extends an answer, as opposed to a piece of a prompt. */
static inline bool sequence_decodes(const struct sequence *s)
{
    return sequence_left(s) == 1 && sequence_n_output(s) > 0;
}

/* By priority, then by order of submission. */
static inline bool sequence_goes_before(const struct sequence *a, const struct sequence *b)
{
    return a->priority != b->priority ? a->priority < b->priority : a->order < b->order;
}

/* Its next rows are not computed but made up. */
static inline bool sequence_fills(const struct sequence *s)
{
    return s->n_computed < s->n_filled;
}

static inline bool sequence_scores_prompt(const struct sequence *s)
{
    return s->prompt_logprobs >= 0 && s->n_scored < s->n_prompt;
}

#endif
