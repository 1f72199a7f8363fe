/* What the parts of the plan kernel share (plan.cu): the call, the lane, and how the CTAs of a cluster talk. */
#ifndef KERNELS_CUDA_PLAN_TALK_H
#define KERNELS_CUDA_PLAN_TALK_H

#include "kernels/cuda/plan.h"
#include "kernels/cuda/score_dots.h"
#include "kernels/cuda/select.h"

/* A piece is a segment of pages of 16 rows, or half of one of pages of 8. */
enum {
    DIM = 128,
    PARTS = 64,           /* of a piece */
    HEAD_BYTES = DIM * 8, /* base and step of its channels; two halves of its vectors follow */
    HALF_BYTES = PARTS * DIM / 2,
    PIECE_BYTES = HEAD_BYTES + 2 * HALF_BYTES,
    RANKS = 16,
    MAX_WARPS = 8,
    BINS = 512,
    BIN_WORDS = BINS / 2, /* two bins to a word */
    MAX_TOLD = 512,       /* keys in a border's bin that are told */
};

struct plan_call {
    const struct cuda_row *rows;
    const struct cuda_lane *lanes; /* [kv_heads] of the layer */
    const uint8_t *vectors;        /* of record 0's first lane */
    size_t record_bytes, record_lane_bytes;
    const float *q;
    size_t q_stride;                       /* numbers of a row of q */
    float *scores;                         /* [lane][group][stride] */
    uint32_t stride, kv_heads, group, sum; /* sum: of the heads' shares; else the greatest */
    uint32_t pieces, rows_log2;            /* of a segment; of a page */
    uint32_t first, sink_pages;            /* partition outside the sinks' pages */
    float scale, log_rows;
    const float *known;
    uint32_t page_cap, estimate_cap;
    uint32_t *pages, *n_pages, *estimates, *n_estimates, *unscored;
    float *share;
    uint32_t ranks, shift; /* shift: of a bin */
    uint32_t resolves;     /* pages of RESIDENT rows become blocks */
};

/* What a CTA knows of its lane, the same in all threads but for what is of a warp; read in front of the wait for the
 * kernel before, as rows are staged: behind it each read would be a trip to L2. */
struct plan_lane {
    uint32_t lane, rank, ranks, n_pieces;
    uint32_t n_warp, first_piece; /* of this warp */
    uint32_t selected, estimated; /* pages, at most */
    const uint32_t *records;
    const block_id *blocks; /* NULL: pages stay what they are */
    const uint8_t *vectors;
    const float *query;
    bool exists;
};

/* What ranks tell each other, each in a round of its own. */
enum { TOLD_TOP, TOLD_SUM, TOLD_BINS, TOLD_FINE, TOLD_CANDIDATES, ROUNDS };

/* Where a border lies as far as bins tell: distances [begin, end) of its bin, keys that are better, those in
 * it; and how many keys of the ranks before this one are better or in it. */
struct place {
    uint32_t begin, end, before, count, rank_before, rank_count;
};

struct plan_shared {
    unsigned long long told[ROUNDS];             /* mbarriers */
    alignas(16) uint32_t hist[BIN_WORDS];        /* read by fours, as parts is */
    alignas(16) uint32_t parts[4][2][BIN_WORDS]; /* sums over some ranks: of all, of those before */
    uint32_t warp_top[MAX_WARPS][4];             /* keys */
    unsigned long long warp_sum[MAX_WARPS][4], sum[RANKS][4];
    uint32_t top[RANKS][4], best[RANKS];
    struct place place[2];
    struct border border[2];
    uint32_t own_best, all_best, n_ranked, rank_ranked, k[2], own[2], warp_n[MAX_WARPS];
    uint32_t local_bin[2], local_left[2], local_n[2];
    /* crowded bins */
    struct found byte_found;
    uint32_t ties, end, bytes[SELECT_BINS], total[SELECT_BINS];
};

/* In the place of the ring, once all CTAs have scored (who has heard of all greatest scores knows): bins
 * [2][ranks][BIN_WORDS] as told, then candidates as order_of() has them, this CTA's and all. */
struct meeting {
    uint32_t *bins;
    unsigned long long (*own)[MAX_TOLD], (*all)[MAX_TOLD]; /* [2][MAX_TOLD] */
};

__host__ __device__ inline uint32_t meeting_bytes(uint32_t ranks)
{
    return ranks * 2 * BIN_WORDS * 4 + 4 * MAX_TOLD * 8;
}

__device__ static inline struct meeting meeting_of(uint8_t *at, uint32_t ranks)
{
    struct meeting m;
    m.bins = (uint32_t *)at;
    m.own = (unsigned long long(*)[MAX_TOLD])(at + ranks * 2 * BIN_WORDS * 4);
    m.all = m.own + 2;
    return m;
}

/* ---- what ranks tell each other ----
 *
 * A barrier of a cluster that orders memory waits for all that its threads have written, scores in HBM too: about a
 * microsecond. So a number that is told brings along its bytes for an mbarrier of who is told, which waits for those. */

__device__ static inline void open_rounds(struct plan_shared *s, uint32_t ranks)
{
#if __CUDA_ARCH__ >= 900
    if (ranks == 1)
        return;
    const uint32_t bytes[] = {16, 32, BIN_WORDS * 4 + 4, BIN_WORDS * 4}; /* of a rank */
    if (threadIdx.x == 0) {
#pragma unroll
        for (uint32_t i = 0; i < ROUNDS; i++)
            asm volatile("mbarrier.init.shared.b64 [%0],1;" ::"r"(shared_address(&s->told[i]))
                         : "memory");
#pragma unroll
        for (uint32_t i = 0; i < TOLD_CANDIDATES; i++)
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(
                             shared_address(&s->told[i])),
                         "r"(bytes[i] * ranks)
                         : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

/* Before the first word is told: everybody must be there. */
__device__ static inline void await_ranks(uint32_t ranks)
{
#if __CUDA_ARCH__ >= 900
    if (ranks > 1)
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

__device__ static inline uint32_t address_at(const void *p, uint32_t rank)
{
    uint32_t at = shared_address(p);
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0,%0,%1;" : "+r"(at) : "r"(rank));
#endif
    return at;
}

/* Puts x where `rank` has p. */
__device__ static inline void tell(struct plan_shared *s, uint32_t round, uint32_t *p, uint32_t x,
                                   uint32_t rank, uint32_t ranks)
{
    if (ranks == 1) {
        *p = x;
        return;
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0],%1,[%2];" ::"r"(
                     address_at(p, rank)),
                 "r"(x), "r"(address_at(&s->told[round], rank))
                 : "memory");
#endif
}

__device__ static inline void tell(struct plan_shared *s, uint32_t round, unsigned long long *p,
                                   unsigned long long x, uint32_t rank, uint32_t ranks)
{
    if (ranks == 1) {
        *p = x;
        return;
    }
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0],%1,[%2];" ::"r"(
                     address_at(p, rank)),
                 "l"(x), "r"(address_at(&s->told[round], rank))
                 : "memory");
#endif
}

__device__ static inline void tell(struct plan_shared *s, uint32_t round, uint4 *p, uint4 x,
                                   uint32_t rank, uint32_t ranks)
{
    if (ranks == 1) {
        *p = x;
        return;
    }
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0],{%1,%2,%3,%4},[%5];" ::
            "r"(address_at(p, rank)),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(address_at(&s->told[round], rank))
        : "memory");
#endif
}

/* So many bytes make up a round that is not known from the beginning. */
__device__ static inline void expect(struct plan_shared *s, uint32_t round, uint32_t bytes,
                                     uint32_t ranks)
{
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0 && ranks > 1)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _,[%0],%1;" ::"r"(
                         shared_address(&s->told[round])),
                     "r"(bytes)
                     : "memory");
#endif
}

/* Until all ranks have told this one. */
__device__ static inline void hear(struct plan_shared *s, uint32_t round, uint32_t ranks)
{
    if (ranks == 1) {
        __syncthreads();
        return;
    }
#if __CUDA_ARCH__ >= 900
    const uint32_t at = shared_address(&s->told[round]);
    uint32_t done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p,[%1],0;\n\t"
                     "selp.u32 %0,1,0,p;}"
                     : "=r"(done)
                     : "r"(at)
                     : "memory");
#endif
}

/* Where p of another CTA of the cluster is. */
template <typename X> __device__ inline X *at_rank(X *p, uint32_t rank, uint32_t ranks)
{
#if __CUDA_ARCH__ >= 900
    if (ranks > 1) {
        X *at;
        asm volatile("mapa.u64 %0,%1,%2;" : "=l"(at) : "l"(p), "r"(rank));
        return at;
    }
#endif
    return p;
}

#endif
