/* Lists of a step: which CTA attends what by position, and where rows are appended.
 *
 * The rows of a sequence become tasks for every KV head: FEW tasks (up to 16 queries: decode), whose
 * splits leave partial results, one CTA having a few of them; and MANY tasks (up to 128 queries: prefill),
 * whose splits one CTA folds as it goes, unless there are too few of them to keep all SMs at work: then
 * several CTAs share the splits of one. Nothing of this can be seen in a result (attend.h). Rows of a
 * STREAM lane whose windows begin elsewhere are different tasks.
 *
 * A list depends on the sequences and on the classes of a layer's lanes, not on the layer: the first layer
 * of a step builds it, the others find it. Lists are as long as a bucket has it, so that the kernels over
 * them are launched alike in the next step. */
#include "kernels/cuda/attend.h"
#include "kernels/cuda/prefill.h"

#include <stdlib.h>
#include <string.h>

namespace
{

enum {
    WINDOW_STEP = 64,  /* a STREAM lane's window moves by so many positions */
    CTAS_PER_SM = 2,   /* at once */
    WAVES = 2,         /* of CTAs */
    MAX_PARTIAL = 512, /* MiB of partial results; above, a MANY task is not shared by CTAs */
    MAX_LAST = 32, /* splits that the last CTA folds; more are quicker in a kernel of their own */
};

/* A host array that keeps its room. */
struct room {
    void *p;
    size_t bytes;
};

/* What was built in this step. */
struct built {
    const struct batch_seq *seqs;
    uint32_t n_seqs;
    uint8_t classes[CUDA_MAX_KV_HEADS];
    struct attend_list list;
};

/* Tasks of one kernel: prototypes, then a CTA's part each. */
struct tasks {
    struct attend_task *list, *items;
    struct room *list_room, *item_room, *merge_room;
    uint32_t n, n_items, n_merges, max_queries;
    size_t partials;
};

struct plan {
    struct cuda_backend *b;
    const struct attend_args *a;
    const uint8_t *classes; /* [kv_heads] */
    uint32_t group, counters;
    struct tasks few, many;
};

} /* namespace */

struct attend_lists {
    uint64_t step;
    struct built *built;
    uint32_t n_built;
    struct room built_room, few, few_items, few_merges, many, many_items, many_merges, places;
    const struct batch_seq *placed; /* of the last append; NULL: none in this step */
    bool marked;                    /* with to_prefill */
    uint32_t n_placed_seqs, n_places;
    const struct append_place *device_places;
};

namespace
{

/* Grows an array that keeps its contents; sizes double. NULL: no memory. */
void *grow(struct room *r, size_t need)
{
    if (need <= r->bytes && r->p != NULL)
        return r->p;
    size_t size = need > 2 * r->bytes ? need : 2 * r->bytes;
    size = size > 4096 ? size : 4096;
    void *q = realloc(r->p, size);
    if (q == NULL)
        return NULL;
    r->p = q;
    r->bytes = size;
    return q;
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

/* Tasks of rows [row, + n_rows) for all heads of the class. */
bool add_tasks(struct plan *p, const struct batch_seq *q, uint32_t class_, const block_id *table,
               uint32_t row, uint32_t n_rows)
{
    const struct kv_geometry *g = p->a->kv->geo;
    struct tasks *t = n_rows * p->group <= CUDA_FEW ? &p->few : &p->many;
    t->list = (struct attend_task *)grow(t->list_room, (t->n + g->kv_heads) * sizeof *t->list);
    if (t->list == NULL)
        return false;
    struct attend_task k;
    memset(&k, 0, sizeof k);
    k.table = table;
    k.row = q->first_row + row;
    k.n_rows = (uint16_t)n_rows;
    k.pos = q->first_pos + row;
    /* Pieces of a planned sequence follow one another; of any other its rows of this step may be cut off. */
    k.fresh = q->planned ? 0 : q->first_pos - q->n_before;
    k.end = k.pos + n_rows;
    k.class_ = (uint8_t)class_;
    if (class_ == LANE_STREAM) {
        k.begin = window_begin(g, k.pos);
        k.first_end = k.begin > 0 ? g->stream_sinks : 0;
    }
    k.n_first = attend_splits(k.first_end);
    k.n_splits = k.n_first + attend_splits(k.end - k.begin);
    for (uint32_t h = 0; h < g->kv_heads; h++) {
        k.head = (uint16_t)h;
        if (p->classes[h] == class_)
            t->list[t->n++] = k;
    }
    return true;
}

/* All tasks of one sequence in the lanes of a class; late rows, which see most, first. */
bool add_class(struct plan *p, const struct batch_seq *q, uint32_t class_)
{
    const struct kv_geometry *g = p->a->kv->geo;
    uint32_t most = (g->head_dim > 128 ? CUDA_MANY_256 : CUDA_MANY) / p->group;
    uint32_t first = p->many.n;
    size_t blocks = (q->first_pos + q->n_rows + g->block_rows - 1) / g->block_rows;
    const block_id *table = cuda_table(p->b, q->blocks[class_], blocks);
    if (table == NULL)
        return false;
    for (uint32_t row = 0, n; row < q->n_rows; row += n) {
        uint32_t alike = rows_alike(p, q, class_, row);
        n = alike < most ? alike : most;
        if (!add_tasks(p, q, class_, table, row, n))
            return false;
    }
    for (uint32_t i = first, j = p->many.n; i + 1 < j; i++) { /* turn the order */
        struct attend_task k = p->many.list[i];
        p->many.list[i] = p->many.list[--j];
        p->many.list[j] = k;
    }
    return true;
}

bool add_seqs(struct plan *p)
{
    const struct kv_geometry *g = p->a->kv->geo;
    bool used[LANE_CLASSES] = {};
    for (uint32_t h = 0; h < g->kv_heads; h++)
        used[p->classes[h]] = true;
    for (uint32_t i = 0; i < p->a->n_seqs; i++) {
        const struct batch_seq *q = &p->a->seqs[i];
        const bool elsewhere = q->n_rows > 0 && cuda_prefill_takes(p->b, p->a, q);
        for (uint32_t class_ = 0; q->n_rows > 0 && class_ < LANE_CLASSES; class_++)
            if (used[class_] && !(class_ == LANE_SPARSE && q->planned) &&
                !(class_ != LANE_STREAM && elsewhere) && !add_class(p, q, class_))
                return false;
    }
    return true;
}

/* Positions that a task attends, and those before a split of it. */
uint32_t positions_of(const struct attend_task *k)
{
    return k->first_end + k->end - k->begin;
}

uint32_t positions_before(const struct attend_task *k, uint32_t split)
{
    uint32_t end = k->end - k->begin;
    if (split < k->n_first)
        return attend_split_begin(split);
    uint32_t at = attend_split_begin(split - k->n_first);
    return k->first_end + (at < end ? at : end);
}

/* Positions of a FEW task for one CTA: where all SMs can have what there is at once, in long splits at most,
 * just that; else few enough for all of them to be at work to the end. */
size_t few_share(const struct plan *p)
{
    size_t all = 0, slots = (size_t)p->b->sms * CTAS_PER_SM;
    for (uint32_t i = 0; i < p->few.n; i++)
        all += positions_of(&p->few.list[i]);
    size_t once = (all + slots - 1) / slots;
    return once <= CUDA_LONG ? once : (once + WAVES - 1) / WAVES;
}

/* attend_reserve will find memory. */
bool has_room(const struct cuda_backend *b, size_t bytes)
{
    size_t free_bytes = 0, total = 0;
    const size_t have = b->attend->part_o_bytes;
    return bytes <= have ||
           (cudaMemGetInfo(&free_bytes, &total) == cudaSuccess && bytes <= free_bytes + have);
}

/* Of a MANY task: all, where there are tasks enough, or no memory for partial results. */
size_t many_share(const struct plan *p)
{
    size_t all = 0, partials = 0;
    for (uint32_t i = 0; i < p->many.n; i++) {
        const struct attend_task *k = &p->many.list[i];
        all += positions_of(k);
        partials += (size_t)k->n_splits * k->n_rows * p->group;
    }
    size_t items = (size_t)p->b->sms * CTAS_PER_SM * WAVES;
    size_t each = attend_padded_dim(p->a->kv->geo->head_dim) * sizeof(float);
    if (partials * each >> 20 > MAX_PARTIAL || p->many.n * 2 >= items ||
        !has_room(p->b, cuda_bucket(partials) * each))
        return SIZE_MAX;
    return (all + items - 1) / items;
}

/* The end of the splits of a CTA that begins with `split`: as many as have `share` positions. */
uint32_t end_of_share(const struct attend_task *k, uint32_t split, size_t share)
{
    size_t target = positions_before(k, split) + share;
    if (target < share || target >= positions_of(k))
        return k->n_splits;
    uint32_t at = (uint32_t)target, end = attend_splits(at);
    if (end >= k->n_first)
        end = k->n_first + (at > k->first_end ? attend_splits(at - k->first_end) : 0);
    end = end > split ? end : split + 1;
    return end < k->n_splits ? end : k->n_splits;
}

bool add_merge(struct tasks *t, const struct attend_task *k, uint32_t queries)
{
    struct attend_merge *list =
        (struct attend_merge *)grow(t->merge_room, (t->n_merges + 1) * sizeof *list);
    if (list == NULL)
        return false;
    struct attend_merge *m = &list[t->n_merges++];
    m->row = k->row;
    m->n_rows = k->n_rows;
    m->head = k->head;
    m->n_splits = k->n_splits;
    m->partial = k->partial;
    t->max_queries = queries > t->max_queries ? queries : t->max_queries;
    return true;
}

/* Adds the CTAs of a task: those that have more than half a share, or the others. */
bool add_items(struct tasks *t, const struct attend_task *task, size_t share, bool heavy)
{
    struct attend_task k = *task;
    for (uint32_t split = 0; split < k.n_splits; split = k.end_split) {
        k.split = split;
        k.end_split = end_of_share(&k, split, share);
        uint32_t end =
            k.end_split < k.n_splits ? positions_before(&k, k.end_split) : positions_of(&k);
        if ((end - positions_before(&k, split) > share / 2) != heavy)
            continue;
        t->items = (struct attend_task *)grow(t->item_room, (t->n_items + 1) * sizeof *t->items);
        if (t->items == NULL)
            return false;
        t->items[t->n_items++] = k;
    }
    return true;
}

/* How many CTAs a task has. */
uint32_t count_items(const struct attend_task *k, size_t share)
{
    uint32_t n = 0;
    for (uint32_t split = 0; split < k->n_splits; n++)
        split = end_of_share(k, split, share);
    return n;
}

/* Cuts every task into CTAs and gives it room for its partial results. Heavy CTAs come first. */
bool cut(struct plan *p, struct tasks *t, size_t share, bool is_few)
{
    for (uint32_t i = 0; i < t->n; i++) {
        struct attend_task *k = &t->list[i];
        uint32_t queries = (uint32_t)k->n_rows * p->group, n = count_items(k, share);
        bool folds = (is_few ? k->n_splits : n) > 1;
        k->partial = (uint32_t)t->partials;
        k->n_items = (uint16_t)n;
        if (folds)
            k->fold = is_few && k->n_splits <= MAX_LAST ? FOLD_LAST : FOLD_MERGE;
        if (k->n_splits > 1)
            t->partials += folds ? (size_t)k->n_splits * queries : queries;
        CHECK(t->partials < UINT32_MAX && n <= UINT16_MAX);
        if (k->fold == FOLD_LAST)
            k->counter = p->counters++;
        if (k->fold == FOLD_MERGE && !add_merge(t, k, queries))
            return false;
    }
    for (uint32_t heavy = 2; heavy-- > 0;)
        for (uint32_t i = 0; i < t->n; i++)
            if (!add_items(t, &t->list[i], share, heavy))
                return false;
    return true;
}

/* A list on the device, rounded up to a bucket with zeros; *n becomes the bucket. */
const void *stage_list(struct cuda_backend *b, struct room *r, uint32_t *n, size_t size)
{
    if (*n == 0)
        return NULL;
    uint32_t bucket = (uint32_t)cuda_bucket(*n);
    uint8_t *list = (uint8_t *)grow(r, bucket * size);
    if (list == NULL)
        return NULL;
    memset(list + *n * size, 0, (bucket - *n) * size);
    *n = bucket;
    return cuda_stage(b, list, bucket * size);
}

bool stage_tasks(struct plan *p, struct tasks *t, const struct attend_task **tasks,
                 const struct attend_merge **merges)
{
    *tasks =
        (const struct attend_task *)stage_list(p->b, t->item_room, &t->n_items, sizeof **tasks);
    *merges =
        (const struct attend_merge *)stage_list(p->b, t->merge_room, &t->n_merges, sizeof **merges);
    return (t->n_items == 0 || *tasks != NULL) && (t->n_merges == 0 || *merges != NULL);
}

bool build(struct cuda_backend *b, const struct attend_args *a, struct built *to)
{
    struct attend_lists *l = b->attend->lists;
    struct attend_list *list = &to->list;
    struct plan p = {};
    p.b = b;
    p.a = a;
    p.classes = to->classes;
    p.group = a->heads / a->kv->geo->kv_heads;
    p.few.list_room = &l->few;
    p.few.item_room = &l->few_items;
    p.few.merge_room = &l->few_merges;
    p.many.list_room = &l->many;
    p.many.item_room = &l->many_items;
    p.many.merge_room = &l->many_merges;
    if (!add_seqs(&p) || !cut(&p, &p.few, few_share(&p), true) ||
        !cut(&p, &p.many, many_share(&p), false) ||
        !stage_tasks(&p, &p.few, &list->few, &list->few_merges) ||
        !stage_tasks(&p, &p.many, &list->many, &list->many_merges))
        return false;
    list->n_few = p.few.n_items;
    list->n_many = p.many.n_items;
    list->n_few_merges = p.few.n_merges;
    list->n_many_merges = p.many.n_merges;
    list->few_queries = p.few.max_queries;
    list->many_queries = p.many.max_queries;
    list->few_partials = cuda_bucket(p.few.partials);
    list->many_partials = cuda_bucket(p.many.partials);
    list->counters = cuda_bucket(p.counters);
    return true;
}

/* Forgets the lists of an earlier step. */
struct attend_lists *lists_of_step(struct cuda_backend *b)
{
    struct attend_lists *l = b->attend->lists;
    if (l->step != b->n_steps) {
        l->step = b->n_steps;
        l->n_built = 0;
        l->placed = NULL;
    }
    return l;
}

} /* namespace */

const struct attend_list *attend_list_get(struct cuda_backend *b, const struct attend_args *a)
{
    struct attend_lists *l = lists_of_step(b);
    const struct kv_geometry *g = a->kv->geo;
    uint8_t classes[CUDA_MAX_KV_HEADS];
    for (uint32_t h = 0; h < g->kv_heads; h++)
        classes[h] = (uint8_t)kv_lane(g, a->layer, h).class_;
    for (uint32_t i = 0; i < l->n_built; i++)
        if (l->built[i].seqs == a->seqs && l->built[i].n_seqs == a->n_seqs &&
            memcmp(l->built[i].classes, classes, g->kv_heads) == 0)
            return &l->built[i].list;
    l->built = (struct built *)grow(&l->built_room, (l->n_built + 1) * sizeof *l->built);
    if (l->built != NULL) {
        struct built *to = &l->built[l->n_built];
        memset(to, 0, sizeof *to);
        to->seqs = a->seqs;
        to->n_seqs = a->n_seqs;
        memcpy(to->classes, classes, g->kv_heads);
        if (build(b, a, to)) {
            l->n_built++;
            return &to->list;
        }
    }
    cuda_ok(b, cudaErrorMemoryAllocation, "attend: list of tasks");
    return NULL;
}

const struct append_place *append_places(struct cuda_backend *b, const struct append_args *a,
                                         bool marks, uint32_t *n)
{
    struct attend_lists *l = lists_of_step(b);
    uint32_t rows = a->kv->geo->block_rows, n_rows = 0;
    if (l->placed == a->seqs && l->n_placed_seqs == a->n_seqs && (l->marked || !marks)) {
        *n = l->n_places;
        return l->device_places;
    }
    for (uint32_t s = 0; s < a->n_seqs; s++)
        n_rows += a->seqs[s].n_rows;
    *n = n_rows > 0 ? (uint32_t)cuda_bucket(n_rows) : 0;
    struct append_place *to = (struct append_place *)grow(&l->places, *n * sizeof *to);
    if (to == NULL) {
        cuda_ok(b, cudaErrorMemoryAllocation, "append: list of rows");
        return NULL;
    }
    const struct append_place *list = to;
    memset(to, 0, *n * sizeof *to);
    struct attend_args like = {};
    like.kv = a->kv;
    like.layer = a->layer;
    like.heads = a->heads;
    for (uint32_t s = 0; s < a->n_seqs; s++) {
        const struct batch_seq *q = &a->seqs[s];
        const bool to_prefill = marks && q->n_rows > 0 && cuda_prefill_takes(b, &like, q);
        for (uint32_t i = 0; i < q->n_rows; i++, to++) {
            to->to_prefill = to_prefill;
            to->row = q->first_row + i;
            to->pos = q->first_pos + i;
            for (int c = 0; c < LANE_CLASSES; c++)
                if (q->blocks[c] != NULL)
                    to->blocks[c] = q->blocks[c][to->pos / rows];
        }
    }
    for (; to < list + *n; to++)
        to->row = ~0u;
    l->device_places =
        *n > 0 ? (const struct append_place *)cuda_stage(b, list, *n * sizeof *list) : NULL;
    if (l->device_places != NULL) {
        l->placed = a->seqs;
        l->marked = marks;
        l->n_placed_seqs = a->n_seqs;
        l->n_places = *n;
    }
    return l->device_places;
}

struct attend_lists *attend_lists_create(void)
{
    return (struct attend_lists *)mem_alloc(sizeof(struct attend_lists));
}

void attend_lists_destroy(struct attend_lists *l)
{
    if (l == NULL)
        return;
    struct room *all[] = {&l->built_room, &l->few,        &l->few_items,   &l->few_merges,
                          &l->many,       &l->many_items, &l->many_merges, &l->places};
    for (struct room *r : all)
        free(r->p);
    mem_free(l);
}
