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
 * them are launched alike in the next step; not longer than what runs at once, where that is what there is: a CTA more
 * would begin when the first ends, and the merge, which may be launched once all have begun, behind it. */
#include "kernels/cuda/attend.h"
#include "kernels/cuda/prefill.h"

#include <stdlib.h>
#include <string.h>

namespace
{

enum {
    WINDOW_STEP = 64,  /* a STREAM lane's window moves by so many positions */
    CTAS_PER_SM = 2,   /* at once */
    MANY_WAVES = 2,    /* of CTAs with MANY tasks */
    MAX_PARTIAL = 512, /* MiB of partial results; above, a MANY task is not shared by CTAs */
    MAX_LAST = 32, /* splits that the last CTA folds; more are quicker in a kernel of their own */
    SIZES = 512,   /* of CTAs, in short splits, that are told apart */
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
    uint32_t ctas;      /* items to aim at; 0: no memory */
    uint64_t positions; /* of all */
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
    struct room ends, works, ordered; /* while a list is cut */
    const struct batch_seq *placed;   /* of the last append; NULL: none in this step */
    bool marked;                      /* with to_prefill */
    uint32_t n_placed_seqs, n_places;
    const struct append_place *device_places;
};

namespace
{

struct attend_stretches stretches_of(const struct attend_task *k)
{
    return {k->first_end, k->end - k->begin};
}

bool alike(const struct attend_task *a, const struct attend_task *b)
{
    return a->first_end == b->first_end && a->end - a->begin == b->end - b->begin;
}

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
        if (p->classes[h] != class_)
            continue;
        t->list[t->n++] = k;
        t->positions += attend_positions(stretches_of(&k));
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
        const bool elsewhere = attend_is_elsewhere(p->b, p->a, q);
        for (uint32_t class_ = 0; q->n_rows > 0 && class_ < LANE_CLASSES; class_++)
            if (used[class_] && !(class_ == LANE_SPARSE && q->planned) &&
                !(class_ != LANE_STREAM && elsewhere) && !add_class(p, q, class_))
                return false;
    }
    return true;
}

/* How many CTAs the FEW tasks are to have; 0: no memory. */
uint32_t few_ctas(const struct plan *p)
{
    const struct tasks *t = &p->few;
    struct attend_work *works =
        (struct attend_work *)grow(&p->b->attend->lists->works, t->n * sizeof *works);
    uint32_t n = 0;
    if (works == NULL)
        return 0;
    for (uint32_t i = 0; i < t->n; i++) {
        if (i == 0 || !alike(&t->list[i], &t->list[i - 1]))
            works[n++] = {stretches_of(&t->list[i]), 0};
        works[n - 1].n++;
    }
    return attend_aim(works, n, (uint32_t)p->b->sms * CTAS_PER_SM);
}

/* attend_reserve will find memory. */
bool has_room(const struct cuda_backend *b, size_t bytes)
{
    size_t free_bytes = 0, total = 0;
    const size_t have = b->attend->part_o_bytes;
    return bytes <= have ||
           (cudaMemGetInfo(&free_bytes, &total) == cudaSuccess && bytes <= free_bytes + have);
}

/* And the MANY: one each, where there are tasks enough, or no memory for partial results. */
uint32_t many_ctas(const struct plan *p)
{
    size_t partials = 0, each = attend_padded_dim(p->a->kv->geo->head_dim) * sizeof(float);
    for (uint32_t i = 0; i < p->many.n; i++)
        partials += (size_t)p->many.list[i].n_splits * p->many.list[i].n_rows * p->group;
    uint32_t ctas = (uint32_t)p->b->sms * CTAS_PER_SM * MANY_WAVES;
    bool alone = partials * each >> 20 > MAX_PARTIAL || p->many.n * 2 >= ctas ||
                 !has_room(p->b, cuda_bucket(partials) * each);
    return alone ? 1 : ctas;
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

/* Adds the CTAs of a task, which end where `ends` says. */
bool add_items(struct tasks *t, const struct attend_task *task, const uint32_t *ends, uint32_t n)
{
    struct attend_task k = *task;
    t->items = (struct attend_task *)grow(t->item_room, (t->n_items + n) * sizeof *t->items);
    if (t->items == NULL)
        return false;
    for (uint32_t i = 0; i < n; i++, k.split = k.end_split) {
        k.end_split = ends[i];
        k.positions =
            attend_before(stretches_of(&k), k.end_split) - attend_before(stretches_of(&k), k.split);
        t->items[t->n_items++] = k;
    }
    return true;
}

/* Heavy CTAs come first: others fill the gaps behind them. */
bool heavy_first(struct attend_lists *l, struct tasks *t)
{
    uint32_t at[SIZES + 1] = {};
    struct attend_task *to = (struct attend_task *)grow(&l->ordered, t->n_items * sizeof *to);
    if (to == NULL)
        return false;
    auto size_of = [](const struct attend_task *k) {
        uint32_t size = k->positions / SPLIT_SHORT;
        return size < SIZES ? SIZES - 1 - size : 0u;
    };
    for (uint32_t i = 0; i < t->n_items; i++)
        at[size_of(&t->items[i]) + 1]++;
    for (uint32_t i = 0; i < SIZES; i++)
        at[i + 1] += at[i];
    for (uint32_t i = 0; i < t->n_items; i++)
        to[at[size_of(&t->items[i])]++] = t->items[i];
    memcpy(t->items, to, t->n_items * sizeof *to);
    return true;
}

/* Room for the partial results of a task that n CTAs have. */
bool give_room(struct plan *p, struct tasks *t, struct attend_task *k, uint32_t n, bool is_few)
{
    uint32_t queries = (uint32_t)k->n_rows * p->group;
    bool folds = (is_few ? k->n_splits : n) > 1;
    CHECK(n <= UINT16_MAX);
    k->partial = (uint32_t)t->partials;
    k->n_items = (uint16_t)n;
    if (folds)
        k->fold = is_few && k->n_splits <= MAX_LAST ? FOLD_LAST : FOLD_MERGE;
    if (k->n_splits > 1)
        t->partials += folds ? (size_t)k->n_splits * queries : queries;
    CHECK(t->partials < UINT32_MAX);
    if (k->fold == FOLD_LAST)
        k->counter = p->counters++;
    return k->fold != FOLD_MERGE || add_merge(t, k, queries);
}

/* Cuts the tasks into CTAs, about as many as there are to be, one for each at least. */
bool cut(struct plan *p, struct tasks *t, bool is_few)
{
    struct attend_lists *l = p->b->attend->lists;
    uint32_t *ends = (uint32_t *)grow(&l->ends, t->ctas * sizeof *ends), n = 0;
    if (ends == NULL || t->ctas == 0)
        return false;
    for (uint32_t i = 0; i < t->n; i++) {
        struct attend_task *k = &t->list[i];
        const struct attend_stretches s = stretches_of(k);
        if (i == 0 || !alike(k, k - 1))
            n = attend_cut(s, attend_share(s, t->ctas, t->positions), ends);
        if (!give_room(p, t, k, n, is_few) || !add_items(t, k, ends, n))
            return false;
    }
    return t->n_items == 0 || heavy_first(l, t);
}

/* A list on the device, rounded up with zeros to a bucket, or to `aim`, if that is less; *n becomes that. */
const void *stage_list(struct cuda_backend *b, struct room *r, uint32_t *n, size_t size,
                       uint32_t aim)
{
    if (*n == 0)
        return NULL;
    uint32_t bucket = (uint32_t)cuda_bucket(*n);
    bucket = *n <= aim && aim < bucket ? aim : bucket;
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
    *tasks = (const struct attend_task *)stage_list(p->b, t->item_room, &t->n_items, sizeof **tasks,
                                                    t->ctas);
    *merges = (const struct attend_merge *)stage_list(p->b, t->merge_room, &t->n_merges,
                                                      sizeof **merges, 0);
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
    if (!add_seqs(&p))
        return false;
    p.few.ctas = few_ctas(&p);
    p.many.ctas = many_ctas(&p);
    if (!cut(&p, &p.few, true) || !cut(&p, &p.many, false) ||
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
                          &l->many,       &l->many_items, &l->many_merges, &l->places,
                          &l->ends,       &l->works,      &l->ordered};
    for (struct room *r : all)
        free(r->p);
    mem_free(l);
}
