/* Pages of e4m3 against pages of bf16 that hold the same numbers: every operation that reads pages gives the
 * same bits, because what was rounded is read exactly (kernels/backend.h). */
#include "tests/digest_rig.h"
#include "tests/tap.h"

enum { GROUP = 3, ROWS = 20, TAIL = 70, STEP = 5 };

/* Two rigs with the same numbers; what came out of one of them. */
struct twin {
    struct rig *r;
    uint32_t n_pages;       /* of a plan */
    float *qkv, *out, *lse; /* ROWS rows */
    float *scores, *mass;
    void *tail;
    size_t n_scores, tail_bytes;
};

static size_t width_of(const struct rig_shape *s)
{
    return (size_t)(GROUP + 2) * s->kv_heads * s->dim;
}

static size_t heads_of(const struct rig_shape *s)
{
    return (size_t)GROUP * s->kv_heads;
}

/* The numbers of e4m3 in pages of the rig's kind, the last rows but TAIL unwritten: NaN. */
static void fill(struct rig *r)
{
    uint32_t n = (r->s.segments - 1) * SEGMENT_ROWS + TAIL;
    memset(r->arena, 0xff, r->arena_bytes);
    for (uint32_t lane = 0; lane < r->s.layers * r->s.kv_heads; lane++)
        for (uint32_t row = 0; row < n; row++)
            for (uint32_t c = 0; c < r->s.dim; c++)
                for (int v = 0; v < 2; v++) {
                    float x = v != 0 ? rig_value(lane, row, c) : rig_key(lane, row, c);
                    x = row % 31 == 5 ? x * 0.002f : x; /* some are subnormal */
                    rig_put(r, r->blocks, lane, row, c, v != 0, e4m3_to_f32(f32_to_e4m3(x)));
                }
}

static struct twin open_twin(const char *isa, struct rig_shape s, struct digest_desc d,
                             enum kv_type type)
{
    rig_kept = type;
    struct twin t = {.r = rig_open(isa, 2, s, d)};
    rig_kept = KV_BF16;
    if (t.r == NULL)
        return t;
    fill(t.r);
    for (uint32_t i = 0; i + 1 < s.segments; i++)
        rig_seal(t.r, i, t.r->blocks, t.r->blocks);
    t.qkv = mem_alloc(ROWS * width_of(&s) * sizeof *t.qkv);
    for (size_t i = 0; i < ROWS * width_of(&s); i++)
        t.qkv[i] = 1.2f * rig_noise(11, 3, (uint32_t)i);
    t.out = mem_alloc(ROWS * heads_of(&s) * s.dim * sizeof *t.out);
    t.lse = mem_alloc(ROWS * heads_of(&s) * sizeof *t.lse);
    t.n_scores = heads_of(&s) * (s.segments - 1) * d.parts;
    t.scores = mem_alloc(t.n_scores * sizeof *t.scores);
    t.mass = mem_alloc(heads_of(&s) * sizeof *t.mass);
    t.tail_bytes = s.kv_heads * t.r->be->ops->known_bytes(&t.r->geo, (uint32_t)heads_of(&s));
    t.tail = mem_alloc(t.tail_bytes);
    return t;
}

static void close_twin(struct twin *t)
{
    if (t->r == NULL)
        return;
    rig_close(t->r);
    mem_free(t->qkv);
    mem_free(t->out);
    mem_free(t->lse);
    mem_free(t->scores);
    mem_free(t->mass);
    mem_free(t->tail);
}

static float scale_of(const struct rig *r)
{
    return 1.0f / sqrtf((float)r->s.dim);
}

/* The last row that is there, by plan. */
static struct plan_row planned(const struct rig *r)
{
    return (struct plan_row){.row = ROWS - 1,
                             .pos = (r->s.segments - 1) * SEGMENT_ROWS + TAIL - 1,
                             .n_segments = r->s.segments - 1,
                             .records = r->numbers,
                             .blocks = r->blocks,
                             .top_p = 1};
}

static void score(struct twin *t, enum score_kind kind)
{
    const struct rig *r = t->r;
    const struct plan_row row = planned(r);
    memset(t->scores, 0, t->n_scores * sizeof *t->scores);
    r->be->ops->score(r->be, &(struct score_args){.kv = &r->kv,
                                                  .kind = kind,
                                                  .desc = r->desc,
                                                  .layer = r->s.layers - 1,
                                                  .heads = (uint32_t)heads_of(&r->s),
                                                  .rows = &row,
                                                  .n_rows = 1,
                                                  .scale = scale_of(r),
                                                  .qkv = t->qkv,
                                                  .scores = t->scores,
                                                  .stride = (r->s.segments - 1) * r->desc.parts});
    CHECK(r->be->ops->sync(r->be) == OK);
}

static void known(struct twin *t)
{
    const struct rig *r = t->r;
    const struct plan_row row = planned(r);
    r->be->ops->known(r->be, &(struct known_args){.kv = &r->kv,
                                                  .layer = r->s.layers - 1,
                                                  .heads = (uint32_t)heads_of(&r->s),
                                                  .sinks = r->desc.sinks,
                                                  .rows = &row,
                                                  .n_rows = 1,
                                                  .scale = scale_of(r),
                                                  .qkv = t->qkv,
                                                  .lse = t->mass,
                                                  .tail = t->tail});
    CHECK(r->be->ops->sync(r->be) == OK);
}

static void attend(struct twin *t, const struct attend_plans *plans, uint32_t n_rows)
{
    const struct rig *r = t->r;
    const struct plan_row row = planned(r);
    const struct batch_seq q = {.first_row = plans != NULL ? row.row : 0,
                                .n_rows = n_rows,
                                .first_pos = row.pos + 1 - n_rows,
                                .blocks = {r->blocks},
                                .planned = plans != NULL};
    memset(t->out, 0, ROWS * heads_of(&r->s) * r->s.dim * sizeof *t->out);
    memset(t->lse, 0, ROWS * heads_of(&r->s) * sizeof *t->lse);
    r->be->ops->attend(r->be, &(struct attend_args){.kv = &r->kv,
                                                    .layer = r->s.layers - 1,
                                                    .heads = (uint32_t)heads_of(&r->s),
                                                    .seqs = &q,
                                                    .n_seqs = 1,
                                                    .scale = scale_of(r),
                                                    .qkv = t->qkv,
                                                    .plans = plans,
                                                    .n_plans = plans != NULL,
                                                    .out = t->out,
                                                    .lse = t->lse});
    CHECK(r->be->ops->sync(r->be) == OK);
}

/* Every STEP-th page, of which some rows are masked, and the tail that `known` has attended. */
static void attend_by_plan(struct twin *t, bool with_tail)
{
    const struct rig *r = t->r;
    const struct plan_row row = planned(r);
    uint32_t cap = (r->s.segments - 1) * (SEGMENT_ROWS / r->s.rows) / STEP, heads = r->s.kv_heads;
    uint32_t *pages = mem_alloc((size_t)heads * cap * sizeof *pages);
    uint32_t *masks = mem_alloc((size_t)heads * cap * sizeof *masks), n[8];
    for (uint32_t h = 0; h < heads; h++) {
        n[h] = cap - h;
        for (uint32_t i = 0; i < n[h]; i++) {
            pages[h * cap + i] = r->blocks[i * STEP + h];
            masks[h * cap + i] = i % 3 == 0 ? 0x5a5a5a5au : ~0u;
        }
    }
    const struct attend_plans p = {.desc = r->desc,
                                   .rows = &row,
                                   .n_rows = 1,
                                   .page_cap = cap,
                                   .pages = pages,
                                   .masks = masks,
                                   .n_pages = n,
                                   .tail = with_tail ? t->tail : NULL};
    attend(t, &p, 1);
    mem_free(pages);
    mem_free(masks);
}

static void unpermute(struct rig *r)
{
    r->be->ops->unpermute(r->be, &(struct unpermute_args){.kv = &r->kv,
                                                          .from = r->blocks,
                                                          .to = r->spare,
                                                          .record = r->numbers[0],
                                                          .n_rows = 700});
    CHECK(r->be->ops->sync(r->be) == OK);
}

static bool same_rows(const struct twin *a, const struct twin *b, bool spare, uint32_t n)
{
    bool same = true;
    for (uint32_t lane = 0; lane < a->r->s.layers * a->r->s.kv_heads; lane++)
        for (uint32_t row = 0; row < n; row++)
            for (uint32_t c = 0; c < a->r->s.dim; c++)
                for (int v = 0; v < 2; v++)
                    same &= rig_get(a->r, spare ? a->r->spare : a->r->blocks, lane, row, c, v) ==
                            rig_get(b->r, spare ? b->r->spare : b->r->blocks, lane, row, c, v);
    return same;
}

static bool same_result(const struct twin *a, const struct twin *b)
{
    size_t n = ROWS * heads_of(&a->r->s);
    bool finite = true;
    for (size_t i = 0; i < n * a->r->s.dim; i++)
        finite &= isfinite(a->out[i]) != 0;
    return finite && memcmp(a->out, b->out, n * a->r->s.dim * sizeof *a->out) == 0 &&
           memcmp(a->lse, b->lse, n * sizeof *a->lse) == 0;
}

static void compare_scores(struct twin *a, struct twin *b, const char *isa, const char *what)
{
    static const char *const names[] = {"mass", "bound", "exact mass"};
    for (int k = SCORE_MASS; k <= SCORE_EXACT; k++) {
        bool bounds = a->r->desc.kind == DIGEST_BOUNDS;
        if ((k == SCORE_MASS && bounds) || (k == SCORE_BOUND && !bounds))
            continue;
        score(a, (enum score_kind)k);
        score(b, (enum score_kind)k);
        ok(memcmp(a->scores, b->scores, a->n_scores * sizeof *a->scores) == 0,
           "%s, %s: the same scores (%s)", isa, what, names[k]);
    }
}

static void compare(const char *isa, struct rig_shape s, struct digest_desc d, const char *what)
{
    struct twin a = open_twin(isa, s, d, KV_BF16), b = open_twin(isa, s, d, KV_E4M3);
    char name[64];
    snprintf(name, sizeof name, "%s, R = %u, head_dim %u", what, s.rows, s.dim);
    if (a.r == NULL) {
        tap_skip(name, isa);
        return;
    }
    ok(b.r->geo.page_bytes * 2 == a.r->geo.page_bytes, "%s: half the bytes", name);
    ok(memcmp(a.r->records, b.r->records, a.r->record_total) == 0, "%s, %s: the same digests", isa,
       name);
    ok(same_rows(&a, &b, false, (s.segments - 1) * SEGMENT_ROWS), "%s, %s: the same order of rows",
       isa, name);
    compare_scores(&a, &b, isa, name);
    known(&a);
    known(&b);
    ok(memcmp(a.mass, b.mass, heads_of(&s) * sizeof *a.mass) == 0 &&
           memcmp(a.tail, b.tail, a.tail_bytes) == 0,
       "%s, %s: the same known mass and tail", isa, name);
    for (uint32_t n = 1; n <= ROWS; n += ROWS - 1) {
        attend(&a, NULL, n);
        attend(&b, NULL, n);
        ok(same_result(&a, &b), "%s, %s: %u rows attend alike", isa, name, n);
    }
    for (int tail = 0; tail < 2; tail++) {
        attend_by_plan(&a, tail != 0);
        attend_by_plan(&b, tail != 0);
        ok(same_result(&a, &b), "%s, %s: a planned row attends alike%s", isa, name,
           tail ? ", its tail known" : "");
    }
    if (d.order != ORDER_KEEP) {
        unpermute(a.r);
        unpermute(b.r);
        ok(same_rows(&a, &b, true, 700), "%s, %s: the same rows unpermuted", isa, name);
    }
    close_twin(&a);
    close_twin(&b);
}

int main(void)
{
    static const struct rig_shape shapes[] = {
        {8, 2, 3, 64, 3}, {16, 1, 2, 128, 3}, {32, 1, 1, 36, 2}};
    for (size_t i = 0; i < ARRAY_LEN(rig_isas); i++)
        for (size_t k = 0; k < ARRAY_LEN(shapes); k++) {
            uint32_t parts = SEGMENT_ROWS / shapes[k].rows;
            if (TAP_SANITIZED && k != i % ARRAY_LEN(shapes))
                continue;
            const struct digest_desc
                centroid = {.order = ORDER_BISECT,
                            .kind = DIGEST_CENTROID,
                            .parts = parts,
                            .outliers = 1,
                            .sinks = 16,
                            .values = true},
                codes = {.order = ORDER_BISECT,
                         .kind = DIGEST_CODES,
                         .parts = parts,
                         .sinks = 16,
                         .values = true},
                bounds = {.order = ORDER_KEEP, .kind = DIGEST_BOUNDS, .parts = parts, .sinks = 16},
                kmeans = {.order = ORDER_KMEANS, .kind = DIGEST_CENTROID, .parts = 64, .sinks = 16};
            compare(rig_isas[i], shapes[k], k == 0 ? codes : centroid, "bisected");
            compare(rig_isas[i], shapes[k], k == 1 ? kmeans : bounds,
                    k == 1 ? "k-means" : "bounds");
        }
    return tap_done();
}
