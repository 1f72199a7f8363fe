/* Products through cuBLASLt, whose kernel for a shape is chosen by measurement.
 *
 * The library's own first choice was up to 9 % slower than its best on an H200 (gate and up of
 * Llama-3.1-8B at 64 rows; 2 to 5 % from 2048 rows on). So when a weight's shape comes for the first time,
 * which is in the engine's warm-up, all that the library proposes for 16, 32, ... 8192 rows runs a few
 * times, and the fastest stays: some tenths of a second in all for that model, once in a process; without
 * memory for it the first proposal serves. Other numbers of rows take what the next power of two takes.
 *
 * Beyond SPLIT_ROWS rows nothing is proposed that splits the sum, since splitting pays no more and the
 * kernels that do not split add in one order: which of them was faster cannot be seen in a result, nor how
 * many rows came with a row (tests/cuda/linear.c sees to that). Up to there a proposal must be faster by more
 * than measurements differ. */
#include "kernels/cuda/linear.h"

#include <algorithm>
#include <string.h>

namespace
{

enum {
    PROPOSALS = 8,
    REPEATS = 4,
    SLOTS = 1024,     /* of the table: a power of two, of which half may be used */
    LEAST_ROWS = 16,  /* smaller products are alike, ... */
    MOST_ROWS = 8192, /* ... and so are larger ones */
    SPLIT_ROWS = GEMM_SPLIT_ROWS,
    PART_COLS = 128,            /* parts begin at multiples of 256 bytes */
    COLD_BYTES = 128 << 20,     /* written between two runs: weights come from HBM, as in a step */
    MOST_OUT_BYTES = 512 << 20, /* larger results are not tried out ahead */
};

} /* namespace */

struct gemm_entry {
    struct gemm_shape key; /* w_rows 0: free */
    cublasLtMatmulAlgo_t algo;
    float ms;       /* that a run took; 0: nobody knows */
    uint32_t parts; /* of one part: how many are best; 0: not chosen yet */
};

namespace
{

/* What cuBLASLt wants to know about one product; all of it lies on the stack. out^T = W x^T: it thinks in
 * columns. */
struct product {
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t w, x, out;
};

/* Parts of a product are a batch of products. */
bool describe_parts(cublasLtMatrixLayout_t m, uint32_t parts, int64_t apart)
{
    const int32_t n = (int32_t)parts;
    return parts <= 1 ||
           (cublasLtMatrixLayoutSetAttribute(m, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n) ==
                CUBLAS_STATUS_SUCCESS &&
            cublasLtMatrixLayoutSetAttribute(m, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &apart,
                                             sizeof apart) == CUBLAS_STATUS_SUCCESS);
}

bool describe(struct product *p, const struct gemm_shape *s)
{
    cublasOperation_t turned = CUBLAS_OP_T;
    cudaDataType_t type = s->half ? CUDA_R_16BF : CUDA_R_32F;
    const uint32_t cols = s->parts > 1 ? s->pitch / s->parts : s->pitch;
    return cublasLtMatmulDescInit(&p->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
               CUBLAS_STATUS_SUCCESS &&
           cublasLtMatmulDescSetAttribute(&p->desc, CUBLASLT_MATMUL_DESC_TRANSA, &turned,
                                          sizeof turned) == CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutInit(&p->w, CUDA_R_16BF, cols, s->w_rows, s->pitch) ==
               CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutInit(&p->x, CUDA_R_16BF, cols, s->n, s->pitch) ==
               CUBLAS_STATUS_SUCCESS &&
           cublasLtMatrixLayoutInit(&p->out, type, s->w_rows, s->n, s->w_rows) ==
               CUBLAS_STATUS_SUCCESS &&
           describe_parts(&p->w, s->parts, cols) && describe_parts(&p->x, s->parts, cols) &&
           describe_parts(&p->out, s->parts, (int64_t)s->n * s->w_rows);
}

bool prefer(cublasLtMatmulPreference_t pref, const struct gemm_shape *s, size_t workspace)
{
    /* Parts of a sum that ends as bf16 are added as floats: where they were bf16 (OUTPUT_TYPE), a row of gate and
     * up was 1.2 % off. */
    const uint32_t sums = s->n > SPLIT_ROWS || s->parts > 1 ? CUBLASLT_REDUCTION_SCHEME_NONE
                          : s->half                         ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE
                                                            : CUBLASLT_REDUCTION_SCHEME_MASK;
    const struct {
        cublasLtMatmulPreferenceAttributes_t what;
        const void *value;
        size_t bytes;
    } all[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &s->align, sizeof s->align},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &s->align, sizeof s->align},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &sums, sizeof sums},
    };
    bool good = cublasLtMatmulPreferenceInit(pref) == CUBLAS_STATUS_SUCCESS;
    for (size_t i = 0; i < ARRAY_LEN(all); i++)
        good = good && cublasLtMatmulPreferenceSetAttribute(pref, all[i].what, all[i].value,
                                                            all[i].bytes) == CUBLAS_STATUS_SUCCESS;
    return good;
}

uint32_t propose(struct cuda_backend *b, const struct gemm_shape *s,
                 cublasLtMatmulHeuristicResult_t *all)
{
    struct product p;
    cublasLtMatmulPreferenceOpaque_t pref;
    int n = 0;
    if (!describe(&p, s) || !prefer(&pref, s, b->linear->workspace_bytes) ||
        cublasLtMatmulAlgoGetHeuristic(b->linear->lt, &p.desc, &p.w, &p.x, &p.out, &p.out, &pref,
                                       PROPOSALS, all, &n) != CUBLAS_STATUS_SUCCESS)
        return 0;
    return (uint32_t)n;
}

/* Runs one proposal; milliseconds of the fastest run, or 1e30. */
float time_proposal(struct cuda_backend *b, const struct gemm_call *c, void *cold,
                    cudaEvent_t begin, cudaEvent_t end)
{
    float best = 1e30f, ms = 0;
    for (int i = 0; i <= REPEATS; i++) {
        (void)cudaMemsetAsync(cold, i, COLD_BYTES, b->stream);
        (void)cudaEventRecord(begin, b->stream);
        if (!cuda_gemm_run(b, c))
            return 1e30f;
        (void)cudaEventRecord(end, b->stream);
        if (!cuda_ended(b, end, "choosing a kernel") ||
            cudaEventElapsedTime(&ms, begin, end) != cudaSuccess)
            return 1e30f;
        if (i > 0)
            best = std::min(best, ms);
    }
    return best;
}

/* The number of the proposal to use, and the time that it took (0: nobody knows). */
uint32_t choose(struct cuda_backend *b, const struct gemm_call *like,
                const cublasLtMatmulHeuristicResult_t *all, uint32_t n, float *took)
{
    struct gemm_call c = *like;
    cudaEvent_t begin = NULL, end = NULL;
    void *out = NULL, *cold = NULL;
    size_t out_bytes = (size_t)c.shape.n * c.shape.w_rows * (c.shape.half ? 2 : 4);
    float ms[PROPOSALS] = {}, best = 1e30f;
    uint32_t which = 0;
    out_bytes *= std::max(c.shape.parts, 1u);
    *took = 0;
    if ((n > 1 || c.shape.parts > 0) && cudaMalloc(&out, out_bytes) == cudaSuccess &&
        cudaMalloc(&cold, COLD_BYTES) == cudaSuccess && cudaEventCreate(&begin) == cudaSuccess &&
        cudaEventCreate(&end) == cudaSuccess) {
        c.out = out;
        (void)cudaMemsetAsync(out, 0, out_bytes, b->stream);
        for (uint32_t i = 0; i < n; i++) {
            c.algo = all[i].algo;
            ms[i] = time_proposal(b, &c, cold, begin, end);
            best = std::min(best, ms[i]);
        }
        float enough = best * (c.shape.n <= SPLIT_ROWS ? 1.03f : 1.0f);
        while (which + 1 < n && ms[which] > enough)
            which++;
        *took = ms[which];
    }
    (void)cudaGetLastError();
    if (begin != NULL)
        cudaEventDestroy(begin);
    if (end != NULL)
        cudaEventDestroy(end);
    if (!b->gone) { /* to free would wait */
        cudaFree(out);
        cudaFree(cold);
    }
    return which;
}

uint32_t power_of_two(uint32_t n)
{
    uint32_t p = LEAST_ROWS;
    while (p < n && p < MOST_ROWS)
        p *= 2;
    return p;
}

struct gemm_entry *find_entry(struct cuda_linear *l, const struct gemm_shape *key)
{
    uint32_t h = key->w_rows * 0x9e3779b1u ^ key->pitch * 0x85ebca6bu ^ key->n * 0xc2b2ae35u ^
                 (key->parts << 9 | key->align << 3 | key->half << 1 | key->add);
    uint32_t at = (h ^ h >> 15) & (SLOTS - 1);
    while (l->gemms[at].key.w_rows != 0 && memcmp(&l->gemms[at].key, key, sizeof *key) != 0)
        at = (at + 1) & (SLOTS - 1);
    return &l->gemms[at];
}

} /* namespace */

static struct gemm_entry *entry_for(struct cuda_linear *l, const struct gemm_shape *s,
                                    struct gemm_shape *key)
{
    if (l->gemms == NULL)
        l->gemms = (struct gemm_entry *)mem_alloc(SLOTS * sizeof *l->gemms);
    memset(key, 0, sizeof *key);
    key->w_rows = s->w_rows;
    key->pitch = s->pitch;
    key->n = power_of_two(s->n);
    key->align = s->align;
    key->parts = s->parts;
    key->add = s->add;
    key->half = s->half;
    return find_entry(l, key);
}

/* Fills in algo and, where it was measured, tells the time; false: there is no kernel. */
static bool find_algo(struct cuda_backend *b, struct gemm_call *c, float *ms)
{
    struct cuda_linear *l = b->linear;
    cublasLtMatmulHeuristicResult_t all[PROPOSALS];
    struct gemm_shape key;
    struct gemm_entry *e = entry_for(l, &c->shape, &key);
    if (e->key.w_rows != 0) {
        c->algo = e->algo;
        *ms = e->ms;
        return true;
    }
    uint32_t n = propose(b, &c->shape, all);
    if (n == 0)
        return false;
    bool room = 2 * l->n_gemms < SLOTS;
    *ms = 0;
    c->algo = all[room ? choose(b, c, all, n, ms) : 0].algo;
    if (room) {
        e->key = key;
        e->algo = c->algo;
        e->ms = *ms;
        l->n_gemms++;
    }
    return true;
}

bool cuda_gemm_prepare(struct cuda_backend *b, struct gemm_call *c)
{
    float ms;
    return find_algo(b, c, &ms) || cuda_ok(b, cudaErrorUnknown, "linear: cuBLASLt has no kernel");
}

/* How many parts are fastest, with who adds them up: a row's CTA reads some 60 bytes a nanosecond. One part may be
 * one that cuBLASLt splits and adds up itself. */
static uint32_t choose_parts(struct cuda_backend *b, const struct gemm_call *like)
{
    const float ms_per_byte = 1e-6f / 60;
    struct gemm_call c = *like;
    uint32_t best = 1;
    float least = 0, ms;
    for (c.shape.parts = 1; c.shape.parts <= GEMM_PARTS; c.shape.parts *= 2) {
        if (c.shape.pitch % (c.shape.parts * PART_COLS) != 0 || !find_algo(b, &c, &ms) || ms == 0)
            continue;
        ms += (float)c.shape.parts * (float)c.shape.w_rows * sizeof(float) * ms_per_byte;
        if (least == 0 || ms < 0.98f * least) { /* more by than measurements differ */
            least = ms;
            best = c.shape.parts;
        }
    }
    return best;
}

bool cuda_gemm_prepare_parts(struct cuda_backend *b, struct gemm_call *c)
{
    struct gemm_shape key;
    c->shape.parts = 1;
    if (!cuda_gemm_prepare(b, c))
        return false;
    struct gemm_entry *e = entry_for(b->linear, &c->shape, &key);
    if (e->key.w_rows == 0) /* the table is full */
        return true;
    if (e->parts == 0)
        e->parts = choose_parts(b, c);
    c->shape.parts = e->parts;
    return e->parts == 1 || cuda_gemm_prepare(b, c);
}

bool cuda_gemm_is_known(struct cuda_backend *b, const struct gemm_shape *s)
{
    struct gemm_shape key;
    return entry_for(b->linear, s, &key)->key.w_rows != 0;
}

void cuda_gemm_warm(struct cuda_backend *b, const struct gemm_call *like, uint32_t most)
{
    struct gemm_call c = *like;
    size_t row = (size_t)c.shape.w_rows * (c.shape.half ? 2 : 4);
    for (c.shape.n = LEAST_ROWS; c.shape.n <= std::min(most, (uint32_t)MOST_ROWS); c.shape.n *= 2) {
        const bool parts = like->shape.parts > 0 && c.shape.n <= SPLIT_ROWS;
        c.shape.parts = 0;
        c.shape.add = like->shape.add || (like->shape.parts > 0 && !parts);
        if (c.shape.n * row <= MOST_OUT_BYTES)
            (void)(parts ? cuda_gemm_prepare_parts(b, &c) : cuda_gemm_prepare(b, &c));
    }
}

bool cuda_gemm_run(struct cuda_backend *b, const struct gemm_call *c)
{
    struct product p;
    float one = 1, beta = c->shape.add ? 1.0f : 0.0f;
    return describe(&p, &c->shape) &&
           cublasLtMatmul(b->linear->lt, &p.desc, &one, c->w, &p.w, c->x, &p.x, &beta, c->out,
                          &p.out, c->out, &p.out, &c->algo, b->linear->workspace,
                          b->linear->workspace_bytes, b->stream) == CUBLAS_STATUS_SUCCESS;
}
