/* Sealing on the device: checks, what is staged, which kernels run (seal.h), and the one that moves rows.
 *
 * A segment of the 8B shape (256 lanes of 128 numbers) is 128 MiB. Order reads its K once, move reads and
 * writes everything, digest and codes read it again. */
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

/* One CTA per lane, K or V, and 64 bytes of every row: they all lie in its shared memory before one is
 * written, so source and target may be the same pages. Bound by HBM: reads and writes each byte once, by
 * two sectors; the CTAs of a row's other bytes run beside it. UNIT: the largest of 16, 8 and 4 bytes that rows are
 * made of. Op: seal. */
template <typename UNIT>
__global__ void __launch_bounds__(MOVE_THREADS)
    move_kernel(const __grid_constant__ struct seal_call c)
{
    extern __shared__ uint4 shared[];
    UNIT *slice = (UNIT *)shared;
    constexpr uint32_t units = SLICE / sizeof(UNIT);
    const uint32_t lane = blockIdx.y, half = blockIdx.z, at = blockIdx.x * units;
    const uint32_t all = c.dim * c.number / sizeof(UNIT), n = all - at < units ? all - at : units;
    const bool keep = c.desc.order == ORDER_KEEP;
    if (c.lanes[lane].class_ != LANE_SPARSE || (keep && !c.job->moves))
        return;
    const uint16_t *order = (const uint16_t *)seal_record(&c, lane, c.job->record);
    for (uint32_t i = threadIdx.x; i < SEGMENT_ROWS * units; i += MOVE_THREADS)
        if (i % units < n)
            __pipeline_memcpy_async(&slice[i],
                                    (const UNIT *)seal_row(&c, c.job->from, lane, half, i / units) +
                                        at + i % units,
                                    sizeof(UNIT));
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < SEGMENT_ROWS * units; i += MOVE_THREADS) {
        uint32_t r = i / units, from = keep ? r : order[r];
        if (i % units < n)
            ((UNIT *)seal_row(&c, c.job->to, lane, half, r))[at + i % units] =
                slice[from * units + i % units];
    }
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

bool take_scratch(struct cuda_backend *b, struct seal_call *c)
{
    struct cuda_seal *s = b->seal;
    size_t vectors = (size_t)c->n_lanes * c->desc.parts * c->dim;
    size_t coarse = vectors / DIGEST_COARSE, far = (size_t)c->n_lanes * c->desc.parts;
    bool matrices = c->desc.kind == DIGEST_CODES && !seal_codes_in_shared(c->dim);
    size_t matrix = matrices ? (size_t)c->n_lanes * 2 * c->dim * c->dim : 0;
    if (!cuda_reserve(b, &s->scratch, &s->bytes, (vectors + coarse + far + matrix) * sizeof(float)))
        return false;
    c->vectors = (float *)s->scratch;
    c->coarse = c->vectors + vectors;
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
