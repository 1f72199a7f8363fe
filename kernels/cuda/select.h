/* The best k of many numbers, for select and for coarse-to-fine scores.
 *
 * Numbers are keys: 32-bit integers of the same order, 0 for what is no candidate. A cluster of `ranks`
 * CTAs owns a lane; each has a slice of its keys, in registers (K of a thread) or in scratch (K = 0).
 *
 * The k-th largest key is found by histograms in shared memory, which the CTAs of a cluster read of each
 * other: of distances from the greatest key, in steps of 1/16 of an octave over 16 octaves, then finer. Two
 * are enough unless numbers are as good as equal; a border further down is found byte by byte. Every sum
 * is of whole numbers: how many CTAs share a lane cannot be seen. */
#ifndef KERNELS_CUDA_SELECT_H
#define KERNELS_CUDA_SELECT_H

#include "kernels/core/digest.h"
#include "kernels/cuda/attend_mma.h"

enum {
    SELECT_BINS = 256,
    SELECT_PASSES = 4,
    SELECT_HEADS = 32, /* of a group at most */
    SELECT_RANKS = 8,  /* CTAs of a cluster at most */
    SELECT_LOOP = 1024 /* threads of a CTA that loops over its keys */
};

/* Opens the best groups of every lane, by their share of the mass summed over the heads. A group's logit
 * is the mean of those of its coarse digests that have one. */
struct cuda_choice {
    const struct cuda_row *rows;
    const struct cuda_lane *lanes; /* [kv_heads] of the layer */
    uint32_t kv_heads, group;
    const float *scores;                /* [lane][group][stride] of coarse digests */
    uint32_t stride, per_group, groups; /* groups: of a segment */
    float share;                        /* of the groups to open; one at least */
    uint32_t *keys;                     /* [lane][open_stride] scratch */
    uint8_t *open;                      /* [lane][open_stride] */
    uint32_t open_stride;
};
void cuda_choose(struct cuda_backend *b, const struct cuda_choice *c, uint32_t lanes);

#define SUM_UNIT 2147483648.0f /* of shared sums of exponentials */
#define LOG2E    1.44269504f

/* e^(x - greatest) by an exponent in base 2; none is less than -100: next to nothing is all alike. */
__device__ static inline float exponential(float x, float shift)
{
    return exp2_fast(fmaxf(fmaf(x, LOG2E, shift), -100.0f));
}

/* ---- clusters ---- */

__device__ static inline void all_sync(uint32_t ranks)
{
#if __CUDA_ARCH__ >= 900
    if (ranks > 1) {
        asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::
                         : "memory");
        return;
    }
#endif
    __syncthreads();
}

/* The same variable of another CTA of the cluster: 4 or 8 bytes in shared memory. */
template <typename X> __device__ static inline X of_rank(const X *p, uint32_t rank, uint32_t ranks)
{
#if __CUDA_ARCH__ >= 900
    if (ranks > 1) {
        uint32_t at;
        X x;
        asm volatile("mapa.shared::cluster.u32 %0,%1,%2;"
                     : "=r"(at)
                     : "r"(shared_address(p)), "r"(rank));
        if constexpr (sizeof(X) == 8)
            asm volatile("ld.shared::cluster.u64 %0,[%1];" : "=l"(x) : "r"(at) : "memory");
        else
            asm volatile("ld.shared::cluster.u32 %0,[%1];" : "=r"(x) : "r"(at) : "memory");
        return x;
    }
#endif
    return *p;
}

/* Of the ranks [0, n) of the cluster: all loads are under way before the first is used. */
template <typename X, typename F>
__device__ static inline X over_ranks(const X *p, uint32_t n, uint32_t ranks, F f)
{
    X x[SELECT_RANKS], sum = 0;
    if (ranks == 1)
        return n > 0 ? f(sum, *p) : 0;
#pragma unroll
    for (uint32_t r = 0; r < SELECT_RANKS; r++)
        x[r] = r < n ? of_rank(p, r, ranks) : 0;
#pragma unroll
    for (uint32_t r = 0; r < SELECT_RANKS; r++)
        sum = f(sum, x[r]);
    return sum;
}

template <typename X>
__device__ static inline X sum_of_ranks(const X *p, uint32_t n, uint32_t ranks)
{
    return over_ranks(p, n, ranks, [](X a, X b) { return a + b; });
}

template <typename X> __device__ static inline X max_of_ranks(const X *p, uint32_t ranks)
{
    return over_ranks(p, ranks, ranks, [](X a, X b) { return a > b ? a : b; });
}

/* ---- keys ---- */

__device__ static inline uint32_t key_of(float x)
{
    uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f)); /* -0 is 0 */
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ static inline float rank_of(uint32_t key)
{
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/* What is better than this, or equal and before `end`, is within. */
struct border {
    uint32_t key, end;
};

__device__ static inline bool is_within(const struct border *b, uint32_t key, uint32_t i)
{
    return key > b->key || (key == b->key && i < b->end);
}

struct found {
    uint32_t bin, before, count;
};

struct select_shared {
    uint32_t hist[SELECT_PASSES][2][SELECT_BINS];
    uint32_t total[2][SELECT_BINS]; /* of the cluster */
    struct found found[2];
    uint32_t top[SELECT_HEADS];           /* keys of the greatest scores of this CTA */
    unsigned long long sum[SELECT_HEADS]; /* of their exponentials, 2^31 times */
    float shift[SELECT_HEADS], factor[SELECT_HEADS],
        limit[SELECT_HEADS]; /* limit: of a probability */
    uint32_t n_ranked, best, ties[2], end[2], n_pages, n_estimates, n_above, crossing;
    uint32_t all_ranked, all_best;
    unsigned long long weight[SELECT_BINS], all[SELECT_BINS]; /* of this CTA; of the cluster */
    unsigned long long before;
    uint32_t warp[2][32];
};

/* The keys of a CTA: partitions [begin, end) of a lane, T * 4 to a tile, 4 neighbours a thread. */
template <int T, int K> struct select_keys {
    uint32_t begin, end, rank, ranks;
    uint32_t key[K > 0 ? K : 4];
    uint32_t *scratch; /* [end - begin rounded up to 4]; K = 0 */

    /* f(i, key): every thread of the CTA comes to every tile. */
    template <typename F> __device__ inline void each(F f)
    {
        if constexpr (K > 0) {
#pragma unroll
            for (int j = 0; j < K / 4; j++)
                f(begin + (j * T + threadIdx.x) * 4, key + j * 4);
        } else {
            for (uint32_t at = begin; at < end; at += T * 4) {
                uint32_t i = at + threadIdx.x * 4;
                uint32_t four[4] = {0, 0, 0, 0};
                if (i < end) {
                    uint4 v = *(const uint4 *)(scratch + (i - begin));
                    four[0] = v.x, four[1] = v.y, four[2] = v.z, four[3] = v.w;
                }
                f(i, four);
            }
        }
    }
    /* f(i, key) sets all four keys. */
    template <typename F> __device__ inline void make(F f)
    {
        if constexpr (K > 0) {
            each(f);
        } else
            for (uint32_t i = begin + threadIdx.x * 4; i < end; i += T * 4) {
                uint32_t four[4];
                f(i, four);
                *(uint4 *)(scratch + (i - begin)) = make_uint4(four[0], four[1], four[2], four[3]);
            }
    }
};

/* Sum over the threads before this one; *total: over all. `turn` alternates between calls. */
template <int T>
__device__ static inline uint32_t block_scan(struct select_shared *s, uint32_t x, uint32_t *total,
                                             uint32_t *turn)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t sum = x, all;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        uint32_t y = __shfl_up_sync(~0u, sum, d);
        sum += lane >= d ? y : 0;
    }
    if (lane == 31)
        s->warp[*turn][warp] = sum;
    __syncthreads();
    all = lane < T / 32 ? s->warp[*turn][lane] : 0;
    *turn ^= 1;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        uint32_t y = __shfl_up_sync(~0u, all, d);
        all += lane >= d ? y : 0;
    }
    *total = __shfl_sync(~0u, all, 31);
    uint32_t before = __shfl_sync(~0u, all, warp > 0 ? warp - 1 : 0);
    return sum - x + (warp > 0 ? before : 0);
}

template <int T> __device__ static inline void select_clear(struct select_shared *s)
{
    for (uint32_t i = threadIdx.x; i < sizeof s->hist / sizeof(uint4); i += T)
        ((uint4 *)&s->hist[0][0][0])[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < SELECT_HEADS) {
        s->top[threadIdx.x] = 0;
        s->sum[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
        s->n_ranked = s->best = s->n_pages = s->n_estimates = 0;
        s->ties[0] = s->ties[1] = s->end[0] = s->end[1] = 0;
    }
    __syncthreads();
}

/* ---- borders ---- */

enum { SELECT_SHIFT = 19 }; /* of the first histogram: 16 steps an octave */

__device__ static inline uint32_t first_bin(uint32_t distance)
{
    return min(distance >> SELECT_SHIFT, (uint32_t)SELECT_BINS - 1);
}

/* The first histogram, of distances from `most`, which no key exceeds. */
template <int T, int K>
__device__ static inline void count_first(struct select_shared *s, select_keys<T, K> *keys,
                                          uint32_t most)
{
    keys->each([&](uint32_t, uint32_t *key) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (key[e] != 0)
                atomicAdd(&s->hist[0][0][first_bin(most - key[e])], 1u);
    });
}

/* Counts of the cluster; a barrier of all CTAs comes before. */
template <int T>
__device__ static inline void total_of(struct select_shared *s, uint32_t pass, uint32_t of,
                                       uint32_t ranks)
{
    for (uint32_t bin = threadIdx.x; bin < SELECT_BINS; bin += T)
        s->total[of][bin] = sum_of_ranks(&s->hist[pass][of][bin], ranks, ranks);
}

/* By one warp: the bin where counts from the first bin up reach k. */
__device__ static inline void find_bin(const uint32_t *total, uint32_t k, struct found *out)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t count[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        count[i] = total[lane * 8 + i];
        sum += count[i];
    }
    uint32_t upto = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        uint32_t y = __shfl_up_sync(~0u, upto, d);
        upto += lane >= d ? y : 0;
    }
    uint32_t before = upto - sum;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (before < k && before + count[i] >= k) {
            out->bin = lane * 8 + i;
            out->before = before;
            out->count = count[i];
        }
        before += count[i];
    }
}

/* Of `left` of the keys equal to b->key, the last one's index + 1. */
template <int T, int K>
__device__ static inline void find_end(struct select_shared *s, select_keys<T, K> *keys,
                                       struct border *b, uint32_t left, uint32_t which,
                                       uint32_t *turn)
{
    uint32_t own = 0, before = 0;
    keys->each([&](uint32_t, uint32_t *key) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            own += key[e] == b->key;
    });
    own = __reduce_add_sync(~0u, own);
    if (threadIdx.x % 32 == 0)
        atomicAdd(&s->ties[which], own);
    all_sync(keys->ranks);
    if (keys->ranks > 1)
        before = sum_of_ranks(&s->ties[which], keys->rank, keys->ranks);
    keys->each([&](uint32_t i, uint32_t *key) {
        uint32_t n = 0, total;
#pragma unroll
        for (int e = 0; e < 4; e++)
            n += key[e] == b->key;
        uint32_t at = before + block_scan<T>(s, n, &total, turn);
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (key[e] == b->key && ++at == left)
                s->end[which] = i + e + 1;
        before += total;
    });
    all_sync(keys->ranks);
    b->end = max_of_ranks(&s->end[which], keys->ranks);
}

/* Where a border is searched: what keys have in common, at `shift`, that are not settled. */
struct search {
    uint32_t prefix, left; /* left: of them, that are within */
    bool done;
};

/* One histogram of bits [shift, shift + 8) of value(key), where the bits above are a search's prefix; of
 * both searches, if they are in different places. Then each one's bin becomes part of its prefix. */
template <int T, int K, typename F>
__device__ static inline void narrow(struct select_shared *s, select_keys<T, K> *keys,
                                     struct search x[2], uint32_t pass, uint32_t shift,
                                     uint32_t bits, F value)
{
    const bool apart = !x[0].done && !x[1].done && x[0].prefix != x[1].prefix;
    const uint32_t one = x[0].done ? x[1].prefix : x[0].prefix, two = x[1].prefix;
    keys->each([&](uint32_t, uint32_t *key) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (key[e] == 0)
                continue;
            uint32_t v = value(key[e]), bin = v >> shift & ((1u << bits) - 1);
            uint32_t high = shift + bits < 32 ? v >> (shift + bits) : 0;
            if (high == one)
                atomicAdd(&s->hist[pass][0][bin], 1u);
            else if (apart && high == two)
                atomicAdd(&s->hist[pass][1][bin], 1u);
        }
    });
    all_sync(keys->ranks);
    total_of<T>(s, pass, 0, keys->ranks);
    if (apart)
        total_of<T>(s, pass, 1, keys->ranks);
    __syncthreads();
    if (threadIdx.x < 32 && !x[0].done)
        find_bin(s->total[0], x[0].left, &s->found[0]);
    if (threadIdx.x / 32 == 1 && !x[1].done)
        find_bin(s->total[apart], x[1].left, &s->found[1]);
    __syncthreads();
#pragma unroll
    for (int w = 0; w < 2; w++)
        if (!x[w].done) {
            x[w].prefix = x[w].prefix << bits | s->found[w].bin;
            x[w].left -= s->found[w].before;
        }
}

/* Both borders from the first byte of ~key on: the way for numbers of any size. */
template <int T, int K>
__device__ static inline void search_bytes(struct select_shared *s, select_keys<T, K> *keys,
                                           struct search x[2], struct border out[2])
{
    all_sync(keys->ranks); /* others may still read the first histogram */
    for (uint32_t i = threadIdx.x; i < sizeof s->hist / 4; i += T)
        (&s->hist[0][0][0])[i] = 0;
    __syncthreads();
    x[0].prefix = x[1].prefix = 0;
    for (uint32_t pass = 0; pass < 4 && !(x[0].done && x[1].done); pass++)
        narrow<T, K>(s, keys, x, pass, 24 - 8 * pass, 8, [](uint32_t key) { return ~key; });
#pragma unroll
    for (int w = 0; w < 2; w++)
        if (!x[w].done)
            out[w].key = ~x[w].prefix;
}

/* The borders that the k[0] and the k[1] best are within, 1 <= k <= n_ranked; k[1] 0: not wanted. The
 * first histogram is complete in s->total[0]. Uniform in the cluster, so all branches are. */
template <int T, int K>
__device__ static inline void find_borders(struct select_shared *s, select_keys<T, K> *keys,
                                           uint32_t most, const uint32_t k[2], uint32_t n_ranked,
                                           struct border out[2], uint32_t *turn)
{
    struct search x[2];
    bool far = false;
#pragma unroll
    for (int w = 0; w < 2; w++) {
        x[w].prefix = 0;
        x[w].left = k[w];
        x[w].done = k[w] == 0 || k[w] == n_ranked;
        out[w].key = k[w] == 0 ? 0xffffffffu : 0;
        out[w].end = 0;
    }
    if (x[0].done && x[1].done)
        return;
    if (threadIdx.x < 32 && !x[0].done)
        find_bin(s->total[0], x[0].left, &s->found[0]);
    if (threadIdx.x / 32 == 1 && !x[1].done)
        find_bin(s->total[0], x[1].left, &s->found[1]);
    __syncthreads();
#pragma unroll
    for (int w = 0; w < 2; w++)
        if (!x[w].done)
            far = far || s->found[w].bin == SELECT_BINS - 1;
    if (far) {
        search_bytes<T, K>(s, keys, x, out);
    } else {
        uint32_t shift = SELECT_SHIFT;
#pragma unroll
        for (int w = 0; w < 2; w++)
            if (!x[w].done) {
                x[w].prefix = s->found[w].bin;
                x[w].left -= s->found[w].before;
            }
        for (uint32_t pass = 0;; pass++) {
#pragma unroll
            for (int w = 0; w < 2; w++) /* all of the bin, nothing behind it */
                if (!x[w].done && s->found[w].count == x[w].left) {
                    uint32_t end = (x[w].prefix + 1) << shift;
                    out[w].key = most >= end ? most - end : 0;
                    x[w].done = true;
                }
            if ((x[0].done && x[1].done) || shift == 0)
                break;
            const uint32_t bits = min(shift, 8u);
            shift -= bits;
            narrow<T, K>(s, keys, x, pass + 1, shift, bits,
                         [&](uint32_t key) { return most - key; });
        }
#pragma unroll
        for (int w = 0; w < 2; w++)
            if (!x[w].done)
                out[w].key = most - x[w].prefix;
    }
#pragma unroll
    for (int w = 0; w < 2; w++)
        if (!x[w].done)
            find_end<T, K>(s, keys, &out[w], x[w].left, w, turn);
}

/* ---- weights ---- */

/* By one warp: the bin where weights from the last bin down reach `wanted`; SELECT_BINS: none does. */
__device__ static inline void find_weight(struct select_shared *s, unsigned long long wanted)
{
    const uint32_t lane = threadIdx.x % 32;
    unsigned long long sum = 0;
    for (int i = 0; i < 8; i++)
        sum += s->all[SELECT_BINS - 1 - lane * 8 - i];
    unsigned long long upto = sum;
    for (int d = 1; d < 32; d *= 2) {
        unsigned long long y = __shfl_up_sync(~0u, upto, d);
        upto += lane >= d ? y : 0;
    }
    if (lane == 0)
        s->crossing = SELECT_BINS;
    __syncwarp();
    unsigned long long above = upto - sum;
    for (int i = 0; i < 8; i++) {
        unsigned long long x = s->all[SELECT_BINS - 1 - lane * 8 - i];
        if (above < wanted && above + x >= wanted) {
            s->crossing = SELECT_BINS - 1 - lane * 8 - i;
            s->before = above;
        }
        above += x;
    }
}

/* Where the weights of candidates, best first, reach share * total, or `wanted` where share is 0: *key_at,
 * the weight *left to its equals, and how many keys are greater. false: nowhere. weight(i, key) > 0. */
template <int T, int K, typename F>
__device__ static inline bool find_crossing(struct select_shared *s, select_keys<T, K> *keys,
                                            unsigned long long wanted, float share, F weight,
                                            uint32_t *key_at, unsigned long long *left,
                                            uint32_t *n_above)
{
    uint32_t prefix = 0, above = 0;
    for (uint32_t pass = 0; pass < 4; pass++) {
        const uint32_t shift = 24 - 8 * pass;
        all_sync(keys->ranks); /* before what others may still read changes */
        for (uint32_t bin = threadIdx.x; bin < SELECT_BINS; bin += T)
            s->weight[bin] = 0;
        if (threadIdx.x == 0)
            s->n_above = 0;
        __syncthreads();
        keys->each([&](uint32_t i, uint32_t *key) {
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (key[e] != 0 && (pass == 0 || key[e] >> (shift + 8) == prefix))
                    atomicAdd(&s->weight[key[e] >> shift & 0xff], weight(i + e, key[e]));
        });
        all_sync(keys->ranks);
        for (uint32_t bin = threadIdx.x; bin < SELECT_BINS; bin += T)
            s->all[bin] = sum_of_ranks(&s->weight[bin], keys->ranks, keys->ranks);
        __syncthreads();
        if (pass == 0 && share > 0) {
            unsigned long long total = 0;
            for (uint32_t bin = 0; bin < SELECT_BINS; bin++)
                total += s->all[bin];
            wanted = (unsigned long long)((double)share * (double)total);
            wanted = wanted > 0 ? wanted : 1;
        }
        if (threadIdx.x < 32)
            find_weight(s, wanted);
        __syncthreads();
        if (s->crossing == SELECT_BINS)
            return false;
        wanted -= s->before;
        prefix = prefix << 8 | s->crossing;
    }
    keys->each([&](uint32_t, uint32_t *key) {
#pragma unroll
        for (int e = 0; e < 4; e++)
            above += key[e] > prefix;
    });
    above = __reduce_add_sync(~0u, above);
    if (threadIdx.x % 32 == 0)
        atomicAdd(&s->n_above, above);
    all_sync(keys->ranks);
    *n_above = sum_of_ranks(&s->n_above, keys->ranks, keys->ranks);
    *key_at = prefix;
    *left = wanted;
    return true;
}

#endif
