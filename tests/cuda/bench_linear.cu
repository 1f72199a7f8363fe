/* How near to the memory's speed do the linear layers of decode come, and when is cuBLAS faster?
 *
 * For every matrix of SmolLM2-135M and Llama-3.1-8B and 1 to 16 rows: the time of a call as cuda_linear has it
 * done and, with an argument, up to 8 rows by skinny.cu's plan and the best of all its plans and by cuBLAS with
 * what it needs around it (gather, norm, rounding, SwiGLU), with the weights' bytes per second as a share of
 * what a copy reaches on an H200. Calls follow each other in a graph, each on a copy of the weights of its own, of
 * more than twice the L2 cache in all. Then the wide way, 32 to 8192 rows of the larger model, as a share of the
 * memory's or of a large product's speed. Usage: bench_linear [best | all: print every plan, too | layer: a
 * layer's products behind each other, and that is all] */
#include "kernels/cuda/linear.h"
#include "kernels/cuda_api.h"
#include "tests/cuda/kbench.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

enum { REPEATS = 9 };
extern "C" const struct cuda_api spind_cuda_api;

struct shape {
    const char *name;
    uint32_t rows, cols;
    enum linear_out mode;
    bool norm;
};
static const struct shape shapes[] = {
    {"smol-qkv", 960, 576, LINEAR_STORE, true},
    {"smol-o", 576, 576, LINEAR_ADD, false},
    {"smol-gate+up", 3072, 576, LINEAR_SWIGLU, true},
    {"smol-down", 576, 1536, LINEAR_ADD, false},
    {"smol-head", 49152, 576, LINEAR_STORE, true},
    {"8B-qkv", 6144, 4096, LINEAR_STORE, true},
    {"8B-o", 4096, 4096, LINEAR_ADD, false},
    {"8B-gate+up", 28672, 4096, LINEAR_SWIGLU, true},
    {"8B-down", 4096, 14336, LINEAR_ADD, false},
    {"8B-head", 128256, 4096, LINEAR_STORE, true},
};

static struct cuda_backend *b;

static void must(bool good, const char *what)
{
    if (good && b->error == OK)
        return;
    fprintf(stderr, "%s: %s\n", what, b != NULL ? b->text : err_text());
    exit(1);
}

__global__ static void fill_bf16(__nv_bfloat16 *p, size_t n)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t h = (uint32_t)i * 0x9e3779b1u ^ 0x85ebca6bu;
    h = (h ^ h >> 15) * 0x2c1b3c6du;
    if (i < n)
        p[i] = __float2bfloat16((float)(int)(h ^ h >> 13) * 0x1p-34f);
}

__global__ static void fill_float(float *p, size_t n)
{
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t h = (uint32_t)i * 0x9e3779b1u;
    if (i < n)
        p[i] = (float)(int)((h ^ h >> 15) * 0x2c1b3c6du) * 0x1p-31f;
}

static float *floats(size_t n)
{
    float *p = NULL;
    must(cudaMalloc(&p, n * sizeof *p) == cudaSuccess, "cudaMalloc");
    fill_float<<<(unsigned)((n + 255) / 256), 256>>>(p, n);
    return p;
}

/* Copies of one matrix in one allocation. */
static std::vector<struct weight> copies(const struct shape *s)
{
    size_t one = (size_t)s->rows * s->cols;
    size_t n = std::max((size_t)4, (size_t)(256 << 20) / (one * 2) + 1);
    __nv_bfloat16 *p = NULL;
    must(cudaMalloc(&p, n * one * sizeof *p) == cudaSuccess, "cudaMalloc");
    fill_bf16<<<(unsigned)((n * one + 255) / 256), 256>>>(p, n * one);
    std::vector<struct weight> all;
    for (size_t i = 0; i < n; i++) {
        struct weight w = {};
        w.rows = s->rows;
        w.cols = w.pitch = s->cols;
        w.bytes = one * 2;
        w.values = p + i * one;
        all.push_back(w);
    }
    must(cudaDeviceSynchronize() == cudaSuccess, "fill");
    return all;
}

/* As cuda_linear chooses. */
static const struct skinny_plan by_rule = {};

/* Microseconds per call; plan NULL: cuBLASLt. */
static double time_calls(const std::vector<struct weight> &w, struct linear_args a,
                         const struct skinny_plan *plan)
{
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess, "events");
    std::vector<float> ms(REPEATS);
    for (int i = -3; i < REPEATS; i++) { /* a step that comes a third time is a graph */
        cudaEventRecord(begin, b->stream);
        for (size_t k = 0; k < w.size(); k++) {
            a.w = &w[k];
            if (plan == &by_rule)
                cuda_linear(&b->base, &a);
            else if (plan != NULL)
                cuda_skinny_run(b, &a, NULL, *plan);
            else
                cuda_linear_wide(b, &a, NULL);
        }
        cuda_flush(b);
        cudaEventRecord(end, b->stream);
        must(cudaEventSynchronize(end) == cudaSuccess, "run");
        cuda_step_end(b);
        if (i >= 0)
            cudaEventElapsedTime(&ms[(size_t)i], begin, end);
    }
    std::sort(ms.begin(), ms.end());
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return ms[REPEATS / 2] * 1e3 / (double)w.size();
}

/* tiles/slices/split/per_sm; valid until the next call */
static const char *plan_name(struct skinny_plan p)
{
    static char text[16];
    snprintf(text, sizeof text, "%u/%u/%u/%u", p.tiles, p.slices, p.split, p.per_sm);
    return text;
}

/* Every plan that there is, and cuBLAS, beside the one that is chosen. */
static void compare(const struct shape *s, const std::vector<struct weight> &w,
                    const struct linear_args &a, struct skinny_plan p, double own, bool all)
{
    struct skinny_plan best = p, q = {};
    double best_us = own, blas = time_calls(w, a, NULL);
    double floor_us = (double)s->rows * s->cols * 2 / KBENCH_HBM_GBS * 1e-3;
    for (int i = 0; i < 64; i++) { /* all there are */
        q.tiles = (uint8_t)(1 + i % 2);
        q.slices = (uint8_t)(1 << i / 2 % 4);
        q.split = (uint8_t)(1 << i / 8 % 4);
        q.per_sm = (uint8_t)(1 + i / 32);
        if ((s->mode == LINEAR_SWIGLU && q.tiles == 1) || q.split > q.slices ||
            cuda_skinny_shared(&a, q) > 110 << 10)
            continue;
        double us = time_calls(w, a, &q);
        if (all)
            printf("    %-12s n %u plan %s %7.2f us %5.1f %%\n", s->name, a.n_rows, plan_name(q),
                   us, 100 * floor_us / us);
        if (us < best_us)
            best_us = us, best = q;
    }
    printf("%-12s n %u  floor %7.2f us | plan %s %7.2f us %5.1f %% | ", s->name, a.n_rows, floor_us,
           plan_name(p), own, 100 * floor_us / own);
    printf("best %s %7.2f us %5.1f %% | cuBLAS %7.2f us %5.1f %%\n", plan_name(best), best_us,
           100 * floor_us / best_us, blas, 100 * floor_us / blas);
    fflush(stdout);
}

/* more: 0, 1: compare, 2: and print every plan */
static void measure(const struct shape *s, int more)
{
    enum { MAX_N = 16 };
    static const uint32_t ns[] = {1, 2, 4, 6, 8, 12, MAX_N};
    std::vector<struct weight> w = copies(s);
    float *in = floats((size_t)MAX_N * s->cols), *gain = floats(s->cols);
    float *out = floats((size_t)MAX_N * s->rows);
    char name[32];
    for (uint32_t n : ns) {
        struct linear_args a = {};
        a.w = &w[0];
        a.in = in;
        a.n_rows = n;
        a.norm_gain = s->norm ? gain : NULL;
        a.norm_eps = 1e-5f;
        a.mode = s->mode;
        a.out = out;
        double us = time_calls(w, a, &by_rule);
        snprintf(name, sizeof name, "%s/n%u", s->name, n);
        kbench_bytes("linear", name, us, (double)s->rows * s->cols * 2, KBENCH_HBM_GBS);
        if (more == 0 || n > SKINNY_ROWS)
            continue;
        struct skinny_plan p = cuda_skinny_plan(b, &a);
        compare(s, w, a, p, time_calls(w, a, &p), more > 1);
    }
    cudaFree(w[0].values);
    cudaFree(in);
    cudaFree(gain);
    cudaFree(out);
}

/* The products of a layer of Llama-3.1-8B behind each other, as the model has them: what lies between them counts, too.
 * Attention's result is floats here. */
static void measure_layer(void)
{
    enum { MOST = 64, LAYERS = 4, HIDDEN = 4096, FF = 14336, QKV = 6144 };
    static const uint32_t ns[] = {1, 8, 12, 16, 32, MOST};
    std::vector<struct weight> w[4];
    double bytes = 0;
    for (int i = 0; i < 4; i++) {
        const struct shape *s = &shapes[5 + i];
        w[i] = copies(s);
        bytes += (double)s->rows * s->cols * 2;
    }
    float *x = floats((size_t)MOST * HIDDEN), *gain = floats(HIDDEN),
          *att = floats((size_t)MOST * HIDDEN), *qkv = floats((size_t)MOST * QKV),
          *ff = floats((size_t)MOST * FF);
    for (uint32_t n : ns) {
        auto run = [&](int of, int layer, const float *in, float *out, const float *norm) {
            struct linear_args a = {};
            a.w = &w[of][(size_t)layer];
            a.in = in;
            a.n_rows = n;
            a.norm_gain = norm;
            a.norm_eps = 1e-5f;
            a.mode = shapes[5 + of].mode;
            a.out = out;
            a.to_linear = of == 2;
            a.from_linear = of == 3;
            cuda_linear(&b->base, &a);
        };
        cudaEvent_t begin, end;
        must(cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess,
             "events");
        std::vector<float> ms(REPEATS);
        for (int i = -3; i < REPEATS; i++) {
            cudaEventRecord(begin, b->stream);
            for (int layer = 0; layer < LAYERS; layer++) {
                run(0, layer, x, qkv, gain);
                run(1, layer, att, x, NULL);
                run(2, layer, x, ff, gain);
                run(3, layer, ff, x, NULL);
            }
            cuda_flush(b);
            cudaEventRecord(end, b->stream);
            must(cudaEventSynchronize(end) == cudaSuccess, "run");
            cuda_step_end(b);
            if (i >= 0)
                cudaEventElapsedTime(&ms[(size_t)i], begin, end);
        }
        std::sort(ms.begin(), ms.end());
        char name[32];
        snprintf(name, sizeof name, "8B-layer/n%u", n);
        kbench_bytes("linear", name, ms[REPEATS / 2] * 1e3 / LAYERS, bytes, KBENCH_HBM_GBS);
        cudaEventDestroy(begin);
        cudaEventDestroy(end);
    }
    for (auto &of : w)
        cudaFree(of[0].values);
    float *all[] = {x, gain, att, qkv, ff};
    for (float *p : all)
        cudaFree(p);
}

/* Batches and chunks: what cuBLASLt does with everything around it. */
static void measure_wide(const struct shape *s)
{
    uint32_t most = s->rows > 65536 ? 64 : 8192;
    std::vector<struct weight> w = copies(s);
    float *in = floats((size_t)most * s->cols), *gain = floats(s->cols);
    float *out = floats((size_t)most * s->rows);
    char name[32];
    if (strstr(s->name, "down") != NULL) /* what SWIGLU left is read as it is */
        fill_bf16<<<(unsigned)((size_t)most * s->cols / 256), 256>>>((__nv_bfloat16 *)in,
                                                                     (size_t)most * s->cols);
    for (uint32_t n = 32; n <= most; n *= n < 64 || n == 4096 ? 2 : 4) {
        struct linear_args a = {};
        a.w = &w[0];
        a.in = in;
        a.n_rows = n;
        a.norm_gain = s->norm ? gain : NULL;
        a.norm_eps = 1e-5f;
        a.mode = s->mode;
        a.out = out;
        a.to_linear = s->mode == LINEAR_SWIGLU;
        a.from_linear = strstr(s->name, "down") != NULL;
        double us = time_calls(w, a, NULL);
        snprintf(name, sizeof name, "%s/n%u", s->name, n);
        if (n <= 64)
            kbench_bytes("linear", name, us, (double)s->rows * s->cols * 2, KBENCH_HBM_GBS);
        else
            kbench_flops("linear", name, us, 2.0 * n * s->rows * s->cols, KBENCH_GEMM_TFLOPS);
    }
    cudaFree(w[0].values);
    cudaFree(in);
    cudaFree(gain);
    cudaFree(out);
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
    measure_layer();
    if (argc > 1 && strcmp(argv[1], "layer") == 0) {
        be->ops->close(be);
        return 0;
    }
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++)
        measure(&shapes[i], argc < 2 ? 0 : strcmp(argv[1], "all") == 0 ? 2 : 1);
    for (size_t i = 0; i < ARRAY_LEN(shapes); i++)
        if (strncmp(shapes[i].name, "8B", 2) == 0)
            measure_wide(&shapes[i]);
    be->ops->close(be);
    return 0;
}
