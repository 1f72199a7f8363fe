/* The mock's KV: canaries that move as real rows would.
 *
 * `append` writes one canary per row and KV head (the position itself), in one layer of each block, so
 * that load tests measure the server and not page faults. `seal` moves canaries by a fixed rule and
 * marks them as moved, and names each record; `resolve` copies real pages and remembers which it was
 * asked for; `attend` looks up what it was given. So a wrong block table, slot, page, record or copy
 * fails the step here as it would spoil the answer on a real backend.
 *
 * The rule of seal: rows of a page are turned round, and pages a number of layers apart change places
 * in pairs, because a canary must stay among the pages of its layer. It is its own inverse. Sinks, and
 * pages that would change places with them, do not move. */
#include "kernels/core/hot_run.h"
#include "kernels/core/resolve.h"
#include "kernels/mock/mock.h"

#include <string.h>

enum { CANARY_MOVED = 0x80000000u }; /* beside the position: a sealed row in permuted order */

static void fail(struct mock *m, status st)
{
    if (m->error == OK)
        m->error = st;
}

/* Where row `row` of the lane's page in a block keeps its canary, whatever class and tier: at the
 * beginning of what its key takes, in a page of its own order. */
static void *canary_at(const struct kv_memory *kv, uint32_t layer, uint32_t head, block_id b,
                       uint32_t row)
{
    const struct kv_geometry *g = kv->geo;
    uint32_t class_ = kv_lane(g, layer, head).class_;
    char *base = (b & BLOCK_IN_DRAM) != 0 ? kv->dram[class_] : kv->hbm[class_];
    return base + (size_t)(b & ~BLOCK_IN_DRAM) * g->block_bytes[class_] +
           kv_page_offset(g, layer, head) + (size_t)row * g->head_dim * kv_number_bytes(g->type);
}

static uint32_t read_canary(const struct kv_memory *kv, uint32_t layer, uint32_t head, block_id b,
                            uint32_t row)
{
    uint32_t found;
    memcpy(&found, canary_at(kv, layer, head, b, row), sizeof found);
    return found;
}

/* Blocks of a sequence take turns, so every layer of the arena is used. */
static bool has_canary(const struct kv_geometry *g, uint32_t layer, uint32_t pos)
{
    return pos / g->block_rows % g->layers == layer;
}

static uint32_t segment_pages(const struct kv_geometry *g)
{
    return SEGMENT_ROWS / g->block_rows;
}

/* The other page of a pair, in a segment; itself if it has none. */
static uint32_t partner(const struct kv_geometry *g, uint32_t page)
{
    uint32_t to = page / g->layers % 2 == 0 ? page + g->layers : page - g->layers;
    return to < segment_pages(g) ? to : page;
}

/* Which position of the context a permuted segment keeps in the storage row of `pos`. */
static uint32_t moved(const struct kv_geometry *g, uint32_t sinks, uint32_t pos)
{
    uint32_t segment = pos / SEGMENT_ROWS, page = pos % SEGMENT_ROWS / g->block_rows;
    uint32_t sink_pages = segment == 0 ? (sinks + g->block_rows - 1) / g->block_rows : 0;
    if (page < sink_pages)
        return pos;
    uint32_t to = partner(g, page);
    to = to < sink_pages ? page : to;
    return segment * SEGMENT_ROWS + to * g->block_rows + g->block_rows - 1 - pos % g->block_rows;
}

/* ---- append and seal ---- */

static void append_row(const struct append_args *a, const struct batch_seq *q, uint32_t pos)
{
    const struct kv_geometry *g = a->kv->geo;
    if (!has_canary(g, a->layer, pos))
        return;
    for (uint32_t head = 0; head < g->kv_heads; head++) {
        block_id b = q->blocks[kv_lane(g, a->layer, head).class_][pos / g->block_rows];
        memcpy(canary_at(a->kv, a->layer, head, b, pos % g->block_rows), &pos, sizeof pos);
    }
}

void mock_append(struct backend *be, const struct append_args *a)
{
    mock_touch(be);
    for (uint32_t s = 0; s < a->n_seqs; s++) {
        const struct batch_seq *q = &a->seqs[s];
        for (uint32_t pos = q->first_pos; pos < q->first_pos + q->n_rows; pos++)
            append_row(a, q, pos);
    }
}

size_t mock_digest_bytes(const struct kv_geometry *geo, const struct digest_desc *d)
{
    (void)geo;
    return digest_offset(d) + 64;
}

static char *record_of(const struct kv_memory *kv, uint32_t record, uint32_t lane)
{
    return (char *)kv->records + (size_t)record * kv->record_bytes +
           (size_t)lane * kv->record_lane_bytes;
}

/* At the end of a lane's part, where it can be found without the digest's description. */
static uint32_t *record_name(const struct kv_memory *kv, uint32_t record, uint32_t lane)
{
    char *end = record_of(kv, record, lane) + kv->record_lane_bytes;
    return (uint32_t *)(void *)(end - 2 * sizeof(uint32_t));
}

/* The maps that every backend keeps, and the segment and the lane as a name. */
static void write_record(const struct seal_args *a, uint32_t lane)
{
    const struct digest_desc *d = &a->desc;
    char *at = record_of(a->kv, a->record, lane);
    uint16_t *map = (uint16_t *)(void *)at;
    uint32_t first = a->segment * SEGMENT_ROWS, *name = record_name(a->kv, a->record, lane);
    for (uint32_t i = 0; i < SEGMENT_ROWS && d->order != ORDER_KEEP; i++)
        map[i] = (uint16_t)(moved(a->kv->geo, d->sinks, first + i) - first);
    for (uint32_t i = 0; i <= d->parts && d->order == ORDER_KMEANS; i++) { /* large, small, ... */
        uint32_t even = i * SEGMENT_ROWS / d->parts, odd = i % 2 != 0 && i < d->parts;
        map[SEGMENT_ROWS + i] = (uint16_t)(even + odd * (SEGMENT_ROWS / d->parts / 2));
    }
    name[0] = a->segment;
    name[1] = lane;
}

void mock_check_record(struct mock *m, const struct kv_memory *kv, uint32_t record,
                       uint32_t segment, uint32_t lane)
{
    const uint32_t *name = record_name(kv, record, lane);
    if (name[0] != segment || name[1] != lane)
        fail(m, err(ERR_DEVICE, "mock: record %u is of segment %u, lane %u where %u, %u belong",
                    record, name[0], name[1], segment, lane));
}

/* Moves the canaries of one lane; rows without one carry nothing. */
static void seal_lane(struct mock *m, const struct seal_args *a, uint32_t layer, uint32_t head)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t first = a->segment * SEGMENT_ROWS, rows[SEGMENT_ROWS];
    for (uint32_t i = 0; i < SEGMENT_ROWS; i++) {
        if (!has_canary(g, layer, first + i))
            continue;
        block_id b = a->from[i / g->block_rows];
        rows[i] = read_canary(a->kv, layer, head, b, i % g->block_rows);
        if (rows[i] != first + i)
            fail(m, err(ERR_DEVICE, "mock: layer %u, block %u sealed with %x where %u belongs",
                        layer, b, rows[i], first + i));
    }
    for (uint32_t i = 0; i < SEGMENT_ROWS; i++) {
        if (!has_canary(g, layer, first + i))
            continue;
        uint32_t row = rows[i];
        if (a->desc.order != ORDER_KEEP)
            row = rows[moved(g, a->desc.sinks, first + i) - first] | CANARY_MOVED;
        memcpy(canary_at(a->kv, layer, head, a->to[i / g->block_rows], i % g->block_rows), &row,
               sizeof row);
    }
}

void mock_seal(struct backend *be, const struct seal_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    mock_touch(be);
    for (uint32_t layer = 0; layer < g->layers; layer++)
        for (uint32_t head = 0; head < g->kv_heads; head++) {
            struct lane_place p = kv_lane(g, layer, head);
            if (p.class_ != LANE_SPARSE)
                continue;
            seal_lane(mock_of(be), a, layer, head);
            write_record(a, p.index);
        }
}

static void unpermute_lane(struct mock *m, const struct unpermute_args *a, uint32_t layer,
                           uint32_t head, uint32_t lane)
{
    const struct kv_geometry *g = a->kv->geo;
    const uint16_t *map = (const uint16_t *)(const void *)record_of(a->kv, a->record, lane);
    uint32_t first = record_name(a->kv, a->record, lane)[0] * SEGMENT_ROWS;
    for (uint32_t i = 0; i < SEGMENT_ROWS; i++) {
        uint32_t to = map[i], pos = first + to;
        if (to >= a->n_rows || !has_canary(g, layer, first + i))
            continue;
        block_id b = a->from[i / g->block_rows];
        uint32_t row = read_canary(a->kv, layer, head, b, i % g->block_rows);
        if (row != (pos | CANARY_MOVED))
            fail(m, err(ERR_DEVICE, "mock: layer %u, block %u holds %x where sealed %u belongs",
                        layer, b, row, pos));
        memcpy(canary_at(a->kv, layer, head, a->to[to / g->block_rows], to % g->block_rows), &pos,
               sizeof pos);
    }
}

void mock_unpermute(struct backend *be, const struct unpermute_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    mock_touch(be);
    for (uint32_t layer = 0; layer < g->layers; layer++)
        for (uint32_t head = 0; head < g->kv_heads; head++) {
            struct lane_place p = kv_lane(g, layer, head);
            if (p.class_ == LANE_SPARSE)
                unpermute_lane(mock_of(be), a, layer, head, p.index);
        }
}

/* ---- resolve ---- */

/* What resolve was asked for since the last attend, for attend to compare with. */
struct mock_asked {
    struct {
        const uint32_t *list; /* the plan's list of blocks */
        size_t first;         /* its pages: [first, + n) */
        uint32_t n;
    } * lanes;
    uint32_t *pages, *slots;
    struct hot_fetch *fetches;
    size_t n_lanes, max_lanes, n_pages, max_pages;
    uint32_t max_slots;
    size_t cursor; /* attend asks in the order of resolve */
};

static size_t doubled(size_t max, size_t need)
{
    return need > 2 * max ? need : 2 * max;
}

/* Room for one more lane of page_cap pages. */
static struct mock_asked *asked_room(struct mock *m, uint32_t page_cap)
{
    if (m->asked == NULL)
        m->asked = mem_alloc(sizeof *m->asked);
    struct mock_asked *k = m->asked;
    if (k->n_lanes == k->max_lanes) {
        size_t max = doubled(k->max_lanes, 64);
        k->lanes = mem_grow(k->lanes, k->max_lanes * sizeof *k->lanes, max * sizeof *k->lanes);
        k->max_lanes = max;
    }
    if (k->n_pages + page_cap > k->max_pages) {
        size_t max = doubled(k->max_pages, k->n_pages + page_cap);
        k->pages = mem_grow(k->pages, k->max_pages * sizeof *k->pages, max * sizeof *k->pages);
        k->max_pages = max;
    }
    if (page_cap > k->max_slots) {
        size_t old = k->max_slots;
        k->slots = mem_grow(k->slots, old * sizeof *k->slots, page_cap * sizeof *k->slots);
        k->fetches = mem_grow(k->fetches, old * sizeof *k->fetches, page_cap * sizeof *k->fetches);
        k->max_slots = page_cap;
    }
    return k;
}

static void fetch(const struct kv_memory *kv, const struct hot_fetch *f)
{
    size_t block = kv->geo->block_bytes[LANE_SPARSE], page = kv->geo->page_bytes;
    const char *from = (const char *)kv->dram[LANE_SPARSE] + (f->from & ~BLOCK_IN_DRAM) * block;
    memcpy((char *)kv->hbm[LANE_SPARSE] + f->to * block + f->lane * page, from + f->lane * page,
           page);
}

/* Drops from the n pages asked for those that became estimates: their block is not in the list. */
static uint32_t drop_light(const struct hot_set *h, uint32_t lane, uint32_t *asked, uint32_t n,
                           const uint32_t *blocks, uint32_t n_blocks)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n && kept < n_blocks; i++)
        if (h->slot_blocks[*hot_entry(h, lane, asked[i])] == blocks[kept])
            asked[kept++] = asked[i];
    return kept;
}

static void resolve_one(struct mock *m, const struct resolve_args *a, uint32_t row, uint32_t head,
                        uint32_t lane)
{
    struct mock_asked *k = asked_room(m, a->page_cap);
    size_t at = (size_t)row * a->kv->geo->kv_heads + head;
    uint32_t *list = a->pages + at * a->page_cap, n = a->n_pages[at], n_fetches;
    uint32_t *asked = k->pages + k->n_pages;
    memcpy(asked, list, n * sizeof *asked);
    if (!resolve_lane(a, row, head, lane, k->slots, k->fetches, &n_fetches))
        fail(m, err(ERR_DEVICE, "mock: layer %u, head %u: a plan of %u pages has too few slots",
                    a->layer, head, n));
    for (uint32_t i = 0; i < n_fetches; i++)
        fetch(a->kv, &k->fetches[i]);
    if (a->n_pages[at] < n)
        n = drop_light(a->rows[row].hot, lane, asked, n, list, a->n_pages[at]);
    k->lanes[k->n_lanes].list = list;
    k->lanes[k->n_lanes].first = k->n_pages;
    k->lanes[k->n_lanes++].n = n;
    k->n_pages += n;
}

void mock_resolve(struct backend *be, const struct resolve_args *a)
{
    mock_touch(be);
    for (uint32_t i = 0; i < a->n_rows; i++)
        for (uint32_t h = 0; h < a->kv->geo->kv_heads; h++) {
            struct lane_place p = kv_lane(a->kv->geo, a->layer, h);
            if (p.class_ == LANE_SPARSE)
                resolve_one(mock_of(be), a, i, h, p.index);
        }
}

void mock_hot(struct backend *be, const struct hot_args *a)
{
    (void)be;
    hot_run(a);
}

void mock_pages_close(struct mock *m)
{
    struct mock_asked *k = m->asked;
    if (k == NULL)
        return;
    mem_free(k->lanes);
    mem_free(k->pages);
    mem_free(k->slots);
    mem_free(k->fetches);
    mem_free(k);
}

/* ---- attend ---- */

static uint32_t draw(struct mock *m, uint32_t n)
{
    m->probe = m->probe * 1664525u + 1013904223u; /* Numerical Recipes' generator */
    return (uint32_t)(((uint64_t)m->probe * n) >> 32);
}

/* A row of a dense look-up. Whether its segment is sealed is not known here, and of which sinks: a
 * canary that says it moved may be any that belongs there then. */
static void check_row(struct mock *m, const struct attend_args *a, uint32_t head,
                      const block_id *blocks, uint32_t pos)
{
    const struct kv_geometry *g = a->kv->geo;
    if (!has_canary(g, a->layer, pos))
        return;
    block_id b = blocks[pos / g->block_rows];
    uint32_t found = read_canary(a->kv, a->layer, head, b, pos % g->block_rows);
    uint32_t own_page = pos - pos % g->block_rows + g->block_rows - 1 - pos % g->block_rows;
    bool good = found == pos || found == (moved(g, 0, pos) | CANARY_MOVED);
    if (pos < SEGMENT_ROWS)
        good |= found == (pos | CANARY_MOVED) || found == (own_page | CANARY_MOVED);
    if (!good)
        fail(m, err(ERR_DEVICE, "mock: layer %u, block %u holds position %x where %x belongs",
                    a->layer, b, found, pos));
}

/* The last position and one other, which a row of a STREAM lane must attend too. */
static void check_seq(struct mock *m, const struct attend_args *a, const struct batch_seq *q)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t len = q->first_pos + q->n_rows, probe = draw(m, len), head = draw(m, g->kv_heads);
    uint32_t class_ = kv_lane(g, a->layer, head).class_;
    check_row(m, a, head, q->blocks[class_], len - 1);
    if (class_ == LANE_STREAM) {
        uint32_t from = len > g->stream_recent ? (len - g->stream_recent) / 64 * 64 : 0;
        uint32_t sinks = g->stream_sinks < from ? g->stream_sinks : from;
        uint32_t i = draw(m, sinks + len - from);
        probe = i < sinks ? i : from + i - sinks;
    }
    if (class_ != LANE_SPARSE || !q->planned)
        check_row(m, a, head, q->blocks[class_], probe);
}

/* One page of a plan: the canary of one of its rows, by the record's map. */
static void check_page(struct mock *m, const struct attend_args *a, const struct digest_desc *d,
                       const struct plan_row *r, uint32_t head, uint32_t page, block_id b)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t row = draw(m, g->block_rows), pos = page * g->block_rows + row, want = pos;
    uint32_t segment = pos / SEGMENT_ROWS, lane = kv_lane(g, a->layer, head).index;
    if (segment >= r->n_segments)
        fail(m,
             err(ERR_DEVICE, "mock: page %u is not sealed: %u segments are", page, r->n_segments));
    else if (has_canary(g, a->layer, pos)) {
        if (d->order != ORDER_KEEP) {
            const void *map = record_of(a->kv, r->records[segment], lane);
            want = segment * SEGMENT_ROWS + ((const uint16_t *)map)[pos % SEGMENT_ROWS];
            want |= CANARY_MOVED;
        }
        uint32_t found = read_canary(a->kv, a->layer, head, b, row);
        if (found != want)
            fail(m, err(ERR_DEVICE, "mock: layer %u, head %u, page %u in block %u holds %x, not %x",
                        a->layer, head, page, b, found, want));
    }
}

/* The pages that resolve was asked for behind this list; NULL: it never saw the list. */
static const uint32_t *asked_for(struct mock *m, const uint32_t *list, uint32_t *n)
{
    struct mock_asked *k = m->asked;
    for (size_t i = 0; k != NULL && i < k->n_lanes; i++) {
        size_t at = (k->cursor + i) % k->n_lanes;
        if (k->lanes[at].list != list)
            continue;
        k->cursor = at + 1;
        *n = k->lanes[at].n;
        return k->pages + k->lanes[at].first;
    }
    return NULL;
}

static void check_estimates(struct mock *m, const struct attend_plans *p, size_t at,
                            const struct plan_row *r)
{
    const uint32_t *e = p->estimates + at * p->estimate_cap;
    for (uint32_t i = 0; i < p->n_estimates[at]; i++)
        if (e[i] >= r->n_segments * p->desc.parts || (i > 0 && e[i] <= e[i - 1]))
            fail(m, err(ERR_DEVICE, "mock: estimate %u is partition %u of %u, after %u", i, e[i],
                        r->n_segments * p->desc.parts, i > 0 ? e[i - 1] : 0));
}

static void check_plan(struct mock *m, const struct attend_args *a, const struct attend_plans *p,
                       uint32_t i, uint32_t head)
{
    const struct plan_row *r = &p->rows[i];
    const struct kv_geometry *g = a->kv->geo;
    size_t at = (size_t)i * g->kv_heads + head;
    const uint32_t *list = p->pages + at * p->page_cap;
    uint32_t n = p->n_pages[at], n_asked = 0, tail = r->n_segments * SEGMENT_ROWS;
    const uint32_t *asked = asked_for(m, list, &n_asked);
    if (asked == NULL || n_asked != n)
        fail(m, err(ERR_DEVICE, "mock: %u pages to attend where %u were resolved", n, n_asked));
    for (uint32_t k = 0; asked != NULL && k < n && k < n_asked; k++)
        check_page(m, a, &p->desc, r, head, asked[k], list[k]);
    check_estimates(m, p, at, r);
    check_row(m, a, head, r->blocks, r->pos);
    check_row(m, a, head, r->blocks, tail + draw(m, r->pos + 1 - tail));
}

void mock_attend(struct backend *be, const struct attend_args *a)
{
    struct mock *m = mock_of(be);
    mock_touch(be);
    for (uint32_t s = 0; s < a->n_seqs; s++)
        check_seq(m, a, &a->seqs[s]);
    for (uint32_t p = 0; p < a->n_plans; p++)
        for (uint32_t i = 0; i < a->plans[p].n_rows; i++)
            for (uint32_t h = 0; h < a->kv->geo->kv_heads; h++)
                if (kv_lane(a->kv->geo, a->layer, h).class_ == LANE_SPARSE)
                    check_plan(m, a, &a->plans[p], i, h);
    if (m->asked != NULL)
        m->asked->n_lanes = m->asked->n_pages = m->asked->cursor = 0;
}
