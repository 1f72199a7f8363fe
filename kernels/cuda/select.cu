/* Selection: the best partitions of every lane, as lists of pages and of estimates.
 *
 * Scores of the group become one rank per partition (its share of the mass, or a raw score), ranks
 * become keys, and select.h finds the border. Lists are written in ascending order by prefix sums.
 * Ranks of REDUCE_*_RAW and NATIVE are the CPU's, bit for bit; probabilities differ from it by rounding.
 *
 * Bound by latency: five to seven rounds through a CTA or a cluster. A lane's scores are read once, into
 * registers (three times, mostly from L1, where they do not fit); a lane of 128K partitions is shared by 8
 * CTAs. */
#include "kernels/cuda/plan.h"
#include "kernels/cuda/select.h"

#include <string.h>

uint32_t cuda_select_ranks; /* for the bench, which tries others; 0: as shape_of chooses */

namespace
{

#define MASS_ONE \
    1099511627776.0f /* 2^40: the best partition's mass, where masses are whole numbers */

struct select_call {
    const struct cuda_row *rows;
    const struct cuda_lane *lanes; /* [kv_heads] of the layer */
    uint32_t kv_heads, group, reduce, map;
    uint32_t parts, part_rows; /* of a segment; 0: they differ */
    uint32_t first;            /* partition outside the sinks' pages */
    uint32_t sink_pages, block_rows;
    const float *scores, *known;
    uint32_t stride, four; /* four: scores are read four at a time */
    uint32_t page_cap, estimate_cap;
    uint32_t *pages, *masks, *n_pages, *estimates, *n_estimates, *unscored;
    float *share;
    uint32_t ranks;
    uint32_t *keys; /* [lane][keys_stride] scratch of a loop */
    uint32_t keys_stride;
    uint32_t *marks; /* [lane][pages_most][mask, share]: maps other than PAGE */
    uint32_t pages_most;
    const uint8_t *records;
    size_t record_bytes, record_lane_bytes, first_row;
};

/* What the code of a lane works on. */
struct lane_work {
    const struct select_call *c;
    const struct cuda_row *row;
    uint32_t lane, n, turn;
    uint32_t budget, estimate; /* these two and top_p: the row's, read before the wait */
    float top_p;
    bool raw;
    uint32_t most;       /* no key is greater */
    float best, inverse; /* greatest rank; 1 / that, or 0 */
    const uint8_t *base;
};

/* ---- ranks -------------------------------------------------------------------------------------- */

/* Scores of partitions i .. i + 3 of a head; -inf outside [first, n), and for NaN. */
__device__ inline void load_scores(const struct lane_work *w, uint32_t h, uint32_t i, float x[4])
{
    const struct select_call *c = w->c;
    const float *p = c->scores + ((size_t)w->lane * c->group + h) * c->stride + i;
    if (c->four && i + 4 <= w->n) {
        float4 v = *(const float4 *)p;
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++)
            x[e] = i + e < w->n ? p[e] : -INFINITY;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (!(x[e] > -INFINITY) || i + e < c->first)
            x[e] = -INFINITY;
}

/* Scores of a thread's partitions, for groups of at most G heads, then their exponentials; G = 0: they are
 * loaded again whenever they are needed. */
template <int K, int G> struct held {
    float x[G > 0 ? G : 1][G > 0 ? K : 1];
    uint32_t has; /* partitions with a score from some head */
};

template <int T, int K, int G>
__device__ void hold_scores(held<K, G> *held, const struct lane_work *w,
                            const select_keys<T, K> *keys)
{
    held->has = 0;
    if constexpr (G > 0) {
#pragma unroll
        for (int h = 0; h < G; h++)
#pragma unroll
            for (int j = 0; j < K / 4; j++) {
                uint32_t i = keys->begin + (j * T + threadIdx.x) * 4;
                float *x = &held->x[h][j * 4];
                x[0] = x[1] = x[2] = x[3] = -INFINITY;
                if (h < (int)w->c->group && i < keys->end)
                    load_scores(w, h, i, x);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    held->has |= (uint32_t)(x[e] > -INFINITY) << (j * 4 + e);
            }
    }
}

/* Calls f(x) with the scores of a head. */
template <int T, int K, int G, typename F>
__device__ inline void each_score(held<K, G> *held, const struct lane_work *w,
                                  select_keys<T, K> *keys, uint32_t h, F f)
{
    if constexpr (G > 0) {
#pragma unroll
        for (int g = 0; g < G; g++)
            if (g == (int)h)
#pragma unroll
                for (int k = 0; k < K; k++)
                    f(&held->x[g][k]);
    } else {
        keys->each([&](uint32_t i, uint32_t *) {
            float x[4];
            if (i >= keys->end)
                return;
            load_scores(w, h, i, x);
#pragma unroll
            for (int e = 0; e < 4; e++)
                f(&x[e]);
        });
    }
}

/* The greatest score of every head, ... */
template <int T, int K, int G>
__device__ void head_maxima(struct select_shared *s, const struct lane_work *w,
                            select_keys<T, K> *keys, held<K, G> *held)
{
    const uint32_t group = w->c->group;
#pragma unroll
    for (uint32_t h = 0; h < (G > 0 ? G : group); h++) {
        float top = -INFINITY;
        if (G > 0 && h >= group)
            break;
        each_score<T, K, G>(held, w, keys, h, [&](float *x) { top = fmaxf(top, *x); });
        uint32_t key = __reduce_max_sync(~0u, top > -INFINITY ? key_of(top) : 0);
        if (threadIdx.x % 32 == 0)
            atomicMax(&s->top[h], key);
    }
    all_sync(keys->ranks);
    for (uint32_t h = threadIdx.x; h < group; h += T) {
        uint32_t top = max_of_ranks(&s->top[h], keys->ranks);
        s->shift[h] = top > 0 ? -LOG2E * rank_of(top) : INFINITY;
        s->factor[h] =
            rank_of(top); /* the greatest; head_sums() needs it, and puts the factor here */
    }
    __syncthreads();
}

/* Adds up over a CTA in two words, the lower 20 bits and the others, of up to 2^21 numbers of 31 bits: shared memory
 * adds words by itself, and 64 bits in a loop of compare and swap, in which warps wait for each other. */
enum { SUM_LOW = 20 };

__device__ inline void add_to_sum(unsigned long long *to, unsigned long long x)
{
    uint32_t low = __reduce_add_sync(~0u, (uint32_t)x & ((1u << SUM_LOW) - 1));
    uint32_t high = __reduce_add_sync(~0u, (uint32_t)(x >> SUM_LOW));
    if (threadIdx.x % 32 == 0) {
        atomicAdd((uint32_t *)to, low);
        atomicAdd((uint32_t *)to + 1, high);
    }
}

__device__ inline unsigned long long whole_sum(unsigned long long sum, unsigned long long words)
{
    return sum + (words >> 32 << SUM_LOW) + (uint32_t)words;
}

/* ... then the sum of exponentials relative to it: shift and factor of its probabilities. */
template <int T, int K, int G>
__device__ void head_sums(struct select_shared *s, struct lane_work *w, select_keys<T, K> *keys,
                          held<K, G> *held)
{
    const uint32_t group = w->c->group;
#pragma unroll
    for (uint32_t h = 0; h < (G > 0 ? G : group); h++) {
        if (G > 0 && h >= group)
            break;
        float shift = s->shift[h];
        unsigned long long sum = 0;
        each_score<T, K, G>(held, w, keys, h, [&](float *x) {
            *x = exponential(*x, shift);
            sum += __float2uint_rn(*x * SUM_UNIT);
        });
        add_to_sum(&s->sum[h], sum);
    }
    all_sync(keys->ranks);
    for (uint32_t h = threadIdx.x; h < group; h += T) {
        unsigned long long sum = over_ranks(&s->sum[h], keys->ranks, keys->ranks, whole_sum);
        float z = (float)sum * (1.0f / SUM_UNIT), most = s->factor[h];
        const float *known = w->c->known;
        if (s->shift[h] ==
            INFINITY) { /* a head without scores has no say, or all are alike to it */
            s->factor[h] = known != NULL ? 0.0f : 0x1p100f / (float)w->n;
            s->limit[h] = known != NULL ? 0.0f : 1.0f / (float)w->n;
            continue;
        }
        if (known != NULL) {
            float x = known[(size_t)w->lane * group + h] - most;
            z += x < -87.0f ? 0.0f : expf(fminf(x, 88.0f));
        }
        s->factor[h] = s->limit[h] = z > 0 ? 1.0f / z : 0.0f;
    }
    __syncthreads();
    float limit = 0;
#pragma unroll 4
    for (uint32_t h = 0; h < group; h++)
        limit = w->c->reduce == REDUCE_SUM_PROB ? limit + s->limit[h] : fmaxf(limit, s->limit[h]);
    w->most = key_of(limit) + (1u << 20); /* for what is rounded up */
}

/* Adds a head's number to the rank of a partition. */
__device__ inline float reduced(const struct select_call *c, uint32_t h, float r, float x)
{
    bool most = c->reduce == REDUCE_MAX_PROB || c->reduce == REDUCE_MAX_RAW;
    return h == 0 ? x : most ? fmaxf(r, x) : __fadd_rn(r, x);
}

/* Ranks of 4 partitions, number k on of a thread's; -inf: none. */
template <int T, int K, int G>
__device__ inline void ranks_of(const struct select_shared *s, const struct lane_work *w,
                                const held<K, G> *held, uint32_t i, int k, float r[4])
{
    const struct select_call *c = w->c;
    const uint32_t heads = c->reduce == REDUCE_NATIVE ? 1 : c->group;
    uint32_t has = 0;
    if constexpr (G > 0) {
        has = held->has >> k;
#pragma unroll
        for (int h = 0; h < G; h++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (h < (int)heads) {
                    float x = held->x[h][k + e];
                    r[e] = reduced(c, h, r[e], w->raw ? x : __fmul_rn(x, s->factor[h]));
                }
    } else {
        for (uint32_t h = 0; h < heads; h++) {
            float x[4];
            load_scores(w, h, i, x);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                has |= (uint32_t)(x[e] > -INFINITY) << e;
                if (!w->raw)
                    x[e] = __fmul_rn(exponential(x[e], s->shift[h]), s->factor[h]);
                r[e] = reduced(c, h, r[e], x[e]);
            }
        }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        if (c->reduce == REDUCE_MEAN_RAW)
            r[e] = __fmul_rn(r[e], 1.0f / (float)c->group);
        if (!(has >> e & 1))
            r[e] = -INFINITY;
    }
}

/* How many candidates the lane has, the greatest key, and the first histogram: all CTAs are done. */
template <int T, int K>
__device__ uint32_t count_keys(struct select_shared *s, struct lane_work *w,
                               select_keys<T, K> *keys)
{
    count_first<T, K>(s, keys, w->most);
    all_sync(keys->ranks);
    total_of<T>(s, 0, 0, keys->ranks);
    if (threadIdx.x == T - 1)
        s->all_ranked = sum_of_ranks(&s->n_ranked, keys->ranks, keys->ranks);
    if (threadIdx.x == T - 33)
        s->all_best = max_of_ranks(&s->best, keys->ranks);
    __syncthreads();
    w->best = rank_of(s->all_best);
    w->inverse = w->best > 0 ? 1.0f / w->best : 0.0f;
    return s->all_ranked;
}

/* Keys, how many there are and the greatest, then their first histogram. equal: without scores. */
template <int T, int K, int G>
__device__ uint32_t make_keys(struct select_shared *s, struct lane_work *w, select_keys<T, K> *keys,
                              const held<K, G> *held, bool equal)
{
    uint32_t n = 0, best = 0;
    int k = 0;
    keys->make([&](uint32_t i, uint32_t *key) {
        float r[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
        if (i < keys->end) {
            if (!equal)
                ranks_of<T, K, G>(s, w, held, i, k, r);
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (equal && i + e >= w->c->first && i + e < w->n)
                    r[e] = 1.0f;
        }
        k += 4;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            key[e] = r[e] > -INFINITY ? key_of(r[e]) : 0;
            n += key[e] != 0;
            best = max(best, key[e]);
        }
    });
    n = __reduce_add_sync(~0u, n);
    best = __reduce_max_sync(~0u, best);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&s->n_ranked, n);
        atomicMax(&s->best, best);
    }
    if (w->raw || equal) {
        all_sync(keys->ranks);
        w->most = max_of_ranks(&s->best, keys->ranks);
    }
    return count_keys<T, K>(s, w, keys);
}

/* ---- how many ------------------------------------------------------------------------------------ */

__device__ inline float share_of(const struct lane_work *w, uint32_t key)
{
    float r = rank_of(key);
    return w->raw ? expf(r - w->best) : r * w->inverse;
}

/* Rows of partition i, and the first of them in the sequence. */
__device__ inline uint32_t rows_of(const struct lane_work *w, uint32_t i, uint32_t *first)
{
    const struct select_call *c = w->c;
    uint32_t segment = i / c->parts, p = i % c->parts;
    *first = segment * SEGMENT_ROWS + p * c->part_rows;
    if (c->part_rows > 0)
        return c->part_rows;
    const uint16_t *rows =
        (const uint16_t *)(w->base + w->row->records[segment] * c->record_bytes + c->first_row);
    *first = segment * SEGMENT_ROWS + rows[p];
    return rows[p + 1] - rows[p];
}

/* The best whose masses together are top_p of all. */
template <int T, int K>
__device__ uint32_t count_of_mass(struct select_shared *s, const struct lane_work *w,
                                  select_keys<T, K> *keys, uint32_t n_ranked)
{
    uint32_t key, above;
    unsigned long long left;
    auto weight = [&](uint32_t, uint32_t k) { return __float2ull_rn(share_of(w, k) * MASS_ONE); };
    if (!find_crossing<T, K>(s, keys, 0, w->top_p, weight, &key, &left, &above))
        return n_ranked;
    unsigned long long one = weight(0, key);
    return above + (uint32_t)((left + one - 1) / one);
}

/* The best whose rows fit the budget, where partitions differ. One CTA. */
template <int T, int K>
__device__ uint32_t count_of_rows(struct select_shared *s, struct lane_work *w,
                                  select_keys<T, K> *keys, uint32_t n_ranked)
{
    uint32_t key, above, upto = 0;
    unsigned long long left;
    auto weight = [&](uint32_t i, uint32_t) {
        uint32_t first;
        return (unsigned long long)rows_of(w, i, &first);
    };
    if (!find_crossing<T, K>(s, keys, (unsigned long long)w->budget + 1, 0, weight, &key, &left,
                             &above))
        return n_ranked;
    if (threadIdx.x == 0)
        s->n_above = above;
    __syncthreads();
    keys->each([&](uint32_t i, uint32_t *k) {
        uint32_t n = 0, total, first;
#pragma unroll
        for (int e = 0; e < 4; e++)
            n += k[e] == key ? rows_of(w, i + e, &first) : 0;
        uint32_t at = upto + block_scan<T>(s, n, &total, &w->turn);
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (k[e] == key) {
                at += rows_of(w, i + e, &first);
                if (at < left)
                    atomicAdd(&s->n_above, 1u);
            }
        upto += total;
    });
    __syncthreads();
    return s->n_above;
}

/* How many of the best are selected: at least one. */
template <int T, int K>
__device__ uint32_t count_selected(struct select_shared *s, struct lane_work *w,
                                   select_keys<T, K> *keys, uint32_t n_ranked)
{
    const struct select_call *c = w->c;
    uint32_t limit = c->part_rows > 0 ? w->budget / c->part_rows : w->budget;
    if (K == 0 && c->part_rows == 0)
        limit = min(limit, count_of_rows<T, K>(s, w, keys, n_ranked));
    if (w->top_p < 1)
        limit = min(limit, count_of_mass<T, K>(s, w, keys, n_ranked));
    return max(1u, min(limit, n_ranked));
}

/* ---- lists -------------------------------------------------------------------------------------- */

__device__ inline void put_page(const struct lane_work *w, uint32_t at, uint32_t page,
                                uint32_t mask, float share)
{
    const struct select_call *c = w->c;
    if (at >= c->page_cap)
        return; /* the caller's fault, but not a reason to write elsewhere */
    size_t to = (size_t)w->lane * c->page_cap + at;
    c->pages[to] = page;
    c->share[to] = share;
    if (c->masks != NULL)
        c->masks[to] = mask;
}

/* Pages (if they are partitions) and estimates, ascending, by the CTAs of the cluster in order. */
template <int T, int K, bool PAGES>
__device__ void put_lists(struct select_shared *s, struct lane_work *w, select_keys<T, K> *keys,
                          const struct border *chosen, const struct border *rest)
{
    const struct select_call *c = w->c;
    const uint32_t full = 0xffffffffu >> (32 - c->block_rows);
    uint32_t n_pages = 0, n_estimates = 0;
    if (keys->ranks > 1) { /* what the CTAs before this one will write */
        keys->each([&](uint32_t i, uint32_t *key) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                bool in = is_within(chosen, key[e], i + e) && key[e] != 0;
                n_pages += in;
                n_estimates += !in && key[e] != 0 && is_within(rest, key[e], i + e);
            }
        });
        n_pages = __reduce_add_sync(~0u, n_pages);
        n_estimates = __reduce_add_sync(~0u, n_estimates);
        if (threadIdx.x % 32 == 0) {
            atomicAdd(&s->n_pages, n_pages);
            atomicAdd(&s->n_estimates, n_estimates);
        }
        all_sync(keys->ranks);
        n_pages = sum_of_ranks(&s->n_pages, keys->rank, keys->ranks);
        n_estimates = sum_of_ranks(&s->n_estimates, keys->rank, keys->ranks);
    }
    n_pages += c->sink_pages;
    if (keys->rank == 0)
        for (uint32_t i = threadIdx.x; i < c->sink_pages; i += T)
            put_page(w, i, i, full, 1.0f);
    keys->each([&](uint32_t i, uint32_t *key) {
        bool in[4], out[4];
        uint32_t n = 0, total;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            in[e] = is_within(chosen, key[e], i + e) && key[e] != 0;
            out[e] = !in[e] && key[e] != 0 && is_within(rest, key[e], i + e);
            n += in[e] + (out[e] ? 0x10000u : 0);
        }
        uint32_t before = block_scan<T>(s, n, &total, &w->turn);
        uint32_t page = n_pages + (before & 0xffff), estimate = n_estimates + (before >> 16);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (PAGES && in[e])
                put_page(w, page++, i + e, full, share_of(w, key[e]));
            if (out[e])
                c->estimates[(size_t)w->lane * c->estimate_cap + estimate++] = i + e;
        }
        n_pages += total & 0xffff;
        n_estimates += total >> 16;
    });
    if (threadIdx.x == 0 && keys->rank + 1 == keys->ranks) {
        if (PAGES)
            c->n_pages[w->lane] = min(n_pages, c->page_cap);
        c->n_estimates[w->lane] = n_estimates;
    }
}

/* Pages that hold rows of what was chosen, with a mask of these rows: marks, then the marked ones in
 * order. One CTA. */
template <int T, int K>
__device__ void put_rows(struct select_shared *s, struct lane_work *w, select_keys<T, K> *keys,
                         const struct border *chosen)
{
    const struct select_call *c = w->c;
    uint32_t *marks = c->marks + (size_t)w->lane * c->pages_most * 2;
    const uint32_t n = w->row->n_segments * (SEGMENT_ROWS / c->block_rows);
    for (uint32_t i = threadIdx.x; i < 2 * n; i += T)
        marks[i] = 0;
    __syncthreads();
    keys->each([&](uint32_t i, uint32_t *key) {
        for (int e = 0; e < 4; e++) {
            if (key[e] == 0 || !is_within(chosen, key[e], i + e))
                continue;
            uint32_t row, share = __float_as_uint(share_of(w, key[e]));
            uint32_t end = rows_of(w, i + e, &row) + row;
            while (row < end) {
                uint32_t page = row / c->block_rows, at = row % c->block_rows;
                uint32_t some = min(c->block_rows - at, end - row);
                if (page >= c->sink_pages) { /* else it is whole already */
                    atomicOr(&marks[2 * page], 0xffffffffu >> (32 - some) << at);
                    atomicMax(&marks[2 * page + 1], share);
                }
                row += some;
            }
        }
    });
    __syncthreads();
    uint32_t n_pages = c->sink_pages;
    for (uint32_t first = 0; first < n; first += T) {
        uint32_t page = first + threadIdx.x, total;
        uint32_t mask = page < n ? __ldcg(&marks[2 * page]) : 0;
        uint32_t at = n_pages + block_scan<T>(s, mask != 0, &total, &w->turn);
        if (mask != 0)
            put_page(w, at, page, mask, __uint_as_float(__ldcg(&marks[2 * page + 1])));
        n_pages += total;
    }
    if (threadIdx.x == 0)
        c->n_pages[w->lane] = min(n_pages, c->page_cap);
}

/* ---- a lane -------------------------------------------------------------------------------------- */

/* A cluster of CTAs: one lane. K: keys of a thread; 0: in scratch, one CTA, any map. G: heads whose scores
 * stay in registers. Op: select. */
template <int T, int K, int G>
__global__ void __launch_bounds__(T) select_kernel(const __grid_constant__ struct select_call c)
{
    __shared__ __align__(16) struct select_shared s;
    struct lane_work w = {};
    struct held<K, G> held;
    select_keys<T, K> keys;
    allow_next_kernel();
    w.c = &c;
    w.lane = blockIdx.x / c.ranks;
    w.row = &c.rows[w.lane / c.kv_heads];
    w.n = w.row->n_segments * c.parts;
    w.budget = w.row->budget;
    w.estimate = w.row->estimate;
    w.top_p = w.row->top_p;
    w.raw = c.reduce != REDUCE_MAX_PROB && c.reduce != REDUCE_SUM_PROB;
    struct cuda_lane place = c.lanes[w.lane % c.kv_heads];
    w.base = c.records + place.index * c.record_lane_bytes;
    keys.rank = blockIdx.x % c.ranks;
    keys.ranks = c.ranks;
    const uint32_t slice = ((w.n + c.ranks - 1) / c.ranks + 3) / 4 * 4;
    keys.begin = min(w.n, keys.rank * slice);
    keys.end = min(w.n, keys.begin + slice);
    keys.scratch = K > 0 ? NULL : c.keys + (size_t)w.lane * c.keys_stride;
    const bool exists = w.row->row != ~0u && place.class_ == LANE_SPARSE;
    if (exists && w.n > 0)
        select_clear<T>(&s);
    wait_for_kernel_before();
    if (!exists)
        return;
    if (w.n == 0) {
        if (threadIdx.x == 0 && keys.rank == 0)
            c.n_pages[w.lane] = c.n_estimates[w.lane] = 0;
        return;
    }
    hold_scores<T, K, G>(&held, &w, &keys);
    if (!w.raw) {
        head_maxima<T, K, G>(&s, &w, &keys, &held);
        head_sums<T, K, G>(&s, &w, &keys, &held);
    }
    uint32_t n_ranked = make_keys<T, K, G>(&s, &w, &keys, &held, false);
    const bool scored = n_ranked > 0;
    if (!scored) {
        if (threadIdx.x == 0 && keys.rank == 0 && c.unscored != NULL)
            atomicAdd(c.unscored, 1u);
        all_sync(c.ranks); /* counts are read no more */
        n_ranked = make_keys<T, K, G>(&s, &w, &keys, &held, true);
    }
    struct border borders[2] = {{0xffffffffu, 0}, {0xffffffffu, 0}};
    if (n_ranked > 0) {
        uint32_t n = count_selected<T, K>(&s, &w, &keys, n_ranked);
        uint32_t more = scored ? min(w.estimate, min(c.estimate_cap, n_ranked - n)) : 0;
        const uint32_t k[2] = {n, more > 0 ? n + more : 0};
        find_borders<T, K>(&s, &keys, w.most, k, n_ranked, borders, &w.turn);
    }
    if (K == 0 && c.map != MAP_PAGE) {
        put_rows<T, K>(&s, &w, &keys, &borders[0]);
        put_lists<T, K, false>(&s, &w, &keys, &borders[0], &borders[1]);
    } else {
        put_lists<T, K, true>(&s, &w, &keys, &borders[0], &borders[1]);
    }
    if (c.ranks > 1)
        all_sync(c.ranks); /* others may still read what is shared */
}

/* ---- commands ------------------------------------------------------------------------------------ */

typedef void select_fn(struct select_call);

struct select_command {
    struct select_call c;
    uint32_t grid, threads, keys; /* keys: of a thread */
};

/* For groups of at most 4, and of at most 8 heads, and for any. */
template <int T, int K> select_fn *for_group(uint32_t group)
{
    if constexpr (K == 4)
        return group <= 4   ? select_kernel<T, 4, 4>
               : group <= 8 ? select_kernel<T, 4, 8>
                            : select_kernel<T, 4, 0>;
    if constexpr (K == 8)
        return group <= 4 ? select_kernel<T, 8, 4> : select_kernel<T, 8, 0>;
    return select_kernel<T, K, 0>;
}

select_fn *kernel_of(uint32_t threads, uint32_t keys, uint32_t group)
{
    if (keys == 0)
        return select_kernel<SELECT_LOOP, 0, 0>;
    if (threads < 1024)
        return threads == 128   ? for_group<128, 4>(group)
               : threads == 256 ? for_group<256, 4>(group)
                                : for_group<512, 4>(group);
    return keys == 4   ? for_group<1024, 4>(group)
           : keys == 8 ? for_group<1024, 8>(group)
                       : for_group<1024, 16>(group);
}

void run_select(struct cuda_backend *b, const void *params)
{
    const struct select_command *m = (const struct select_command *)params;
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attrs[2] = {};
    attrs[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[0].val.programmaticStreamSerializationAllowed = 1;
    attrs[1].id = cudaLaunchAttributeClusterDimension;
    attrs[1].val.clusterDim.x = m->c.ranks;
    attrs[1].val.clusterDim.y = attrs[1].val.clusterDim.z = 1;
    config.gridDim = dim3(m->grid);
    config.blockDim = dim3(m->threads);
    config.stream = b->stream;
    config.attrs = attrs;
    config.numAttrs = b->overlaps ? 1 + (m->c.ranks > 1) : 0;
    cuda_ok(b, cudaLaunchKernelEx(&config, kernel_of(m->threads, m->keys, m->c.group), m->c),
            "select");
}

/* Threads, keys of a thread and CTAs of a lane for n partitions: as many CTAs as the device has SMs,
 * but none with less than 1024 partitions. keys 0: a loop. */
void shape_of(const struct cuda_backend *b, struct select_command *m, uint32_t n, uint32_t lanes)
{
    uint32_t most = b->overlaps ? SELECT_RANKS : 1;
    m->c.ranks = 1;
    while (m->c.ranks < most && lanes * m->c.ranks * 2 <= (uint32_t)b->sms && n > m->c.ranks * 1024)
        m->c.ranks *= 2;
    while (m->c.ranks < most && n > m->c.ranks * 16384)
        m->c.ranks *= 2;
    if (cuda_select_ranks != 0)
        m->c.ranks = cuda_select_ranks;
    uint32_t of_cta = (n + m->c.ranks - 1) / m->c.ranks, threads = 128;
    while (threads < 1024 && threads * 4 < of_cta)
        threads *= 2;
    m->threads = threads;
    m->keys = of_cta <= threads * 4 ? 4 : of_cta <= 8192 ? 8 : of_cta <= 16384 ? 16 : 0;
}

} /* namespace */

struct cuda_select {
    void *scratch; /* keys, marks */
    size_t scratch_bytes;
};

/* false after an error. */
static bool take_scratch(struct cuda_backend *b, struct select_command *m, uint32_t lanes,
                         uint32_t n, uint32_t segments)
{
    struct cuda_select *s = b->select;
    m->c.keys_stride = (n + 3) / 4 * 4;
    m->c.pages_most = segments * (SEGMENT_ROWS / m->c.block_rows);
    size_t keys = digest_round((size_t)lanes * m->c.keys_stride * sizeof(uint32_t));
    size_t marks =
        m->c.map == MAP_PAGE ? 0 : (size_t)lanes * m->c.pages_most * 2 * sizeof(uint32_t);
    if (!cuda_reserve(b, &s->scratch, &s->scratch_bytes, keys + marks))
        return false;
    m->c.keys = (uint32_t *)s->scratch;
    m->c.marks = (uint32_t *)((uint8_t *)s->scratch + keys);
    return true;
}

static void fill_call(struct select_call *c, const struct select_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t sinks = (a->desc.sinks + g->block_rows - 1) / g->block_rows;
    c->lanes += (size_t)a->layer * g->kv_heads;
    c->kv_heads = g->kv_heads;
    c->group = a->group;
    c->reduce = a->reduce;
    c->map = a->map;
    c->parts = a->desc.parts;
    c->part_rows = a->desc.order == ORDER_KMEANS ? 0 : SEGMENT_ROWS / a->desc.parts;
    c->first = c->part_rows > 0 ? sinks * g->block_rows / c->part_rows : 0;
    c->sink_pages = sinks;
    c->block_rows = g->block_rows;
    c->scores = a->scores;
    c->known = a->known;
    c->stride = a->stride;
    c->four = a->stride % 4 == 0 && (uintptr_t)a->scores % 16 == 0;
    c->page_cap = a->page_cap;
    c->estimate_cap = a->estimate_cap;
    c->pages = a->pages;
    c->masks = a->masks;
    c->n_pages = a->n_pages;
    c->estimates = a->estimates;
    c->n_estimates = a->n_estimates;
    c->unscored = a->unscored;
    c->share = a->share;
    c->records = (const uint8_t *)a->kv->records;
    c->record_bytes = a->kv->record_bytes;
    c->record_lane_bytes = a->kv->record_lane_bytes;
    c->first_row = SEGMENT_ROWS * sizeof(uint16_t);
}

void cuda_select(struct backend *be, const struct select_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    const struct kv_geometry *g = a->kv->geo;
    struct select_command m;
    uint32_t rows = 0, segments = 0;
    memset(&m, 0, sizeof m);
    CHECK(a->map != MAP_PAGE || a->desc.parts == SEGMENT_ROWS / g->block_rows);
    CHECK(a->map == MAP_PAGE || a->masks != NULL);
    CHECK(a->desc.order == ORDER_KMEANS || SEGMENT_ROWS % a->desc.parts == 0);
    CHECK(a->group <= SELECT_HEADS);
    if (cuda_plan_select(b, a))
        return;
    m.c.rows = cuda_rows(b, g, a->rows, a->n_rows, &rows, &segments);
    m.c.lanes = cuda_lanes(b, g);
    if (m.c.rows == NULL || m.c.lanes == NULL)
        return;
    fill_call(&m.c, a);
    uint32_t lanes = rows * g->kv_heads, n = segments * a->desc.parts;
    shape_of(b, &m, n, lanes);
    if (m.c.map != MAP_PAGE || m.keys == 0) {
        m.keys = 0;
        m.threads = SELECT_LOOP;
        m.c.ranks = 1;
        if (!take_scratch(b, &m, lanes, n, segments))
            return;
    }
    m.grid = lanes * m.c.ranks;
    cuda_do(b, run_select, &m, sizeof m);
}

status cuda_select_open(struct cuda_backend *b)
{
    b->select = (struct cuda_select *)mem_alloc(sizeof *b->select);
    return cuda_plan_open(b);
}

void cuda_select_close(struct cuda_backend *b)
{
    if (b->select == NULL)
        return;
    cudaFree(b->select->scratch);
    mem_free(b->select);
    b->select = NULL;
}
