/* Sampling and scoring of any backend against a slow reference in double, written here from
 * reference/models.md 7.1 to 7.3: every filter by sorting, every probability by exp. */
#ifndef TESTS_SAMPLE_CASES_H
#define TESTS_SAMPLE_CASES_H

#include "kernels/backend.h"
#include "kernels/core/philox.h"
#include "tests/tap.h"

#include <math.h>
#include <stdlib.h>

/* What is tested: samples n rows of [..][vocab] logits in ordinary memory. */
struct sampler {
    const char *name;
    void *with;
    void (*run)(const struct sampler *s, struct sample_row *r, uint32_t n, const float *logits,
                uint32_t vocab);
};

static const struct sample_params PLAIN = {
    .temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 1};

static struct sample_row row_of(struct sample_params p)
{
    return (struct sample_row){.params = p, .target = SAMPLE_DRAW, .n_top = -1};
}

static void run(const struct sampler *b, struct sample_row *r, uint32_t n, const float *logits,
                uint32_t vocab)
{
    b->run(b, r, n, logits, vocab);
}

static uint32_t token_of(const struct sampler *b, struct sample_row r, const float *logits,
                         uint32_t vocab)
{
    run(b, &r, 1, logits, vocab);
    return r.bad ? UINT32_MAX : r.token;
}

static uint32_t rng(uint32_t *s)
{
    *s = *s * 1664525u + 1013904223u;
    return *s >> 8;
}

/* A bell of the given width, as a model's logits are. */
static void make_logits(float *x, uint32_t n, uint32_t seed, float width)
{
    for (uint32_t i = 0; i < n; i++) {
        float sum = 0;
        for (int k = 0; k < 4; k++)
            sum += (float)rng(&seed) / 8388608.0f - 1;
        x[i] = sum * width;
    }
}

/* ---- the reference ---- */

struct entry {
    double l;
    uint32_t id;
    bool kept;
};

static int by_logit(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    if (x->l != y->l)
        return x->l < y->l ? 1 : -1;
    return x->id < y->id ? -1 : 1;
}

static void reference_adjust(double *l, const struct sample_row *r, uint32_t vocab)
{
    const struct sample_params *p = &r->params;
    for (uint32_t i = 0; i < r->n_banned; i++)
        l[r->banned[i]] = -INFINITY;
    for (uint32_t i = 0; i < r->n_bias; i++)
        l[r->bias_ids[i]] += (double)r->bias[i];
    for (uint32_t t = 0; t < vocab && r->n_history > 0; t++) {
        uint32_t count = 0;
        bool known = false;
        for (uint32_t i = 0; i < r->n_history; i++)
            if (r->history[i] == t) {
                known = true;
                count += i >= r->n_prompt;
            }
        if (known)
            l[t] = l[t] > 0 ? l[t] / (double)p->repetition_penalty
                            : l[t] * (double)p->repetition_penalty;
        l[t] -= (double)p->frequency_penalty * count;
        l[t] -= count > 0 ? (double)p->presence_penalty : 0;
    }
}

/* Sorted entries with what the filters keep; returns the mass kept, relative to the best. */
static double reference_filter(struct entry *e, uint32_t n, const struct sample_params *p)
{
    qsort(e, n, sizeof *e, by_logit);
    double mass = 0, cum = 0, max = e[0].l;
    for (uint32_t i = 0; i < n; i++) {
        bool k = p->top_k == 0 || p->top_k >= n || e[i].l >= e[p->top_k - 1].l;
        e[i].kept = k && exp(e[i].l - max) >= (double)p->min_p * (1 - 1e-6);
        mass += e[i].kept ? exp(e[i].l - max) : 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (p->top_p < 1 && cum >= (double)p->top_p * mass * (1 - 1e-6))
            e[i].kept = false;
        cum += e[i].kept ? exp(e[i].l - max) : 0;
    }
    return cum;
}

/* Is r->token what the reference draws, give or take rounding at the border of two tokens? */
static bool drawn_right(const struct sample_row *r, const float *logits, uint32_t vocab)
{
    double *l = mem_alloc(vocab * sizeof *l), u;
    struct entry *e = mem_alloc(vocab * sizeof *e);
    for (uint32_t i = 0; i < vocab; i++)
        l[i] = (double)logits[i];
    reference_adjust(l, r, vocab);
    for (uint32_t i = 0; i < vocab; i++)
        e[i] = (struct entry){l[i] / (double)r->params.temperature, i, true};
    double total = reference_filter(e, vocab, &r->params), max = e[0].l, below = 0, own = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        if (e[i].kept && e[i].id < r->token)
            below += exp(e[i].l - max) / total;
        if (e[i].kept && e[i].id == r->token)
            own = exp(e[i].l - max) / total;
    }
    u = philox_uniform(r->params.seed, r->params.choice, r->position);
    mem_free(l);
    mem_free(e);
    return !r->bad && own > 0 && u >= below - 1e-5 && u <= below + own + 1e-5;
}

/* ---- cases ---- */

static void greedy_takes_the_smallest_of_the_best(const struct sampler *b)
{
    float x[1200];
    struct sample_params p = PLAIN;
    p.temperature = 0;
    int good = 1;
    for (uint32_t n = 1; n < 1200; n += 1 + n / 9) {
        make_logits(x, n, n, 2);
        uint32_t at = n / 3, again = n - 1;
        x[at] = x[again] = 50;
        good &= token_of(b, row_of(p), x, n) == at;
    }
    ok(good, "%s: greedy takes the best, ties by the smallest id, any vocabulary size", b->name);
}

static void changes_apply_in_order(const struct sampler *b)
{
    float x[8] = {1, 5, 4, -1, 0, 2, 3, -2}, bias[2] = {10, -3};
    uint32_t banned[1] = {1}, bias_ids[2] = {3, 2}, history[5] = {2, 6, 5, 5, 0};
    struct sample_params p = PLAIN;
    p.temperature = 0;
    struct sample_row r = row_of(p);
    r.banned = banned;
    r.n_banned = 1;
    is_int(token_of(b, r, x, 8), 2, "a banned best token leaves the second");
    r.bias = bias;
    r.bias_ids = bias_ids;
    r.n_bias = 2;
    is_int(token_of(b, r, x, 8), 3, "a bias lifts a token to the top");
    r = row_of(p);
    r.history = history;
    r.n_history = 5;
    r.n_prompt = 2;
    r.params.repetition_penalty = 2; /* 4 -> 2, 3 -> 1.5, 2 -> 1; 5 stays */
    r.banned = banned;
    r.n_banned = 1;
    is_int(token_of(b, r, x, 8), 2, "the repetition penalty counts prompt and output");
    r.params.repetition_penalty = 4; /* 1, .75, .5, .25; 0 untouched */
    is_int(token_of(b, r, x, 8), 2, "and divides what is positive, once per token");
    r.params.repetition_penalty = 1;
    r.params.presence_penalty = 10;
    is_int(token_of(b, r, x, 8), 2, "the presence penalty counts output alone");
    float y[3] = {3, 3.5f, 0};
    uint32_t output[3] = {1, 1, 0};
    struct sample_row f = row_of(p);
    f.history = output;
    f.n_history = 3;
    f.params.frequency_penalty = 0.4f; /* 3.5 - 0.8 < 3 - 0.4 fails, 2.7 > 2.6 */
    is_int(token_of(b, f, y, 3), 1, "the frequency penalty multiplies the count (2.7 against 2.6)");
    f.params.frequency_penalty = 0.6f;
    is_int(token_of(b, f, y, 3), 0, "the frequency penalty multiplies the count (2.3 against 2.4)");
    ok(1, "%s: changes apply in vLLM's order", b->name);
}

/* How many of `draws` tokens were seen, as a bit mask of ids below 64. */
static uint64_t support(const struct sampler *b, struct sample_params p, const float *x, uint32_t n)
{
    uint64_t seen = 0;
    for (uint32_t i = 0; i < 400; i++) {
        struct sample_row r = row_of(p);
        r.position = i;
        uint32_t t = token_of(b, r, x, n);
        CHECK(t < n);
        seen |= 1ull << t;
    }
    return seen;
}

static void filters_keep_exactly_what_they_say(const struct sampler *b)
{
    float even[10] = {0}, steps[4], ties[6] = {1, 2, 1, 2, 0, 1};
    const double probs[4] = {0.2, 0.5, 0.1, 0.2};
    struct sample_params p = PLAIN;
    for (int i = 0; i < 4; i++)
        steps[i] = (float)log(probs[i]);
    p.top_p = 0.3f;
    is_int(support(b, p, even, 10), 7, "top_p 0.3 of ten even tokens keeps the first three");
    p.top_p = 0.1f;
    is_int(support(b, p, even, 10), 1, "top_p 0.1 keeps one");
    p.top_p = 0.31f;
    is_int(support(b, p, even, 10), 15, "top_p 0.31 keeps the token that crosses");
    p.top_p = 0.5f;
    is_int(support(b, p, steps, 4), 2, "top_p 0.5 is reached by one token of 0.5");
    p.top_p = 0.7f;
    is_int(support(b, p, steps, 4), 3, "top_p 0.7 takes the smaller id of two tokens of 0.2");
    p.top_p = 0.9f;
    is_int(support(b, p, steps, 4), 11, "top_p 0.9 takes both");
    p.top_p = 1e-9f;
    is_int(support(b, p, steps, 4), 2, "the smallest top_p keeps the best");
    p = PLAIN;
    p.top_k = 3;
    is_int(support(b, p, ties, 6), 1 | 2 | 4 | 8 | 32, "ties with the k-th survive top_k");
    p.top_k = 2;
    is_int(support(b, p, ties, 6), 2 | 8, "top_k 2 keeps two");
    p.top_k = 100;
    is_int(support(b, p, ties, 6), 63, "a top_k beyond the vocabulary is off");
    p = PLAIN;
    p.min_p = 0.39f;
    is_int(support(b, p, steps, 4), 1 | 2 | 8, "min_p 0.39 of 0.5 keeps 0.2");
    p.min_p = 0.41f;
    is_int(support(b, p, steps, 4), 2, "min_p 0.41 of 0.5 drops 0.2");
    p.min_p = 0.1f;
    p.top_k = 3;
    p.top_p = 0.75f; /* of 0.2, 0.5, 0.2 together: 0.5 + 0.2 = 0.78 of 0.9 */
    is_int(support(b, p, steps, 4), 3, "top_p measures what min_p and top_k left");
    float holes[6] = {-INFINITY, 0, -INFINITY, 0, -1e30f, -INFINITY};
    is_int(support(b, PLAIN, holes, 6), 2 | 8, "impossible tokens are never drawn");
    p = PLAIN;
    p.top_k = 5;
    p.top_p = 0.9999f;
    is_int(support(b, p, holes, 6), 2 | 8, "nor with filters");
    ok(1, "%s: filters keep exactly what they say", b->name);
}

static void draws_agree_with_the_reference(const struct sampler *b)
{
    enum { VOCAB = 5003 };
    const uint32_t cases = tap_small() ? 24 : 400;
    static const float widths[] = {0, 0.01f, 1, 3, 8};
    float *x = mem_alloc(VOCAB * sizeof *x), bias[20];
    uint32_t seed = 5, ids[40], history[200], good = 0;
    for (uint32_t c = 0; c < cases; c++) {
        make_logits(x, VOCAB, c, widths[c % 5]);
        struct sample_params p = {.temperature = 0.3f + (float)(rng(&seed) % 20) / 10,
                                  .top_p = c & 1 ? 1 : (float)(rng(&seed) % 1000 + 1) / 1000,
                                  .min_p = c & 2 ? 0 : (float)(rng(&seed) % 1000) / 8000,
                                  .top_k = c & 4 ? 0 : rng(&seed) % (c & 8 ? 6000 : 60),
                                  .repetition_penalty = c & 16 ? 1 : 1.3f,
                                  .presence_penalty = c & 32 ? 0 : 0.7f,
                                  .frequency_penalty = c & 32 ? 0 : -0.3f,
                                  .choice = c % 3,
                                  .seed = 1000 + c};
        struct sample_row r = row_of(p);
        r.position = c;
        for (int i = 0; i < 40; i++)
            ids[i] = rng(&seed) % VOCAB;
        for (int i = 0; i < 20; i++)
            bias[i] = (float)(rng(&seed) % 10) - 5;
        for (int i = 0; i < 200; i++)
            history[i] = rng(&seed) % (i & 1 ? 50 : VOCAB);
        r.banned = ids;
        r.bias_ids = ids + 20;
        r.bias = bias;
        r.n_banned = r.n_bias = c % 20;
        r.history = history;
        r.n_prompt = c % 100;
        r.n_history = r.n_prompt + c % 100;
        run(b, &r, 1, x, VOCAB);
        good += drawn_right(&r, x, VOCAB);
    }
    ok(good == cases, "%s: %u of %u mixed draws are the reference's", b->name, good, cases);
    mem_free(x);
}

static void frequencies_follow_the_probabilities(const struct sampler *b)
{
    enum { VOCAB = 40, DRAWS = 40000 };
    float x[VOCAB];
    uint32_t count[VOCAB] = {0};
    double total = 0, chi = 0;
    make_logits(x, VOCAB, 9, 0.5f);
    struct sample_params p = PLAIN;
    p.temperature = 0.7f;
    for (uint32_t i = 0; i < DRAWS; i++) {
        struct sample_row r = row_of(p);
        r.params.seed = i % 7;
        r.position = i / 7;
        count[token_of(b, r, x, VOCAB)]++;
    }
    for (int i = 0; i < VOCAB; i++)
        total += exp((double)x[i] / 0.7);
    for (int i = 0; i < VOCAB; i++) {
        double want = DRAWS * exp((double)x[i] / 0.7) / total;
        chi += (count[i] - want) * (count[i] - want) / want;
    }
    ok(chi < 72.1, "%s: 40,000 draws fit the distribution (chi-square %.1f, 72.1 at 1 in 1,000)",
       b->name, chi);
}

static void logprobs_and_ranks_are_of_raw_logits(const struct sampler *b)
{
    enum { VOCAB = 49152 };
    float *x = mem_alloc(VOCAB * sizeof *x), bias = 100;
    uint32_t biased = 77;
    int close = 1, ranks = 1, tops = 1, forced = 1;
    struct entry *e = mem_alloc(VOCAB * sizeof *e);
    for (uint32_t c = 0; c < 12; c++) {
        make_logits(x, VOCAB, c, c % 4 == 3 ? 0 : (float)(c % 4 + 1) * 2);
        double total = 0, max = -INFINITY;
        for (uint32_t i = 0; i < VOCAB; i++) {
            e[i] = (struct entry){(double)x[i], i, true};
            max = fmax(max, e[i].l);
        }
        for (uint32_t i = 0; i < VOCAB; i++)
            total += exp(e[i].l - max);
        qsort(e, VOCAB, sizeof *e, by_logit);
        struct sample_row r = row_of(PLAIN);
        r.n_top = (int32_t)(c % 3) * 10;
        r.target = c & 1 ? SAMPLE_DRAW : e[(size_t)c * 7].id;
        r.bias_ids = &biased;
        r.bias = &bias;
        r.n_bias = 1;
        run(b, &r, 1, x, VOCAB);
        forced &= r.token == (c & 1 ? biased : r.target) && !r.bad;
        close &= fabs((double)r.logprob - ((double)x[r.token] - max - log(total))) < 2e-6;
        uint32_t rank = 1;
        for (uint32_t i = 0; i < VOCAB; i++)
            rank += x[i] > x[r.token];
        ranks &= r.rank == rank;
        for (int32_t i = 0; i < r.n_top; i++)
            tops &= r.top[i].token == e[i].id &&
                    fabs((double)r.top[i].logprob - (e[i].l - max - log(total))) < 2e-6;
    }
    ok(forced, "%s: a bias of 100 decides a draw, a target is kept", b->name);
    ok(close, "%s: logprobs are those of the raw logits within 2e-6", b->name);
    ok(ranks, "%s: ranks count larger raw logits", b->name);
    ok(tops, "%s: the best are sorted, ties by smaller id", b->name);
    mem_free(x);
    mem_free(e);
}

static void bad_rows_are_alone(const struct sampler *b)
{
    enum { VOCAB = 1003, ROWS = 6 };
    float *x = mem_alloc((size_t)ROWS * VOCAB * sizeof *x);
    struct sample_row r[ROWS], clean = row_of(PLAIN);
    uint32_t banned[VOCAB];
    for (uint32_t i = 0; i < ROWS; i++) {
        make_logits(x + (size_t)i * VOCAB, VOCAB, 4, 2);
        r[i] = row_of(PLAIN);
        r[i].logits_row = i;
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        banned[i] = i;
        x[3 * VOCAB + i] = -INFINITY;
    }
    x[1 * VOCAB + 1002] = NAN;
    x[2 * VOCAB + 17] = INFINITY;
    r[4].banned = banned;
    r[4].n_banned = VOCAB;
    run(b, &clean, 1, x, VOCAB);
    run(b, r, ROWS, x, VOCAB);
    ok(r[1].bad, "%s: one NaN makes a row bad", b->name);
    ok(r[2].bad && r[3].bad && r[4].bad, "%s: infinity, nothing finite, all banned: bad", b->name);
    ok(!r[0].bad && !r[5].bad && r[0].token == clean.token && r[5].token == clean.token,
       "%s: other rows of the call are as they are alone", b->name);
    mem_free(x);
}

static void batches_change_no_token(const struct sampler *many, const struct sampler *one)
{
    enum { VOCAB = 30000, ROWS = 24 };
    float *x = mem_alloc((size_t)ROWS * VOCAB * sizeof *x);
    struct sample_row r[ROWS];
    for (uint32_t i = 0; i < ROWS; i++) {
        make_logits(x + (size_t)i * VOCAB, VOCAB, i, 3);
        r[i] = row_of(PLAIN);
        r[i].logits_row = i;
        r[i].params.seed = i;
        r[i].params.top_p = i & 1 ? 0.9f : 1;
        r[i].params.top_k = i & 2 ? 40 : 0;
        r[i].n_top = (int32_t)i % 4 - 1;
    }
    run(many, r, ROWS, x, VOCAB);
    int same = 1;
    for (uint32_t i = 0; i < ROWS; i++) {
        struct sample_row alone = r[i];
        run(one, &alone, 1, x, VOCAB);
        same &= alone.token == r[i].token && alone.logprob == r[i].logprob;
    }
    ok(same, "%s: a batch gives the tokens of each row alone", many->name);
    mem_free(x);
}

/* many, one: the same, or with more threads and with one. */
static void sample_cases(const struct sampler *many, const struct sampler *one)
{
    greedy_takes_the_smallest_of_the_best(many);
    changes_apply_in_order(many);
    draws_agree_with_the_reference(many);
    if (!tap_small()) { /* the same, some ten thousand times */
        filters_keep_exactly_what_they_say(many);
        frequencies_follow_the_probabilities(many);
    }
    logprobs_and_ranks_are_of_raw_logits(many);
    bad_rows_are_alone(many);
    batches_change_no_token(many, one);
}

#endif
