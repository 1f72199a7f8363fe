/* Attend: the commands of a call.
 *
 * Rows that attend by position come as lists (attend_list.cu), one for tasks of few queries and one for tasks
 * of many; each instance's planned rows as a set. Each is a launch of its own: kernels are small, since an SM
 * that meets code for the first time waits for it. All of a call's parameters but the addresses of its
 * buffers stay what they are from step to step, until a bucket grows. */
#include "kernels/cuda/attend.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/prefill.h"
#include "kernels/cuda/resolve.h"

#include <stdio.h>
#include <string.h>

namespace
{

enum {
    PASSES_ROWS = 512,  /* steps with more are prompts, where a conversion is little */
    PASSED_ROWS = 1024, /* with those that belong to nobody */
};

uint32_t ceil_of(size_t n, size_t unit)
{
    return (uint32_t)((n + unit - 1) / unit);
}

void fill_set(struct cuda_backend *b, const struct attend_args *a, const struct attend_plans *p,
              struct attend_call *c)
{
    struct attend_set *s = &c->set;
    const struct kv_geometry *g = a->kv->geo;
    s->rows = cuda_rows(b, g, p->rows, p->n_rows, &s->n_rows, NULL);
    s->pages = p->pages;
    s->masks = p->masks;
    s->n_pages = p->n_pages;
    s->tail = (float *)(uintptr_t)p->tail;
    s->page_cap = p->page_cap;
    if (p->n_estimates == NULL || p->estimate_cap == 0)
        return;
    s->estimates = p->estimates;
    s->n_estimates = p->n_estimates;
    s->scores = p->scores;
    s->records = (const uint8_t *)a->kv->records;
    s->record_bytes = a->kv->record_bytes;
    s->record_lane_bytes = a->kv->record_lane_bytes;
    s->layout = digest_layout_of(g->head_dim, &p->desc);
    s->estimate_cap = p->estimate_cap;
    s->stride = p->stride;
    s->coded = p->desc.kind == DIGEST_CODES;
    s->part_rows = SEGMENT_ROWS / p->desc.parts;
    CHECK(s->layout.values != 0);
}

void run_few(struct cuda_backend *b, const struct attend_list *l, struct attend_call *c)
{
    c->tasks = l->few;
    c->n_tasks = l->n_few;
    c->merges = l->few_merges;
    c->n_merges = l->n_few_merges;
    c->max_queries = l->few_queries;
    if (c->n_tasks == 0 || !attend_reserve(b, c, l->few_partials, l->counters))
        return;
    cuda_do(b, attend_run_few, c, sizeof *c);
    if (c->n_merges > 0)
        cuda_do(b, attend_run_merge, c, sizeof *c);
}

/* While pages are on the way, rows that have all of theirs come first, on the SMs that the copies leave alone: all
 * CTAs at once, so that none begins its share when the others have ended. The launch of the others must do nothing
 * before it waits for this one: they share scratch and counters. */
void run_resident(struct cuda_backend *b, struct attend_call *c)
{
    const uint32_t all = c->set.n_units, most = gather_leaves(b) * attend_planned_ctas(c->dim);
    c->set.part = SET_RESIDENT;
    c->set.n_units = all < most ? all : most;
    cuda_do(b, attend_run_planned, c, sizeof *c);
    c->set.part = SET_SPILLED;
    c->set.n_units = all;
}

void run_planned(struct cuda_backend *b, const struct attend_plans *p, struct attend_call *c)
{
    bool resident = false;
    attend_cut_set(c, &c->set);
    const size_t entries = attend_set_entries(c, &c->set);
    CHECK(entries * c->set.n_slots * c->group < UINT32_MAX);
    if (!attend_reserve(b, c, entries * c->set.n_slots * c->group, entries))
        return;
    for (uint32_t i = 0; i < p->n_rows; i++)
        resident |= p->rows[i].hot == NULL;
    if (resident && resolve_copies(b, p->pages))
        run_resident(b, c);
    cuda_do(b, attend_run_planned, c, sizeof *c);
}

void run_many(struct cuda_backend *b, const struct attend_list *l, struct attend_call *c)
{
    c->tasks = l->many;
    c->n_tasks = l->n_many;
    c->merges = l->many_merges;
    c->n_merges = l->n_many_merges;
    c->max_queries = l->many_queries;
    if (c->n_tasks == 0 || !attend_reserve(b, c, l->many_partials, 0))
        return;
    cuda_do(b, attend_run_many, c, sizeof *c);
    if (c->n_merges > 0)
        cuda_do(b, attend_run_merge, c, sizeof *c);
}

/* Whether the result of this call stays bf16. */
bool passes(const struct cuda_backend *b, const struct attend_args *a)
{
    const struct cuda_attend *t = b->attend;
    return t->passing_step == b->n_steps + 1 && t->passing_qkv == a->qkv &&
           t->passing_layer == a->layer;
}

bool has_sparse(const struct attend_call *c)
{
    for (uint32_t h = 0; h < c->kv_heads; h++)
        if (c->lanes[h] >> LANE_CLASS_SHIFT == LANE_SPARSE)
            return true;
    return false;
}

} /* namespace */

bool attend_fits(struct cuda_backend *b, const struct kv_geometry *g, uint32_t heads)
{
    CHECK(g->block_rows == 8 || g->block_rows == 16 || g->block_rows == 32);
    const bool fp8 = g->type == KV_E4M3;
    const uint32_t unit = fp8 ? 4 : 2; /* numbers: copies are of 4 bytes at least */
    const bool shape = g->head_dim % unit == 0 && g->head_dim <= CUDA_MAX_DIM &&
                       heads % g->kv_heads == 0 && heads / g->kv_heads <= CUDA_FEW &&
                       g->kv_heads <= CUDA_MAX_KV_HEADS;
    size_t few = attend_few_bytes(g->head_dim, fp8), many = attend_many_bytes(g->head_dim, fp8);
    size_t need = attend_planned_bytes(g->head_dim, fp8);
    need = few > need ? few : need;
    need = many > need ? many : need;
    if (shape && need <= b->attend->shared_max)
        return true;
    if (b->error != OK)
        return false;
    b->error = shape ? ERR_DEVICE : ERR_ARG;
    if (shape)
        snprintf(b->text, sizeof b->text,
                 "cuda: heads of %u numbers need %zu KiB of shared memory per block, this device "
                 "has %zu",
                 g->head_dim, need >> 10, b->attend->shared_max >> 10);
    else
        snprintf(b->text, sizeof b->text,
                 "cuda: %u heads of %u numbers, %u of them KV heads: attention over pages of %s "
                 "takes a multiple of %u numbers, %d at most, and %d heads per KV head: use "
                 "--device cpu",
                 heads, g->head_dim, g->kv_heads, fp8 ? "fp8" : "bf16", unit, CUDA_MAX_DIM,
                 CUDA_FEW);
    return false;
}

void attend_accept(struct cuda_backend *b, const struct append_args *a)
{
    struct cuda_attend *t = b->attend;
    const uint32_t cols = a->heads * a->kv->geo->head_dim;
    struct attend_args like = {};
    like.kv = a->kv;
    like.layer = a->layer;
    like.heads = a->heads;
    uint32_t n_rows = 0;
    t->passing_step = 0;
    t->passed_as = NULL;
    for (uint32_t i = 0; i < a->n_seqs; i++) {
        const uint32_t end = a->seqs[i].first_row + a->seqs[i].n_rows;
        n_rows = end > n_rows ? end : n_rows;
    }
    if (!a->to_attend || n_rows > PASSES_ROWS || !cuda_linear_is_half(n_rows, cols))
        return;
    for (uint32_t i = 0; i < a->n_seqs; i++)
        if (a->seqs[i].n_rows > 1 && cuda_prefill_takes(b, &like, &a->seqs[i]))
            return; /* cuda_prefill has a way of its own */
    if (!cuda_reserve(b, &t->half, &t->half_bytes,
                      (size_t)PASSED_ROWS * cols * sizeof(__nv_bfloat16)))
        return;
    t->passing_step = b->n_steps + 1;
    t->passing_qkv = a->qkv;
    t->passing_layer = a->layer;
}

const __nv_bfloat16 *attend_passed(const struct cuda_backend *b, const void *out, uint32_t n_rows)
{
    const struct cuda_attend *t = b->attend;
    if (t->passing_step != b->n_steps + 1 || t->passed_as != out)
        return NULL;
    CHECK(n_rows <= PASSED_ROWS);
    return (const __nv_bfloat16 *)t->half;
}

bool attend_is_elsewhere(struct cuda_backend *b, const struct attend_args *a,
                         const struct batch_seq *q)
{
    return !passes(b, a) && q->n_rows > 1 && cuda_prefill_takes(b, a, q);
}

void attend_fill(struct attend_call *c, const struct kv_memory *kv, uint32_t layer, uint32_t heads,
                 const void *qkv, float scale)
{
    const struct kv_geometry *g = kv->geo;
    memset(c, 0, sizeof *c);
    for (uint32_t h = 0; h < g->kv_heads; h++) {
        struct lane_place place = kv_lane(g, layer, h);
        c->lanes[h] = place.index | (uint32_t)place.class_ << LANE_CLASS_SHIFT;
    }
    for (int i = 0; i < LANE_CLASSES; i++) {
        c->hbm[i] = (const uint8_t *)kv->hbm[i];
        c->dram[i] = (const uint8_t *)kv->dram[i];
        c->block_bytes[i] = g->block_bytes[i];
    }
    c->page_bytes = g->page_bytes;
    c->page_shift = g->block_rows == 8 ? 3 : g->block_rows == 16 ? 4 : 5;
    c->fp8 = g->type == KV_E4M3;
    c->dim = g->head_dim;
    c->heads = heads;
    c->kv_heads = g->kv_heads;
    c->group = heads / g->kv_heads;
    c->q_stride = (size_t)(heads + 2 * g->kv_heads) * g->head_dim;
    c->plain_scale = scale;
    c->scale = scale * 1.44269504089f;
    c->q = (const float *)qkv;
}

bool attend_reserve(struct cuda_backend *b, struct attend_call *c, size_t partials, size_t counters)
{
    struct cuda_attend *t = b->attend;
    size_t had = t->arrived_bytes;
    size_t floats = cuda_bucket(partials) * attend_padded_dim(c->dim);
    if (!cuda_reserve(b, &t->part_o, &t->part_o_bytes, floats * sizeof(float)) ||
        !cuda_reserve(b, &t->part_ml, &t->part_ml_bytes, cuda_bucket(partials) * sizeof(float2)) ||
        !cuda_reserve(b, &t->arrived, &t->arrived_bytes, cuda_bucket(counters) * 4))
        return false;
    if (t->arrived_bytes != had && /* new memory: no command of this step has it */
        !cuda_ok(b, cudaMemsetAsync(t->arrived, 0, t->arrived_bytes, b->stream), "attend"))
        return false;
    c->part_o = (float *)t->part_o;
    c->part_ml = (float2 *)t->part_ml;
    c->arrived = (uint32_t *)t->arrived;
    return true;
}

void attend_cut_set(const struct attend_call *c, struct attend_set *s)
{
    /* Of means too: a split is a chain of latencies, and two entries of a thread wait one after the other. */
    s->estimate_split = CUDA_CODED;
    if (s->coded && s->part_rows > 16)
        s->estimate_split /= 2; /* the codes of a split's pages go to shared memory */
    s->slots.pages = ceil_of(s->pages != NULL ? (size_t)s->page_cap << c->page_shift : s->sink_rows,
                             CUDA_PLAN_SPLIT);
    s->slots.tail = s->tail != NULL ? 0 : CUDA_TAIL_SPLITS;
    s->slots.estimates = ceil_of(s->estimate_cap, s->estimate_split);
    s->n_slots = s->slots.pages + s->slots.tail + s->slots.estimates;
    s->runs_tail = s->tail == NULL || s->lse != NULL;
    const uint32_t tail = s->runs_tail ? CUDA_TAIL_SPLITS : 0;
    size_t units = s->slots.pages + tail + s->slots.estimates;
    units = attend_set_entries(c, s) * (units > 0 ? units : 1);
    s->n_units = units < UINT32_MAX ? (uint32_t)units : UINT32_MAX;
}

void cuda_attend(struct backend *be, const struct attend_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    CHECK(a->scale > 0);
    if (!attend_fits(b, a->kv->geo, a->heads))
        return;
    const struct attend_list *l = attend_list_get(b, a);
    if (l == NULL)
        return;
    struct attend_call c, next;
    attend_fill(&c, a->kv, a->layer, a->heads, a->qkv, a->scale);
    c.out = (float *)a->out;
    c.lse = a->lse;
    if (passes(b, a)) {
        c.half = (__nv_bfloat16 *)b->attend->half;
        b->attend->passed_as = a->out;
    }
    memcpy(&next, &c, sizeof next);
    run_many(b, l, &next);
    for (uint32_t i = 0; i < a->n_seqs; i++)
        if (attend_is_elsewhere(b, a, &a->seqs[i]))
            cuda_prefill(b, a, &a->seqs[i]);
    for (uint32_t i = 0; i < a->n_plans && has_sparse(&c); i++) {
        if (a->plans[i].n_rows == 0)
            continue;
        memcpy(&next, &c, sizeof next);
        fill_set(b, a, &a->plans[i], &next);
        if (next.set.rows == NULL)
            return;
        run_planned(b, &a->plans[i], &next);
    }
    memcpy(&next, &c, sizeof next);
    run_few(b, l, &next);
}

status cuda_attend_open(struct cuda_backend *b)
{
    int bytes = 0;
    b->attend = (struct cuda_attend *)mem_alloc(sizeof *b->attend);
    b->attend->lists = attend_lists_create();
    if (!cuda_ok(b,
                 cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, b->device),
                 "shared memory"))
        return err(b->error, "%s", b->text);
    b->attend->shared_max = (size_t)bytes;
    attend_prepare_few();
    attend_prepare_many();
    attend_prepare_planned();
    return OK;
}

void cuda_attend_close(struct cuda_backend *b)
{
    struct cuda_attend *t = b->attend;
    if (t == NULL)
        return;
    attend_lists_destroy(t->lists);
    cudaFree(t->part_o);
    cudaFree(t->part_ml);
    cudaFree(t->arrived);
    cudaFree(t->half);
    mem_free(t);
    b->attend = NULL;
}
