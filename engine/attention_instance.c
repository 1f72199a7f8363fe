/* Choices of plug-ins (attention.h): what an instance is, how much it selects, what a sequence keeps of
 * it between steps. */
#include "engine/attention_internal.h"
#include "kernels/log.h"

static const double ROUNDING = 1e-6; /* 0.7f of 160 is 112 rows, not 111 */

/* Sealed segments that the last of n_rows rows sees at most. */
static uint32_t segments_due(uint32_t n_rows)
{
    return n_rows < SEGMENT_ROWS + TAIL_ROWS ? 0 : (n_rows - TAIL_ROWS) / SEGMENT_ROWS;
}

/* ---- sizes ---- */

uint32_t attention_budget(const struct sparse_instance *in, const struct kv_geometry *geo,
                          uint32_t length)
{
    double budget = (double)in->choice.budget, r = geo->block_rows;
    double rows = budget > 1 ? budget : budget * length * (1 + ROUNDING);
    if (rows > length)
        rows = length;
    uint32_t pages = (uint32_t)(rows / r);
    uint32_t least = ceil_div(in->choice.min_rows, geo->block_rows);
    pages = max_u32(pages, min_u32(least, length / geo->block_rows));
    return max_u32(pages, 1) * geo->block_rows;
}

/* Pages that hold `budget` rows, however they lie: whole pages of a PAGE map; else each row may need
 * a page of its own, and the one partition that is picked in any case is a segment at most. */
static uint32_t budget_pages(const struct sparse_instance *in, const struct kv_geometry *geo,
                             uint32_t budget)
{
    if (in->traits.map == MAP_PAGE)
        return ceil_div(budget, geo->block_rows);
    if (in->traits.map == MAP_TOKEN)
        return budget;
    return max_u32(budget, SEGMENT_ROWS / geo->block_rows);
}

uint32_t attention_page_cap(const struct sparse_instance *in, const struct kv_geometry *geo,
                            uint32_t budget, uint32_t n_segments)
{
    uint32_t sinks = ceil_div(in->traits.sinks, geo->block_rows);
    return min_u32(budget_pages(in, geo, budget) + sinks,
                   n_segments * (SEGMENT_ROWS / geo->block_rows));
}

uint32_t attention_min_slots(const struct sparse_instance *in, const struct kv_geometry *geo,
                             uint32_t length)
{
    return attention_page_cap(in, geo, attention_budget(in, geo, length), segments_due(length));
}

uint32_t attention_estimates(const struct sparse_traits *t, uint32_t n_segments)
{
    return (uint32_t)((double)t->estimate * n_segments * t->parts + 0.5);
}

/* ---- instances ---- */

/* Sizes of digests follow from options; the process has room for those it was started with. */
static status describe(const struct attention *at, const struct sparse_choice *c,
                       struct sparse_instance *out)
{
    struct sparse_traits *t = &out->traits;
    TRY(sparse_choice_check(c, at->kv->geo, t));
    out->plugin = sparse_at(c->plugin);
    t->digest_bytes = sparse_digest_bytes(t, at->kv->geo, at->be->ops->digest_bytes);
    out->choice = *c;
    out->layout_id = sparse_layout_id(c, t);
    out->digest_id = sparse_digest_id(c, t);
    if (t->digest_bytes > at->kv->record_lane_bytes)
        return err(ERR_ARG,
                   "sparse: digests of %s with these options take %zu bytes per segment and head; "
                   "this server was started with room for %zu",
                   out->plugin->name, t->digest_bytes, at->kv->record_lane_bytes);
    return OK;
}

const struct sparse_instance *attention_instance(struct attention *at,
                                                 const struct sparse_choice *c)
{
    for (struct instance *in = at->instances; in != NULL; in = in->next) {
        if (sparse_choice_equal(&in->pub.choice, c)) {
            in->refs++;
            return &in->pub;
        }
    }
    struct instance *in = mem_try_alloc(sizeof *in);
    if (in == NULL) {
        (void)err(ERR_MEMORY, "no memory for an instance of a sparse plug-in");
        return NULL;
    }
    const uint32_t none = 0;
    if (describe(at, c, &in->pub) != OK ||
        (in->unscored = at->be->ops->alloc(at->be, sizeof none)) == NULL) {
        mem_free(in);
        return NULL;
    }
    at->be->ops->copy(at->be, in->unscored, &none, sizeof none);
    in->refs = 1;
    in->next = at->instances;
    at->instances = in;
    return &in->pub;
}

/* A plug-in whose scores are no numbers is served with the first pages: somebody must be told. */
static uint32_t count_unscored(struct attention *at, struct instance *in)
{
    uint32_t n = 0;
    at->be->ops->copy(at->be, &n, in->unscored, sizeof n);
    if (n > 0 && !in->warned) {
        log_line(LOG_WARN,
                 "plug-in %s gave no score to any partition, or a query was no number: the first "
                 "pages are attended instead; from now on this is counted only",
                 in->pub.plugin->name);
        in->warned = true;
    }
    return n;
}

void attention_release(struct attention *at, const struct sparse_instance *in)
{
    struct instance **p = &at->instances;
    while (&(*p)->pub != in) {
        CHECK(*p != NULL);
        p = &(*p)->next;
    }
    struct instance *found = *p;
    if (--found->refs > 0)
        return;
    *p = found->next;
    at->unscored += count_unscored(at, found);
    at->be->ops->free(at->be, found->unscored, sizeof *found->unscored);
    mem_free(found);
}

uint64_t attention_unscored(struct attention *at)
{
    uint64_t n = at->unscored;
    for (struct instance *in = at->instances; in != NULL; in = in->next)
        n += count_unscored(at, in);
    return n;
}

/* ---- what a sequence keeps ---- */

/* The lists that a sequence of so many positions keeps; no memory yet. */
static struct attention_seq keep_size(const struct sparse_instance *in, const struct kv_geometry *g,
                                      uint32_t max_positions)
{
    struct attention_seq s = {0};
    if (in->choice.interval <= 1 || in->traits.attends_all)
        return s;
    s.n_lists = g->layers * g->kv_heads;
    s.page_cap = max_u32(attention_min_slots(in, g, max_positions), 1);
    s.estimate_cap = attention_estimates(&in->traits, segments_due(max_positions));
    s.bytes = ((size_t)s.n_lists * (3 * (size_t)s.page_cap + s.estimate_cap + 2)) * 4;
    return s;
}

size_t attention_seq_bytes(const struct sparse_instance *in, const struct kv_geometry *geo,
                           uint32_t max_positions)
{
    return keep_size(in, geo, max_positions).bytes;
}

static bool keep_alloc(struct attention *at, struct attention_seq *s)
{
    size_t lists = s->n_lists, pages = lists * s->page_cap, estimates = lists * s->estimate_cap;
    if (s->bytes > ATTENTION_KEPT_BYTES - at->kept_bytes)
        return false;
    uint32_t *p = at->be->ops->alloc(at->be, s->bytes);
    if (p == NULL)
        return false;
    at->kept_bytes += s->bytes;
    s->pages = p;
    s->masks = p + pages;
    s->share = (float *)(p + 2 * pages);
    s->estimates = p + 3 * pages;
    s->n_pages = s->estimates + estimates;
    s->n_estimates = s->n_pages + lists;
    return true;
}

struct attention_seq *attention_seq_create(struct attention *at, const struct sparse_instance *in,
                                           uint64_t id, uint32_t max_positions)
{
    struct attention_seq *s = mem_try_alloc(sizeof *s);
    if (s == NULL)
        return NULL;
    *s = keep_size(in, at->kv->geo, max_positions);
    s->id = id;
    if (s->bytes == 0 || keep_alloc(at, s))
        return s;
    mem_free(s);
    return NULL;
}

void attention_seq_destroy(struct attention *at, struct attention_seq *s)
{
    if (s == NULL)
        return;
    if (s->pages != NULL) {
        at->be->ops->free(at->be, s->pages, s->bytes);
        at->kept_bytes -= s->bytes;
    }
    mem_free(s);
}

void attention_seal_in(struct attention *at, const struct sparse_instance *in,
                       const struct kv_memory *kv, uint32_t segment, uint32_t record,
                       uint32_t first_record, const block_id *from, const block_id *to)
{
    if (in->plugin->seal == NULL)
        return;
    const struct seal_args a = {.kv = kv,
                                .desc = in->traits.digest,
                                .from = from,
                                .to = to,
                                .segment = segment,
                                .record = record,
                                .first_record = segment == 0 ? record : first_record};
    in->plugin->seal(at->be, &in->traits, in->choice.values, &a);
}

void attention_seal(struct attention *at, const struct sparse_instance *in, uint32_t segment,
                    uint32_t record, uint32_t first_record, const block_id *from,
                    const block_id *to)
{
    attention_seal_in(at, in, at->kv, segment, record, first_record, from, to);
}
