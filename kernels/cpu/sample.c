/* Sampling and scoring of rows of logits, in vLLM's order (reference/models.md 7.1): logprobs of the
 * raw logits; banned ids and biases; penalties; greedy, or temperature, min_p, top_k, top_p and one
 * draw. The random number comes from (seed, choice, position) alone, and probabilities are summed in
 * the order of ids in double, so a token does not depend on the batch or on threads.
 *
 * A row is worked on by one worker in its own scratch; rows are shared out over the pool. Scratch is
 * made for the largest vocabulary seen, which is one number per process. Token ids are checked
 * where requests come in; ids beyond the vocabulary are left out here, never followed. */
#include "kernels/cpu/sample.h"
#include "kernels/core/philox.h"
#include "kernels/cpu/cpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SEEN_DONE = 0x80000000 }; /* in worker.seen: penalties are applied */

static const float GREEDY_BELOW = 1e-5f; /* vLLM's bound on the temperature */

struct sample_scratch {
    const struct sample_passes *passes;
    uint32_t vocab, n_workers;
    struct sample_worker *workers;
};

struct sample_call {
    struct cpu_backend *b;
    const struct sample_args *a;
};

/* ---- logits as the request wants them ---- */

static void penalize(struct sample_worker *w, const struct sample_row *r, uint32_t vocab)
{
    const struct sample_params *p = &r->params;
    for (uint32_t i = r->n_prompt; i < r->n_history; i++)
        if (r->history[i] < vocab)
            w->seen[r->history[i]]++;
    for (uint32_t i = 0; i < r->n_history; i++) {
        uint32_t id = r->history[i], count = id < vocab ? w->seen[id] : SEEN_DONE;
        if (count & SEEN_DONE)
            continue;
        float l = w->x[id];
        l = l > 0 ? l / p->repetition_penalty : l * p->repetition_penalty;
        l -= p->frequency_penalty * (float)count;
        l -= count > 0 ? p->presence_penalty : 0;
        w->x[id] = l;
        w->seen[id] = SEEN_DONE;
    }
    for (uint32_t i = 0; i < r->n_history; i++)
        if (r->history[i] < vocab)
            w->seen[r->history[i]] = 0;
}

static bool has_penalty(const struct sample_params *p)
{
    return p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0;
}

/* The logits themselves when nothing changes them, else a changed copy in w->x. */
static const float *adjust(struct sample_worker *w, const struct sample_row *r, const float *logits,
                           uint32_t vocab)
{
    bool penalty = has_penalty(&r->params) && r->n_history > 0;
    if (r->n_banned == 0 && r->n_bias == 0 && !penalty)
        return logits;
    memcpy(w->x, logits, vocab * sizeof *logits);
    for (uint32_t i = 0; i < r->n_banned; i++)
        if (r->banned[i] < vocab)
            w->x[r->banned[i]] = -INFINITY;
    for (uint32_t i = 0; i < r->n_bias; i++)
        if (r->bias_ids[i] < vocab)
            w->x[r->bias_ids[i]] += r->bias[i];
    if (penalty)
        penalize(w, r, vocab);
    return w->x;
}

/* ---- draw ---- */

/* Over the whole vocabulary: first the block, then the token. */
static uint32_t draw_from_all(const struct sample_worker *w, uint32_t vocab, double total,
                              double uniform)
{
    double at = uniform * total, sum = 0;
    uint32_t b = 0, n_blocks = (vocab + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK, last = 0;
    while (b + 1 < n_blocks && sum + w->sums[b] <= at)
        sum += w->sums[b++];
    for (uint32_t i = b * SAMPLE_BLOCK; i < vocab; i++) {
        if (w->e[i] == 0)
            continue;
        last = i;
        sum += (double)w->e[i];
        if (sum > at)
            return i;
    }
    while (w->e[last] == 0) /* only rounding comes here, and only from an empty last block */
        last = last == 0 ? vocab - 1 : last - 1;
    return last;
}

static uint32_t draw(struct sample_worker *w, const struct sample_passes *k,
                     const struct sample_row *r, const float *logits, uint32_t vocab, float max)
{
    const struct sample_params *p = &r->params;
    bool filtered = p->min_p > 0 || p->top_p < 1 || (p->top_k > 0 && p->top_k < vocab);
    double uniform = philox_uniform(p->seed, p->choice, r->position);
    /* division is monotonic: max / t is the greatest of all quotients */
    float top = max / p->temperature;
    double total =
        k->soften(logits, vocab, p->temperature, top, filtered ? w->x : NULL, w->e, w->sums);
    if (filtered)
        return sample_filtered(w, k, p, vocab, top, total, uniform);
    return draw_from_all(w, vocab, total, uniform);
}

/* ---- logprobs ---- */

static bool better(float x, uint32_t id, float y, uint32_t other)
{
    return x > y || (x == y && id < other);
}

/* The n best of the candidates into top, best first, as logits. */
static void best_of(const float *logits, const uint32_t *ids, uint32_t n_ids,
                    struct sample_top *top, uint32_t n)
{
    uint32_t have = 0;
    for (uint32_t i = 0; i < n_ids; i++) {
        float x = logits[ids[i]];
        if (have == n && !better(x, ids[i], top[n - 1].logprob, top[n - 1].token))
            continue;
        uint32_t at = have < n ? have++ : n - 1;
        for (; at > 0 && better(x, ids[i], top[at - 1].logprob, top[at - 1].token); at--)
            top[at] = top[at - 1];
        top[at] = (struct sample_top){ids[i], x};
    }
}

static void score(struct sample_worker *w, const struct sample_passes *k, struct sample_row *r,
                  const float *logits, uint32_t vocab, float max)
{
    static const float depths[] = {3, 8, 20, INFINITY};
    double lse = (double)max + log(k->soften(logits, vocab, 1, max, NULL, NULL, w->sums));
    r->logprob = (float)((double)logits[r->token] - lse);
    r->rank = 1 + k->count_above(logits, vocab, logits[r->token]);
    uint32_t n = r->n_top > 0 ? (uint32_t)r->n_top : 0, n_ids = 0;
    CHECK(n <= SAMPLE_MAX_LOGPROBS && n <= vocab);
    for (size_t i = 0; n_ids < n && i < ARRAY_LEN(depths); i++)
        n_ids = k->collect(logits, vocab, max - depths[i], w->ids);
    if (n > 0)
        best_of(logits, w->ids, n_ids, r->top, n);
    for (uint32_t i = 0; i < n; i++)
        r->top[i].logprob = (float)((double)r->top[i].logprob - lse);
}

/* ---- rows ---- */

static bool usable(struct sample_peak p)
{
    return !p.nan && isfinite(p.max);
}

static void sample_one(struct sample_worker *w, const struct sample_passes *k, struct sample_row *r,
                       const float *logits, uint32_t vocab)
{
    struct sample_peak raw = k->peak(logits, vocab), peak = raw;
    r->token = r->rank = 0;
    r->logprob = 0;
    r->bad = !usable(raw) || (r->target != SAMPLE_DRAW && r->target >= vocab);
    if (r->bad)
        return;
    if (r->target != SAMPLE_DRAW) {
        r->token = r->target;
    } else {
        const float *l = adjust(w, r, logits, vocab);
        if (l != logits)
            peak = k->peak(l, vocab);
        if ((r->bad = !usable(peak)))
            return;
        bool greedy = r->params.temperature < GREEDY_BELOW;
        r->token = greedy ? peak.id : draw(w, k, r, l, vocab, peak.max);
    }
    if (r->target != SAMPLE_DRAW || r->n_top >= 0)
        score(w, k, r, logits, vocab, raw.max);
}

static void sample_worker_fn(void *arg, uint32_t worker)
{
    const struct sample_call *c = arg;
    struct sample_scratch *s = c->b->sample;
    const struct sample_args *a = c->a;
    for (uint32_t i; (i = pool_next(c->b->pool, a->n_rows)) < a->n_rows;) {
        struct sample_row *r = &a->rows[i];
        const float *logits = (const float *)a->logits + (size_t)r->logits_row * a->vocab;
        sample_one(&s->workers[worker], s->passes, r, logits, a->vocab);
    }
}

static void free_workers(struct sample_scratch *s)
{
    for (uint32_t i = 0; i < s->n_workers && s->workers != NULL; i++) {
        mem_free(s->workers[i].x);
        mem_free(s->workers[i].e);
        mem_free(s->workers[i].sums);
        mem_free(s->workers[i].ids);
        mem_free(s->workers[i].seen);
    }
    mem_free(s->workers);
    s->workers = NULL;
}

static void make_workers(struct sample_scratch *s, uint32_t vocab)
{
    free_workers(s);
    s->vocab = vocab;
    s->workers = mem_alloc(s->n_workers * sizeof *s->workers);
    for (uint32_t i = 0; i < s->n_workers; i++) {
        struct sample_worker *w = &s->workers[i];
        w->x = mem_alloc((size_t)vocab * sizeof *w->x);
        w->e = mem_alloc((size_t)vocab * sizeof *w->e);
        w->sums = mem_alloc((vocab / SAMPLE_BLOCK + 1) * sizeof *w->sums);
        w->ids = mem_alloc(((size_t)vocab + 16) * sizeof *w->ids);
        w->seen = mem_alloc((size_t)vocab * sizeof *w->seen);
    }
}

void cpu_sample(struct backend *be, const struct sample_args *a)
{
    struct cpu_backend *b = (struct cpu_backend *)(void *)be;
    struct sample_call c = {b, a};
    CHECK(a->vocab > 0);
    if (a->vocab > b->sample->vocab)
        make_workers(b->sample, a->vocab);
    if (a->n_rows == 0)
        return;
    if (a->n_rows > 1) {
        pool_run(b->pool, sample_worker_fn, &c);
        return;
    }
    struct sample_row *r = &a->rows[0]; /* waking the pool costs as much as a greedy row */
    sample_one(&b->sample->workers[0], b->sample->passes, r,
               (const float *)a->logits + (size_t)r->logits_row * a->vocab, a->vocab);
}

status cpu_sample_open(struct cpu_backend *b)
{
    b->sample = mem_alloc(sizeof *b->sample);
    b->sample->n_workers = pool_threads(b->pool);
    b->sample->passes = &sample_scalar;
#if defined(__x86_64__)
    if (b->isa == ISA_AVX512)
        b->sample->passes = &sample_avx512;
#endif
    return OK;
}

void cpu_sample_close(struct cpu_backend *b)
{
    if (b->sample == NULL)
        return;
    free_workers(b->sample);
    mem_free(b->sample);
    b->sample = NULL;
}
