/* The mock backend: tokens without arithmetic, for tests of protocol, scheduling, load and faults.
 *
 * Memory and copies are real, numbers are not; what happens to KV is in pages.c. Sampled tokens cycle
 * through a range by output position and choice: what a client must receive can be written down
 * beforehand.
 *
 * The made-up distribution of a position: the i-th best token has probability 2^-(i+1). The best is
 * the token of the cycle (or eos_token where eos_every says so), then the cycle goes on, then the
 * rest of the vocabulary in order. Logprobs, ranks, tops and targets all read this one list.
 * Owner: the engine thread. */
#include "kernels/mock/mock.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

struct weight {
    size_t bytes;
};

static void mock_close(struct backend *be)
{
    struct mock *m = mock_of(be);
    if (m->trace != NULL)
        fclose(m->trace);
    mock_pages_close(m);
    mock_select_close(m);
    mem_free(m);
}

static const char *mock_describe(struct backend *be)
{
    (void)be;
    return "mock: deterministic tokens, no arithmetic";
}

static void *mock_alloc(struct backend *be, size_t bytes)
{
    (void)be;
    void *p = mem_try_alloc(bytes);
    if (p == NULL)
        (void)err(ERR_MEMORY, "mock: no memory for %zu bytes", bytes);
    return p;
}

static void mock_free(struct backend *be, void *p, size_t bytes)
{
    (void)be;
    (void)bytes;
    mem_free(p);
}

static void mock_copy(struct backend *be, void *dst, const void *src, size_t bytes)
{
    (void)be;
    if (bytes > 0)
        memmove(dst, src, bytes);
}

static void mock_sleep_until(uint64_t at_us)
{
    struct timespec t = {.tv_sec = (time_t)(at_us / 1000000u),
                         .tv_nsec = (long)(at_us % 1000000u) * 1000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

/* The step that began takes its time behind the one before it. */
static void mock_submit(struct backend *be)
{
    struct mock *m = mock_of(be);
    CHECK(m->n_submitted < ARRAY_LEN(m->submitted));
    struct mock_step *s = &m->submitted[m->n_submitted++];
    uint64_t began = m->step_began_us > m->busy_until_us ? m->step_began_us : m->busy_until_us;
    uint64_t rows_us = (uint64_t)m->n_rows * m->o.row_ns / 1000;
    *s = (struct mock_step){.ends_us = began + m->o.step_us + rows_us, .error = m->error};
    m->n_rows = 0;
    m->error = OK;
    m->busy_until_us = s->ends_us;
    if (m->step_began_us == 0)
        return; /* copies at load are no step */
    m->step_began_us = 0;
    s->number = ++m->n_steps;
}

static status mock_wait(struct backend *be)
{
    struct mock *m = mock_of(be);
    if (m->n_submitted == 0)
        return OK;
    struct mock_step s = m->submitted[0];
    m->submitted[0] = m->submitted[1];
    m->n_submitted--;
    if (s.number == 0)
        return s.error;
    if (m->o.step_us > 0 || m->o.row_ns > 0)
        mock_sleep_until(s.ends_us);
    if (m->trace != NULL) {
        uint64_t now = clock_us();
        fwrite(&now, sizeof now, 1, m->trace);
    }
    uint32_t n_fail = m->o.fail_count > 1 ? m->o.fail_count : 1;
    if (m->o.fail_step > 0 && s.number >= m->o.fail_step && s.number - m->o.fail_step < n_fail)
        return err(ERR_DEVICE, "mock: step %u fails, as asked", s.number);
    return s.error;
}

static status mock_sync(struct backend *be)
{
    struct mock *m = mock_of(be);
    status first = OK;
    if (m->n_submitted < ARRAY_LEN(m->submitted))
        mock_submit(be);
    while (m->n_submitted > 0) {
        status st = mock_wait(be);
        first = first == OK ? st : first;
    }
    return first;
}

/* As a GPU's, so that steps have spare rows here, too. */
static uint32_t mock_bucket(uint32_t n)
{
    return (n + 3) / 4 * 4;
}

static status mock_weight_create(struct backend *be, const struct weight_desc *d,
                                 struct weight **out)
{
    (void)be;
    struct weight *w = mem_alloc(sizeof *w);
    w->bytes = sizeof *w;
    CHECK(d->n_parts > 0 && d->n_parts <= ARRAY_LEN(d->parts));
    *out = w;
    return OK;
}

static void mock_weight_destroy(struct backend *be, struct weight *w)
{
    (void)be;
    mem_free(w);
}

static size_t mock_weight_bytes(const struct weight *w)
{
    return w->bytes;
}

static void mock_embed(struct backend *be, const struct embed_args *a)
{
    struct mock *m = mock_of(be);
    mock_touch(be);
    m->n_rows += a->n_rows;
    for (uint32_t i = 0; i < a->n_rows; i++)
        if (a->tokens[i] >= EMBED_DRAWN && (a->tokens[i] & ~EMBED_DRAWN) >= m->n_drawn)
            m->error = err(ERR_DEVICE, "mock: row %u takes the token of row %u, of %u drawn", i,
                           a->tokens[i] & ~EMBED_DRAWN, m->n_drawn);
}

static void mock_linear(struct backend *be, const struct linear_args *a)
{
    (void)a;
    mock_touch(be);
}

/* The made-up distribution: a bijection between tokens and places of the list, best first. */
struct mock_list {
    uint32_t vocab, first, n, start; /* the cycle [first, first + n) begins at first + start */
    uint32_t eos;                    /* leads the list here; UINT32_MAX: not at this position */
};

static struct mock_list list_at(const struct mock *m, const struct sample_row *r, uint32_t vocab)
{
    struct mock_list l = {.vocab = vocab, .first = m->o.first_token % vocab, .n = m->o.n_tokens};
    if (l.n == 0 || l.n > vocab)
        l.n = vocab;
    l.start = (uint32_t)(((uint64_t)r->position + r->params.choice) % l.n);
    bool eos_here = m->o.eos_every > 0 && (r->position + 1) % m->o.eos_every == 0;
    l.eos = eos_here && m->o.eos_token < vocab ? m->o.eos_token : UINT32_MAX;
    return l;
}

static uint32_t cycle_place(const struct mock_list *l, uint32_t token)
{
    uint32_t i = (token + l->vocab - l->first) % l->vocab;
    return i < l->n ? (i + l->n - l->start) % l->n : i;
}

static uint32_t list_place(const struct mock_list *l, uint32_t token)
{
    uint32_t i = cycle_place(l, token);
    if (l->eos == UINT32_MAX)
        return i;
    return token == l->eos ? 0 : i + (i < cycle_place(l, l->eos));
}

static uint32_t list_token(const struct mock_list *l, uint32_t place)
{
    uint32_t i = place;
    if (l->eos != UINT32_MAX) {
        if (place == 0)
            return l->eos;
        i = place - (place <= cycle_place(l, l->eos));
    }
    uint32_t step = i < l->n ? (i + l->start) % l->n : i;
    return (uint32_t)(((uint64_t)l->first + step) % l->vocab);
}

static float place_logprob(uint32_t place)
{
    return -0.69314718f * (float)(place + 1);
}

static bool is_banned(const struct sample_row *r, uint32_t token)
{
    for (uint32_t i = 0; i < r->n_banned; i++)
        if (r->banned[i] == token)
            return true;
    return false;
}

static uint32_t mock_choose(const struct mock_list *l, const struct sample_row *r)
{
    for (uint32_t i = 0; i < r->n_bias; i++)
        if (r->bias[i] >= 100.0f && r->bias_ids[i] < l->vocab && !is_banned(r, r->bias_ids[i]))
            return r->bias_ids[i];
    for (uint32_t place = 0; place < l->vocab; place++)
        if (!is_banned(r, list_token(l, place)))
            return list_token(l, place);
    return list_token(l, 0);
}

static void mock_sample_row(struct mock *m, struct sample_row *r, uint32_t vocab)
{
    struct mock_list l = list_at(m, r, vocab);
    m->n_sampled++;
    r->bad = m->o.nan_every > 0 && m->n_sampled % m->o.nan_every == 0;
    r->token = r->target == SAMPLE_DRAW ? mock_choose(&l, r) : r->target;
    uint32_t place = list_place(&l, r->token);
    r->rank = place + 1;
    r->logprob = place_logprob(place);
    for (int32_t i = 0; i < r->n_top; i++) {
        uint32_t at = (uint32_t)i < vocab ? (uint32_t)i : vocab - 1;
        r->top[i] = (struct sample_top){list_token(&l, at), place_logprob((uint32_t)i)};
    }
}

static void mock_sample(struct backend *be, const struct sample_args *a)
{
    mock_touch(be);
    mock_of(be)->n_drawn = a->n_rows;
    for (uint32_t i = 0; i < a->n_rows; i++)
        mock_sample_row(mock_of(be), &a->rows[i], a->vocab);
}

static const struct backend_ops mock_ops = {
    .name = "mock",
    .act_bytes = 4,
    .step_rows = 256,
    .step_seqs = 64,
    .keeps_fp8 = true,
    .close = mock_close,
    .describe = mock_describe,
    .alloc = mock_alloc,
    .free = mock_free,
    .copy = mock_copy,
    .sync = mock_sync,
    .submit = mock_submit,
    .wait = mock_wait,
    .bucket = mock_bucket,
    .weight_create = mock_weight_create,
    .weight_destroy = mock_weight_destroy,
    .weight_bytes = mock_weight_bytes,
    .embed = mock_embed,
    .linear = mock_linear,
    .append = mock_append,
    .attend = mock_attend,
    .digest_bytes = mock_digest_bytes,
    .seal = mock_seal,
    .unpermute = mock_unpermute,
    .score = mock_score,
    .known_bytes = mock_known_bytes,
    .known = mock_known,
    .select = mock_select,
    .resolve = mock_resolve,
    .hot = mock_hot,
    .sample = mock_sample,
};

status mock_backend_open(struct backend **out, const struct mock_options *o)
{
    struct mock *m = mem_alloc(sizeof *m);
    m->base.ops = &mock_ops;
    m->o = *o;
    if (o->trace != NULL && (m->trace = fopen(o->trace, "we")) == NULL) {
        status st = err(ERR_IO, "%s: %s", o->trace, strerror(errno));
        mem_free(m);
        return st;
    }
    if (m->trace != NULL)
        setvbuf(m->trace, NULL, _IONBF, 0); /* read while the daemon runs */
    *out = &m->base;
    return OK;
}
