/* Decides what the tasks of an attend call are, and finds what they read. */
#include "kernels/cpu/attend_plan.h"
#include "kernels/core/digest.h"
#include "kernels/cpu/codes.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    ITEMS_PER_THREAD = 4, /* with fewer whole tasks per thread, splits become items */
    WINDOW_STEP = 64,     /* a STREAM lane's window moves by so many positions */
    LINE_BYTES = 64,
};

static size_t round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
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

void attend_plan_free(struct attend_scratch *s)
{
    free(s->tasks);
    free(s->items);
    free(s->floats);
    mem_free(s);
}

static uint32_t splits_of(struct stretch s)
{
    return attend_splits(s.begin, s.end);
}

/* Where the recent rows of a STREAM lane begin for the row at pos; 0: it attends everything. */
static uint32_t window_begin(const struct kv_geometry *g, uint32_t pos)
{
    uint32_t recent = g->stream_recent;
    uint32_t begin = pos + 1 < recent ? 0 : (pos + 1 - recent) / WINDOW_STEP * WINDOW_STEP;
    return begin <= g->stream_sinks ? 0 : begin;
}

/* The plan of row `number`, counted through all sets. */
static void find_plan(const struct attend_args *a, struct attend_task *k, uint32_t number)
{
    uint32_t set = 0;
    for (; set < a->n_plans && number >= a->plans[set].n_rows; set++)
        number -= a->plans[set].n_rows;
    CHECK(set < a->n_plans);
    k->plans = &a->plans[set];
    k->plan = number;
}

static size_t plan_entry(const struct attend_call *c, const struct attend_task *k)
{
    return (size_t)k->plan * c->a->kv->geo->kv_heads + k->head;
}

static void plan_stretches(const struct attend_call *c, struct attend_task *k)
{
    const struct attend_args *a = c->a;
    const struct batch_seq *q = &a->seqs[k->seq];
    const struct kv_geometry *g = a->kv->geo;
    struct stretch *s = k->stretch;
    uint32_t first = q->first_pos + k->row;
    s[STRETCH_TABLE].end = first + k->n_rows;
    if (k->place.class_ == LANE_STREAM) {
        s[STRETCH_TABLE].begin = window_begin(g, first);
        if (s[STRETCH_TABLE].begin > 0)
            s[STRETCH_FIRST].end = g->stream_sinks;
    } else if (k->place.class_ == LANE_SPARSE && q->planned) {
        find_plan(a, k, q->first_plan + k->row);
        const struct plan_row *row = &k->plans->rows[k->plan];
        CHECK(row->row == q->first_row + k->row && row->pos == first);
        s[STRETCH_FIRST].end = k->plans->n_pages[plan_entry(c, k)] * g->block_rows;
        s[STRETCH_TABLE].begin = row->n_segments * SEGMENT_ROWS;
        CHECK(s[STRETCH_TABLE].begin <= first);
        if (k->plans->tail != NULL)
            k->tail = (const float *)k->plans->tail +
                      plan_entry(c, k) * attend_tail_floats(c->group, c->o_stride);
        if (k->plans->n_estimates != NULL)
            s[STRETCH_ESTIMATES].end = k->plans->n_estimates[plan_entry(c, k)];
    }
    for (int i = 0; i < STRETCHES; i++)
        k->n_splits += splits_of(s[i]);
}

static uint32_t splits_to_run(const struct attend_task *k)
{
    return k->n_splits - (k->tail != NULL ? splits_of(k->stretch[STRETCH_TABLE]) : 0);
}

/* Rows of a tile that one task takes from `row` on. */
static uint32_t rows_together(const struct attend_call *c, const struct batch_seq *q,
                              enum lane_class class_, uint32_t row, uint32_t end)
{
    const struct kv_geometry *g = c->a->kv->geo;
    if (class_ == LANE_SPARSE)
        return q->planned ? 1 : end - row;
    if (class_ == LANE_DENSE)
        return end - row;
    uint32_t n = 1, begin = window_begin(g, q->first_pos + row);
    while (row + n < end && window_begin(g, q->first_pos + row + n) == begin)
        n++;
    return n;
}

static void plan_tile(struct attend_call *c, uint32_t seq, uint32_t head, uint32_t row)
{
    struct attend_scratch *s = c->s;
    const struct batch_seq *q = &c->a->seqs[seq];
    struct lane_place place = kv_lane(c->a->kv->geo, c->a->layer, head);
    uint32_t end = q->n_rows - row < ATTEND_ROWS ? q->n_rows : row + ATTEND_ROWS;
    for (uint32_t n; row < end; row += n) {
        n = rows_together(c, q, place.class_, row, end);
        struct attend_task *k = &s->tasks[s->n_tasks++];
        *k =
            (struct attend_task){.seq = seq, .head = head, .row = row, .n_rows = n, .place = place};
        plan_stretches(c, k);
        CHECK(splits_to_run(k) > 0); /* a selection is never empty */
        s->n_items += splits_to_run(k);
    }
}

static uint32_t tiles_of(const struct batch_seq *q)
{
    return (q->n_rows + ATTEND_ROWS - 1) / ATTEND_ROWS;
}

static void plan_tasks(struct attend_call *c)
{
    const struct attend_args *a = c->a;
    struct attend_scratch *s = c->s;
    size_t n = 0; /* at most: a window moves once in a tile */
    for (uint32_t i = 0; i < a->n_seqs; i++)
        n += a->seqs[i].planned ? a->seqs[i].n_rows : (size_t)tiles_of(&a->seqs[i]) * 2;
    s->tasks = grow(s->tasks, &s->max_tasks, n * a->kv->geo->kv_heads, sizeof *s->tasks);
    s->n_tasks = 0;
    s->n_items = 0;
    for (uint32_t i = 0; i < a->n_seqs; i++)
        for (uint32_t t = tiles_of(&a->seqs[i]); t-- > 0;) /* late tiles see most: first */
            for (uint32_t h = 0; h < a->kv->geo->kv_heads; h++)
                plan_tile(c, i, h, t * ATTEND_ROWS);
}

/* Items of one kind of stretch of all tasks. */
static size_t add_splits(struct attend_scratch *s, size_t n, enum stretch_kind kind)
{
    for (uint32_t t = 0; t < s->n_tasks; t++) {
        const struct attend_task *k = &s->tasks[t];
        uint32_t first = 0;
        if (kind == STRETCH_TABLE && k->tail != NULL)
            continue;
        for (int i = 0; i < (int)kind; i++)
            first += splits_of(k->stretch[i]);
        for (uint32_t i = 0; i < splits_of(k->stretch[kind]); i++)
            s->items[n++] = (struct attend_item){t, first + i};
    }
    return n;
}

/* Estimates go first: one may be the heaviest item of all, and a worker that took it last would be
 * waited for. */
static void add_items(struct attend_scratch *s)
{
    size_t n = add_splits(s, 0, STRETCH_ESTIMATES);
    n = add_splits(s, n, STRETCH_FIRST);
    n = add_splits(s, n, STRETCH_TABLE);
    CHECK(n == s->n_items);
}

static void plan_items(struct attend_call *c)
{
    struct attend_scratch *s = c->s;
    uint32_t threads = pool_threads(c->b->pool);
    size_t own = attend_work_floats(c->o_stride, c->group);
    s->worker_floats = round_up(own + 2 * attend_partial_floats(c, ATTEND_ROWS), 16);
    size_t floats = s->worker_floats * threads;
    s->by_split = threads > 1 && s->n_tasks < (size_t)threads * ITEMS_PER_THREAD;
    if (!s->by_split)
        s->n_items = s->n_tasks;
    s->items = grow(s->items, &s->max_items, s->n_items, sizeof *s->items);
    for (uint32_t t = 0; t < s->n_tasks; t++) {
        struct attend_task *k = &s->tasks[t];
        atomic_init(&k->splits_left, splits_to_run(k));
        k->partial = floats;
        if (s->by_split)
            floats += k->n_splits * attend_partial_floats(c, k->n_rows);
        else
            s->items[t] = (struct attend_item){t, 0};
    }
    if (s->by_split)
        add_items(s);
    s->floats = grow(s->floats, &s->max_floats, floats, sizeof *s->floats);
}

void attend_plan(struct attend_call *c)
{
    plan_tasks(c);
    plan_items(c);
}

struct split_place attend_split_at(const struct attend_task *k, uint32_t split)
{
    int i = STRETCH_FIRST;
    for (; i < STRETCH_ESTIMATES && split >= splits_of(k->stretch[i]); i++)
        split -= splits_of(k->stretch[i]);
    uint32_t begin = k->stretch[i].begin + split * ATTEND_SPLIT, end = k->stretch[i].end;
    return (struct split_place){(enum stretch_kind)i, begin,
                                end - begin < ATTEND_SPLIT ? end : begin + ATTEND_SPLIT};
}

struct attend_table attend_table_of(const struct attend_call *c, const struct attend_task *k,
                                    enum stretch_kind kind, const uint32_t **masks)
{
    const struct kv_memory *kv = c->a->kv;
    size_t lane = k->place.index * kv->geo->page_bytes;
    const uint8_t *hbm = kv->hbm[k->place.class_], *dram = kv->dram[k->place.class_];
    struct attend_table t = {.lane = {hbm + lane, dram == NULL ? NULL : dram + lane},
                             .block_bytes = kv->geo->block_bytes[k->place.class_],
                             .blocks = c->a->seqs[k->seq].blocks[k->place.class_]};
    *masks = NULL;
    if (kind == STRETCH_FIRST && k->plans != NULL) {
        size_t first = plan_entry(c, k) * k->plans->page_cap;
        t.blocks = k->plans->pages + first;
        if (k->plans->masks != NULL)
            *masks = k->plans->masks + first;
    }
    return t;
}

static void prefetch(const void *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += LINE_BYTES)
        __builtin_prefetch((const uint8_t *)p + i);
}

void attend_gather_estimates(const struct attend_call *c, const struct attend_task *k,
                             struct split_place at, const int8_t **values, float *factors,
                             float *logits)
{
    const struct attend_plans *p = k->plans;
    const struct kv_memory *kv = c->a->kv;
    const uint32_t *list = p->estimates + plan_entry(c, k) * p->estimate_cap + at.begin;
    const uint32_t *records = p->rows[k->plan].records;
    const float *scores = p->scores + plan_entry(c, k) * c->group * p->stride;
    const struct digest_layout layout = digest_layout_of(kv->geo->head_dim, &p->desc);
    const float *scales[ATTEND_SPLIT];
    CHECK(layout.values != 0);
    uint32_t n = at.end - at.begin, padded = (uint32_t)round_up(n, ATTEND_PAD);
    uint32_t first = 0; /* partition of the segment */
    const uint8_t *lane = NULL;
    for (uint32_t i = 0; i < n; i++) {
        if (lane == NULL || list[i] - first >= p->desc.parts) { /* lists ascend: seldom */
            uint32_t segment = list[i] / p->desc.parts;
            first = segment * p->desc.parts;
            lane = digest_lane(kv, records[segment], c->a->layer, k->head);
            prefetch(lane + layout.scales, p->desc.parts * sizeof(float));
        }
        values[i] = digest_value(lane, &layout, list[i] - first);
        scales[i] = (const float *)(const void *)(lane + layout.scales) + (list[i] - first);
        prefetch(values[i], layout.dim);
    }
    for (uint32_t h = 0; h < c->group; h++, scores += p->stride, logits += ATTEND_SPLIT) {
        _Pragma("GCC unroll 4") for (uint32_t i = 0; i < n; i++) logits[i] = scores[list[i]];
        for (uint32_t i = n; i < padded; i++)
            logits[i] = -INFINITY;
    }
    /* last: they have travelled meanwhile */
    _Pragma("GCC unroll 4") for (uint32_t i = 0; i < n; i++) factors[i] = *scales[i];
    memset(factors + n, 0, (padded - n) * sizeof *factors);
}
