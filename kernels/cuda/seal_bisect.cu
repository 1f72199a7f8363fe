/* Balanced bisection (kernels/cpu/seal_order_vec.h) of a lane by a cluster of two CTAs with the keys in
 * their shared memory: 1,024 rows of 128 bf16 are 256 KiB, 30 more than one CTA may have.
 *
 * The first split is made by both together; after it each takes one side's rows from memory and works
 * alone. The tree goes down level by level. A warp always has 32 rows of storage: so a node has 16 warps,
 * then 8, 4, 2 with a barrier of their own; nodes of 32 and 16 rows need none. Eight threads share a row,
 * eight or sixteen channels each, and a warp reads four rows at a time without bank conflicts wherever they
 * lie: so a split moves indices, not rows.
 *
 * A row of the algorithm is x = inverse (k - mean), of length 1. Keys stay as they are, in bf16, and
 *   x . v = inverse (k . v - mean . v),   sum of x = sum of inverse k - mean sum of inverse.
 *
 * Needs sm_90; seal_order.cu does the same anywhere. */
#include "kernels/cuda/seal_bisect.h"

namespace
{

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/* ---- nodes of several warps; CL: of both CTAs ---- */

template <int PD> __device__ inline void team_sync(const struct team<PD> *t)
{
    asm volatile("bar.sync %0, %1;" ::"r"(WARPS / t->warps + t->node), "r"(t->warps * 32)
                 : "memory");
}

template <int PD>
__device__ inline struct bisect_shared<PD> *of_cta(const struct team<PD> *t, uint32_t rank) {
    return cg::this_cluster().map_shared_rank(t->s, rank);
}

/* Adds up the four rows that a warp reads at a time: a quarter of the channels is left to each thread. */
template <int PD>
__device__ inline void store_part(const struct team<PD> *t, const struct sums<PD> *sum)
{
    constexpr int n = PD / 8;
    const bool odd = t->group & 1, upper = t->group & 2;
    float half[n / 2], quarter[n / 4];
#pragma unroll
    for (int i = 0; i < n / 2; i++) {
        float mine = odd ? sum->k.x[i + n / 2] : sum->k.x[i];
        float other = odd ? sum->k.x[i] : sum->k.x[i + n / 2];
        half[i] = mine + __shfl_xor_sync(~0u, other, 8);
    }
#pragma unroll
    for (int i = 0; i < n / 4; i++) {
        float mine = upper ? half[i + n / 4] : half[i];
        float other = upper ? half[i] : half[i + n / 4];
        quarter[i] = mine + __shfl_xor_sync(~0u, other, 16);
    }
    const int i0 = odd * (n / 2) + upper * (n / 4);
    float *to = t->s->part + t->warp * PD + i0 / 8 * 64 + t->eighth * 8 + i0 % 8;
    if (n / 4 == 4)
        *(float4 *)to = make_float4(quarter[0], quarter[1], quarter[n / 4 - 2], quarter[n / 4 - 1]);
    else
        *(float2 *)to = make_float2(quarter[0], quarter[1]);
    float weight = sum->weight;
    uint32_t count = sum->count;
    weight += __shfl_xor_sync(~0u, weight, 8);
    weight += __shfl_xor_sync(~0u, weight, 16);
    count += __shfl_xor_sync(~0u, count, 8);
    count += __shfl_xor_sync(~0u, count, 16);
    if (t->lane == 0) {
        t->s->weight[t->warp] = weight;
        t->s->count[t->warp] = count;
    }
}

template <int PD> __device__ inline float channel_sum(const struct team<PD> *t, uint32_t c)
{
    float sum = 0;
    for (uint32_t w = 0; w < t->warps; w++)
        sum += t->s->part[(t->first_warp + w) * PD + c];
    return sum;
}

/* Makes the sums of the node's warps known to all: weight and count here, channels by node_sum. */
template <int PD, bool CL>
__device__ inline void share_sums(struct team<PD> *t, const struct sums<PD> *sum, float *weight,
                                  uint32_t *count)
{
    store_part(t, sum);
    team_sync(t);
    *weight = 0;
    *count = 0;
    for (uint32_t w = t->first_warp; w < t->first_warp + t->warps; w++) {
        *weight += t->s->weight[w];
        *count += t->s->count[w];
    }
    if (!CL)
        return;
    t->turn ^= 1;
    if (threadIdx.x < PD) {
        float x = channel_sum(t, threadIdx.x);
        for (uint32_t r = 0; r < CTAS; r++)
            of_cta(t, r)->exchange[t->turn][t->rank][threadIdx.x] = x;
    }
    if (threadIdx.x < CTAS) {
        of_cta(t, threadIdx.x)->exchange_weight[t->turn][t->rank] = *weight;
        of_cta(t, threadIdx.x)->exchange_count[t->turn][t->rank] = *count;
    }
    cg::this_cluster().sync();
    *weight = t->s->exchange_weight[t->turn][0] + t->s->exchange_weight[t->turn][1];
    *count = t->s->exchange_count[t->turn][0] + t->s->exchange_count[t->turn][1];
}

template <int PD, bool CL> __device__ inline float node_sum(const struct team<PD> *t, uint32_t c)
{
    return CL ? t->s->exchange[t->turn][0][c] + t->s->exchange[t->turn][1][c] : channel_sum(t, c);
}

/* Channels of a vector are the team's threads': this one's first, and the step to its next. */
#define TEAM_CHANNELS(t, c) \
    for (uint32_t c = ((t)->warp - (t)->first_warp) * 32 + (t)->lane; c < PD; c += (t)->warps * 32)

template <int PD> __device__ inline uint32_t first_row(const struct team<PD> *t)
{
    return t->warp * 32 + t->group;
}

/* d->v = sum of the node's rows, which also stays in total. */
template <int PD, bool CL> __device__ void sum_node(struct team<PD> *t, struct direction<PD> *d)
{
    float weight, *total = t->s->total + t->first_warp * PD;
    uint32_t count;
    struct sums<PD> sum =
        sum_rows<PD, WEIGH_ALL>(t->s, t->at, t->eighth, first_row(t), 4, t->low, NULL);
    share_sums<PD, CL>(t, &sum, &weight, &count);
    TEAM_CHANNELS(t, c)
    total[c] = node_sum<PD, CL>(t, c) - t->s->mean[c] * weight;
    team_sync(t);
    d->v = load_vector<PD>(total, t->eighth);
    point(t->s, t->eighth, d);
}

/* x of the row that lies farthest back on d. */
template <int PD, bool CL>
__device__ struct vec<PD> farthest_row(struct team<PD> *t, const struct direction<PD> *d,
                                       uint32_t turn) {
    struct bisect_shared<PD> *s = t->s;
    unsigned long long best = project_rows<PD>(s, t->at, t->eighth, first_row(t), 4, t->low, d);
    best = lesser(lesser(best, 8), 16);
    if (t->lane == 0)
        s->best[turn][t->warp] = best;
    team_sync(t);
    best = s->best[turn][t->first_warp + t->lane % t->warps];
    for (int i = 1; i < WARPS; i *= 2)
        best = lesser(best, i);
    if (!CL) {
        uint32_t row = (uint32_t)best, slot = s->slot[t->at][row < HALF ? row : HALF - 1];
        return unit_row<PD>(s, s->rows, slot, s->inverse[slot], t->eighth);
    }
    if (threadIdx.x < CTAS)
        of_cta(t, threadIdx.x)->exchange_best[turn][t->rank] = best == ~0ull
                                                                   ? best
                                                                   : best + t->rank * HALF;
    cg::this_cluster().sync();
    unsigned long long a = s->exchange_best[turn][0], b = s->exchange_best[turn][1];
    uint32_t position = (uint32_t)(a < b ? a : b) % SEGMENT_ROWS; /* slots are still by position */
    return unit_row<PD>(s, of_cta(t, position / HALF)->rows, position % HALF,
                        s->all_inverse[position], t->eighth);
}

/* A round of 2-means: false if nothing would change any more. */
template <int PD, bool CL>
__device__ bool move_axis(struct team<PD> *t, struct direction<PD> *d)
{
    struct bisect_shared<PD> *s = t->s;
    float weight, threshold = 0, offset = 0, *axis = s->axis + t->first_warp * PD;
    uint32_t n_a;
    struct sums<PD> sum =
        sum_rows<PD, WEIGH_ABOVE>(s, t->at, t->eighth, first_row(t), 4, t->low, d);
    share_sums<PD, CL>(t, &sum, &weight, &n_a);
    if (n_a == 0 || n_a == t->n)
        return false;
    const float of_a = 1.0f / (float)n_a, of_b = 1.0f / (float)(t->n - n_a);
    TEAM_CHANNELS(t, c)
    {
        float x = node_sum<PD, CL>(t, c) - s->mean[c] * weight;
        float a = x * of_a, b = (s->total[t->first_warp * PD + c] - x) * of_b;
        axis[c] = a - b;
        threshold = fmaf(0.5f * (a - b), a + b, threshold);
        offset = fmaf(a - b, s->mean[c], offset);
    }
    threshold = seal_warp_sum(threshold);
    offset = seal_warp_sum(offset);
    if (t->lane == 0) {
        s->threshold[t->warp] = threshold;
        s->offset[t->warp] = offset;
    }
    team_sync(t);
    d->v = load_vector<PD>(axis, t->eighth);
    d->threshold = d->offset = 0;
    for (uint32_t w = t->first_warp; w < t->first_warp + t->warps; w++) {
        d->threshold += s->threshold[w];
        d->offset += s->offset[w];
    }
    return true;
}

/* The k-th smallest (from 1) of a team's keys, `KEYS` per thread, or a number up to the next of them; *ties: how
 * many of its equals, if there are any, count at most. */
template <int PD, int KEYS>
__device__ uint32_t kth_key(const struct team<PD> *t, const uint32_t *key, const bool *valid,
                            uint32_t k, uint32_t *ties)
{
    uint32_t prefix = 0, mask = 0, turn = 0;
    for (int shift = 32 - DIGIT; shift >= 0; shift -= DIGIT, turn ^= 1) {
        uint32_t count = 0;
#pragma unroll
        for (int j = 0; j < KEYS; j++) { /* lane b counts digit b */
            uint32_t who = __ballot_sync(~0u, valid[j] && ((key[j] ^ prefix) & mask) == 0);
#pragma unroll
            for (int bit = 0; bit < DIGIT; bit++) {
                uint32_t set = __ballot_sync(~0u, key[j] >> (shift + bit) & 1);
                who &= t->lane >> bit & 1 ? set : ~set;
            }
            count += __popc(who);
        }
        if (t->lane < 1 << DIGIT)
            t->s->histogram[turn][t->warp][t->lane] = count;
        team_sync(t);
        count = 0;
        for (uint32_t w = 0; w < t->warps; w++)
            count += t->s->histogram[turn][t->first_warp + w][t->lane % (1 << DIGIT)];
        uint32_t sum = count;
        for (int i = 1; i < 1 << DIGIT; i *= 2) {
            uint32_t before = __shfl_up_sync(~0u, sum, i, 1 << DIGIT);
            sum += t->lane % (1 << DIGIT) >= i ? before : 0;
        }
        int digit = __ffs((int)__ballot_sync(~0u, sum >= k)) - 1;
        k -= __shfl_sync(~0u, sum - count, digit);
        prefix |= (uint32_t)digit << shift;
        mask |= ((1u << DIGIT) - 1) << shift;
        if (k == __shfl_sync(~0u, count, digit)) {
            prefix |=
                ~mask; /* all that begin so are among them: what follows makes no difference */
            break;
        }
    }
    *ties = k;
    return prefix;
}

/* Where rows go: the n_left of least key to [0, n_left), the others behind, each side in its old order. Rows
 * are the team's threads in order, `KEYS` times; number[j] counts valid ones before a row. */
template <int PD, int KEYS>
__device__ void part_team(const struct team<PD> *t, const uint32_t *key, const bool *valid,
                          const uint32_t *number, uint32_t n_left, uint32_t *target)
{
    uint32_t ties, border = kth_key<PD, KEYS>(t, key, valid, n_left, &ties);
    uint32_t below[KEYS], equal[KEYS];
    for (int j = 0; j < KEYS; j++) {
        below[j] = __ballot_sync(~0u, valid[j] && key[j] < border);
        equal[j] = __ballot_sync(~0u, valid[j] && key[j] == border);
        if (t->lane == 0)
            t->s->sides[j][t->warp] = __popc(below[j]) | __popc(equal[j]) << 16;
    }
    team_sync(t);
    const uint32_t me = t->warp - t->first_warp, before = (1u << t->lane) - 1;
    uint32_t all = 0;
    for (int j = 0; j < KEYS; j++) {
        uint32_t count = t->lane < t->warps ? t->s->sides[j][t->first_warp + t->lane] : 0;
        uint32_t sum = all + __reduce_add_sync(~0u, t->lane < me ? count : 0);
        all += __reduce_add_sync(~0u, count);
        uint32_t n_below = (sum & 0xffff) + __popc(below[j] & before);
        uint32_t n_equal = (sum >> 16) + __popc(equal[j] & before);
        bool left = key[j] < border || (key[j] == border && n_equal < ties);
        uint32_t lefts = n_below + (n_equal < ties ? n_equal : ties);
        target[j] = left ? lefts : n_left + number[j] - lefts;
    }
}

/* Splits a node of this CTA. */
template <int PD> __device__ void split_team(struct team<PD> *t)
{
    struct bisect_shared<PD> *s = t->s;
    struct direction<PD> d;
    const uint32_t row = t->warp * 32 + t->lane;
    if (t->low >= t->middle) { /* all of it is in the right half */
        s->slot[t->at ^ 1][row] = s->slot[t->at][row];
        team_sync(t);
        return;
    }
    sum_node<PD, false>(t, &d);
    struct vec<PD> a = farthest_row<PD, false>(t, &d, 0);
    d.v = a;
    point(s, t->eighth, &d);
    struct vec<PD> b = farthest_row<PD, false>(t, &d, 1);
    point_between(s, t->eighth, a, b, &d);
    for (int round = 0; round < SEAL_ROUNDS; round++)
        if (!move_axis<PD, false>(t, &d))
            break;
    project_rows<PD>(s, t->at, t->eighth, first_row(t), 4, t->low, &d);
    __syncwarp();
    const bool valid = row >= t->low;
    const uint32_t key = (uint32_t)s->keys[row] ^ 0x80000000u, number = row - t->low;
    uint32_t target;
    part_team<PD, 1>(t, &key, &valid, &number, t->middle - t->low, &target);
    s->slot[t->at ^ 1][valid ? t->low + target : row] = s->slot[t->at][row];
    team_sync(t);
}

/* ---- the first split ---- */

/* Rows of storage [low, HALF) from memory: slot i is row position[i]. A thread has the same 16 bytes of rows
 * STEP apart, LOADS of them on their way at a time: one by one, each waits for the name of its block and then
 * for memory. */
template <int PD, int NUMBER>
__device__ inline void load_keys(const struct seal_call *c, const struct team<PD> *t, uint32_t lane)
{
    constexpr uint32_t UNITS = PD / 8, STEP = THREADS / UNITS, LOADS = 8;
    static_assert(HALF % (STEP * LOADS) == 0, "whole turns");
    struct bisect_shared<PD> *s = t->s;
    uint8_t *pages = seal_pages(c, lane);
    const uint32_t at = threadIdx.x % UNITS;
    const bool has = at < c->dim / 8;
    for (uint32_t slot = threadIdx.x / UNITS; slot < HALF; slot += STEP * LOADS) {
        uint32_t row[LOADS];
        block_id block[LOADS];
        uint4 w[LOADS];
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++) { /* of any slot: below `low` they are zeroed behind */
            row[i] = s->position[slot + i * STEP];
            block[i] = c->job->from[row[i] >> c->row_shift];
        }
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++) {
            w[i] = make_uint4(0, 0, 0, 0);
            if (has)
                w[i] = seal_eight(NUMBER, seal_row_of(c, pages, block[i], 0, row[i]), at * 8);
        }
#pragma unroll
        for (uint32_t i = 0; i < LOADS; i++)
            s->rows[(slot + i * STEP) * UNITS + at] =
                slot + i * STEP >= t->low ? w[i] : make_uint4(0, 0, 0, 0);
    }
}

template <int PD>
__device__ void load_rows(const struct seal_call *c, struct team<PD> *t, uint32_t lane)
{
    struct bisect_shared<PD> *s = t->s;
    if (c->number == 1)
        load_keys<PD, 1>(c, t, lane);
    else
        load_keys<PD, 2>(c, t, lane);
    for (uint32_t i = threadIdx.x; i < HALF; i += THREADS) {
        s->slot[0][i] = (uint16_t)i;
        s->inverse[i] = i >= t->low ? s->all_inverse[s->position[i]] : 0.0f;
    }
    __syncthreads();
}

/* Mean, and 1 / length of every row. */
template <int PD> __device__ void centre(struct team<PD> *t)
{
    struct bisect_shared<PD> *s = t->s;
    float weight;
    uint32_t count;
    struct sums<PD> sum = sum_rows<PD, COUNT_ALL>(s, 0, t->eighth, first_row(t), 4, t->low, NULL);
    share_sums<PD, true>(t, &sum, &weight, &count);
    if (threadIdx.x < PD)
        s->mean[threadIdx.x] = node_sum<PD, true>(t, threadIdx.x) * (1.0f / (float)t->n);
    __syncthreads();
    const struct vec<PD> mean = load_vector<PD>(s->mean, t->eighth);
    for (uint32_t row = first_row(t), it = 0; it < 8; it++, row += 4) {
        struct vec<PD> k = load_row<PD>(s->rows, row, t->eighth);
#pragma unroll
        for (int i = 0; i < PD / 8; i++)
            k.x[i] -= mean.x[i];
        float square = dot(k, k);
        float inverse = square > 1e-30f && row >= t->low ? 1.0f / sqrtf(square) : 0.0f;
        if (t->eighth == 0)
            s->inverse[row] = inverse;
        if (t->eighth < CTAS)
            of_cta(t, t->eighth)->all_inverse[t->rank * HALF + row] = inverse;
    }
    __syncwarp();
}

/* Splits the segment: position[] becomes that of the rows on this CTA's side. */
template <int PD> __device__ void split_first(struct team<PD> *t, uint32_t first)
{
    struct bisect_shared<PD> *s = t->s;
    struct direction<PD> d;
    sum_node<PD, true>(t, &d);
    struct vec<PD> a = farthest_row<PD, true>(t, &d, 0);
    d.v = a;
    point(s, t->eighth, &d);
    struct vec<PD> b = farthest_row<PD, true>(t, &d, 1);
    point_between(s, t->eighth, a, b, &d);
    for (int round = 0; round < SEAL_ROUNDS; round++)
        if (!move_axis<PD, true>(t, &d))
            break;
    project_rows<PD>(s, 0, t->eighth, first_row(t), 4, t->low, &d);
    __syncthreads();
    int own = s->keys[threadIdx.x];
    cg::this_cluster().sync(); /* from here on keys are those of both CTAs */
    for (uint32_t r = 0; r < CTAS; r++)
        of_cta(t, r)->keys[t->rank * HALF + threadIdx.x] = own;
    cg::this_cluster().sync();
    uint32_t key[CTAS], number[CTAS], target[CTAS];
    bool valid[CTAS];
    for (uint32_t j = 0; j < CTAS; j++) {
        uint32_t position = j * HALF + threadIdx.x;
        key[j] = (uint32_t)s->keys[position] ^ 0x80000000u;
        valid[j] = position >= first;
        number[j] = position - first;
    }
    part_team<PD, CTAS>(t, key, valid, number, HALF - first, target);
    for (uint32_t j = 0; j < CTAS; j++)
        if (uint32_t to = first + target[j]; valid[j] && to / HALF == t->rank)
            s->position[to % HALF] = (uint16_t)(j * HALF + threadIdx.x);
    __syncthreads();
}

/* ---- nodes of a warp, or of half of one ----
 *
 * P nodes of 32 / P rows. Everything is in registers; what belongs to a node is the same in its threads. */

template <int P> __device__ inline float node_add(float x)
{
    x += __shfl_xor_sync(~0u, x, 8);
    return P == 1 ? x + __shfl_xor_sync(~0u, x, 16) : x;
}

template <int PD, int P> __device__ inline void add_up(struct sums<PD> *sum)
{
#pragma unroll
    for (int i = 0; i < PD / 8; i++)
        sum->k.x[i] = node_add<P>(sum->k.x[i]);
    sum->weight = node_add<P>(sum->weight);
    sum->count += __shfl_xor_sync(~0u, sum->count, 8);
    if (P == 1)
        sum->count += __shfl_xor_sync(~0u, sum->count, 16);
}

/* k sums to sums of x. */
template <int PD> __device__ inline void centre_sum(const struct team<PD> *t, struct sums<PD> *sum)
{
    struct vec<PD> mean = load_vector<PD>(t->s->mean, t->eighth);
#pragma unroll
    for (int i = 0; i < PD / 8; i++)
        sum->k.x[i] -= mean.x[i] * sum->weight;
}

template <int PD, int P>
__device__ inline struct vec<PD> farthest_in_warp(const struct team<PD> *t,
                                                  const struct direction<PD> *d, uint32_t row,
                                                  uint32_t step) {
    struct bisect_shared<PD> *s = t->s;
    unsigned long long best = project_rows<PD>(s, t->at, t->eighth, row, step, t->low, d);
    best = lesser(best, 8);
    if (P == 1)
        best = lesser(best, 16);
    uint32_t slot = s->slot[t->at][(uint32_t)best < t->end ? (uint32_t)best : t->end - 1];
    return unit_row<PD>(s, s->rows, slot, s->inverse[slot], t->eighth);
}

template <int PD, int P>
__device__ void split_in_warp(struct team<PD> *t)
{
    struct bisect_shared<PD> *s = t->s;
    const uint32_t row = t->warp * 32 + (P == 1 ? t->group : t->group / 2 * 16 + t->group % 2);
    const uint32_t step = P == 1 ? 4 : 2, size = WARP_NODE / P;
    struct direction<PD> d;
    struct sums<PD> total = sum_rows<PD, WEIGH_ALL>(s, t->at, t->eighth, row, step, t->low, NULL);
    add_up<PD, P>(&total);
    centre_sum(t, &total);
    d.v = total.k;
    point(s, t->eighth, &d);
    struct vec<PD> a = farthest_in_warp<PD, P>(t, &d, row, step);
    d.v = a;
    point(s, t->eighth, &d);
    struct vec<PD> b = farthest_in_warp<PD, P>(t, &d, row, step);
    point_between(s, t->eighth, a, b, &d);
    for (int round = 0; round < SEAL_ROUNDS; round++) {
        struct sums<PD> sum = sum_rows<PD, WEIGH_ABOVE>(s, t->at, t->eighth, row, step, t->low, &d);
        add_up<PD, P>(&sum);
        const bool moves = sum.count > 0 && sum.count < t->n;
        if (!__any_sync(~0u, moves))
            break;
        centre_sum(t, &sum);
        struct direction<PD> next;
        const float of_a = 1.0f / (float)sum.count, of_b = 1.0f / (float)(t->n - sum.count);
#pragma unroll
        for (int i = 0; i < PD / 8; i++) {
            a.x[i] = sum.k.x[i] * of_a;
            b.x[i] = (total.k.x[i] - sum.k.x[i]) * of_b;
        }
        point_between(s, t->eighth, a, b, &next);
        if (moves)
            d = next;
    }
    project_rows<PD>(s, t->at, t->eighth, row, step, t->low, &d);
    __syncwarp();
    const uint32_t own = t->warp * 32 + t->lane, me = t->lane % size;
    const uint32_t nodes = P == 1 ? ~0u : 0xffffu << (t->lane & 16), before = (1u << t->lane) - 1;
    const uint32_t key = (uint32_t)s->keys[own] ^ 0x80000000u;
    const bool valid = own >= t->low;
    const uint32_t who = __ballot_sync(~0u, valid) & nodes;
    uint32_t rank = 0;
    for (uint32_t j = 0; j < size; j++) {
        uint32_t other = __shfl_sync(~0u, key, j, size);
        bool is = who >> (t->lane - me + j) & 1;
        rank += is && (other < key || (other == key && j < me));
    }
    const bool left = valid && rank + t->low < t->middle;
    const uint32_t lefts = __ballot_sync(~0u, left) & nodes;
    uint32_t to =
        left ? t->low + __popc(lefts & before) : t->middle + __popc(who & ~lefts & before);
    s->slot[t->at ^ 1][valid && t->low < t->middle ? to : own] = s->slot[t->at][own];
    __syncwarp();
}

/* ---- the tree ---- */

/* Sets the team of this thread for a level of nodes of `size` rows. */
template <int PD> __device__ inline void form(struct team<PD> *t, uint32_t size, uint32_t low)
{
    uint32_t begin = (t->warp * 32 + (size < 32 ? t->lane & 16 : 0)) / size * size;
    t->warps = size >= 32 ? size / 32 : 1;
    t->node = begin / size;
    t->first_warp = begin / 32;
    t->low = begin > low ? begin : low;
    t->middle = begin + size / 2;
    t->end = begin + size;
    t->n = t->end > t->low ? t->end - t->low : 0;
}

#endif

/* One cluster of two CTAs per lane. Bound by instructions, about 50 of a warp per four rows and pass, and
 * by barriers at the upper levels; reads K twice, the second time from L2. Op: seal. */
template <int PD>
__global__ void __launch_bounds__(THREADS, 1)
    bisect_cluster(const __grid_constant__ struct seal_call c)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    extern __shared__ uint4 shared[];
    struct team<PD> t = {
        (struct bisect_shared<PD> *)shared, threadIdx.x / 32, threadIdx.x % 32
    };
    struct bisect_shared<PD> *s = t.s;
    const uint32_t lane = blockIdx.x / CTAS, first = c.job->sink_rows;
    if (c.lanes[lane].class_ != LANE_SPARSE)
        return; /* both CTAs */
    t.rank = blockIdx.x % CTAS;
    t.group = t.lane / 8;
    t.eighth = t.lane % 8;
    const uint32_t low = first <= t.rank * HALF         ? 0
                         : first >= (t.rank + 1) * HALF ? HALF
                                                        : first - t.rank * HALF;
    form(&t, HALF, low);
    t.n = SEGMENT_ROWS - first;
    s->position[threadIdx.x] = (uint16_t)(t.rank * HALF + threadIdx.x);
    s->all_inverse[threadIdx.x] = s->all_inverse[HALF + threadIdx.x] = 0;
    cg::this_cluster().sync(); /* the other one has begun, and cleared its own */
    load_rows(&c, &t, lane);
    centre(&t);
    if (first < HALF)
        split_first(&t, first);
    cg::this_cluster().sync(); /* nobody reads this one's rows any more */
    load_rows(&c, &t, lane);
    t.at = 0;
    for (uint32_t size = HALF; size > 1u << c.row_shift; size /= 2, t.at ^= 1) {
        form(&t, size, low);
        if (size > WARP_NODE)
            split_team(&t);
        else if (size == WARP_NODE)
            split_in_warp<PD, 1>(&t);
        else
            split_in_warp<PD, 2>(&t);
    }
    __syncthreads();
    uint16_t *order = (uint16_t *)seal_record(&c, lane, c.job->record) + t.rank * HALF;
    order[threadIdx.x] = s->position[s->slot[t.at][threadIdx.x]];
#endif
}

template <int PD> void launch(struct cuda_backend *b, const struct seal_call *c)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = CTAS;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    config.gridDim = dim3(c->n_lanes * CTAS);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = sizeof(struct bisect_shared<PD>);
    config.stream = b->stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    cuda_ok(b, cudaLaunchKernelEx(&config, bisect_cluster<PD>, *c), "seal: bisection");
}

} /* namespace */

/* Clusters are sm_90's, as overlapping launches are. */
bool seal_bisect_fits(const struct cuda_backend *b, const struct seal_call *c)
{
    return b->overlaps && c->dim % 8 == 0 && c->dim <= 128;
}

status seal_bisect_open(struct cuda_backend *b)
{
    if (b->overlaps && (!cuda_ok(b,
                                 cudaFuncSetAttribute(bisect_cluster<64>,
                                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                      (int)sizeof(struct bisect_shared<64>)),
                                 "seal: shared memory") ||
                        !cuda_ok(b,
                                 cudaFuncSetAttribute(bisect_cluster<128>,
                                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                      (int)sizeof(struct bisect_shared<128>)),
                                 "seal: shared memory")))
        return err(b->error, "%s", b->text);
    return OK;
}

void seal_bisect(struct cuda_backend *b, const struct seal_call *c)
{
    if (c->dim <= 64)
        launch<64>(b, c);
    else
        launch<128>(b, c);
}
