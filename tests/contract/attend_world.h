/* A world for tests of attend by lane class and by plan.
 *
 * It has sequences with three lane classes; K and V go in through append without rotation, so the
 * reference knows them from (stream, position) alone. Everything unwritten is NaN, and table entries
 * that nobody may read lead far outside. Digest records and scores are made up: here they are only
 * data. */
#ifndef TESTS_CONTRACT_ATTEND_WORLD_H
#define TESTS_CONTRACT_ATTEND_WORLD_H

#include "kernels/core/digest.h"
#include "kernels/cpu/cpu.h"
#include "tests/tap.h"

#include <math.h>

enum {
    LAYERS = 2,
    LAYER = 1,
    MAX_SEQS = 8,
    MAX_SETS = 4,
    MAX_ROWS = 64, /* of a batch */
    MAX_DIM = 128,
    POISON = 0x7ffffff0,
};

static const char *const isa_names[] = {"scalar", "AVX2", "AVX-512"};

static bool isa_runs(enum isa isa)
{
#if defined(__x86_64__)
    if (isa == ISA_AVX512)
        return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
    if (isa == ISA_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return isa == ISA_SCALAR;
}

static uint32_t hash(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = a * 0x9e3779b1u ^ b * 0x85ebca6bu ^ c * 0xc2b2ae35u;
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    x ^= x >> 12;
    x *= 0x297a2d39u;
    return x ^ x >> 15;
}

static float noise(uint32_t a, uint32_t b, uint32_t c)
{
    return (float)hash(a, b, c) / 2147483648.0f - 1.0f;
}

/* ---- a world ---- */

struct shape {
    uint32_t rows, group, dim; /* rows: R */
    uint32_t sinks, recent;
    float q_size;
};

/* Lanes of the layer under test. */
static const uint8_t classes[] = {LANE_SPARSE, LANE_STREAM, LANE_DENSE, LANE_SPARSE};
enum { KV_HEADS = ARRAY_LEN(classes) };

/* A sequence: its context is `len` rows of the stream; the last n_rows are attended. */
struct seq {
    uint32_t stream, len, n_rows;
    bool planned;
    uint32_t set;        /* of plans */
    uint32_t n_segments; /* sealed, for plans */
    block_id *blocks[LANE_CLASSES];
    uint32_t *records;
};

/* What a set of plans has in common, and how its plans are made up. */
struct set {
    struct digest_desc desc;
    bool masks, only_empty; /* only_empty: every mask is 0 */
    uint32_t n_pages, n_estimates;
    float low;   /* share of estimates whose score is -inf */
    float level; /* added to scores */
};

struct world {
    struct cpu_backend be;
    struct shape s;
    struct kv_geometry geo;
    struct lane_place lanes[LAYERS * KV_HEADS];
    struct kv_memory kv;
    uint8_t *arena[LANE_CLASSES], *dram, *records;
    uint32_t n_units, used_units, n_records;
    struct seq seqs[MAX_SEQS];
    struct set sets[MAX_SETS];
    uint32_t n_seqs;
    float *rope_cos, *rope_sin;
};

static uint32_t heads_of(const struct world *w)
{
    return w->s.group * KV_HEADS;
}

static size_t width_of(const struct world *w)
{
    return (size_t)(heads_of(w) + 2 * KV_HEADS) * w->s.dim;
}

/* Numbers [first, first + n) of a row of q, k and v. */
static void make_numbers(const struct world *w, float *out, uint32_t stream, uint32_t pos,
                         uint32_t first, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = noise(stream, pos, first + i) *
                 (first + i < heads_of(w) * w->s.dim ? w->s.q_size : 1.5f);
}

static void make_row(const struct world *w, float *row, uint32_t stream, uint32_t pos)
{
    make_numbers(w, row, stream, pos, 0, (uint32_t)width_of(w));
}

static void classify(struct world *w)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t h = 0; h < KV_HEADS; h++) { /* layer 0 has them the other way round */
            uint8_t c = classes[layer == LAYER ? h : KV_HEADS - 1 - h];
            w->lanes[layer * KV_HEADS + h] = (struct lane_place){c, (uint16_t)w->geo.n_lanes[c]++};
        }
    w->geo.lanes = w->lanes;
    for (int c = 0; c < LANE_CLASSES; c++)
        w->geo.block_bytes[c] = w->geo.n_lanes[c] * w->geo.page_bytes;
}

static struct world *open_world(enum isa isa, uint32_t threads, struct shape s, uint32_t max_rows,
                                uint32_t max_len)
{
    struct world *w = mem_alloc(sizeof *w);
    w->s = s;
    w->be.isa = isa;
    CHECK(pool_create(&w->be.pool, threads, false) == OK);
    CHECK(cpu_attend_open(&w->be) == OK && cpu_plan_open(&w->be) == OK);
    w->geo = (struct kv_geometry){.block_rows = s.rows,
                                  .layers = LAYERS,
                                  .kv_heads = KV_HEADS,
                                  .head_dim = s.dim,
                                  .page_bytes = (size_t)s.rows * s.dim * 4,
                                  .stream_sinks = s.sinks,
                                  .stream_recent = s.recent};
    classify(w);
    w->n_units = max_rows / s.rows + MAX_SEQS;
    w->kv.geo = &w->geo;
    for (int c = 0; c < LANE_CLASSES; c++) {
        w->arena[c] = mem_alloc(w->n_units * w->geo.block_bytes[c]);
        memset(w->arena[c], 0xff, w->n_units * w->geo.block_bytes[c]);
        w->kv.hbm[c] = w->arena[c];
    }
    w->dram = mem_alloc(w->n_units * w->geo.block_bytes[LANE_SPARSE]);
    memset(w->dram, 0xff, w->n_units * w->geo.block_bytes[LANE_SPARSE]);
    w->kv.dram[LANE_SPARSE] = w->dram;
    w->rope_cos = mem_alloc((size_t)max_len * s.dim * 2);
    w->rope_sin = mem_alloc((size_t)max_len * s.dim * 2);
    for (size_t i = 0; i < (size_t)max_len * s.dim / 2; i++)
        w->rope_cos[i] = 1;
    return w;
}

static void close_world(struct world *w)
{
    cpu_attend_close(&w->be);
    cpu_plan_close(&w->be);
    pool_destroy(w->be.pool);
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        for (int c = 0; c < LANE_CLASSES; c++)
            mem_free(w->seqs[i].blocks[c]);
        mem_free(w->seqs[i].records);
    }
    for (int c = 0; c < LANE_CLASSES; c++)
        mem_free(w->arena[c]);
    mem_free(w->dram);
    mem_free(w->records);
    mem_free(w->rope_cos);
    mem_free(w->rope_sin);
    mem_free(w);
}

/* Units are handed out in an order of their own, so that neighbours in a table are not in memory. */
static block_id take_unit(struct world *w)
{
    CHECK(w->used_units < w->n_units);
    uint32_t n = w->used_units++, half = w->n_units / 2;
    return n % 2 == 0 ? half - 1 - n / 2 : half + n / 2;
}

static void add_seq(struct world *w, struct seq q)
{
    uint32_t n = (q.len + w->s.rows - 1) / w->s.rows;
    for (int c = 0; c < LANE_CLASSES; c++)
        q.blocks[c] = mem_alloc(n * sizeof(block_id));
    for (uint32_t i = 0; i < n; i++)
        q.blocks[LANE_SPARSE][i] = q.blocks[LANE_DENSE][i] = q.blocks[LANE_STREAM][i] =
            take_unit(w);
    q.records = mem_alloc((q.n_segments + 1) * sizeof *q.records);
    for (uint32_t i = 0; i < q.n_segments; i++)
        q.records[i] = w->n_records++;
    w->seqs[w->n_seqs++] = q;
}

static struct batch_seq batch_of(const struct seq *q, uint32_t first_row, uint32_t from,
                                 uint32_t to)
{
    return (struct batch_seq){
        .first_row = first_row,
        .n_rows = to - from,
        .first_pos = from,
        .blocks = {q->blocks[LANE_SPARSE], q->blocks[LANE_DENSE], q->blocks[LANE_STREAM]}};
}

static void append_rows(struct world *w, const struct seq *q, uint32_t from, uint32_t to)
{
    size_t width = width_of(w);
    float *qkv = mem_alloc((to - from) * width * sizeof *qkv);
    for (uint32_t p = from; p < to; p++)
        make_row(w, qkv + (p - from) * width, q->stream, p);
    struct batch_seq b = batch_of(q, 0, from, to);
    cpu_append(&w->be.base, &(struct append_args){.kv = &w->kv,
                                                  .layer = LAYER,
                                                  .heads = heads_of(w),
                                                  .seqs = &b,
                                                  .n_seqs = 1,
                                                  .rope_cos = w->rope_cos,
                                                  .rope_sin = w->rope_sin,
                                                  .qkv = qkv});
    mem_free(qkv);
}

/* Records of all sets have the size of the largest; each lane's part is numbers that depend on
 * (record, lane, set) when read: a record belongs to the set of its sequence. */
static void make_records(struct world *w)
{
    for (int i = 0; i < MAX_SETS; i++)
        if (w->sets[i].desc.parts != 0) {
            size_t n = digest_layout_of(w->s.dim, &w->sets[i].desc).bytes;
            w->kv.record_lane_bytes = n > w->kv.record_lane_bytes ? n : w->kv.record_lane_bytes;
        }
    w->kv.record_bytes = w->kv.record_lane_bytes * w->geo.n_lanes[LANE_SPARSE] + 192;
    w->records = mem_alloc((w->n_records + 1) * w->kv.record_bytes);
    memset(w->records, 0xff, (w->n_records + 1) * w->kv.record_bytes);
    w->kv.records = w->records;
    for (uint32_t i = 0; i < w->n_seqs; i++)
        for (uint32_t s = 0; w->seqs[i].planned && s < w->seqs[i].n_segments; s++)
            for (uint32_t h = 0; h < KV_HEADS; h++) {
                if (classes[h] != LANE_SPARSE)
                    continue;
                const struct digest_desc *d = &w->sets[w->seqs[i].set].desc;
                struct digest_layout l = digest_layout_of(w->s.dim, d);
                uint8_t *lane = digest_lane(&w->kv, w->seqs[i].records[s], LAYER, h);
                for (uint32_t p = 0; d->values && p < d->parts; p++) {
                    uint32_t key = w->seqs[i].stream * 977 + s * 13 + h;
                    float scale = 0.01f + 0.005f * noise(key, p, 1u << 30);
                    memcpy(lane + l.scales + p * sizeof scale, &scale, sizeof scale);
                    for (uint32_t j = 0; j < w->s.dim; j++)
                        lane[l.values + (size_t)p * w->s.dim + j] = (uint8_t)hash(key, p, j);
                }
            }
}

/* Appends every context and makes the records. */
static void fill_world(struct world *w)
{
    for (uint32_t i = 0; i < w->n_seqs; i++)
        append_rows(w, &w->seqs[i], 0, w->seqs[i].len);
    make_records(w);
}

/* ---- plans ---- */

/* The plan of one (row, KV head), from (stream, position, head) alone. */
struct plan {
    uint32_t n_pages, n_estimates;
    uint32_t pages[512], masks[512], estimates[1024]; /* page numbers in the sequence */
};

static uint32_t first_free_page(const struct world *w, const struct set *t)
{
    return (t->desc.sinks + w->s.rows - 1) / w->s.rows;
}

static void make_plan(const struct world *w, const struct seq *q, uint32_t pos, uint32_t head,
                      struct plan *p)
{
    const struct set *t = &w->sets[q->set];
    uint32_t all = q->n_segments * (SEGMENT_ROWS / w->s.rows),
             n = t->n_pages < all ? t->n_pages : all;
    uint32_t parts = q->n_segments * t->desc.parts;
    uint32_t m = t->n_estimates < parts ? t->n_estimates : parts;
    memset(p, 0, sizeof *p);
    for (uint32_t i = 0; i < all && p->n_pages < n; i++) {
        /* sinks first; of the others as many as are still wanted, picked evenly at random */
        uint32_t left = all - i, want = n - p->n_pages;
        if (i >= first_free_page(w, t) && hash(q->stream, pos * 31 + head, i) % left >= want)
            continue;
        uint32_t mask = hash(q->stream + 1, pos * 37 + head, i);
        mask = t->only_empty || mask % 5 == 0 ? 0 : mask % 5 == 1 ? ~0u : mask;
        p->masks[p->n_pages] = t->masks ? mask : ~0u;
        p->pages[p->n_pages++] = i;
    }
    for (uint32_t i = 0; i < parts && p->n_estimates < m; i++)
        if (hash(q->stream + 2, pos * 41 + head, i) % (parts - i) < m - p->n_estimates)
            p->estimates[p->n_estimates++] = i;
}

/* Score of a partition, natural log. */
static float score_of(const struct world *w, const struct seq *q, uint32_t pos, uint32_t h,
                      uint32_t part)
{
    const struct set *t = &w->sets[q->set];
    float x = noise(q->stream + 3, pos * 43 + h, part);
    if (0.5f + 0.5f * noise(q->stream + 4, pos * 47 + h, part) < t->low)
        return -INFINITY;
    return 3 * x + t->level;
}

/* Arrays of attend_plans for the rows of one set in a batch. */
struct set_arrays {
    uint32_t n_rows, page_cap, estimate_cap, stride;
    struct plan_row rows[MAX_ROWS];
    uint32_t *pages, *masks, *estimates, n_pages[MAX_ROWS * KV_HEADS],
        n_estimates[MAX_ROWS * KV_HEADS];
    float *scores;
};

static void open_arrays(const struct world *w, struct set_arrays *a, const struct set *t)
{
    size_t lanes = MAX_ROWS * KV_HEADS;
    *a = (struct set_arrays){.page_cap = t->n_pages + 3,
                             .estimate_cap = t->n_estimates + 2,
                             .stride = 3 * t->desc.parts + 5};
    a->pages = mem_alloc(lanes * a->page_cap * 4);
    a->masks = mem_alloc(lanes * a->page_cap * 4);
    a->estimates = mem_alloc(lanes * a->estimate_cap * 4);
    a->scores = mem_alloc(lanes * w->s.group * a->stride * 4);
    memset(a->pages, 0x7f, lanes * a->page_cap * 4); /* what is skipped leads nowhere */
    memset(a->estimates, 0x7f, lanes * a->estimate_cap * 4);
    memset(a->n_pages, 0x7f, sizeof a->n_pages);
    memset(a->n_estimates, 0x7f, sizeof a->n_estimates);
}

static void close_arrays(struct set_arrays *a)
{
    mem_free(a->pages);
    mem_free(a->masks);
    mem_free(a->estimates);
    mem_free(a->scores);
}

static void add_plan_row(const struct world *w, struct set_arrays *a, const struct seq *q,
                         uint32_t row, uint32_t pos)
{
    uint32_t at = a->n_rows++;
    a->rows[at] = (struct plan_row){.row = row,
                                    .pos = pos,
                                    .n_segments = q->n_segments,
                                    .records = q->records,
                                    .blocks = q->blocks[LANE_SPARSE]};
    struct plan *p = mem_alloc(sizeof *p);
    for (uint32_t h = 0; h < KV_HEADS; h++) {
        if (classes[h] != LANE_SPARSE)
            continue;
        make_plan(w, q, pos, h, p);
        size_t e = (size_t)at * KV_HEADS + h;
        a->n_pages[e] = p->n_pages;
        a->n_estimates[e] = p->n_estimates;
        for (uint32_t i = 0; i < p->n_pages; i++)
            a->pages[e * a->page_cap + i] = q->blocks[LANE_SPARSE][p->pages[i]];
        memcpy(a->masks + e * a->page_cap, p->masks, p->n_pages * 4);
        memcpy(a->estimates + e * a->estimate_cap, p->estimates, p->n_estimates * 4);
        for (uint32_t g = 0; g < w->s.group; g++)
            for (uint32_t i = 0; i < q->n_segments * w->sets[q->set].desc.parts; i++)
                a->scores[(e * w->s.group + g) * a->stride + i] =
                    score_of(w, q, pos, h * w->s.group + g, i);
    }
    mem_free(p);
}

/* ---- running ---- */

/* Results by sequence: rows [len - n_rows, len). */
struct results {
    float *out[MAX_SEQS], *lse[MAX_SEQS]; /* [n_rows][heads * dim], [n_rows][heads] */
};

static struct results open_results(const struct world *w)
{
    struct results r = {0};
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        size_t n = (size_t)w->seqs[i].n_rows * heads_of(w);
        r.out[i] = mem_alloc(n * w->s.dim * sizeof(float));
        r.lse[i] = mem_alloc(n * sizeof(float));
    }
    return r;
}

static void close_results(struct results *r)
{
    for (int i = 0; i < MAX_SEQS; i++) {
        mem_free(r->out[i]);
        mem_free(r->lse[i]);
    }
}

/* First position beyond the sinks that the STREAM lane of the row at pos attends, as the contract
 * says it; the sinks' end if it attends everything. */
static uint32_t stream_begin(const struct world *w, uint32_t pos)
{
    int64_t begin = ((int64_t)pos + 1 - w->s.recent) / 64 * 64;
    return begin > w->s.sinks ? (uint32_t)begin : w->s.sinks;
}

/* Table entries of a STREAM lane that rows [from, to) must not read lead nowhere. */
static void poison_stream(const struct world *w, struct batch_seq *b, block_id *table)
{
    uint32_t n = (b->first_pos + b->n_rows + w->s.rows - 1) / w->s.rows;
    uint32_t begin = stream_begin(w, b->first_pos) / w->s.rows;
    uint32_t sinks = (w->s.sinks + w->s.rows - 1) / w->s.rows;
    for (uint32_t i = 0; i < n; i++)
        table[i] = i < sinks || i >= begin ? b->blocks[LANE_STREAM][i] : POISON;
    b->blocks[LANE_STREAM] = table;
}

static struct attend_plans plans_of(const struct set *t, const struct set_arrays *a)
{
    return (struct attend_plans){.desc = t->desc,
                                 .rows = a->rows,
                                 .n_rows = a->n_rows,
                                 .page_cap = a->page_cap,
                                 .estimate_cap = a->estimate_cap,
                                 .stride = a->stride,
                                 .pages = a->pages,
                                 .masks = t->masks ? a->masks : NULL,
                                 .n_pages = a->n_pages,
                                 .estimates = a->estimates,
                                 .n_estimates = a->n_estimates,
                                 .scores = a->scores};
}

/* One batch: rows [from[i], to[i]) of sequence order[i]; what it gives goes to r. */
static void run_batch(struct world *w, uint32_t n, const uint32_t *order, const uint32_t *from,
                      const uint32_t *to, struct results *r)
{
    struct batch_seq seqs[MAX_SEQS];
    struct attend_plans plans[MAX_SETS];
    struct set_arrays *arrays = mem_alloc(MAX_SETS * sizeof *arrays);
    size_t width = width_of(w), out_width = (size_t)heads_of(w) * w->s.dim;
    uint32_t n_rows = 0, n_plan_rows = 0;
    block_id *tables[MAX_SEQS];
    for (uint32_t i = 0; i < n; i++) {
        const struct seq *q = &w->seqs[order[i]];
        seqs[i] = batch_of(q, n_rows, from[i], to[i]);
        tables[i] = mem_alloc((to[i] / w->s.rows + 1) * sizeof(block_id));
        poison_stream(w, &seqs[i], tables[i]);
        n_rows += to[i] - from[i];
    }
    for (uint32_t t = 0; t < MAX_SETS; t++) {
        open_arrays(w, &arrays[t], &w->sets[t]);
        for (uint32_t i = 0; i < n; i++) {
            const struct seq *q = &w->seqs[order[i]];
            if (!q->planned || q->set != t)
                continue;
            seqs[i].planned = true;
            seqs[i].first_plan = n_plan_rows;
            n_plan_rows += seqs[i].n_rows;
            for (uint32_t k = 0; k < seqs[i].n_rows; k++)
                add_plan_row(w, &arrays[t], q, seqs[i].first_row + k, from[i] + k);
        }
        plans[t] = plans_of(&w->sets[t], &arrays[t]);
    }
    float *qkv = mem_alloc(n_rows * width * sizeof *qkv);
    float *out = mem_alloc(n_rows * out_width * sizeof *out);
    float *lse = mem_alloc(n_rows * heads_of(w) * sizeof *lse);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < seqs[i].n_rows; k++)
            make_row(w, qkv + (seqs[i].first_row + k) * width, w->seqs[order[i]].stream,
                     from[i] + k);
    cpu_attend(&w->be.base, &(struct attend_args){.kv = &w->kv,
                                                  .layer = LAYER,
                                                  .heads = heads_of(w),
                                                  .seqs = seqs,
                                                  .n_seqs = n,
                                                  .scale = 1.0f / sqrtf((float)w->s.dim),
                                                  .qkv = qkv,
                                                  .plans = plans,
                                                  .n_plans = MAX_SETS,
                                                  .out = out,
                                                  .lse = lse});
    for (uint32_t i = 0; i < n; i++) {
        const struct seq *q = &w->seqs[order[i]];
        size_t at = from[i] - (q->len - q->n_rows), first = seqs[i].first_row;
        memcpy(r->out[order[i]] + at * out_width, out + first * out_width,
               seqs[i].n_rows * out_width * sizeof *out);
        memcpy(r->lse[order[i]] + at * heads_of(w), lse + first * heads_of(w),
               seqs[i].n_rows * heads_of(w) * sizeof *lse);
        mem_free(tables[i]);
    }
    for (uint32_t t = 0; t < MAX_SETS; t++)
        close_arrays(&arrays[t]);
    mem_free(arrays);
    mem_free(qkv);
    mem_free(out);
    mem_free(lse);
}

/* All rows of all sequences in one batch, in this order. */
static struct results run_all(struct world *w, bool backwards)
{
    uint32_t order[MAX_SEQS], from[MAX_SEQS], to[MAX_SEQS];
    struct results r = open_results(w);
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        order[i] = backwards ? w->n_seqs - 1 - i : i;
        to[i] = w->seqs[order[i]].len;
        from[i] = to[i] - w->seqs[order[i]].n_rows;
    }
    run_batch(w, w->n_seqs, order, from, to, &r);
    return r;
}

/* Every sequence alone, `chunk` rows at a time. */
static struct results run_alone(struct world *w, uint32_t chunk)
{
    struct results r = open_results(w);
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        const struct seq *q = &w->seqs[i];
        for (uint32_t from = q->len - q->n_rows, to; from < q->len; from = to) {
            to = from + chunk < q->len ? from + chunk : q->len;
            run_batch(w, 1, &i, &from, &to, &r);
        }
    }
    return r;
}

static bool same_results(const struct world *w, const struct results *a, const struct results *b)
{
    bool same = true;
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        size_t n = (size_t)w->seqs[i].n_rows * heads_of(w);
        same = same && memcmp(a->out[i], b->out[i], n * w->s.dim * sizeof(float)) == 0 &&
               memcmp(a->lse[i], b->lse[i], n * sizeof(float)) == 0;
    }
    return same;
}

static double max_difference(const struct world *w, const struct results *a,
                             const struct results *b)
{
    double worst = 0;
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        size_t n = (size_t)w->seqs[i].n_rows * heads_of(w);
        for (size_t j = 0; j < n * w->s.dim; j++) {
            double e = fabs((double)a->out[i][j] - (double)b->out[i][j]);
            worst = e <= worst ? worst : e;
        }
        for (size_t j = 0; j < n; j++) {
            double e = fabs((double)a->lse[i][j] - (double)b->lse[i][j]) /
                       fmax(1, fabs((double)a->lse[i][j]));
            worst = e <= worst ? worst : e;
        }
    }
    return worst;
}

/* ---- the reference ---- */

/* Entries of one softmax: logits and values as they come. */
struct entries {
    uint32_t n, dim;
    double *logits, *values; /* [max], [max][dim] */
};

static void add_position(const struct world *w, const struct seq *q, const float *query,
                         uint32_t kv_head, uint32_t pos, struct entries *e)
{
    float k[MAX_DIM], v[MAX_DIM];
    uint32_t dim = w->s.dim, first = (heads_of(w) + kv_head) * dim;
    make_numbers(w, k, q->stream, pos, first, dim);
    make_numbers(w, v, q->stream, pos, first + KV_HEADS * dim, dim);
    double sum = 0;
    for (uint32_t i = 0; i < dim; i++) {
        sum += (double)query[i] * (double)bf16_to_f32(f32_to_bf16(k[i]));
        e->values[(size_t)e->n * dim + i] = (double)bf16_to_f32(f32_to_bf16(v[i]));
    }
    e->logits[e->n++] = sum / sqrt(dim);
}

static void add_estimate(const struct world *w, const struct seq *q, uint32_t pos, uint32_t h,
                         uint32_t part, struct entries *e)
{
    const struct digest_desc *d = &w->sets[q->set].desc;
    uint32_t key = q->stream * 977 + part / d->parts * 13 + h / w->s.group, dim = w->s.dim;
    uint32_t p = part % d->parts;
    float scale = 0.01f + 0.005f * noise(key, p, 1u << 30);
    for (uint32_t i = 0; i < dim; i++)
        e->values[(size_t)e->n * dim + i] =
            (double)scale * (double)(int8_t)(uint8_t)hash(key, p, i);
    e->logits[e->n++] = (double)score_of(w, q, pos, h, part);
}

static void add_planned(const struct world *w, const struct seq *q, const float *query,
                        uint32_t pos, uint32_t h, struct entries *e)
{
    struct plan *p = mem_alloc(sizeof *p);
    uint32_t kv_head = h / w->s.group, rows = w->s.rows;
    make_plan(w, q, pos, kv_head, p);
    for (uint32_t i = 0; i < p->n_pages; i++)
        for (uint32_t r = 0; r < rows; r++)
            if ((p->masks[i] >> r & 1) != 0)
                add_position(w, q, query, kv_head, p->pages[i] * rows + r, e);
    for (uint32_t t = q->n_segments * SEGMENT_ROWS; t <= pos; t++)
        add_position(w, q, query, kv_head, t, e);
    for (uint32_t i = 0; i < p->n_estimates; i++)
        add_estimate(w, q, pos, h, p->estimates[i], e);
    mem_free(p);
}

/* Differs from float64 by at most what is returned: numbers of `out` (about 1 large) and lse. */
static double head_error(const struct world *w, const struct seq *q, const float *query,
                         uint32_t pos, uint32_t h, const float *out, float lse)
{
    uint32_t dim = w->s.dim, kv_head = h / w->s.group, max = pos + 2048;
    struct entries e = {0, dim, mem_alloc(max * sizeof(double)),
                        mem_alloc((size_t)max * dim * sizeof(double))};
    if (classes[kv_head] == LANE_SPARSE && q->planned)
        add_planned(w, q, query, pos, h, &e);
    else
        for (uint32_t t = 0; t <= pos; t++)
            if (classes[kv_head] != LANE_STREAM || t < w->s.sinks || t >= stream_begin(w, pos))
                add_position(w, q, query, kv_head, t, &e);
    double top = -INFINITY, sum = 0, worst = 0, *want = mem_alloc(dim * sizeof *want);
    for (uint32_t i = 0; i < e.n; i++)
        top = fmax(top, e.logits[i]);
    for (uint32_t i = 0; i < e.n; i++) {
        double p = exp(e.logits[i] - top);
        sum += p;
        for (uint32_t j = 0; j < dim; j++)
            want[j] += p * e.values[(size_t)i * dim + j];
    }
    for (uint32_t j = 0; j < dim; j++) {
        double d = fabs((double)out[j] - want[j] / sum);
        worst = d <= worst ? worst : d; /* NaN comes through */
    }
    double d = fabs((double)lse - (top + log(sum))) / fmax(1, fabs(top));
    worst = d <= worst ? worst : d;
    mem_free(want);
    mem_free(e.logits);
    mem_free(e.values);
    return worst;
}

/* Of the last row of every sequence, and of others where there are more. */
static double error_of(const struct world *w, const struct results *r)
{
    double worst = 0;
    float *row = mem_alloc(width_of(w) * sizeof *row);
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        const struct seq *q = &w->seqs[i];
        for (uint32_t k = 0; k < q->n_rows; k += k + 7 < q->n_rows ? 6 : 1) {
            uint32_t pos = q->len - q->n_rows + k;
            make_row(w, row, q->stream, pos);
            for (uint32_t h = 0; h < heads_of(w); h++) {
                size_t at = (size_t)k * heads_of(w) + h;
                double e = head_error(w, q, row + (size_t)h * w->s.dim, pos, h,
                                      r->out[i] + at * w->s.dim, r->lse[i][at]);
                worst = e <= worst ? worst : e;
            }
        }
    }
    mem_free(row);
    return worst;
}

#endif
