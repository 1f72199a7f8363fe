/* Plans of a step, layer by layer (attention.h).
 *
 * Rows are added in the order of the batch. The first layer of a step cuts them into tiles: as many
 * rows as the buffer has room for, the rows of a tile grouped by instance, because the backend's
 * calls work on the rows of one. Usually there is one tile, and one attend call for the whole batch;
 * a batch_seq whose rows lie in two tiles is cut like a prompt between two steps. Results are those of
 * single rows, so tiles and groups change nothing.
 *
 * The re-selection interval: a row selects if its position is a multiple of it, if the row before it
 * left nothing to re-use (the first planned row of a sequence), or if a segment was sealed in between.
 * Else it takes over the last row's list, which then lies beside it in the tile or in the sequence's
 * attention_seq. The list is of page numbers: residency is resolved anew in every step. */
#include "engine/attention_internal.h"

enum {
    BUFFER_BYTES = 64 << 20, /* scores and lists of one layer, unless a single row needs more */
    LIST_BYTES = 12,         /* per page of a list: page, mask, share */
};

static size_t aligned(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* Up by at most an eighth: steps whose rows grow by one have lists of the same sizes at the same places,
 * which lets a GPU replay them as one graph. */
static uint32_t roomy(uint32_t n)
{
    uint32_t unit = 1;
    while (n > 16 * unit)
        unit *= 2;
    return (n + unit - 1) / unit * unit;
}

/* What the backend keeps of a row's tail, by KV head. */
static size_t tail_bytes(const struct attention *at, const struct instance *in)
{
    return in->pub.traits.known_mass ? at->be->ops->known_bytes(at->kv->geo, at->heads) : 0;
}

/* Bytes of the lists of n rows; the pieces that layout_group hands out, in the same order. */
static size_t lists_bytes(const struct attention *at, const struct instance *in, uint32_t n)
{
    size_t lanes = (size_t)n * at->kv->geo->kv_heads;
    return aligned(lanes * group_size(at) * in->stride * sizeof(float)) +
           3 * aligned(lanes * in->page_cap * 4) + aligned(lanes * in->estimate_cap * 4) +
           2 * aligned(lanes * 4) + aligned(lanes * group_size(at) * sizeof(float)) +
           aligned(lanes * tail_bytes(at, in));
}

/* ---- life ---- */

/* The most that one row can need: each row of the longest sequence its own partition and page. */
static size_t worst_row_bytes(const struct attention *at)
{
    size_t positions = roomy(ceil_div(at->max_positions, SEGMENT_ROWS)) * (size_t)SEGMENT_ROWS;
    size_t per_lane = positions * (group_size(at) * sizeof(float) + LIST_BYTES + 4);
    per_lane += at->be->ops->known_bytes(at->kv->geo, at->heads);
    return at->kv->geo->kv_heads * per_lane + at->heads * sizeof(float) + 4096 /* alignment */;
}

static bool alloc_all(struct attention *at)
{
    size_t one = worst_row_bytes(at), all = one * at->max_rows;
    at->buffer_bytes = all < BUFFER_BYTES ? all : one > BUFFER_BYTES ? one : BUFFER_BYTES;
    const struct backend_ops *ops = at->be->ops;
    at->buffer = ops->alloc(at->be, at->buffer_bytes);
    at->rows = mem_alloc(at->max_rows * sizeof *at->rows);
    at->added = mem_alloc(at->max_rows * sizeof *at->added);
    at->added_with = mem_alloc(at->max_rows * sizeof *at->added_with);
    at->with = mem_alloc(at->max_rows * sizeof *at->with);
    at->tiles = mem_alloc((at->max_rows + (size_t)1) * sizeof *at->tiles);
    at->groups = mem_alloc(at->max_rows * sizeof *at->groups);
    at->plans = mem_alloc(at->max_rows * sizeof *at->plans);
    return at->buffer != NULL;
}

status attention_create(struct attention **out, struct backend *be, const struct kv_memory *kv,
                        uint32_t heads, float scale, uint32_t max_rows, uint32_t max_positions)
{
    CHECK(heads % kv->geo->kv_heads == 0 && max_rows > 0 && max_positions > 0);
    struct attention *at = mem_alloc(sizeof *at);
    *at = (struct attention){.be = be,
                             .kv = kv,
                             .heads = heads,
                             .scale = scale,
                             .max_rows = max_rows,
                             .max_positions = max_positions};
    if (!alloc_all(at)) {
        attention_destroy(at);
        return err(ERR_MEMORY, "buffers of sparse attention for %u rows of at most %u positions",
                   max_rows, max_positions);
    }
    *out = at;
    return OK;
}

void attention_destroy(struct attention *at)
{
    if (at == NULL)
        return;
    CHECK(at->instances == NULL);
    if (at->buffer != NULL)
        at->be->ops->free(at->be, at->buffer, at->buffer_bytes);
    mem_free(at->rows);
    mem_free(at->added);
    mem_free(at->added_with);
    mem_free(at->with);
    mem_free(at->tiles);
    mem_free(at->groups);
    mem_free(at->plans);
    mem_free(at->seqs);
    mem_free(at);
}

void attention_record(struct attention *at, attention_recorder *record, void *arg)
{
    at->record = record;
    at->record_arg = arg;
}

/* ---- adding rows ---- */

void attention_begin(struct attention *at)
{
    at->n_rows = 0;
    at->is_cut = false;
    for (struct instance *in = at->instances; in != NULL; in = in->next)
        in->stride = in->page_cap = in->estimate_cap = 0;
}

uint32_t attention_rows(const struct attention *at)
{
    return at->n_rows;
}

void attention_add(struct attention *at, const struct sparse_instance *pub,
                   struct attention_seq *seq, const struct plan_row *row)
{
    struct instance *in = (struct instance *)(uintptr_t)pub;
    const struct kv_geometry *g = at->kv->geo;
    CHECK(at->n_rows < at->max_rows && !at->is_cut && !pub->traits.attends_all);
    CHECK(row->n_segments > 0 && row->pos < at->max_positions);
    struct plan_row *r = &at->added[at->n_rows];
    *r = *row;
    r->budget = attention_budget(pub, g, row->pos + 1);
    r->estimate = attention_estimates(&pub->traits, row->n_segments);
    r->top_p = pub->choice.top_p;
    r->miss_threshold = pub->choice.miss_threshold;
    at->added_with[at->n_rows++] = (struct planned){.in = in, .seq = seq};
    in->stride = max_u32(in->stride, roomy(row->n_segments) * pub->traits.parts);
    uint32_t page_cap = attention_page_cap(pub, g, r->budget, row->n_segments);
    in->page_cap = max_u32(in->page_cap, roomy(page_cap));
    /* Light misses move from the pages to the estimates, as far as there is room. */
    uint32_t light = r->miss_threshold > 0 && pub->traits.map == MAP_PAGE ? page_cap : 0;
    uint32_t parts = row->n_segments * pub->traits.parts;
    in->estimate_cap = max_u32(in->estimate_cap, roomy(min_u32(r->estimate + light, parts)));
}

/* ---- cutting into tiles ---- */

/* Whether the row selects or re-uses, and what the sequence then keeps: positions alone decide. */
static void plan_interval(struct planned *w, const struct plan_row *r)
{
    struct attention_seq *s = w->seq;
    uint32_t interval = w->in->pub.choice.interval;
    w->selects = w->keeps = true;
    if (interval <= 1) {
        w->keeps = false;
        return;
    }
    CHECK(s != NULL && s->page_cap > 0);
    w->selects =
        !s->has || s->pos + 1 != r->pos || s->n_segments != r->n_segments || r->pos % interval == 0;
    s->has = true;
    s->pos = r->pos;
    s->n_segments = r->n_segments;
}

static struct batch_seq *add_seq(struct attention *at)
{
    if (at->n_seqs == at->max_seqs) { /* a step with more sequences than any before */
        uint32_t more = at->max_seqs * 2 + 64;
        at->seqs = mem_grow(at->seqs, at->max_seqs * sizeof *at->seqs, more * sizeof *at->seqs);
        at->max_seqs = more;
    }
    return &at->seqs[at->n_seqs++];
}

static void *take(char **at, size_t bytes)
{
    void *p = *at;
    *at += aligned(bytes);
    return p;
}

/* Lists of n rows, those beyond g->n unused. */
static void layout_group(const struct attention *at, struct group *g, uint32_t n,
                         struct attend_plans *plans, char **free)
{
    const struct instance *in = g->in;
    size_t lanes = (size_t)n * at->kv->geo->kv_heads;
    g->scores = take(free, lanes * group_size(at) * in->stride * sizeof(float));
    g->pages = take(free, lanes * in->page_cap * 4);
    g->masks = take(free, lanes * in->page_cap * 4);
    g->share = take(free, lanes * in->page_cap * 4);
    g->estimates = take(free, lanes * in->estimate_cap * 4);
    g->n_pages = take(free, lanes * 4);
    g->n_estimates = take(free, lanes * 4);
    g->known = take(free, lanes * group_size(at) * sizeof(float));
    g->tail = take(free, lanes * tail_bytes(at, in));
    if (!in->pub.traits.known_mass)
        g->known = g->tail = NULL;
    if (in->pub.traits.map == MAP_PAGE)
        g->masks = NULL;
    *plans = (struct attend_plans){.desc = in->pub.traits.digest,
                                   .rows = at->rows + g->first,
                                   .n_rows = g->n,
                                   .page_cap = in->page_cap,
                                   .estimate_cap = in->estimate_cap,
                                   .stride = in->stride,
                                   .pages = g->pages,
                                   .masks = g->masks,
                                   .n_pages = g->n_pages,
                                   .estimates = g->estimates,
                                   .n_estimates = g->n_estimates,
                                   .scores = g->scores,
                                   .tail = g->tail};
}

/* Rows that a group's lists are laid out for: as a backend counts that likes few numbers of rows. */
static uint32_t roomy_rows(const struct attention *at, const struct group *g)
{
    return at->be->ops->bucket != NULL ? at->be->ops->bucket(g->n) : g->n;
}

/* Gives the groups of the tile their lists: by bucket, where the buffer has room for that. */
static void layout_tile(struct attention *at, const struct tile *t)
{
    struct group *groups = at->groups + t->first_group;
    char *free = at->buffer;
    size_t roomy_bytes = 0;
    for (uint32_t j = 0; j < t->n_groups; j++)
        roomy_bytes += lists_bytes(at, groups[j].in, roomy_rows(at, &groups[j]));
    bool is_roomy = roomy_bytes <= at->buffer_bytes;
    for (uint32_t j = 0; j < t->n_groups; j++)
        layout_group(at, &groups[j], is_roomy ? roomy_rows(at, &groups[j]) : groups[j].n,
                     &at->plans[t->first_group + j], &free);
    CHECK((size_t)(free - (char *)at->buffer) <= at->buffer_bytes);
}

/* Groups the added rows [from, to), which are one tile, by instance in order of appearance. */
static void group_rows(struct attention *at, struct tile *t, uint32_t from, uint32_t to)
{
    uint32_t n = from;
    t->first_group = at->n_groups;
    for (uint32_t i = from; i < to; i++) {
        struct instance *in = at->added_with[i].in;
        bool seen = false;
        for (uint32_t j = t->first_group; j < at->n_groups; j++)
            seen = seen || at->groups[j].in == in;
        if (seen)
            continue;
        struct group *g = &at->groups[at->n_groups];
        *g = (struct group){.in = in, .first = n};
        for (uint32_t j = i; j < to; j++) {
            if (at->added_with[j].in != in)
                continue;
            at->rows[n] = at->added[j];
            at->with[n++] = at->added_with[j];
        }
        g->n = n - g->first;
        at->n_groups++;
    }
    CHECK(n == to);
    t->n_groups = at->n_groups - t->first_group;
    layout_tile(at, t);
}

/* Only the last row of a sequence in a group is kept for the next tile or step. */
static void mark_kept(struct attention *at, const struct tile *t)
{
    for (uint32_t j = t->first_group; j < t->first_group + t->n_groups; j++) {
        const struct group *g = &at->groups[j];
        for (uint32_t i = g->first; i + 1 < g->first + g->n; i++)
            if (at->with[i].seq == at->with[i + 1].seq)
                at->with[i].keeps = false;
    }
}

/* Where the row of the batch went in the tile whose rows begin at `from`. */
static uint32_t place_of(const struct attention *at, uint32_t from, uint32_t row)
{
    uint32_t i = from;
    while (at->rows[i].row != row)
        i++;
    return i - from;
}

/* Ends the tile of added rows [from, to). */
static void close_tile(struct attention *at, uint32_t from, uint32_t to)
{
    struct tile *t = &at->tiles[at->n_tiles];
    t->first_seq = at->n_tiles == 0 ? 0 : t[-1].first_seq + t[-1].n_seqs;
    t->n_seqs = at->n_seqs - t->first_seq;
    group_rows(at, t, from, to);
    mark_kept(at, t);
    for (uint32_t i = t->first_seq; i < at->n_seqs; i++)
        if (at->seqs[i].planned)
            at->seqs[i].first_plan = place_of(at, from, at->seqs[i].first_row);
    at->n_tiles++;
}

/* Walks the batch, cutting where the buffer is full. */
static void cut(struct attention *at, const struct batch_seq *seqs, uint32_t n_seqs)
{
    uint32_t from = 0, next = 0; /* added rows: first of the tile, next to place */
    size_t used = 0;
    at->n_tiles = at->n_groups = at->n_seqs = 0;
    for (struct instance *in = at->instances; in != NULL; in = in->next)
        in->row_bytes = lists_bytes(at, in, 1);
    for (uint32_t s = 0; s < n_seqs; s++) {
        struct batch_seq *piece = add_seq(at);
        *piece = seqs[s];
        if (!seqs[s].planned)
            continue;
        CHECK(seqs[s].first_plan == next);
        piece->n_rows = 0;
        for (uint32_t k = 0; k < seqs[s].n_rows; k++, next++) {
            struct planned *w = &at->added_with[next];
            CHECK(next < at->n_rows && at->added[next].row == seqs[s].first_row + k);
            if (used + w->in->row_bytes > at->buffer_bytes) {
                bool cuts_seq = piece->n_rows > 0;
                if (!cuts_seq)
                    at->n_seqs--;
                close_tile(at, from, next);
                from = next;
                used = 0;
                piece = add_seq(at);
                *piece = seqs[s];
                piece->first_row += k;
                piece->first_pos += k;
                piece->n_rows = 0;
            }
            used += w->in->row_bytes;
            piece->n_rows++;
            plan_interval(w, &at->added[next]);
        }
    }
    CHECK(next == at->n_rows);
    close_tile(at, from, next);
    at->is_cut = true;
}

/* ---- a layer ---- */

static bool has_sparse_lane(const struct kv_geometry *g, uint32_t layer)
{
    for (uint32_t h = 0; h < g->kv_heads; h++)
        if (kv_lane(g, layer, h).class_ == LANE_SPARSE)
            return true;
    return false;
}

static void score_rows(struct attention *at, const struct group *g, uint32_t layer, uint32_t from,
                       uint32_t n, const void *qkv)
{
    const struct instance *in = g->in;
    const struct sparse_rows r = {.kv = at->kv,
                                  .be = at->be,
                                  .layer = layer,
                                  .heads = at->heads,
                                  .group = group_size(at),
                                  .rows = at->rows + g->first + from,
                                  .n_rows = n,
                                  .qkv = qkv,
                                  .scale = at->scale};
    size_t skip = (size_t)from * at->heads * in->stride;
    in->pub.plugin->score(&r, &in->pub.traits, in->pub.choice.values, g->scores + skip, in->stride);
}

/* Of all rows, those too that re-use a selection: attend wants their tails. */
static void attend_known(struct attention *at, const struct group *g, uint32_t layer,
                         const void *qkv)
{
    const struct known_args a = {.kv = at->kv,
                                 .layer = layer,
                                 .heads = at->heads,
                                 .sinks = g->in->pub.traits.sinks,
                                 .rows = at->rows + g->first,
                                 .n_rows = g->n,
                                 .scale = at->scale,
                                 .qkv = qkv,
                                 .lse = g->known,
                                 .tail = g->tail};
    at->be->ops->known(at->be, &a);
}

static void select_rows(struct attention *at, const struct group *g, uint32_t layer, uint32_t from,
                        uint32_t n)
{
    const struct instance *in = g->in;
    const struct sparse_traits *t = &in->pub.traits;
    size_t lanes = (size_t)from * at->kv->geo->kv_heads, pages = lanes * in->page_cap;
    const struct select_args a = {
        .kv = at->kv,
        .desc = t->digest,
        .map = t->map,
        .reduce = t->reduce,
        .layer = layer,
        .group = group_size(at),
        .rows = at->rows + g->first + from,
        .n_rows = n,
        .scores = g->scores + lanes * group_size(at) * in->stride,
        .stride = in->stride,
        .known = g->known != NULL ? g->known + (size_t)from * at->heads : NULL,
        .page_cap = in->page_cap,
        .estimate_cap = in->estimate_cap,
        .pages = g->pages + pages,
        .masks = g->masks != NULL ? g->masks + pages : NULL,
        .share = g->share + pages,
        .n_pages = g->n_pages + lanes,
        .estimates = g->estimates + lanes * in->estimate_cap,
        .n_estimates = g->n_estimates + lanes,
        .unscored = in->unscored,
    };
    at->be->ops->select(at->be, &a);
}

/* Lists of one row and layer, in a group's buffer or in an attention_seq. */
struct lists {
    uint32_t *pages, *masks, *estimates, *n_pages, *n_estimates;
    float *share;
    uint32_t page_cap, estimate_cap;
};

static struct lists lists_of_row(const struct attention *at, const struct group *g, uint32_t i)
{
    size_t lanes = (size_t)i * at->kv->geo->kv_heads;
    uint32_t pc = g->in->page_cap, ec = g->in->estimate_cap;
    return (struct lists){.pages = g->pages + lanes * pc,
                          .masks = g->masks != NULL ? g->masks + lanes * pc : NULL,
                          .share = g->share + lanes * pc,
                          .estimates = g->estimates + lanes * ec,
                          .n_pages = g->n_pages + lanes,
                          .n_estimates = g->n_estimates + lanes,
                          .page_cap = pc,
                          .estimate_cap = ec};
}

static struct lists lists_kept(const struct attention *at, const struct attention_seq *s,
                               uint32_t layer)
{
    size_t lanes = (size_t)layer * at->kv->geo->kv_heads;
    return (struct lists){.pages = s->pages + lanes * s->page_cap,
                          .masks = s->masks + lanes * s->page_cap,
                          .share = s->share + lanes * s->page_cap,
                          .estimates = s->estimates + lanes * s->estimate_cap,
                          .n_pages = s->n_pages + lanes,
                          .n_estimates = s->n_estimates + lanes,
                          .page_cap = s->page_cap,
                          .estimate_cap = s->estimate_cap};
}

/* Every list is at most as long as the smaller capacity: both suit the row. */
static void copy_lists(const struct attention *at, const struct lists *to, const struct lists *from)
{
    struct backend *be = at->be;
    uint32_t heads = at->kv->geo->kv_heads;
    size_t pages = (size_t)min_u32(to->page_cap, from->page_cap) * 4;
    size_t estimates = (size_t)min_u32(to->estimate_cap, from->estimate_cap) * 4;
    for (uint32_t h = 0; h < heads; h++) {
        size_t t = (size_t)h * to->page_cap, f = (size_t)h * from->page_cap;
        be->ops->copy(be, to->pages + t, from->pages + f, pages);
        be->ops->copy(be, to->share + t, from->share + f, pages);
        if (to->masks != NULL && from->masks != NULL)
            be->ops->copy(be, to->masks + t, from->masks + f, pages);
        be->ops->copy(be, to->estimates + (size_t)h * to->estimate_cap,
                      from->estimates + (size_t)h * from->estimate_cap, estimates);
    }
    be->ops->copy(be, to->n_pages, from->n_pages, heads * sizeof(uint32_t));
    be->ops->copy(be, to->n_estimates, from->n_estimates, heads * sizeof(uint32_t));
}

/* Rows that select in runs, the others from the row before them. */
static void reuse_and_keep(struct attention *at, const struct group *g, uint32_t layer)
{
    for (uint32_t i = 0; i < g->n; i++) {
        const struct planned *w = &at->with[g->first + i];
        if (w->in->pub.choice.interval <= 1)
            continue;
        struct lists own = lists_of_row(at, g, i), kept = lists_kept(at, w->seq, layer);
        if (!w->selects) {
            bool beside = i > 0 && w[-1].seq == w->seq;
            struct lists last = beside ? lists_of_row(at, g, i - 1) : kept;
            copy_lists(at, &own, &last);
        }
        if (w->keeps)
            copy_lists(at, &kept, &own);
    }
}

/* Ends of the run of rows from i on that all select. */
static uint32_t run_end(const struct attention *at, const struct group *g, uint32_t i)
{
    while (i < g->n && at->with[g->first + i].selects)
        i++;
    return i;
}

static void tell_recorder(const struct attention *at, const struct group *g, uint32_t layer)
{
    const struct kv_geometry *geo = at->kv->geo;
    for (uint32_t i = 0; i < g->n; i++) {
        const struct plan_row *r = &at->rows[g->first + i];
        const struct attention_seq *seq = at->with[g->first + i].seq;
        struct lists l = lists_of_row(at, g, i);
        for (uint32_t h = 0; h < geo->kv_heads; h++) {
            if (kv_lane(geo, layer, h).class_ != LANE_SPARSE)
                continue;
            const struct attention_selection s = {.id = seq != NULL ? seq->id : 0,
                                                  .pos = r->pos,
                                                  .n_segments = r->n_segments,
                                                  .layer = layer,
                                                  .head = h,
                                                  .pages = l.pages + (size_t)h * l.page_cap,
                                                  .n_pages = l.n_pages[h],
                                                  .in = &g->in->pub};
            at->record(at->record_arg, &s);
        }
    }
}

static void resolve_group(struct attention *at, const struct group *g, uint32_t layer)
{
    const struct resolve_args a = {.kv = at->kv,
                                   .desc = g->in->pub.traits.digest,
                                   .layer = layer,
                                   .rows = at->rows + g->first,
                                   .n_rows = g->n,
                                   .page_cap = g->in->page_cap,
                                   .estimate_cap = g->in->estimate_cap,
                                   .pages = g->pages,
                                   .masks = g->masks,
                                   .share = g->share,
                                   .n_pages = g->n_pages,
                                   .estimates = g->estimates,
                                   .n_estimates = g->n_estimates};
    at->be->ops->resolve(at->be, &a);
}

/* Attend the tail, score, select, resolve. Estimates need the scores of this step's queries even where the selection
 * is an old one. */
static void run_group(struct attention *at, const struct group *g, uint32_t layer, const void *qkv)
{
    bool all = g->in->estimate_cap > 0;
    if (g->known != NULL)
        attend_known(at, g, layer, qkv);
    if (all)
        score_rows(at, g, layer, 0, g->n, qkv);
    for (uint32_t i = 0, end; i < g->n; i = end + 1) {
        end = run_end(at, g, i);
        if (end == i)
            continue;
        if (!all)
            score_rows(at, g, layer, i, end - i, qkv);
        select_rows(at, g, layer, i, end - i);
    }
    reuse_and_keep(at, g, layer);
    if (at->record != NULL)
        tell_recorder(at, g, layer);
    resolve_group(at, g, layer);
}

static void attend(struct attention *at, uint32_t layer, const struct batch_seq *seqs,
                   uint32_t n_seqs, const struct attend_plans *plans, uint32_t n_plans,
                   const void *qkv, void *out)
{
    const struct attend_args a = {.kv = at->kv,
                                  .layer = layer,
                                  .heads = at->heads,
                                  .seqs = seqs,
                                  .n_seqs = n_seqs,
                                  .scale = at->scale,
                                  .qkv = qkv,
                                  .plans = plans,
                                  .n_plans = n_plans,
                                  .out = out};
    at->be->ops->attend(at->be, &a);
}

void attention_layer(struct attention *at, uint32_t layer, const struct batch_seq *seqs,
                     uint32_t n_seqs, const void *qkv, void *out)
{
    if (at->n_rows == 0 || !has_sparse_lane(at->kv->geo, layer)) {
        attend(at, layer, seqs, n_seqs, NULL, 0, qkv, out);
        return;
    }
    if (!at->is_cut)
        cut(at, seqs, n_seqs);
    for (uint32_t i = 0; i < at->n_tiles; i++) {
        const struct tile *t = &at->tiles[i];
        for (uint32_t j = t->first_group; j < t->first_group + t->n_groups; j++)
            run_group(at, &at->groups[j], layer, qkv);
        attend(at, layer, at->seqs + t->first_seq, t->n_seqs, at->plans + t->first_group,
               t->n_groups, qkv, out);
    }
}
