/* What a tenant may use, and what it has used: arithmetic alone, with the clock passed in.
 *
 * Requests, input and output tokens per minute are token buckets: one minute's worth when full, refilled
 * continuously. Output is charged before it exists, by an estimate, and put right at the end; so a level
 * may go below zero, and is then paid off before anything else passes. What waits and what runs are plain
 * counts, kept by whoever moves sequences (api/call.c). Loop thread. */
#ifndef API_QUOTA_H
#define API_QUOTA_H

#include "kernels/base.h"

enum quota_limit {
    QUOTA_REQUESTS,
    QUOTA_INPUT,
    QUOTA_OUTPUT,
    QUOTA_BUCKETS, /* of the kinds before, one bucket each */
    QUOTA_SEQUENCES = QUOTA_BUCKETS,
    QUOTA_QUEUED_TOKENS,
    QUOTA_LIMITS
};

struct quota_limits {                   /* everywhere 0: no limit */
    uint64_t per_minute[QUOTA_BUCKETS]; /* requests, prompt tokens, generated tokens */
    uint32_t max_running;               /* sequences; the engine holds to it */
    uint32_t max_queued;                /* sequences beyond those that run */
    uint64_t max_queued_tokens;         /* prompt tokens of sequences that wait */
};

struct quota {
    struct quota_limits limits;
    double level[QUOTA_BUCKETS]; /* what is left of this minute's worth; below 0: debt */
    uint64_t then_us;            /* when the levels were brought up to date */
    double mean_answer;          /* tokens of recent answers, one sequence each */
    uint32_t n_running, n_queued;
    uint64_t queued_tokens;
};

/* What one request wants. */
struct quota_need {
    uint64_t amount[QUOTA_BUCKETS];
    uint32_t sequences;
    uint64_t queued_tokens;
};

struct quota_refusal {
    enum quota_limit which;
    uint64_t limit, used, requested;
    uint64_t wait_us; /* until it would pass; 0: nobody knows */
    bool never;       /* larger than the limit itself */
};

void quota_init(struct quota *q, const struct quota_limits *l, uint64_t now_us); /* full */
/* New limits, at a reload: nothing is given back, nothing is taken. */
void quota_change(struct quota *q, const struct quota_limits *l, uint64_t now_us);

/* True: it may pass; nothing is charged yet. slots: sequences that the engine runs at a time, for a tenant
 * without max_running. False: *why is the limit that takes longest. */
bool quota_admits(struct quota *q, const struct quota_need *n, uint32_t slots, uint64_t now_us,
                  struct quota_refusal *why);
/* Of a sequence that may have max_tokens: no more than twice the recent mean. */
uint64_t quota_estimate(const struct quota *q, uint32_t max_tokens);
void quota_take(struct quota *q, enum quota_limit b, uint64_t amount, uint64_t now_us);
void quota_give_back(struct quota *q, enum quota_limit b, uint64_t amount, uint64_t now_us);
/* An answer of `made` tokens is over, for which `charged` were taken. */
void quota_settle(struct quota *q, uint64_t charged, uint64_t made, uint64_t now_us);
/* A sequence of so many tokens is over: for later estimates. */
void quota_learn(struct quota *q, uint64_t answer_tokens);

const char *quota_name(enum quota_limit which); /* "output tokens" */

/* x-ratelimit-* lines for what is limited, or "". */
enum { QUOTA_HEADER_BYTES = 400 };
void quota_headers(struct quota *q, uint64_t now_us, char out[QUOTA_HEADER_BYTES]);
/* A duration as Go prints it: "6m0s", "1.5s", "120ms", "0s". */
enum { QUOTA_DURATION_BYTES = 32 };
void quota_duration(uint64_t us, char out[QUOTA_DURATION_BYTES]);

#endif
