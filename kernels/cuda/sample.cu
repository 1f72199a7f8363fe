/* Sampling and scoring of rows of logits on the device, in vLLM's order, as kernels/cpu/sample.c has it
 * (reference/models.md 7.1): banned ids and biases; penalties; greedy, or temperature, min_p, top_k, top_p
 * and one draw; logprobs of the raw logits.
 *
 * Rows of a vocabulary are 0.2 to 0.6 MB and lie in L2 when the head has written them. Their greatest logits are
 * found by many blocks: that is all a greedy row needs. Then a block per row: a pass costs it 2 to 6 us, a
 * filtered draw is three. Probabilities are
 * summed as whole numbers of 2^-40 of the greatest, so no order of addition can be seen and a draw is
 * the same alone and in a batch. Only tokens whose logits nearly tie can differ from the CPU's.
 *
 * The kernel writes results to the device, where the next step finds its tokens, and to pinned memory, from
 * where sync or wait hands them out. */
#include "kernels/core/philox.h"
#include "kernels/cuda/sample.h"

/* Of a step that was queued. */
struct results {
    struct drawn *host; /* pinned [max_rows] */
    uint32_t max_rows, n_rows;
    uint64_t step;
    struct sample_row *rows; /* of the caller, who waits for them */
};

struct cuda_sampler {
    float *x;           /* [rows][vocab] logits as changed by lists and penalties */
    uint32_t *seen;     /* [rows][vocab] */
    uint32_t *ids;      /* [rows][vocab] candidates */
    struct peak *peaks; /* [rows][SAMPLE_PARTS] */
    size_t x_bytes, seen_bytes, ids_bytes, peaks_bytes;
    struct drawn *out; /* [rows] device: the next step takes its tokens from here */
    size_t out_bytes;
    struct results results[2]; /* the oldest is results[first] */
    uint32_t first, n_results;
};

status cuda_sample_open(struct cuda_backend *b)
{
    b->sampler = (struct cuda_sampler *)mem_alloc(sizeof *b->sampler);
    return OK;
}

void cuda_sample_close(struct cuda_backend *b)
{
    struct cuda_sampler *s = b->sampler;
    if (s == NULL)
        return;
    cudaFree(s->x);
    cudaFree(s->seen);
    cudaFree(s->ids);
    cudaFree(s->peaks);
    cudaFree(s->out);
    cudaFreeHost(s->results[0].host);
    cudaFreeHost(s->results[1].host);
    mem_free(s);
    b->sampler = NULL;
}

/* ---- lists and penalties ---- */

enum { IN_HISTORY = 0x80000000 }; /* in seen; below it: occurrences in the output */

/* Counts the history, then changes what was seen. A block. */
__device__ static void penalize(const struct draw_row *r, float *x, uint32_t *seen, uint32_t vocab)
{
    const struct sample_params *p = &r->params;
    for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x)
        seen[i] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < r->n_history; i += blockDim.x) {
        uint32_t id = r->history[i];
        if (id >= vocab)
            continue;
        atomicOr(&seen[id], (uint32_t)IN_HISTORY);
        if (i >= r->n_prompt)
            atomicAdd(&seen[id], 1u);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < vocab; i += blockDim.x) {
        uint32_t count = seen[i] & ~(uint32_t)IN_HISTORY;
        if (seen[i] == 0)
            continue;
        float l = x[i];
        l = l > 0 ? l / p->repetition_penalty : l * p->repetition_penalty;
        l = __fsub_rn(l, __fmul_rn(p->frequency_penalty, (float)count));
        x[i] = l - (count > 0 ? p->presence_penalty : 0);
    }
}

/* A block per row that has lists; others have nothing to do. Op: sample. */
__global__ static void adjust_kernel(struct sample_call c)
{
    const struct draw_row *r = &c.rows[blockIdx.x];
    if (!r->changed)
        return;
    const float *from = c.logits + (size_t)r->logits_row * c.vocab;
    float *x = c.x + (size_t)blockIdx.x * c.vocab;
    for (uint32_t i = threadIdx.x; i < c.vocab; i += blockDim.x)
        x[i] = from[i];
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < r->n_banned; i += blockDim.x)
        if (r->banned[i] < c.vocab)
            x[r->banned[i]] = -INFINITY;
    __syncthreads();
    if (threadIdx.x == 0) /* an id may stand there twice: in order */
        for (uint32_t i = 0; i < r->n_bias; i++)
            if (r->bias_ids[i] < c.vocab)
                x[r->bias_ids[i]] += r->bias[i];
    __syncthreads();
    if (r->penalized)
        penalize(r, x, c.seen + (size_t)blockIdx.x * c.vocab, c.vocab);
}

static void run_adjust(struct cuda_backend *b, const void *params)
{
    const struct sample_call *c = (const struct sample_call *)params;
    adjust_kernel<<<c->n_rows, SAMPLE_THREADS, 0, b->stream>>>(*c);
    cuda_launched(b, "sample: lists and penalties");
}

/* ---- the greatest logit ---- */

enum { PEAK_THREADS = 256, PEAK_AT_ONCE = 4 };

/* Four logits from `at` on; nothing beyond the end. Rows of odd sizes are not aligned. */
__device__ static inline float4 four_logits(const float *x, uint32_t at, uint32_t end, bool whole)
{
    const float none = -INFINITY;
    if (whole && at < end)
        return *(const float4 *)(x + at);
    return make_float4(at < end ? x[at] : none, at + 1 < end ? x[at + 1] : none,
                       at + 2 < end ? x[at + 2] : none, at + 3 < end ? x[at + 3] : none);
}

/* A block has a part of a row. Bound by a trip to L2 and its launch. Op: sample. */
__global__ static void __launch_bounds__(PEAK_THREADS) peaks_kernel(struct sample_call c)
{
    __shared__ struct peak of_warp[PEAK_THREADS / 32];
    const uint32_t each = (c.vocab + SAMPLE_PARTS * 4 - 1) / (SAMPLE_PARTS * 4) * 4;
    const uint32_t begin = blockIdx.x * each, end = min(c.vocab, begin + each);
    sample_wait();
    const float *x = c.logits + (size_t)c.rows[blockIdx.y].logits_row * c.vocab;
    struct peak p = {-INFINITY, ~0u, 0};
    for (uint32_t at = begin + threadIdx.x * 4; at < end; at += PEAK_AT_ONCE * PEAK_THREADS * 4) {
        float4 v[PEAK_AT_ONCE];
#pragma unroll
        for (uint32_t i = 0; i < PEAK_AT_ONCE; i++)
            v[i] = four_logits(x, at + i * PEAK_THREADS * 4, end, c.vocab % 4 == 0);
#pragma unroll
        for (uint32_t i = 0; i < PEAK_AT_ONCE * 4; i++) {
            const float y = (&v[i / 4].x)[i % 4];
            const uint32_t id = at + i / 4 * PEAK_THREADS * 4 + i % 4;
            p.nan |= y != y;
            if (y > p.max) { /* ids grow */
                p.max = y;
                p.id = id;
            }
        }
    }
    peak_of_warp(&p);
    if (threadIdx.x % 32 == 0)
        of_warp[threadIdx.x / 32] = p;
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    p = of_warp[threadIdx.x % (PEAK_THREADS / 32)];
    peak_of_warp(&p);
    if (threadIdx.x == 0)
        c.peaks[blockIdx.y * SAMPLE_PARTS + blockIdx.x] = p;
}

static void run_peaks(struct cuda_backend *b, const void *params)
{
    const struct sample_call *c = (const struct sample_call *)params;
    struct cuda_launch how;
    cuda_launch_early(b, &how, dim3(SAMPLE_PARTS, c->n_rows), PEAK_THREADS, 0);
    cuda_ok(b, cudaLaunchKernelEx(&how.config, peaks_kernel, *c), "sample: greatest logits");
}

static void run_draw(struct cuda_backend *b, const void *params)
{
    const struct sample_call *c = (const struct sample_call *)params;
    sample_launch(b, c);
}

/* ---- the host's part ---- */

static bool has_penalty(const struct sample_row *r)
{
    const struct sample_params *p = &r->params;
    return r->n_history > 0 &&
           (p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0);
}

/* false: no memory, which b knows. */
static bool fill_row(struct cuda_backend *b, const struct sample_row *r, struct draw_row *to)
{
    to->params = r->params;
    to->logits_row = r->logits_row;
    to->target = r->target;
    to->position = r->position;
    to->n_top = r->n_top;
    if (r->target != SAMPLE_DRAW)
        return true;
    to->penalized = has_penalty(r);
    to->changed = to->penalized || r->n_banned > 0 || r->n_bias > 0;
    to->n_banned = r->n_banned;
    to->n_bias = r->n_bias;
    if (r->n_banned > 0 &&
        (to->banned = (const uint32_t *)cuda_stage_apart(b, r->banned, r->n_banned * 4)) == NULL)
        return false;
    if (r->n_bias > 0) {
        to->bias_ids = (const uint32_t *)cuda_stage_apart(b, r->bias_ids, r->n_bias * 4);
        to->bias = (const float *)cuda_stage_apart(b, r->bias, r->n_bias * 4);
        if (to->bias_ids == NULL || to->bias == NULL)
            return false;
    }
    if (!to->penalized)
        return true;
    to->n_prompt = r->n_prompt;
    to->n_history = r->n_history;
    to->history = (const uint32_t *)cuda_stage_apart(b, r->history, (size_t)r->n_history * 4);
    return to->history != NULL;
}

/* *changes, *lists: whether any row needs the passes that need scratch. NULL: no memory, which b knows. */
static struct draw_row *list_rows(struct cuda_backend *b, const struct sample_args *a,
                                  bool *changes, bool *lists)
{
    struct draw_row *rows = (struct draw_row *)mem_alloc(cuda_bucket(a->n_rows) * sizeof *rows);
    for (uint32_t i = 0; i < a->n_rows; i++) {
        if (!fill_row(b, &a->rows[i], &rows[i])) {
            mem_free(rows);
            return NULL;
        }
        *changes |= rows[i].changed != 0;
        *lists |= sample_needs_ids(&rows[i], a->vocab);
    }
    return rows;
}

static bool reserve(struct cuda_backend *b, struct results *to, uint32_t n_rows, uint32_t vocab,
                    bool changes, bool lists)
{
    struct cuda_sampler *s = b->sampler;
    size_t rows = cuda_bucket(n_rows), numbers = rows * vocab * 4;
    if (!cuda_reserve(b, (void **)&s->out, &s->out_bytes, rows * sizeof *s->out) ||
        !cuda_reserve(b, (void **)&s->peaks, &s->peaks_bytes,
                      rows * SAMPLE_PARTS * sizeof *s->peaks) ||
        (changes && !cuda_reserve(b, (void **)&s->x, &s->x_bytes, numbers)) ||
        (changes && !cuda_reserve(b, (void **)&s->seen, &s->seen_bytes, numbers)) ||
        (lists && !cuda_reserve(b, (void **)&s->ids, &s->ids_bytes, numbers)))
        return false;
    if (rows <= to->max_rows)
        return true;
    if (to->host != NULL && !cuda_ended(b, NULL, "waiting to grow tokens")) /* to free waits */
        return false;
    cudaFreeHost(to->host);
    to->host = NULL;
    to->max_rows = 0;
    if (!cuda_ok(b, cudaMallocHost((void **)&to->host, rows * sizeof *to->host),
                 "pinned memory for tokens"))
        return false;
    to->max_rows = (uint32_t)rows;
    return true;
}

/* Where the rows' results go, and the rows themselves to the device. */
static const struct draw_row *stage_rows(struct cuda_backend *b, struct draw_row *rows,
                                         const struct results *to, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        rows[i].host = to->host + i;
    return (const struct draw_row *)cuda_stage(b, rows, cuda_bucket(n) * sizeof *rows);
}

/* The engine asks once a step; more than that waits for the first. */
static struct results *next_results(struct cuda_backend *b)
{
    struct cuda_sampler *s = b->sampler;
    if (s->n_results == 2) {
        cuda_flush(b);
        bool good = cuda_ended(b, NULL, "sample") && b->error == OK;
        (void)cuda_sample_settle(b, b->n_steps, good);
    }
    return &s->results[(s->first + s->n_results) % 2];
}

void cuda_sample(struct backend *be, const struct sample_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    struct cuda_sampler *s = b->sampler;
    bool changes = false, lists = false;
    if (a->n_rows == 0)
        return;
    struct results *to = next_results(b);
    struct draw_row *rows = list_rows(b, a, &changes, &lists);
    struct sample_call c = {};
    if (rows != NULL && reserve(b, to, a->n_rows, a->vocab, changes, lists))
        c.rows = stage_rows(b, rows, to, a->n_rows);
    mem_free(rows);
    if (c.rows == NULL) {
        cuda_ok(b, cudaErrorMemoryAllocation, "sample: rows");
        return;
    }
    c.logits = (const float *)a->logits;
    c.vocab = a->vocab;
    c.n_rows = (uint32_t)cuda_bucket(a->n_rows);
    c.x = s->x;
    c.seen = s->seen;
    c.ids = s->ids;
    c.peaks = s->peaks;
    c.out = s->out;
    if (changes)
        cuda_do(b, run_adjust, &c, sizeof c);
    cuda_do(b, run_peaks, &c, sizeof c);
    cuda_do(b, run_draw, &c, sizeof c);
    to->rows = a->rows;
    to->n_rows = a->n_rows;
    to->step = b->n_steps;
    s->n_results++;
}

bool cuda_sample_settle(struct cuda_backend *b, uint64_t step, bool good)
{
    struct cuda_sampler *s = b->sampler;
    const struct results *from = &s->results[s->first];
    if (s->n_results == 0 || from->step > step)
        return false;
    for (uint32_t i = 0; good && i < from->n_rows; i++) {
        const struct drawn *d = &from->host[i];
        struct sample_row *r = &from->rows[i];
        r->token = d->token;
        r->rank = d->rank;
        r->logprob = d->logprob;
        r->bad = d->bad != 0;
        for (int32_t j = 0; j < r->n_top && !r->bad; j++)
            r->top[j] = d->top[j];
    }
    s->first ^= 1;
    s->n_results--;
    return true;
}

const uint32_t *cuda_drawn(const struct cuda_backend *b, uint32_t *stride)
{
    *stride = sizeof *b->sampler->out;
    return b->sampler->out != NULL ? &b->sampler->out->token : NULL;
}
