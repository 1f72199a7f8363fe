/* What the loop thread and the engine thread say to each other: flat messages, no pointers, so that
 * the engine can live in its own process one day. A message is one of these structs, followed by
 * its arrays in the order named; every message is a multiple of 8 bytes (mailbox.h).
 *
 * A request id is chosen by the API, unique for the life of the process and never 0. After a
 * sequence's MSG_DONE the engine never mentions its id again; every accepted MSG_SUBMIT gets
 * exactly one MSG_DONE. */
#ifndef ENGINE_MESSAGE_H
#define ENGINE_MESSAGE_H

#include "kernels/backend.h"
#include "sparse/plugin.h"

enum message_kind {
    /* loop -> engine */
    MSG_SUBMIT = 1,
    MSG_CANCEL,
    MSG_QUIT,
    MSG_TENANT,
    /* engine -> loop */
    MSG_SCHEDULED,
    MSG_TOKEN,
    MSG_PROMPT,
    MSG_DONE,
    MSG_STEP,
    MSG_TENANT_STATE,
    MSG_FAILED, /* the engine thread has ended: nothing more comes; text in msg_failed */
};

struct msg_head {
    uint32_t kind;
    uint32_t bytes; /* of the whole message, head included; multiple of 8 */
};

/* One sequence to generate. Arrays follow: uint32_t prompt[n_prompt], uint32_t stop_ids[n_stop],
 * uint32_t bias_ids[n_bias], float bias[n_bias]. stop_ids holds the request's stop_token_ids and,
 * unless ignore_eos was asked, the model's end tokens: a sampled one ends the sequence.
 * While output is shorter than min_tokens, the ids in stop_ids are banned. */
struct msg_submit {
    struct msg_head head;
    uint64_t id;
    uint64_t
        leader; /* siblings of one prompt (n > 1): id of choice 0, which prefills first; 0: none */
    uint64_t salt[2];    /* of the prefix cache: hash of tenant and cache_salt */
    uint64_t arrival_us; /* clock_us() when the request's first byte came */
    struct sample_params params;
    uint32_t n_prompt, n_stop, n_bias;
    uint32_t max_tokens; /* 0: score the prompt only */
    uint32_t min_tokens;
    int32_t logprobs;        /* -1: none, else top n */
    int32_t prompt_logprobs; /* -1: none, else top n: turns prefix hits off for this sequence */
    uint32_t
        n_filled; /* `spind bench`, never the API: so many first positions of the prompt get random K
                          and V instead of computed ones; less than n_prompt */
    uint32_t tenant;  /* whose it is; 0 without tenants */
    int32_t priority; /* inside its tenant: the smaller goes first, as vLLM has it */
    uint32_t pad;
    struct sparse_choice sparse; /* validated by the API; zeros: dense */
};

struct msg_cancel {
    struct msg_head head;
    uint64_t id;
};

struct msg_quit {
    struct msg_head head;
};

/* What a tenant is entitled to, from now on. A tenant that was never told of has weight 1 and no bounds. Tenants are
 * small numbers, which the API gives out and takes back (engine/tenant.h). */
enum { MAX_TENANTS = 1024 };
struct msg_tenant {
    struct msg_head head;
    uint32_t tenant;
    float
        weight; /* > 0: its share of rows, of hot sets and of the bus where others want them, too */
    uint32_t max_running; /* sequences at a time; 0: no bound */
    uint32_t pad;
    uint64_t max_kv_bytes[2]; /* by tier, HBM and DRAM; 0: no bound */
};

/* The sequence left the queue and will be computed: its queue timeout no longer applies. Sent once,
 * before anything else about it (a preemption later does not repeat it). */
struct msg_scheduled {
    struct msg_head head;
    uint64_t id;
    uint32_t n_cached, pad; /* n_cached: prompt tokens found in the prefix cache */
};

/* A sampled token. sample_top top[n_top] follows. */
struct msg_token {
    struct msg_head head;
    uint64_t id;
    uint32_t token, index; /* index: 0 for the first output token */
    uint32_t rank;
    float logprob;           /* valid if logprobs were asked */
    uint32_t n_top;          /* entries that follow */
    uint32_t n_light_misses; /* pages that this token had estimated for being absent */
    bool planned;            /* it attended what its plug-in selected, not everything */
    uint8_t pad[7];
};

/* Log-probability of prompt token `index` (from 1: the first has none). sample_top top[n_top]
 * follows. They arrive in order, before the first MSG_TOKEN. */
struct msg_prompt {
    struct msg_head head;
    uint64_t id;
    uint32_t token, index, rank;
    float logprob;
    uint32_t n_top, pad;
};

enum done_reason {
    DONE_STOP,      /* a token of stop_ids: stop_token names it */
    DONE_LENGTH,    /* max_tokens */
    DONE_CANCELLED, /* MSG_CANCEL */
    DONE_NUMERIC,   /* a non-finite logit: this sequence only */
    DONE_DEVICE,    /* the step failed */
    DONE_REFUSED,   /* with a text: this process can never hold it; without: not now */
};

struct msg_done {
    struct msg_head head;
    uint64_t id;
    uint32_t reason; /* enum done_reason */
    uint32_t stop_token;
    uint32_t n_prompt, n_output; /* tokens */
    uint32_t n_cached;           /* prompt tokens found in the prefix cache at first admission */
    uint32_t n_preempted;        /* times it was preempted */
    uint64_t submitted_us, scheduled_us, first_us, last_us; /* engine's clock; 0: never happened */
    char text[256]; /* DONE_REFUSED for good: why, and what to set; else empty */
};

/* What lies where, for /metrics (cache/kv.h names the terms). */
struct msg_residence {
    uint64_t resident, spilled, paused; /* sequences */
    uint64_t spills, restores, pauses;
    uint64_t moved_down, moved_up, written_behind;                /* blocks copied */
    uint64_t page_hits, page_misses, light_misses, fetched_bytes; /* of hot sets */
    uint64_t leaf_bytes, index_bytes, digest_bytes, map_bytes;    /* in use now */
    uint64_t segments_sealed, segments_found; /* computed; taken over from the prefix index */
    uint64_t truncated_selections;            /* always 0: what does not fit is not admitted */
    uint64_t unscored_selections;             /* the plug-in gave no score: first pages taken */
    uint64_t planned_rows;                    /* rows that attended by plan */
    uint64_t hot_slots;                       /* HBM blocks granted to hot sets now */
    uint64_t by_layers;                       /* prompts whose reading layer by layer began */
    uint64_t layers_permille; /* how much of the one that is read so now is done; 0: none is */
    uint64_t dram_ready;      /* bytes of the DRAM tier that may be used by now */
    uint64_t dram_grows;      /* 1: there will be more */
};

/* After every step, and once at start: the state of the engine. Counters are totals since start. */
struct msg_step {
    struct msg_head head;
    uint64_t now_us, steps;
    uint64_t step_us; /* duration of this step */
    uint64_t
        host_us; /* of the engine thread's own, from the end of the step before to this one's: all but waiting
                         for the device, and for work */
    struct step_counts counts;              /* the backend's; zeros: it counts nothing */
    uint64_t prompt_tokens, output_tokens;  /* computed in all; prompt tokens without cache hits */
    uint64_t cached_tokens, queried_tokens; /* prefix cache, one query per sequence */
    uint64_t preemptions;                   /* freed and computed again; a pause is not one */
    uint64_t blocks_total[2], blocks_free[2]; /* SPARSE blocks by tier: HBM, DRAM */
    uint64_t blocks_cached[2];                /* held by the prefix index alone */
    uint64_t table_bytes;
    struct msg_residence residence;
    uint32_t running, waiting;
    uint32_t step_tokens; /* rows of this step */
    uint32_t step_decodes;
};

/* What a tenant has now, and had so far. Behind a MSG_STEP, for tenants that something changed of, now and then. */
struct msg_tenant_state {
    struct msg_head head;
    uint32_t tenant;
    uint32_t running, waiting, paused; /* sequences; paused ones are waiting, too */
    uint64_t kv_bytes[2]; /* by tier; what several of its sequences share counts for each */
    uint64_t prompt_tokens, output_tokens, cached_tokens; /* computed; found */
    uint64_t preemptions;
    double served; /* its virtual token counter (engine/tenant.h) */
};

struct msg_failed {
    struct msg_head head;
    char text[248];
};

#endif
