/* Sealing and its inverse: which lanes, which pages, on the pool. An item of work is a lane; what
 * happens to it is in seal_vec.h. Scratch belongs to the engine thread, which grows it before the
 * pool starts; nothing is allocated once the largest shape has been seen. */
#include "kernels/cpu/seal.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/page.h"

#include <stdlib.h>
#include <string.h>

struct seal_scratch {
    float *floats; /* [threads][worker_floats] */
    size_t max_floats, worker_floats;
    struct seal_tables tables;
};

static void fill_tables(struct seal_tables *t)
{
    for (uint32_t i = 0; i < ARRAY_LEN(t->bf16); i++) {
        t->bf16[i] = f32_to_bf16(e4m3_to_f32((uint8_t)i));
        t->e4m3[t->bf16[i] >> 4] = (uint8_t)i;
    }
}

static void *grow_scratch(struct seal_scratch *s, size_t worker_floats, uint32_t threads)
{
    s->worker_floats = (worker_floats + 15) / 16 * 16;
    size_t need = s->worker_floats * threads;
    if (need <= s->max_floats)
        return s->floats;
    free(s->floats);
    s->floats = aligned_alloc(64, need * sizeof(float));
    CHECK(s->floats != NULL); /* as mem_alloc: no ordinary memory left */
    s->max_floats = need;
    return s->floats;
}

/* Rows of the sinks' pages in a segment: whole pages at the start of the context. */
static uint32_t sink_rows_of(const struct kv_geometry *g, const struct digest_desc *d,
                             uint32_t segment)
{
    uint32_t rows = (d->sinks + g->block_rows - 1) / g->block_rows * g->block_rows;
    CHECK(rows < SEGMENT_ROWS);
    return segment == 0 ? rows : 0;
}

size_t cpu_digest_bytes(const struct kv_geometry *geo, const struct digest_desc *d)
{
    return digest_layout_of(geo->head_dim, d).bytes;
}

/* ---- seal ---------------------------------------------------------------------------------- */

struct seal_call {
    struct cpu_backend *b;
    const struct seal_args *a;
    struct digest_layout layout;
    uint32_t n_lanes;
};

/* Lanes are numbered [layer][KV head]; those of other classes do nothing. */
static void seal_lane_number(const struct seal_call *c, uint32_t lane, float *work)
{
    const struct seal_args *a = c->a;
    const struct kv_geometry *g = a->kv->geo;
    uint32_t layer = lane / g->kv_heads, head = lane % g->kv_heads;
    if (kv_lane(g, layer, head).class_ != LANE_SPARSE)
        return;
    uint8_t *pages = (uint8_t *)a->kv->hbm[LANE_SPARSE] + kv_page_offset(g, layer, head);
    uint32_t first = a->segment == 0 ? a->record : a->first_record;
    struct seal_lane s = {.geo = g,
                          .desc = &a->desc,
                          .layout = c->layout,
                          .from = pages,
                          .to = pages,
                          .from_blocks = a->from,
                          .to_blocks = a->to,
                          .record = digest_lane(a->kv, a->record, layer, head),
                          .sink_rows = sink_rows_of(g, &a->desc, a->segment),
                          .work = work,
                          .codes = c->b->codes,
                          .tables = &c->b->seal_scratch->tables,
                          .first_record = digest_lane(a->kv, first, layer, head)};
    c->b->seal->lane(&s);
}

static void seal_worker(void *arg, uint32_t worker)
{
    const struct seal_call *c = arg;
    struct seal_scratch *s = c->b->seal_scratch;
    for (uint32_t i; (i = pool_next(c->b->pool, c->n_lanes)) < c->n_lanes;)
        seal_lane_number(c, i, s->floats + worker * s->worker_floats);
}

void cpu_seal(struct backend *be, const struct seal_args *a)
{
    struct cpu_backend *b = (struct cpu_backend *)(void *)be;
    const struct kv_geometry *g = a->kv->geo;
    cpu_plan_flush(b);
    struct seal_call c = {.b = b,
                          .a = a,
                          .layout = digest_layout_of(g->head_dim, &a->desc),
                          .n_lanes = g->layers * g->kv_heads};
    CHECK(digest_takes(g, &a->desc, DIGEST_MAX_DIM));
    CHECK(a->desc.kind == DIGEST_NONE || c.layout.bytes <= a->kv->record_lane_bytes);
    grow_scratch(b->seal_scratch, seal_work_floats(g->head_dim, &a->desc), pool_threads(b->pool));
    pool_run(b->pool, seal_worker, &c);
}

/* ---- unpermute ----------------------------------------------------------------------------- */

struct unpermute_call {
    struct cpu_backend *b;
    const struct unpermute_args *a;
    uint32_t n_lanes;
};

static const uint8_t *page_in(const struct kv_memory *kv, block_id b, size_t offset)
{
    const uint8_t *base =
        b & BLOCK_IN_DRAM ? kv->dram[LANE_SPARSE] : (const uint8_t *)kv->hbm[LANE_SPARSE];
    return base + (b & ~BLOCK_IN_DRAM) * kv->geo->block_bytes[LANE_SPARSE] + offset;
}

/* Row `from` of a page to row `to` of another. */
static void copy_row(const struct kv_geometry *g, uint8_t *to_page, uint32_t to,
                     const uint8_t *from_page, uint32_t from)
{
    const uint32_t number = kv_number_bytes(g->type);
    for (uint32_t c = 0; c < g->head_dim; c += 2)
        memcpy(to_page + page_key(g, to, c) * number, from_page + page_key(g, from, c) * number,
               2 * (size_t)number);
    for (uint32_t c = 0; c < g->head_dim; c++)
        memcpy(to_page + page_value(g, to, c) * number, from_page + page_value(g, from, c) * number,
               number);
}

static void unpermute_lane(const struct unpermute_args *a, uint32_t lane)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t layer = lane / g->kv_heads, head = lane % g->kv_heads, rows = g->block_rows;
    if (kv_lane(g, layer, head).class_ != LANE_SPARSE)
        return;
    size_t offset = kv_page_offset(g, layer, head);
    const uint16_t *position = (const void *)digest_lane(a->kv, a->record, layer, head);
    for (uint32_t i = 0; i < SEGMENT_ROWS; i++) {
        uint32_t p = position[i];
        CHECK(p < SEGMENT_ROWS);
        if (p >= a->n_rows)
            continue;
        uint8_t *to = (uint8_t *)a->kv->hbm[LANE_SPARSE] +
                      a->to[p / rows] * g->block_bytes[LANE_SPARSE] + offset;
        copy_row(g, to, p % rows, page_in(a->kv, a->from[i / rows], offset), i % rows);
    }
}

static void unpermute_worker(void *arg, uint32_t worker)
{
    (void)worker;
    const struct unpermute_call *c = arg;
    for (uint32_t i; (i = pool_next(c->b->pool, c->n_lanes)) < c->n_lanes;)
        unpermute_lane(c->a, i);
}

void cpu_unpermute(struct backend *be, const struct unpermute_args *a)
{
    struct cpu_backend *b = (struct cpu_backend *)(void *)be;
    const struct kv_geometry *g = a->kv->geo;
    cpu_plan_flush(b);
    struct unpermute_call c = {b, a, g->layers * g->kv_heads};
    CHECK(a->n_rows <= SEGMENT_ROWS);
    pool_run(b->pool, unpermute_worker, &c);
}

status cpu_seal_open(struct cpu_backend *b)
{
    b->seal = &seal_scalar;
#if defined(__x86_64__)
    if (b->isa == ISA_AVX512)
        b->seal = &seal_avx512;
    else if (b->isa == ISA_AVX2)
        b->seal = &seal_avx2;
#endif
    b->seal_scratch = mem_alloc(sizeof *b->seal_scratch);
    fill_tables(&b->seal_scratch->tables);
    return OK;
}

void cpu_seal_close(struct cpu_backend *b)
{
    if (b->seal_scratch == NULL)
        return;
    free(b->seal_scratch->floats);
    mem_free(b->seal_scratch);
    b->seal_scratch = NULL;
}
