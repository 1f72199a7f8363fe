/* Append and attend: what is computed where, and the portable reference.
 *
 * A task is up to ATTEND_ROWS rows of one sequence with one KV head: a row of decode, a tile of
 * prefill. When there are many tasks, one worker runs a task from its first split to its last
 * and folds as it goes. When there are few (one stream decoding at a long context), splits are items
 * of their own: partial results go to scratch, and whoever finishes the last split of a task folds
 * them all, from the first on. Both ways run the same operations in the same order (attend.h), so
 * the choice cannot be seen in a result. Heavy tasks are handed out first.
 *
 * Scratch belongs to the engine thread, which grows it before the pool starts: sizes follow from
 * the shapes seen so far, so they settle with the first steps. */
#include "kernels/cpu/attend.h"
#include "kernels/cpu/cpu.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    ITEMS_PER_THREAD = 4, /* with fewer whole tasks per thread, splits become items */
    APPEND_ROWS = 16,     /* rows of an append item: two pages at least, so few shared lines */
    APPEND_ALONE = 6,     /* up to so many rows the engine thread appends by itself: waking the
                              pool costs more */
};

struct task {
    uint32_t seq, head, row, n_rows; /* row: of the sequence's rows in this call */
    uint32_t n_splits;
    size_t partial;          /* floats before its first partial result in scratch */
    atomic_uint splits_left; /* when splits are items */
};

struct item {
    uint32_t task, split;
};

/* The plan of one call and the memory behind it. */
struct attend_scratch {
    struct task *tasks;
    struct item *items;
    float *floats; /* [threads][worker_floats], then partial results */
    size_t max_tasks, max_items, max_floats;
    size_t n_tasks, n_items, worker_floats;
    bool by_split; /* an item is a split of a task; else items are tasks */
};

struct attend_call {
    struct cpu_backend *b;
    const struct attend_args *a;
    struct attend_scratch *s;
    uint32_t group, o_stride;
};

static size_t round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Numbers of a partial result: o, then m, then l; a multiple of a cache line. */
static size_t partial_floats(const struct attend_call *c, uint32_t n_rows)
{
    return round_up((size_t)n_rows * c->group * (c->o_stride + 2), 16);
}

/* Grows an array that keeps nothing; sizes double so that growing ends soon. */
static void *grow(void *p, size_t *max, size_t need, size_t size)
{
    if (need <= *max)
        return p;
    free(p);
    *max = need > 2 * *max ? need : 2 * *max;
    size_t bytes = round_up(*max * size, 64);
    p = aligned_alloc(64, bytes);
    CHECK(p != NULL); /* as mem_alloc: no ordinary memory left */
    return p;
}

/* ---- plan ---------------------------------------------------------------------------------- */

static uint32_t seq_tasks(const struct batch_seq *q, uint32_t kv_heads)
{
    return (q->n_rows + ATTEND_ROWS - 1) / ATTEND_ROWS * kv_heads;
}

static void plan_tasks(struct attend_call *c)
{
    const struct attend_args *a = c->a;
    struct attend_scratch *s = c->s;
    size_t n = 0;
    for (uint32_t i = 0; i < a->n_seqs; i++)
        n += seq_tasks(&a->seqs[i], a->kv->geo->kv_heads);
    s->tasks = grow(s->tasks, &s->max_tasks, n, sizeof *s->tasks);
    s->n_tasks = 0;
    s->n_items = 0;
    for (uint32_t i = 0; i < a->n_seqs; i++) {
        const struct batch_seq *q = &a->seqs[i];
        uint32_t tiles = (q->n_rows + ATTEND_ROWS - 1) / ATTEND_ROWS;
        for (uint32_t t = tiles; t-- > 0;) /* late tiles see most: first */
            for (uint32_t h = 0; h < a->kv->geo->kv_heads; h++) {
                struct task *k = &s->tasks[s->n_tasks++];
                k->seq = i;
                k->head = h;
                k->row = t * ATTEND_ROWS;
                k->n_rows = q->n_rows - k->row < ATTEND_ROWS ? q->n_rows - k->row : ATTEND_ROWS;
                k->n_splits = (q->first_pos + k->row + k->n_rows - 1) / ATTEND_SPLIT + 1;
                s->n_items += k->n_splits;
            }
    }
}

static void plan_items(struct attend_call *c)
{
    struct attend_scratch *s = c->s;
    uint32_t threads = pool_threads(c->b->pool);
    size_t own = attend_work_floats(c->o_stride, c->group) + 2 * partial_floats(c, ATTEND_ROWS);
    s->worker_floats = round_up(own, 16);
    size_t floats = s->worker_floats * threads;
    s->by_split = threads > 1 && s->n_tasks < (size_t)threads * ITEMS_PER_THREAD;
    if (!s->by_split)
        s->n_items = s->n_tasks;
    s->items = grow(s->items, &s->max_items, s->n_items, sizeof *s->items);
    size_t n = 0;
    for (uint32_t t = 0; t < s->n_tasks; t++) {
        struct task *k = &s->tasks[t];
        atomic_init(&k->splits_left, k->n_splits);
        k->partial = floats;
        if (s->by_split)
            floats += k->n_splits * partial_floats(c, k->n_rows);
        for (uint32_t i = 0; i < (s->by_split ? k->n_splits : 1); i++)
            s->items[n++] = (struct item){t, i};
    }
    s->floats = grow(s->floats, &s->max_floats, floats, sizeof *s->floats);
}

/* ---- run ----------------------------------------------------------------------------------- */

static const uint8_t *lane_of(const struct attend_call *c, uint32_t head)
{
    return (const uint8_t *)c->a->kv->hbm[LANE_SPARSE] +
           kv_page_offset(c->a->kv->geo, c->a->layer, head);
}

static size_t row_numbers(const struct attend_call *c)
{
    return (size_t)(c->a->heads + 2 * c->a->kv->geo->kv_heads) * c->a->kv->geo->head_dim;
}

/* The part of a task in one split; rows before the split see nothing of it and are left out:
 * *skipped of them. */
static struct attend_part part_of(const struct attend_call *c, const struct task *k, uint32_t split,
                                  uint32_t *skipped)
{
    const struct attend_args *a = c->a;
    const struct batch_seq *q = &a->seqs[k->seq];
    uint32_t first = q->first_pos + k->row, begin = split * ATTEND_SPLIT;
    uint32_t skip = begin > first ? begin - first : 0, end = first + k->n_rows;
    *skipped = skip;
    return (struct attend_part){
        .geo = a->kv->geo,
        .lane = lane_of(c, k->head),
        .blocks = q->blocks[LANE_SPARSE],
        .q = (const float *)a->qkv + (q->first_row + k->row + skip) * row_numbers(c) +
             (size_t)k->head * c->group * a->kv->geo->head_dim,
        .q_stride = row_numbers(c),
        .group = c->group,
        .n_rows = k->n_rows - skip,
        .first_pos = first + skip,
        .begin = begin,
        .end = end < begin + ATTEND_SPLIT ? end : begin + ATTEND_SPLIT,
        .scale = a->scale,
        .o_stride = c->o_stride,
    };
}

/* Places a partial result of n_rows rows at p. */
static void place(struct attend_part *p, float *at, uint32_t n_rows)
{
    size_t n = (size_t)n_rows * p->group;
    p->o = at;
    p->m = at + n * p->o_stride;
    p->l = p->m + n;
}

/* Tells a part which pages its worker reads next. */
static void look_ahead(const struct attend_call *c, struct attend_part *p, const struct task *k,
                       uint32_t split)
{
    const struct batch_seq *q = &c->a->seqs[k->seq];
    uint32_t rows = c->a->kv->geo->block_rows, len = q->first_pos + k->row + k->n_rows;
    uint32_t first = split * ATTEND_SPLIT / rows, blocks = (len + rows - 1) / rows - first;
    p->ahead = q->blocks[LANE_SPARSE] + first;
    p->ahead_lane = lane_of(c, k->head);
    p->n_ahead = blocks < ATTEND_GROUP / rows ? blocks : ATTEND_GROUP / rows;
}

static void fold_into(const struct attend_call *c, struct attend_part *total,
                      const struct attend_part *p, uint32_t skipped)
{
    size_t q = (size_t)skipped * c->group;
    c->b->attend->fold(total->o + q * c->o_stride, total->m + q, total->l + q, p->o, p->m, p->l,
                       p->n_rows * c->group, c->o_stride);
}

static void write_out(const struct attend_call *c, const struct task *k,
                      const struct attend_part *total)
{
    const struct attend_args *a = c->a;
    uint32_t dim = a->kv->geo->head_dim;
    for (uint32_t r = 0; r < k->n_rows; r++)
        for (uint32_t h = 0; h < c->group; h++) {
            size_t q = (size_t)r * c->group + h, row = a->seqs[k->seq].first_row + k->row + r;
            float *out = (float *)a->out + (row * a->heads + (size_t)k->head * c->group + h) * dim;
            c->b->attend->finish(total->o + q * c->o_stride, total->l[q], out, dim);
        }
}

static void run_task(const struct attend_call *c, float *own, const struct task *k,
                     const struct task *next)
{
    struct attend_part total = {.group = c->group, .o_stride = c->o_stride};
    place(&total, own, k->n_rows);
    for (uint32_t i = 0; i < k->n_splits; i++) {
        uint32_t skipped;
        struct attend_part p = part_of(c, k, i, &skipped);
        p.work = own + 2 * partial_floats(c, ATTEND_ROWS);
        place(&p, own + (i == 0 ? 0 : partial_floats(c, ATTEND_ROWS)), k->n_rows);
        if (i + 1 < k->n_splits)
            look_ahead(c, &p, k, i + 1);
        else if (next != NULL)
            look_ahead(c, &p, next, 0);
        c->b->attend->part(&p);
        if (i > 0)
            fold_into(c, &total, &p, skipped);
    }
    write_out(c, k, &total);
}

static void run_split(const struct attend_call *c, float *own, struct item it,
                      const struct item *next)
{
    struct attend_scratch *s = c->s;
    struct task *k = &s->tasks[it.task];
    size_t size = partial_floats(c, k->n_rows);
    uint32_t skipped;
    struct attend_part p = part_of(c, k, it.split, &skipped);
    p.work = own;
    place(&p, s->floats + k->partial + it.split * size, k->n_rows);
    if (next != NULL)
        look_ahead(c, &p, &s->tasks[next->task], next->split);
    c->b->attend->part(&p);
    if (atomic_fetch_sub_explicit(&k->splits_left, 1, memory_order_acq_rel) != 1)
        return;
    struct attend_part total = {.group = c->group, .o_stride = c->o_stride};
    place(&total, s->floats + k->partial, k->n_rows);
    for (uint32_t i = 1; i < k->n_splits; i++) {
        p = part_of(c, k, i, &skipped);
        place(&p, s->floats + k->partial + i * size, k->n_rows);
        fold_into(c, &total, &p, skipped);
    }
    write_out(c, k, &total);
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
        const struct item *next = after < n ? &s->items[after] : NULL;
        if (s->by_split)
            run_split(c, own, s->items[i], next);
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
                            .o_stride = (uint32_t)round_up(g->head_dim, ATTEND_PAD)};
    plan_tasks(&c);
    plan_items(&c);
    if (c.s->n_items == 0)
        return;
    pool_run(b->pool, attend_worker, &c);
}

/* ---- append -------------------------------------------------------------------------------- */

struct append_call {
    struct cpu_backend *b;
    const struct append_args *a;
};

static void append_rows(const struct append_call *c, const struct batch_seq *q, uint32_t row,
                        uint32_t n_rows)
{
    const struct append_args *a = c->a;
    const struct kv_geometry *g = a->kv->geo;
    size_t numbers = (size_t)(a->heads + 2 * g->kv_heads) * g->head_dim;
    for (uint32_t r = row; r < row + n_rows; r++) {
        uint32_t pos = q->first_pos + r;
        struct append_row p = {
            .geo = g,
            .qkv = (float *)a->qkv + (q->first_row + r) * numbers,
            .lanes = (uint8_t *)a->kv->hbm[LANE_SPARSE] +
                     q->blocks[LANE_SPARSE][pos / g->block_rows] * g->block_bytes[LANE_SPARSE] +
                     kv_page_offset(g, a->layer, 0),
            .cos = a->rope_cos + (size_t)pos * (g->head_dim / 2),
            .sin = a->rope_sin + (size_t)pos * (g->head_dim / 2),
            .heads = a->heads,
            .page_row = pos % g->block_rows,
        };
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
    CHECK(a->kv->geo->head_dim % 2 == 0);
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
    struct attend_scratch *s = b->attend_scratch;
    if (s == NULL)
        return;
    free(s->tasks);
    free(s->items);
    free(s->floats);
    mem_free(s);
    b->attend_scratch = NULL;
}
