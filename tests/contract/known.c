/* The mass of rows that are attended in any case against float64, from both tiers, and what selection
 * makes of it; the same bits for any number of threads; and what it keeps of a tail is what attend computes. */
#include "tests/digest_rig.h"
#include "tests/tap.h"

#include <stdio.h>

enum { MAX_GROUP = 5, MAX_ROWS = 3 };

struct run {
    struct rig *r;
    uint32_t group, n_rows;
    struct plan_row rows[MAX_ROWS];
    float *qkv, *lse;
    void *tail;
};

static struct digest_desc desc_of(uint32_t rows)
{
    return (struct digest_desc){
        .order = ORDER_BISECT, .kind = DIGEST_CENTROID, .parts = SEGMENT_ROWS / rows, .sinks = 16};
}

/* Rows of one sequence with one sealed segment; what lies behind a row is NaN for it, so each test
 * has the youngest row's NaN. */
static struct run known(const char *isa, uint32_t threads, struct rig_shape s, uint32_t group,
                        const uint32_t *pos, uint32_t n_rows)
{
    struct run x = {
        .r = rig_open(isa, threads, s, desc_of(s.rows)), .group = group, .n_rows = n_rows};
    if (x.r == NULL)
        return x;
    size_t width = (size_t)(group + 2) * s.kv_heads * s.dim,
           n = (size_t)n_rows * s.kv_heads * group;
    rig_fill(x.r);
    for (uint32_t lane = 0; lane < s.layers * s.kv_heads; lane++)
        for (uint32_t row = pos[n_rows - 1] + 1; row < s.segments * SEGMENT_ROWS; row++)
            for (uint32_t c = 0; c < s.dim; c++)
                *rig_at(x.r, x.r->blocks, lane, row, c, false) = 0x7fc0;
    x.qkv = mem_alloc((size_t)n_rows * width * sizeof *x.qkv);
    x.lse = mem_alloc(n * sizeof *x.lse);
    x.tail =
        mem_alloc(n_rows * s.kv_heads * x.r->be->ops->known_bytes(&x.r->geo, group * s.kv_heads));
    for (size_t i = 0; i < n_rows * width; i++)
        x.qkv[i] = 1.5f * rig_noise(3, 7, (uint32_t)i);
    for (uint32_t i = 0; i < n_rows; i++)
        x.rows[i] = (struct plan_row){
            .row = i, .pos = pos[i], .n_segments = 1, .blocks = x.r->blocks, .top_p = 1};
    return x;
}

static void go(struct run *x)
{
    struct known_args a = {.kv = &x->r->kv,
                           .layer = x->r->s.layers - 1,
                           .heads = x->group * x->r->s.kv_heads,
                           .sinks = x->r->desc.sinks,
                           .rows = x->rows,
                           .n_rows = x->n_rows,
                           .scale = 1.0f / sqrtf((float)x->r->s.dim),
                           .qkv = x->qkv,
                           .lse = x->lse,
                           .tail = x->tail};
    for (size_t i = 0; i < (size_t)x->n_rows * x->r->s.kv_heads * x->group; i++)
        x->lse[i] = NAN;
    x->r->be->ops->known(x->r->be, &a);
    CHECK(x->r->be->ops->sync(x->r->be) == OK);
}

static void done(struct run *x)
{
    rig_close(x->r);
    mem_free(x->qkv);
    mem_free(x->lse);
    mem_free(x->tail);
}

/* Against a plain sum over the rows, in double. */
static double worst_of(const struct run *x)
{
    const struct rig_shape *s = &x->r->s;
    size_t width = (size_t)(x->group + 2) * s->kv_heads * s->dim;
    double worst = 0;
    for (uint32_t i = 0; i < x->n_rows; i++)
        for (uint32_t h = 0; h < s->kv_heads * x->group; h++) {
            uint32_t lane = (s->layers - 1) * s->kv_heads + h / x->group;
            const float *q = x->qkv + i * width + (size_t)h * s->dim;
            double sum = 0;
            for (uint32_t row = 0; row <= x->rows[i].pos; row++) {
                double dot = 0;
                if (row >= rig_sink_rows(x->r) && row < SEGMENT_ROWS)
                    continue;
                for (uint32_t c = 0; c < s->dim; c++)
                    dot += (double)q[c] *
                           (double)bf16_to_f32(*rig_at(x->r, x->r->blocks, lane, row, c, false));
                sum += exp(dot / sqrt(s->dim));
            }
            double got = (double)x->lse[(size_t)i * s->kv_heads * x->group + h];
            double off = fabs(got - log(sum));
            worst = off > worst || isnan(off) ? off : worst;
        }
    return worst;
}

static const struct {
    struct rig_shape s;
    uint32_t group, n_rows, pos[MAX_ROWS];
} cases[] = {{{8, 2, 3, 64, 2}, 3, 3, {1088, 1089, 1103}},
             {{8, 1, 1, 36, 2}, 5, 1, {1024}},
             {{16, 1, 2, 128, 2}, 1, 2, {1500, 2047}},
             {{32, 1, 1, 64, 2}, 4, 2, {1087, 1111}}};

static void mass_is_that_of_sinks_and_tail(void)
{
    for (uint32_t i = 0; i < ARRAY_LEN(cases); i++)
        for (uint32_t isa = 0; isa < ARRAY_LEN(rig_isas); isa++) {
            struct run one =
                known(rig_isas[isa], 1, cases[i].s, cases[i].group, cases[i].pos, cases[i].n_rows);
            struct run x =
                known(rig_isas[isa], 3, cases[i].s, cases[i].group, cases[i].pos, cases[i].n_rows);
            if (x.r == NULL) {
                tap_skip("the mass", rig_isas[isa]);
                continue;
            }
            size_t n = (size_t)x.n_rows * x.r->s.kv_heads * x.group * sizeof *x.lse;
            go(&one);
            go(&x);
            double off = worst_of(&x);
            ok(off < 1e-5, "%s, R = %u, group %u: the mass within 1e-5 of float64 (%.1e)",
               rig_isas[isa], cases[i].s.rows, cases[i].group, off);
            ok(memcmp(x.lse, one.lse, n) == 0, "3 threads: the bits of one");
            done(&x);
            done(&one);
        }
}

/* Rows whose selection is the sinks' pages alone, attended with what `known` kept and without. */
static void attend(const struct run *x, const void *tail, float *out, float *lse)
{
    const struct rig_shape *s = &x->r->s;
    uint32_t sinks = rig_sink_rows(x->r) / s->rows, pages[MAX_ROWS * 8 * 2], n_pages[MAX_ROWS * 8];
    uint32_t n_estimates[MAX_ROWS * 8] = {0};
    struct batch_seq seqs[MAX_ROWS];
    CHECK(sinks <= 2 && s->kv_heads <= 8);
    for (uint32_t i = 0; i < x->n_rows * s->kv_heads; i++) {
        n_pages[i] = sinks;
        for (uint32_t p = 0; p < sinks; p++)
            pages[i * sinks + p] = x->r->blocks[p];
    }
    for (uint32_t i = 0; i < x->n_rows; i++)
        seqs[i] = (struct batch_seq){.first_row = i,
                                     .n_rows = 1,
                                     .first_pos = x->rows[i].pos,
                                     .blocks = {x->r->blocks},
                                     .first_plan = i,
                                     .planned = true};
    struct attend_plans plans = {.desc = x->r->desc,
                                 .rows = x->rows,
                                 .n_rows = x->n_rows,
                                 .page_cap = sinks,
                                 .pages = pages,
                                 .n_pages = n_pages,
                                 .n_estimates = n_estimates,
                                 .tail = tail};
    struct attend_args a = {.kv = &x->r->kv,
                            .layer = s->layers - 1,
                            .heads = x->group * s->kv_heads,
                            .seqs = seqs,
                            .n_seqs = x->n_rows,
                            .scale = 1.0f / sqrtf((float)s->dim),
                            .qkv = x->qkv,
                            .plans = &plans,
                            .n_plans = 1,
                            .out = out,
                            .lse = lse};
    x->r->be->ops->attend(x->r->be, &a);
}

static void attend_takes_over_the_tail(void)
{
    for (uint32_t i = 0; i < ARRAY_LEN(cases); i++)
        for (uint32_t threads = 1; threads <= 3; threads += 2) {
            struct run x =
                known("auto", threads, cases[i].s, cases[i].group, cases[i].pos, cases[i].n_rows);
            size_t n = (size_t)x.n_rows * x.group * x.r->s.kv_heads;
            float *out[2], *lse[2];
            for (int k = 0; k < 2; k++) {
                out[k] = mem_alloc(n * x.r->s.dim * sizeof(float));
                lse[k] = mem_alloc(n * sizeof(float));
            }
            go(&x);
            attend(&x, NULL, out[0], lse[0]);
            attend(&x, x.tail, out[1], lse[1]);
            ok(memcmp(out[0], out[1], n * x.r->s.dim * sizeof(float)) == 0 &&
                   memcmp(lse[0], lse[1], n * sizeof(float)) == 0,
               "R = %u, %u threads: with a tail that `known` attended, the bits are the same",
               cases[i].s.rows, threads);
            double off = 0;
            for (size_t k = 0; k < n; k++)
                off = fmax(off, fabs((double)lse[1][k] - (double)x.lse[k]));
            ok(off < 1e-5, "and the mass of what is attended is what was known (%.1e)", off);
            for (int k = 0; k < 2; k++) {
                mem_free(out[k]);
                mem_free(lse[k]);
            }
            done(&x);
        }
}

static void sinks_are_read_where_they_are(void)
{
    static const uint32_t pos[] = {1095};
    struct run x = known("auto", 1, (struct rig_shape){8, 1, 2, 64, 2}, 3, pos, 1);
    float want[6];
    go(&x);
    memcpy(want, x.lse, sizeof want);
    x.r->dram = mem_alloc(x.r->arena_bytes);
    x.r->kv.dram[LANE_SPARSE] = x.r->dram;
    size_t block = x.r->geo.block_bytes[LANE_SPARSE];
    for (uint32_t i = 0; i < SEGMENT_ROWS / 8; i++) { /* another place in the other arena */
        block_id home = x.r->blocks[i];
        memcpy(x.r->dram + (size_t)i * block, x.r->arena + home * block, block);
        memset(x.r->arena + home * block, 0xff, block);
        x.r->blocks[i] = i | BLOCK_IN_DRAM;
    }
    go(&x);
    ok(memcmp(want, x.lse, sizeof want) == 0, "sinks in DRAM give the bits of sinks in HBM");
    mem_free(x.r->dram);
    done(&x);
}

/* ---- selection ---- */

static void best_of(const double *rank, uint32_t n, uint32_t k, uint8_t *in)
{
    memset(in, 0, n);
    for (uint32_t i = 0; i < k; i++) {
        uint32_t best = n;
        for (uint32_t p = 2; p < n; p++)
            if (!in[p] && (best == n || rank[p] > rank[best]))
                best = p;
        in[best] = 1;
    }
}

static void shares_are_of_all_that_is_attended(void)
{
    enum { PARTS = 256, HEADS = 3, PICKED = 12 };
    struct rig *r = rig_open("auto", 1, (struct rig_shape){8, 1, 1, 64, 2}, desc_of(8));
    static float scores[HEADS][PARTS], share[PARTS];
    static uint32_t pages[PARTS], estimates[PARTS];
    uint32_t differ = 0;
    for (int sum = 0; sum < 2; sum++)
        for (uint32_t trial = 0; trial < 8; trial++) {
            const float known[HEADS] = {2 + (float)trial, 12 - 4 * (float)trial,
                                        trial < 4 ? -9 : 200};
            double rank[PARTS] = {0}, alone[PARTS] = {0};
            uint8_t want[PARTS], without[PARTS];
            for (uint32_t h = 0; h < HEADS; h++) {
                double z = 0;
                for (uint32_t p = 0; p < PARTS; p++) {
                    scores[h][p] = 5 * rig_noise(h, trial, p) + (float)(10 * h);
                    z += p < 2 ? 0 : exp((double)scores[h][p]);
                }
                for (uint32_t p = 2; p < PARTS; p++) {
                    double e = exp((double)scores[h][p]), x = e / (z + exp((double)known[h]));
                    rank[p] = sum ? rank[p] + x : x > rank[p] ? x : rank[p];
                    alone[p] = sum ? alone[p] + e / z : e / z > alone[p] ? e / z : alone[p];
                }
            }
            best_of(rank, PARTS, PICKED, want);
            best_of(alone, PARTS, PICKED, without);
            differ += memcmp(want, without, PARTS) != 0;
            struct plan_row row = {.n_segments = 2,
                                   .records = r->numbers,
                                   .blocks = r->blocks,
                                   .budget = 8 * PICKED,
                                   .top_p = 1};
            uint32_t n_pages, n_estimates, right = 0;
            struct select_args a = {.kv = &r->kv,
                                    .desc = r->desc,
                                    .map = MAP_PAGE,
                                    .reduce = sum ? REDUCE_SUM_PROB : REDUCE_MAX_PROB,
                                    .group = HEADS,
                                    .rows = &row,
                                    .n_rows = 1,
                                    .scores = scores[0],
                                    .stride = PARTS,
                                    .known = known,
                                    .page_cap = PARTS,
                                    .estimate_cap = PARTS,
                                    .pages = pages,
                                    .share = share,
                                    .n_pages = &n_pages,
                                    .estimates = estimates,
                                    .n_estimates = &n_estimates};
            r->be->ops->select(r->be, &a);
            for (uint32_t i = 2; i < n_pages; i++)
                right += want[pages[i]];
            ok(n_pages == PICKED + 2 && right == PICKED,
               "%s %u: the pages picked are those of float64", sum ? "sum" : "max", trial);
        }
    ok(differ > 4, "which the partitions' own shares are not (%u of 16 differ)", differ);
    rig_close(r);
}

int main(void)
{
    mass_is_that_of_sinks_and_tail();
    attend_takes_over_the_tail();
    sinks_are_read_where_they_are();
    shares_are_of_all_that_is_attended();
    return tap_done();
}
