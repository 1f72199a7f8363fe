/* Scores: which segments of which rows.
 *
 * An item of work is a stretch of segments of one (row, KV head), so that one row keeps all threads
 * busy (plan.c runs them). Coarse to fine takes two passes before: scores of the coarse digests, and one
 * choice of groups per (row, KV head). No sum crosses an item: the split cannot be seen. */
#include "kernels/cpu/score.h"
#include "kernels/cpu/plan.h"

#include <math.h>
#include <stdlib.h>

enum {
    ITEMS_PER_THREAD = 4,
    MAX_STRETCH = 8, /* segments of an item at most */
};

struct score_scratch {
    uint8_t *bytes; /* [threads][worker_bytes]; coarse scores; open groups */
    size_t max_bytes;
};

static uint32_t n_lanes(const struct score_call *c)
{
    return c->a->n_rows * c->a->kv->geo->kv_heads;
}

uint32_t score_items(const struct score_call *c, uint32_t lane)
{
    uint32_t kv_heads = c->a->kv->geo->kv_heads;
    if (kv_lane(c->a->kv->geo, c->a->layer, lane % kv_heads).class_ != LANE_SPARSE)
        return 0;
    return (c->a->rows[lane / kv_heads].n_segments + c->stretch - 1) / c->stretch;
}

void score_item(const struct score_call *c, uint32_t lane, uint32_t stretch, uint32_t worker)
{
    const struct score_args *a = c->a;
    const struct kv_geometry *g = a->kv->geo;
    uint8_t *work = c->b->score_scratch->bytes + worker * c->worker_bytes;
    uint32_t begin = stretch * c->stretch, row = lane / g->kv_heads, head = lane % g->kv_heads;
    uint32_t n_segments = a->rows[row].n_segments;
    size_t width = (size_t)(a->heads + 2 * g->kv_heads) * g->head_dim;
    struct score_part p = {
        .a = a,
        .row = &a->rows[row],
        .layout = &c->layout,
        .q = (const float *)a->qkv + a->rows[row].row * width +
             (size_t)head * c->group * g->head_dim,
        .head = head,
        .group = c->group,
        .sink_rows = (a->desc.sinks + g->block_rows - 1) / g->block_rows * g->block_rows,
        .begin = begin,
        .end = begin + c->stretch < n_segments ? begin + c->stretch : n_segments,
        .out = a->scores + (size_t)lane * c->group * a->stride,
        .stride = a->stride,
        .coarse = c->coarse,
        .open = c->open != NULL ? c->open + (size_t)lane * c->open_stride : NULL,
        .work = work,
        .codes = c->b->codes,
        .codes_query = (void *)(work + score_work_bytes(g->head_dim)),
    };
    if (c->coarse) {
        p.out = c->coarse_scores + (size_t)lane * c->group * c->coarse_stride;
        p.stride = c->coarse_stride;
        p.open = NULL;
    }
    c->b->score->part(&p);
}

static void coarse_worker(void *arg, uint32_t worker)
{
    const struct score_call *c = arg;
    uint32_t n = n_lanes(c) * c->stretches;
    for (uint32_t i; (i = pool_next(c->b->pool, n)) < n;)
        if (i % c->stretches < score_items(c, i / c->stretches))
            score_item(c, i / c->stretches, i % c->stretches, worker);
}

static void choose_worker(void *arg, uint32_t worker)
{
    const struct score_call *c = arg;
    const struct score_args *a = c->a;
    const struct kv_geometry *g = a->kv->geo;
    uint32_t lanes = n_lanes(c);
    for (uint32_t i; (i = pool_next(c->b->pool, lanes)) < lanes;) {
        uint32_t n = a->rows[i / g->kv_heads].n_segments * (a->desc.parts / a->coarse_group);
        if (n == 0 || kv_lane(g, a->layer, i % g->kv_heads).class_ != LANE_SPARSE)
            continue;
        uint32_t n_open = (uint32_t)ceilf(a->coarse_open * (float)n);
        c->b->score->choose(
            c->coarse_scores + (size_t)i * c->group * c->coarse_stride, c->coarse_stride, c->group,
            a->coarse_group / DIGEST_COARSE, n,
            n_open < 1   ? 1
            : n_open < n ? n_open
                         : n,
            c->open + (size_t)i * c->open_stride,
            (float *)(void *)(c->b->score_scratch->bytes + worker * c->worker_bytes));
    }
}

/* Sizes the scratch; it settles with the longest sequence. */
static void take_scratch(struct score_call *c, uint32_t segments)
{
    const struct score_args *a = c->a;
    struct score_scratch *s = c->b->score_scratch;
    uint32_t threads = pool_threads(c->b->pool);
    size_t lanes = (size_t)a->n_rows * a->kv->geo->kv_heads, scores = 0, open = 0;
    c->worker_bytes =
        score_work_bytes(a->kv->geo->head_dim) + digest_round(sizeof(struct codes_query));
    if (c->coarse) {
        c->coarse_stride = segments * (a->desc.parts / DIGEST_COARSE);
        c->open_stride = segments * (a->desc.parts / a->coarse_group);
        size_t choice = ((size_t)c->open_stride + 16) * 2 * sizeof(float);
        if (c->worker_bytes < choice)
            c->worker_bytes = digest_round(choice);
        scores = digest_round(lanes * c->group * c->coarse_stride * sizeof(float));
        open = digest_round(lanes * c->open_stride);
    }
    size_t need = c->worker_bytes * threads + scores + open;
    if (need > s->max_bytes) {
        free(s->bytes);
        s->max_bytes = digest_round(need + need / 2);
        s->bytes = aligned_alloc(64, s->max_bytes);
        CHECK(s->bytes != NULL); /* as mem_alloc: no ordinary memory left */
    }
    if (c->coarse) {
        c->coarse_scores = (float *)(void *)(s->bytes + c->worker_bytes * threads);
        c->open = (uint8_t *)c->coarse_scores + scores;
    }
}

void score_prepare(struct score_call *c, struct cpu_backend *b, const struct score_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    const bool coarse = a->coarse_group > 0 && a->kind == SCORE_MASS;
    *c = (struct score_call){.b = b,
                             .a = a,
                             .layout = digest_layout_of(g->head_dim, &a->desc),
                             .group = a->heads / g->kv_heads,
                             .coarse = coarse};
    uint32_t segments = 0, total = 0;
    for (uint32_t i = 0; i < a->n_rows; i++) {
        total += a->rows[i].n_segments;
        segments = a->rows[i].n_segments > segments ? a->rows[i].n_segments : segments;
    }
    CHECK(a->stride >= segments * a->desc.parts);
    if (a->kind == SCORE_MASS)
        CHECK(a->desc.kind == DIGEST_CENTROID || a->desc.kind == DIGEST_CODES);
    else
        CHECK(a->kind == SCORE_EXACT || a->desc.kind == DIGEST_BOUNDS);
    if (coarse)
        CHECK(c->layout.coarse != 0 && a->coarse_group % DIGEST_COARSE == 0 &&
              a->desc.parts % a->coarse_group == 0);
    take_scratch(c, segments);
    c->stretch = total * g->kv_heads / (pool_threads(b->pool) * ITEMS_PER_THREAD);
    c->stretch = c->stretch < 1 ? 1 : c->stretch < MAX_STRETCH ? c->stretch : MAX_STRETCH;
    c->stretches = (segments + c->stretch - 1) / c->stretch;
    if (coarse && segments > 0) {
        pool_run(b->pool, coarse_worker, c);
        pool_run(b->pool, choose_worker, c);
    }
    c->coarse = false;
}

status cpu_score_open(struct cpu_backend *b)
{
    b->score = &score_scalar;
#if defined(__x86_64__)
    if (b->isa == ISA_AVX512)
        b->score = &score_avx512;
    else if (b->isa == ISA_AVX2)
        b->score = &score_avx2;
#endif
    b->score_scratch = mem_alloc(sizeof *b->score_scratch);
    return OK;
}

void cpu_score_close(struct cpu_backend *b)
{
    if (b->score_scratch == NULL)
        return;
    free(b->score_scratch->bytes);
    mem_free(b->score_scratch);
    b->score_scratch = NULL;
}
