/* Token buckets and their words (quota.h). */
#include "api/quota.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#define MINUTE_US 60e6

/* Before anything is known of a tenant its answers are taken for so long; later ones count a sixteenth. */
enum { FIRST_MEAN = 256, MEAN_OF = 16 };

static double capacity(const struct quota *q, enum quota_limit b)
{
    return (double)q->limits.per_minute[b];
}

static double least(double a, double b)
{
    return a < b ? a : b;
}

static void refill(struct quota *q, uint64_t now_us)
{
    if (now_us <= q->then_us)
        return;
    double minutes = (double)(now_us - q->then_us) / MINUTE_US;
    for (int b = 0; b < QUOTA_BUCKETS; b++)
        q->level[b] = least(capacity(q, b), q->level[b] + minutes * capacity(q, b));
    q->then_us = now_us;
}

void quota_init(struct quota *q, const struct quota_limits *l, uint64_t now_us)
{
    *q = (struct quota){.limits = *l, .then_us = now_us, .mean_answer = FIRST_MEAN};
    for (int b = 0; b < QUOTA_BUCKETS; b++)
        q->level[b] = capacity(q, b);
}

void quota_change(struct quota *q, const struct quota_limits *l, uint64_t now_us)
{
    refill(q, now_us);
    for (int b = 0; b < QUOTA_BUCKETS; b++) {
        bool was_limited = q->limits.per_minute[b] > 0;
        q->limits.per_minute[b] = l->per_minute[b];
        q->level[b] = was_limited ? least(q->level[b], capacity(q, b)) : capacity(q, b);
    }
    q->limits = *l;
}

static uint64_t whole(double v)
{
    return v <= 0 ? 0 : (uint64_t)v;
}

static bool bucket_passes(const struct quota *q, enum quota_limit b, uint64_t amount,
                          struct quota_refusal *why)
{
    double most = capacity(q, b), short_of = (double)amount - q->level[b];
    if (most == 0 || amount == 0 || short_of <= 0)
        return true;
    *why = (struct quota_refusal){.which = b,
                                  .limit = q->limits.per_minute[b],
                                  .used = whole(ceil(most - q->level[b])),
                                  .requested = amount,
                                  .wait_us = (uint64_t)ceil(short_of / most * MINUTE_US),
                                  .never = amount > q->limits.per_minute[b]};
    return false;
}

static bool sequences_pass(const struct quota *q, const struct quota_need *n, uint32_t slots,
                           struct quota_refusal *why)
{
    uint64_t used = (uint64_t)q->n_running + q->n_queued;
    uint64_t run = q->limits.max_running > 0 ? q->limits.max_running : slots;
    uint64_t most = run + q->limits.max_queued;
    if (q->limits.max_queued == 0 || used + n->sequences <= most)
        return true;
    *why = (struct quota_refusal){.which = QUOTA_SEQUENCES,
                                  .limit = most,
                                  .used = used,
                                  .requested = n->sequences,
                                  .never = n->sequences > most};
    return false;
}

/* When nothing waits one request may be larger, or it could never be served. */
static bool queue_passes(const struct quota *q, const struct quota_need *n,
                         struct quota_refusal *why)
{
    uint64_t most = q->limits.max_queued_tokens;
    if (most == 0 || q->n_queued == 0 || q->queued_tokens + n->queued_tokens <= most)
        return true;
    *why = (struct quota_refusal){.which = QUOTA_QUEUED_TOKENS,
                                  .limit = most,
                                  .used = q->queued_tokens,
                                  .requested = n->queued_tokens};
    return false;
}

bool quota_admits(struct quota *q, const struct quota_need *n, uint32_t slots, uint64_t now_us,
                  struct quota_refusal *why)
{
    struct quota_refusal one;
    bool good = true;
    refill(q, now_us);
    for (int b = 0; b < QUOTA_BUCKETS; b++) {
        if (bucket_passes(q, b, n->amount[b], &one))
            continue;
        if (good || one.never > why->never ||
            (one.never == why->never && one.wait_us > why->wait_us))
            *why = one;
        good = false;
    }
    return good && sequences_pass(q, n, slots, why) && queue_passes(q, n, why);
}

uint64_t quota_estimate(const struct quota *q, uint32_t max_tokens)
{
    return whole(least(ceil(2 * q->mean_answer), max_tokens));
}

void quota_take(struct quota *q, enum quota_limit b, uint64_t amount, uint64_t now_us)
{
    refill(q, now_us);
    if (q->limits.per_minute[b] > 0)
        q->level[b] -= (double)amount;
}

void quota_give_back(struct quota *q, enum quota_limit b, uint64_t amount, uint64_t now_us)
{
    refill(q, now_us);
    q->level[b] = least(capacity(q, b), q->level[b] + (double)amount);
}

void quota_settle(struct quota *q, uint64_t charged, uint64_t made, uint64_t now_us)
{
    if (made > charged)
        quota_take(q, QUOTA_OUTPUT, made - charged, now_us);
    else
        quota_give_back(q, QUOTA_OUTPUT, charged - made, now_us);
}

void quota_learn(struct quota *q, uint64_t answer_tokens)
{
    q->mean_answer += ((double)answer_tokens - q->mean_answer) / MEAN_OF;
}

const char *quota_name(enum quota_limit which)
{
    static const char *const names[QUOTA_LIMITS] = {"requests", "input tokens", "output tokens",
                                                    "sequences in flight", "queued tokens"};
    return names[which];
}

void quota_duration(uint64_t us, char out[QUOTA_DURATION_BYTES])
{
    uint64_t ms = (us + 999) / 1000, s = ms / 1000;
    unsigned rest = (unsigned)(ms % 1000);
    char fraction[8] = "";
    if (s == 0 && rest > 0) {
        snprintf(out, QUOTA_DURATION_BYTES, "%ums", rest);
        return;
    }
    if (rest > 0) {
        int n = snprintf(fraction, sizeof fraction, ".%03u", rest);
        while (fraction[n - 1] == '0')
            fraction[--n] = '\0';
    }
    if (s < 60)
        snprintf(out, QUOTA_DURATION_BYTES, "%" PRIu64 "%ss", s, fraction);
    else
        snprintf(out, QUOTA_DURATION_BYTES, "%" PRIu64 "m%" PRIu64 "%ss", s / 60, s % 60, fraction);
}

static int put_lines(const struct quota *q, enum quota_limit b, const char *what, char *out,
                     size_t room)
{
    char reset[QUOTA_DURATION_BYTES];
    double missing = capacity(q, b) - q->level[b];
    quota_duration(whole(missing / capacity(q, b) * MINUTE_US + 0.5), reset);
    return snprintf(out, room,
                    "x-ratelimit-limit-%s: %" PRIu64 "\r\nx-ratelimit-remaining-%s: %" PRIu64
                    "\r\nx-ratelimit-reset-%s: %s\r\n",
                    what, q->limits.per_minute[b], what, whole(q->level[b]), what, reset);
}

void quota_headers(struct quota *q, uint64_t now_us, char out[QUOTA_HEADER_BYTES])
{
    const uint64_t *most = q->limits.per_minute;
    int n = 0;
    refill(q, now_us);
    out[0] = '\0';
    if (most[QUOTA_REQUESTS] > 0)
        n = put_lines(q, QUOTA_REQUESTS, "requests", out, QUOTA_HEADER_BYTES);
    enum quota_limit tighter = QUOTA_INPUT;
    if (most[QUOTA_INPUT] == 0 ||
        (most[QUOTA_OUTPUT] > 0 && q->level[QUOTA_OUTPUT] < q->level[QUOTA_INPUT]))
        tighter = QUOTA_OUTPUT;
    if (most[tighter] > 0)
        n += put_lines(q, tighter, "tokens", out + n, (size_t)(QUOTA_HEADER_BYTES - n));
    CHECK(n < QUOTA_HEADER_BYTES);
}
