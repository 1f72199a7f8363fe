/* How fast is causal attention over a prompt, and what do pages cost?
 *
 * The shape of Llama-3.1-8B (32 heads, 8 KV heads, head_dim 128). A prompt of n positions goes in chunks
 * of 8192 rows, each after what lies before it; TFLOP/s count the products that causality leaves. cuDNN
 * contiguous with a plan of the exact shape is the bar. Every variant's result is compared with a plain
 * kernel's on some rows first. Then the
 * operation, own kernel against cuDNN's, by rows: from how many on is cuDNN faster? "layer": as in a model's layer,
 * where append leaves q as bf16. Usage: bench_prefill [longest [shortest [number of a variant; more: the
 * operation]]] */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/cudnn.h"
#include "kernels/cuda/prefill.h"
#include "kernels/cuda_api.h"
#include "tests/cuda/kbench.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

enum { HEADS = 32, KV_HEADS = 8, GROUP = HEADS / KV_HEADS, DIM = 128, CHUNK = 8192, REPEATS = 5 };
enum { CHECKED = 16, VARIANTS = 8 };
extern "C" const struct cuda_api spind_cuda_api;

static struct cuda_backend *b;
static struct cudnn *library;

static void must(bool good, const char *what)
{
    if (good && b->error == OK)
        return;
    fprintf(stderr, "%s: %s %s\n", what, b->text, cudaGetErrorString(cudaGetLastError()));
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

__global__ static void fill(__nv_bfloat16 *p, size_t n, uint32_t seed)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = ((uint32_t)i + seed * 7919u) * 0x9e3779b1u ^ 0x85ebca6bu;
        h = (h ^ h >> 15) * 0x2c1b3c6du;
        p[i] = __float2bfloat16((float)(int)(h ^ h >> 13) * 0x1p-31f);
    }
}

__global__ static void fill_floats(float *p, size_t n)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 0x9e3779b1u;
        p[i] = (float)(int)((h ^ h >> 15) * 0x2c1b3c6du) * 0x1p-31f;
    }
}

static void *memory(size_t bytes, uint32_t seed)
{
    void *p = NULL;
    must(cudaMalloc(&p, bytes) == cudaSuccess, "cudaMalloc");
    fill<<<1024, 256>>>((__nv_bfloat16 *)p, bytes / 2, seed);
    return p;
}

/* Where K and V of a position lie. */
struct kv {
    const __nv_bfloat16 *k, *v;
    size_t row, head;     /* strides without pages */
    const int32_t *pages; /* of head 0, then of the next; NULL: none */
    uint32_t page_rows, table;
};

__device__ static size_t kv_at(const struct kv *x, uint32_t head, uint32_t pos)
{
    if (x->pages == NULL)
        return pos * x->row + head * x->head;
    size_t page = (size_t)x->pages[head * x->table + pos / x->page_rows];
    return page * 2 * x->page_rows * DIM + pos % x->page_rows * DIM;
}

/* The largest difference between o and the truth, for a row and a head a block: 128 threads, of which each
 * has every 128th position, then a number of the result. */
__global__ static void check_kernel(struct kv x, const __nv_bfloat16 *q, const __nv_bfloat16 *o,
                                    const uint32_t *rows, uint32_t n_rows, uint32_t n_positions,
                                    float scale, float *scores, float *worst)
{
    const uint32_t row = rows[blockIdx.x], head = blockIdx.y, kv_head = head / GROUP;
    const uint32_t n = n_positions - n_rows + row + 1, t = threadIdx.x;
    float *s = scores + (size_t)(blockIdx.x * HEADS + head) * n_positions;
    __shared__ float sums[2][128];
    const __nv_bfloat16 *mine = q + ((size_t)row * HEADS + head) * DIM;
    float most = -1e30f, sum = 0, out = 0;
    for (uint32_t p = t; p < n; p += 128) {
        const __nv_bfloat16 *k = x.k + kv_at(&x, kv_head, p);
        float dot = 0;
        for (int i = 0; i < DIM; i++)
            dot += __bfloat162float(mine[i]) * __bfloat162float(k[i]);
        s[p] = dot * scale;
        most = fmaxf(most, s[p]);
    }
    sums[0][t] = most;
    __syncthreads();
    for (int i = 0; i < 128; i++)
        most = fmaxf(most, sums[0][i]);
    for (uint32_t p = t; p < n; p += 128)
        sum += expf(s[p] - most);
    sums[1][t] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < 128; i++)
        sum += sums[1][i];
    for (uint32_t p = 0; p < n; p++)
        out += expf(s[p] - most) / sum * __bfloat162float(x.v[kv_at(&x, kv_head, p) + t]);
    float got = __bfloat162float(o[((size_t)row * HEADS + head) * DIM + t]);
    float e = fabsf(got - out);
    atomicMax((int *)worst, __float_as_int(e == e ? e : 1e30f));
}

/* One way to attend a prompt. */
struct variant {
    const char *name;
    struct cudnn_shape shape;
    uint32_t chunk;
};

static struct cudnn_shape contiguous(uint32_t rows, uint32_t positions)
{
    struct cudnn_shape s = {};
    s.batch = 1;
    s.heads = HEADS;
    s.kv_heads = KV_HEADS;
    s.dim = DIM;
    s.rows = rows;
    s.positions = positions;
    s.q_batch = (size_t)rows * HEADS * DIM;
    s.q_head = DIM;
    s.q_row = HEADS * DIM;
    s.kv_batch = (size_t)positions * KV_HEADS * DIM;
    s.kv_head = DIM;
    s.kv_row = KV_HEADS * DIM;
    return s;
}

/* Lengths are the plan's, not in device memory. */
static struct cudnn_shape exact(uint32_t rows, uint32_t positions)
{
    struct cudnn_shape s = contiguous(rows, positions);
    s.exact = true;
    return s;
}

/* As it would be if each head's K lay together. */
static struct cudnn_shape by_head(uint32_t rows, uint32_t positions)
{
    struct cudnn_shape s = contiguous(rows, positions);
    s.kv_head = (size_t)positions * DIM;
    s.kv_row = DIM;
    return s;
}

static struct cudnn_shape paged(uint32_t rows, uint32_t positions, uint32_t page_rows)
{
    struct cudnn_shape s = contiguous(rows, positions);
    s.batch = KV_HEADS;
    s.heads = GROUP;
    s.kv_heads = 1;
    s.q_batch = GROUP * DIM;
    s.page_rows = page_rows;
    s.page_stride = 2 * (size_t)page_rows * DIM;
    s.n_pages = positions / page_rows * KV_HEADS;
    return s;
}

/* The memory of a prompt of `longest` positions, whatever the variant. */
static struct {
    __nv_bfloat16 *q, *o;
    uint8_t *kv, *workspace;
    int32_t *lengths, *pages;
    float *floats, *results, *angles; /* of the operation */
    size_t n_floats;
    float *scores, *worst, *lse;
    uint32_t *rows, longest;
    size_t workspace_bytes;
} m;

static void make_pages(const struct cudnn_shape *s)
{
    uint32_t n = s->positions / s->page_rows;
    std::vector<int32_t> t((size_t)n * KV_HEADS);
    for (uint32_t h = 0; h < KV_HEADS; h++)
        for (uint32_t i = 0; i < n;
             i++) /* a block holds one page of every head; n: a power of two */
            t[(size_t)h * n + i] = (int32_t)((i * 2654435761u % n) * KV_HEADS + h);
    cudaMemcpy(m.pages, t.data(), t.size() * 4, cudaMemcpyHostToDevice);
}

/* Rows [n - rows, n) of a prompt. */
static void run(struct cudnn_plan *p, const struct cudnn_shape *s, uint32_t rows, uint32_t n,
                const __nv_bfloat16 *q, __nv_bfloat16 *o)
{
    struct cudnn_data d = {};
    size_t v = s->page_rows != 0 ? (size_t)s->page_rows * DIM : (size_t)m.longest * KV_HEADS * DIM;
    d.q = q;
    d.k = m.kv;
    d.v = (const __nv_bfloat16 *)m.kv + v;
    d.o = o;
    d.lse = m.lse;
    d.n_rows = m.lengths + (rows - 1) / 1024 * KV_HEADS;
    d.n_positions = m.lengths + (n - 1) / 1024 * KV_HEADS;
    d.pages = m.pages;
    d.workspace = m.workspace;
    d.scale = 0.0883883476f;
    const char *e = cudnn_run(library, p, &d, b->stream);
    if (e != NULL)
        printf("  %s\n", e);
}

static void prompt(struct cudnn_plan *p, const struct variant *v, uint32_t n)
{
    for (uint32_t at = 0; at < n; at += v->chunk)
        run(p, &v->shape, std::min(v->chunk, n - at), std::min(n, at + v->chunk),
            m.q + (size_t)at * HEADS * DIM, m.o + (size_t)at * HEADS * DIM);
}

static float check(const struct variant *v, uint32_t n)
{
    const struct cudnn_shape *s = &v->shape;
    std::vector<uint32_t> rows(CHECKED);
    for (uint32_t i = 0; i < CHECKED; i++)
        rows[i] = i == 0 ? 0 : i == 1 ? n - 1 : (uint32_t)((uint64_t)i * 2654435761u % n);
    cudaMemcpy(m.rows, rows.data(), rows.size() * 4, cudaMemcpyHostToDevice);
    cudaMemset(m.worst, 0, 4);
    struct kv x = {};
    x.k = (const __nv_bfloat16 *)m.kv;
    x.v =
        x.k + (s->page_rows != 0 ? (size_t)s->page_rows * DIM : (size_t)m.longest * KV_HEADS * DIM);
    x.row = s->kv_row;
    x.head = s->kv_head;
    x.page_rows = s->page_rows;
    if (s->page_rows != 0) {
        x.pages = m.pages;
        x.table = s->positions / s->page_rows;
    }
    check_kernel<<<dim3(CHECKED, HEADS), 128, 0, b->stream>>>(x, m.q, m.o, m.rows, n, n,
                                                              0.0883883476f, m.scores, m.worst);
    float worst = -1;
    cudaMemcpy(&worst, m.worst, 4, cudaMemcpyDeviceToHost);
    must(cudaDeviceSynchronize() == cudaSuccess, "check");
    return worst;
}

static void measure(const struct variant *v, uint32_t n)
{
    double begin_s = now();
    struct cudnn_plan *p = cudnn_plan_create(library, &v->shape);
    if (p == NULL) {
        printf("%-34s %6u  %s\n", v->name, n, cudnn_text(library));
        return;
    }
    double build = now() - begin_s;
    if (cudnn_workspace(p) > m.workspace_bytes) {
        printf("%-34s workspace of %zu\n", v->name, cudnn_workspace(p));
        return;
    }
    if (v->shape.page_rows != 0)
        make_pages(&v->shape);
    cudaMemset(m.o, 0xff, (size_t)n * HEADS * DIM * 2);
    cudaEvent_t begin, end;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    prompt(p, v, n);
    must(cudaDeviceSynchronize() == cudaSuccess, v->name);
    float worst = check(v, n);
    std::vector<float> ms(REPEATS);
    for (int i = 0; i < REPEATS; i++) {
        cudaEventRecord(begin, b->stream);
        prompt(p, v, n);
        cudaEventRecord(end, b->stream);
        must(cudaEventSynchronize(end) == cudaSuccess, v->name);
        cudaEventElapsedTime(&ms[(size_t)i], begin, end);
    }
    std::sort(ms.begin(), ms.end());
    double flops = 2.0 * HEADS * DIM * (double)n * ((double)n + 1);
    printf("%-34s %6u  %8.3f ms %6.1f TFLOP/s  off %.1e  built in %.2f s, workspace %zu\n", v->name,
           n, (double)ms[REPEATS / 2], flops / ms[REPEATS / 2] * 1e-9, (double)worst, build,
           cudnn_workspace(p));
    fflush(stdout);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudnn_plan_destroy(p);
}

/* The operation itself, with pages of R, on `rows` rows behind n - rows; layer: append came before, and has left q as
 * it is wanted. The device is busy before, so that nothing of the host's is measured. */
static double time_attend(uint32_t R, uint32_t rows, uint32_t n, bool layer)
{
    const uint32_t blocks = n / R;
    struct kv_geometry geo = {};
    geo.block_rows = R;
    geo.layers = 1;
    geo.kv_heads = KV_HEADS;
    geo.head_dim = DIM;
    geo.page_bytes = (size_t)R * DIM * 4;
    geo.n_lanes[0] = KV_HEADS;
    geo.block_bytes[0] = KV_HEADS * geo.page_bytes;
    struct kv_memory kv = {};
    kv.geo = &geo;
    kv.hbm[0] = m.kv;
    std::vector<block_id> table(blocks);
    for (uint32_t i = 0; i < blocks; i++)
        table[i] = (uint32_t)((uint64_t)i * 2654435761u % blocks);
    struct batch_seq q = {};
    q.n_rows = rows;
    q.first_pos = n - rows;
    q.blocks[0] = table.data();
    struct append_args before = {};
    before.kv = &kv;
    before.heads = HEADS;
    before.seqs = &q;
    before.n_seqs = 1;
    before.rope_cos = before.rope_sin = m.angles;
    before.qkv = m.floats;
    before.to_attend = true;
    struct attend_args a = {};
    a.kv = &kv;
    a.heads = HEADS;
    a.seqs = &q;
    a.n_seqs = 1;
    a.scale = 0.0883883476f;
    a.qkv = m.floats;
    a.out = m.results;
    std::vector<float> ms(REPEATS);
    cudaEvent_t begin, end;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (int i = -2; i < REPEATS; i++) {
        for (int busy = 0; busy < 4; busy++)
            fill_floats<<<1024, 256, 0, b->stream>>>(m.floats, m.n_floats);
        if (layer)
            b->base.ops->append(&b->base, &before);
        cuda_flush(b);
        cudaEventRecord(begin, b->stream);
        b->base.ops->attend(&b->base, &a);
        cuda_flush(b);
        cudaEventRecord(end, b->stream);
        must(b->base.ops->sync(&b->base) == OK, err_text());
        if (i >= 0)
            cudaEventElapsedTime(&ms[(size_t)i], begin, end);
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    std::sort(ms.begin(), ms.end());
    return (double)ms[REPEATS / 2];
}

static void measure_attend(uint32_t R, uint32_t rows, uint32_t n, uint32_t least, bool layer,
                           const char *name)
{
    cuda_prefill_least(b, least);
    const double ms = time_attend(R, rows, n, layer);
    const double keys = (double)n * (n + 1) / 2 - (double)(n - rows) * (double)(n - rows + 1) / 2;
    printf("%s R %2u  %5u rows of %6u  %8.3f ms %6.1f TFLOP/s\n", name, R, rows, n, ms,
           4.0 * HEADS * DIM * keys / ms * 1e-9);
    fflush(stdout);
    if (least == 1 && rows >= 640) {
        char shape[48];
        snprintf(shape, sizeof shape, "R%u/%uof%u%s", R, rows, n, layer ? "/layer" : "");
        kbench_flops("prefill", shape, ms * 1e3, 4.0 * HEADS * DIM * keys, KBENCH_CUDNN_TFLOPS);
    }
}

/* A prompt of n positions by chunks, to compare with "exact, one call". */
static void measure_prompt(uint32_t R, uint32_t n)
{
    double ms = 0;
    cuda_prefill_least(b, 1);
    for (uint32_t at = 0; at < n; at += CHUNK)
        ms += time_attend(R, std::min(n - at, (uint32_t)CHUNK), std::min(n, at + CHUNK), true);
    printf("layer R %2u  a prompt of %6u  %8.3f ms %6.1f TFLOP/s\n", R, n, ms,
           2.0 * HEADS * DIM * (double)n * ((double)n + 1) / ms * 1e-9);
    fflush(stdout);
}

static void wait_for_plans(void)
{
    bool bad;
    cuda_prefill_least(b, 1);
    for (int i = 0; i < 100 && b->base.ops->news(&b->base, &bad) == NULL; i++) {
        measure_attend(16, 512, 2048, 1, false, "first");
        const struct timespec t = {0, 100000000};
        nanosleep(&t, NULL);
    }
}

static void open_operation(void)
{
    const size_t row = (size_t)(HEADS + 2 * KV_HEADS) * DIM * 4;
    m.n_floats = CHUNK * row / 4;
    m.floats = (float *)memory(CHUNK * row, 11);
    m.results = (float *)memory((size_t)CHUNK * HEADS * DIM * 4, 12);
    m.angles = (float *)memory((size_t)m.longest * DIM * 2, 13);
    fill_floats<<<1024, 256>>>(m.floats, m.n_floats);
    wait_for_plans();
}

static void measure_operation(void)
{
    for (uint32_t n = 2048; n <= m.longest; n *= n == 2048 || n == 8192 ? 4 : 2)
        for (uint32_t rows = 512; rows <= std::min(n, (uint32_t)CHUNK); rows *= 2) {
            measure_attend(16, rows, n, ~0u, false, "own  ");
            measure_attend(16, rows, n, 1, false, "cuDNN");
            if (rows >= 2048)
                measure_attend(8, rows, n, 1, false, "cuDNN");
            if (rows >= 2048)
                measure_attend(16, rows, n, 1, true, "layer");
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
    const char *why = NULL;
    double begin = now();
    library = cudnn_open(&why);
    printf("%s\ncuDNN: %s, opened in %.2f s\n", be->ops->describe(be), why != NULL ? why : "there",
           now() - begin);
    if (library == NULL)
        return 1;
    m.longest = argc > 1 ? (uint32_t)atoi(argv[1]) : 65536;
    size_t row = (size_t)HEADS * DIM * 2;
    m.q = (__nv_bfloat16 *)memory(m.longest * row, 1);
    m.o = (__nv_bfloat16 *)memory((m.longest + CHUNK) * row, 2);
    m.kv = (uint8_t *)memory((size_t)(m.longest + 256) * KV_HEADS * DIM * 4, 3);
    m.workspace_bytes = 256 << 20;
    m.workspace = (uint8_t *)memory(m.workspace_bytes, 4);
    m.pages = (int32_t *)memory((size_t)m.longest / 8 * KV_HEADS * 4 + (64 << 20), 5);
    m.scores = (float *)memory((size_t)CHECKED * HEADS * m.longest * 4, 6);
    m.worst = (float *)memory(256, 7);
    m.lse = (float *)memory((size_t)HEADS * m.longest * 4, 10);
    m.rows = (uint32_t *)memory(CHECKED * 4, 8);
    std::vector<int32_t> lengths;
    for (uint32_t i = 0; i < m.longest / 1024; i++)
        lengths.insert(lengths.end(), KV_HEADS, (int32_t)((i + 1) * 1024));
    m.lengths = (int32_t *)memory(lengths.size() * 4, 9);
    cudaMemcpy(m.lengths, lengths.data(), lengths.size() * 4, cudaMemcpyHostToDevice);
    must(cudaDeviceSynchronize() == cudaSuccess, "memory");
    uint32_t shortest = argc > 2 ? (uint32_t)atoi(argv[2]) : 2048;
    for (uint32_t n = shortest; n <= m.longest; n *= n == 2048 || n == 8192 ? 4 : 2) {
        uint32_t chunk = std::min(n, (uint32_t)CHUNK), most = 1 << 20;
        const struct variant all[VARIANTS] = {
            {"exact, one call", exact(n, n), n},
            {"contiguous, one call", contiguous(n, n), n},
            {"contiguous by head, one call", by_head(n, n), n},
            {"contiguous, chunks", contiguous(chunk, n), chunk},
            {"contiguous, 8192 x 1M, chunks", contiguous(CHUNK, most), chunk},
            {"pages of 32, chunks", paged(chunk, n, 32), chunk},
            {"pages of 16, chunks", paged(chunk, n, 16), chunk},
            {"pages of 8, chunks", paged(chunk, n, 8), chunk},
        };
        for (size_t i = 0; i < VARIANTS; i++)
            if (argc <= 3 || (size_t)atoi(argv[3]) == i)
                measure(&all[i], n);
    }
    if (argc > 3 && (size_t)atoi(argv[3]) < (size_t)VARIANTS)
        return 0;
    open_operation();
    if (argc <= 3)
        measure_operation();
    for (uint32_t n = std::max(shortest, (uint32_t)CHUNK); n <= m.longest; n *= 2)
        measure_prompt(16, n);
    be->ops->close(be);
    return 0;
}
