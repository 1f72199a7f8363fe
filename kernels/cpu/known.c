/* Known mass: an item of work is a split of the tail of one (row, KV head), attended as attend.c would;
 * who finishes a lane's last one adds the sinks (known_vec.h). What attend folds later has the bits it
 * would compute itself. */
#include "kernels/cpu/known.h"
#include "kernels/cpu/cpu.h"

#include <stdatomic.h>
#include <stdlib.h>

struct known_scratch {
    float *floats;     /* [threads][worker_floats] */
    atomic_uint *left; /* [lanes] splits that are not attended yet */
    size_t max_floats, max_lanes;
};

struct known_call {
    struct cpu_backend *b;
    const struct known_args *a;
    uint32_t sink_rows, n_lanes, group, o_stride;
    size_t partial_floats, worker_floats;
};

static const struct plan_row *row_of(const struct known_call *c, uint32_t lane)
{
    return &c->a->rows[lane / c->a->kv->geo->kv_heads];
}

static uint32_t splits_of(const struct plan_row *r)
{
    return attend_splits(r->n_segments * SEGMENT_ROWS, r->pos + 1);
}

static float *tail_of(const struct known_call *c, uint32_t lane)
{
    return (float *)c->a->tail + lane * attend_tail_floats(c->group, c->o_stride);
}

static void attend_split(const struct known_call *c, uint32_t lane, uint32_t split, const float *q,
                         float *work)
{
    const struct known_args *a = c->a;
    const struct kv_geometry *g = a->kv->geo;
    const struct plan_row *r = row_of(c, lane);
    uint32_t begin = r->n_segments * SEGMENT_ROWS + split * ATTEND_SPLIT, end = r->pos + 1;
    size_t page = kv_page_offset(g, a->layer, lane % g->kv_heads);
    struct attend_partial to =
        attend_partial_at(tail_of(c, lane) + split * c->partial_floats, c->group, c->o_stride, 1);
    const uint8_t *hbm = a->kv->hbm[LANE_SPARSE], *dram = a->kv->dram[LANE_SPARSE];
    c->b->attend->part(
        &(struct attend_part){.geo = g,
                              .table = {.lane = {hbm + page, dram == NULL ? NULL : dram + page},
                                        .block_bytes = g->block_bytes[LANE_SPARSE],
                                        .blocks = r->blocks},
                              .q = q,
                              .q_stride = 0, /* one row */
                              .group = c->group,
                              .n_rows = 1,
                              .first_pos = r->pos,
                              .begin = begin,
                              .end = end - begin < ATTEND_SPLIT ? end : begin + ATTEND_SPLIT,
                              .scale = a->scale,
                              .o_stride = c->o_stride,
                              .o = to.o,
                              .m = to.m,
                              .l = to.l,
                              .work = work});
}

static void known_item(const struct known_call *c, uint32_t item, float *work)
{
    const struct known_args *a = c->a;
    const struct kv_geometry *g = a->kv->geo;
    uint32_t lane = item / ATTEND_TAIL_SPLITS, split = item % ATTEND_TAIL_SPLITS;
    uint32_t head = lane % g->kv_heads;
    const struct plan_row *r = row_of(c, lane);
    if (kv_lane(g, a->layer, head).class_ != LANE_SPARSE || split >= splits_of(r))
        return;
    size_t width = (size_t)(a->heads + 2 * g->kv_heads) * g->head_dim;
    const float *q = (const float *)a->qkv + r->row * width + (size_t)head * c->group * g->head_dim;
    attend_split(c, lane, split, q, work);
    atomic_uint *left = &c->b->known_scratch->left[lane];
    if (atomic_fetch_sub_explicit(left, 1, memory_order_acq_rel) != 1)
        return;
    struct known_lane l = {.a = a,
                           .row = r,
                           .head = head,
                           .group = c->group,
                           .sink_rows = c->sink_rows,
                           .q = q,
                           .lse = a->lse + (size_t)lane * c->group,
                           .work = work};
    c->b->known->lane(&l, tail_of(c, lane), splits_of(r), c->partial_floats);
}

static void known_worker(void *arg, uint32_t worker)
{
    const struct known_call *c = arg;
    float *work = c->b->known_scratch->floats + worker * c->worker_floats;
    uint32_t n = c->n_lanes * ATTEND_TAIL_SPLITS;
    for (uint32_t i; (i = pool_next(c->b->pool, n)) < n;)
        known_item(c, i, work);
}

/* Scratch settles with the first steps. */
static void *grow(void *p, size_t *max, size_t need, size_t size)
{
    if (need <= *max)
        return p;
    free(p);
    *max = (need + need / 2 + 63) / 64 * 64;
    p = aligned_alloc(64, *max * size);
    CHECK(p != NULL); /* as mem_alloc: no ordinary memory left */
    return p;
}

static struct known_call call_of(struct cpu_backend *b, const struct known_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    struct known_call c = {.b = b,
                           .a = a,
                           .n_lanes = a->n_rows * g->kv_heads,
                           .group = a->heads / g->kv_heads,
                           .o_stride = (g->head_dim + ATTEND_PAD - 1) / ATTEND_PAD * ATTEND_PAD};
    c.sink_rows = (a->sinks + g->block_rows - 1) / g->block_rows * g->block_rows;
    c.partial_floats = attend_partial_size(c.group, c.o_stride, 1);
    size_t floats = attend_work_floats(c.o_stride, c.group), sinks = known_work_floats(c.sink_rows);
    c.worker_floats = ((floats > sinks ? floats : sinks) + 15) / 16 * 16;
    return c;
}

void cpu_known(struct backend *be, const struct known_args *a)
{
    struct cpu_backend *b = (struct cpu_backend *)(void *)be;
    struct known_scratch *s = b->known_scratch;
    struct known_call c = call_of(b, a);
    size_t floats = c.worker_floats * pool_threads(b->pool);
    s->floats = grow(s->floats, &s->max_floats, floats, sizeof *s->floats);
    s->left = grow(s->left, &s->max_lanes, c.n_lanes, sizeof *s->left);
    for (uint32_t i = 0; i < c.n_lanes; i++) {
        const struct plan_row *r = row_of(&c, i);
        CHECK(r->n_segments > 0 && r->pos + 1 > r->n_segments * SEGMENT_ROWS);
        CHECK(splits_of(r) <= ATTEND_TAIL_SPLITS);
        atomic_init(&s->left[i], splits_of(r));
    }
    pool_run(b->pool, known_worker, &c);
}

size_t cpu_known_bytes(const struct kv_geometry *g, uint32_t heads)
{
    uint32_t o_stride = (g->head_dim + ATTEND_PAD - 1) / ATTEND_PAD * ATTEND_PAD;
    return attend_tail_floats(heads / g->kv_heads, o_stride) * sizeof(float);
}

status cpu_known_open(struct cpu_backend *b)
{
    b->known = &known_scalar;
#if defined(__x86_64__)
    if (b->isa == ISA_AVX512)
        b->known = &known_avx512;
    else if (b->isa == ISA_AVX2)
        b->known = &known_avx2;
#endif
    b->known_scratch = mem_alloc(sizeof *b->known_scratch);
    return OK;
}

void cpu_known_close(struct cpu_backend *b)
{
    if (b->known_scratch == NULL)
        return;
    free(b->known_scratch->floats);
    free(b->known_scratch->left);
    mem_free(b->known_scratch);
    b->known_scratch = NULL;
}
