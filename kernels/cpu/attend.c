/* Append and attend: who computes what when.
 *
 * When there are many tasks (attend_plan.h), one worker runs a task from its first split to its last
 * and folds as it goes. When there are few (one stream decoding at a long context), splits are items
 * of their own: partial results go to scratch, and whoever finishes the last split of a task folds
 * them all, from the first on. Both ways run the same operations in the same order (attend.h), so
 * the choice cannot be seen in a result. Heavy tasks are handed out first. */
#include "kernels/cpu/attend.h"
#include "kernels/cpu/attend_plan.h"
#include "kernels/cpu/cpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    APPEND_ROWS = 16, /* rows of an append item: two pages at least, so few shared lines */
    APPEND_ALONE = 6, /* up to so many rows the engine thread appends by itself: waking the pool
                         costs more */
};

/* ---- run ----------------------------------------------------------------------------------- */

static size_t row_numbers(const struct attend_call *c)
{
    return (size_t)(c->a->heads + 2 * c->a->kv->geo->kv_heads) * c->a->kv->geo->head_dim;
}

static struct attend_partial partial_at(const struct attend_call *c, float *at, uint32_t n_rows)
{
    return attend_partial_at(at, c->group, c->o_stride, n_rows);
}

/* Rows before the split see nothing of it and are left out: so many of them. */
static uint32_t rows_skipped(const struct attend_call *c, const struct attend_task *k,
                             struct split_place at)
{
    uint32_t first = c->a->seqs[k->seq].first_pos + k->row;
    return at.kind == STRETCH_TABLE && at.begin > first ? at.begin - first : 0;
}

/* Tells a part which pages its worker reads next. */
static void look_ahead(const struct attend_call *c, struct attend_part *p,
                       const struct attend_task *k, uint32_t split)
{
    uint32_t rows = c->a->kv->geo->block_rows;
    struct split_place at = attend_split_at(k, split);
    if (at.kind == STRETCH_ESTIMATES)
        return;
    const uint32_t *masks;
    p->ahead = attend_table_of(c, k, at.kind, &masks);
    p->ahead.blocks += at.begin / rows;
    uint32_t blocks = (at.end + rows - 1) / rows - at.begin / rows;
    p->n_ahead = blocks < ATTEND_GROUP / rows ? blocks : ATTEND_GROUP / rows;
}

/* Runs one split of a task; `next` is what this worker runs after it, or NULL. */
static void run_part(const struct attend_call *c, const struct attend_task *k,
                     struct split_place at, struct attend_partial to, float *work,
                     const struct attend_task *next, uint32_t next_split)
{
    const struct attend_args *a = c->a;
    const struct batch_seq *q = &a->seqs[k->seq];
    uint32_t skip = rows_skipped(c, k, at), first = q->first_pos + k->row + skip;
    struct attend_part p = {
        .geo = a->kv->geo,
        .q = (const float *)a->qkv + (q->first_row + k->row + skip) * row_numbers(c) +
             (size_t)k->head * c->group * a->kv->geo->head_dim,
        .q_stride = row_numbers(c),
        .group = c->group,
        .n_rows = k->n_rows - skip,
        .first_pos = at.kind == STRETCH_TABLE ? first : at.end, /* a list is seen whole */
        .begin = at.begin,
        .end = at.end,
        .scale = a->scale,
        .o_stride = c->o_stride,
        .o = to.o,
        .m = to.m,
        .l = to.l,
        .work = work,
    };
    p.table = attend_table_of(c, k, at.kind, &p.masks);
    if (next != NULL)
        look_ahead(c, &p, next, next_split);
    c->b->attend->part(&p);
}

static void run_estimates(const struct attend_call *c, const struct attend_task *k,
                          struct split_place at, struct attend_partial to, float *work)
{
    const int8_t *values[ATTEND_SPLIT];
    float factors[ATTEND_SPLIT];
    attend_gather_estimates(c, k, at, values, factors, work);
    c->b->attend->estimate(&(struct attend_estimates){.values = values,
                                                      .factors = factors,
                                                      .logits = work,
                                                      .n = at.end - at.begin,
                                                      .dim = c->a->kv->geo->head_dim,
                                                      .group = c->group,
                                                      .o_stride = c->o_stride,
                                                      .o = to.o,
                                                      .m = to.m,
                                                      .l = to.l});
    if (k->plans->desc.kind == DIGEST_CODES)
        codes_attend(c, k, at, to.o, to.m, work);
}

/* Rows that a split skips are not in its partial result. */
static void run_split(const struct attend_call *c, const struct attend_task *k, uint32_t split,
                      float *to, float *work, const struct attend_task *next, uint32_t next_split)
{
    struct split_place at = attend_split_at(k, split);
    struct attend_partial p = partial_at(c, to, k->n_rows);
    if (at.kind == STRETCH_ESTIMATES)
        run_estimates(c, k, at, p, work);
    else
        run_part(c, k, at, p, work, next, next_split);
}

/* What `known` computed of a split of a task; NULL: nothing. */
static const float *tail_part(const struct attend_call *c, const struct attend_task *k,
                              struct split_place at)
{
    if (k->tail == NULL || at.kind != STRETCH_TABLE)
        return NULL;
    uint32_t split = attend_splits(k->stretch[STRETCH_TABLE].begin, at.begin);
    return k->tail + split * attend_partial_floats(c, 1);
}

/* Adds a split's partial result, in `part` or from the tail, to `total`; the first one begins it. */
static void fold_split(const struct attend_call *c, const struct attend_task *k, uint32_t split,
                       float *total, const float *part)
{
    struct split_place place = attend_split_at(k, split);
    const float *tail = tail_part(c, k, place);
    if (tail != NULL)
        part = tail;
    if (split == 0) {
        if (part != total)
            memcpy(total, part, attend_partial_floats(c, k->n_rows) * sizeof *total);
        return;
    }
    uint32_t skipped = rows_skipped(c, k, place);
    size_t skip = (size_t)skipped * c->group, n = (size_t)k->n_rows * c->group;
    struct attend_partial t = partial_at(c, total, k->n_rows);
    const float *m = part + n * c->o_stride;
    c->b->attend->fold(t.o + skip * c->o_stride, t.m + skip, t.l + skip, part, m, m + n,
                       (uint32_t)(n - skip), c->o_stride);
}

static void write_out(const struct attend_call *c, const struct attend_task *k, float *total)
{
    const struct attend_args *a = c->a;
    uint32_t dim = a->kv->geo->head_dim;
    struct attend_partial t = partial_at(c, total, k->n_rows);
    for (uint32_t r = 0; r < k->n_rows; r++)
        for (uint32_t h = 0; h < c->group; h++) {
            size_t q = (size_t)r * c->group + h, row = a->seqs[k->seq].first_row + k->row + r;
            size_t at = row * a->heads + (size_t)k->head * c->group + h;
            c->b->attend->finish(t.o + q * c->o_stride, t.l[q], (float *)a->out + at * dim, dim);
            if (a->lse != NULL)
                a->lse[at] = (float)(M_LN2 * ((double)t.m[q] + log2((double)t.l[q])));
        }
}

/* The first split from i on that is not there already; n_splits if there is none. */
static uint32_t next_split(const struct attend_call *c, const struct attend_task *k, uint32_t i)
{
    while (i < k->n_splits && tail_part(c, k, attend_split_at(k, i)) != NULL)
        i++;
    return i;
}

static void run_task(const struct attend_call *c, float *own, const struct attend_task *k,
                     const struct attend_task *next)
{
    size_t size = attend_partial_floats(c, ATTEND_ROWS);
    for (uint32_t i = 0; i < k->n_splits; i++) {
        float *part = i == 0 ? own : own + size;
        uint32_t after = next_split(c, k, i + 1);
        bool last = after == k->n_splits;
        if (tail_part(c, k, attend_split_at(k, i)) == NULL)
            run_split(c, k, i, part, own + 2 * size, last ? next : k, last ? 0 : after);
        fold_split(c, k, i, own, part);
    }
    write_out(c, k, own);
}

static void run_item(const struct attend_call *c, float *own, struct attend_item it,
                     const struct attend_item *next)
{
    struct attend_scratch *s = c->s;
    struct attend_task *k = &s->tasks[it.task];
    size_t size = attend_partial_floats(c, k->n_rows);
    float *total = s->floats + k->partial;
    run_split(c, k, it.split, total + it.split * size, own,
              next != NULL ? &s->tasks[next->task] : NULL, next != NULL ? next->split : 0);
    if (atomic_fetch_sub_explicit(&k->splits_left, 1, memory_order_acq_rel) != 1)
        return;
    for (uint32_t i = 0; i < k->n_splits; i++)
        fold_split(c, k, i, total, total + i * size);
    write_out(c, k, total);
}

/* A worker knows its next item before it runs one, to prefetch the beginning of it. */
static void attend_worker(void *arg, uint32_t worker)
{
    const struct attend_call *c = arg;
    struct attend_scratch *s = c->s;
    uint32_t n = (uint32_t)s->n_items, i = pool_next(c->b->pool, n);
    float *own = s->floats + worker * s->worker_floats;
    while (i < n) {
        uint32_t after = pool_next(c->b->pool, n);
        const struct attend_item *next = after < n ? &s->items[after] : NULL;
        if (s->by_split)
            run_item(c, own, s->items[i], next);
        else
            run_task(c, own, &s->tasks[i], next != NULL ? &s->tasks[next->task] : NULL);
        i = after;
    }
}

void cpu_attend(struct backend *be, const struct attend_args *a)
{
    struct cpu_backend *b = (struct cpu_backend *)(void *)be;
    const struct kv_geometry *g = a->kv->geo;
    CHECK(g->head_dim % 2 == 0 && a->heads % g->kv_heads == 0);
    CHECK(g->block_rows == 8 || g->block_rows == 16 || g->block_rows == 32);
    struct attend_call c = {.b = b,
                            .a = a,
                            .s = b->attend_scratch,
                            .group = a->heads / g->kv_heads,
                            .o_stride = attend_o_stride(g->head_dim)};
    cpu_plan_flush(b);
    attend_plan(&c);
    if (c.s->n_items == 0)
        return;
    pool_run(b->pool, attend_worker, &c);
}

/* ---- append -------------------------------------------------------------------------------- */

struct append_call {
    struct cpu_backend *b;
    const struct append_args *a;
};

/* RMSNorm of one head, in eight chains of sums whatever the instruction set. */
static void normalise_head(float *x, const float *gain, float eps, uint32_t dim)
{
    enum { CHAINS = 8 };
    float part[CHAINS] = {0}, sum = 0;
    for (uint32_t i = 0; i < dim; i++)
        part[i % CHAINS] += x[i] * x[i];
    for (uint32_t i = 0; i < CHAINS; i++)
        sum += part[i];
    float scale = 1.0f / sqrtf(sum / (float)dim + eps);
    for (uint32_t i = 0; i < dim; i++)
        x[i] = x[i] * scale * gain[i];
}

/* What comes before RoPE in some architectures (qwen2: bias; qwen3: norms). */
static void prepare_row(const struct append_args *a, float *qkv)
{
    uint32_t dim = a->kv->geo->head_dim, kv_heads = a->kv->geo->kv_heads;
    size_t numbers = (size_t)(a->heads + 2 * kv_heads) * dim;
    for (size_t i = 0; a->bias != NULL && i < numbers; i++)
        qkv[i] += a->bias[i];
    for (uint32_t h = 0; a->q_norm != NULL && h < a->heads + kv_heads; h++)
        normalise_head(qkv + (size_t)h * dim, h < a->heads ? a->q_norm : a->k_norm, a->norm_eps,
                       dim);
}

static void append_rows(const struct append_call *c, const struct batch_seq *q, uint32_t row,
                        uint32_t n_rows)
{
    const struct append_args *a = c->a;
    const struct kv_geometry *g = a->kv->geo;
    size_t numbers = (size_t)(a->heads + 2 * g->kv_heads) * g->head_dim;
    for (uint32_t r = row; r < row + n_rows; r++) {
        uint32_t pos = q->first_pos + r;
        struct append_row p = {
            .kv = a->kv,
            .layer = a->layer,
            .qkv = (float *)a->qkv + (q->first_row + r) * numbers,
            .cos = a->rope_cos + (size_t)pos * (g->head_dim / 2),
            .sin = a->rope_sin + (size_t)pos * (g->head_dim / 2),
            .heads = a->heads,
            .page_row = pos % g->block_rows,
        };
        for (int i = 0; i < LANE_CLASSES; i++)
            if (q->blocks[i] != NULL)
                p.blocks[i] = q->blocks[i][pos / g->block_rows];
        prepare_row(a, p.qkv);
        c->b->attend->append(&p);
    }
}

/* Items are chunks of rows, sequence by sequence; a worker's item numbers only rise, so it walks the
 * sequences once. */
static void append_worker(void *arg, uint32_t worker)
{
    (void)worker;
    const struct append_call *c = arg;
    uint32_t n = 0, seq = 0, before = 0;
    for (uint32_t s = 0; s < c->a->n_seqs; s++)
        n += (c->a->seqs[s].n_rows + APPEND_ROWS - 1) / APPEND_ROWS;
    for (uint32_t i; (i = pool_next(c->b->pool, n)) < n;) {
        for (uint32_t chunks;; before += chunks, seq++) {
            chunks = (c->a->seqs[seq].n_rows + APPEND_ROWS - 1) / APPEND_ROWS;
            if (i < before + chunks)
                break;
        }
        const struct batch_seq *q = &c->a->seqs[seq];
        uint32_t row = (i - before) * APPEND_ROWS;
        append_rows(c, q, row, q->n_rows - row < APPEND_ROWS ? q->n_rows - row : APPEND_ROWS);
    }
}

void cpu_append(struct backend *be, const struct append_args *a)
{
    struct cpu_backend *b = (struct cpu_backend *)(void *)be;
    struct append_call c = {b, a};
    uint64_t n_rows = 0;
    CHECK(a->kv->geo->head_dim % 2 == 0 && (a->q_norm == NULL) == (a->k_norm == NULL));
    cpu_plan_flush(b);
    for (uint32_t s = 0; s < a->n_seqs; s++)
        n_rows += a->seqs[s].n_rows;
    if (n_rows > APPEND_ALONE) {
        pool_run(b->pool, append_worker, &c);
        return;
    }
    for (uint32_t s = 0; s < a->n_seqs; s++)
        append_rows(&c, &a->seqs[s], 0, a->seqs[s].n_rows);
}

status cpu_attend_open(struct cpu_backend *b)
{
    b->attend = &attend_scalar;
#if defined(__x86_64__)
    if (b->isa == ISA_AVX512)
        b->attend = &attend_avx512;
    else if (b->isa == ISA_AVX2)
        b->attend = &attend_avx2;
#endif
    b->attend_scratch = mem_alloc(sizeof(struct attend_scratch));
    return OK;
}

void cpu_attend_close(struct cpu_backend *b)
{
    if (b->attend_scratch == NULL)
        return;
    attend_plan_free(b->attend_scratch);
    b->attend_scratch = NULL;
}
