/* The second half of the plan kernel (plan.cu): the borders that the best k[0] and the best k[1] keys of a lane
 * are within, exactly, and how many keys of the ranks before this one are.
 *
 * Bins say which bin a border is in. Crowded ones are cut into 256 more; what is then in the bins is told to
 * all, and everybody finds the border among them, by bins of its own. Where keys are as good as equal even that
 * is too much: a search byte by byte, slowly. */
#ifndef KERNELS_CUDA_PLAN_BORDER_H
#define KERNELS_CUDA_PLAN_BORDER_H

#include "kernels/cuda/plan_scan.h"

/* ---- bins ---- */

/* Tells all ranks the bins of this one, and adds up what they tell. The CTA has counted. */
template <int W>
__device__ static void add_bins(struct plan_shared *s, const struct plan_lane *l,
                                const struct meeting *m, uint32_t round)
{
    constexpr uint32_t parts = W * 32 / (BINS / 8);
    const uint32_t part = threadIdx.x / (BINS / 8), at = threadIdx.x % (BINS / 8) * 4;
    uint32_t *bins = m->bins + (round - TOLD_BINS) * l->ranks * BIN_WORDS;
    static_assert(parts <= 4, "sums of ranks");
    const uint4 own = *(const uint4 *)&s->hist[at];
#pragma unroll 1
    for (uint32_t r = part; r < l->ranks; r += parts)
        tell(s, round, (uint4 *)&bins[l->rank * BIN_WORDS + at], own, r, l->ranks);
    if (round == TOLD_BINS && threadIdx.x < l->ranks)
        tell(s, round, &s->best[l->rank], s->own_best, threadIdx.x, l->ranks);
    hear(s, round, l->ranks);
    uint4 all = make_uint4(0, 0, 0, 0), before = all;
#pragma unroll 4
    for (uint32_t r = part; r < l->ranks; r += parts) {
        const uint4 v = *(const uint4 *)&bins[r * BIN_WORDS + at];
        const uint32_t is = r < l->rank ? ~0u : 0;
        all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
        before.x += v.x & is, before.y += v.y & is, before.z += v.z & is, before.w += v.w & is;
    }
    *(uint4 *)&s->parts[part][0][at] = all;
    *(uint4 *)&s->parts[part][1][at] = before;
    __syncthreads();
}

/* Sums over the lanes before this one. */
__device__ static inline uint32_t scan_lanes(uint32_t x, uint32_t *total)
{
    uint32_t upto = x;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        uint32_t y = __shfl_up_sync(~0u, upto, d);
        upto += threadIdx.x % 32 >= (uint32_t)d ? y : 0;
    }
    *total = __shfl_sync(~0u, upto, 31);
    return upto - x;
}

/* What a lane of a warp has of WORDS * 64 bins: counts of all ranks and of those before this one, how many keys lie
 * in lanes before, and in all. */
template <int WORDS> struct lane_bins {
    uint32_t all[WORDS], own[WORDS], before, before_own, n, n_own;
};

/* By one warp, from word `first` on. */
template <int W, int WORDS>
__device__ static void load_bins(struct lane_bins<WORDS> *x, const struct plan_shared *s,
                                 uint32_t first)
{
    constexpr uint32_t parts = W * 32 / (BINS / 8);
    const uint32_t at = first + threadIdx.x % 32 * WORDS;
    uint32_t sum = 0, sum_own = 0;
    static_assert(WORDS % 4 == 0, "loads of 16 bytes");
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
        uint4 all = make_uint4(0, 0, 0, 0), own = all;
#pragma unroll
        for (uint32_t p = 0; p < parts; p++) {
            const uint4 v = *(const uint4 *)&s->parts[p][0][at + i];
            const uint4 w = *(const uint4 *)&s->parts[p][1][at + i];
            all.x += v.x, all.y += v.y, all.z += v.z, all.w += v.w;
            own.x += w.x, own.y += w.y, own.z += w.z, own.w += w.w;
        }
        x->all[i] = all.x, x->all[i + 1] = all.y, x->all[i + 2] = all.z, x->all[i + 3] = all.w;
        x->own[i] = own.x, x->own[i + 1] = own.y, x->own[i + 2] = own.z, x->own[i + 3] = own.w;
    }
    /* no half overflows: all keys of a lane are fewer than 2^16 */
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        sum += x->all[i];
        sum_own += x->own[i];
    }
    sum = (sum & 0xffff) + (sum >> 16);
    sum_own = (sum_own & 0xffff) + (sum_own >> 16);
    x->before = scan_lanes(sum, &x->n);
    x->before_own = scan_lanes(sum_own, &x->n_own);
}

/* By one warp: calls f(bin, place) in one lane, if counts of all bins reach k > 0: in which bin they do; the place's
 * counts alone are set. First the lane that has it, then a lane for each of that one's bins. */
template <int WORDS, typename F>
__device__ static inline void locate(const struct lane_bins<WORDS> *x, uint32_t k, F f)
{
    const uint32_t lane = threadIdx.x % 32, bin = lane % (WORDS * 2);
    const uint32_t has = __ballot_sync(~0u, x->before < k);
    /* bins behind the one are in later lanes */
    const uint32_t owner = has != 0 ? 31 - __clz(has) : 0;
    uint32_t all = 0, own = 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        const uint32_t a = __shfl_sync(~0u, x->all[i], owner),
                       b = __shfl_sync(~0u, x->own[i], owner);
        if (bin / 2 == (uint32_t)i) {
            all = a;
            own = b;
        }
    }
    const uint32_t count = all >> bin % 2 * 16 & 0xffff, count_own = own >> bin % 2 * 16 & 0xffff;
    uint32_t upto = count, upto_own = count_own;
#pragma unroll
    for (uint32_t d = 1; d < WORDS * 2; d *= 2) {
        const uint32_t a = __shfl_up_sync(~0u, upto, d), b = __shfl_up_sync(~0u, upto_own, d);
        upto += bin >= d ? a : 0;
        upto_own += bin >= d ? b : 0;
    }
    upto += __shfl_sync(~0u, x->before, owner);
    upto_own += __shfl_sync(~0u, x->before_own, owner);
    if (lane < WORDS * 2 && upto - count < k && upto >= k)
        f(owner * WORDS * 2 + bin,
          (struct place){0, 0, upto - count, count, upto_own - count_own, count_own});
}

/* By one warp: how many are wanted within border `which`, and where it is. */
template <int W>
__device__ static void find_place(struct plan_shared *s, const struct plan_call *c,
                                  const struct plan_lane *l, uint32_t which)
{
    struct lane_bins<BIN_WORDS / 32> x;
    load_bins<W>(&x, s, 0);
    const uint32_t n = x.n, k0 = max(1u, min(l->selected, n));
    const uint32_t more = min(l->estimated, n - min(k0, n));
    const uint32_t k = which == 0 ? k0 : more > 0 ? k0 + more : 0, lane = threadIdx.x % 32;
    const uint32_t best = __reduce_max_sync(~0u, lane < c->ranks ? s->best[lane] : 0);
    if (lane == 0) {
        s->n_ranked = n;
        s->rank_ranked = x.n_own;
        s->k[which] = k;
        s->all_best = best;
    }
    locate(&x, k, [&](uint32_t bin, struct place p) {
        p.begin = bin > 0 ? end_of_bin(bin - 1, c->shift) : 0;
        p.end = bin < BINS - 1 ? end_of_bin(bin, c->shift) : ~0u;
        s->place[which] = p;
    });
}

/* ---- finer bins ---- */

enum { FINE_BITS = 8 };

/* Is the border inside its bin, not at its end? */
__device__ static inline bool is_searched(const struct plan_shared *s, uint32_t which)
{
    const uint32_t k = s->k[which];
    return k > 0 && k < s->n_ranked && k - s->place[which].before < s->place[which].count;
}

__device__ static inline bool is_refined(const struct plan_shared *s, uint32_t which)
{
    const struct place *p = &s->place[which];
    return is_searched(s, which) && p->count > MAX_TOLD && p->end != ~0u;
}

/* A bin is a power of two wide, 2^18 at least. */
__device__ static inline uint32_t fine_shift(const struct place *p)
{
    return 31 - __clz(p->end - p->begin) - FINE_BITS;
}

/* Cuts the bins of crowded borders: 256 bins for each. */
template <int W, int P>
__device__ static void refine(struct plan_shared *s, const struct plan_lane *l, uint32_t most,
                              const uint32_t key[P * 2], const struct meeting *m)
{
    const struct place p[2] = {s->place[0], s->place[1]};
    const bool is[2] = {is_refined(s, 0), is_refined(s, 1)};
    for (uint32_t i = threadIdx.x; i < BIN_WORDS; i += W * 32)
        s->hist[i] = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < P * 2; j++)
#pragma unroll
        for (uint32_t which = 0; which < 2; which++) {
            const uint32_t distance = most - key[j];
            if (!is[which] || key[j] == 0 || distance < p[which].begin || distance >= p[which].end)
                continue;
            uint32_t bin = (distance - p[which].begin) >> fine_shift(&p[which]);
            bin += which << FINE_BITS;
            atomicAdd(&s->hist[bin / 2], 1u << bin % 2 * 16);
        }
    __syncthreads();
    add_bins<W>(s, l, m, TOLD_FINE);
    const uint32_t which = threadIdx.x / 32;
    if (which < 2 && (which == 0 ? is[0] : is[1])) {
        const struct place of = s->place[which];
        struct lane_bins<BIN_WORDS / 64> x;
        load_bins<W>(&x, s, which * (BIN_WORDS / 2));
        __syncwarp();
        locate(&x, s->k[which] - of.before, [&](uint32_t bin, struct place f) {
            f.begin = of.begin + (bin << fine_shift(&of));
            f.end = f.begin + (1u << fine_shift(&of));
            f.before += of.before;
            f.rank_before += of.rank_before;
            s->place[which] = f;
        });
    }
    __syncthreads();
}

/* ---- candidates ---- */

/* A border as far as bins tell; upto: keys within of the ranks before this one. */
struct wanted {
    struct border border;
    uint32_t upto;
    bool searched;
};

__device__ static struct wanted search_of(const struct plan_shared *s, uint32_t which,
                                          uint32_t most)
{
    const uint32_t k = s->k[which];
    const struct place p = s->place[which];
    struct wanted x = {{0, 0}, s->rank_ranked, false};
    if (k == 0) {
        x.border.key = 0xffffffffu;
        x.upto = 0;
    }
    if (k == 0 || k == s->n_ranked)
        return x;
    x.searched = is_searched(s, which);
    x.upto = p.rank_before;
    if (!x.searched) { /* all of the bin, nothing behind it */
        x.border.key = most >= p.end ? most - p.end : 0;
        x.upto += p.rank_count;
    }
    return x;
}

/* Numbers that are greater where a key is better. */
__device__ static inline unsigned long long order_of(uint32_t key, uint32_t i)
{
    return (unsigned long long)key << 32 | (uint32_t)~i;
}

enum { LOCAL_BITS = 8 };

/* Of bins that cut a place's into 256 or, where it is narrow, fewer. */
__device__ static inline uint32_t local_shift(const struct place *p)
{
    const uint32_t bits = 31 - __clz(p->end - p->begin);
    return bits > LOCAL_BITS ? bits - LOCAL_BITS : 0;
}

/* Lists this CTA's candidates for border `which`. */
template <int P>
__device__ static void list_candidates(struct plan_shared *s, const struct plan_lane *l,
                                       uint32_t which, uint32_t most, const uint32_t key[P * 2],
                                       const struct meeting *m)
{
    const uint32_t begin = s->place[which].begin, end = s->place[which].end;
    const uint32_t lane = threadIdx.x % 32, below = (1u << lane) - 1;
    uint32_t in[P * 2], n = 0, at = 0;
#pragma unroll
    for (uint32_t j = 0; j < P * 2; j++) {
        in[j] = __ballot_sync(~0u, key[j] != 0 && most - key[j] - begin < end - begin);
        n += __popc(in[j]);
    }
    if (n == 0)
        return;
    if (lane == 0)
        at = atomicAdd(&s->own[which], n);
    at = __shfl_sync(~0u, at, 0);
#pragma unroll
    for (uint32_t j = 0; j < P * 2; j++) {
        const uint32_t i = (l->first_piece + j / 2) * PARTS + j % 2 * 32 + lane;
        if (in[j] >> lane & 1)
            m->own[which][at + __popc(in[j] & below)] = order_of(key[j], i);
        at += __popc(in[j]);
    }
}

/* Tells all ranks what was listed; both borders at a time. */
template <int W>
__device__ static void tell_candidates(struct plan_shared *s, const struct plan_lane *l,
                                       const struct meeting *m)
{
    const uint32_t n = s->own[0], all = n + s->own[1], log2 = __popc(l->ranks - 1);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < all << log2; i += W * 32) {
        const uint32_t r = i & (l->ranks - 1), at = i >> log2, which = at >= n,
                       own = at - which * n;
        tell(s, TOLD_CANDIDATES, &m->all[which][s->place[which].rank_count + own],
             m->own[which][own], r, l->ranks);
    }
}

/* A CTA by itself, each half of it for a border: all candidates into 256 bins of their own ... */
template <int W>
__device__ static void count_candidates(struct plan_shared *s, const struct meeting *m,
                                        uint32_t which, uint32_t most)
{
    const struct place p = s->place[which];
    const uint32_t shift = local_shift(&p);
    for (uint32_t i = threadIdx.x % (W * 16); i < p.count; i += W * 16) {
        const uint32_t distance = most - (uint32_t)(m->all[which][i] >> 32);
        const uint32_t bin = ((distance - p.begin) >> shift) + (which << LOCAL_BITS);
        atomicAdd(&s->hist[bin / 2], 1u << bin % 2 * 16);
    }
}

/* ... by one warp: which of them the border is in, and how many of its keys are within ... */
__device__ static void find_local(struct plan_shared *s, uint32_t which)
{
    enum { WORDS = (1 << LOCAL_BITS) / 64 };
    const struct place p = s->place[which];
    const uint32_t *bins = s->hist + (which << LOCAL_BITS) / 2 + threadIdx.x % 32 * WORDS;
    const uint32_t k = s->k[which] - p.before;
    uint32_t sum = 0, n;
#pragma unroll
    for (int i = 0; i < WORDS; i++)
        sum += (bins[i] & 0xffff) + (bins[i] >> 16);
    uint32_t before = scan_lanes(sum, &n);
#pragma unroll
    for (int i = 0; i < WORDS * 2; i++) {
        const uint32_t count = bins[i / 2] >> i % 2 * 16 & 0xffff;
        if (before < k && before + count >= k) {
            s->local_bin[which] = threadIdx.x % 32 * WORDS * 2 + i;
            s->local_left[which] = k - before;
        }
        before += count;
    }
}

/* ... those in it ... */
template <int W>
__device__ static void list_local(struct plan_shared *s, const struct meeting *m, uint32_t which,
                                  uint32_t most)
{
    const struct place p = s->place[which];
    const uint32_t shift = local_shift(&p), bin = s->local_bin[which];
    for (uint32_t i = threadIdx.x % (W * 16); i < p.count; i += W * 16) {
        const unsigned long long v = m->all[which][i];
        if ((most - (uint32_t)(v >> 32) - p.begin) >> shift == bin)
            m->own[which][atomicAdd(&s->local_n[which], 1u)] = v;
    }
}

/* ... and of these the border, by comparing. */
template <int W>
__device__ static void rank_local(struct plan_shared *s, const struct meeting *m, uint32_t which)
{
    const uint32_t n = s->local_n[which], left = s->local_left[which];
    for (uint32_t i = threadIdx.x % (W * 16); i < n; i += W * 16) {
        const unsigned long long v = m->own[which][i];
        uint32_t better = 0;
        for (uint32_t j = 0; j < n; j++)
            better += m->own[which][j] > v;
        if (better + 1 == left) {
            s->border[which].key = (uint32_t)(v >> 32);
            s->border[which].end = ~(uint32_t)v + 1;
        }
    }
}

/* Everybody is told the keys that are in the bins of borders. */
template <int W, int P>
__device__ static void meet_candidates(struct plan_shared *s, const struct plan_lane *l,
                                       const uint32_t key[P * 2], uint32_t most,
                                       const struct meeting *m, struct wanted x[2])
{
    const uint32_t lane = threadIdx.x % 32, mine = threadIdx.x / (W * 16);
    const uint32_t n =
        (x[0].searched ? s->place[0].count : 0) + (x[1].searched ? s->place[1].count : 0);
    for (uint32_t i = threadIdx.x; i < BIN_WORDS; i += W * 32)
        s->hist[i] = 0; /* as told long ago */
    expect(s, TOLD_CANDIDATES, n * (uint32_t)sizeof **m->all, l->ranks);
    if (x[0].searched)
        list_candidates<P>(s, l, 0, most, key, m);
    if (x[1].searched)
        list_candidates<P>(s, l, 1, most, key, m);
    __syncthreads();
    tell_candidates<W>(s, l, m);
    hear(s, TOLD_CANDIDATES, l->ranks);
    const bool is = mine == 0 ? x[0].searched : x[1].searched;
    if (is)
        count_candidates<W>(s, m, mine, most);
    __syncthreads();
    if (is && threadIdx.x % (W * 16) < 32)
        find_local(s, mine);
    __syncthreads();
    if (is)
        list_local<W>(s, m, mine, most);
    __syncthreads();
    if (is)
        rank_local<W>(s, m, mine);
    __syncthreads();
#pragma unroll
    for (uint32_t which = 0; which < 2; which++) {
        if (!x[which].searched)
            continue;
        x[which].border = s->border[which];
        const unsigned long long last = order_of(x[which].border.key, x[which].border.end - 1);
        uint32_t within = 0;
        for (uint32_t i = lane; i < s->place[which].rank_count; i += 32)
            within += m->all[which][i] >= last;
        x[which].upto += __reduce_add_sync(~0u, within);
    }
}

/* ---- crowded bins ----
 *
 * Functions of their own, with all they need in shared memory: so the usual way is short, and its keys stay in
 * registers. keys: [P * 2][threads]. */

/* Of the ranks [0, n): all loads are under way before the first is used. */
__device__ static uint32_t sum_over(uint32_t *p, uint32_t n, uint32_t ranks)
{
    uint32_t v[RANKS], sum = 0;
#pragma unroll
    for (uint32_t r = 0; r < RANKS; r++)
        v[r] = r < n ? *at_rank(p, r, ranks) : 0;
#pragma unroll
    for (uint32_t r = 0; r < RANKS; r++)
        sum += v[r];
    return sum;
}

struct crowd {
    const uint32_t *keys;
    uint32_t rank, ranks, first_piece, n; /* n: keys of a thread */
};

__device__ static inline uint32_t partition_of(const struct crowd *w, uint32_t j)
{
    return (w->first_piece + j / 2) * PARTS + j % 2 * 32 + threadIdx.x % 32;
}

/* Of `left` of the keys equal to `key`, the last one's index + 1. */
__device__ static uint32_t find_tie(struct plan_shared *s, const struct crowd *w, uint32_t key,
                                    uint32_t left)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t n = 0, all = 0;
    for (uint32_t j = 0; j < w->n; j++)
        n += __popc(__ballot_sync(~0u, w->keys[j * blockDim.x + threadIdx.x] == key));
    if (lane == 0)
        s->warp_n[warp] = n;
    if (threadIdx.x == 0)
        s->end = 0;
    __syncthreads();
    for (uint32_t i = 0; i < blockDim.x / 32; i++)
        all += s->warp_n[i];
    if (threadIdx.x == 0)
        s->ties = all;
    all_sync(w->ranks);
    uint32_t at = sum_over(&s->ties, w->rank, w->ranks);
    for (uint32_t i = 0; i < warp; i++)
        at += s->warp_n[i];
    for (uint32_t j = 0; j < w->n; j++) {
        const bool is = w->keys[j * blockDim.x + threadIdx.x] == key;
        const uint32_t same = __ballot_sync(~0u, is);
        if (is && at + __popc(same & ((1u << lane) - 1)) + 1 == left)
            s->end = partition_of(w, j) + 1;
        at += __popc(same);
    }
    all_sync(w->ranks);
    return sum_over(&s->end, w->ranks, w->ranks); /* one of them is not 0 */
}

/* Border `which` from the first byte of ~key on, to s->border; returns what the ranks before this one have within. */
__device__ static __noinline__ uint32_t search_crowd(struct plan_shared *s, struct crowd w,
                                                     uint32_t which)
{
    uint32_t prefix = 0, left = s->k[which], n = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        all_sync(w.ranks); /* what others read is theirs until here */
        for (uint32_t bin = threadIdx.x; bin < SELECT_BINS; bin += blockDim.x)
            s->bytes[bin] = 0;
        __syncthreads();
        for (uint32_t j = 0; j < w.n; j++) {
            const uint32_t key = w.keys[j * blockDim.x + threadIdx.x];
            if (key != 0 && (shift == 24 || ~key >> (shift + 8) == prefix))
                atomicAdd(&s->bytes[~key >> shift & 0xff], 1u);
        }
        all_sync(w.ranks);
        for (uint32_t bin = threadIdx.x; bin < SELECT_BINS; bin += blockDim.x)
            s->total[bin] = sum_over(&s->bytes[bin], w.ranks, w.ranks);
        __syncthreads();
        if (threadIdx.x < 32)
            find_bin(s->total, left, &s->byte_found);
        __syncthreads();
        prefix = prefix << 8 | s->byte_found.bin;
        left -= s->byte_found.before;
    }
    const struct border b = {~prefix, find_tie(s, &w, ~prefix, left)};
    for (uint32_t j = 0; j < w.n; j++) {
        const uint32_t key = w.keys[j * blockDim.x + threadIdx.x];
        n += key != 0 && is_within(&b, key, partition_of(&w, j));
    }
    all_sync(w.ranks);
    if (threadIdx.x == 0) {
        s->border[which] = b;
        s->ties = 0;
    }
    __syncthreads();
    atomicAdd(&s->ties, n);
    all_sync(w.ranks);
    n = sum_over(&s->ties, w.rank, w.ranks);
    all_sync(w.ranks);
    return n;
}

/* ---- both ---- */

/* Whether keys in the bin of a border are too many to be told, or too far apart to be counted. */
__device__ static inline bool is_crowded(const struct plan_shared *s, uint32_t which)
{
    return is_searched(s, which) &&
           (s->place[which].count > MAX_TOLD || s->place[which].end == ~0u);
}

/* The borders, and how many keys of the ranks before this one are within each. room: in the ring's place. */
template <int W, int P>
__device__ static void find_borders(struct plan_shared *s, const struct plan_lane *l,
                                    const uint32_t key[P * 2], uint32_t most, uint8_t *room,
                                    const struct meeting *m, struct border border[2],
                                    uint32_t upto[2])
{
    if (is_refined(s, 0) || is_refined(s, 1))
        refine<W, P>(s, l, most, key, m);
    struct wanted x[2] = {search_of(s, 0, most), search_of(s, 1, most)};
    if (is_crowded(s, 0) || is_crowded(s, 1)) {
        const struct crowd w = {(uint32_t *)room, l->rank, l->ranks, l->first_piece, P * 2};
#pragma unroll
        for (int j = 0; j < P * 2; j++)
            ((uint32_t *)room)[j * W * 32 + threadIdx.x] = key[j];
#pragma unroll
        for (uint32_t which = 0; which < 2; which++)
            if (x[which].searched) {
                x[which].upto = search_crowd(s, w, which);
                x[which].border = s->border[which];
            }
    } else if (x[0].searched || x[1].searched) {
        meet_candidates<W, P>(s, l, key, most, m, x);
    }
#pragma unroll
    for (uint32_t which = 0; which < 2; which++) {
        border[which] = x[which].border;
        upto[which] = x[which].upto;
    }
}

#endif
