/* The mock backend: tokens without arithmetic, for tests of protocol, scheduling, load and faults.
 *
 * Memory and copies are real, numbers are not. `append` writes one canary per row and KV head (the
 * position itself), in one layer of each block so that load tests measure the server and not page
 * faults, and `attend` looks two of them up: a wrong block table fails the step here as it would
 * spoil the answer on a real backend. Sampled tokens cycle through a range by output
 * position and choice: what a client must receive can be written down beforehand.
 *
 * The made-up distribution of a position: the i-th best token has probability 2^-(i+1). The best is
 * the token of the cycle (or eos_token where eos_every says so), then the cycle goes on, then the
 * rest of the vocabulary in order. Logprobs, ranks, tops and targets all read this one list.
 * Owner: the engine thread. */
#include "kernels/backend.h"
#include "kernels/core/hot_set.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

struct weight {
    size_t bytes;
};

struct mock {
    struct backend base; /* first: a struct backend * is one of these */
    struct mock_options o;
    uint32_t n_steps;       /* syncs that ended a step */
    uint32_t n_sampled;     /* rows since open, for nan_every */
    uint64_t step_began_us; /* clock at the first operation since the last sync; 0: none */
    uint32_t probe;         /* moves the canary that attend looks up */
    status error;           /* sticks until sync */
    FILE *trace;            /* NULL: none */
};

static struct mock *mock_of(struct backend *be)
{
    return (struct mock *)(void *)be;
}

static void mock_touch(struct backend *be)
{
    struct mock *m = mock_of(be);
    if (m->step_began_us == 0)
        m->step_began_us = clock_us();
}

static void mock_close(struct backend *be)
{
    struct mock *m = mock_of(be);
    if (m->trace != NULL)
        fclose(m->trace);
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

static status mock_sync(struct backend *be)
{
    struct mock *m = mock_of(be);
    status st = m->error;
    m->error = OK;
    if (m->step_began_us == 0)
        return st; /* copies at load are no step */
    if (m->o.step_us > 0)
        mock_sleep_until(m->step_began_us + m->o.step_us);
    m->step_began_us = 0;
    m->n_steps++;
    if (m->trace != NULL) {
        uint64_t now = clock_us();
        fwrite(&now, sizeof now, 1, m->trace);
    }
    uint32_t n_fail = m->o.fail_count > 1 ? m->o.fail_count : 1;
    if (m->o.fail_step > 0 && m->n_steps >= m->o.fail_step && m->n_steps - m->o.fail_step < n_fail)
        return err(ERR_DEVICE, "mock: step %u fails, as asked", m->n_steps);
    return st;
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
    (void)a;
    mock_touch(be);
}

static void mock_linear(struct backend *be, const struct linear_args *a)
{
    (void)a;
    mock_touch(be);
}

/* Where row `row` of the lane's page in a block keeps its canary, whatever class and tier. */
static void *canary_at(const struct kv_memory *kv, uint32_t layer, uint32_t head, block_id b,
                       uint32_t row)
{
    const struct kv_geometry *g = kv->geo;
    uint32_t class_ = kv_lane(g, layer, head).class_;
    char *base = (b & BLOCK_IN_DRAM) != 0 ? kv->dram[class_] : kv->hbm[class_];
    return base + (size_t)(b & ~BLOCK_IN_DRAM) * g->block_bytes[class_] +
           kv_page_offset(g, layer, head) + (size_t)row * g->head_dim * 2;
}

/* Blocks of a sequence take turns, so every layer of the arena is used. */
static bool has_canary(const struct kv_geometry *g, uint32_t layer, uint32_t pos)
{
    return pos / g->block_rows % g->layers == layer;
}

static void append_row(const struct append_args *a, const struct batch_seq *q, uint32_t pos)
{
    const struct kv_geometry *g = a->kv->geo;
    if (!has_canary(g, a->layer, pos))
        return;
    for (uint32_t head = 0; head < g->kv_heads; head++) {
        block_id b = q->blocks[kv_lane(g, a->layer, head).class_][pos / g->block_rows];
        memcpy(canary_at(a->kv, a->layer, head, b, pos % g->block_rows), &pos, sizeof pos);
    }
}

static void mock_append(struct backend *be, const struct append_args *a)
{
    mock_touch(be);
    for (uint32_t s = 0; s < a->n_seqs; s++) {
        const struct batch_seq *q = &a->seqs[s];
        for (uint32_t pos = q->first_pos; pos < q->first_pos + q->n_rows; pos++)
            append_row(a, q, pos);
    }
}

static void check_canary(struct mock *m, const struct kv_memory *kv, uint32_t layer, uint32_t head,
                         block_id b, uint32_t pos)
{
    const struct kv_geometry *g = kv->geo;
    uint32_t found;
    if (!has_canary(g, layer, pos))
        return;
    memcpy(&found, canary_at(kv, layer, head, b, pos % g->block_rows), sizeof found);
    if (found != pos && m->error == OK)
        m->error = err(ERR_DEVICE, "mock: layer %u, block %u holds position %u where %u belongs",
                       layer, b, found, pos);
}

/* The last position and one other that the rows of a STREAM lane do attend, or any of another. */
static void check_seq(struct mock *m, const struct attend_args *a, const struct batch_seq *q)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t len = q->first_pos + q->n_rows;
    m->probe = m->probe * 1664525u + 1013904223u; /* Numerical Recipes' generator */
    uint32_t probe = (uint32_t)(((uint64_t)m->probe * len) >> 32), head = probe % g->kv_heads;
    uint32_t class_ = kv_lane(g, a->layer, head).class_;
    const block_id *blocks = q->blocks[class_];
    check_canary(m, a->kv, a->layer, head, blocks[(len - 1) / g->block_rows], len - 1);
    if (class_ != LANE_STREAM && !q->planned)
        check_canary(m, a->kv, a->layer, head, blocks[probe / g->block_rows], probe);
}

static void mock_attend(struct backend *be, const struct attend_args *a)
{
    struct mock *m = mock_of(be);
    mock_touch(be);
    for (uint32_t s = 0; s < a->n_seqs; s++)
        check_seq(m, a, &a->seqs[s]);
}

/* ---- sparse attention: segments keep their order, records name who they belong to ---- */

static size_t mock_digest_bytes(const struct kv_geometry *geo, const struct digest_desc *d)
{
    (void)geo;
    return digest_offset(d) + 64;
}

static uint32_t *record_name(const struct kv_memory *kv, const struct digest_desc *d,
                             uint32_t record, uint32_t lane)
{
    char *at = (char *)kv->records + (size_t)record * kv->record_bytes +
               (size_t)lane * kv->record_lane_bytes;
    return (uint32_t *)(void *)(at + digest_offset(d));
}

static void mock_seal(struct backend *be, const struct seal_args *a)
{
    struct mock *m = mock_of(be);
    const struct kv_geometry *g = a->kv->geo;
    size_t bytes = g->block_bytes[LANE_SPARSE];
    mock_touch(be);
    for (uint32_t i = 0; i < SEGMENT_ROWS / g->block_rows; i++) {
        char *base = a->kv->hbm[LANE_SPARSE];
        for (uint32_t h = 0; h < g->kv_heads; h++)
            for (uint32_t layer = 0; layer < g->layers; layer++)
                if (kv_lane(g, layer, h).class_ == LANE_SPARSE)
                    check_canary(m, a->kv, layer, h, a->from[i],
                                 a->segment * SEGMENT_ROWS + i * g->block_rows);
        if (a->from[i] != a->to[i])
            memcpy(base + a->to[i] * bytes, base + a->from[i] * bytes, bytes);
    }
    for (uint32_t lane = 0; lane < g->n_lanes[LANE_SPARSE]; lane++) {
        uint32_t *name = record_name(a->kv, &a->desc, a->record, lane);
        name[0] = a->segment;
        name[1] = lane;
    }
}

static void mock_unpermute(struct backend *be, const struct unpermute_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    size_t bytes = g->block_bytes[LANE_SPARSE];
    mock_touch(be);
    for (uint32_t i = 0; i * g->block_rows < a->n_rows; i++) {
        bool dram = (a->from[i] & BLOCK_IN_DRAM) != 0;
        const char *from = dram ? a->kv->dram[LANE_SPARSE] : a->kv->hbm[LANE_SPARSE];
        memcpy((char *)a->kv->hbm[LANE_SPARSE] + a->to[i] * bytes,
               from + (a->from[i] & ~BLOCK_IN_DRAM) * bytes, bytes);
    }
}

/* Scores are never read: it looks whether the records are the row's own. */
static void mock_score(struct backend *be, const struct score_args *a)
{
    struct mock *m = mock_of(be);
    const struct kv_geometry *g = a->kv->geo;
    for (uint32_t i = 0; i < a->n_rows; i++) {
        for (uint32_t s = 0; s < a->rows[i].n_segments; s++) {
            struct lane_place p = kv_lane(g, a->layer, s % g->kv_heads);
            if (p.class_ != LANE_SPARSE)
                continue;
            const uint32_t *name = record_name(a->kv, &a->desc, a->rows[i].records[s], p.index);
            if ((name[0] != s || name[1] != p.index) && m->error == OK)
                m->error = err(ERR_DEVICE, "mock: record %u is of segment %u, lane %u, not %u, %u",
                               a->rows[i].records[s], name[0], name[1], s, p.index);
        }
    }
}

/* The sinks' pages and others spread evenly, which wander with the position. */
static void select_lane(const struct select_args *a, uint32_t i, uint32_t head)
{
    const struct kv_geometry *g = a->kv->geo;
    const struct plan_row *r = &a->rows[i];
    size_t lane = (size_t)i * g->kv_heads + head;
    uint32_t sinks = (a->desc.sinks + g->block_rows - 1) / g->block_rows, n = 0;
    uint32_t rest = r->n_segments * (SEGMENT_ROWS / g->block_rows) - sinks;
    uint32_t want = r->budget / g->block_rows < rest ? r->budget / g->block_rows : rest;
    uint32_t *pages = a->pages + lane * a->page_cap, stride = rest / want;
    while (n < sinks) {
        a->share[lane * a->page_cap + n] = 1;
        pages[n] = n;
        n++;
    }
    for (uint32_t k = 0; k < want; k++, n++) {
        CHECK(n < a->page_cap);
        pages[n] = sinks + k * stride + (r->pos / 4 + a->layer + head) % stride;
        a->share[lane * a->page_cap + n] = 1.0f / (float)(k + 1);
    }
    a->n_pages[lane] = n;
    a->n_estimates[lane] = 0;
}

static void mock_select(struct backend *be, const struct select_args *a)
{
    (void)be;
    for (uint32_t i = 0; i < a->n_rows; i++)
        for (uint32_t h = 0; h < a->kv->geo->kv_heads; h++)
            if (kv_lane(a->kv->geo, a->layer, h).class_ == LANE_SPARSE)
                select_lane(a, i, h);
}

/* As every backend must: hits and misses by the hot set, fetches that are real copies. */
static void resolve_spilled(struct mock *m, const struct resolve_args *a, const struct plan_row *r,
                            uint32_t lane, uint32_t *pages, uint32_t n)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t *slots = mem_alloc(n * sizeof *slots);
    struct hot_fetch *f = mem_alloc(n * sizeof *f);
    uint32_t n_fetches = hot_touch(r->hot, lane, pages, n, slots, f);
    size_t block = g->block_bytes[LANE_SPARSE], offset = (size_t)lane * g->page_bytes;
    for (uint32_t i = 0; i < n_fetches; i++)
        memcpy((char *)a->kv->hbm[LANE_SPARSE] + f[i].to * block + offset,
               (const char *)a->kv->dram[LANE_SPARSE] + f[i].from * block + offset, g->page_bytes);
    for (uint32_t i = 0; i < n; i++) {
        if (slots[i] == HOT_NO_PAGE && m->error == OK)
            m->error = err(ERR_DEVICE, "mock: no slot for page %u of a spilled sequence", pages[i]);
        pages[i] = slots[i] == HOT_NO_PAGE ? 0 : r->hot->slot_blocks[slots[i]];
    }
    mem_free(slots);
    mem_free(f);
}

static void resolve_lane(struct mock *m, const struct resolve_args *a, uint32_t i, uint32_t head)
{
    const struct kv_geometry *g = a->kv->geo;
    const struct plan_row *r = &a->rows[i];
    size_t at = (size_t)i * g->kv_heads + head;
    uint32_t *pages = a->pages + at * a->page_cap, n = a->n_pages[at];
    uint32_t first = n > 0 ? pages[0] : 0, last = n > 0 ? pages[n - 1] : 0;
    if (r->hot != NULL)
        resolve_spilled(m, a, r, kv_lane(g, a->layer, head).index, pages, n);
    else
        for (uint32_t k = 0; k < n; k++)
            pages[k] = r->blocks[pages[k]];
    if (n == 0)
        return;
    check_canary(m, a->kv, a->layer, head, pages[0], first * g->block_rows);
    check_canary(m, a->kv, a->layer, head, pages[n - 1], last * g->block_rows);
}

static void mock_resolve(struct backend *be, const struct resolve_args *a)
{
    for (uint32_t i = 0; i < a->n_rows; i++)
        for (uint32_t h = 0; h < a->kv->geo->kv_heads; h++)
            if (kv_lane(a->kv->geo, a->layer, h).class_ == LANE_SPARSE)
                resolve_lane(mock_of(be), a, i, h);
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
    for (uint32_t i = 0; i < a->n_rows; i++)
        mock_sample_row(mock_of(be), &a->rows[i], a->vocab);
}

static const struct backend_ops mock_ops = {
    .name = "mock",
    .act_bytes = 4,
    .close = mock_close,
    .describe = mock_describe,
    .alloc = mock_alloc,
    .free = mock_free,
    .copy = mock_copy,
    .sync = mock_sync,
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
    .select = mock_select,
    .resolve = mock_resolve,
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
