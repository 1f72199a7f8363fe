/* Back from the order of storage to that of positions, for a prefix that ends inside a segment. */
#include "kernels/cuda/cuda.h"

#include <string.h>

namespace
{

enum { WARPS = 8, MOST_PAGES = SEGMENT_ROWS / 8 };

struct unpermute_job {
    uint32_t record, n_rows;
    block_id from[MOST_PAGES], to[MOST_PAGES];
};

struct unpermute_call {
    const struct unpermute_job *job;
    const struct cuda_lane *lanes;
    uint32_t n_lanes, rows, words; /* words: of a row, 4 bytes each */
    uint8_t *hbm;
    const uint8_t *dram, *records;
    size_t block_bytes, page_bytes, record_bytes, lane_bytes;
};

/* One warp per row of storage, lanes along its numbers, by 4 bytes. Bound by where `from` lies: HBM, or
 * the link to DRAM. No row has two sources; `to` is none of `from`. Op: unpermute. */
__global__ void __launch_bounds__(WARPS * 32)
    unpermute_kernel(const __grid_constant__ struct unpermute_call c)
{
    const struct unpermute_job *j = c.job;
    const uint32_t lane = blockIdx.y, row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (c.lanes[lane].class_ != LANE_SPARSE)
        return;
    const uint16_t *position = (const uint16_t *)(c.records + j->record * c.record_bytes +
                                                  c.lanes[lane].index * c.lane_bytes);
    const uint32_t p = position[row], block = j->from[row / c.rows], words = c.words;
    if (p >= j->n_rows)
        return;
    const uint8_t *from = block & BLOCK_IN_DRAM ? c.dram : c.hbm;
    from += (block & ~BLOCK_IN_DRAM) * c.block_bytes + c.lanes[lane].index * c.page_bytes;
    uint8_t *to = c.hbm + j->to[p / c.rows] * c.block_bytes + c.lanes[lane].index * c.page_bytes;
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t *x = (const uint32_t *)from + (size_t)(half * c.rows + row % c.rows) * words;
        uint32_t *y = (uint32_t *)to + (size_t)(half * c.rows + p % c.rows) * words;
        for (uint32_t i = threadIdx.x % 32; i < words; i += 32)
            y[i] = x[i];
    }
}

void run_unpermute(struct cuda_backend *b, const void *params)
{
    const struct unpermute_call *c = (const struct unpermute_call *)params;
    unpermute_kernel<<<dim3(SEGMENT_ROWS / WARPS, c->n_lanes), WARPS * 32, 0, b->stream>>>(*c);
    cuda_launched(b, "unpermute");
}

} /* namespace */

void cuda_unpermute(struct backend *be, const struct unpermute_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    const struct kv_geometry *g = a->kv->geo;
    struct unpermute_job j;
    struct unpermute_call c;
    CHECK(a->n_rows <= SEGMENT_ROWS && g->block_rows >= 8);
    memset(&j, 0, sizeof j);
    memset(&c, 0, sizeof c);
    j.record = a->record;
    j.n_rows = a->n_rows;
    memcpy(j.from, a->from, SEGMENT_ROWS / g->block_rows * sizeof *j.from);
    memcpy(j.to, a->to, (a->n_rows + g->block_rows - 1) / g->block_rows * sizeof *j.to);
    c.n_lanes = g->layers * g->kv_heads;
    c.rows = g->block_rows;
    c.words = g->head_dim * kv_number_bytes(g->type) / 4;
    CHECK(c.words * 4 == g->head_dim * kv_number_bytes(g->type));
    c.hbm = (uint8_t *)a->kv->hbm[LANE_SPARSE];
    c.dram = (const uint8_t *)a->kv->dram[LANE_SPARSE];
    c.records = (const uint8_t *)a->kv->records;
    c.block_bytes = g->block_bytes[LANE_SPARSE];
    c.page_bytes = g->page_bytes;
    c.record_bytes = a->kv->record_bytes;
    c.lane_bytes = a->kv->record_lane_bytes;
    c.lanes = cuda_lanes(b, g);
    c.job = (const struct unpermute_job *)cuda_stage(b, &j, sizeof j);
    if (c.lanes != NULL && c.job != NULL)
        cuda_do(b, run_unpermute, &c, sizeof c);
}
