/* Attend: which CTA computes what.
 *
 * The rows of a sequence become tasks for every KV head: FEW tasks (up to 16 queries: decode), whose splits
 * are a CTA each; and MANY tasks (up to 128 queries: prefill), whose splits one CTA folds as it goes,
 * unless there are too few of them to keep all SMs at work: then several CTAs share the splits of one.
 * Nothing of this can be seen in a result (attend.h). Rows of a STREAM lane whose windows begin
 * elsewhere are different tasks. Lists and block tables go to the device when they change, which is
 * once a step where all layers have the same classes. */
#include "kernels/cuda/attend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace
{

enum {
    WINDOW_STEP = 64,  /* a STREAM lane's window moves by so many positions */
    ITEMS_PER_SM = 4,  /* CTAs of a kernel: two waves of two */
    MAX_PARTIAL = 512, /* MiB of partial results; above, a MANY task is not shared by CTAs */
};

/* A list of tasks that grows. */
struct tasks {
    struct attend_task *list;
    uint32_t n, n_items, n_shared, max_queries; /* shared: by several CTAs */
};

/* Building one call. */
struct plan {
    struct cuda_backend *b;
    const struct attend_args *a;
    uint32_t group, n_entries; /* of tables */
    struct tasks few, many;
    uint32_t partials;
};

uint32_t splits_of(uint32_t positions)
{
    return (positions + CUDA_SPLIT - 1) / CUDA_SPLIT;
}

/* Where the recent rows of a STREAM lane begin for the row at pos; 0: it attends everything. */
uint32_t window_begin(const struct kv_geometry *g, uint32_t pos)
{
    uint32_t recent = g->stream_recent;
    uint32_t begin = pos + 1 < recent ? 0 : (pos + 1 - recent) / WINDOW_STEP * WINDOW_STEP;
    return begin <= g->stream_sinks ? 0 : begin;
}

/* Rows from `row` on that attend from the same position on. */
uint32_t rows_alike(const struct plan *p, const struct batch_seq *q, uint32_t class_, uint32_t row)
{
    const struct kv_geometry *g = p->a->kv->geo;
    if (class_ != LANE_STREAM)
        return q->n_rows - row;
    uint32_t n = 1, begin = window_begin(g, q->first_pos + row);
    while (row + n < q->n_rows && window_begin(g, q->first_pos + row + n) == begin)
        n++;
    return n;
}

bool add_task(struct plan *p, const struct batch_seq *q, uint32_t head, uint32_t table,
              uint32_t row, uint32_t n_rows)
{
    struct cuda_attend *t = p->b->attend;
    const struct kv_geometry *g = p->a->kv->geo;
    bool is_few = n_rows * p->group <= CUDA_FEW;
    struct tasks *to = is_few ? &p->few : &p->many;
    to->list = (struct attend_task *)(is_few ? attend_grow(&t->few_list, &t->few_bytes,
                                                           (to->n + 1) * sizeof *to->list)
                                             : attend_grow(&t->many_list, &t->many_bytes,
                                                           (to->n + 1) * sizeof *to->list));
    if (to->list == NULL)
        return false;
    struct attend_task *k = &to->list[to->n++];
    memset(k, 0, sizeof *k);
    k->table = table;
    k->head = head;
    k->row = q->first_row + row;
    k->n_rows = n_rows;
    k->pos = q->first_pos + row;
    k->end = k->pos + n_rows;
    if (kv_lane(g, p->a->layer, head).class_ == LANE_STREAM) {
        k->begin = window_begin(g, k->pos);
        k->first_end = k->begin > 0 ? g->stream_sinks : 0;
    }
    k->n_first = splits_of(k->first_end);
    k->n_splits = k->n_first + splits_of(k->end - k->begin);
    return true;
}

/* All tasks of one sequence; late rows, which see most, first. `tables`: where its block tables lie. */
bool add_seq(struct plan *p, const struct batch_seq *q, const uint32_t tables[LANE_CLASSES])
{
    const struct kv_geometry *g = p->a->kv->geo;
    uint32_t most = (g->head_dim > 128 ? CUDA_MANY_256 : CUDA_MANY) / p->group;
    for (uint32_t class_ = 0; class_ < LANE_CLASSES; class_++) {
        struct {
            uint32_t row, end;
        } part;
        if (g->n_lanes[class_] == 0)
            continue;
        uint32_t first = p->many.n;
        for (part.row = 0; part.row < q->n_rows; part.row = part.end) {
            uint32_t alike = rows_alike(p, q, class_, part.row);
            part.end = part.row + (alike < most ? alike : most);
            for (uint32_t h = 0; h < g->kv_heads; h++)
                if (kv_lane(g, p->a->layer, h).class_ == class_ &&
                    !add_task(p, q, h, tables[class_], part.row, part.end - part.row))
                    return false;
        }
        for (uint32_t i = first, j = p->many.n; i + 1 < j; i++) { /* turn the order */
            struct attend_task k = p->many.list[i];
            p->many.list[i] = p->many.list[--j];
            p->many.list[j] = k;
        }
    }
    return true;
}

/* Appends the block tables of one sequence that the layer reads. */
bool add_tables(struct plan *p, const struct batch_seq *q, uint32_t tables[LANE_CLASSES])
{
    struct cuda_attend *t = p->b->attend;
    const struct kv_geometry *g = p->a->kv->geo;
    uint32_t n = (q->first_pos + q->n_rows + g->block_rows - 1) / g->block_rows;
    for (int c = 0; c < LANE_CLASSES; c++) {
        tables[c] = p->n_entries;
        if (g->n_lanes[c] == 0 || q->blocks[c] == NULL)
            continue;
        block_id *list = (block_id *)attend_grow(&t->table_list, &t->table_bytes,
                                                 ((size_t)p->n_entries + n) * sizeof(block_id));
        if (list == NULL)
            return false;
        memcpy(list + p->n_entries, q->blocks[c], n * sizeof(block_id));
        p->n_entries += n;
    }
    return true;
}

/* Gives every task its CTAs and its room for partial results. folds: a CTA that has all splits of a
 * task folds them. */
void number_items(struct plan *p, struct tasks *t, uint32_t per_item, bool folds)
{
    for (uint32_t i = 0; i < t->n; i++) {
        struct attend_task *k = &t->list[i];
        uint32_t queries = k->n_rows * p->group;
        uint32_t items = (k->n_splits + per_item - 1) / per_item;
        k->per_item = per_item;
        k->item = t->n_items;
        k->partial = p->partials;
        t->n_items += items;
        k->merged = (folds ? items : k->n_splits) > 1;
        if (k->n_splits > 1)
            p->partials += k->merged ? k->n_splits * queries : queries;
        if (!k->merged)
            continue;
        t->n_shared++;
        t->max_queries = queries > t->max_queries ? queries : t->max_queries;
    }
}

/* Splits of a FEW task that one CTA takes: few enough for all SMs to be at work to the end. */
uint32_t few_per_item(const struct plan *p)
{
    size_t splits = 0, items = (size_t)p->b->sms * ITEMS_PER_SM;
    for (uint32_t i = 0; i < p->few.n; i++)
        splits += p->few.list[i].n_splits;
    return (uint32_t)(splits > items ? (splits + items - 1) / items : 1);
}

/* Splits of a MANY task that one CTA takes: all, where there are tasks enough. */
uint32_t many_per_item(const struct plan *p)
{
    size_t splits = 0, partials = 0, most = 0;
    for (uint32_t i = 0; i < p->many.n; i++) {
        const struct attend_task *k = &p->many.list[i];
        splits += k->n_splits;
        partials += (size_t)k->n_splits * k->n_rows * p->group;
        most = k->n_splits > most ? k->n_splits : most;
    }
    size_t items = (size_t)p->b->sms * ITEMS_PER_SM;
    size_t bytes = partials * attend_padded_dim(p->a->kv->geo->head_dim) * sizeof(float);
    if (bytes >> 20 > MAX_PARTIAL || p->many.n * 2 >= items)
        return (uint32_t)(most > 0 ? most : 1);
    return (uint32_t)(splits > items ? (splits + items - 1) / items : 1);
}

bool plan_call(struct plan *p)
{
    for (uint32_t i = 0; i < p->a->n_seqs; i++) {
        uint32_t tables[LANE_CLASSES];
        if (p->a->seqs[i].n_rows == 0)
            continue;
        if (!add_tables(p, &p->a->seqs[i], tables) || !add_seq(p, &p->a->seqs[i], tables))
            return false;
    }
    number_items(p, &p->few, few_per_item(p), false);
    number_items(p, &p->many, many_per_item(p), true);
    struct cuda_attend *t = p->b->attend;
    size_t floats = (size_t)p->partials * attend_padded_dim(p->a->kv->geo->head_dim);
    return cuda_reserve(p->b, &t->part_o, &t->part_o_bytes, floats * sizeof(float)) &&
           cuda_reserve(p->b, &t->part_ml, &t->part_ml_bytes, p->partials * sizeof(float2));
}

void fill_call(const struct plan *p, struct attend_call *c)
{
    const struct attend_args *a = p->a;
    const struct kv_geometry *g = a->kv->geo;
    for (int i = 0; i < LANE_CLASSES; i++) {
        c->hbm[i] = (const uint8_t *)a->kv->hbm[i];
        c->dram[i] = (const uint8_t *)a->kv->dram[i];
        c->block_bytes[i] = g->block_bytes[i];
    }
    c->page_bytes = g->page_bytes;
    c->page_shift = g->block_rows == 8 ? 3 : g->block_rows == 16 ? 4 : 5;
    c->dim = g->head_dim;
    c->group = p->group;
    c->heads = a->heads;
    c->q_stride = (size_t)(a->heads + 2 * g->kv_heads) * g->head_dim;
    c->scale = a->scale * 1.44269504089f;
    c->q = (const float *)a->qkv;
    c->out = (float *)a->out;
    c->lse = a->lse;
    c->part_o = (float *)p->b->attend->part_o;
    c->part_ml = (float2 *)p->b->attend->part_ml;
}

void run_tasks(const struct plan *p, struct attend_call *c, struct kept *kept,
               const struct tasks *t,
               void (*run)(struct cuda_backend *, const struct attend_call *, uint32_t))
{
    if (t->n == 0)
        return;
    c->tasks = (const struct attend_task *)kept_copy(p->b, kept, t->list, t->n * sizeof *t->list);
    c->n_tasks = t->n;
    if (c->tasks == NULL)
        return;
    run(p->b, c, t->n_items);
    if (t->n_shared > 0)
        attend_run_merge(p->b, c, t->max_queries);
}

} /* namespace */

void cuda_attend(struct backend *be, const struct attend_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    struct cuda_attend *t = b->attend;
    const struct kv_geometry *g = a->kv->geo;
    CHECK(g->head_dim % 2 == 0 && g->head_dim <= CUDA_MAX_DIM && a->heads % g->kv_heads == 0);
    CHECK(g->block_rows == 8 || g->block_rows == 16 || g->block_rows == 32);
    CHECK(a->heads / g->kv_heads <= CUDA_FEW && a->scale > 0);
    if (a->n_plans > 0) {
        if (b->error == OK)
            snprintf(b->text, sizeof b->text, "attend: the CUDA backend has no plans yet");
        b->error = b->error == OK ? ERR_DEVICE : b->error;
        return;
    }
    struct plan p = {};
    p.b = b;
    p.a = a;
    p.group = a->heads / g->kv_heads;
    if (!plan_call(&p)) {
        cuda_ok(b, cudaErrorMemoryAllocation, "attend: lists and partial results");
        return;
    }
    if (p.few.n + p.many.n == 0)
        return;
    struct attend_call c = {};
    fill_call(&p, &c);
    c.lanes = cuda_lanes(b, a->kv->geo);
    c.tables = (const block_id *)kept_copy(b, &t->tables, t->table_list,
                                           (size_t)p.n_entries * sizeof(block_id));
    if (c.lanes == NULL || c.tables == NULL)
        return;
    c.lanes += (size_t)a->layer * g->kv_heads;
    run_tasks(&p, &c, &t->many, &p.many, attend_run_many);
    run_tasks(&p, &c, &t->few, &p.few, attend_run_few);
}

/* ---- lists that stay on the device ---- */

void *attend_grow(void **p, size_t *have, size_t need)
{
    if (need <= *have && *p != NULL)
        return *p;
    size_t size = need > 2 * *have ? need : 2 * *have;
    size = size > 4096 ? size : 4096;
    void *q = realloc(*p, size);
    if (q == NULL)
        return NULL;
    *p = q;
    *have = size;
    return q;
}

const void *kept_copy(struct cuda_backend *b, struct kept *k, const void *now, size_t bytes)
{
    if (k->bytes == bytes && bytes > 0 && memcmp(k->host, now, bytes) == 0)
        return k->device;
    k->bytes = 0;
    const void *staged = cuda_stage(b, now, bytes);
    if (staged == NULL || !cuda_reserve(b, &k->device, &k->device_bytes, bytes) ||
        attend_grow(&k->host, &k->host_bytes, bytes) == NULL ||
        !cuda_ok(b, cudaMemcpyAsync(k->device, staged, bytes, cudaMemcpyDeviceToDevice, b->stream),
                 "attend: list"))
        return NULL;
    memcpy(k->host, now, bytes);
    k->bytes = bytes;
    return k->device;
}

status cuda_attend_open(struct cuda_backend *b)
{
    b->attend = (struct cuda_attend *)mem_alloc(sizeof *b->attend);
    attend_prepare_few();
    attend_prepare_many();
    return OK;
}

static void drop(struct kept *k)
{
    free(k->host);
    cudaFree(k->device);
}

void cuda_attend_close(struct cuda_backend *b)
{
    struct cuda_attend *t = b->attend;
    if (t == NULL)
        return;
    drop(&t->places);
    drop(&t->tables);
    drop(&t->few);
    drop(&t->many);
    free(t->place_list);
    free(t->table_list);
    free(t->few_list);
    free(t->many_list);
    cudaFree(t->part_o);
    cudaFree(t->part_ml);
    mem_free(t);
    b->attend = NULL;
}
