/* Known mass: every (row, KV head) is an item of work of its own (known_vec.h). */
#include "kernels/cpu/known.h"
#include "kernels/cpu/cpu.h"

#include <stdlib.h>

struct known_scratch {
    float *floats; /* [threads][worker_floats] */
    size_t max_floats, worker_floats;
};

struct known_call {
    struct cpu_backend *b;
    const struct known_args *a;
    uint32_t sink_rows, n_lanes;
};

static void known_item(const struct known_call *c, uint32_t i, float *work)
{
    const struct known_args *a = c->a;
    const struct kv_geometry *g = a->kv->geo;
    uint32_t group = a->heads / g->kv_heads, head = i % g->kv_heads;
    const struct plan_row *row = &a->rows[i / g->kv_heads];
    if (kv_lane(g, a->layer, head).class_ != LANE_SPARSE)
        return;
    size_t width = (size_t)(a->heads + 2 * g->kv_heads) * g->head_dim;
    struct known_lane l = {.a = a,
                           .row = row,
                           .head = head,
                           .group = group,
                           .sink_rows = c->sink_rows,
                           .q = (const float *)a->qkv + row->row * width +
                                (size_t)head * group * g->head_dim,
                           .out = a->lse + (size_t)i * group,
                           .work = work};
    c->b->known->lane(&l);
}

static void known_worker(void *arg, uint32_t worker)
{
    const struct known_call *c = arg;
    struct known_scratch *s = c->b->known_scratch;
    for (uint32_t i; (i = pool_next(c->b->pool, c->n_lanes)) < c->n_lanes;)
        known_item(c, i, s->floats + worker * s->worker_floats);
}

void cpu_known(struct backend *be, const struct known_args *a)
{
    struct cpu_backend *b = (struct cpu_backend *)(void *)be;
    struct known_scratch *s = b->known_scratch;
    const struct kv_geometry *g = a->kv->geo;
    struct known_call c = {.b = b, .a = a, .n_lanes = a->n_rows * g->kv_heads};
    uint32_t tail = 0;
    c.sink_rows = (a->sinks + g->block_rows - 1) / g->block_rows * g->block_rows;
    for (uint32_t i = 0; i < a->n_rows; i++) {
        const struct plan_row *r = &a->rows[i];
        CHECK(r->n_segments > 0 && r->pos + 1 > r->n_segments * SEGMENT_ROWS);
        uint32_t n = r->pos + 1 - r->n_segments * SEGMENT_ROWS;
        tail = n > tail ? n : tail;
    }
    s->worker_floats = known_work_floats(c.sink_rows, tail);
    size_t need = s->worker_floats * pool_threads(b->pool);
    if (need > s->max_floats) {
        free(s->floats);
        s->max_floats = (need + need / 2 + 15) / 16 * 16;
        s->floats = aligned_alloc(64, s->max_floats * sizeof *s->floats);
        CHECK(s->floats != NULL); /* as mem_alloc: no ordinary memory left */
    }
    pool_run(b->pool, known_worker, &c);
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
