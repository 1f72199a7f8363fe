/* How fast the CUDA backend attends and appends: decode against what HBM can bring, by position and by plan;
 * prefill in TFLOP/s.
 *
 * A shape of 8 KV heads of 128 with groups of 4 (Llama-3.1-8B). Calls go through the layers in turn, so
 * that no KV is found in L2, and many are queued between two syncs. */
#include "kernels/core/digest.h"
#include "kernels/cuda_api.h"
#include "tests/cuda/kbench.h"
#include "tests/tap.h"

#include <math.h>

enum { KV_HEADS = 8, GROUP = 4, DIM = 128, HEADS = KV_HEADS * GROUP, LAYERS = 4, ROWS = 16 };
enum { WIDTH = (HEADS + 2 * KV_HEADS) * DIM, CHUNK = 64 << 20 };

/* Bytes that appending a row must move: q and k are rewritten, k and v go to pages as bf16. */
enum { APPENDED = WIDTH * 4 + (HEADS + KV_HEADS) * DIM * 4 + 2 * KV_HEADS * DIM * 2 };

static struct backend *gpu;

/* Random numbers of at most 1, as bf16 (two in a word) or as floats. */
static void *random_memory(size_t bytes, bool halves)
{
    static uint32_t *hosts[2];
    uint32_t **host = &hosts[halves], x = 12345;
    if (*host == NULL) {
        *host = mem_alloc(CHUNK);
        for (size_t i = 0; i < CHUNK / 4; i++) {
            x = x * 1664525 + 1013904223;
            float f = (float)x / 2147483648.0f - 1.0f;
            memcpy(&(*host)[i], &f, 4);
            if (halves)
                (*host)[i] = ((*host)[i] & 0xffff0000u) | (*host)[i] >> 16;
        }
    }
    uint8_t *p = gpu->ops->alloc(gpu, bytes);
    CHECK(p != NULL);
    for (size_t at = 0; at < bytes; at += CHUNK)
        gpu->ops->copy(gpu, p + at, at == 0 ? (void *)*host : p,
                       bytes - at < CHUNK ? bytes - at : CHUNK);
    CHECK(gpu->ops->sync(gpu) == OK);
    return p;
}

struct job {
    struct kv_geometry geo;
    struct kv_memory kv;
    uint32_t n_seqs, n_rows, len; /* rows of each, and positions */
    struct batch_seq *seqs;
    float *qkv, *out, *cos;
};

static void open_job(struct job *j, uint32_t n_seqs, uint32_t n_rows, uint32_t len)
{
    uint32_t blocks = (len + ROWS - 1) / ROWS, all = 1;
    while (all < blocks * n_seqs)
        all *= 2;
    *j = (struct job){.n_seqs = n_seqs, .n_rows = n_rows, .len = len};
    j->geo = (struct kv_geometry){.block_rows = ROWS,
                                  .layers = LAYERS,
                                  .kv_heads = KV_HEADS,
                                  .head_dim = DIM,
                                  .page_bytes = (size_t)ROWS * DIM * 4,
                                  .n_lanes = {LAYERS * KV_HEADS}};
    j->geo.block_bytes[0] = LAYERS * KV_HEADS * j->geo.page_bytes;
    j->kv.geo = &j->geo;
    j->kv.hbm[0] = random_memory(all * j->geo.block_bytes[0], true);
    j->qkv = random_memory((size_t)n_seqs * n_rows * WIDTH * 4, false);
    j->out = random_memory((size_t)n_seqs * n_rows * HEADS * DIM * 4, false);
    j->cos = random_memory((size_t)len * DIM * 2, false);
    j->seqs = mem_alloc(n_seqs * sizeof *j->seqs);
    for (uint32_t s = 0; s < n_seqs; s++) {
        block_id *t = mem_alloc(blocks * sizeof *t);
        for (uint32_t i = 0; i < blocks; i++)
            t[i] = (s * blocks + i) * 2654435761u % all;
        j->seqs[s] = (struct batch_seq){
            .first_row = s * n_rows, .n_rows = n_rows, .first_pos = len - n_rows, .blocks = {t}};
    }
}

static void close_job(struct job *j)
{
    void *all[] = {j->kv.hbm[0], j->qkv, j->out, j->cos};
    for (size_t i = 0; i < ARRAY_LEN(all); i++)
        gpu->ops->free(gpu, all[i], 0);
    for (uint32_t s = 0; s < j->n_seqs; s++)
        mem_free(j->seqs[s].blocks[0]);
    mem_free(j->seqs);
}

static void run(struct job *j, bool append, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (append)
            gpu->ops->append(gpu, &(struct append_args){.kv = &j->kv,
                                                        .layer = i % LAYERS,
                                                        .heads = HEADS,
                                                        .seqs = j->seqs,
                                                        .n_seqs = j->n_seqs,
                                                        .rope_cos = j->cos,
                                                        .rope_sin = j->cos,
                                                        .qkv = j->qkv});
        else
            gpu->ops->attend(gpu, &(struct attend_args){.kv = &j->kv,
                                                        .layer = i % LAYERS,
                                                        .heads = HEADS,
                                                        .seqs = j->seqs,
                                                        .n_seqs = j->n_seqs,
                                                        .scale = 1 / sqrtf(DIM),
                                                        .qkv = j->qkv,
                                                        .out = j->out});
    CHECK(gpu->ops->sync(gpu) == OK);
}

/* Microseconds of a call: the median of 5 times n. */
static double time_us(struct job *j, bool append, uint32_t n)
{
    double t[5];
    run(j, append, n);
    for (int i = 0; i < 5; i++) {
        uint64_t from = clock_us();
        run(j, append, n);
        t[i] = (double)(clock_us() - from) / n;
        for (int k = i; k > 0 && t[k] < t[k - 1]; k--) {
            double x = t[k];
            t[k] = t[k - 1];
            t[k - 1] = x;
        }
    }
    return t[2];
}

static void decode(uint32_t n_seqs, uint32_t len)
{
    struct job j;
    open_job(&j, n_seqs, 1, len);
    double us = time_us(&j, false, n_seqs * len > 200000 ? 20 : 100);
    double bytes = (double)n_seqs * len * KV_HEADS * DIM * 4;
    char shape[32];
    snprintf(shape, sizeof shape, "B%u/%u", n_seqs, len);
    kbench_bytes("attend-decode", shape, us, bytes, KBENCH_HBM_GBS);
    us = time_us(&j, true, 100);
    kbench_bytes("append-decode", shape, us, (double)n_seqs * APPENDED, KBENCH_HBM_GBS);
    close_job(&j);
}

static void prefill(uint32_t n_rows, uint32_t len)
{
    struct job j;
    open_job(&j, 1, n_rows, len);
    double us = time_us(&j, false, 8),
           pairs = (double)n_rows * (len - n_rows) + (double)n_rows * (n_rows + 1) / 2;
    char shape[48];
    snprintf(shape, sizeof shape, "%u-behind-%u", n_rows, len - n_rows);
    kbench_flops("attend-prefill", shape, us, 4.0 * DIM * HEADS * pairs, KBENCH_CUDNN_TFLOPS);
    us = time_us(&j, true, 20);
    kbench_bytes("append-prefill", shape, us, (double)n_rows * APPENDED, KBENCH_HBM_GBS);
    close_job(&j);
}

/* ---- by plan ---- */

enum { PLAN_LAYERS = 16, SELECTED = 2600, TAIL = 600, CONTEXT = 16 * SEGMENT_ROWS };

/* Rows of B sequences whose lists are `SELECTED` rows long, and of so many estimates. */
struct plan_job {
    struct kv_geometry geo;
    struct kv_memory kv;
    struct digest_desc desc;
    struct attend_plans plans;
    struct batch_seq *seqs;
    struct plan_row *rows;
    uint32_t n_seqs;
    float *qkv, *out, *known;
    void *tail;
};

static void *put(const void *from, size_t bytes)
{
    void *p = gpu->ops->alloc(gpu, bytes + !bytes);
    CHECK(p != NULL);
    gpu->ops->copy(gpu, p, from, bytes);
    CHECK(gpu->ops->sync(gpu) == OK);
    return p;
}

static void *put_same(uint32_t number, size_t n)
{
    uint32_t *list = mem_alloc(n * 4 + 4);
    for (size_t i = 0; i < n; i++)
        list[i] = number;
    void *p = put(list, n * 4);
    mem_free(list);
    return p;
}

static void open_plans(struct plan_job *j, uint32_t B, uint32_t R, enum digest_kind kind,
                       uint32_t estimates)
{
    uint32_t blocks = (CONTEXT + TAIL + R - 1) / R, all = 1, lanes = B * KV_HEADS;
    uint32_t n_pages = SELECTED / R, parts = SEGMENT_ROWS / R, segments = CONTEXT / SEGMENT_ROWS;
    while (all < blocks * B)
        all *= 2;
    *j = (struct plan_job){
        .n_seqs = B,
        .desc = {.order = ORDER_BISECT, .kind = kind, .parts = parts, .sinks = 16, .values = true}};
    j->geo = (struct kv_geometry){.block_rows = R,
                                  .layers = PLAN_LAYERS,
                                  .kv_heads = KV_HEADS,
                                  .head_dim = DIM,
                                  .page_bytes = (size_t)R * DIM * 4,
                                  .n_lanes = {PLAN_LAYERS * KV_HEADS}};
    j->geo.block_bytes[0] = PLAN_LAYERS * KV_HEADS * j->geo.page_bytes;
    j->kv.geo = &j->geo;
    j->kv.hbm[0] = random_memory(all * j->geo.block_bytes[0], true);
    j->kv.record_lane_bytes = digest_layout_of(DIM, &j->desc).bytes;
    j->kv.record_bytes = PLAN_LAYERS * KV_HEADS * j->kv.record_lane_bytes;
    j->kv.records = random_memory(B * segments * j->kv.record_bytes, true);
    j->qkv = random_memory((size_t)B * WIDTH * 4, false);
    j->out = random_memory((size_t)B * HEADS * DIM * 4, false);
    j->known = random_memory((size_t)B * HEADS * 4, false);
    j->tail = random_memory(lanes * gpu->ops->known_bytes(&j->geo, HEADS), false);
    j->seqs = mem_alloc(B * sizeof *j->seqs);
    j->rows = mem_alloc(B * sizeof *j->rows);
    uint32_t *pages = mem_alloc((size_t)lanes * n_pages * 4);
    uint32_t *list = mem_alloc((size_t)lanes * estimates * 4 + 4);
    for (uint32_t s = 0; s < B; s++) {
        block_id *t = mem_alloc(blocks * sizeof *t);
        uint32_t *records = mem_alloc(segments * 4);
        for (uint32_t i = 0; i < blocks; i++)
            t[i] = (s * blocks + i) * 2654435761u % all;
        for (uint32_t i = 0; i < segments; i++)
            records[i] = s * segments + i;
        for (uint32_t h = 0; h < KV_HEADS; h++) {
            uint32_t e = s * KV_HEADS + h, x = e + 1;
            for (uint32_t i = 0; i < n_pages; i++) {
                x = x * 1664525 + 1013904223;
                pages[e * n_pages + i] = t[i * (CONTEXT / R) / n_pages + (x >> 16) % 4];
            }
            for (uint32_t i = 0; i < estimates; i++)
                list[(size_t)e * estimates + i] =
                    (uint32_t)((uint64_t)i * (segments * parts) / estimates);
        }
        j->rows[s] = (struct plan_row){.row = s,
                                       .pos = CONTEXT + TAIL - 1,
                                       .n_segments = segments,
                                       .records = records,
                                       .blocks = t};
        j->seqs[s] = (struct batch_seq){.first_row = s,
                                        .n_rows = 1,
                                        .first_pos = CONTEXT + TAIL - 1,
                                        .blocks = {t},
                                        .first_plan = s,
                                        .planned = true};
    }
    j->plans = (struct attend_plans){
        .desc = j->desc,
        .rows = j->rows,
        .n_rows = B,
        .page_cap = n_pages,
        .estimate_cap = estimates,
        .stride = segments * parts,
        .pages = put(pages, (size_t)lanes * n_pages * 4),
        .n_pages = put_same(n_pages, lanes),
        .estimates = put(list, (size_t)lanes * estimates * 4),
        .n_estimates = put_same(estimates, lanes),
        .scores = random_memory((size_t)lanes * GROUP * segments * parts * 4, false)};
    mem_free(pages);
    mem_free(list);
}

static void close_plans(struct plan_job *j)
{
    const void *all[] = {j->kv.hbm[0],
                         j->kv.records,
                         j->qkv,
                         j->out,
                         j->known,
                         j->tail,
                         j->plans.pages,
                         j->plans.n_pages,
                         j->plans.estimates,
                         j->plans.n_estimates,
                         j->plans.scores};
    for (size_t i = 0; i < ARRAY_LEN(all); i++)
        gpu->ops->free(gpu, (void *)(uintptr_t)all[i], 0);
    for (uint32_t s = 0; s < j->n_seqs; s++) {
        mem_free((void *)(uintptr_t)j->rows[s].records);
        mem_free((void *)(uintptr_t)j->rows[s].blocks);
    }
    mem_free(j->rows);
    mem_free(j->seqs);
}

enum { RUN_ATTEND = 1, RUN_KNOWN = 2 };

static void run_plans(struct plan_job *j, int what, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (what & RUN_KNOWN)
            gpu->ops->known(gpu, &(struct known_args){.kv = &j->kv,
                                                      .layer = i % PLAN_LAYERS,
                                                      .heads = HEADS,
                                                      .sinks = 16,
                                                      .rows = j->rows,
                                                      .n_rows = j->n_seqs,
                                                      .scale = 1 / sqrtf(DIM),
                                                      .qkv = j->qkv,
                                                      .lse = j->known,
                                                      .tail = j->tail});
        struct attend_plans plans = j->plans;
        plans.tail = what & RUN_KNOWN ? j->tail : NULL;
        if (what & RUN_ATTEND)
            gpu->ops->attend(gpu, &(struct attend_args){.kv = &j->kv,
                                                        .layer = i % PLAN_LAYERS,
                                                        .heads = HEADS,
                                                        .seqs = j->seqs,
                                                        .n_seqs = j->n_seqs,
                                                        .scale = 1 / sqrtf(DIM),
                                                        .qkv = j->qkv,
                                                        .plans = &plans,
                                                        .n_plans = 1,
                                                        .out = j->out});
    }
    CHECK(gpu->ops->sync(gpu) == OK);
}

static double plans_us(struct plan_job *j, int what)
{
    double best = 1e9;
    run_plans(j, what, 64);
    for (int i = 0; i < 5; i++) {
        uint64_t from = clock_us();
        run_plans(j, what, 320);
        double us = (double)(clock_us() - from) / 320;
        best = us < best ? us : best;
    }
    return best;
}

static void planned(uint32_t B, uint32_t R, enum digest_kind kind, uint32_t estimates)
{
    struct plan_job j;
    open_plans(&j, B, R, kind, estimates);
    double us = plans_us(&j, RUN_ATTEND), both = plans_us(&j, RUN_ATTEND | RUN_KNOWN);
    double known = plans_us(&j, RUN_KNOWN);
    double bytes = (double)B * (SELECTED / R * R + TAIL) * KV_HEADS * DIM * 4;
    bytes += (double)B * KV_HEADS * estimates * (DIM + 4 + GROUP * 4);
    if (kind == DIGEST_CODES)
        bytes += (double)B * KV_HEADS * estimates * R * 14;
    char shape[48];
    snprintf(shape, sizeof shape, "B%u-R%u-%u%s", B, R, estimates,
             kind == DIGEST_CODES ? "-codes" : "");
    kbench_bytes("attend-plan", shape, us, bytes, KBENCH_HBM_GBS);
    kbench_bytes("attend-known-plan", shape, both, bytes, KBENCH_HBM_GBS);
    kbench_bytes("known", shape, known, (double)B * (TAIL + 16) * KV_HEADS * DIM * 4,
                 KBENCH_HBM_GBS);
    close_plans(&j);
}

/* Of all shapes, or of those that the arguments name: plan:B:R:ESTIMATES[:codes], decode:B:LENGTH,
 * prefill:ROWS:LENGTH. */
static void run_named(const char *name)
{
    unsigned a = 0, b = 0, c = 0;
    char kind[8] = "";
    if (sscanf(name, "plan:%u:%u:%u:%7s", &a, &b, &c, kind) >= 3)
        planned(a, b, kind[0] != 0 ? DIGEST_CODES : DIGEST_CENTROID, c);
    else if (sscanf(name, "decode:%u:%u", &a, &b) == 2)
        decode(a, b);
    else if (sscanf(name, "prefill:%u:%u", &a, &b) == 2)
        prefill(a, b);
    else
        printf("# what is %s?\n", name);
}

int main(int argc, char **argv)
{
    static const char *const all[] = {
        "plan:1:16:0",       "plan:1:16:2048",       "plan:1:8:1966:codes",  "plan:2:16:2048",
        "plan:6:16:0",       "plan:6:16:2048",       "plan:6:8:1966:codes",  "plan:12:16:2048",
        "plan:16:16:0",      "plan:16:16:2048",      "plan:16:8:1966:codes", "plan:64:16:0",
        "plan:64:16:2048",   "plan:64:8:1966:codes", "decode:1:1000",        "decode:1:4000",
        "decode:1:8192",     "decode:1:9000",        "decode:1:16384",       "decode:1:32768",
        "decode:1:131072",   "decode:4:32768",       "decode:8:2048",        "decode:8:32768",
        "decode:8:131072",   "prefill:2048:2048",    "prefill:8192:8192",    "prefill:2048:32768",
        "prefill:256:32768", "prefill:64:131072",
    };
    if (spind_cuda_open(&gpu, 0) != OK)
        tap_skip_all(err_text());
    printf("# %s\n", gpu->ops->describe(gpu));
    for (int i = 1; i < argc; i++)
        run_named(argv[i]);
    for (size_t i = 0; argc < 2 && i < ARRAY_LEN(all); i++)
        run_named(all[i]);
    gpu->ops->close(gpu);
    return 0;
}
