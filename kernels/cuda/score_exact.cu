/* SCORE_EXACT: the true mass of a partition, from the keys themselves: what the oracle asks for, to
 * compare with. Reads every sealed key, wherever its block lies. */
#include "kernels/cuda/fp8.h"
#include "kernels/cuda/score.h"

#include <string.h>

namespace
{

enum { EXACT_THREADS = 256, EXACT_HEADS = 4 };

struct exact_shared {
    float q[EXACT_HEADS][SCORE_MAX_DIM];
    float logit[EXACT_HEADS][SEGMENT_ROWS];
};

/* Logits of the segment's rows: a chain over the channels for each, as on the CPU. */
__device__ void row_logits(struct exact_shared *s, const struct score_call *c,
                           const struct score_place *at, uint32_t segment, size_t lane_page)
{
    for (uint32_t r = threadIdx.x; r < SEGMENT_ROWS; r += EXACT_THREADS) {
        uint32_t row = segment * SEGMENT_ROWS + r;
        block_id block = at->row->blocks[row / c->block_rows];
        const uint8_t *page = (block & BLOCK_IN_DRAM ? c->dram : c->hbm) +
                              (size_t)(block & ~BLOCK_IN_DRAM) * c->block_bytes + lane_page;
        const uint8_t *k = page + (size_t)(row % c->block_rows) * c->dim * c->number;
        const bool fp8 = c->number == 1;
        float sum[EXACT_HEADS] = {0, 0, 0, 0};
#pragma unroll 8
        for (uint32_t x = 0; x < c->dim; x += 2) {
            uint32_t two =
                fp8 ? fp8_widen2(*(const uint16_t *)(k + x)) : *(const uint32_t *)(k + 2 * x);
            float a = __uint_as_float(two << 16), b = __uint_as_float(two & 0xffff0000u);
#pragma unroll
            for (int h = 0; h < EXACT_HEADS; h++)
                sum[h] = fmaf(b, s->q[h][x + 1], fmaf(a, s->q[h][x], sum[h]));
        }
#pragma unroll
        for (int h = 0; h < EXACT_HEADS; h++)
            s->logit[h][r] = sum[h] * c->scale;
    }
}

/* One CTA: a segment and 4 heads of the group. A thread has a row, then a partition of a head. Bound by
 * the keys: 2 bytes per channel and row, or 1. Op: score. */
__global__ void __launch_bounds__(EXACT_THREADS)
    exact_kernel(const __grid_constant__ struct score_call c)
{
    __shared__ struct exact_shared s;
    allow_next_kernel();
    struct score_place at = score_place_of(&c, 1);
    wait_for_kernel_before();
    if (at.none)
        return;
    const uint32_t segment = at.stretch, h0 = at.chunk * EXACT_HEADS;
    const uint32_t heads = min(c.group - h0, (uint32_t)EXACT_HEADS);
    for (uint32_t i = threadIdx.x; i < EXACT_HEADS * c.dim; i += EXACT_THREADS) {
        uint32_t h = i / c.dim, x = i % c.dim;
        s.q[h][x] = h < heads ? score_query(&c, &at, h0 + h)[x] : 0;
    }
    __syncthreads();
    row_logits(&s, &c, &at, segment, c.lanes[at.head].index * c.page_bytes);
    __syncthreads();
    const uint16_t *first_row = NULL;
    if (c.part_rows == 0)
        first_row =
            (const uint16_t *)(at.base + at.records[segment] * c.record_bytes + c.first_row);
    for (uint32_t i = threadIdx.x; i < heads * c.parts; i += EXACT_THREADS) {
        uint32_t h = i / c.parts, p = i % c.parts;
        uint32_t first = first_row != NULL ? first_row[p] : p * c.part_rows;
        uint32_t n = first_row != NULL ? first_row[p + 1] - first : c.part_rows;
        float most = -INFINITY, sum = 0;
        for (uint32_t r = first; r < first + n; r++)
            most = fmaxf(most, s.logit[h][r]);
        for (uint32_t r = first; r < first + n; r++)
            sum += expf(s.logit[h][r] - most);
        bool alive = n > 0 && score_alive(&c, at.lane, segment, p);
        c.out[((size_t)at.lane * c.group + h0 + h) * c.stride + (size_t)segment * c.parts + p] =
            alive ? most + logf(sum) : -INFINITY;
    }
}

struct exact_command {
    struct score_call c;
    uint32_t grid;
};

void run_exact(struct cuda_backend *b, const void *params)
{
    const struct exact_command *m = (const struct exact_command *)params;
    score_launch(b, exact_kernel, &m->c, m->grid, EXACT_THREADS, 0, "exact score");
}

} /* namespace */

void cuda_score_exact(struct cuda_backend *b, const struct score_call *from, uint32_t lanes)
{
    struct exact_command m;
    memset(&m, 0, sizeof m);
    m.c = *from;
    m.c.pieces = 1;
    m.c.depth = 1;
    m.c.chunks = (from->group + EXACT_HEADS - 1) / EXACT_HEADS;
    m.grid = lanes * m.c.chunks * m.c.stretches;
    cuda_do(b, run_exact, &m, sizeof m);
}
