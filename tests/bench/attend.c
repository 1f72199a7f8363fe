/* How long does attention take? Decode by context and batch, prefill of 512, decode by plan;
 * whole-model numbers: 30 layers, 9 heads over 3, head_dim 64 (the default model), threads as the
 * process may use.
 *
 * Best of several runs. Ceilings: KV bytes read per
 * second against about 50 GB/s of DRAM on two cores; prefill in f32 FMA against 5.6 G zmm/s a core.
 * Usage: attend [R] [isa: 0 scalar, 1 AVX2, 2 AVX-512] [threads, 0: all] [type: 0 bf16, 1 e4m3] */
#include "kernels/core/digest.h"
#include "kernels/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LAYERS = 30, HEADS = 9, KV_HEADS = 3, DIM = 64, MAX_BATCH = 64 };

struct bench {
    struct cpu_backend be;
    struct kv_geometry geo;
    struct batch_seq seqs[MAX_BATCH];
    void *arena;
    struct kv_memory kv;
    float *qkv, *out, *rope;
    block_id *blocks;
    uint32_t n_seqs, n_rows;
    struct attend_plans plans[LAYERS]; /* n_rows 0: attend everything */
    uint32_t *lists;
    float *scores;
};

/* What a row attends by plan. */
struct plan_case {
    uint32_t segments, tail, selected; /* rows, sinks included; whole pages are taken */
    uint32_t estimates;                /* percent of the partitions */
};

/* Fills the arena with small numbers through append itself: pages of all layers are touched. */
static void fill(struct bench *b, uint32_t context)
{
    uint16_t *p = b->arena;
    uint8_t *p8 = b->arena;
    size_t n =
        (size_t)context / b->geo.block_rows * b->geo.block_bytes[LANE_SPARSE] / 2 * b->n_seqs;
    for (size_t i = 0; b->geo.type == KV_E4M3 && i < 2 * n; i++)
        p8[i] = (uint8_t)(i * 40503u >> 9 & 0x9f); /* +-0.002 .. +-0.2 */
    for (size_t i = 0; b->geo.type == KV_BF16 && i < n; i++)
        p[i] = (uint16_t)(0x3c00u | (i * 40503u >> 9 & 0x81ffu)); /* +-0.008 .. +-0.03 */
}

static enum kv_type type;

static void setup(struct bench *b, uint32_t rows, uint32_t n_seqs, uint32_t n_rows, uint32_t len)
{
    size_t width = (size_t)(HEADS + 2 * KV_HEADS) * DIM, all_rows = (size_t)n_seqs * n_rows;
    uint32_t per_seq = (len + rows - 1) / rows, n = per_seq * n_seqs;
    b->geo = (struct kv_geometry){
        .block_rows = rows, .layers = LAYERS, .kv_heads = KV_HEADS, .head_dim = DIM, .type = type};
    b->geo.page_bytes = kv_page_bytes(&b->geo);
    b->geo.block_bytes[LANE_SPARSE] = b->geo.page_bytes * LAYERS * KV_HEADS;
    b->n_seqs = n_seqs;
    b->n_rows = n_rows;
    b->arena =
        aligned_alloc(1 << 21, (n * b->geo.block_bytes[LANE_SPARSE] + (1 << 21)) >> 21 << 21);
    b->kv = (struct kv_memory){.geo = &b->geo, .hbm = {b->arena}};
    b->blocks = mem_alloc(n * sizeof *b->blocks);
    b->qkv = mem_alloc(all_rows * width * sizeof(float));
    b->out = mem_alloc(all_rows * HEADS * DIM * sizeof(float));
    b->rope = mem_alloc((size_t)len * DIM * sizeof(float));
    for (uint32_t i = 0; i < n; i++)
        b->blocks[i] = i / per_seq + i % per_seq * n_seqs; /* sequences are interleaved */
    for (uint32_t i = 0; i < n_seqs; i++)
        b->seqs[i] = (struct batch_seq){
            i * n_rows, n_rows, len - n_rows, {b->blocks + (size_t)i * per_seq}, 0, false};
    for (size_t i = 0; i < all_rows * width; i++)
        b->qkv[i] = (float)(i * 2654435761u >> 8 & 0xffff) / 65536 - 0.5f;
    fill(b, per_seq * rows);
}

static uint32_t random_next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* n of the numbers below `from`, ascending. */
static void pick(uint32_t *out, uint32_t n, uint32_t from, uint32_t *state)
{
    for (uint32_t i = 0; n > 0; i++)
        if (random_next(state) % (from - i) < n) {
            *out++ = i;
            n--;
        }
}

static void plan(struct bench *b, const struct plan_case *p)
{
    uint32_t rows = b->geo.block_rows, state = 1;
    struct digest_desc d = {ORDER_BISECT, DIGEST_CENTROID, SEGMENT_ROWS / rows, 1, 16, true};
    uint32_t parts = p->segments * d.parts, estimates = parts * p->estimates / 100,
             n = (p->selected + rows - 1) / rows;
    b->kv.record_lane_bytes = digest_layout_of(DIM, &d).bytes;
    b->kv.record_bytes = b->kv.record_lane_bytes * LAYERS * KV_HEADS;
    size_t bytes = b->kv.record_bytes * p->segments;
    b->kv.records = aligned_alloc(1 << 21, (bytes + (1 << 21)) >> 21 << 21);
    memset(b->kv.records, 1, bytes);
    /* by layer: pages and estimates by head, then counts */
    size_t layer_words = KV_HEADS * ((size_t)n + estimates + 2);
    b->lists = mem_alloc((LAYERS * layer_words + p->segments) * 4);
    b->scores = mem_alloc((size_t)HEADS * parts * sizeof(float));
    uint32_t *records = b->lists + LAYERS * layer_words;
    static struct plan_row row;
    for (uint32_t i = 0; i < p->segments; i++)
        records[i] = p->segments - 1 - i;
    row = (struct plan_row){.pos = b->seqs[0].first_pos,
                            .n_segments = p->segments,
                            .records = records,
                            .blocks = b->blocks};
    b->seqs[0].planned = true;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        uint32_t *pages = b->lists + layer * layer_words, *guessed = pages + KV_HEADS * n;
        uint32_t *counts = guessed + KV_HEADS * estimates;
        for (uint32_t h = 0; h < KV_HEADS; h++) {
            pick(pages + h * n, n, parts, &state);
            for (uint32_t i = 0; i < n; i++)
                pages[h * n + i] = b->blocks[pages[h * n + i]];
            pick(guessed + h * estimates, estimates, parts, &state);
            counts[h] = n;
            counts[KV_HEADS + h] = estimates;
        }
        b->plans[layer] = (struct attend_plans){.desc = d,
                                                .rows = &row,
                                                .n_rows = 1,
                                                .page_cap = n,
                                                .estimate_cap = estimates,
                                                .stride = parts,
                                                .pages = pages,
                                                .n_pages = counts,
                                                .estimates = guessed,
                                                .n_estimates = counts + KV_HEADS,
                                                .scores = b->scores};
    }
}

static void teardown(struct bench *b)
{
    free(b->kv.records);
    mem_free(b->lists);
    mem_free(b->scores);
    b->lists = NULL;
    b->scores = NULL;
    memset(b->plans, 0, sizeof b->plans);
    free(b->arena);
    mem_free(b->blocks);
    mem_free(b->qkv);
    mem_free(b->out);
    mem_free(b->rope);
}

/* With one thread its own CPU time: right even on a busy machine. */
static clockid_t timer = CLOCK_MONOTONIC;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(timer, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void keep_least(uint64_t *least, uint64_t ns)
{
    *least = ns < *least ? ns : *least;
}

/* Time of a step over all layers in microseconds: the best of `runs` for each layer, summed, so
 * that a time slice given to somebody else spoils one layer of one run. Every run walks all layers:
 * a layer's pages are as cold as in a model. */
static void time_step(struct bench *b, int runs, double *append_us, double *attend_us)
{
    uint64_t append[LAYERS], attend[LAYERS];
    memset(append, 0xff, sizeof append);
    memset(attend, 0xff, sizeof attend);
    for (int r = 0; r < runs; r++)
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            uint64_t t0 = now_ns();
            cpu_append(&b->be.base, &(struct append_args){.kv = &b->kv,
                                                          .layer = layer,
                                                          .heads = HEADS,
                                                          .seqs = b->seqs,
                                                          .n_seqs = b->n_seqs,
                                                          .rope_cos = b->rope,
                                                          .rope_sin = b->rope,
                                                          .qkv = b->qkv});
            uint64_t t1 = now_ns();
            cpu_attend(&b->be.base, &(struct attend_args){.kv = &b->kv,
                                                          .layer = layer,
                                                          .heads = HEADS,
                                                          .seqs = b->seqs,
                                                          .n_seqs = b->n_seqs,
                                                          .scale = 0.125f,
                                                          .qkv = b->qkv,
                                                          .plans = &b->plans[layer],
                                                          .n_plans = b->plans[layer].n_rows,
                                                          .out = b->out});
            keep_least(&append[layer], t1 - t0);
            keep_least(&attend[layer], now_ns() - t1);
        }
    *append_us = *attend_us = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        *append_us += (double)append[layer] / 1e3;
        *attend_us += (double)attend[layer] / 1e3;
    }
}

static void measure(struct bench *b, uint32_t rows, uint32_t n_seqs, uint32_t n_rows, uint32_t len)
{
    double append, attend;
    setup(b, rows, n_seqs, n_rows, len);
    int runs = (int)(40000000 / ((size_t)len * n_seqs * (n_rows > 1 ? 40 : 1) * 20) + 5);
    time_step(b, runs < 200 ? runs : 200, &append, &attend);
    double row = 2 * DIM * kv_number_bytes(type);
    double bytes = (double)LAYERS * KV_HEADS * row * len * n_seqs;
    double first = len - n_rows, fma = (double)LAYERS * HEADS * DIM * 2 * n_seqs *
                                       (first * n_rows + 0.5 * n_rows * (n_rows + 1)) / 16;
    printf("%8u %6u %6u %12.0f %12.0f %10.1f %8.2f %9.2f\n", len, n_seqs, n_rows, append, attend,
           attend / n_seqs / n_rows, bytes / attend / 1e3, fma / attend / 1e3);
    teardown(b);
}

/* Ceilings as above; bytes and FMA of exact rows and mean V alone. */
static void measure_plan(struct bench *b, uint32_t rows, const struct plan_case *p)
{
    double append, attend, dense;
    uint32_t len = p->segments * SEGMENT_ROWS + p->tail;
    setup(b, rows, 1, 1, len);
    time_step(b, 40, &append, &dense);
    plan(b, p);
    time_step(b, 200, &append, &attend);
    double exact = (p->selected + rows - 1) / rows * rows + p->tail;
    uint32_t estimates = b->plans[0].estimate_cap;
    double bytes =
        (double)LAYERS * KV_HEADS * DIM * (2 * kv_number_bytes(type) * exact + estimates);
    double fma = (double)LAYERS * HEADS * DIM * (2 * exact + estimates) / 16;
    printf("%8u %9u %6u %10u %12.0f %12.0f %8.2f %9.2f\n", len, p->selected, p->tail, estimates,
           attend, dense, bytes / attend / 1e3, fma / attend / 1e3);
    teardown(b);
}

int main(int argc, char **argv)
{
    static const uint32_t cases[][3] = {{64, 1, 1},   {512, 1, 1},  {1800, 1, 1},  {2048, 1, 1},
                                        {8192, 1, 1}, {64, 16, 1},  {128, 16, 1},  {512, 16, 1},
                                        {2048, 8, 1}, {8192, 4, 1}, {512, 1, 512}, {2048, 1, 512}};
    static const struct plan_case plans[] = {
        {7, 512, 374, 25}, {7, 512, 374, 0}, {7, 64, 374, 25}, {7, 64, 374, 0}, {7, 64, 160, 0}};
    uint32_t rows = argc > 1 ? (uint32_t)atoi(argv[1]) : 16;
    struct bench *b = mem_alloc(sizeof *b);
    b->be.isa = argc > 2 ? (enum isa)atoi(argv[2]) : ISA_AVX512;
    CHECK(pool_create(&b->be.pool, argc > 3 ? (uint32_t)atoi(argv[3]) : 0, false) == OK);
    type = argc > 4 && atoi(argv[4]) != 0 ? KV_E4M3 : KV_BF16;
    CHECK(cpu_attend_open(&b->be) == OK && cpu_plan_open(&b->be) == OK);
    if (pool_threads(b->be.pool) == 1)
        timer = CLOCK_THREAD_CPUTIME_ID;
    printf("R = %u, %s, %u threads; best of many, %u layers\n", rows,
           type == KV_E4M3 ? "e4m3" : "bf16", pool_threads(b->be.pool), LAYERS);
    printf("%8s %6s %6s %12s %12s %10s %8s %9s\n", "context", "batch", "rows", "append us",
           "attend us", "us/token", "GB/s", "G FMA/s");
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        measure(b, rows, cases[i][1], cases[i][2], cases[i][0]);
    printf("%8s %9s %6s %10s %12s %12s %8s %9s\n", "context", "selected", "tail", "estimates",
           "attend us", "dense us", "GB/s", "G FMA/s");
    for (size_t i = 0; i < ARRAY_LEN(plans); i++)
        measure_plan(b, rows, &plans[i]);
    cpu_attend_close(&b->be);
    cpu_plan_close(&b->be);
    pool_destroy(b->be.pool);
    mem_free(b);
    return 0;
}
