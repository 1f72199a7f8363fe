/* RoPE on q and k, and k and v into their pages.
 *
 * Rows carry their position and their block of every class, so the kernel knows nothing of sequences.
 * The list is the same for every layer of a step: only the first one copies it. */
#include "kernels/cuda/attend.h"

#include <string.h>

namespace
{

struct append_call {
    const struct append_place *places;
    const struct cuda_lane *lanes; /* [kv_heads] of the layer */
    uint8_t *hbm[LANE_CLASSES];
    size_t block_bytes[LANE_CLASSES], page_bytes;
    uint32_t block_rows, dim, heads, kv_heads;
    const float *cos, *sin;
    float *qkv;
};

/* One CTA per row; a thread takes pairs (i, i + dim / 2) of a head. Bound by HBM in prefill (12 bytes
 * per number of q, 6 per number of k and v), by its launch in decode. Products and sums round apart, as on
 * the CPU. Op: append. */
__global__ void append_kernel(const __grid_constant__ struct append_call c)
{
    const struct append_place at = c.places[blockIdx.x];
    const uint32_t half = c.dim / 2, n = (c.heads + 2 * c.kv_heads) * half;
    float *row = c.qkv + (size_t)at.row * n * 2;
    const float *cos = c.cos + (size_t)at.pos * half, *sin = c.sin + (size_t)at.pos * half;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        uint32_t head = i / half, x = i % half;
        float *from = row + (size_t)head * c.dim + x;
        float a = from[0], b = from[half];
        if (head < c.heads + c.kv_heads) {
            float p = __fsub_rn(__fmul_rn(a, cos[x]), __fmul_rn(b, sin[x]));
            b = __fadd_rn(__fmul_rn(b, cos[x]), __fmul_rn(a, sin[x]));
            a = p;
        }
        if (head < c.heads) {
            from[0] = a;
            from[half] = b;
            continue;
        }
        uint32_t kv = head - c.heads, is_v = kv >= c.kv_heads;
        struct cuda_lane lane = c.lanes[kv - is_v * c.kv_heads];
        __nv_bfloat16 *to = (__nv_bfloat16 *)(c.hbm[lane.class_] +
                                              at.blocks[lane.class_] * c.block_bytes[lane.class_] +
                                              lane.index * c.page_bytes) +
                            (size_t)(is_v * c.block_rows + at.pos % c.block_rows) * c.dim + x;
        to[0] = __float2bfloat16_rn(a);
        to[half] = __float2bfloat16_rn(b);
    }
}

/* The rows of the batch with their places; NULL: no memory. */
const struct append_place *list_places(struct cuda_attend *t, const struct append_args *a,
                                       uint32_t *n_rows)
{
    uint32_t rows = a->kv->geo->block_rows, n = 0;
    for (uint32_t s = 0; s < a->n_seqs; s++)
        n += a->seqs[s].n_rows;
    *n_rows = n;
    struct append_place *p = (struct append_place *)attend_grow(&t->place_list, &t->place_bytes,
                                                                n * sizeof(struct append_place));
    if (p == NULL)
        return NULL;
    struct append_place *to = p;
    for (uint32_t s = 0; s < a->n_seqs; s++) {
        const struct batch_seq *q = &a->seqs[s];
        for (uint32_t i = 0; i < q->n_rows; i++, to++) {
            memset(to, 0, sizeof *to);
            to->row = q->first_row + i;
            to->pos = q->first_pos + i;
            for (int c = 0; c < LANE_CLASSES; c++)
                if (q->blocks[c] != NULL)
                    to->blocks[c] = q->blocks[c][to->pos / rows];
        }
    }
    return p;
}

} /* namespace */

void cuda_append(struct backend *be, const struct append_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    const struct kv_geometry *g = a->kv->geo;
    CHECK(g->head_dim % 2 == 0);
    uint32_t n_rows;
    const struct append_place *places = list_places(b->attend, a, &n_rows);
    if (n_rows == 0)
        return;
    if (places == NULL) {
        cuda_ok(b, cudaErrorMemoryAllocation, "append: list of rows");
        return;
    }
    struct append_call c = {};
    const struct cuda_lane *lanes = cuda_lanes(b, a->kv->geo);
    c.places = (const struct append_place *)kept_copy(b, &b->attend->places, places,
                                                      n_rows * sizeof *places);
    if (lanes == NULL || c.places == NULL)
        return;
    c.lanes = lanes + (size_t)a->layer * g->kv_heads;
    for (int i = 0; i < LANE_CLASSES; i++) {
        c.hbm[i] = (uint8_t *)a->kv->hbm[i];
        c.block_bytes[i] = g->block_bytes[i];
    }
    c.page_bytes = g->page_bytes;
    c.block_rows = g->block_rows;
    c.dim = g->head_dim;
    c.heads = a->heads;
    c.kv_heads = g->kv_heads;
    c.cos = a->rope_cos;
    c.sin = a->rope_sin;
    c.qkv = (float *)a->qkv;
    append_kernel<<<n_rows, 512, 0, b->stream>>>(c);
    cuda_launched(b, "append");
}
