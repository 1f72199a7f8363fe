/* What the attention kernels do alike: matrix instructions, pages into shared memory, folding.
 *
 * A tile of K or V in shared memory is CUDA_TILE rows of DP numbers, bf16 or fp8 as in pages; the 16-byte chunk c
 * of row r lies at chunk c ^ (r & 7), so that ldmatrix meets no bank twice. Positions that do not exist are
 * zeros: what lies in their place in a page may be NaN, and 0 * NaN is not 0. */
#ifndef KERNELS_CUDA_ATTEND_MMA_H
#define KERNELS_CUDA_ATTEND_MMA_H

#include "kernels/cuda/attend.h"
#include "kernels/cuda/attend_shape.h"
#include "kernels/cuda/fp8.h"

#define LOWEST (-1e30f) /* for -infinity as a greatest score: differences stay finite */

/* ---- instructions ---- */

__device__ static inline uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ static inline void load_matrices(uint32_t r[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

__device__ static inline void load_matrices_turned(uint32_t r[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

__device__ static inline void load_matrices_2(uint32_t r[2], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(at)
                 : "memory");
}

__device__ static inline void load_matrices_turned_2(uint32_t r[2], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(at)
                 : "memory");
}

/* c[16][8] += a[16][16] b[16][8]. Lane 4g + t has c rows g and g + 8, columns 2t and 2t + 1. */
__device__ static inline void multiply(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},"
                 "{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ static inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ static inline uint32_t pack(float x, float y)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<uint32_t *>(&v);
}

__device__ static inline void copy_16(uint32_t to, const void *from, bool exists)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16,%2;" ::"r"(to), "l"(from),
                 "r"(exists ? 16 : 0)
                 : "memory");
}

__device__ static inline void copy_4(uint32_t to, const void *from, bool exists)
{
    asm volatile("cp.async.ca.shared.global [%0],[%1],4,%2;" ::"r"(to), "l"(from),
                 "r"(exists ? 4 : 0)
                 : "memory");
}

__device__ static inline void copies_end_group(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int LEFT> __device__ static inline void copies_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

/* The merge may be launched once all CTAs are here; it waits for their results by itself. */
__device__ static inline void allow_next_kernel(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ static inline void wait_for_kernel_before(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* ---- positions of a task ---- */

/* Walks the tiles of splits [split, n_splits) of a task. */
struct cursor {
    uint32_t split, pos, end; /* the tile begins at pos, its split ends at end */
};

__device__ static inline void cursor_enter(struct cursor *u, const struct attend_task *k)
{
    bool first = u->split < k->n_first;
    uint32_t end = first ? k->first_end : k->end, begin = first ? 0 : k->begin;
    uint32_t split = first ? u->split : u->split - k->n_first;
    if (k->planned) {
        u->pos = begin + split * CUDA_PLAN_SPLIT;
        u->end = min(end, u->pos + CUDA_PLAN_SPLIT);
    } else {
        u->pos = begin + attend_split_begin(split);
        u->end = min(end, begin + attend_split_begin(split + 1));
    }
}

__device__ static inline void cursor_step(struct cursor *u, const struct attend_task *k)
{
    u->pos += CUDA_TILE;
    if (u->pos < u->end)
        return;
    u->split++;
    cursor_enter(u, k);
}

/* ---- pages into shared memory ---- */

/* Pages of one lane. A warp copies 16 rows of a tile, which lie in two halves of 8 in at most two
 * pages. */
struct lane_pages {
    const uint8_t *hbm, *dram;     /* the lane's page of block 0 */
    const block_id *first, *table; /* of the first stretch, of the other */
    const uint32_t *masks;         /* [page of first] rows to attend; NULL: all */
    size_t block_bytes;
    uint32_t n_first; /* splits of the first stretch */
    uint32_t shift, dim;
};

__device__ static inline struct lane_pages lane_pages_of(const struct attend_call *c, uint32_t head,
                                                         uint32_t class_)
{
    struct lane_pages p;
    size_t at = (c->lanes[head] & ((1u << LANE_CLASS_SHIFT) - 1)) * c->page_bytes;
    p.hbm = c->hbm[class_] + at;
    p.dram = c->dram[class_] + at;
    p.first = p.table = p.masks = NULL;
    p.block_bytes = c->block_bytes[class_];
    p.n_first = 0;
    p.shift = c->page_shift;
    p.dim = c->dim;
    return p;
}

/* What a warp copies of a tile: pages of its two halves, and the rows of them that are attended. */
struct tile_pages {
    block_id pages[2];
    uint32_t masks[2];
};

/* Of the tile at u: read a tile ahead, to hide the latency. Entries of positions from u->end on are not
 * touched. MASKS: a list may come with masks. */
template <bool MASKS>
__device__ static inline void find_pages(const struct lane_pages *p, const struct cursor *u,
                                         struct tile_pages *t)
{
    const uint32_t at = u->pos + threadIdx.x / 32 * 16;
    const bool first = u->split < p->n_first;
    const block_id *table = first ? p->first : p->table;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t page = (at + i * 8) >> p->shift;
        const bool exists = at + i * 8 < u->end;
        t->pages[i] = exists ? table[page] : 0;
        t->masks[i] = MASKS && exists && first && p->masks != NULL ? p->masks[page] : ~0u;
    }
}

template <int DP> __device__ static inline uint32_t chunk_at(uint32_t row, uint32_t chunk)
{
    return row * (DP * 2) + ((chunk ^ (row & 7)) << 4);
}

/* The same of a tile of fp8: 16 numbers to a chunk. Rows of 64 bytes lie in pairs. */
template <int DP> __device__ static inline uint32_t chunk8_at(uint32_t row, uint32_t chunk)
{
    return row * DP + ((chunk ^ ((DP == 64 ? row / 2 : row) & (DP == 64 ? 3 : 7))) << 4);
}

template <int DP, int ROWS> struct tile {
    enum { BYTES = CUDA_TILE * DP * (ROWS & ROWS_FP8 ? 1 : 2) }; /* of K or V */
};

/* copy_tile() of pages of fp8: bytes travel as they are. */
template <int DP, bool WHOLE>
__device__ static inline void copy_tile8(const struct lane_pages *p, const struct tile_pages *t,
                                         uint32_t pos, uint32_t end, uint32_t k_at, uint32_t v_at)
{
    constexpr uint32_t chunks = DP / 16, rows = 32 / chunks; /* rows of one instruction */
    const uint32_t lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    const uint32_t in_page = (1u << p->shift) - 1, dim = WHOLE ? DP : p->dim;
    const size_t v_part = (size_t)dim << p->shift;
    const bool all = pos + first + 16 <= end && (t->masks[0] & t->masks[1]) == ~0u;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const block_id b = t->pages[half];
        const uint32_t mask = t->masks[half], r0 = first + half * 8;
        const uint8_t *page =
            (b & BLOCK_IN_DRAM ? p->dram : p->hbm) + (size_t)(b & ~BLOCK_IN_DRAM) * p->block_bytes;
        if (WHOLE && all) {
            const uint8_t *from = page + ((pos + r0) & in_page) * DP + lane * 16;
#pragma unroll
            for (uint32_t i = 0; i < 8; i += rows) {
                const uint32_t to = chunk8_at<DP>(r0 + i + lane / chunks, lane % chunks);
                copy_16(k_at + to, from + i * DP, true);
                copy_16(v_at + to, from + i * DP + v_part, true);
            }
        } else {
#pragma unroll 1
            for (uint32_t i = lane; i < 8 * DP / 4; i += 32) { /* four numbers */
                const uint32_t r = r0 + i / (DP / 4), x = i % (DP / 4) * 4;
                const uint32_t row = (pos + r) & in_page;
                const bool exists = pos + r < end && x < dim && (mask >> row & 1);
                const size_t from = exists ? row * (size_t)dim + x : 0;
                const uint32_t to = chunk8_at<DP>(r, x / 16) + x % 16;
                copy_4(k_at + to, page + from, exists);
                copy_4(v_at + to, page + v_part + from, exists);
            }
        }
    }
}

/* Starts copying this warp's rows of the tile at pos; all of them, where pages are whole, with next to no
 * arithmetic. */
template <int DP, int ROWS>
__device__ static inline void copy_tile(const struct lane_pages *p, const struct tile_pages *t,
                                        uint32_t pos, uint32_t end, uint32_t k_at, uint32_t v_at)
{
    constexpr bool WHOLE = (ROWS & ROWS_WHOLE) != 0;
    if constexpr ((ROWS & ROWS_FP8) != 0)
        return copy_tile8<DP, WHOLE>(p, t, pos, end, k_at, v_at);
    constexpr uint32_t chunks = DP / 8, rows = 32 / chunks; /* rows of one instruction */
    const uint32_t lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
    const uint32_t in_page = (1u << p->shift) - 1, dim = WHOLE ? DP : p->dim;
    const size_t v_part = (size_t)dim * 2 << p->shift;
    const bool all = pos + first + 16 <= end && (t->masks[0] & t->masks[1]) == ~0u;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const block_id b = t->pages[half];
        const uint32_t mask = t->masks[half], r0 = first + half * 8;
        const uint8_t *page =
            (b & BLOCK_IN_DRAM ? p->dram : p->hbm) + (size_t)(b & ~BLOCK_IN_DRAM) * p->block_bytes;
        if (WHOLE && all) {
            const uint8_t *from = page + ((pos + r0) & in_page) * (DP * 2) + lane * 16;
#pragma unroll
            for (uint32_t i = 0; i < 8; i += rows) {
                const uint32_t to = chunk_at<DP>(r0 + i + lane / chunks, lane % chunks);
                copy_16(k_at + to, from + i * (DP * 2), true);
                copy_16(v_at + to, from + i * (DP * 2) + v_part, true);
            }
        } else if (WHOLE) {
#pragma unroll 1
            for (uint32_t i = lane; i < 8 * chunks; i += 32) {
                const uint32_t r = r0 + i / chunks, c = i % chunks, row = (pos + r) & in_page;
                const bool exists = pos + r < end && (mask >> row & 1);
                const uint8_t *from = page + row * (DP * 2) + c * 16;
                copy_16(k_at + chunk_at<DP>(r, c), from, exists);
                copy_16(v_at + chunk_at<DP>(r, c), from + v_part, exists);
            }
        } else {
#pragma unroll 1
            for (uint32_t i = lane; i < 8 * DP / 2; i += 32) { /* pairs of numbers */
                const uint32_t r = r0 + i / (DP / 2), x = i % (DP / 2), row = (pos + r) & in_page;
                const bool exists = pos + r < end && x * 2 < dim && (mask >> row & 1);
                const size_t from = exists ? row * (size_t)dim * 2 + x * 4 : 0;
                const uint32_t to = chunk_at<DP>(r, x / 4) + x % 4 * 4;
                copy_4(k_at + to, page + from, exists);
                copy_4(v_at + to, page + v_part + from, exists);
            }
        }
    }
}

/* ---- tiles as operands ----
 *
 * Numbers of fp8 become bf16 on their way into registers. A lane of ldmatrix has two words of 16 bits, so four
 * numbers of fp8 where it has two of bf16, and these decide which dimension is which of the instruction:
 *   - keys: of every 16 dimensions, lane 4g + t has 4t and 4t + 1 as numbers 2t and 2t + 1, 4t + 2 and
 *     4t + 3 as 2t + 8 and 2t + 9; queries lie likewise (load_queries), and a sum of 16 has no order (on sm_90);
 *   - values: of every 16 dimensions, column n of the first block is dimension 2n and of the second 2n + 1. */

/* Of 16 rows from `row` on, dimensions 16 i to 16 i + 15: of the first 8 rows and of the other. */
template <int DP, int ROWS>
__device__ static inline void load_keys(uint32_t b[4], uint32_t k_at, uint32_t row, uint32_t i)
{
    const uint32_t lane = threadIdx.x % 32;
    if constexpr ((ROWS & ROWS_FP8) == 0) {
        load_matrices(b, k_at + chunk_at<DP>(row + lane % 8 + lane / 16 * 8, 2 * i + lane / 8 % 2));
    } else {
        uint32_t w[2];
        load_matrices_2(w, k_at + chunk8_at<DP>(row + lane % 16, i));
        const uint2 low = fp8_widen4(w[0]), high = fp8_widen4(w[1]);
        b[0] = low.x;
        b[1] = low.y;
        b[2] = high.x;
        b[3] = high.y;
    }
}

/* Of 16 rows from `row` on, blocks j and j + 1 of 8 dimensions; j is even. */
template <int DP, int ROWS>
__device__ static inline void load_values(uint32_t b[4], uint32_t v_at, uint32_t row, uint32_t j)
{
    const uint32_t lane = threadIdx.x % 32;
    if constexpr ((ROWS & ROWS_FP8) == 0) {
        load_matrices_turned(b, v_at + chunk_at<DP>(row + lane % 16, j + lane / 16));
    } else {
        uint32_t w[2];
        load_matrices_turned_2(w, v_at + chunk8_at<DP>(row + lane % 16, j / 2));
        const uint2 low = fp8_widen4(__byte_perm(w[0], 0, 0x3120)),
                    high = fp8_widen4(__byte_perm(w[1], 0, 0x3120));
        b[0] = low.x;
        b[1] = high.x;
        b[2] = low.y;
        b[3] = high.y;
    }
}

/* The dimension of number e (0 or 1 of a query) of this lane's sums of block j. */
template <int ROWS> __device__ static inline uint32_t sum_dim(uint32_t j, uint32_t e)
{
    const uint32_t t = threadIdx.x % 4;
    return ROWS & ROWS_FP8 ? j / 2 * 16 + t * 4 + e * 2 + j % 2 : j * 8 + t * 2 + e;
}

/* Sums of all N blocks so that a block has two neighbouring dimensions of a query, from pair_dim(j) on. */
template <int ROWS, int N> __device__ static inline void pair_sums(float o[N][4])
{
    if constexpr ((ROWS & ROWS_FP8) != 0)
#pragma unroll
        for (int j = 0; j < N; j += 2)
#pragma unroll
            for (int h = 0; h < 4; h += 2) {
                const float x = o[j][h + 1];
                o[j][h + 1] = o[j + 1][h];
                o[j + 1][h] = x;
            }
}

template <int ROWS> __device__ static inline uint32_t pair_dim(uint32_t j)
{
    const uint32_t t = threadIdx.x % 4;
    return ROWS & ROWS_FP8 ? j / 2 * 16 + t * 4 + j % 2 * 2 : j * 8 + t * 2;
}

/* ---- values that are no numbers ----
 *
 * Rows of a tile that a query does not see have probability 0, and 0 times what they hold is 0 unless that
 * is infinite or no number: then it would reach rows before them. Where queries see different parts of a
 * tile, such values are taken out, and sums that do see one become NaN. */

/* Of the two bf16 or four fp8 in a word, any. */
template <int ROWS> __device__ static inline bool has_bad_word(uint32_t w)
{
    if (ROWS & ROWS_FP8)
        return __vcmpeq4(w & 0x7f7f7f7fu, 0x7f7f7f7fu) != 0;
    return (w & 0x7f80) == 0x7f80 || (w >> 16 & 0x7f80) == 0x7f80;
}

/* Whether a tile of V has such values; all threads of a CTA. */
template <int DP, int ROWS> __device__ static inline bool has_bad(const uint8_t *v)
{
    bool bad = false;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < tile<DP, ROWS>::BYTES / 16; i += CUDA_THREADS) {
        uint4 x = *(const uint4 *)(v + i * 16);
        bad = bad || has_bad_word<ROWS>(x.x) || has_bad_word<ROWS>(x.y) ||
              has_bad_word<ROWS>(x.z) || has_bad_word<ROWS>(x.w);
    }
    return __syncthreads_or(bad) != 0;
}

/* Takes one out, if it is. */
template <int DP, int ROWS>
__device__ static inline bool clear_number(uint8_t *v, uint32_t row, uint32_t dim)
{
    if (ROWS & ROWS_FP8) {
        uint8_t *at = v + chunk8_at<DP>(row, dim / 16) + dim % 16;
        const bool bad = (*at & 0x7f) == 0x7f;
        if (bad)
            *at = 0;
        return bad;
    }
    uint16_t *at = (uint16_t *)(v + chunk_at<DP>(row, dim / 8) + dim % 8 * 2);
    const bool bad = (*at & 0x7f80) == 0x7f80;
    if (bad)
        *at = 0;
    return bad;
}

/* Takes them out; first[dimension]: the first position of the tile at pos that had one. */
template <int DP, int ROWS>
__device__ static inline void clear_bad(uint8_t *v, uint32_t pos, uint32_t first[DP])
{
    for (uint32_t x = threadIdx.x; x < DP; x += CUDA_THREADS) {
        first[x] = ~0u;
        for (uint32_t r = CUDA_TILE; r-- > 0;)
            if (clear_number<DP, ROWS>(v, r, x))
                first[x] = pos + r;
    }
    __syncthreads();
}

/* ---- queries, partial results ---- */

__device__ static inline const float *query_at(const struct attend_call *c,
                                               const struct attend_task *k, uint32_t query)
{
    return c->q + (k->row + query / c->group) * c->q_stride +
           (size_t)(k->head * c->group + query % c->group) * c->dim;
}

/* Number of a query's head of its row among all heads of all rows. */
__device__ static inline size_t result_at(const struct attend_call *c, const struct attend_task *k,
                                          uint32_t query)
{
    return (size_t)(k->row + query / c->group) * c->heads + k->head * c->group + query % c->group;
}

/* Numbers x and x + 1 of a result. */
__device__ static inline void put_result(const struct attend_call *c, size_t result, uint32_t x,
                                         float a, float b)
{
    const size_t at = result * c->dim + x;
    if (c->half != NULL)
        *(__nv_bfloat162 *)(c->half + at) = __floats2bfloat162_rn(a, b);
    else
        *(float2 *)(c->out + at) = make_float2(a, b);
}

/* Positions from here on a query does not see, in a split that is of [0, first_end) or not. */
__device__ static inline uint32_t query_limit(const struct attend_call *c,
                                              const struct attend_task *k, uint32_t query,
                                              bool first)
{
    return first ? k->first_end : k->pos + min(query / c->group, k->n_rows - 1) + 1;
}

/* Queries of a task of at most 16, as they come: behind one another in shared memory, in rows that lie in
 * different banks. */
template <int DP> struct query_rows {
    float of[CUDA_FEW][DP + 8];
};

/* Starts copying them, before the pages: loads that wait behind those come last. */
template <int DP, int ROWS>
__device__ static inline void copy_queries(const struct attend_call *c, const struct attend_task *k,
                                           struct query_rows<DP> *to)
{
    const uint32_t n = k->n_rows * c->group;
    if ((ROWS & ROWS_WHOLE) != 0) {
        for (uint32_t i = threadIdx.x; i < n * (DP / 4); i += CUDA_THREADS) {
            const uint32_t query = i / (DP / 4), x = i % (DP / 4) * 4;
            copy_16(shared_address(&to->of[query][x]), query_at(c, k, query) + x, true);
        }
    } else {
        for (uint32_t i = threadIdx.x; i < n * DP; i += CUDA_THREADS) {
            const uint32_t query = i / DP, x = i % DP;
            copy_4(shared_address(&to->of[query][x]), query_at(c, k, query) + (x < c->dim ? x : 0),
                   x < c->dim);
        }
    }
}

/* The first operand of a matrix instruction, of n queries that are there. */
template <int DP, int ROWS>
__device__ static inline void load_queries(const struct query_rows<DP> *from, uint32_t n,
                                           uint32_t a[DP / 16][4])
{
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t query = lane / 4 + i * 8;
#pragma unroll
        for (int s = 0; s < DP / 16; s++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float2 x = make_float2(0, 0);
                const uint32_t dim = ROWS & ROWS_FP8 ? s * 16 + lane % 4 * 4 + half * 2
                                                     : s * 16 + half * 8 + lane % 4 * 2;
                if (query < n)
                    x = *(const float2 *)&from->of[query][dim];
                a[s][half * 2 + i] = pack(x.x, x.y);
            }
    }
}

/* Scores of 16 queries and this warp's 16 positions of a tile. */
template <int DP, int ROWS>
__device__ static inline void warp_score(const uint32_t a[DP / 16][4], uint32_t k_at, float s[2][4])
{
#pragma unroll
    for (int i = 0; i < 2; i++)
        s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
#pragma unroll
    for (int i = 0; i < DP / 16; i++) {
        uint32_t b[4];
        load_keys<DP, ROWS>(b, k_at, threadIdx.x / 32 * 16, i);
        multiply(s[0], a[i], b);
        multiply(s[1], a[i], b + 2);
    }
}

/* Weights of what was folded so far and of the next split. */
struct fold {
    float m, so_far, next;
};

__device__ static inline struct fold fold_of(float m, float next_m)
{
    struct fold f;
    f.m = fmaxf(m, next_m);
    f.so_far = exp2_fast(m - f.m);
    f.next = exp2_fast(next_m - f.m);
    return f;
}

__device__ static inline float fold_sum(struct fold f, float sum, float next)
{
    return __fmaf_rn(sum, f.so_far, __fmul_rn(next, f.next));
}

__device__ static inline float finish(float sum, float l)
{
    return __fdividef(sum, l);
}

__device__ static inline float log_sum(float m, float l)
{
    return 0.69314718056f * (m + log2f(l));
}

#endif
