/* The mock's scores and selections: made up, but with the locality of real ones, and picked by the
 * same rules as on every backend.
 *
 * The score of a partition depends on the lane, the partition and the position alone: a share of it
 * stays for ever, so that some pages are popular, and a share is drawn anew every RENEW positions, at
 * another position for each partition, so that a selection changes a little at every step. */
#include "kernels/mock/mock.h"

#include <math.h>
#include <string.h>

enum { RENEW = 3 }; /* positions: a third of the partitions draws anew at each */

static uint32_t mix(uint32_t x) /* MurmurHash3's finaliser */
{
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

static float made_up_score(uint32_t lane, uint32_t partition, uint32_t pos)
{
    uint32_t name = mix(lane * 0x9e3779b9u + partition);
    uint32_t turn = (pos + name % RENEW) / RENEW;
    float lasting = (float)(mix(name) >> 8), passing = (float)(mix(name ^ mix(turn)) >> 8);
    return (lasting + passing) * (4.0f / (1 << 24)); /* [0, 8) */
}

void mock_score(struct backend *be, const struct score_args *a)
{
    struct mock *m = mock_of(be);
    uint32_t kv_heads = a->kv->geo->kv_heads, group = a->heads / kv_heads;
    mock_touch(be);
    for (uint32_t i = 0; i < a->n_rows; i++)
        for (uint32_t h = 0; h < kv_heads; h++) {
            const struct plan_row *r = &a->rows[i];
            struct lane_place place = kv_lane(a->kv->geo, a->layer, h);
            uint32_t n = r->n_segments * a->desc.parts;
            float *scores = a->scores + ((size_t)i * kv_heads + h) * group * a->stride;
            if (place.class_ != LANE_SPARSE)
                continue;
            for (uint32_t s = 0; s < r->n_segments && a->desc.kind != DIGEST_NONE; s++)
                mock_check_record(m, a->kv, r->records[s], s, place.index);
            for (uint32_t p = 0; p < n; p++)
                scores[p] = made_up_score(place.index, p, r->pos);
            for (uint32_t g = 1; g < group; g++)
                memcpy(scores + (size_t)g * a->stride, scores, n * sizeof *scores);
        }
}

/* Attends nothing: rows are looked up (pages.c). */
size_t mock_known_bytes(const struct kv_geometry *geo, uint32_t heads)
{
    (void)geo, (void)heads;
    return 0;
}

/* As if every row weighed the same. Nothing here depends on it: made-up scores rank by themselves. */
void mock_known(struct backend *be, const struct known_args *a)
{
    uint32_t kv_heads = a->kv->geo->kv_heads, group = a->heads / kv_heads;
    mock_touch(be);
    for (uint32_t i = 0; i < a->n_rows; i++) {
        const struct plan_row *r = &a->rows[i];
        float mass = (float)(r->pos + 1 - r->n_segments * SEGMENT_ROWS + a->sinks);
        for (uint32_t h = 0; h < kv_heads; h++)
            for (uint32_t g = 0;
                 g < group && kv_lane(a->kv->geo, a->layer, h).class_ == LANE_SPARSE; g++)
                a->lse[((size_t)i * kv_heads + h) * group + g] = logf(mass);
    }
}

/* ---- select ---- */

/* Scratch for one lane; grows to the longest sequence seen. */
struct mock_pick {
    uint64_t *heap;  /* partitions by (score, smaller number), best on top */
    uint32_t *masks; /* [pages] rows picked */
    float *share;    /* [pages] best of the partitions on the page */
    uint8_t *estimated;
    uint32_t n_heap, max_partitions, max_pages;
};

static struct mock_pick *reserve(struct mock *m, uint32_t partitions, uint32_t pages)
{
    if (m->pick == NULL)
        m->pick = mem_alloc(sizeof *m->pick);
    struct mock_pick *k = m->pick;
    if (partitions > k->max_partitions) {
        size_t old = k->max_partitions;
        k->heap = mem_grow(k->heap, old * sizeof *k->heap, partitions * sizeof *k->heap);
        k->estimated = mem_grow(k->estimated, old, partitions);
        k->max_partitions = partitions;
    }
    if (pages > k->max_pages) {
        size_t old = k->max_pages;
        k->masks = mem_grow(k->masks, old * sizeof *k->masks, pages * sizeof *k->masks);
        k->share = mem_grow(k->share, old * sizeof *k->share, pages * sizeof *k->share);
        k->max_pages = pages;
    }
    return k;
}

void mock_select_close(struct mock *m)
{
    struct mock_pick *k = m->pick;
    if (k == NULL)
        return;
    mem_free(k->heap);
    mem_free(k->masks);
    mem_free(k->share);
    mem_free(k->estimated);
    mem_free(k);
}

/* Larger scores first, then smaller partitions. */
static uint64_t heap_key(float score, uint32_t partition)
{
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~partition;
}

static void sift_down(struct mock_pick *k, uint32_t i)
{
    uint64_t key = k->heap[i];
    for (uint32_t child; (child = 2 * i + 1) < k->n_heap; i = child) {
        child += child + 1 < k->n_heap && k->heap[child + 1] > k->heap[child];
        if (k->heap[child] <= key)
            break;
        k->heap[i] = k->heap[child];
    }
    k->heap[i] = key;
}

static uint32_t pop(struct mock_pick *k)
{
    uint32_t best = ~(uint32_t)k->heap[0];
    k->heap[0] = k->heap[--k->n_heap];
    if (k->n_heap > 0)
        sift_down(k, 0);
    return best;
}

/* One lane of a row. */
struct lane {
    const struct select_args *a;
    const struct plan_row *r;
    struct mock_pick *k;
    const float *scores; /* of the group's first head: the mock's are all alike */
    uint32_t index;      /* of the lane */
    uint32_t block_rows, n_pages, n_partitions, sink_pages;
};

/* Storage rows of a partition, from the first of the context, without those of the sinks' pages. */
static void rows_of(const struct lane *l, uint32_t partition, uint32_t *begin, uint32_t *end)
{
    const struct digest_desc *d = &l->a->desc;
    uint32_t segment = partition / d->parts, p = partition % d->parts;
    uint32_t from = p * (SEGMENT_ROWS / d->parts), to = from + SEGMENT_ROWS / d->parts;
    if (d->order == ORDER_KMEANS) {
        const struct kv_memory *kv = l->a->kv;
        const void *record = (char *)kv->records +
                             (size_t)l->r->records[segment] * kv->record_bytes +
                             (size_t)l->index * kv->record_lane_bytes;
        const uint16_t *first_row = (const uint16_t *)record + SEGMENT_ROWS;
        from = first_row[p];
        to = first_row[p + 1];
    }
    *begin = segment * SEGMENT_ROWS + from;
    *end = segment * SEGMENT_ROWS + to;
    uint32_t sinks = l->sink_pages * l->block_rows;
    *begin = *begin < sinks ? sinks : *begin;
    *end = *end < *begin ? *begin : *end;
}

static void fill_heap(const struct lane *l)
{
    struct mock_pick *k = l->k;
    k->n_heap = 0;
    for (uint32_t p = 0; p < l->n_partitions; p++) {
        uint32_t begin, end;
        rows_of(l, p, &begin, &end);
        if (begin < end)
            k->heap[k->n_heap++] = heap_key(l->scores[p], p);
    }
    for (uint32_t i = k->n_heap / 2; i-- > 0;)
        sift_down(k, i);
}

static void mark(const struct lane *l, uint32_t begin, uint32_t end, float share)
{
    for (uint32_t row = begin; row < end; row++) {
        uint32_t page = row / l->block_rows;
        l->k->masks[page] |= 1u << row % l->block_rows;
        l->k->share[page] = share > l->k->share[page] ? share : l->k->share[page];
    }
}

/* Best first until the budget or the mass is reached; whole partitions, at least one. */
static void pick(const struct lane *l)
{
    struct mock_pick *k = l->k;
    float best = k->n_heap > 0 ? l->scores[~(uint32_t)k->heap[0]] : 0;
    double all = 0, mass = 0;
    uint32_t taken = 0;
    for (uint32_t i = 0; i < k->n_heap && l->r->top_p < 1; i++)
        all += exp((double)(l->scores[~(uint32_t)k->heap[i]] - best));
    while (k->n_heap > 0) {
        uint32_t p = ~(uint32_t)k->heap[0], begin, end;
        rows_of(l, p, &begin, &end);
        bool full = taken + end - begin > l->r->budget;
        bool enough = l->r->top_p < 1 && mass >= (double)l->r->top_p * all;
        if (taken > 0 && (full || enough))
            return;
        float share = expf(l->scores[p] - best);
        mark(l, begin, end, share);
        taken += end - begin;
        mass += (double)share;
        (void)pop(k);
    }
}

static void write_pages(const struct lane *l, size_t at)
{
    const struct select_args *a = l->a;
    size_t first = at * a->page_cap;
    uint32_t n = 0;
    for (uint32_t page = 0; page < l->n_pages; page++) {
        if (l->k->masks[page] == 0)
            continue;
        CHECK(n < a->page_cap);
        a->pages[first + n] = page;
        a->share[first + n] = page < l->sink_pages ? 1 : l->k->share[page];
        if (a->masks != NULL)
            a->masks[first + n] = l->k->masks[page];
        n++;
    }
    a->n_pages[at] = n;
}

static void write_estimates(const struct lane *l, size_t at)
{
    const struct select_args *a = l->a;
    uint32_t want = l->r->estimate < l->k->n_heap ? l->r->estimate : l->k->n_heap, n = 0;
    want = want < a->estimate_cap ? want : a->estimate_cap;
    memset(l->k->estimated, 0, l->n_partitions);
    for (uint32_t i = 0; i < want; i++)
        l->k->estimated[pop(l->k)] = 1;
    for (uint32_t p = 0; p < l->n_partitions; p++)
        if (l->k->estimated[p])
            a->estimates[at * a->estimate_cap + n++] = p;
    a->n_estimates[at] = n;
}

static void select_lane(struct mock *m, const struct select_args *a, uint32_t i, uint32_t head,
                        uint32_t index)
{
    const struct kv_geometry *g = a->kv->geo;
    size_t at = (size_t)i * g->kv_heads + head;
    uint32_t segments = a->rows[i].n_segments, sinks = (a->desc.sinks + g->block_rows - 1);
    struct lane l = {.a = a,
                     .r = &a->rows[i],
                     .scores = a->scores + at * a->group * a->stride,
                     .index = index,
                     .block_rows = g->block_rows,
                     .n_pages = segments * (SEGMENT_ROWS / g->block_rows),
                     .n_partitions = segments * a->desc.parts,
                     .sink_pages = segments > 0 ? sinks / g->block_rows : 0};
    l.k = reserve(m, l.n_partitions, l.n_pages);
    memset(l.k->masks, 0, l.n_pages * sizeof *l.k->masks);
    memset(l.k->share, 0, l.n_pages * sizeof *l.k->share);
    fill_heap(&l);
    pick(&l);
    mark(&l, 0, l.sink_pages * l.block_rows, 1);
    write_pages(&l, at);
    write_estimates(&l, at);
}

void mock_select(struct backend *be, const struct select_args *a)
{
    mock_touch(be);
    for (uint32_t i = 0; i < a->n_rows; i++)
        for (uint32_t h = 0; h < a->kv->geo->kv_heads; h++) {
            struct lane_place place = kv_lane(a->kv->geo, a->layer, h);
            if (place.class_ == LANE_SPARSE)
                select_lane(mock_of(be), a, i, h, place.index);
        }
}
