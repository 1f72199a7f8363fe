/* Pages of fp8 against pages of bf16 that hold the same numbers, both on the GPU: sealing, every score, the known
 * mass, attention of any rows and back again give the same bits, because what was rounded is read exactly. And
 * append rounds as the CPU does. */
#include "kernels/core/digest.h"
#include "kernels/cuda_api.h"
#include "kernels/dtype.h"
#include "tests/tap.h"

#include <math.h>

enum { LAYERS = 2, LAYER = 1, GROUP = 4, TAIL = 70, CHUNK = 512, MANY = 40, STEP = 5 };

static struct backend *gpu;
static struct kv_geometry geometries[64]; /* backends know them by address: none is used twice */
static uint32_t n_geometries;

struct shape {
    uint32_t rows, kv_heads, dim, segments; /* the last one is the tail's */
};

/* One of two worlds with the same numbers. */
struct twin {
    struct shape s;
    struct digest_desc desc;
    struct kv_geometry *geo;
    struct kv_memory kv;
    uint32_t n_rows, n_blocks, heads;
    size_t width; /* numbers of a row */
    block_id *blocks, *spare;
    uint32_t *records;
    float *cos, *sin, *qkv, *out, *lse, *scores, *mass; /* the device's */
    void *tail;
    size_t scores_bytes, out_bytes, lse_bytes, mass_bytes, tail_bytes, arena_bytes, record_bytes;
};

static void synced(void)
{
    if (gpu->ops->sync(gpu) == OK)
        return;
    printf("Bail out! %s\n", err_text());
    exit(1);
}

static void *take(size_t bytes, int fill)
{
    void *p = gpu->ops->alloc(gpu, bytes), *host = mem_alloc(bytes);
    CHECK(p != NULL);
    memset(host, fill, bytes);
    gpu->ops->copy(gpu, p, host, bytes);
    synced();
    mem_free(host);
    return p;
}

static void *fetch(const void *from, size_t bytes)
{
    void *host = mem_alloc(bytes);
    gpu->ops->copy(gpu, host, from, bytes);
    synced();
    return host;
}

static bool same(const void *a, const void *b, size_t bytes)
{
    void *x = fetch(a, bytes), *y = fetch(b, bytes);
    bool is = memcmp(x, y, bytes) == 0;
    mem_free(x);
    mem_free(y);
    return is;
}

static float noise(uint32_t a, uint32_t b)
{
    uint32_t x = a * 0x9e3779b1u ^ b * 0xc2b2ae35u;
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    x ^= x >> 12;
    x *= 0x297a2d39u;
    return (float)(x ^ x >> 15) / 2147483648.0f - 1.0f;
}

/* Number i of row `pos`: of K and V a number of e4m3, some of them subnormal. */
static float number(const struct twin *t, uint32_t pos, uint32_t i)
{
    bool query = i < t->heads * t->s.dim;
    float x = noise(pos, i) * (query ? 1.3f : 2.0f) +
              (query ? 0 : noise(pos / 7, i)); /* rows that are near */
    if (query)
        return x;
    return e4m3_to_f32(f32_to_e4m3(pos % 31 == 5 ? x * 0.002f : x));
}

static void append_chunk(struct twin *t, uint32_t layer, uint32_t from, uint32_t n)
{
    float *rows = mem_alloc(n * t->width * sizeof *rows);
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t i = 0; i < t->width; i++)
            rows[r * t->width + i] = number(t, from + r + layer * 100000, i);
    gpu->ops->copy(gpu, t->qkv, rows, n * t->width * sizeof *rows);
    const struct batch_seq q = {.n_rows = n, .first_pos = from, .blocks = {t->blocks}};
    gpu->ops->append(gpu, &(struct append_args){.kv = &t->kv,
                                                .layer = layer,
                                                .heads = t->heads,
                                                .seqs = &q,
                                                .n_seqs = 1,
                                                .rope_cos = t->cos,
                                                .rope_sin = t->sin,
                                                .qkv = t->qkv});
    synced();
    mem_free(rows);
}

static void seal(struct twin *t, uint32_t segment)
{
    uint32_t first = segment * (SEGMENT_ROWS / t->s.rows);
    gpu->ops->seal(gpu, &(struct seal_args){.kv = &t->kv,
                                            .desc = t->desc,
                                            .from = t->blocks + first,
                                            .to = t->blocks + first,
                                            .segment = segment,
                                            .record = t->records[segment],
                                            .first_record = t->records[0]});
    synced();
}

/* cos 1 and sin 0: keys stay the numbers they are. */
static void take_tables(struct twin *t)
{
    size_t n = (size_t)t->n_rows * t->s.dim / 2;
    float *ones = mem_alloc(n * sizeof *ones);
    for (size_t i = 0; i < n; i++)
        ones[i] = 1;
    t->cos = take(n * sizeof *ones, 0);
    t->sin = take(n * sizeof *ones, 0);
    gpu->ops->copy(gpu, t->cos, ones, n * sizeof *ones);
    synced();
    mem_free(ones);
}

static struct twin open_twin(struct shape s, struct digest_desc d, enum kv_type type)
{
    struct twin t = {.s = s, .desc = d, .heads = GROUP * s.kv_heads};
    CHECK(n_geometries < ARRAY_LEN(geometries));
    t.geo = &geometries[n_geometries++];
    *t.geo = (struct kv_geometry){.block_rows = s.rows,
                                  .layers = LAYERS,
                                  .kv_heads = s.kv_heads,
                                  .head_dim = s.dim,
                                  .type = type};
    t.geo->page_bytes = kv_page_bytes(t.geo);
    t.geo->n_lanes[LANE_SPARSE] = LAYERS * s.kv_heads;
    t.geo->block_bytes[LANE_SPARSE] = LAYERS * s.kv_heads * t.geo->page_bytes;
    t.n_rows = (s.segments - 1) * SEGMENT_ROWS + TAIL;
    t.n_blocks = s.segments * SEGMENT_ROWS / s.rows;
    t.width = (size_t)(t.heads + 2 * s.kv_heads) * s.dim;
    t.blocks = mem_alloc(t.n_blocks * sizeof *t.blocks);
    t.spare = mem_alloc(t.n_blocks * sizeof *t.spare);
    t.records = mem_alloc(s.segments * sizeof *t.records);
    for (uint32_t i = 0; i < t.n_blocks; i++) {
        t.blocks[i] = i * 2;
        t.spare[i] = i * 2 + 1;
    }
    for (uint32_t i = 0; i < s.segments; i++)
        t.records[i] = s.segments - 1 - i;
    t.kv = (struct kv_memory){.geo = t.geo};
    t.kv.record_lane_bytes = gpu->ops->digest_bytes(t.geo, &d);
    t.kv.record_bytes = t.kv.record_lane_bytes * t.geo->n_lanes[LANE_SPARSE];
    t.arena_bytes = 2 * t.n_blocks * t.geo->block_bytes[LANE_SPARSE];
    t.record_bytes = s.segments * t.kv.record_bytes;
    t.kv.hbm[LANE_SPARSE] = take(t.arena_bytes, 0xff);
    t.kv.records = take(t.record_bytes, 0x5a);
    take_tables(&t);
    t.out_bytes = (size_t)CHUNK * t.heads * s.dim * sizeof(float);
    t.lse_bytes = (size_t)CHUNK * t.heads * sizeof(float);
    t.scores_bytes = (size_t)t.heads * (s.segments - 1) * d.parts * sizeof(float);
    t.mass_bytes = t.heads * sizeof(float);
    t.tail_bytes = s.kv_heads * gpu->ops->known_bytes(t.geo, t.heads);
    t.qkv = take(CHUNK * t.width * sizeof(float), 0);
    t.out = take(t.out_bytes, 0);
    t.lse = take(t.lse_bytes, 0);
    t.scores = take(t.scores_bytes, 0);
    t.mass = take(t.mass_bytes, 0);
    t.tail = take(t.tail_bytes, 0);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t from = 0; from < t.n_rows; from += CHUNK)
            append_chunk(&t, layer, from, t.n_rows - from < CHUNK ? t.n_rows - from : CHUNK);
    for (uint32_t i = 0; i + 1 < s.segments; i++)
        seal(&t, i);
    return t;
}

static void close_twin(struct twin *t)
{
    const struct backend_ops *ops = gpu->ops;
    size_t table = (size_t)t->n_rows * t->s.dim / 2 * sizeof(float);
    ops->free(gpu, t->kv.hbm[LANE_SPARSE], t->arena_bytes);
    ops->free(gpu, t->kv.records, t->record_bytes);
    ops->free(gpu, t->cos, table);
    ops->free(gpu, t->sin, table);
    ops->free(gpu, t->qkv, CHUNK * t->width * sizeof(float));
    ops->free(gpu, t->out, t->out_bytes);
    ops->free(gpu, t->lse, t->lse_bytes);
    ops->free(gpu, t->scores, t->scores_bytes);
    ops->free(gpu, t->mass, t->mass_bytes);
    ops->free(gpu, t->tail, t->tail_bytes);
    mem_free(t->blocks);
    mem_free(t->spare);
    mem_free(t->records);
}

/* ---- operations ---- */

static struct plan_row planned(const struct twin *t)
{
    return (struct plan_row){.row = 0,
                             .pos = t->n_rows - 1,
                             .n_segments = t->s.segments - 1,
                             .records = t->records,
                             .blocks = t->blocks,
                             .top_p = 1};
}

static float scale_of(const struct twin *t)
{
    return 1.0f / sqrtf((float)t->s.dim);
}

static void score(struct twin *t, enum score_kind kind)
{
    const struct plan_row row = planned(t);
    gpu->ops->score(gpu, &(struct score_args){.kv = &t->kv,
                                              .kind = kind,
                                              .desc = t->desc,
                                              .layer = LAYER,
                                              .heads = t->heads,
                                              .rows = &row,
                                              .n_rows = 1,
                                              .scale = scale_of(t),
                                              .qkv = t->qkv,
                                              .scores = t->scores,
                                              .stride = (t->s.segments - 1) * t->desc.parts});
    synced();
}

static void known(struct twin *t)
{
    const struct plan_row row = planned(t);
    gpu->ops->known(gpu, &(struct known_args){.kv = &t->kv,
                                              .layer = LAYER,
                                              .heads = t->heads,
                                              .sinks = t->desc.sinks,
                                              .rows = &row,
                                              .n_rows = 1,
                                              .scale = scale_of(t),
                                              .qkv = t->qkv,
                                              .lse = t->mass,
                                              .tail = t->tail});
    synced();
}

/* The youngest n rows, which are in qkv from its beginning on, whatever they were. */
static void attend(struct twin *t, const struct attend_plans *plans, uint32_t n)
{
    const struct batch_seq q = {
        .n_rows = n, .first_pos = t->n_rows - n, .blocks = {t->blocks}, .planned = plans != NULL};
    gpu->ops->attend(gpu, &(struct attend_args){.kv = &t->kv,
                                                .layer = LAYER,
                                                .heads = t->heads,
                                                .seqs = &q,
                                                .n_seqs = 1,
                                                .scale = scale_of(t),
                                                .qkv = t->qkv,
                                                .plans = plans,
                                                .n_plans = plans != NULL,
                                                .out = t->out,
                                                .lse = t->lse});
    synced();
}

/* Every STEP-th page, some rows of them masked, with the tail that `known` has attended, or not. */
static void attend_by_plan(struct twin *t, bool masked, bool with_tail)
{
    const struct plan_row row = planned(t);
    uint32_t cap = (t->s.segments - 1) * (SEGMENT_ROWS / t->s.rows) / STEP, heads = t->s.kv_heads;
    size_t bytes = (size_t)heads * cap * sizeof(uint32_t);
    uint32_t *list = mem_alloc(bytes), *some = mem_alloc(bytes), n[8];
    for (uint32_t h = 0; h < heads; h++) {
        n[h] = cap - h;
        for (uint32_t i = 0; i < n[h]; i++) {
            list[h * cap + i] = t->blocks[i * STEP + h];
            some[h * cap + i] = i % 3 == 0 ? 0x5a5a5a5au : ~0u;
        }
    }
    uint32_t *pages = take(bytes, 0), *masks = take(bytes, 0), *counts = take(sizeof n, 0);
    gpu->ops->copy(gpu, pages, list, bytes);
    gpu->ops->copy(gpu, masks, some, bytes);
    gpu->ops->copy(gpu, counts, n, sizeof n);
    synced();
    const struct attend_plans p = {.desc = t->desc,
                                   .rows = &row,
                                   .n_rows = 1,
                                   .page_cap = cap,
                                   .pages = pages,
                                   .masks = masked ? masks : NULL,
                                   .n_pages = counts,
                                   .tail = with_tail ? t->tail : NULL};
    attend(t, &p, 1);
    gpu->ops->free(gpu, pages, bytes);
    gpu->ops->free(gpu, masks, bytes);
    gpu->ops->free(gpu, counts, sizeof n);
    mem_free(list);
    mem_free(some);
}

/* ---- cases ---- */

static uint8_t *page_of(const struct twin *t, uint8_t *arena, block_id b, uint32_t lane)
{
    return arena + b * t->geo->block_bytes[LANE_SPARSE] + lane * t->geo->page_bytes;
}

/* Rows as they lie: a page is K[R][dim], V[R][dim]. */
static bool same_rows(const struct twin *a, const struct twin *b, const block_id *blocks,
                      uint32_t n)
{
    uint8_t *x = fetch(a->kv.hbm[LANE_SPARSE], a->arena_bytes);
    uint8_t *y = fetch(b->kv.hbm[LANE_SPARSE], b->arena_bytes);
    bool is = true;
    for (uint32_t lane = 0; lane < LAYERS * a->s.kv_heads; lane++)
        for (uint32_t p = 0; p < n / a->s.rows; p++) {
            const uint16_t *wide = (const uint16_t *)(const void *)page_of(a, x, blocks[p], lane);
            const uint8_t *narrow = page_of(b, y, blocks[p], lane);
            for (size_t i = 0; i < b->geo->page_bytes; i++)
                is = is && f32_to_bf16(e4m3_to_f32(narrow[i])) == wide[i];
        }
    mem_free(x);
    mem_free(y);
    return is;
}

static bool same_result(const struct twin *a, const struct twin *b, uint32_t n)
{
    size_t numbers = (size_t)n * a->heads * a->s.dim;
    float *x = fetch(a->out, numbers * sizeof *x);
    bool finite = true;
    for (size_t i = 0; i < numbers; i++)
        finite = finite && isfinite(x[i]);
    mem_free(x);
    return finite && same(a->out, b->out, numbers * sizeof(float)) &&
           same(a->lse, b->lse, (size_t)n * a->heads * sizeof(float));
}

static void compare_scores(struct twin *a, struct twin *b, const char *name)
{
    static const char *const kinds[] = {"mass", "bound", "exact mass"};
    for (int k = SCORE_MASS; k <= SCORE_EXACT; k++) {
        bool bounds = a->desc.kind == DIGEST_BOUNDS;
        if ((k == SCORE_MASS && bounds) || (k == SCORE_BOUND && !bounds))
            continue;
        score(a, (enum score_kind)k);
        score(b, (enum score_kind)k);
        ok(same(a->scores, b->scores, a->scores_bytes), "%s: the same scores (%s)", name, kinds[k]);
    }
}

static void unpermute(struct twin *t)
{
    gpu->ops->unpermute(gpu, &(struct unpermute_args){.kv = &t->kv,
                                                      .from = t->blocks,
                                                      .to = t->spare,
                                                      .record = t->records[0],
                                                      .n_rows = 704});
    synced();
}

static void compare(struct shape s, struct digest_desc d, const char *what)
{
    char name[64];
    struct twin a = open_twin(s, d, KV_BF16), b = open_twin(s, d, KV_E4M3);
    snprintf(name, sizeof name, "%s, R = %u, head_dim %u", what, s.rows, s.dim);
    ok(same(a.kv.records, b.kv.records, a.record_bytes), "%s: the same digests", name);
    ok(same_rows(&a, &b, a.blocks, (s.segments - 1) * SEGMENT_ROWS), "%s: the same order of rows",
       name);
    compare_scores(&a, &b, name);
    known(&a);
    known(&b);
    ok(same(a.mass, b.mass, a.mass_bytes), "%s: the same known mass", name);
    const uint32_t n_rows[] = {1, 3, MANY, TAIL};
    for (size_t i = 0; i < ARRAY_LEN(n_rows); i++) {
        attend(&a, NULL, n_rows[i]);
        attend(&b, NULL, n_rows[i]);
        ok(same_result(&a, &b, n_rows[i]), "%s: %u rows attend alike", name, n_rows[i]);
    }
    for (int i = 0; i < 4; i++) {
        attend_by_plan(&a, i % 2 != 0, i / 2 != 0);
        attend_by_plan(&b, i % 2 != 0, i / 2 != 0);
        ok(same_result(&a, &b, 1), "%s: a planned row attends alike%s%s", name,
           i % 2 ? ", by masks" : "", i / 2 ? ", its tail known" : "");
    }
    if (d.order != ORDER_KEEP) {
        unpermute(&a);
        unpermute(&b);
        ok(same_rows(&a, &b, a.spare, 704), "%s: the same rows unpermuted", name);
    }
    close_twin(&a);
    close_twin(&b);
}

/* Numbers of every size, those that do not exist among them: kernels/dtype.h says what is kept. n rows: few and
 * many take different kernels. */
static void append_rounds_as_the_cpu(uint32_t n)
{
    const struct shape s = {16, 2, 64, 1};
    const struct digest_desc none = {.parts = 64};
    struct twin t = {.s = s, .desc = none, .heads = GROUP * s.kv_heads, .n_rows = 256};
    t.geo = &geometries[n_geometries++];
    *t.geo = (struct kv_geometry){.block_rows = s.rows,
                                  .layers = LAYERS,
                                  .kv_heads = s.kv_heads,
                                  .head_dim = s.dim,
                                  .type = KV_E4M3};
    t.geo->page_bytes = kv_page_bytes(t.geo);
    t.geo->n_lanes[LANE_SPARSE] = LAYERS * s.kv_heads;
    t.geo->block_bytes[LANE_SPARSE] = LAYERS * s.kv_heads * t.geo->page_bytes;
    t.width = (size_t)(t.heads + 2 * s.kv_heads) * s.dim;
    t.arena_bytes = 16 * t.geo->block_bytes[LANE_SPARSE];
    t.kv = (struct kv_memory){.geo = t.geo, .hbm = {take(t.arena_bytes, 0)}};
    take_tables(&t);
    block_id blocks[16];
    for (uint32_t i = 0; i < 16; i++)
        blocks[i] = 15 - i;
    float *rows = mem_alloc(n * t.width * sizeof *rows);
    for (size_t i = 0; i < n * t.width; i++)
        rows[i] = i % 97 == 5   ? INFINITY
                  : i % 89 == 3 ? 464.0f
                  : i % 83 == 7 ? -0x1.8p-9f
                                : ldexpf(noise(9, (uint32_t)i), (int)(i * 7 % 26) - 13);
    t.qkv = take(n * t.width * sizeof(float), 0);
    gpu->ops->copy(gpu, t.qkv, rows, n * t.width * sizeof *rows);
    const struct batch_seq q = {.n_rows = n, .blocks = {blocks}};
    gpu->ops->append(gpu, &(struct append_args){.kv = &t.kv,
                                                .layer = LAYER,
                                                .heads = t.heads,
                                                .seqs = &q,
                                                .n_seqs = 1,
                                                .rope_cos = t.cos,
                                                .rope_sin = t.sin,
                                                .qkv = t.qkv});
    synced();
    uint8_t *arena = fetch(t.kv.hbm[LANE_SPARSE], t.arena_bytes);
    int wrong = 0;
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t h = 0; h < s.kv_heads; h++)
            for (uint32_t v = 0; v < 2; v++)
                for (uint32_t c = 0; c < s.dim; c++) {
                    const uint8_t *page =
                        page_of(&t, arena, blocks[r / s.rows], LAYER * s.kv_heads + h);
                    const float *row = rows + r * t.width + (size_t)t.heads * s.dim;
                    float x = row[(size_t)(v * s.kv_heads + h) * s.dim + c];
                    bool turned =
                        v == 0 && !isfinite(row[(size_t)h * s.dim + (c + s.dim / 2) % s.dim]);
                    wrong += !turned && isfinite(x) &&
                             page[(v * s.rows + r % s.rows) * s.dim + c] != f32_to_e4m3(x);
                }
    ok(wrong == 0, "append of %u rows rounds to fp8 as the CPU does (%d do not)", n, wrong);
    mem_free(arena);
    mem_free(rows);
}

static void heads_that_do_not_fit_are_refused(void)
{
    static const uint32_t dims[] = {34, 260};
    for (size_t i = 0; i < ARRAY_LEN(dims); i++) {
        struct kv_geometry *g = &geometries[n_geometries++];
        *g = (struct kv_geometry){
            .block_rows = 16, .layers = 1, .kv_heads = 1, .head_dim = dims[i], .type = KV_E4M3};
        const struct kv_memory kv = {.geo = g};
        const struct batch_seq q = {.n_rows = 1};
        gpu->ops->append(gpu,
                         &(struct append_args){.kv = &kv, .heads = 1, .seqs = &q, .n_seqs = 1});
        ok(gpu->ops->sync(gpu) == ERR_ARG && strstr(err_text(), "use --device cpu") != NULL,
           "heads of %u numbers are refused: %s", dims[i], err_text());
    }
    ok(gpu->ops->sync(gpu) == OK, "and the device works on");
}

int main(void)
{
    static const struct shape shapes[] = {
        {8, 2, 64, 3}, {16, 2, 128, 3}, {32, 1, 36, 2}, {16, 1, 256, 2}};
    if (spind_cuda_open(&gpu, 0) != OK)
        tap_skip_all(err_text());
    printf("# %s\n", gpu->ops->describe(gpu));
    heads_that_do_not_fit_are_refused();
    append_rounds_as_the_cpu(5);
    append_rounds_as_the_cpu(200);
    for (size_t k = 0; k < ARRAY_LEN(shapes); k++) {
        if (tap_small() && k != 2) /* the others' kernels are seal's */
            continue;
        uint32_t parts = SEGMENT_ROWS / shapes[k].rows;
        const struct digest_desc
            centroid = {.order = ORDER_BISECT,
                        .kind = DIGEST_CENTROID,
                        .parts = parts,
                        .outliers = k == 2,
                        .sinks = 16,
                        .values = true},
            codes = {.order = ORDER_BISECT,
                     .kind = DIGEST_CODES,
                     .parts = parts,
                     .sinks = 16,
                     .values = true},
            bounds = {.order = ORDER_KEEP, .kind = DIGEST_BOUNDS, .parts = parts, .sinks = 16},
            kmeans = {.order = ORDER_KMEANS, .kind = DIGEST_CENTROID, .parts = 64, .sinks = 16};
        compare(shapes[k], k < 2 ? codes : centroid, "bisected");
        compare(shapes[k], k == 1 ? kmeans : bounds, k == 1 ? "k-means" : "bounds");
    }
    gpu->ops->close(gpu);
    return tap_done();
}
