/* Known mass: an item of work is a split of the tail of one (row, KV head), attended as attend.c would;
 * behind the last one the sinks are added (known_vec.h). plan.c runs them. What attend folds later has
 * the bits it would compute itself. */
#include "kernels/cpu/known.h"
#include "kernels/cpu/plan.h"

#include <stdlib.h>

struct known_scratch {
    float *floats; /* [threads][worker_floats] */
    size_t max_floats;
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

static const float *query_of(const struct known_call *c, uint32_t lane)
{
    const struct known_args *a = c->a;
    const struct kv_geometry *g = a->kv->geo;
    size_t width = (size_t)(a->heads + 2 * g->kv_heads) * g->head_dim;
    return (const float *)a->qkv + row_of(c, lane)->row * width +
           (size_t)(lane % g->kv_heads) * c->group * g->head_dim;
}

uint32_t known_items(const struct known_call *c, uint32_t lane)
{
    const struct kv_geometry *g = c->a->kv->geo;
    bool sparse = kv_lane(g, c->a->layer, lane % g->kv_heads).class_ == LANE_SPARSE;
    return sparse ? splits_of(row_of(c, lane)) : 0;
}

void known_item(const struct known_call *c, uint32_t lane, uint32_t split, uint32_t worker)
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
                              .q = query_of(c, lane),
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
                              .work = c->b->known_scratch->floats + worker * c->worker_floats});
}

void known_finish(const struct known_call *c, uint32_t lane, uint32_t worker)
{
    const struct plan_row *r = row_of(c, lane);
    struct known_lane l = {.a = c->a,
                           .row = r,
                           .head = lane % c->a->kv->geo->kv_heads,
                           .group = c->group,
                           .sink_rows = c->sink_rows,
                           .q = query_of(c, lane),
                           .lse = c->a->lse + (size_t)lane * c->group,
                           .work = c->b->known_scratch->floats + worker * c->worker_floats};
    c->b->known->lane(&l, tail_of(c, lane), splits_of(r), c->partial_floats);
}

void known_prepare(struct known_call *c, struct cpu_backend *b, const struct known_args *a)
{
    struct known_scratch *s = b->known_scratch;
    const struct kv_geometry *g = a->kv->geo;
    *c = (struct known_call){
        .b = b, .a = a, .group = a->heads / g->kv_heads, .o_stride = attend_o_stride(g->head_dim)};
    c->sink_rows = (a->sinks + g->block_rows - 1) / g->block_rows * g->block_rows;
    c->partial_floats = attend_partial_size(c->group, c->o_stride, 1);
    size_t tail = attend_work_floats(c->o_stride, c->group),
           sinks = known_work_floats(c->sink_rows);
    c->worker_floats = ((tail > sinks ? tail : sinks) + 15) / 16 * 16;
    size_t floats = c->worker_floats * pool_threads(b->pool);
    if (floats > s->max_floats) { /* settles with the first step */
        free(s->floats);
        s->max_floats = floats;
        s->floats = aligned_alloc(64, (floats + 15) / 16 * 16 * sizeof *s->floats);
        CHECK(s->floats != NULL); /* as mem_alloc: no ordinary memory left */
    }
    for (uint32_t i = 0; i < a->n_rows; i++) {
        const struct plan_row *r = &a->rows[i];
        CHECK(r->n_segments > 0 && r->pos + 1 > r->n_segments * SEGMENT_ROWS);
        CHECK(splits_of(r) <= ATTEND_TAIL_SPLITS);
    }
}

size_t cpu_known_bytes(const struct kv_geometry *g, uint32_t heads)
{
    return attend_tail_floats(heads / g->kv_heads, attend_o_stride(g->head_dim)) * sizeof(float);
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
    mem_free(b->known_scratch);
    b->known_scratch = NULL;
}
