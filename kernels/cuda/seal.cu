/* Sealing on the device: checks, what is staged, which kernels run (seal.h), and the one that moves rows.
 *
 * A segment of the 8B shape (256 lanes of 128 numbers) is 128 MiB. Order reads its K once, move reads and
 * writes everything, codes and (where move has not left means) digest read it again. */
#include "kernels/cuda/seal.h"

#include <cuda_pipeline.h>
#include <string.h>

struct cuda_seal {
    void *scratch;
    size_t bytes;
};

namespace
{

enum { MOVE_THREADS = 256, SLICE = 64 /* bytes of a row */ };

/* Channels of 16 bytes of a row. */
template <int NUMBER> __device__ inline void widen(uint4 w, float *x)
{
    constexpr int EIGHTS = 2 / NUMBER;
    const uint4 eight[2] = {NUMBER == 1 ? fp8_widen8(make_uint2(w.x, w.y)) : w,
                            NUMBER == 1 ? fp8_widen8(make_uint2(w.z, w.w)) : w};
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        const uint32_t word[4] = {eight[i].x, eight[i].y, eight[i].z, eight[i].w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[8 * i + 2 * j] = seal_low(word[j]);
            x[8 * i + 2 * j + 1] = seal_high(word[j]);
        }
    }
}

/* Means of all pages, from what the CTA has of their rows: the thread's 16 bytes, which are those at `at` of a
 * row; a sum in the order of rows and an exact division, as in seal_digest.cu. */
template <int NUMBER>
__device__ inline void page_means(const struct seal_call *c, const uint4 *slice,
                                  const uint16_t *order, uint32_t lane, uint32_t half, uint32_t at)
{
    constexpr uint32_t units = SLICE / 16, channels = 16 / NUMBER;
    float *means =
        (half == 0 ? c->vectors : c->mean_values) + (size_t)lane * c->desc.parts * c->dim;
    const uint32_t rows = 1u << c->row_shift, mine = threadIdx.x % units;
    for (uint32_t p = threadIdx.x / units; p < c->desc.parts; p += MOVE_THREADS / units) {
        float sum[channels] = {0};
        for (uint32_t i = 0; i < rows; i += 8) {
            const uint4 o = *(const uint4 *)(order + p * rows + i);
            const uint32_t two[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
            for (uint32_t j = 0; j < 8; j++) {
                float x[channels];
                widen<NUMBER>(slice[(two[j / 2] >> 16 * (j % 2) & 0xffff) * units + mine], x);
#pragma unroll
                for (uint32_t k = 0; k < channels; k++)
                    sum[k] += x[k];
            }
        }
        float4 *to = (float4 *)(means + (size_t)p * c->dim + at * channels);
#pragma unroll
        for (uint32_t k = 0; k < channels; k += 4)
            to[k / 4] =
                make_float4(__fdiv_rn(sum[k], (float)rows), __fdiv_rn(sum[k + 1], (float)rows),
                            __fdiv_rn(sum[k + 2], (float)rows), __fdiv_rn(sum[k + 3], (float)rows));
    }
}

/* One CTA per lane, K or V, and 64 bytes of every row: they all lie in its shared memory before one is
 * written, so source and target may be the same pages. Bound by HBM: reads and writes each byte once, by
 * two sectors; the CTAs of a row's other bytes run beside it. A thread has the same bytes of rows STEP apart,
 * and the names of TURN blocks are on their way at a time. UNIT: the largest of 16, 8 and 4 bytes that rows
 * are made of. Op: seal. */
template <typename UNIT>
__global__ void __launch_bounds__(MOVE_THREADS)
    move_kernel(const __grid_constant__ struct seal_call c)
{
    extern __shared__ uint4 shared[];
    UNIT *slice = (UNIT *)shared;
    constexpr uint32_t units = SLICE / sizeof(UNIT), STEP = MOVE_THREADS / units, TURN = 8;
    static_assert(SEGMENT_ROWS % (STEP * TURN) == 0, "whole turns");
    const uint32_t lane = blockIdx.y, half = blockIdx.z, mine = threadIdx.x % units;
    const uint32_t at = blockIdx.x * units + mine;
    const bool keep = c.desc.order == ORDER_KEEP, has = at < c.dim * c.number / sizeof(UNIT);
    if (c.lanes[lane].class_ != LANE_SPARSE || (keep && !c.job->moves))
        return;
    const uint16_t *order = (const uint16_t *)seal_record(&c, lane, c.job->record);
    uint8_t *pages = seal_pages(&c, lane);
    block_id blocks[TURN];
    for (uint32_t r = threadIdx.x / units; r < SEGMENT_ROWS; r += STEP * TURN) {
#pragma unroll
        for (uint32_t i = 0; i < TURN; i++)
            blocks[i] = c.job->from[(r + i * STEP) >> c.row_shift];
#pragma unroll
        for (uint32_t i = 0; i < TURN; i++)
            if (uint32_t row = r + i * STEP; has)
                __pipeline_memcpy_async(
                    &slice[row * units + mine],
                    (const UNIT *)seal_row_of(&c, pages, blocks[i], half, row) + at, sizeof(UNIT));
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    for (uint32_t r = threadIdx.x / units; r < SEGMENT_ROWS; r += STEP * TURN) {
        uint32_t from[TURN];
#pragma unroll
        for (uint32_t i = 0; i < TURN; i++) {
            blocks[i] = c.job->to[(r + i * STEP) >> c.row_shift];
            from[i] = keep ? r + i * STEP : order[r + i * STEP];
        }
#pragma unroll
        for (uint32_t i = 0; i < TURN; i++)
            if (has)
                ((UNIT *)seal_row_of(&c, pages, blocks[i], half, r + i * STEP))[at] =
                    slice[from[i] * units + mine];
    }
    if (sizeof(UNIT) != 16 || !c.means || !has ||
        (half == 0 ? c.desc.kind == DIGEST_NONE : !c.desc.values))
        return;
    if (c.number == 1)
        page_means<1>(&c, shared, order, lane, half, at);
    else
        page_means<2>(&c, shared, order, lane, half, at);
}

void move_rows(struct cuda_backend *b, const struct seal_call *c)
{
    const uint32_t row = c->dim * c->number;
    dim3 grid((row + SLICE - 1) / SLICE, c->n_lanes, 2);
    size_t bytes = (size_t)SEGMENT_ROWS * SLICE;
    if (row % 16 == 0)
        move_kernel<uint4><<<grid, MOVE_THREADS, bytes, b->stream>>>(*c);
    else if (row % 8 == 0)
        move_kernel<uint2><<<grid, MOVE_THREADS, bytes, b->stream>>>(*c);
    else
        move_kernel<uint32_t><<<grid, MOVE_THREADS, bytes, b->stream>>>(*c);
    cuda_launched(b, "seal: move");
}

/* ---- the call ---- */

void run_seal(struct cuda_backend *b, const void *params)
{
    const struct seal_call *c = (const struct seal_call *)params;
    if (c->desc.order == ORDER_BISECT && seal_bisect_fits(b, c))
        seal_bisect(b, c);
    else if (c->desc.order != ORDER_KEEP)
        seal_order(b, c);
    move_rows(b, c);
    if (c->desc.kind != DIGEST_NONE || c->desc.values)
        seal_digest(b, c);
    if (c->desc.kind == DIGEST_CODES)
        seal_codes(b, c);
}

/* Rows of the sinks' pages in a segment: whole pages at the start of the context. */
uint32_t sink_rows_of(const struct kv_geometry *g, const struct digest_desc *d, uint32_t segment)
{
    uint32_t rows = (d->sinks + g->block_rows - 1) / g->block_rows * g->block_rows;
    CHECK(rows < SEGMENT_ROWS);
    return segment == 0 ? rows : 0;
}

const struct seal_job *stage_job(struct cuda_backend *b, const struct seal_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    struct seal_job j;
    memset(&j, 0, sizeof j);
    j.record = a->record;
    j.first_record = a->segment == 0 ? a->record : a->first_record;
    j.sink_rows = sink_rows_of(g, &a->desc, a->segment);
    for (uint32_t i = 0; i < SEGMENT_ROWS / g->block_rows; i++) {
        j.from[i] = a->from[i];
        j.to[i] = a->to[i];
        j.moves |= a->from[i] != a->to[i];
    }
    return (const struct seal_job *)cuda_stage(b, &j, sizeof j);
}

/* Member by member: parameters of commands are compared as bytes, and padding is nobody's. */
void copy_desc(struct digest_desc *to, const struct digest_desc *from)
{
    to->order = from->order;
    to->kind = from->kind;
    to->parts = from->parts;
    to->outliers = from->outliers;
    to->sinks = from->sinks;
    to->values = from->values;
}
void copy_layout(struct digest_layout *to, const struct digest_layout *from)
{
    to->dim = from->dim;
    to->parts = from->parts;
    to->kinds = from->kinds;
    to->first_row = from->first_row;
    to->vectors = from->vectors;
    to->vector_bytes = from->vector_bytes;
    to->coarse = from->coarse;
    to->bounds = from->bounds;
    to->values = from->values;
    to->scales = from->scales;
    to->codes = from->codes;
    to->bytes = from->bytes;
}

/* Partitions are pages of rows whose mean is their centroid, and rows of whole 16 bytes. */
bool finds_means(const struct seal_call *c)
{
    return c->desc.order == ORDER_BISECT && c->desc.outliers == 0 &&
           c->desc.kind != DIGEST_BOUNDS && c->desc.parts << c->row_shift == SEGMENT_ROWS &&
           c->dim * c->number % 16 == 0;
}

bool take_scratch(struct cuda_backend *b, struct seal_call *c)
{
    struct cuda_seal *s = b->seal;
    size_t vectors = (size_t)c->n_lanes * c->desc.parts * c->dim;
    size_t values = c->means && c->desc.values ? vectors : 0;
    size_t coarse = vectors / DIGEST_COARSE, far = (size_t)c->n_lanes * c->desc.parts;
    bool matrices = c->desc.kind == DIGEST_CODES && !seal_codes_in_shared(c->dim);
    size_t matrix = matrices ? (size_t)c->n_lanes * 2 * c->dim * c->dim : 0;
    if (!cuda_reserve(b, &s->scratch, &s->bytes,
                      (vectors + values + coarse + far + matrix) * sizeof(float)))
        return false;
    c->vectors = (float *)s->scratch;
    c->mean_values = c->vectors + vectors;
    c->coarse = c->mean_values + values;
    c->far = (uint32_t *)(c->coarse + coarse);
    c->matrix = (float *)(c->far + far);
    return true;
}

} /* namespace */

size_t cuda_digest_bytes(const struct kv_geometry *geo, const struct digest_desc *d)
{
    return digest_layout_of(geo->head_dim, d).bytes;
}

void cuda_seal(struct backend *be, const struct seal_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    const struct kv_geometry *g = a->kv->geo;
    const struct digest_layout l = digest_layout_of(g->head_dim, &a->desc);
    struct seal_call c;
    memset(&c, 0, sizeof c);
    CHECK(digest_takes(g, &a->desc, SEAL_MAX_DIM));
    CHECK(a->desc.kind == DIGEST_NONE || l.bytes <= a->kv->record_lane_bytes);
    c.n_lanes = g->layers * g->kv_heads;
    c.dim = g->head_dim;
    c.number = kv_number_bytes(g->type);
    c.row_shift = (uint32_t)__builtin_ctz(g->block_rows);
    c.first_segment = a->segment == 0;
    c.pages = (uint8_t *)a->kv->hbm[LANE_SPARSE];
    c.records = (uint8_t *)a->kv->records;
    c.block_bytes = g->block_bytes[LANE_SPARSE];
    c.page_bytes = g->page_bytes;
    c.record_bytes = a->kv->record_bytes;
    c.lane_bytes = a->kv->record_lane_bytes;
    copy_desc(&c.desc, &a->desc);
    copy_layout(&c.layout, &l);
    c.means = finds_means(&c);
    c.lanes = cuda_lanes(b, g);
    if (c.lanes == NULL || !take_scratch(b, &c) || (c.job = stage_job(b, a)) == NULL)
        return;
    cuda_do(b, run_seal, &c, sizeof c);
}

status cuda_seal_open(struct cuda_backend *b)
{
    b->seal = (struct cuda_seal *)mem_alloc(sizeof *b->seal);
    int bytes = SEGMENT_ROWS * SLICE;
    if (!cuda_ok(b,
                 cudaFuncSetAttribute(move_kernel<uint4>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                 "seal: shared memory") ||
        !cuda_ok(b,
                 cudaFuncSetAttribute(move_kernel<uint2>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                 "seal: shared memory") ||
        !cuda_ok(b,
                 cudaFuncSetAttribute(move_kernel<uint32_t>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                 "seal: shared memory"))
        return err(b->error, "%s", b->text);
    TRY(seal_bisect_open(b));
    return seal_codes_open(b);
}

void cuda_seal_close(struct cuda_backend *b)
{
    if (b->seal == NULL)
        return;
    cudaFree(b->seal->scratch);
    mem_free(b->seal);
    b->seal = NULL;
}
