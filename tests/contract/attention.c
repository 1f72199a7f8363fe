/* engine/attention.c on a backend that hashes instead of computing: what a row gets must be the same
 * alone, in any batch, in any number of tiles, and whichever other instances share its step. */
#include "engine/attention.h"
#include "kernels/core/splitmix.h"
#include "tests/tap.h"

#include <math.h>

enum {
    LAYERS = 3,
    HEADS = 6,
    KV_HEADS = 3,
    GROUP = HEADS / KV_HEADS,
    DIM = 2,
    WIDTH = (HEADS + 2 * KV_HEADS) * DIM,
    R = 16,
    SCORED = 5, /* scores that are written and read: the first of every row */
    MAX_ROWS = 256,
    PAGES_PER_SEGMENT = SEGMENT_ROWS / R,
};

/* The rule of sealing, written once more: row p sees segment s if p >= 1024 (s + 1) + 64. */
static uint32_t segments_due(uint32_t pos)
{
    uint32_t n = 0;
    while (pos >= 1024 * (n + 1) + 64)
        n++;
    return n;
}

static uint32_t next_border(uint32_t pos)
{
    return 1024 * (segments_due(pos) + 1) + 64;
}

/* ---- a backend that hashes ---- */

static struct {
    uint32_t scores, attends, tiles_max;
    uint64_t out[LAYERS][MAX_ROWS]; /* of the last step, by batch row */
} seen;

static uint64_t mix(uint64_t h, uint64_t x)
{
    h = (h ^ x) * 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
}

static void *fake_alloc(struct backend *be, size_t bytes)
{
    (void)be;
    return mem_try_alloc(bytes);
}

static void fake_free(struct backend *be, void *p, size_t bytes)
{
    (void)be, (void)bytes;
    mem_free(p);
}

static void fake_copy(struct backend *be, void *dst, const void *src, size_t bytes)
{
    (void)be;
    memcpy(dst, src, bytes);
}

static size_t fake_digest_bytes(const struct kv_geometry *geo, const struct digest_desc *d)
{
    (void)geo;
    return d->kind == DIGEST_BOUNDS ? 128 : 256;
}

static void fake_score(struct backend *be, const struct score_args *a)
{
    (void)be;
    seen.scores++;
    for (uint32_t i = 0; i < a->n_rows; i++) {
        const struct plan_row *r = &a->rows[i];
        float q = ((const float *)a->qkv)[(size_t)r->row * WIDTH];
        CHECK(r->n_segments * a->desc.parts <= a->stride);
        for (uint32_t h = 0; h < HEADS; h++)
            for (uint32_t p = 0; p < SCORED; p++)
                a->scores[((size_t)i * HEADS + h) * a->stride + p] =
                    q + (float)(r->pos % 1000) + (float)(a->layer * 100 + h * 10 + p);
    }
}

static uint64_t scores_hash(const float *scores, uint32_t stride, uint32_t row, uint32_t head)
{
    uint64_t h = 1;
    for (uint32_t g = 0; g < GROUP; g++)
        for (uint32_t p = 0; p < SCORED; p++)
            h = mix(h, (uint64_t)scores[((size_t)row * HEADS + head * GROUP + g) * stride + p]);
    return h;
}

/* As many pages as the budget, anywhere, ascending; a few estimates. */
static void fake_select(struct backend *be, const struct select_args *a)
{
    (void)be;
    for (uint32_t i = 0; i < a->n_rows; i++) {
        const struct plan_row *r = &a->rows[i];
        for (uint32_t h = 0; h < KV_HEADS; h++) {
            if (kv_lane(a->kv->geo, a->layer, h).class_ != LANE_SPARSE)
                continue;
            size_t lane = (size_t)i * KV_HEADS + h;
            uint64_t hash = scores_hash(a->scores, a->stride, i, h);
            uint32_t all = r->n_segments * PAGES_PER_SEGMENT, n = r->budget / R + 1;
            n = n < all ? n : all;
            CHECK(n <= a->page_cap && r->estimate <= a->estimate_cap);
            uint32_t step = all / n, shift = (uint32_t)(hash % step);
            for (uint32_t k = 0; k < n; k++) {
                a->pages[lane * a->page_cap + k] = k * step + shift;
                a->share[lane * a->page_cap + k] = 1;
            }
            a->n_pages[lane] = n;
            for (uint32_t k = 0; k < r->estimate; k++)
                a->estimates[lane * a->estimate_cap + k] = k + shift;
            a->n_estimates[lane] = r->estimate;
        }
    }
}

static void fake_resolve(struct backend *be, const struct resolve_args *a)
{
    (void)be;
    for (uint32_t i = 0; i < a->n_rows; i++) {
        for (uint32_t h = 0; h < KV_HEADS; h++) {
            size_t lane = (size_t)i * KV_HEADS + h;
            if (kv_lane(a->kv->geo, a->layer, h).class_ != LANE_SPARSE)
                continue;
            for (uint32_t k = 0; k < a->n_pages[lane]; k++) {
                uint32_t *page = &a->pages[lane * a->page_cap + k];
                *page = a->rows[i].blocks[*page];
            }
        }
    }
}

static uint64_t lane_hash(const struct attend_plans *p, uint32_t i, uint32_t head)
{
    size_t lane = (size_t)i * KV_HEADS + head;
    uint64_t h = p->n_pages[lane];
    if (p->n_estimates[lane] > 0) /* nothing else reads them */
        h = mix(h, scores_hash(p->scores, p->stride, i, head));
    for (uint32_t k = 0; k < p->n_pages[lane]; k++)
        h = mix(h, p->pages[lane * p->page_cap + k]);
    for (uint32_t k = 0; k < p->n_estimates[lane]; k++)
        h = mix(h, p->estimates[lane * p->estimate_cap + k]);
    return h;
}

static void attend_row(const struct attend_args *a, const struct batch_seq *s, uint32_t k)
{
    uint32_t row = s->first_row + k, plan = s->first_plan + k;
    uint64_t h = mix(s->first_pos + k, a->layer);
    const struct attend_plans *p = a->plans;
    if (s->planned && a->n_plans > 0) {
        for (; plan >= p->n_rows; p++)
            plan -= p->n_rows;
        CHECK(p < a->plans + a->n_plans);
        CHECK(p->rows[plan].row == row && p->rows[plan].pos == s->first_pos + k);
        for (uint32_t head = 0; head < KV_HEADS; head++)
            if (kv_lane(a->kv->geo, a->layer, head).class_ == LANE_SPARSE)
                h = mix(h, lane_hash(p, plan, head));
    }
    seen.out[a->layer][row] = h;
}

static void fake_attend(struct backend *be, const struct attend_args *a)
{
    (void)be;
    seen.attends++;
    for (uint32_t s = 0; s < a->n_seqs; s++)
        for (uint32_t k = 0; k < a->seqs[s].n_rows; k++)
            attend_row(a, &a->seqs[s], k);
}

static size_t fake_known_bytes(const struct kv_geometry *g, uint32_t heads)
{
    (void)g, (void)heads;
    return 0; /* no instance here asks for the known mass */
}

static const struct backend_ops fake_ops = {.name = "fake",
                                            .act_bytes = 4,
                                            .alloc = fake_alloc,
                                            .free = fake_free,
                                            .copy = fake_copy,
                                            .digest_bytes = fake_digest_bytes,
                                            .score = fake_score,
                                            .known_bytes = fake_known_bytes,
                                            .select = fake_select,
                                            .resolve = fake_resolve,
                                            .attend = fake_attend};
static struct backend fake = {.ops = &fake_ops};

/* ---- the world: rows by sequence, any of which may be in a step ---- */

/* Layer 0 has no SPARSE lane, layer 1 one that is not. */
static const struct lane_place lanes[LAYERS * KV_HEADS] = {
    {LANE_DENSE, 0},  {LANE_DENSE, 1},  {LANE_DENSE, 2},  {LANE_SPARSE, 0}, {LANE_STREAM, 0},
    {LANE_SPARSE, 1}, {LANE_SPARSE, 2}, {LANE_SPARSE, 3}, {LANE_SPARSE, 4}};
static const struct kv_geometry geo = {.block_rows = R,
                                       .layers = LAYERS,
                                       .kv_heads = KV_HEADS,
                                       .head_dim = DIM,
                                       .page_bytes = R * DIM * 4,
                                       .n_lanes = {5, 3, 1},
                                       .lanes = lanes};
static const struct kv_memory memory = {.geo = &geo, .record_lane_bytes = 256};

struct part {
    const struct sparse_instance *in; /* NULL: attends everything */
    struct attention_seq *seq;
    uint32_t first_pos, n;
    uint32_t name; /* of the sequence: its blocks and queries */
};

static struct attention *at;

static void open_attention(uint32_t max_positions)
{
    if (attention_create(&at, &fake, &memory, HEADS, 1, MAX_ROWS, max_positions) != OK) {
        printf("Bail out! %s\n", err_text());
        exit(1);
    }
}

static const struct sparse_instance *instance_of(const char *plugin, float budget,
                                                 uint32_t min_rows, uint32_t interval)
{
    uint32_t i;
    CHECK(sparse_find(plugin, &i) == OK);
    struct sparse_choice c = sparse_choice_make(i, budget);
    c.min_rows = min_rows;
    c.interval = interval;
    const struct sparse_instance *in = attention_instance(at, &c);
    if (in == NULL) {
        printf("Bail out! %s\n", err_text());
        exit(1);
    }
    return in;
}

static const struct sparse_instance *instance(const char *plugin, float budget, uint32_t interval)
{
    return instance_of(plugin, budget, 0, interval);
}

static const uint32_t *blocks_of(uint32_t name, uint32_t n)
{
    static uint32_t blocks[64][1 << 16];
    for (uint32_t i = 0; i < n; i++)
        blocks[name][i] = name * 1000003u + i * 7;
    return blocks[name];
}

static void step(const struct part *parts, uint32_t n_parts)
{
    static float qkv[MAX_ROWS * WIDTH], out[MAX_ROWS * HEADS * DIM];
    struct batch_seq seqs[64];
    uint32_t row = 0, plans = 0;
    attention_begin(at);
    for (uint32_t i = 0; i < n_parts; i++) {
        const struct part *p = &parts[i];
        seqs[i] = (struct batch_seq){.first_row = row,
                                     .n_rows = p->n,
                                     .first_pos = p->first_pos,
                                     .first_plan = plans,
                                     .planned = p->in != NULL};
        for (uint32_t k = 0; k < p->n; k++, row++) {
            uint32_t pos = p->first_pos + k, segments = segments_due(pos);
            CHECK(row < MAX_ROWS);
            qkv[(size_t)row * WIDTH] = (float)(p->name * 17 + pos % 31);
            if (p->in == NULL)
                continue;
            const struct plan_row r = {.row = row,
                                       .pos = pos,
                                       .n_segments = segments,
                                       .blocks = blocks_of(p->name, segments * PAGES_PER_SEGMENT)};
            attention_add(at, p->in, p->seq, &r);
            plans++;
        }
    }
    memset(seen.out, 0, sizeof seen.out);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        attention_layer(at, layer, seqs, n_parts, qkv, out);
}

/* Runs the parts together, then every row of each alone. */
static bool as_alone(const struct part *parts, uint32_t n_parts)
{
    static uint64_t together[LAYERS][MAX_ROWS];
    uint32_t row = 0;
    step(parts, n_parts);
    memcpy(together, seen.out, sizeof together);
    for (uint32_t i = 0; i < n_parts; i++) {
        for (uint32_t k = 0; k < parts[i].n; k++, row++) {
            struct part one = parts[i];
            one.first_pos += k;
            one.n = 1;
            step(&one, 1);
            for (uint32_t layer = 0; layer < LAYERS; layer++)
                if (together[layer][row] != seen.out[layer][0])
                    return false;
        }
    }
    return true;
}

static void neighbours_change_nothing(void)
{
    struct part parts[24];
    uint64_t rng = 7;
    bool same = true;
    open_attention(8192);
    const struct sparse_instance *in[4] = {NULL, instance("quest", 0.05f, 1),
                                           instance("quest", 200, 1), instance("wave", 0.02f, 1)};
    for (uint32_t round = 0; round < 20; round++) {
        for (uint32_t i = 0; i < ARRAY_LEN(parts); i++)
            parts[i] = (struct part){.in = in[splitmix_next(&rng) % 4],
                                     .first_pos = 1088 + (uint32_t)(splitmix_next(&rng) % 6000),
                                     .n = 1 + (uint32_t)(splitmix_next(&rng) % 10),
                                     .name = i};
        same = same && as_alone(parts, ARRAY_LEN(parts));
    }
    ok(same, "a row gets the same alone and among rows of four instances");
    seen.attends = 0;
    step(parts, ARRAY_LEN(parts));
    ok(seen.attends == LAYERS, "one call attends for the whole batch");
    for (uint32_t i = 1; i < 4; i++)
        attention_release(at, in[i]);
    attention_destroy(at);
}

static void tiles_change_nothing(void)
{
    struct part parts[10];
    open_attention(1 << 20);
    const struct sparse_instance *a = instance("wave", 0.3f, 1), *b = instance("quest", 0.5f, 1);
    for (uint32_t i = 0; i < ARRAY_LEN(parts); i++)
        parts[i] = (struct part){.in = i % 4 == 3   ? NULL
                                       : i % 2 == 0 ? a
                                                    : b,
                                 .first_pos = 900000 + i * 1000,
                                 .n = i == 4 ? 120 : 12,
                                 .name = i};
    seen.attends = 0;
    step(parts, ARRAY_LEN(parts));
    uint32_t tiles = (seen.attends - 1) / (LAYERS - 1);
    ok(tiles > 4, "228 rows of 900,000 positions are worked on in %u tiles", tiles);
    ok(as_alone(parts, ARRAY_LEN(parts)), "and every row gets the same as alone");
    attention_release(at, a);
    attention_release(at, b);
    attention_destroy(at);
}

/* ---- the re-selection interval ---- */

static uint32_t recorded[4096][LAYERS][KV_HEADS]; /* [pos]: first page picked + 1 */

static void remember(void *arg, const struct attention_selection *s)
{
    uint32_t *n = arg;
    (*n)++;
    CHECK(s->pos < 4096 && s->n_pages > 0 && s->id == 77);
    recorded[s->pos][s->layer][s->head] = s->pages[0] + 1;
}

/* Positions [from, to) of one sequence, cut by `rng` (0: row by row), never across a border. */
static void run_positions(const struct sparse_instance *in, struct attention_seq *seq,
                          uint32_t from, uint32_t to, uint64_t rng,
                          uint64_t (*out)[LAYERS] /* [to - from] */)
{
    for (uint32_t pos = from, n; pos < to; pos += n) {
        uint32_t room = next_border(pos) < to ? next_border(pos) - pos : to - pos;
        n = rng == 0 ? 1 : 1 + (uint32_t)(splitmix_next(&rng) % 9);
        n = n < room ? n : room;
        step(&(struct part){.in = in, .seq = seq, .first_pos = pos, .n = n, .name = 1}, 1);
        for (uint32_t k = 0; k < n; k++)
            for (uint32_t layer = 0; layer < LAYERS; layer++)
                out[pos - from + k][layer] = seen.out[layer][k];
    }
}

static bool follows_interval(uint32_t from, uint32_t to, uint32_t interval)
{
    uint32_t last = from;
    for (uint32_t pos = from; pos < to; pos++) {
        if (pos % interval == 0 || segments_due(pos) != segments_due(last))
            last = pos;
        if (memcmp(recorded[pos][2], recorded[last][2], sizeof recorded[pos][2]) != 0 ||
            recorded[pos][1][0] != recorded[last][1][0])
            return false;
    }
    return true;
}

static void an_interval_re_uses_the_selection(const char *plugin)
{
    enum { FROM = 2050, TO = 2150, EVERY = 7 };
    static uint64_t one[TO - FROM][LAYERS], many[TO - FROM][LAYERS];
    uint32_t n = 0;
    bool same = true;
    open_attention(4096);
    const struct sparse_instance *in = instance(plugin, 0.1f, EVERY);
    struct attention_seq *seq = attention_seq_create(at, in, 77, 4096);
    attention_record(at, remember, &n);
    seen.scores = 0;
    run_positions(in, seq, FROM, TO, 0, one);
    uint32_t scores = seen.scores;
    attention_record(at, NULL, NULL);
    attention_seq_destroy(at, seq);
    ok(n == (TO - FROM) * 5, "%s: the recorder hears of every row and SPARSE lane", plugin);
    ok(follows_interval(FROM, TO, EVERY),
       "%s: every 7th position selects, the first row, and the first behind a sealed segment; the "
       "others re-use",
       plugin);
    bool estimates = in->traits.estimate > 0;
    ok(scores == (estimates ? 2 * (TO - FROM) : 2 * (1 + 15 + 1)), "%s: %s (%u calls)", plugin,
       estimates ? "estimates are of this step's scores" : "who re-uses does not score", scores);
    for (uint64_t rng = 1; rng <= 5; rng++) {
        seq = attention_seq_create(at, in, 78, 4096);
        run_positions(in, seq, FROM, TO, rng, many);
        same = same && memcmp(one, many, sizeof one) == 0;
        attention_seq_destroy(at, seq);
    }
    ok(same, "%s: the same in chunks of any size", plugin);
    attention_release(at, in);
    attention_destroy(at);
}

/* What sequences keep is bounded by ATTENTION_KEPT_BYTES, however many there are. */
static void kept_selections_are_bounded(void)
{
    enum { POSITIONS = 1 << 19, MANY = 512 };
    struct attention_seq *seqs[MANY], *other;
    uint32_t n = 0;
    open_attention(1 << 20);
    const struct sparse_instance *in = instance("quest", 0.25f, 2),
                                 *each = instance("quest", 0.25f, 1);
    size_t one = attention_seq_bytes(in, &geo, POSITIONS);
    uint32_t room = (uint32_t)(ATTENTION_KEPT_BYTES / one);
    CHECK(room > 1 && room < MANY);
    while (n < MANY && (seqs[n] = attention_seq_create(at, in, n, POSITIONS)) != NULL)
        n++;
    ok(n == room, "%u sequences keep %zu KiB each, and no more have room", n, one >> 10);
    other = attention_seq_create(at, each, 99, POSITIONS);
    ok(other != NULL && attention_seq_bytes(each, &geo, POSITIONS) == 0,
       "who selects in every step keeps nothing");
    attention_seq_destroy(at, other);
    attention_seq_destroy(at, seqs[--n]);
    seqs[n] = attention_seq_create(at, in, n, POSITIONS);
    ok(seqs[n] != NULL, "what one gave back another gets");
    for (uint32_t i = 0; i < room && seqs[i] != NULL; i++)
        attention_seq_destroy(at, seqs[i]);
    attention_release(at, in);
    attention_release(at, each);
    attention_destroy(at);
}

/* ---- numbers and bookkeeping ---- */

static void budgets_are_whole_pages(void)
{
    open_attention(8192);
    const struct sparse_instance *five = instance("quest", 0.05f, 1),
                                 *some = instance("quest", 0.7f, 1),
                                 *rows = instance("quest", 200, 1), *all = instance("quest", 1, 1);
    ok(attention_budget(five, &geo, 7232) == 352, "5 %% of 7,232 positions are 352 rows of pages");
    ok(attention_budget(some, &geo, 160) == 112, "70 %% of 160 are 112, whatever floats think");
    ok(attention_budget(five, &geo, 100) == R, "at least one page");
    ok(attention_budget(rows, &geo, 7232) == 192 && attention_budget(rows, &geo, 100) == 96,
       "a budget in rows is one, up to the length");
    ok(attention_min_slots(five, &geo, 7232) == 22 + 1, "a plan names these pages and the sinks'");
    ok(attention_min_slots(all, &geo, 7232) == 7 * 64, "but no more than are sealed");
    ok(attention_min_slots(all, &geo, 1087) == 0, "of which a short sequence has none");
    const struct sparse_instance *least = instance_of("quest", 0.02f, 1000, 1);
    ok(attention_budget(least, &geo, 7232) == 1008,
       "at least 1,000 rows are 63 pages of 16, though 2 %% are fewer");
    ok(attention_budget(least, &geo, 90000) == 1792, "where 2 %% are more they count");
    ok(attention_budget(least, &geo, 510) == 496 && attention_budget(least, &geo, 10) == R,
       "a shorter sequence has its whole pages, and one at least");
    ok(attention_min_slots(least, &geo, 7232) == 63 + 1 &&
           attention_min_slots(least, &geo, 1088) == 64,
       "the hot set holds them, or what is sealed");
    attention_release(at, least);
    attention_release(at, five);
    attention_release(at, some);
    attention_release(at, rows);
    attention_release(at, all);
    attention_destroy(at);
}

static void instances_are_shared(void)
{
    open_attention(8192);
    const struct sparse_instance *a = instance("quest", 0.05f, 1), *b = instance("quest", 0.05f, 1),
                                 *c = instance("quest", 0.06f, 1);
    ok(a == b && a != c, "equal choices share an instance");
    ok(a->traits.digest_bytes == 128 && a->digest_id != 0, "which knows its digests");
    attention_release(at, a);
    attention_release(at, c);
    ok(instance("quest", 0.05f, 1) == b, "until the last one is gone");
    attention_release(at, b);
    attention_release(at, b);
    const struct kv_memory small = {.geo = &geo, .record_lane_bytes = 64};
    attention_destroy(at);
    CHECK(attention_create(&at, &fake, &small, HEADS, 1, MAX_ROWS, 8192) == OK);
    uint32_t quest;
    CHECK(sparse_find("quest", &quest) == OK);
    struct sparse_choice choice = sparse_choice_make(quest, 0.1f);
    ok(attention_instance(at, &choice) == NULL && strstr(err_text(), "128 bytes") != NULL,
       "digests that the process has no room for are refused (%s)", err_text());
    attention_destroy(at);
}

static void a_step_without_plans_scores_nothing(void)
{
    open_attention(8192);
    seen.scores = seen.attends = 0;
    step(&(struct part){.first_pos = 3000, .n = 20, .name = 1}, 1);
    ok(seen.scores == 0 && seen.attends == LAYERS, "a step without plans only attends");
    attention_destroy(at);
}

int main(void)
{
    neighbours_change_nothing();
    tiles_change_nothing();
    an_interval_re_uses_the_selection("quest");
    an_interval_re_uses_the_selection("wave");
    kept_selections_are_bounded();
    budgets_are_whole_pages();
    instances_are_shared();
    a_step_without_plans_scores_nothing();
    return tap_done();
}
