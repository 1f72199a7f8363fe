/* Attend by lane class and by plan on the CPU backend: right against float64, and bit for bit
 * independent of threads, batch, chunks and of where pages lie. */
#include "tests/contract/attend_world.h"

/* ---- cases ---- */

/* A batch of everything: rows by plan of three instances, rows of prefill, short and long decodes. */
static struct world *open_mixture(enum isa isa, uint32_t threads, struct shape s)
{
    struct world *w = open_world(isa, threads, s, 9000, 3000);
    uint32_t pages = SEGMENT_ROWS / s.rows;
    struct digest_desc page = {ORDER_BISECT, DIGEST_CENTROID, pages, 1, 16, true};
    struct digest_desc free_parts = {ORDER_KMEANS, DIGEST_CENTROID, 100, 0, 16, true};
    struct digest_desc bounds = {ORDER_KEEP, DIGEST_BOUNDS, pages, 0, 16, false};
    w->sets[0] = (struct set){page, false, false, 300 / s.rows, 40, 0.1f, 0};
    w->sets[1] = (struct set){free_parts, true, false, 64, 290, 0, -1};
    w->sets[2] = (struct set){bounds, false, false, 1000 / s.rows, 0, 0, 0};
    w->sets[3] = (struct set){page, true, true, 17, 3, 1, 0};
    add_seq(w,
            (struct seq){.stream = 1, .len = 2200, .n_rows = 1, .planned = true, .n_segments = 2});
    add_seq(w, (struct seq){.stream = 2, .len = 300, .n_rows = 23});
    add_seq(w,
            (struct seq){
                .stream = 3, .len = 1100, .n_rows = 3, .planned = true, .set = 1, .n_segments = 1});
    add_seq(w, (struct seq){.stream = 4, .len = 9, .n_rows = 1});
    add_seq(w,
            (struct seq){
                .stream = 5, .len = 2500, .n_rows = 1, .planned = true, .set = 2, .n_segments = 2});
    add_seq(w, (struct seq){.stream = 6, .len = 700, .n_rows = 1, .planned = true});
    add_seq(w,
            (struct seq){
                .stream = 7, .len = 1089, .n_rows = 1, .planned = true, .set = 3, .n_segments = 1});
    fill_world(w);
    return w;
}

static const struct shape shapes[] = {
    {8, 3, 64, 16, 64, 3},   {16, 3, 64, 64, 256, 3}, {32, 3, 64, 32, 96, 3},
    {8, 1, 128, 32, 128, 3}, {16, 4, 128, 16, 80, 3}, {32, 8, 64, 16, 48, 3},
    {8, 5, 36, 48, 16, 3},   {16, 8, 80, 16, 64, 3},
};

/* Portable code is slow, and has one loop for every number of dimensions. */
static const struct shape small = {8, 3, 16, 16, 64, 3};

static void every_mixture_agrees_with_float64(enum isa isa)
{
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
        const struct shape *s = &shapes[i];
        if ((isa == ISA_SCALAR || TAP_SANITIZED) && i % 3 != (size_t)isa % 3)
            continue;
        struct world *w = open_mixture(isa, 2, *s);
        struct results r = run_all(w, false);
        double e = error_of(w, &r);
        ok(e < 1e-5, "%s: R %u, groups of %u, d %u: plans, classes and lse within 1e-5 (%.1e)",
           isa_names[isa], s->rows, s->group, s->dim, e);
        close_results(&r);
        close_world(w);
    }
}

static void threads_and_batch_change_no_bit(enum isa isa, struct shape s)
{
    struct world *w = open_mixture(isa, 2, s), *one = open_mixture(isa, 1, s);
    struct world *many = open_mixture(isa, 7, s);
    struct results r[] = {run_all(w, false),  run_all(w, true),    run_alone(w, 64),
                          run_alone(w, 1),    run_all(one, false), run_all(many, true),
                          run_alone(many, 5), run_alone(one, 10)};
    static const char *const names[] = {"",
                                        "the other order",
                                        "alone",
                                        "row by row",
                                        "one thread",
                                        "seven threads",
                                        "alone on seven threads",
                                        "cut by ten"};
    for (size_t i = 1; i < ARRAY_LEN(r); i++)
        ok(same_results(w, &r[0], &r[i]), "%s, R %u, group %u: %s gives the same bits",
           isa_names[isa], s.rows, s.group, names[i]);
    for (size_t i = 0; i < ARRAY_LEN(r); i++)
        close_results(&r[i]);
    close_world(w);
    close_world(one);
    close_world(many);
}

static void instruction_sets_agree(struct shape s)
{
    struct world *w = open_mixture(ISA_SCALAR, 2, s);
    struct results want = run_all(w, false);
    for (enum isa isa = ISA_AVX2; isa <= ISA_AVX512; isa++) {
        if (!isa_runs(isa))
            continue;
        struct world *v = open_mixture(isa, 2, s);
        struct results r = run_all(v, false);
        double e = max_difference(w, &want, &r);
        ok(e < 1e-5, "%s differs from scalar by less than 1e-5 (%.1e)", isa_names[isa], e);
        close_results(&r);
        close_world(v);
    }
    close_results(&want);
    close_world(w);
}

/* Moves blocks of a sequence's SPARSE table to DRAM; what they leave in HBM becomes NaN. */
static void move_down(struct world *w, struct seq *q, uint32_t n_blocks, uint32_t every)
{
    size_t bytes = w->geo.block_bytes[LANE_SPARSE];
    for (uint32_t i = 0; i < n_blocks; i += every) {
        block_id *b = &q->blocks[LANE_SPARSE][i], to = w->n_units - 1 - *b;
        memcpy(w->dram + to * bytes, w->arena[LANE_SPARSE] + *b * bytes, bytes);
        memset(w->arena[LANE_SPARSE] + *b * bytes, 0xff, bytes);
        *b = to | BLOCK_IN_DRAM;
    }
}

static void dense_rows_read_dram_in_place(enum isa isa, struct shape s)
{
    struct world *w = open_world(isa, 2, s, 3000, 1500);
    add_seq(w, (struct seq){.stream = 1, .len = 1400, .n_rows = 20});
    add_seq(w, (struct seq){.stream = 2, .len = 1300, .n_rows = 1});
    fill_world(w);
    struct results before = run_all(w, false);
    move_down(w, &w->seqs[0], 1024 / s.rows, 1);
    move_down(w, &w->seqs[1], 1024 / s.rows, 3);
    struct results after = run_all(w, false), cut = run_alone(w, 9);
    double e = error_of(w, &after);
    ok(same_results(w, &before, &after) && same_results(w, &before, &cut) && e < 1e-5,
       "%s, R %u: dense rows give the same bits from DRAM (%.1e off)", isa_names[isa], s.rows, e);
    close_results(&before);
    close_results(&after);
    close_results(&cut);
    close_world(w);
}

/* A SPILLED sequence: the table's sealed entries are in DRAM, the list names slots. */
static void a_list_may_lie_anywhere(enum isa isa, struct shape s)
{
    struct world *w = open_mixture(isa, 2, s);
    struct results before = run_all(w, false);
    struct seq *q = &w->seqs[0];
    uint32_t n = q->n_segments * SEGMENT_ROWS / s.rows;
    size_t bytes = w->geo.block_bytes[LANE_SPARSE];
    uint8_t *old = w->arena[LANE_SPARSE];
    w->arena[LANE_SPARSE] = mem_alloc((w->n_units + n) * bytes);
    memset(w->arena[LANE_SPARSE], 0xff, (w->n_units + n) * bytes);
    memcpy(w->arena[LANE_SPARSE], old, w->n_units * bytes);
    w->kv.hbm[LANE_SPARSE] = w->arena[LANE_SPARSE];
    for (uint32_t i = 0; i < n; i++) { /* slots in another order */
        block_id to = w->n_units + (i * 37 + 5) % n;
        uint8_t *from = w->arena[LANE_SPARSE] + q->blocks[LANE_SPARSE][i] * bytes;
        memcpy(w->arena[LANE_SPARSE] + to * bytes, from, bytes);
        memset(from, 0xff, bytes);
        q->blocks[LANE_SPARSE][i] = to;
    }
    struct results after = run_all(w, true);
    ok(same_results(w, &before, &after), "%s, R %u: pages of a list in other blocks, same bits",
       isa_names[isa], s.rows);
    close_results(&before);
    close_results(&after);
    mem_free(old);
    close_world(w);
}

static void a_plan_of_all_pages_is_dense(enum isa isa, struct shape s)
{
    struct world *w = open_world(isa, 2, s, 3000, 2300);
    struct digest_desc d = {ORDER_KEEP, DIGEST_BOUNDS, SEGMENT_ROWS / s.rows, 0, 16, false};
    w->sets[0] = (struct set){d, false, false, 2 * SEGMENT_ROWS / s.rows, 0, 0, 0};
    add_seq(w, (struct seq){.stream = 1, .len = 2200, .n_rows = 3});
    fill_world(w);
    struct results dense = run_all(w, false);
    w->seqs[0].planned = true;
    w->seqs[0].n_segments = 2;
    struct results all = run_all(w, false);
    double e = max_difference(w, &dense, &all);
    ok(e < 1e-5, "%s, R %u: a plan with every page is dense within 1e-5 (%.1e)", isa_names[isa],
       s.rows, e);
    w->sets[0].masks = true;
    w->sets[0].only_empty = true;
    struct results tail = run_all(w, false);
    w->sets[0] = (struct set){d, false, false, 0, 0, 0, 0};
    struct results none = run_all(w, false);
    ok(same_results(w, &tail, &none) && max_difference(w, &dense, &none) > 1e-3,
       "%s, R %u: pages with empty masks are as if they were not there", isa_names[isa], s.rows);
    close_results(&dense);
    close_results(&all);
    close_results(&tail);
    close_results(&none);
    close_world(w);
}

/* Scores of estimates far outside what a softmax usually sees. */
static void extreme_scores_stay_finite(enum isa isa)
{
    struct shape s = {8, 3, 64, 16, 64, 3};
    struct world *w = open_mixture(isa, 2, s);
    w->n_seqs = 1;
    double e = 0;
    static const float levels[] = {-3e4f, -200, -60, 60, 200, 3e4f};
    for (size_t i = 0; i < ARRAY_LEN(levels); i++) {
        w->sets[0].level = levels[i];
        struct results r = run_all(w, false);
        double x = error_of(w, &r);
        e = x <= e ? e : x;
        close_results(&r);
    }
    ok(e < 5e-3,
       "%s: estimates at -30,000 to 30,000 agree with float64 (%.1e: 30,000 in f32 has steps of "
       "2e-3)",
       isa_names[isa], e);
    w->sets[0].level = -3e4f;
    struct results never = run_all(w, false);
    w->sets[0].low = 2; /* every score is -inf */
    struct results low = run_all(w, false);
    w->sets[0].n_estimates = 0;
    struct results none = run_all(w, false);
    ok(same_results(w, &never, &low) && same_results(w, &low, &none),
       "%s: estimates at -30,000 or -inf are as if they were not there", isa_names[isa]);
    w->n_seqs = MAX_SEQS - 1;
    close_results(&never);
    close_results(&low);
    close_results(&none);
    close_world(w);
}

/* Logits of exact rows in the thousands; the largest wins and nothing overflows. */
static void huge_queries_stay_finite(enum isa isa)
{
    struct world *w = open_mixture(isa, 2, (struct shape){16, 3, 64, 16, 64, 4000});
    struct results r = run_all(w, false);
    double e = error_of(w, &r);
    ok(e < 2e-2, "%s: logits of several thousand agree with float64 (%.1e)", isa_names[isa], e);
    close_results(&r);
    close_world(w);
}

/* Windows move every 64 positions, at other rows than tiles and chunks end. */
static void a_stream_lane_is_the_same_however_cut(enum isa isa, struct shape s)
{
    struct world *w = open_world(isa, 2, s, 1200, 900);
    add_seq(w, (struct seq){.stream = 1, .len = 57, .n_rows = 57});
    add_seq(w, (struct seq){.stream = 2, .len = 700, .n_rows = 60});
    add_seq(w, (struct seq){.stream = 3, .len = 330, .n_rows = 63});
    fill_world(w);
    struct results whole = run_alone(w, 64);
    double e = error_of(w, &whole);
    bool same = true;
    static const uint32_t chunks[] = {1, 7, 16};
    for (size_t i = 0; i < ARRAY_LEN(chunks); i++) {
        struct results cut = run_alone(w, chunks[i]);
        same = same && same_results(w, &whole, &cut);
        close_results(&cut);
    }
    ok(same && e < 1e-5,
       "%s, R %u, %u sinks, %u recent: the same bits in any chunks, within 1e-5 (%.1e)",
       isa_names[isa], s.rows, s.sinks, s.recent, e);
    close_results(&whole);
    close_world(w);
}

struct partial {
    double o[64], lse;
};

static struct partial merge(struct partial a, struct partial b)
{
    double top = fmax(a.lse, b.lse), x = exp(a.lse - top), y = exp(b.lse - top);
    struct partial r = {.lse = top + log(x + y)};
    for (int i = 0; i < 64; i++)
        r.o[i] = (float)((a.o[i] * x + b.o[i] * y) / (x + y));
    r.lse = (float)r.lse;
    return r;
}

static double distance(struct partial a, struct partial b)
{
    double worst = fabs(a.lse - b.lse);
    for (int i = 0; i < 64; i++)
        worst = fmax(worst, fabs(a.o[i] - b.o[i]));
    return worst;
}

/* Three tables over thirds of one context, asked by one query: their results merge in any order to
 * the result of the whole. */
static void results_merge_by_lse(enum isa isa)
{
    struct shape s = {16, 1, 64, 16, 1024, 3};
    enum { PART = 256, LEN = 3 * PART, HEAD = 2 }; /* a DENSE lane */
    struct world *w = open_world(isa, 2, s, LEN + 64, LEN);
    add_seq(w, (struct seq){.stream = 1, .len = LEN, .n_rows = 1});
    fill_world(w);
    size_t width = width_of(w), heads = heads_of(w);
    float *qkv = mem_alloc(4 * width * sizeof *qkv), lse[4 * KV_HEADS], out[4 * KV_HEADS * 64];
    struct batch_seq seqs[4];
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t from = i == 3 ? 0 : i * PART / s.rows;
        make_row(w, qkv + i * width, 1, LEN - 1);
        seqs[i] = batch_of(&w->seqs[0], i, (i == 3 ? LEN : PART) - 1, i == 3 ? LEN : PART);
        for (int c = 0; c < LANE_CLASSES; c++)
            seqs[i].blocks[c] += from;
    }
    cpu_attend(&w->be.base, &(struct attend_args){.kv = &w->kv,
                                                  .layer = LAYER,
                                                  .heads = heads_of(w),
                                                  .seqs = seqs,
                                                  .n_seqs = 4,
                                                  .scale = 0.125f,
                                                  .qkv = qkv,
                                                  .out = out,
                                                  .lse = lse});
    struct partial p[4];
    for (size_t i = 0; i < 4; i++) {
        p[i].lse = (double)lse[i * heads + HEAD];
        for (size_t j = 0; j < 64; j++)
            p[i].o[j] = (double)out[(i * heads + HEAD) * 64 + j];
    }
    struct partial left = merge(merge(p[0], p[1]), p[2]), right = merge(p[0], merge(p[1], p[2]));
    struct partial other = merge(merge(p[2], p[0]), p[1]);
    double e = fmax(distance(left, right), distance(left, other)), f = distance(left, p[3]);
    ok(e < 1e-5 && f < 1e-5, "%s: results merge by lse in any order (%.1e), to the whole (%.1e)",
       isa_names[isa], e, f);
    mem_free(qkv);
    close_world(w);
}

int main(void)
{
    for (int i = ISA_SCALAR; i <= ISA_AVX512; i++) {
        enum isa isa = (enum isa)i;
        if (!isa_runs(isa)) {
            ok(1, "%s # SKIP not on this machine", isa_names[i]);
            continue;
        }
        every_mixture_agrees_with_float64(isa);
        bool slow = isa == ISA_SCALAR;
        uint32_t few = slow || TAP_SANITIZED ? 1 : 3;
        uint32_t many = slow || TAP_SANITIZED ? 3 : ARRAY_LEN(shapes);
        threads_and_batch_change_no_bit(isa, slow ? small : shapes[isa == ISA_AVX2 ? 4 : 0]);
        for (uint32_t j = 0; j < few; j++) {
            dense_rows_read_dram_in_place(isa, slow ? small : shapes[j]);
            a_list_may_lie_anywhere(isa, slow ? small : shapes[j]);
            a_plan_of_all_pages_is_dense(isa, slow ? small : shapes[j]);
        }
        for (size_t j = 0; j < many; j++) {
            struct shape s = shapes[j];
            s.dim = slow ? small.dim : s.dim;
            a_stream_lane_is_the_same_however_cut(isa, s);
        }
        extreme_scores_stay_finite(isa);
        huge_queries_stay_finite(isa);
        results_merge_by_lse(isa);
    }
    instruction_sets_agree(shapes[0]);
    instruction_sets_agree(shapes[6]);
    return tap_done();
}
