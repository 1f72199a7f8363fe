/* Row codes in an estimate (kernels/core/codes.h): what the rows of an estimated page differ from its
 * mean V, each by its share of the page's mass, in CODES_V directions.
 *
 * Logits of rows are whole numbers, as on the CPU; their exponentials are its rough ones. Shares times the
 * codes of V are a matrix product again: rows of storage are its inner dimension, 16 a step, directions
 * its columns; a lane computes the shares of just the rows and heads that the instruction wants of it. Each
 * warp first brings the codes of its pages to shared memory, all at once, since they lie in words of
 * four bytes. Bound by the latency of that, then by arithmetic: 8 products of four bytes per row and head. */
#ifndef KERNELS_CUDA_ATTEND_CODES_H
#define KERNELS_CUDA_ATTEND_CODES_H

#include "kernels/cuda/attend_mma.h"

#include <cuda_fp16.h>

enum { CODES_HEAD_CHUNK = 4 }; /* heads that share a limit, as on the CPU */

/* The codes of a page in shared memory, in words: of K [rows][2]; its scales [rows], each in a word of four
 * pages'; of V, the 16 or 32 rows that the page's lie in; its scales. */
static __host__ __device__ constexpr uint32_t codes_words(uint32_t rows)
{
    return 3 * rows + (rows > 16 ? rows : 16) + rows / 4;
}
enum { CODES_WORDS = 128 * codes_words(16) }; /* of a split's pages; R = 8 and 32 need less */

struct codes_memory {
    const uint8_t *of[CUDA_CODED]; /* the codes of an entry's record */
    uint16_t page[CUDA_CODED];
    uint32_t k[CUDA_FEW][CODES_K / 4]; /* a head's query by direction, whole numbers of one byte */
    int32_t start[CUDA_FEW];
    float factor[CUDA_FEW], limit[CUDA_FEW];
    float sums[4][CUDA_FEW][CODES_V]; /* of each warp */
    const uint8_t *v_basis;           /* sd, F */
};

/* As multiply, of half precision. */
__device__ static inline void multiply_halves(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},"
                 "{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ static inline float codes_number(const uint8_t *bf16)
{
    return __uint_as_float((uint32_t) * (const uint16_t *)bf16 << 16);
}

__device__ static inline float codes_scale(uint32_t byte)
{
    return __uint_as_float((byte << 20) + ((127u - CODES_SCALE_EXP) << 23));
}

/* Queries of the group in the directions of K: a warp has a head, a lane a direction. q: [group][dim];
 * codes: of segment 0's record; e: room for its directions. All threads. */
__device__ static inline void codes_query(struct codes_memory *m, const float *q, uint32_t dim,
                                          uint32_t group, float scale, const uint8_t *codes,
                                          uint16_t *e)
{
    const uint32_t lane = threadIdx.x % 32;
    const uint8_t *sd = codes + codes_k_basis(true), *from = sd + CODES_K * sizeof(float);
    for (uint32_t i = threadIdx.x; i < dim * CODES_K / 8; i += CUDA_THREADS)
        copy_16(shared_address(e + i * 8), from + i * 16, true);
    copies_end_group();
    const float own_sd = ((const float *)sd)[lane];
    copies_wait<0>();
    __syncthreads();
    for (uint32_t h = threadIdx.x / 32; h < group; h += CUDA_THREADS / 32) {
        float part[4] = {};
        uint32_t c = 0;
        for (; c + 4 <= dim; c += 4)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                part[i] = __fmaf_rn(__uint_as_float((uint32_t)e[(c + i) * CODES_K + lane] << 16),
                                    q[(size_t)h * dim + c + i], part[i]);
        for (; c < dim; c++)
            part[0] = __fmaf_rn(__uint_as_float((uint32_t)e[c * CODES_K + lane] << 16),
                                q[(size_t)h * dim + c], part[0]);
        float sum = (part[0] + part[1]) + (part[2] + part[3]);
        sum = __fmul_rn(__fmul_rn(sum, own_sd), scale * 1.44269504089f * CODES_STEP);
        float top = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fabsf(sum))));
        float inverse = top > 1e-30f ? 127.0f / top : 0;
        int32_t whole = __float2int_rn(fminf(fmaxf(sum * inverse, -127.0f), 127.0f));
        int32_t all = __reduce_add_sync(~0u, whole), most = __reduce_add_sync(~0u, abs(whole));
        ((int8_t *)m->k[h])[lane] = (int8_t)whole;
        if (lane != 0)
            continue;
        m->start[h] = -3 * all / 2;
        m->factor[h] = top > 1e-30f ? top / 127.0f : 0;
        float limit = 60.0f / (1.5f * m->factor[h] * (float)(most + 1) + 1e-30f);
        m->limit[h] = fminf(limit, 4096);
    }
    if (threadIdx.x == 0)
        m->v_basis = codes + codes_v_basis(dim);
    __syncthreads();
    float limit = 4096;
    if (threadIdx.x < group) {
        uint32_t first = threadIdx.x / CODES_HEAD_CHUNK * CODES_HEAD_CHUNK;
        for (uint32_t h = first; h < min(group, first + CODES_HEAD_CHUNK); h++)
            limit = fminf(limit, m->limit[h]);
    }
    __syncthreads();
    if (threadIdx.x < group)
        m->limit[threadIdx.x] = limit;
    __syncthreads();
}

/* Word i of a page's codes as they lie in shared memory. */
__device__ static inline const uint8_t *codes_word(const uint8_t *codes, uint32_t p, uint32_t rows,
                                                   uint32_t i)
{
    const uint32_t v_words = max(rows, (uint32_t)CODES_LANES);
    if (i < 2 * rows)
        return codes + codes_k_byte(p, i / 2, 0, rows) + i % 2 * CODES_VECTOR;
    if (i < 3 * rows)
        return codes + (codes_k_scale(p, i - 2 * rows, rows) & ~(size_t)3);
    if (i < 3 * rows + v_words)
        return codes + codes_v_byte(p * rows / CODES_LANES * CODES_LANES, i - 3 * rows);
    return codes + codes_v_scales() + (size_t)p * rows + (i - 3 * rows - v_words) * 4;
}

/* Starts copying the codes of this warp's entries [first, end). */
__device__ static inline void codes_fetch(const struct codes_memory *m, uint32_t rows,
                                          uint32_t first, uint32_t end, uint32_t *to)
{
    const uint32_t words = codes_words(rows), n = (end - first) * words;
    for (uint32_t i = threadIdx.x % 32; i < n; i += 32) {
        const uint32_t entry = first + i / words;
        copy_4(shared_address(to + first * words + i),
               codes_word(m->of[entry], m->page[entry], rows, i % words), true);
    }
    copies_end_group();
}

/* What a head asks. */
struct codes_head {
    uint32_t k[CODES_K / 4];
    int32_t start;
    float factor, limit;
};

__device__ static inline struct codes_head codes_head_of(const struct codes_memory *m,
                                                         uint32_t head)
{
    struct codes_head h;
#pragma unroll
    for (int i = 0; i < CODES_K / 4; i++)
        h.k[i] = m->k[head][i];
    h.start = m->start[head];
    h.factor = m->factor[head];
    h.limit = m->limit[head];
    return h;
}

/* e^(a row's logit above its centroid's). page: its codes in shared memory, page p. */
__device__ static inline float codes_mass(const uint32_t *page, uint32_t p, uint32_t row,
                                          uint32_t rows, const struct codes_head *h)
{
    const uint32_t words[2] = {page[row * 2], page[row * 2 + 1]};
    const uint32_t byte = page[2 * rows + row] >> p % 4 * 8 & 0xff;
    const float alpha = fminf(codes_scale(byte), h->limit);
    int32_t sum = h->start;
#pragma unroll
    for (int x = 0; x < CODES_VECTORS; x++)
#pragma unroll
        for (int s = 0; s < CODES_FIELDS; s++)
            sum = __dp4a((int)(words[x] >> 2 * s & 0x03030303u), (int)h->k[x * CODES_FIELDS + s],
                         sum);
    const float logit = __fmul_rn((float)sum, __fmul_rn(alpha, h->factor));
    const float steps = 8388608.0f, middle = (127.0f - 0.0573f) * 8388608.0f;
    return __int_as_float(__float2int_rn(__fmaf_rn(logit, steps, middle)));
}

/* Masses of rows `row` and `row` + 1. */
__device__ static inline float2 codes_two(const uint32_t *page, uint32_t p, uint32_t row,
                                          uint32_t rows, const struct codes_head *h)
{
    return make_float2(codes_mass(page, p, row, rows, h), codes_mass(page, p, row + 1, rows, h));
}

/* Over the four lanes of a query. */
__device__ static inline float codes_add_lanes(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* Weights of two rows: shares of the page's mass times scales of V, times the page's weight `f`. */
__device__ static inline uint32_t codes_weights(const uint32_t *page, uint32_t row, uint32_t rows,
                                                float2 mass, float f)
{
    const uint32_t *scales = page + 3 * rows + max(rows, (uint32_t)CODES_LANES);
    const uint32_t two = scales[row / 4] >> row % 4 * 8;
    __half2 w = __floats2half2_rn(mass.x * f * codes_scale(two & 0xff),
                                  mass.y * f * codes_scale(two >> 8 & 0xff));
    return *reinterpret_cast<uint32_t *>(&w);
}

/* Twice (level - 1.5) of rows `row` and `row` + 1 of page p in direction j. */
__device__ static inline uint32_t codes_levels(const uint32_t *page, uint32_t p, uint32_t row,
                                               uint32_t rows, uint32_t j)
{
    const uint32_t r =
        p * rows + row; /* of storage; rows of a vector, not of the page, are bytes */
    const uint32_t word = page[3 * rows + row / CODES_LANES * CODES_LANES + j];
    const uint32_t x = word >> (codes_shift(r) + r % 4 * 8);
    uint32_t bits = (x & 3) << 1 | (x >> 8 & 3) << 17 | 0x64006400u; /* 1024 + 2 level */
    __half2 v = __hsub2(*reinterpret_cast<__half2 *>(&bits), __float2half2_rn(1027));
    return *reinterpret_cast<uint32_t *>(&v);
}

/* Sums of this warp's entries [first, end); end: behind the last that weighs something. codes: as codes_fetch
 * left them; p: [head][stride] weights of the pages. */
__device__ static inline void codes_sum(struct codes_memory *m, const uint32_t *codes,
                                        uint32_t rows, uint32_t group, uint32_t first, uint32_t end,
                                        const float *p, uint32_t stride)
{
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, words = codes_words(rows);
    const uint32_t pages = rows == 8 ? 2 : 1, steps = rows == 32 ? 2 : 1; /* at once */
    const bool shared = group <= 4; /* lanes of g >= 4 have the second half of query g - 4 */
    const struct codes_head near = codes_head_of(m, min(shared ? g % 4 : g, group - 1));
    const struct codes_head far = codes_head_of(m, min(g + 8, group - 1));
    float y[2][4] = {};
    for (uint32_t i = first; i < end; i += pages) {
        const uint32_t entry[2] = {i, pages == 2 ? i + 1 : i};
        const uint32_t *page[2] = {codes + entry[0] * words, codes + entry[1] * words};
        const uint32_t number[2] = {m->page[entry[0]], m->page[entry[1]]};
        float2 mass[2][2][2] = {}; /* [step][half of it][query g, g + 8] */
#pragma unroll
        for (uint32_t k = 0; k < 2; k++) {
            if (k >= steps)
                continue;
            if (shared) {
                const uint32_t half = g / 4, row = k * 16 + (pages == 2 ? 0 : half * 8) + t * 2;
                float2 own = codes_two(half ? page[1] : page[0], half ? number[1] : number[0], row,
                                       rows, &near);
                mass[k][0][0] = own; /* of query g, where g < 4 */
                mass[k][1][0].x = __shfl_xor_sync(~0u, own.x, 16);
                mass[k][1][0].y = __shfl_xor_sync(~0u, own.y, 16);
                continue;
            }
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t row = k * 16 + (pages == 2 ? 0 : half * 8) + t * 2;
                mass[k][half][0] = codes_two(page[half], number[half], row, rows, &near);
                if (group > 8)
                    mass[k][half][1] = codes_two(page[half], number[half], row, rows, &far);
            }
        }
        float f[2][2]; /* [half][query] */
#pragma unroll
        for (uint32_t q = 0; q < 2; q++) {
            const uint32_t head = g + q * 8;
            float sum[2];
#pragma unroll
            for (uint32_t half = 0; half < 2; half++)
                sum[half] = codes_add_lanes(mass[0][half][q].x + mass[0][half][q].y +
                                            mass[1][half][q].x + mass[1][half][q].y);
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                float all = pages == 2 ? sum[half] : sum[0] + sum[1];
                f[half][q] =
                    head < group ? __fdividef(p[(size_t)head * stride + entry[half]], all) : 0;
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < 2; k++) {
            if (k >= steps)
                continue;
            uint32_t a[4], b[2][2];
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t row = k * 16 + (pages == 2 ? 0 : half * 8) + t * 2;
#pragma unroll
                for (uint32_t q = 0; q < 2; q++)
                    a[half * 2 + q] =
                        g + q * 8 < group
                            ? codes_weights(page[half], row, rows, mass[k][half][q], f[half][q])
                            : 0;
#pragma unroll
                for (uint32_t j = 0; j < 2; j++)
                    b[j][half] = codes_levels(page[half], number[half], row, rows, g + j * 8);
            }
            multiply_halves(y[0], a, b[0]);
            multiply_halves(y[1], a, b[1]);
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; j++)
#pragma unroll
        for (uint32_t x = 0; x < 4; x++)
            if (g + x / 2 * 8 < group)
                m->sums[threadIdx.x / 32][g + x / 2 * 8][j * 8 + t * 2 + x % 2] = y[j][x];
}

/* Directions of V at dimension x, with what turns a sum of codes into numbers. */
__device__ static inline void codes_directions(const struct codes_memory *m, uint32_t dim,
                                               uint32_t x, float f[CODES_V])
{
    const uint8_t *rows = m->v_basis + CODES_V * sizeof(float);
#pragma unroll
    for (uint32_t j = 0; j < CODES_V; j++)
        f[j] = x < dim ? codes_number(rows + ((size_t)j * dim + x) * 2) *
                             (((const float *)m->v_basis)[j] * (0.5f * CODES_STEP))
                       : 0;
}

__device__ static inline float codes_turned_back(const struct codes_memory *m, uint32_t head,
                                                 const float f[CODES_V])
{
    float sum = 0;
#pragma unroll
    for (uint32_t j = 0; j < CODES_V; j++) {
        float y = m->sums[0][head][j];
#pragma unroll
        for (int warp = 1; warp < 4; warp++)
            y += m->sums[warp][head][j];
        sum = __fmaf_rn(y, f[j], sum);
    }
    return sum;
}

#endif
