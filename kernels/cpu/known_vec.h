/* The mass of the sinks, once for every instruction set (vec16.h): logits of 16 rows at a time, a chain
 * over the channels for each, then one sum of exponentials with the tail's, which has the bits of this
 * machine's attention. */
#include "kernels/cpu/known.h"
#include "kernels/cpu/vec16.h"

/* A sinks' page of a SPILLED sequence may be in DRAM: on this machine both tiers are memory, and what
 * is read in place has the bits of a copy. */
static const uint8_t *page_at(const struct known_lane *l, uint32_t page)
{
    const struct kv_memory *kv = l->a->kv;
    block_id b = l->row->blocks[page];
    const uint8_t *base = b & BLOCK_IN_DRAM ? kv->dram[LANE_SPARSE] : kv->hbm[LANE_SPARSE];
    return base + (b & ~BLOCK_IN_DRAM) * kv->geo->block_bytes[LANE_SPARSE] +
           kv_page_offset(kv->geo, l->a->layer, l->head);
}

/* Logits of the sinks' rows [pos, pos + 16) for n heads; rows beyond them are -inf. */
V16_FN void sixteen(const struct known_lane *l, const float *q, uint32_t pos, const uint32_t n,
                    float *out, size_t stride)
{
    const struct kv_geometry *g = l->a->kv->geo;
    uint32_t rows = g->block_rows, page = pos / rows, last = (l->sink_rows - 1) / rows;
    const bool fp8 = g->type == KV_E4M3;
    const uint32_t pair = 2 * kv_number_bytes(g->type);
    const uint8_t *a = page_at(l, page) + (size_t)(pos % rows) * pair, *b = a;
    v16f even[KNOWN_HEADS], odd[KNOWN_HEADS], scale = v16_set1(l->a->scale);
    if (rows < V16)
        b = page_at(l, page < last ? page + 1 : page);
    V16_UNROLL for (uint32_t h = 0; h < n; h++) even[h] = odd[h] = v16_zero();
    for (uint32_t c = 0; c < g->head_dim; c += 2) {
        size_t at = (size_t)c / 2 * rows * pair;
        v16i pairs = v16i_load_pairs(a + at, b + at, rows < V16, fp8);
        v16f x = v16_first_of(pairs, fp8), y = v16_second_of(pairs, fp8);
        V16_UNROLL for (uint32_t h = 0; h < n; h++)
        {
            even[h] = v16_fma(x, v16_set1(q[h * g->head_dim + c]), even[h]);
            odd[h] = v16_fma(y, v16_set1(q[h * g->head_dim + c + 1]), odd[h]);
        }
    }
    v16_mask there = v16_first_lanes(l->sink_rows - pos);
    V16_UNROLL for (uint32_t h = 0; h < n; h++)
        v16_store(out + h * stride,
                  v16_pick(there, v16_mul(v16_add(even[h], odd[h]), scale), v16_set1(-INFINITY)));
}

V16_FN void heads_of(const struct known_lane *l, uint32_t h0, const uint32_t n)
{
    size_t stride = known_work_floats(l->sink_rows) / KNOWN_HEADS;
    const float *q = l->q + (size_t)h0 * l->a->kv->geo->head_dim;
    for (uint32_t pos = 0; pos < l->sink_rows; pos += V16)
        sixteen(l, q, pos, n, l->work + pos, stride);
}

/* Natural logarithm of the sum of exponentials of n logits, a multiple of 16, and of the tail's mass:
 * n_tail pairs of a greatest score in base 2 and a sum relative to it, `step` numbers apart. */
static float log_of_sum(const float *x, size_t n, const float *m, const float *sum, uint32_t n_tail,
                        size_t step)
{
    v16f top = v16_set1(-3e38f), total = v16_zero();
    for (size_t i = 0; i < n; i += V16)
        top = v16_max(v16_load(x + i), top);
    float most = v16_hmax(top), one[V16], tail = 0;
    for (uint32_t i = 0; i < n_tail; i++)
        most = m[i * step] * (float)M_LN2 > most ? m[i * step] * (float)M_LN2 : most;
    for (size_t i = 0; i < n; i += V16)
        total = v16_add(total, v16_exp(v16_sub(v16_load(x + i), v16_set1(most))));
    for (uint32_t i = 0; i < n_tail; i++) {
        v16_store(one, v16_exp(v16_set1(m[i * step] * (float)M_LN2 - most)));
        tail += sum[i * step] * one[0];
    }
    v16_store(one, v16_log(v16_set1(v16_hsum(total) + tail)));
    return most + one[0];
}

static void lane(const struct known_lane *l, float *tail, uint32_t n_tail, size_t partial_floats)
{
    size_t stride = known_work_floats(l->sink_rows) / KNOWN_HEADS;
    uint32_t o_stride = attend_o_stride(l->a->kv->geo->head_dim);
    struct attend_partial p = attend_partial_at(tail, l->group, o_stride, 1);
    for (uint32_t h = 0, n; h < l->group; h += n) {
        n = l->group - h < KNOWN_HEADS ? l->group - h : KNOWN_HEADS;
        if (n == 4)
            heads_of(l, h, 4);
        else if (n == 3)
            heads_of(l, h, 3);
        else if (n == 2)
            heads_of(l, h, 2);
        else
            heads_of(l, h, 1);
        for (uint32_t i = 0; i < n; i++)
            l->lse[h + i] = log_of_sum(l->work + i * stride, stride, p.m + h + i, p.l + h + i,
                                       n_tail, partial_floats);
    }
}
