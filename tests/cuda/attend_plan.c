/* Attention by plan and known mass of the CUDA backend against the CPU's, on records that the CPU sealed;
 * and against themselves: a row's result does not depend on its batch, nor on whether `known` attended its
 * tail. K and V of one sequence are filled in CPU pages and turned into the GPU's; rows of the batch
 * stand at different positions of it. */
#include "kernels/cuda_api.h"
#include "tests/digest_rig.h"
#include "tests/tap.h"

enum { MAX_ROWS = 64, MAX_HEADS = 8, POISON = 0x7fff0000 };

static struct backend *gpu;

struct plan_case {
    const char *name;
    struct rig_shape s;
    uint32_t group;
    struct digest_desc desc;
    uint32_t page_cap, estimate_cap; /* lists are up to so long */
    uint32_t n_rows;                 /* planned; others follow */
    bool masks, classes, known;
    float level; /* of scores */
};

/* Arrays of attend_plans, in the memory of one backend. */
struct lists {
    uint32_t *pages, *masks, *n_pages, *estimates, *n_estimates;
    float *scores, *known;
    void *tail;
};

struct held {
    void *p;
    size_t bytes;
};

struct side {
    struct backend *be;
    struct held held[16];
    uint32_t n_held;
    struct kv_memory kv;
    struct lists l;
    float *qkv, *out, *lse;
};

struct world {
    const struct plan_case *c;
    struct rig *r;
    struct side cpu, gpu;
    uint32_t heads, stride, n_rows, n_seqs; /* rows: of the batch */
    size_t width, tail_bytes;
    struct plan_row rows[MAX_ROWS];
    struct batch_seq seqs[MAX_ROWS + 2];
};

/* ---- memory ---- */

static void *put(struct side *d, const void *from, size_t bytes)
{
    void *p = d->be->ops->alloc(d->be, bytes + !bytes);
    CHECK(p != NULL && d->n_held < ARRAY_LEN(d->held));
    d->held[d->n_held++] = (struct held){p, bytes + !bytes};
    d->be->ops->copy(d->be, p, from, bytes);
    CHECK(d->be->ops->sync(d->be) == OK);
    return p;
}

static void *put_nan(struct side *d, size_t bytes)
{
    void *nan = mem_alloc(bytes + !bytes), *p;
    memset(nan, 0xff, bytes);
    p = put(d, nan, bytes);
    mem_free(nan);
    return p;
}

static void *fetch(struct backend *be, const void *from, size_t bytes)
{
    void *to = mem_alloc(bytes);
    be->ops->copy(be, to, from, bytes);
    status st = be->ops->sync(be);
    if (st != OK)
        printf("# %s\n", err_text());
    CHECK(st == OK);
    return to;
}

static uint32_t number(uint32_t a, uint32_t b, uint32_t c, uint32_t n)
{
    return (uint32_t)((rig_noise(a, b, c) + 1) * 0.4999999f * (float)n);
}

/* The arena with K[R][dim], V[R][dim] in its pages. */
static void *turned_pages(const struct rig *r)
{
    uint16_t *to = mem_alloc(r->arena_bytes);
    const struct rig_shape *s = &r->s;
    size_t page = r->geo.page_bytes / 2;
    memset(to, 0xff, r->arena_bytes);
    for (size_t p = 0; p < r->arena_bytes / r->geo.page_bytes; p++)
        for (uint32_t v = 0; v < 2; v++)
            for (uint32_t row = 0; row < s->rows; row++)
                for (uint32_t c = 0; c < s->dim; c++)
                    to[p * page + ((size_t)v * s->rows + row) * s->dim + c] =
                        *rig_number(r, r->arena + p * r->geo.page_bytes, row, c, v);
    return to;
}

/* ---- the batch ---- */

static bool is_sparse(const struct world *w, uint32_t head)
{
    return kv_lane(&w->r->geo, w->c->s.layers - 1, head).class_ == LANE_SPARSE;
}

/* Every lane of the arena can be of any class: tables and bases are the same. */
static void classify(struct world *w)
{
    struct rig *r = w->r;
    for (uint32_t i = 0; i < r->s.layers * r->s.kv_heads; i++) {
        uint32_t class_ = w->c->classes ? (i + 1) % LANE_CLASSES : LANE_SPARSE;
        r->lanes[i] = (struct lane_place){(uint16_t)class_, (uint16_t)i};
    }
    r->geo.lanes = r->lanes;
    for (int c = 1; c < LANE_CLASSES; c++) {
        r->geo.block_bytes[c] = r->geo.block_bytes[LANE_SPARSE];
        r->geo.n_lanes[c] = w->c->classes ? r->geo.n_lanes[LANE_SPARSE] : 0;
        r->kv.hbm[c] = r->arena;
    }
    r->geo.stream_sinks = 16;
    r->geo.stream_recent = 128;
}

static void make_rows(struct world *w)
{
    const struct plan_case *c = w->c;
    uint32_t last = c->s.segments * SEGMENT_ROWS - 1;
    for (uint32_t i = 0; i < c->n_rows; i++) {
        uint32_t sealed = c->s.segments - 1, tail = 64 + number(1, 2, i, 1024);
        tail = i == 0 ? 64 : i == 1 ? 1087 : tail;
        if (tail >= SEGMENT_ROWS)
            sealed--;
        w->rows[i] = (struct plan_row){.row = i,
                                       .pos = sealed * SEGMENT_ROWS + tail,
                                       .n_segments = sealed,
                                       .records = w->r->numbers,
                                       .blocks = w->r->blocks,
                                       .top_p = 1};
        w->seqs[i] = (struct batch_seq){.first_row = i,
                                        .n_rows = 1,
                                        .first_pos = w->rows[i].pos,
                                        .blocks = {w->r->blocks, w->r->blocks, w->r->blocks},
                                        .first_plan = i,
                                        .planned = true};
    }
    w->n_seqs = c->n_rows + 2;
    w->seqs[c->n_rows] = (struct batch_seq){.first_row = c->n_rows, .n_rows = 23, .first_pos = 377};
    w->seqs[c->n_rows + 1] =
        (struct batch_seq){.first_row = c->n_rows + 23, .n_rows = 1, .first_pos = last};
    for (uint32_t i = c->n_rows; i < w->n_seqs; i++)
        for (int k = 0; k < LANE_CLASSES; k++)
            w->seqs[i].blocks[k] = w->r->blocks;
    w->n_rows = c->n_rows + 24;
}

/* Random lists, ascending; of some entries empty, of one full. */
static void make_lists(struct world *w, struct lists *l)
{
    const struct plan_case *c = w->c;
    uint32_t n = c->n_rows * c->s.kv_heads, per_segment = SEGMENT_ROWS / c->s.rows;
    l->pages = mem_alloc((size_t)n * c->page_cap * 4 + 4);
    l->masks = mem_alloc((size_t)n * c->page_cap * 4 + 4);
    l->estimates = mem_alloc((size_t)n * c->estimate_cap * 4 + 4);
    l->n_pages = mem_alloc(n * 4);
    l->n_estimates = mem_alloc(n * 4);
    l->scores = mem_alloc((size_t)n * c->group * w->stride * 4);
    memset(l->pages, 0x7f, (size_t)n * c->page_cap * 4);
    memset(l->estimates, 0x7f, (size_t)n * c->estimate_cap * 4);
    for (uint32_t e = 0; e < n; e++) {
        const struct plan_row *row = &w->rows[e / c->s.kv_heads];
        uint32_t pages = row->n_segments * per_segment, parts = row->n_segments * c->desc.parts;
        uint32_t want = e % 5 == 2   ? 0
                        : e % 5 == 3 ? c->page_cap
                                     : number(3, e, 0, c->page_cap + 1);
        uint32_t wanted = e % 7 == 1   ? 0
                          : e % 7 == 4 ? c->estimate_cap
                                       : number(3, e, 1, c->estimate_cap + 1);
        uint32_t got = 0;
        for (uint32_t p = 0; p < pages && got < want; p++)
            if (number(4, e, p, pages - p) < want - got) {
                uint32_t mask = number(5, e, p, 1u << 16) * 0x10001u;
                mask = p % 6 == 0 ? 0 : p % 6 == 1 ? ~0u : mask;
                l->masks[e * c->page_cap + got] = c->masks ? mask : ~0u;
                l->pages[e * c->page_cap + got++] = w->r->blocks[p];
            }
        l->n_pages[e] = got;
        got = 0;
        for (uint32_t p = 2; p < parts && got < wanted; p++) /* the sinks' have no digests */
            if (number(6, e, p, parts - p) < wanted - got)
                l->estimates[e * c->estimate_cap + got++] = p;
        l->n_estimates[e] = got;
        for (uint32_t g = 0; g < c->group; g++)
            for (uint32_t p = 0; p < parts; p++)
                l->scores[((size_t)e * c->group + g) * w->stride + p] =
                    p % 11 == 5 ? -INFINITY : 3 * rig_noise(e * 16 + g, 7, p) + c->level;
        if (!is_sparse(w, e % c->s.kv_heads))
            l->n_pages[e] = l->n_estimates[e] = POISON;
    }
}

static void open_side(struct world *w, struct side *d, struct backend *be, const void *arena,
                      const struct lists *l, const float *qkv)
{
    const struct plan_case *c = w->c;
    size_t n = (size_t)c->n_rows * c->s.kv_heads;
    d->be = be;
    d->kv = w->r->kv;
    for (int k = 0; k < LANE_CLASSES; k++)
        d->kv.hbm[k] = k == 0 ? put(d, arena, w->r->arena_bytes) : d->kv.hbm[0];
    d->kv.records = put(d, w->r->records, w->r->record_total);
    d->qkv = put(d, qkv, w->n_rows * w->width * 4);
    d->out = put_nan(d, (size_t)w->n_rows * w->heads * c->s.dim * 4);
    d->lse = put_nan(d, (size_t)w->n_rows * w->heads * 4);
    d->l.pages = put(d, l->pages, n * c->page_cap * 4);
    d->l.masks = put(d, l->masks, n * c->page_cap * 4);
    d->l.estimates = put(d, l->estimates, n * c->estimate_cap * 4);
    d->l.n_pages = put(d, l->n_pages, n * 4);
    d->l.n_estimates = put(d, l->n_estimates, n * 4);
    d->l.scores = put(d, l->scores, n * c->group * w->stride * 4);
    d->l.known = put_nan(d, n * c->group * 4);
    d->l.tail = put_nan(d, n * be->ops->known_bytes(&w->r->geo, w->heads));
}

static void close_side(struct side *d)
{
    for (uint32_t i = 0; i < d->n_held; i++)
        d->be->ops->free(d->be, d->held[i].p, d->held[i].bytes);
}

static struct world *open_world(const struct plan_case *c)
{
    struct world *w = mem_alloc(sizeof *w);
    struct lists l = {0};
    w->c = c;
    w->r = rig_open("auto", 1, c->s, c->desc);
    w->heads = c->s.kv_heads * c->group;
    w->stride = c->s.segments * c->desc.parts + 3;
    w->width = (size_t)(w->heads + 2 * c->s.kv_heads) * c->s.dim;
    rig_fill(w->r);
    for (uint32_t i = 0; i + 1 < c->s.segments; i++)
        rig_seal(w->r, i, w->r->blocks, w->r->blocks);
    classify(w);
    make_rows(w);
    make_lists(w, &l);
    float *qkv = mem_alloc(w->n_rows * w->width * 4);
    for (size_t i = 0; i < w->n_rows * w->width; i++)
        qkv[i] = 1.3f * rig_noise(8, 9, (uint32_t)i);
    void *turned = turned_pages(w->r);
    open_side(w, &w->cpu, w->r->be, w->r->arena, &l, qkv);
    open_side(w, &w->gpu, gpu, turned, &l, qkv);
    mem_free(turned);
    mem_free(qkv);
    uint32_t **all[] = {&l.pages, &l.masks, &l.estimates, &l.n_pages, &l.n_estimates};
    for (size_t i = 0; i < ARRAY_LEN(all); i++)
        mem_free(*all[i]);
    mem_free(l.scores);
    return w;
}

static void close_world(struct world *w)
{
    close_side(&w->cpu);
    close_side(&w->gpu);
    rig_close(w->r);
    mem_free(w);
}

/* ---- operations ---- */

static void known(struct world *w, struct side *d)
{
    d->be->ops->known(d->be, &(struct known_args){.kv = &d->kv,
                                                  .layer = w->c->s.layers - 1,
                                                  .heads = w->heads,
                                                  .sinks = w->c->desc.sinks,
                                                  .rows = w->rows,
                                                  .n_rows = w->c->n_rows,
                                                  .scale = 1 / sqrtf((float)w->c->s.dim),
                                                  .qkv = d->qkv,
                                                  .lse = d->l.known,
                                                  .tail = d->l.tail});
    CHECK(d->be->ops->sync(d->be) == OK);
}

/* Sequences [first, + n) of the batch. */
static void attend(struct world *w, struct side *d, bool tail, uint32_t first, uint32_t n)
{
    const struct plan_case *c = w->c;
    struct batch_seq seqs[MAX_ROWS + 2];
    uint32_t planned = first >= c->n_rows ? 0 : first + n > c->n_rows ? c->n_rows - first : n;
    size_t e = (size_t)first * c->s.kv_heads;
    for (uint32_t i = 0; i < n; i++) {
        seqs[i] = w->seqs[first + i];
        seqs[i].first_plan = i;
    }
    const struct attend_plans plans = {
        .desc = c->desc,
        .rows = w->rows + first,
        .n_rows = planned,
        .page_cap = c->page_cap,
        .estimate_cap = c->estimate_cap,
        .stride = w->stride,
        .pages = d->l.pages + e * c->page_cap,
        .masks = c->masks ? d->l.masks + e * c->page_cap : NULL,
        .n_pages = d->l.n_pages + e,
        .estimates = d->l.estimates + e * c->estimate_cap,
        .n_estimates = d->l.n_estimates + e,
        .scores = d->l.scores + e * c->group * w->stride,
        .tail =
            tail ? (char *)d->l.tail + e * d->be->ops->known_bytes(&w->r->geo, w->heads) : NULL};
    d->be->ops->attend(d->be, &(struct attend_args){.kv = &d->kv,
                                                    .layer = c->s.layers - 1,
                                                    .heads = w->heads,
                                                    .seqs = seqs,
                                                    .n_seqs = n,
                                                    .scale = 1 / sqrtf((float)c->s.dim),
                                                    .qkv = d->qkv,
                                                    .plans = &plans,
                                                    .n_plans = planned > 0,
                                                    .out = d->out,
                                                    .lse = d->lse});
    CHECK(d->be->ops->sync(d->be) == OK);
}

static void poison(struct world *w, struct side *d)
{
    size_t n = (size_t)w->n_rows * w->heads * 4;
    void *nan = mem_alloc(n * w->c->s.dim);
    memset(nan, 0xff, n * w->c->s.dim);
    d->be->ops->copy(d->be, d->out, nan, n * w->c->s.dim);
    d->be->ops->copy(d->be, d->lse, nan, n);
    CHECK(d->be->ops->sync(d->be) == OK);
    mem_free(nan);
}

/* ---- comparisons ---- */

static double greater(double a, double b)
{
    return a > b || a != a ? a : b; /* a NaN stays */
}

/* Worst distance of a head of a row, relative to what a head holds; greatest difference of lse. */
static void compare(struct world *w, double *out, double *lse)
{
    size_t n = (size_t)w->n_rows * w->heads, dim = w->c->s.dim;
    float *a = fetch(gpu, w->gpu.out, n * dim * 4), *la = fetch(gpu, w->gpu.lse, n * 4);
    double all = 0;
    *out = *lse = 0;
    for (size_t i = 0; i < n * dim; i++)
        all += (double)w->cpu.out[i] * (double)w->cpu.out[i];
    double typical = sqrt(all / (double)n);
    for (size_t i = 0; i < n; i++) {
        double d = 0, s = 0;
        for (size_t j = 0; j < dim; j++) {
            double x = (double)w->cpu.out[i * dim + j], y = (double)a[i * dim + j] - x;
            d += y * y;
            s += x * x;
        }
        *out = greater(sqrt(d) / fmax(sqrt(s), 0.3 * typical), *out);
        *lse = greater(fabs((double)la[i] - (double)w->cpu.lse[i]), *lse);
    }
    mem_free(a);
    mem_free(la);
}

static void check_known(struct world *w)
{
    size_t n = (size_t)w->c->n_rows * w->heads;
    double worst = 0;
    known(w, &w->cpu);
    known(w, &w->gpu);
    float *a = fetch(gpu, w->gpu.l.known, n * 4);
    for (size_t i = 0; i < n; i++)
        if (is_sparse(w, (uint32_t)(i / w->c->group % w->c->s.kv_heads)))
            worst = greater(fabs((double)a[i] - (double)w->cpu.l.known[i]), worst);
    ok(worst <= 1e-2, "%s: mass of sinks and tail as on the CPU (%.2g)", w->c->name, worst);
    mem_free(a);
}

static void check_alone(struct world *w, bool tail, const float *out)
{
    size_t row = (size_t)w->heads * w->c->s.dim;
    bool same = true;
    poison(w, &w->gpu);
    for (uint32_t i = 0; i < w->n_seqs; i += 1 + i / 3)
        attend(w, &w->gpu, tail, i, 1);
    float *a = fetch(gpu, w->gpu.out, w->n_rows * row * 4);
    for (uint32_t i = 0; i < w->n_seqs; i += 1 + i / 3)
        same = same && memcmp(a + w->seqs[i].first_row * row, out + w->seqs[i].first_row * row,
                              w->seqs[i].n_rows * row * 4) == 0;
    ok(same, "%s: a sequence alone has the same bits", w->c->name);
    mem_free(a);
}

static void check_case(const struct plan_case *c)
{
    struct world *w = open_world(c);
    size_t bytes = (size_t)w->n_rows * w->heads * c->s.dim * 4;
    double out, lse, most = c->desc.kind == DIGEST_CODES ? 1.5e-2 : 1e-2;
    attend(w, &w->cpu, false, 0, w->n_seqs);
    attend(w, &w->gpu, false, 0, w->n_seqs);
    compare(w, &out, &lse);
    ok(out <= most && lse <= 2e-2, "%s: as on the CPU (%.2g, lse %.2g)", c->name, out, lse);
    float *want = fetch(gpu, w->gpu.out, bytes);
    check_alone(w, false, want);
    if (c->known) {
        check_known(w);
        poison(w, &w->gpu);
        attend(w, &w->gpu, true, 0, w->n_seqs);
        float *got = fetch(gpu, w->gpu.out, bytes);
        ok(memcmp(got, want, bytes) == 0, "%s: with a tail that `known` attended, the same bits",
           c->name);
        mem_free(got);
        check_alone(w, true, want);
    }
    mem_free(want);
    close_world(w);
}

#define PAGES(R)                                                       \
    {                                                                  \
        ORDER_BISECT, DIGEST_CENTROID, SEGMENT_ROWS / (R), 1, 16, true \
    }
#define CODES(R)                                                    \
    {                                                               \
        ORDER_BISECT, DIGEST_CODES, SEGMENT_ROWS / (R), 0, 16, true \
    }

static const struct plan_case cases[] = {
    {"R 16 d 128 group 4", {16, 2, 2, 128, 4}, 4, PAGES(16), 100, 70, 5, false, false, true, 0},
    {"R 8 d 128 group 4, codes",
     {8, 2, 2, 128, 4},
     4,
     CODES(8),
     180,
     150,
     5,
     false,
     false,
     true,
     1},
    {"R 16 d 64 group 3, codes, classes",
     {16, 1, 3, 64, 4},
     3,
     CODES(16),
     70,
     40,
     4,
     false,
     true,
     true,
     2},
    {"R 32 d 64 group 8, codes", {32, 1, 2, 64, 3}, 8, CODES(32), 30, 32, 3, false, false, true, 2},
    {"R 8 d 64 group 12, codes", {8, 1, 1, 64, 3}, 12, CODES(8), 90, 200, 3, false, false, true, 1},
    {"R 32 d 128 group 8, classes",
     {32, 1, 4, 128, 3},
     8,
     PAGES(32),
     40,
     60,
     4,
     false,
     true,
     true,
     -1},
    {"R 8 d 64 group 1", {8, 1, 3, 64, 4}, 1, PAGES(8), 384, 384, 4, false, false, false, 1},
    {"R 8 d 128 group 2, free clusters",
     {8, 1, 2, 128, 3},
     2,
     {ORDER_KMEANS, DIGEST_CENTROID, 100, 0, 16, true},
     120,
     150,
     4,
     true,
     false,
     true,
     0},
    {"R 16 d 128 group 5, masks",
     {16, 1, 2, 128, 3},
     5,
     PAGES(16),
     90,
     10,
     4,
     true,
     false,
     true,
     0},
    {"R 16 d 128 group 4, bounds",
     {16, 1, 2, 128, 3},
     4,
     {ORDER_KEEP, DIGEST_BOUNDS, 64, 0, 16, false},
     128,
     0,
     4,
     false,
     false,
     true,
     0},
    {"R 8 d 64 group 16, no pages",
     {8, 1, 1, 64, 3},
     16,
     PAGES(8),
     0,
     100,
     3,
     false,
     false,
     true,
     0},
    {"R 16 d 80 group 3", {16, 1, 2, 80, 3}, 3, PAGES(16), 60, 90, 4, false, false, true, 0},
    {"R 16 d 128 group 4, many rows",
     {16, 1, 8, 128, 3},
     4,
     PAGES(16),
     120,
     120,
     60,
     false,
     false,
     true,
     0},
    {"R 8 d 128 group 4, many rows, codes",
     {8, 1, 8, 128, 3},
     4,
     CODES(8),
     200,
     250,
     60,
     false,
     false,
     true,
     1},
    {"scores of 20,000", {16, 1, 2, 128, 3}, 4, PAGES(16), 60, 90, 4, false, false, false, 2e4f},
    {"scores of -20,000", {16, 1, 2, 128, 3}, 4, PAGES(16), 60, 90, 4, false, false, false, -2e4f},
};

int main(void)
{
    if (spind_cuda_open(&gpu, 0) != OK)
        tap_skip_all(err_text());
    printf("# %s\n", gpu->ops->describe(gpu));
    for (size_t i = 0; i < (tap_small() ? 3 : ARRAY_LEN(cases)); i++)
        check_case(&cases[i]);
    gpu->ops->close(gpu);
    return tap_done();
}
