/* Weights on the device: decoding at load, and `embed`.
 *
 * The host decodes rows to float and rounds them to bf16 in pieces of UPLOAD_BYTES, on all its cores;
 * two pinned buffers take turns, so that a piece travels while the next is read and decoded. Bound by
 * decoding: 5 to 7 GB of bf16 a second on 16 cores beside an H200, from the page cache
 * (tests/cuda/bench_load.c; bf16 files were decoded then), of the 55 that PCIe brings. Threads live for one
 * piece. Made-up weights do not travel.
 */
#include "kernels/core/dummy.h"
#include "kernels/cuda/linear.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { UPLOAD_BYTES = 32 << 20, MAX_DECODERS = 32, DECODE_COLS = 1024 };

/* A range of rows of one part, being decoded. */
struct decode_job {
    const struct weight_part *part;
    uint32_t cols, pitch, first, n_rows;
    uint16_t *to;     /* [n_rows][pitch] */
    uint32_t bad_row; /* of the part; UINT32_MAX: none */
};

/* Nothing to decode: only looked at. */
static bool copy_row(const uint8_t *src, uint32_t cols, uint16_t *to)
{
    uint32_t bad = 0;
    memcpy(to, src, cols * sizeof *to);
    for (uint32_t k = 0; k < cols; k++)
        bad |= (to[k] & 0x7f80u) == 0x7f80u;
    return bad == 0;
}

/* False: a number is not finite, or too large for bf16. */
static bool decode_row(const struct decode_job *j, uint32_t row, uint16_t *to)
{
    const struct weight_part *p = j->part;
    const struct dtype_info *info = dtype_find((uint32_t)p->type);
    uint32_t file_row = p->row_from != NULL ? p->row_from[row] : row;
    const uint8_t *src = (const uint8_t *)p->data + file_row * dtype_row_bytes(p->type, j->cols);
    float v[DECODE_COLS];
    uint32_t bad = 0;
    memset(to + j->cols, 0, (j->pitch - j->cols) * sizeof *to);
    if (p->type == DTYPE_BF16)
        return copy_row(src, j->cols, to);
    for (uint32_t k0 = 0; k0 < j->cols; k0 += DECODE_COLS) {
        uint32_t left = j->cols - k0, n = left < DECODE_COLS ? left : (uint32_t)DECODE_COLS;
        dtype_decode(p->type, src + (size_t)k0 / info->block * info->bytes, n, v);
        for (uint32_t k = 0; k < n; k++) {
            to[k0 + k] = f32_to_bf16(v[k]);
            bad |= (to[k0 + k] & 0x7f80u) == 0x7f80u;
        }
    }
    return bad == 0;
}

static void *decode_rows(void *arg)
{
    struct decode_job *j = (struct decode_job *)arg;
    for (uint32_t i = 0; i < j->n_rows; i++)
        if (!decode_row(j, j->first + i, j->to + (size_t)i * j->pitch) && j->bad_row == UINT32_MAX)
            j->bad_row = j->first + i;
    return NULL;
}

static uint32_t n_decoders(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        return 1;
    int n = CPU_COUNT(&set);
    return n < MAX_DECODERS ? (uint32_t)n : (uint32_t)MAX_DECODERS;
}

/* Decodes the rows of `all` on several threads; this one takes the last share, and those of threads
 * that could not be started. */
static uint32_t decode_piece(const struct decode_job *all)
{
    struct decode_job jobs[MAX_DECODERS];
    pthread_t threads[MAX_DECODERS];
    bool started[MAX_DECODERS];
    uint32_t n = n_decoders(), bad = UINT32_MAX;
    if ((size_t)all->n_rows * all->pitch < 1 << 18)
        n = 1;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t begin = (uint32_t)((uint64_t)all->n_rows * i / n);
        uint32_t end = (uint32_t)((uint64_t)all->n_rows * (i + 1) / n);
        jobs[i] = *all;
        jobs[i].first = all->first + begin;
        jobs[i].n_rows = end - begin;
        jobs[i].to = all->to + (size_t)begin * all->pitch;
        started[i] = i + 1 < n && pthread_create(&threads[i], NULL, decode_rows, &jobs[i]) == 0;
        if (!started[i])
            decode_rows(&jobs[i]);
    }
    for (uint32_t i = 0; i < n; i++) {
        if (started[i])
            pthread_join(threads[i], NULL);
        if (bad == UINT32_MAX)
            bad = jobs[i].bad_row;
    }
    return bad;
}

static bool upload_open(struct cuda_backend *b)
{
    struct cuda_linear *l = b->linear;
    for (int i = 0; i < 2; i++) {
        if (l->pinned[i] != NULL)
            continue;
        cudaError_t e = cudaHostAlloc(&l->pinned[i], UPLOAD_BYTES, cudaHostAllocDefault);
        if (e == cudaSuccess)
            e = cudaEventCreateWithFlags(&l->uploaded[i], cudaEventDisableTiming);
        if (e != cudaSuccess) {
            (void)err(ERR_MEMORY, "cuda: pinned buffer for weights: %s", cudaGetErrorName(e));
            return false;
        }
    }
    return true;
}

void cuda_upload_close(struct cuda_backend *b)
{
    for (int i = 0; i < 2; i++) {
        if (b->linear->uploaded[i] != NULL)
            cudaEventDestroy(b->linear->uploaded[i]);
        cudaFreeHost(b->linear->pinned[i]);
    }
}

/* One part, to rows first_row and on. *turn: which pinned buffer is next. */
static status upload_part(struct cuda_backend *b, struct weight *w, const struct weight_part *p,
                          uint32_t first_row, uint32_t *turn)
{
    size_t row_bytes = (size_t)w->pitch * sizeof *w->values;
    uint32_t step = (uint32_t)(UPLOAD_BYTES / row_bytes);
    for (uint32_t at = 0; at < p->rows; at += step, *turn ^= 1) {
        uint32_t n = p->rows - at < step ? p->rows - at : step;
        if (!cuda_ended(b, b->linear->uploaded[*turn], "a weight"))
            return err(b->error, "%s", b->text);
        struct decode_job job = {
            p, w->cols, w->pitch, at, n, (uint16_t *)b->linear->pinned[*turn], UINT32_MAX};
        uint32_t bad = decode_piece(&job);
        if (bad != UINT32_MAX)
            return err(ERR_FORMAT, "%s: output row %u holds a number that is not finite", p->name,
                       bad);
        cudaError_t e = cudaMemcpyAsync(w->values + (size_t)(first_row + at) * w->pitch,
                                        b->linear->pinned[*turn], n * row_bytes,
                                        cudaMemcpyHostToDevice, b->stream);
        if (e == cudaSuccess)
            e = cudaEventRecord(b->linear->uploaded[*turn], b->stream);
        if (e != cudaSuccess)
            return err(ERR_DEVICE, "%s: upload: %s", p->name, cudaGetErrorName(e));
    }
    return OK;
}

/* A thread per word of four numbers, rows one after the other: what a padded row has beyond its columns
 * becomes zero. Bound by HBM writes (2 bytes per number) on paper, by 64-bit products in truth: either
 * way milliseconds for a model. */
__global__ static void make_rows(__nv_bfloat16 *to, uint32_t rows, uint32_t cols, uint32_t pitch,
                                 uint64_t seed, float scale)
{
    const uint64_t row_words = dummy_row_words(cols), pitch_words = pitch / 4;
    const uint64_t n = rows * pitch_words, stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        const uint64_t row = i / pitch_words, at = i % pitch_words;
        const uint64_t word = dummy_word(seed, row * row_words + at);
        float v[4];
        for (uint32_t j = 0; j < 4; j++)
            v[j] = 4 * at + j < cols ? dummy_value(word, j, scale) : 0;
        __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(v[0], v[1]),
                                   __floats2bfloat162_rn(v[2], v[3])};
        uint2 both;
        memcpy(&both, pairs, sizeof both);
        *(uint2 *)(to + row * pitch + 4 * at) = both;
    }
}

/* Nothing travels: the numbers are made where they lie. */
static status make_part(struct cuda_backend *b, struct weight *w, const struct weight_part *p,
                        uint32_t first_row)
{
    CHECK(p->type == DTYPE_BF16 && p->row_from == NULL);
    make_rows<<<8 * b->sms, 256, 0, b->stream>>>(w->values + (size_t)first_row * w->pitch, p->rows,
                                                 w->cols, w->pitch, p->seed, dummy_scale(w->cols));
    cudaError_t e = cudaGetLastError();
    return e == cudaSuccess ? OK : err(ERR_DEVICE, "%s: %s", p->name, cudaGetErrorName(e));
}

static status check_parts(struct weight *w, const struct weight_desc *d)
{
    for (uint32_t i = 0; i < d->n_parts; i++) {
        const struct weight_part *p = &d->parts[i];
        const struct dtype_info *info = dtype_find((uint32_t)p->type);
        if (info == NULL || d->cols == 0 || d->cols % info->block != 0)
            return err(ERR_FORMAT, "%s: rows of %u numbers cannot be of type %s", p->name, d->cols,
                       info != NULL ? info->name : "?");
        w->rows += p->rows;
    }
    w->cols = d->cols;
    w->pitch = (d->cols + WEIGHT_PAD - 1) / WEIGHT_PAD * WEIGHT_PAD;
    w->bytes = (size_t)w->rows * w->pitch * sizeof *w->values;
    CHECK((size_t)w->pitch * sizeof *w->values <= UPLOAD_BYTES);
    return OK;
}

/* Behind the last row: kernels may read whole tiles of rows, whose other results they forget. */
static size_t spare_bytes(const struct weight *w)
{
    return (size_t)WEIGHT_SPARE * w->pitch * sizeof *w->values;
}

status cuda_weight_create(struct backend *be, const struct weight_desc *d, struct weight **out)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    CHECK(d->n_parts >= 1 && d->n_parts <= ARRAY_LEN(d->parts));
    struct weight *w = (struct weight *)mem_alloc(sizeof *w);
    (void)cuda_ok(b, cudaSetDevice(b->device), "weight_create"); /* may be a thread's first call */
    status st = check_parts(w, d);
    for (uint32_t i = 0; i < d->n_parts; i++)
        if (st == OK && d->parts[i].data != NULL && !upload_open(b))
            st = ERR_MEMORY;
    if (st == OK) {
        cudaError_t e = cudaMalloc((void **)&w->values, w->bytes + spare_bytes(w));
        if (e != cudaSuccess) {
            (void)cudaGetLastError();
            w->values = NULL;
            st = err(ERR_MEMORY, "%s: no device memory for %zu bytes: %s", d->parts[0].name,
                     w->bytes, cudaGetErrorName(e));
        }
    }
    uint32_t turn = 0, row = 0;
    for (uint32_t i = 0; st == OK && i < d->n_parts; row += d->parts[i++].rows)
        st = d->parts[i].data != NULL ? upload_part(b, w, &d->parts[i], row, &turn)
                                      : make_part(b, w, &d->parts[i], row);
    if (st != OK) {
        cuda_weight_destroy(be, w);
        return st;
    }
    *out = w;
    return OK;
}

void cuda_weight_destroy(struct backend *be, struct weight *w)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    if (w == NULL)
        return;
    if (w->values != NULL) {
        (void)cuda_ended(b, NULL, "weight_destroy");
        if (!b->gone)
            (void)cuda_ok(b, cudaFree(w->values), "weight_destroy");
    }
    mem_free(w);
}

size_t cuda_weight_bytes(const struct weight *w)
{
    return w->bytes;
}

/* A block per row, a thread per number in turn. Bound by launch latency in decode, by HBM for a chunk
 * of a prompt: 6 bytes per number. Op: embed. */
__global__ static void embed_kernel(const __nv_bfloat16 *table, uint32_t cols, uint32_t pitch,
                                    const uint32_t *tokens, const uint32_t *drawn,
                                    uint32_t drawn_stride, float *out)
{
    uint32_t token = tokens[blockIdx.x];
    if (token & EMBED_DRAWN)
        token = drawn[(token & ~EMBED_DRAWN) * (drawn_stride / 4)];
    const __nv_bfloat16 *row = table + (size_t)token * pitch;
    float *to = out + (size_t)blockIdx.x * cols;
    for (uint32_t k = threadIdx.x; k < cols; k += blockDim.x)
        to[k] = __bfloat162float(row[k]);
}

struct embed_call {
    const __nv_bfloat16 *table;
    const uint32_t *tokens, *drawn;
    float *out;
    uint32_t cols, pitch, n_rows, drawn_stride;
};

static void run_embed(struct cuda_backend *b, const void *params)
{
    const struct embed_call *c = (const struct embed_call *)params;
    embed_kernel<<<c->n_rows, 256, 0, b->stream>>>(c->table, c->cols, c->pitch, c->tokens, c->drawn,
                                                   c->drawn_stride, c->out);
    (void)cuda_launched(b, "embed");
}

void cuda_embed(struct backend *be, const struct embed_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    const struct weight *w = a->table;
    if (a->n_rows == 0)
        return;
    for (uint32_t i = 0; i < a->n_rows; i++)
        CHECK(a->tokens[i] < w->rows || a->tokens[i] >= EMBED_DRAWN);
    struct embed_call c;
    cuda_begin_rows(b, a->n_rows);
    memset(&c, 0, sizeof c);
    c.table = w->values;
    c.tokens = (const uint32_t *)cuda_stage(b, a->tokens, a->n_rows * sizeof *a->tokens);
    c.drawn = cuda_drawn(b, &c.drawn_stride);
    c.out = (float *)a->out;
    c.cols = w->cols;
    c.pitch = w->pitch;
    c.n_rows = a->n_rows;
    if (c.tokens != NULL)
        cuda_do(b, run_embed, &c, sizeof c);
}
