/* What does a seal cost? One segment of 1,024 rows of all lanes of the 8B shape (256 of 128 numbers,
 * 128 MiB of K and V), in place, by description; segments follow each other through more memory than the L2
 * cache holds. The limit: every byte that must be is read once and written once. Prefill of such a segment
 * takes 25 ms at 8K of context, 50 at 64K: a seal may cost 3 %. Rows are clusters, with some channels far from
 * zero. Usage: bench_seal [runs] */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda_api.h"
#include "tests/cuda/kbench.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

enum { LAYERS = 32, HEADS = 8, DIM = 128, SEGMENTS = 4 };
extern "C" const struct cuda_api spind_cuda_api;

static struct cuda_backend *b;

static void must(bool good, const char *what)
{
    if (good && b->error == OK)
        return;
    fprintf(stderr, "%s: %s\n", what, b != NULL && b->error != OK ? b->text : err_text());
    exit(1);
}

__device__ static float noise(uint32_t a, uint32_t c, uint32_t d)
{
    uint32_t x = a * 0x9e3779b1u ^ c * 0x85ebca6bu ^ d * 0xc2b2ae35u;
    x = (x ^ x >> 15) * 0x2c1b3c6du;
    x = (x ^ x >> 12) * 0x297a2d39u;
    return (float)(x ^ x >> 15) / 2147483648.0f - 1.0f;
}

/* Blocks are [page of a lane][K, V][R][DIM]; block i holds positions R i of its sequence. */
__global__ static void fill(__nv_bfloat16 *p, size_t n, uint32_t rows)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    uint32_t c = i % DIM, r = i / DIM % rows, v = i / DIM / rows % 2;
    uint32_t lane = (uint32_t)(i / DIM / rows / 2 % (LAYERS * HEADS));
    uint32_t row = (uint32_t)(i / DIM / rows / 2 / (LAYERS * HEADS)) * rows + r;
    uint32_t cluster = (uint32_t)((noise(lane, row / 3, 77) + 1) * 20);
    float x =
        noise(lane * 64 + cluster, 5 + v, c) * 1.5f + noise(lane * 4096 + row, 7 + v, c) * 0.7f;
    p[i] = __float2bfloat16_rn(x + (c % 16 == 3 ? 6 * noise(lane, 9, c) : 0));
}

struct memory {
    struct kv_geometry geo;
    struct kv_memory kv;
    std::vector<block_id> blocks;
    size_t bytes;
};

static struct digest_desc desc(enum digest_order order, enum digest_kind kind, uint32_t rows,
                               uint32_t outliers, bool values)
{
    struct digest_desc d;
    memset(&d, 0, sizeof d);
    d.order = order;
    d.kind = kind;
    d.parts = order == ORDER_KMEANS ? 64 : SEGMENT_ROWS / rows;
    d.outliers = outliers;
    d.sinks = 16;
    d.values = values;
    return d;
}

static void refill(struct memory *m)
{
    size_t n = m->bytes / 2;
    fill<<<(unsigned)((n + 255) / 256), 256, 0, b->stream>>>(
        (__nv_bfloat16 *)m->kv.hbm[LANE_SPARSE], n, m->geo.block_rows);
}

/* Milliseconds of one segment: the first, or the median of the others. */
static double time_seal(struct memory *m, const struct digest_desc *d, bool first, int runs)
{
    std::vector<float> ms;
    cudaEvent_t begin, end;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    refill(m);
    for (int i = 0; i < runs; i++) {
        uint32_t segment = first ? 0 : 1 + (uint32_t)i % (SEGMENTS - 1);
        uint32_t at =
            (first ? (uint32_t)i % SEGMENTS : segment) * (SEGMENT_ROWS / m->geo.block_rows);
        struct seal_args a;
        memset(&a, 0, sizeof a);
        a.kv = &m->kv;
        a.desc = *d;
        a.from = a.to = &m->blocks[at];
        a.segment = segment;
        a.record = segment;
        a.first_record = 0;
        if (i % (SEGMENTS - 1) == 0)
            refill(m); /* rows lie in their first order again */
        b->base.ops->sync(&b->base);
        cudaEventRecord(begin, b->stream);
        b->base.ops->seal(&b->base, &a);
        cuda_flush(b);
        cudaEventRecord(end, b->stream);
        must(b->base.ops->sync(&b->base) == OK, "seal");
        float t;
        cudaEventElapsedTime(&t, begin, end);
        if (i > 0)
            ms.push_back(t);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
}

static void open_memory(struct memory *m, uint32_t rows)
{
    size_t record = 1 << 20;
    m->geo = {};
    m->geo.block_rows = rows;
    m->geo.layers = LAYERS;
    m->geo.kv_heads = HEADS;
    m->geo.head_dim = DIM;
    m->geo.page_bytes = (size_t)rows * DIM * 4;
    m->geo.n_lanes[LANE_SPARSE] = LAYERS * HEADS;
    m->geo.block_bytes[LANE_SPARSE] = LAYERS * HEADS * m->geo.page_bytes;
    uint32_t n = SEGMENTS * SEGMENT_ROWS / rows;
    m->bytes = n * m->geo.block_bytes[LANE_SPARSE];
    m->blocks.resize(n);
    for (uint32_t i = 0; i < n; i++)
        m->blocks[i] = i;
    m->kv = {};
    m->kv.geo = &m->geo;
    m->kv.hbm[LANE_SPARSE] = b->base.ops->alloc(&b->base, m->bytes);
    m->kv.records = b->base.ops->alloc(&b->base, record * LAYERS * HEADS);
    m->kv.record_lane_bytes = record / SEGMENTS;
    m->kv.record_bytes = m->kv.record_lane_bytes * LAYERS * HEADS;
    must(m->kv.hbm[LANE_SPARSE] != NULL && m->kv.records != NULL, "memory");
}

int main(int argc, char **argv)
{
    const int runs = argc > 1 ? atoi(argv[1]) : 13;
    struct cuda_options o = {};
    struct backend *be = NULL;
    if (spind_cuda_api.open(&be, &o) != OK) {
        fprintf(stderr, "%s\n", err_text());
        return 1;
    }
    b = (struct cuda_backend *)be;
    const double half = 1024.0 * DIM * 2 * LAYERS * HEADS; /* bytes of K */
    printf("# %s\n", be->ops->describe(be));
    static struct memory memories[3]; /* backends remember geometries by address */
    for (uint32_t i = 0; i < 2; i++) {
        struct memory *m = &memories[i];
        const uint32_t R = 8 << i;
        open_memory(m, R);
        const struct {
            const char *name;
            struct digest_desc d;
            bool first;
            int halves; /* K, V: read; and written */
        } cases[] = {
            {"kept-bounds", desc(ORDER_KEEP, DIGEST_BOUNDS, R, 0, false), false, 1},
            {"kept-centroids-1", desc(ORDER_KEEP, DIGEST_CENTROID, R, 1, true), false, 2},
            {"bisect-only", desc(ORDER_BISECT, DIGEST_NONE, R, 0, false), false, 4},
            {"bisect-centroids-0", desc(ORDER_BISECT, DIGEST_CENTROID, R, 0, true), false, 4},
            {"bisect-centroids-1", desc(ORDER_BISECT, DIGEST_CENTROID, R, 1, true), false, 4},
            {"bisect-codes", desc(ORDER_BISECT, DIGEST_CODES, R, 0, true), false, 4},
            {"bisect-codes-first", desc(ORDER_BISECT, DIGEST_CODES, R, 0, true), true, 4},
            {"kmeans-64", desc(ORDER_KMEANS, DIGEST_CENTROID, R, 0, true), false, 4},
        };
        for (const auto &c : cases) {
            char shape[64];
            snprintf(shape, sizeof shape, "8B/R%u/%s", R, c.name);
            kbench_bytes("seal", shape, time_seal(m, &c.d, c.first, runs) * 1e3, c.halves * half,
                         KBENCH_HBM_GBS);
        }
        be->ops->free(be, m->kv.hbm[LANE_SPARSE], m->bytes);
        be->ops->free(be, m->kv.records, (size_t)1 << 28);
    }
    be->ops->close(be);
    return 0;
}
