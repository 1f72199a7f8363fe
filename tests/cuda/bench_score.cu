/* How near to the memory's speed does the scan of digests come, and how long does selection take?
 *
 * The 8B shape (8 KV heads of 128, groups of 4), one layer a call; calls go through layers whose records
 * are more than the L2 cache in all. Bytes: what seal keeps for the score (vectors with their base and
 * step, codes of keys, or bounds) once, and the scores written. Selection: 2 % of the rows, and 12 % of
 * the partitions estimated, of scores in L2, where score leaves them. */
#include "kernels/core/digest.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda_api.h"
#include "tests/cuda/kbench.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

enum { KV_HEADS = 8, GROUP = 4, DIM = 128, REPEATS = 9, MAX_LAYERS = 24 };
extern "C" const struct cuda_api spind_cuda_api;

static struct cuda_backend *b;
extern uint32_t cuda_score_depth, cuda_select_ranks, cuda_plan_most;

static void must(bool good, const char *what)
{
    if (good && b->error == OK)
        return;
    fprintf(stderr, "%s: %s\n", what, b != NULL ? b->text : err_text());
    exit(1);
}

static void must_cuda(cudaError_t e, const char *what)
{
    if (e != cudaSuccess)
        fprintf(stderr, "%s\n", cudaGetErrorString(e));
    must(e == cudaSuccess, what);
}

__global__ static void fill_words(uint32_t *p, size_t n)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 0x9e3779b1u ^ (uint32_t)(i >> 32);
        h = (h ^ h >> 15) * 0x2c1b3c6du;
        p[i] = (h ^ h >> 13) & 0xbfffbfffu; /* below 2 as bf16 and as float */
    }
}

__global__ static void fill_scores(float *p, size_t n, float size)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 0x9e3779b1u;
        h = (h ^ h >> 15) * 0x2c1b3c6du;
        p[i] = size * (float)(int)(h ^ h >> 13) * 0x1p-31f;
    }
}

/* Base and step of vectors, such that logits differ by about 2. */
__global__ static void fill_vectors(uint8_t *records, size_t lane_bytes, size_t vectors)
{
    float *base = (float *)(records + blockIdx.x * lane_bytes + vectors);
    uint32_t h = (blockIdx.x * DIM + threadIdx.x) * 0x9e3779b1u;
    h = (h ^ h >> 15) * 0x2c1b3c6du;
    base[threadIdx.x] = (float)(int)(h ^ h >> 13) * 0x1p-31f;
    base[DIM + threadIdx.x] = 0.02f;
}

static void *device(size_t bytes)
{
    void *p = NULL;
    must_cuda(cudaMalloc(&p, bytes), "cudaMalloc");
    return p;
}

/* Median microseconds of one of n calls of a step, which is a graph from the second time on. */
template <typename F> static double time_calls(uint32_t n, F call)
{
    cudaEvent_t begin, end;
    std::vector<float> ms(REPEATS);
    must_cuda(cudaEventCreate(&begin), "event");
    must_cuda(cudaEventCreate(&end), "event");
    for (int i = -3; i < REPEATS; i++) {
        for (uint32_t k = 0; k < n; k++)
            call(k);
        cudaEventRecord(begin, b->stream);
        cuda_flush(b);
        cudaEventRecord(end, b->stream);
        cuda_step_end(b);
        must(true, "a step");
        if (i >= 0)
            cudaEventElapsedTime(&ms[(size_t)i], begin, end);
    }
    std::sort(ms.begin(), ms.end());
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return ms[REPEATS / 2] * 1e3 / n;
}

struct batch {
    const char *name;
    uint32_t n, tokens;
};
static const struct batch batches[] = {
    {"1x130K", 1, 130048}, {"6x130K", 6, 130048}, {"64x8K", 64, 8192}, {"1x1M", 1, 1 << 20}};

static const struct {
    const char *name;
    uint32_t rows;
    struct digest_desc d;
    enum score_kind kind;
} digests[] = {
    {"centroid-R16", 16, {ORDER_BISECT, DIGEST_CENTROID, 64, 0, 16, true}, SCORE_MASS},
    {"centroid-R8", 8, {ORDER_BISECT, DIGEST_CENTROID, 128, 0, 16, true}, SCORE_MASS},
    {"outlier-R8", 8, {ORDER_BISECT, DIGEST_CENTROID, 128, 1, 16, true}, SCORE_MASS},
    {"codes-R16", 16, {ORDER_BISECT, DIGEST_CODES, 64, 0, 16, true}, SCORE_MASS},
    {"codes-R8", 8, {ORDER_BISECT, DIGEST_CODES, 128, 0, 16, true}, SCORE_MASS},
    {"bounds-R16", 16, {ORDER_KEEP, DIGEST_BOUNDS, 64, 0, 16, false}, SCORE_BOUND},
    {"bounds-R8", 8, {ORDER_KEEP, DIGEST_BOUNDS, 128, 0, 16, false}, SCORE_BOUND},
};

/* Bytes of a segment of a lane that a score must read. */
static size_t read_bytes(const struct digest_desc *d)
{
    if (d->kind == DIGEST_BOUNDS)
        return digest_bounds_bytes(DIM, d->parts);
    size_t codes = d->kind == DIGEST_CODES ? codes_v_vectors() : 0;
    return (1 + d->outliers) * digest_vectors_bytes(DIM, d->parts) + codes;
}

/* The backend knows a geometry by its address. */
static struct kv_geometry geometries[64];
static uint32_t n_geometries;

struct world {
    struct kv_geometry *geo;
    struct kv_memory kv;
    uint32_t layers, segments;
    std::vector<uint32_t> records;
    std::vector<block_id> blocks;
    std::vector<struct plan_row> rows;
    float *qkv, *scores;
    uint32_t stride;
};

static void open_world(struct world *w, uint32_t rows, const struct digest_desc *d,
                       const struct batch *x)
{
    size_t width = (size_t)(GROUP + 2) * KV_HEADS * DIM;
    w->segments = (x->tokens - TAIL_ROWS) / SEGMENT_ROWS;
    struct digest_layout l = digest_layout_of(DIM, d);
    size_t layer = (size_t)x->n * w->segments * KV_HEADS * l.bytes;
    size_t scanned = (size_t)x->n * w->segments * KV_HEADS * read_bytes(d);
    w->layers = (uint32_t)std::min<size_t>(MAX_LAYERS, (256u << 20) / scanned + 2);
    w->geo = &geometries[n_geometries++];
    must(n_geometries <= ARRAY_LEN(geometries), "geometries");
    w->geo->block_rows = rows;
    w->geo->layers = w->layers;
    w->geo->kv_heads = KV_HEADS;
    w->geo->head_dim = DIM;
    w->geo->page_bytes = (size_t)rows * DIM * 4;
    w->geo->n_lanes[LANE_SPARSE] = w->layers * KV_HEADS;
    w->geo->block_bytes[LANE_SPARSE] = w->layers * KV_HEADS * w->geo->page_bytes;
    memset(&w->kv, 0, sizeof w->kv);
    w->kv.geo = w->geo;
    w->kv.record_lane_bytes = l.bytes;
    w->kv.record_bytes = w->geo->n_lanes[LANE_SPARSE] * l.bytes;
    w->kv.records = device(layer * w->layers);
    fill_words<<<1024, 256>>>((uint32_t *)w->kv.records, layer * w->layers / 4);
    if (l.kinds > 0)
        fill_vectors<<<(uint32_t)(layer / l.bytes * w->layers), DIM>>>((uint8_t *)w->kv.records,
                                                                       l.bytes, l.vectors);
    w->qkv = (float *)device(x->n * width * sizeof(float));
    fill_scores<<<64, 256>>>(w->qkv, x->n * width, 2);
    w->stride = w->segments * d->parts;
    size_t n_scores = (size_t)x->n * KV_HEADS * GROUP * w->stride;
    w->scores = (float *)device(n_scores * sizeof(float));
    fill_scores<<<1024, 256>>>(w->scores, n_scores, 8);
    must_cuda(cudaDeviceSynchronize(), "fill");
    w->records.resize((size_t)x->n * w->segments);
    for (size_t i = 0; i < w->records.size(); i++)
        w->records[i] = (uint32_t)i;
    w->blocks.assign((x->tokens + rows - 1) / rows, 0);
    w->rows.resize(x->n);
    for (uint32_t i = 0; i < x->n; i++) {
        struct plan_row r;
        memset(&r, 0, sizeof r);
        r.row = i;
        r.pos = x->tokens - 1;
        r.n_segments = w->segments;
        r.records = &w->records[(size_t)i * w->segments];
        r.blocks = w->blocks.data();
        r.budget = std::max(1024u, x->tokens / 50);
        r.estimate = w->stride / 8;
        r.top_p = 1;
        w->rows[i] = r;
    }
}

static void close_world(struct world *w)
{
    cudaFree(w->kv.records);
    cudaFree(w->qkv);
    cudaFree(w->scores);
}

static void bench_score(void)
{
    for (size_t i = 0; i < ARRAY_LEN(digests); i++)
        for (size_t k = 0; k < ARRAY_LEN(batches); k++) {
            struct world w;
            char name[64];
            open_world(&w, digests[i].rows, &digests[i].d, &batches[k]);
            struct score_args a;
            memset(&a, 0, sizeof a);
            a.kv = &w.kv;
            a.kind = digests[i].kind;
            a.desc = digests[i].d;
            a.heads = GROUP * KV_HEADS;
            a.rows = w.rows.data();
            a.n_rows = batches[k].n;
            a.scale = 0.088f;
            a.qkv = w.qkv;
            a.scores = w.scores;
            a.stride = w.stride;
            double us = time_calls(w.layers * 4, [&](uint32_t layer) {
                a.layer = layer % w.layers;
                b->base.ops->score(&b->base, &a);
            });
            size_t pieces = (size_t)batches[k].n * w.segments * KV_HEADS;
            size_t bytes = pieces * read_bytes(&a.desc) + pieces * a.desc.parts * GROUP * 4;
            snprintf(name, sizeof name, "%s/%s", digests[i].name, batches[k].name);
            kbench_bytes("score", name, us, (double)bytes, KBENCH_HBM_GBS);
            close_world(&w);
        }
}

static void bench_select(void)
{
    static const enum group_reduce reduces[] = {REDUCE_SUM_PROB, REDUCE_MAX_RAW};
    static const char *const names[] = {"sum_prob", "max_raw"};
    static const size_t of[] = {0, 1}; /* R 16, R 8 */
    for (size_t i = 0; i < ARRAY_LEN(of); i++)
        for (size_t k = 0; k < ARRAY_LEN(batches); k++)
            for (size_t m = 0; m < ARRAY_LEN(reduces); m++) {
                struct world w;
                char name[64];
                open_world(&w, digests[of[i]].rows, &digests[of[i]].d, &batches[k]);
                size_t lanes = (size_t)batches[k].n * KV_HEADS;
                struct select_args a;
                memset(&a, 0, sizeof a);
                a.kv = &w.kv;
                a.desc = digests[of[i]].d;
                a.map = MAP_PAGE;
                a.reduce = reduces[m];
                a.group = GROUP;
                a.rows = w.rows.data();
                a.n_rows = batches[k].n;
                a.scores = w.scores;
                a.stride = w.stride;
                a.page_cap = w.rows[0].budget / w.geo->block_rows + 4;
                a.estimate_cap = w.rows[0].estimate;
                a.pages = (uint32_t *)device(lanes * a.page_cap * 4);
                a.share = (float *)device(lanes * a.page_cap * 4);
                a.estimates = (uint32_t *)device(lanes * a.estimate_cap * 4);
                a.n_pages = (uint32_t *)device(lanes * 4);
                a.n_estimates = (uint32_t *)device(lanes * 4);
                double us = time_calls(40, [&](uint32_t) { b->base.ops->select(&b->base, &a); });
                snprintf(name, sizeof name, "%s-R%u/%s", names[m], w.geo->block_rows,
                         batches[k].name);
                kbench_time("select", name, us, 5);
                cudaFree(a.pages);
                cudaFree(a.share);
                cudaFree(a.estimates);
                cudaFree(a.n_pages);
                cudaFree(a.n_estimates);
                close_world(&w);
            }
}

/* ---- score, select and resolve as a layer has them ---- */

__global__ static void wait_kernel(void)
{
}

/* What is in front of them: a product, which overlaps with nothing, and an append, which does. */
static void run_front(struct cuda_backend *, const void *)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = how.blockDim = dim3(1);
    how.stream = b->stream;
    cudaLaunchKernelEx(&how, wait_kernel);
    how.attrs = &early;
    how.numAttrs = 1;
    cudaLaunchKernelEx(&how, wait_kernel);
}

static double time_chain(struct world *w, struct select_args *s, uint32_t n_rows, bool chain)
{
    struct score_args a;
    struct resolve_args r;
    memset(&a, 0, sizeof a);
    memset(&r, 0, sizeof r);
    a.kv = r.kv = &w->kv;
    a.kind = SCORE_MASS;
    a.desc = r.desc = s->desc;
    a.heads = GROUP * KV_HEADS;
    a.rows = r.rows = w->rows.data();
    a.n_rows = r.n_rows = n_rows;
    a.scale = 0.088f;
    a.qkv = w->qkv;
    a.scores = w->scores;
    a.stride = w->stride;
    r.page_cap = s->page_cap;
    r.estimate_cap = s->estimate_cap;
    r.pages = s->pages;
    r.share = s->share;
    r.n_pages = s->n_pages;
    r.estimates = s->estimates;
    r.n_estimates = s->n_estimates;
    return time_calls(w->layers * 4, [&](uint32_t layer) {
        uint64_t nothing = 0;
        a.layer = s->layer = r.layer = layer % w->layers;
        cuda_do(b, run_front, &nothing, sizeof nothing);
        if (!chain)
            return;
        b->base.ops->score(&b->base, &a);
        b->base.ops->select(&b->base, s);
        b->base.ops->resolve(&b->base, &r);
    });
}

/* With nothing estimated, then a quarter; for each value of cuda_plan_most that is named. */
static void bench_plan(int argc, char **argv)
{
    static const struct batch of[] = {
        {"1x130K", 1, 130048}, {"6x130K", 6, 130048},   {"12x64K", 12, 65536}, {"64x8K", 64, 8192},
        {"1x1M", 1, 1 << 20},  {"12x130K", 12, 130048}, {"1x32K", 1, 32768}};
    for (size_t k = 0; k < ARRAY_LEN(of) * 2; k++) {
        const struct batch *batch = &of[k / 2];
        struct world w;
        char name[64];
        open_world(&w, digests[0].rows, &digests[0].d, batch);
        size_t lanes = (size_t)batch->n * KV_HEADS;
        struct select_args a;
        memset(&a, 0, sizeof a);
        a.kv = &w.kv;
        a.desc = digests[0].d;
        a.map = MAP_PAGE;
        a.reduce = REDUCE_MAX_PROB;
        a.group = GROUP;
        a.rows = w.rows.data();
        a.n_rows = batch->n;
        a.scores = w.scores;
        a.stride = w.stride;
        for (uint32_t i = 0; i < batch->n; i++)
            w.rows[i].estimate = k % 2 * w.stride / 4;
        a.page_cap = w.rows[0].budget / w.geo->block_rows + 4;
        a.estimate_cap = w.stride / 4;
        a.pages = (uint32_t *)device(lanes * a.page_cap * 4);
        a.share = (float *)device(lanes * a.page_cap * 4);
        a.estimates = (uint32_t *)device(lanes * a.estimate_cap * 4);
        a.n_pages = (uint32_t *)device(lanes * 4);
        a.n_estimates = (uint32_t *)device(lanes * 4);
        double front = time_chain(&w, &a, batch->n, false);
        printf("# front %.2f us\n", front);
        for (int i = 0; i < argc; i++) {
            cuda_plan_most = (uint32_t)atoi(argv[i]);
            double us = time_chain(&w, &a, batch->n, true) - front;
            snprintf(name, sizeof name, "%s%s/%u", batch->name, k % 2 ? "-est" : "",
                     cuda_plan_most);
            size_t pieces = (size_t)batch->n * w.segments * KV_HEADS;
            kbench_bytes("plan", name, us, (double)(pieces * read_bytes(&a.desc)), KBENCH_HBM_GBS);
        }
        cudaFree(a.pages);
        cudaFree(a.share);
        cudaFree(a.estimates);
        cudaFree(a.n_pages);
        cudaFree(a.n_estimates);
        close_world(&w);
    }
}

int main(int argc, char **argv)
{
    struct cuda_options o = {};
    struct backend *be = NULL;
    if (spind_cuda_api.open(&be, &o) != OK) {
        fprintf(stderr, "%s\n", err_text());
        return 1;
    }
    b = (struct cuda_backend *)be;
    printf("%s\n", be->ops->describe(be));
    if (argc > 1 && strcmp(argv[1], "plan") == 0) {
        char preset[] = "3", *presets[] = {preset};
        bench_plan(argc > 2 ? argc - 2 : 1, argc > 2 ? argv + 2 : presets);
        be->ops->close(be);
        return 0;
    }
    if (argc > 1)
        cuda_score_depth = (uint32_t)atoi(argv[1]);
    if (argc > 2)
        cuda_select_ranks = (uint32_t)atoi(argv[2]);
    if (argc < 3)
        bench_score();
    if (argc != 2)
        bench_select();
    be->ops->close(be);
    return 0;
}
