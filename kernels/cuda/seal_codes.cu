/* Row codes of a sealed segment (kernels/core/codes.h), from its rows in the order of storage and the
 * digests that seal_digest.cu has just written.
 *
 * Projections of distances are y = E^T k - E^T c. Keys and directions are bf16, so tensor cores multiply
 * them exactly; centroids are floats, and go in as three bf16 that add up to them. Directions, once per
 * sequence, are found as on the CPU (kernels/cpu/codes_basis_vec.h) in floats: orthogonal iteration on the
 * covariance of the distances. */
#include "kernels/cuda/seal.h"

namespace
{

enum {
    BASIS_THREADS = 256,
    BASIS_WARPS = BASIS_THREADS / 32,
    BASIS_ROUNDS = 16, /* as on the CPU; ... */
    EXACT_ROUNDS = 2,  /* ... behind which directions are orthogonal to the last bits */
    BASIS_ROWS = 32,   /* of the covariance, in shared memory at a time */
    BASIS_SHARED_DIM = 128,
    BLOCK = 64, /* channels of a block of the covariance: 4 x 4 per thread */
    DIRS = 8,   /* directions that a thread multiplies at a time */
    ROW_WARPS = 8
};

/* Means as they can be read back. half 0: centroids of K; 1: mean V. */
struct kept_means {
    const struct seal_call *c;
    const uint8_t *record;
    uint32_t half;
};

/* Four channels from `at` on of page p's; at < head_dim. */
__device__ inline float4 kept_mean(const struct kept_means *m, uint32_t p, uint32_t at)
{
    const struct digest_layout *l = &m->c->layout;
    if (m->half == 0) {
        struct digest_vectors v = digest_vectors_of(m->record, l, 0);
        uint32_t four = *(const uint32_t *)(v.tiles + digest_byte(l->dim, p, at));
        float4 base = *(const float4 *)(v.base + at), step = *(const float4 *)(v.step + at);
        return make_float4(
            base.x + step.x * (float)(four & 0xff), base.y + step.y * (float)(four >> 8 & 0xff),
            base.z + step.z * (float)(four >> 16 & 0xff), base.w + step.w * (float)(four >> 24));
    }
    uint32_t four = *(const uint32_t *)(digest_value(m->record, l, p) + at);
    float scale = digest_value_scale(m->record, l, p);
    return make_float4(
        scale * (float)(int8_t)(four & 0xff), scale * (float)(int8_t)(four >> 8 & 0xff),
        scale * (float)(int8_t)(four >> 16 & 0xff), scale * (float)(int8_t)(four >> 24));
}

/* ---- directions ---- */

struct basis {
    const struct seal_call *c;
    uint32_t lane, half, dim, dirs;
    float *cov;       /* [dim][dim] */
    float *q, *image; /* [CODES_K][dim] shared */
    float *part;      /* [CODES_K] shared */
    struct kept_means means;
};

/* Distances of BASIS_ROWS rows from their means, [BASIS_ROWS][dim]; rows beyond the last are 0. */
__device__ void load_distances(const struct basis *s, uint32_t first, float *to)
{
    const uint32_t fours = s->dim / 4;
    for (uint32_t i = threadIdx.x; i < BASIS_ROWS * fours; i += BASIS_THREADS) {
        uint32_t r = first + i / fours, at = i % fours * 4;
        float4 x = make_float4(0, 0, 0, 0);
        if (r < SEGMENT_ROWS) {
            uint2 w =
                seal_four(s->c->number, seal_row(s->c, s->c->job->to, s->lane, s->half, r), at);
            float4 m = kept_mean(&s->means, r >> s->c->row_shift, at);
            x = make_float4(seal_low(w.x) - m.x, seal_high(w.x) - m.y, seal_low(w.y) - m.z,
                            seal_high(w.y) - m.w);
        }
        *(float4 *)(to + (size_t)(i / fours) * s->dim + at) = x;
    }
}

/* cov = sum over the rows behind the sinks; NB: blocks of 64 channels. Rows are read NB times. */
template <int NB> __device__ void covariance(const struct basis *s)
{
    const uint32_t y = threadIdx.x / 16 * 4, x = threadIdx.x % 16 * 4, dim = s->dim;
    float *rows = s->q;
    for (uint32_t i0 = 0; i0 < dim; i0 += BLOCK) {
        float acc[NB][4][4] = {{{0}}};
        for (uint32_t r = s->c->job->sink_rows; r < SEGMENT_ROWS; r += BASIS_ROWS) {
            load_distances(s, r, rows);
            __syncthreads();
            for (uint32_t k = 0; k < BASIS_ROWS && i0 + y < dim; k++) {
                float4 a = *(const float4 *)(rows + k * dim + i0 + y);
                for (int n = 0; n < NB; n++) {
                    if (n * BLOCK + x >= dim)
                        continue;
                    float4 b = *(const float4 *)(rows + k * dim + n * BLOCK + x);
                    const float u[4] = {a.x, a.y, a.z, a.w}, v[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
                    for (int i = 0; i < 4; i++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            acc[n][i][j] = fmaf(u[i], v[j], acc[n][i][j]);
                }
            }
            __syncthreads();
        }
        for (int n = 0; n < NB; n++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    if (i0 + y + i < dim && n * BLOCK + x + j < dim)
                        s->cov[(size_t)(i0 + y + i) * dim + n * BLOCK + x + j] = acc[n][i][j];
    }
    __syncthreads();
}

/* to = C from: an item is 8 directions of a channel. */
__device__ void multiply(const struct basis *s, const float *from, float *to)
{
    const uint32_t dim = s->dim, groups = (s->dirs + DIRS - 1) / DIRS;
    for (uint32_t item = threadIdx.x; item < groups * dim; item += BASIS_THREADS) {
        const uint32_t j = item % dim;
        const float *q = from + (size_t)(item / dim) * DIRS * dim;
        float acc[DIRS] = {0};
        for (uint32_t i = 0; i < dim; i += 4) {
            float row[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                row[k] = s->cov[(size_t)(i + k) * dim + j];
#pragma unroll
            for (int d = 0; d < DIRS; d++) {
                float4 x = *(const float4 *)(q + d * dim + i);
                acc[d] = fmaf(row[0], x.x, acc[d]);
                acc[d] = fmaf(row[1], x.y, acc[d]);
                acc[d] = fmaf(row[2], x.z, acc[d]);
                acc[d] = fmaf(row[3], x.w, acc[d]);
            }
        }
        for (int d = 0; d < DIRS; d++)
            to[(size_t)(item / dim * DIRS + d) * dim + j] = acc[d];
    }
    __syncthreads();
}

/* Every warp has the same result. */
__device__ inline float dot(const float *a, const float *b, uint32_t dim)
{
    float sum = 0;
    for (uint32_t c = threadIdx.x % 32; c < dim; c += 32)
        sum = fmaf(a[c], b[c], sum);
    return seal_warp_sum(sum);
}

/* Takes from q[d] what lies in q[0 .. d - 1]; once leaves rounding errors. */
__device__ void project_out(const struct basis *s, uint32_t d, uint32_t passes)
{
    const uint32_t dim = s->dim;
    float *x = s->q + (size_t)d * dim;
    for (uint32_t pass = 0; pass < passes && d > 0; pass++) {
        for (uint32_t i = threadIdx.x / 32; i < d; i += BASIS_WARPS) {
            float p = dot(x, s->q + (size_t)i * dim, dim);
            if (threadIdx.x % 32 == 0)
                s->part[i] = p;
        }
        __syncthreads();
        for (uint32_t c = threadIdx.x; c < dim; c += BASIS_THREADS) {
            float acc = x[c];
            for (uint32_t i = 0; i < d; i++)
                acc = fmaf(s->q[(size_t)i * dim + c], -s->part[i], acc);
            x[c] = acc;
        }
        __syncthreads();
    }
}

/* Gram-Schmidt, in order. Where nothing is left, the first channel that adds enough of a direction: one of
 * dim - d others must. */
__device__ void orthonormalise(const struct basis *s, uint32_t passes)
{
    const uint32_t dim = s->dim;
    for (uint32_t d = 0; d < s->dirs; d++) {
        float *x = s->q + (size_t)d * dim, before = dot(x, x, dim), left;
        __syncthreads();
        project_out(s, d, passes);
        left = dot(x, x, dim);
        for (uint32_t c = 0; c < dim && !(left > 1e-8f * before && left > 1e-30f); c++) {
            __syncthreads();
            for (uint32_t i = threadIdx.x; i < dim; i += BASIS_THREADS)
                x[i] = i == c;
            __syncthreads();
            project_out(s, d, 2);
            left = dot(x, x, dim);
            before = 0;
            if (left < 0.5f * (float)(dim - d) / (float)dim)
                left = 0;
        }
        __syncthreads();
        for (uint32_t c = threadIdx.x; c < dim; c += BASIS_THREADS)
            x[c] *= 1.0f / sqrtf(left);
        __syncthreads();
    }
}

/* A start that no channel structure is blind to: signs of a hash. Without a sound covariance: channels. */
__device__ void start_basis(const struct basis *s, bool sound)
{
    for (uint32_t i = threadIdx.x; i < CODES_K * s->dim; i += BASIS_THREADS) {
        uint32_t d = i / s->dim, c = i % s->dim, h = (d * 512 + c + 1) * 0x9e3779b1u;
        h = (h ^ h >> 15) * 0x85ebca6bu;
        float sign = (h ^ h >> 13) & 1 ? 1.0f : -1.0f;
        s->q[i] = d >= s->dirs ? 0.0f : sound ? sign : d == c ? 1.0f : 0.0f;
        s->image[i] = 0;
    }
    __syncthreads();
}

/* Scales the covariance by its greatest variance: *most. False: it has no weight, or NaN in it. */
__device__ bool scale_covariance(const struct basis *s, float *most)
{
    bool sound = true;
    *most = 0;
    for (uint32_t c = 0; c < s->dim; c++) {
        float own = s->cov[(size_t)c * s->dim + c];
        sound = sound && own < 1e30f; /* false for NaN; and then no product is NaN */
        *most = own > *most ? own : *most;
    }
    sound = sound && *most > 1e-24f;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < s->dim * s->dim; i += BASIS_THREADS)
        s->cov[i] *= sound ? 1.0f / *most : 0.0f;
    __syncthreads();
    return sound;
}

/* sd [n] of directions; part holds their weights. A direction without any may yet be used. */
__device__ void write_sd(const struct basis *s, uint32_t n, bool sound, float most, float *sd)
{
    float top = 0;
    for (uint32_t d = 0; d < s->dirs; d++)
        top = sound && s->part[d] > top ? s->part[d] : top;
    for (uint32_t d = threadIdx.x; d < n; d += BASIS_THREADS) {
        float w = d < s->dirs && sound ? s->part[d] : 0;
        w = w > 1e-6f * top ? w : 1e-6f * top;
        w *= most / (float)(SEGMENT_ROWS - s->c->job->sink_rows);
        sd[d] = d >= s->dirs ? 0.0f : sound ? sqrtf(w) : 1.0f;
    }
}

/* One CTA per lane and half. Bound by the latency of Gram-Schmidt: 16 times 32 directions, one after the
 * other; once per sequence. Op: seal. */
template <int NB>
__global__ void __launch_bounds__(BASIS_THREADS)
    basis_kernel(const __grid_constant__ struct seal_call c)
{
    extern __shared__ float4 shared[];
    const uint32_t half = blockIdx.y, n = half == 0 ? CODES_K : CODES_V;
    struct basis s = {&c, blockIdx.x, half, c.dim};
    if (c.lanes[s.lane].class_ != LANE_SPARSE)
        return;
    uint8_t *record = seal_record(&c, s.lane, c.job->record), *codes = record + c.layout.codes;
    float *at = (float *)shared, most;
    s.q = at;
    s.image = s.q + CODES_K * c.dim;
    s.part = s.image + CODES_K * c.dim;
    s.cov = c.dim <= BASIS_SHARED_DIM ? s.part + CODES_K
                                      : c.matrix + ((size_t)s.lane * 2 + half) * c.dim * c.dim;
    s.dirs = n < c.dim ? n : c.dim;
    s.means = {&c, record, half};
    covariance<NB>(&s);
    bool sound = scale_covariance(&s, &most);
    start_basis(&s, sound);
    for (uint32_t i = 0; i < BASIS_ROUNDS && sound; i++) {
        multiply(&s, s.q, s.image);
        for (uint32_t k = threadIdx.x; k < s.dirs * c.dim; k += BASIS_THREADS)
            s.q[k] = s.image[k];
        __syncthreads();
        /* Behind all but the last ones another product turns all of them anyway. */
        orthonormalise(&s, i + EXACT_ROUNDS < BASIS_ROUNDS ? 1 : 2);
    }
    multiply(&s, s.q, s.image);
    for (uint32_t d = threadIdx.x / 32; d < s.dirs; d += BASIS_WARPS) {
        float w = dot(s.q + d * c.dim, s.image + d * c.dim, c.dim);
        if (threadIdx.x % 32 == 0)
            s.part[d] = w;
    }
    __syncthreads();
    float *sd =
        (float *)(codes + (half == 0 ? codes_k_basis(c.desc.values) : codes_v_basis(c.dim)));
    __nv_bfloat16 *to = (__nv_bfloat16 *)(sd + n);
    write_sd(&s, n, sound, most, sd);
    for (uint32_t i = threadIdx.x; i < n * c.dim; i += BASIS_THREADS) {
        uint32_t d = half == 0 ? i % CODES_K : i / c.dim, k = half == 0 ? i / CODES_K : i % c.dim;
        to[i] = __float2bfloat16_rn(s.q[d * c.dim + k]);
    }
}

/* ---- rows ----
 *
 * A warp multiplies 16 rows with all directions. Channels go to the slots of mma.m16n8k16 in an order of
 * our own: thread t of a group of four has channels 32 q + 8 t .. + 7, so it loads 16 bytes. */

__device__ inline void mma(float *d, const uint32_t *a, const uint32_t *b)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline uint32_t two(float a, float b)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *(const uint32_t *)&v;
}

/* QB: blocks of 32 channels; NT: 8s of directions. */
template <int QB, int NT> struct coder {
    const struct seal_call *c;
    uint32_t lane, half, g,
        t; /* g: row and row + 8 of 16, or column of 8; t: which of four threads */
    uint32_t b[QB][2][NT][2]; /* directions */
    float m[NT][4];           /* projections of 16 pages' means */
    float sd[NT][2], inverse[NT][2];
    uint32_t dirs;
};

template <int QB, int NT>
__device__ inline void load_directions(struct coder<QB, NT> *s, const uint8_t *basis)
{
    const float *sd = (const float *)basis;
    const uint16_t *dirs = (const uint16_t *)(sd + NT * 8);
    const uint32_t dim = s->c->dim;
    s->dirs = dim < NT * 8 ? dim : NT * 8;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float x = sd[n * 8 + 2 * s->t + e];
            s->sd[n][e] = x;
            s->inverse[n][e] = x > 0 ? 1.0f / x : 0.0f;
        }
#pragma unroll
    for (int q = 0; q < QB; q++)
#pragma unroll
        for (int w = 0; w < 4; w++) {
            uint32_t at = q * 32 + 8 * s->t + 2 * w;
#pragma unroll
            for (int n = 0; n < NT; n++) {
                uint32_t j = n * 8 + s->g, pair = 0;
                if (at < dim && NT * 8 == CODES_K)
                    pair = dirs[at * CODES_K + j] | (uint32_t)dirs[(at + 1) * CODES_K + j] << 16;
                else if (at < dim)
                    pair = *(const uint32_t *)(dirs + (size_t)j * dim + at);
                s->b[q][w / 2][n][w % 2] = pair;
            }
        }
}

/* s->m = projections of the means of pages p0 + g and p0 + g + 8. */
template <int QB, int NT>
__device__ inline void project_means(struct coder<QB, NT> *s, const struct kept_means *means,
                                     uint32_t p0)
{
#pragma unroll
    for (int n = 0; n < NT; n++)
        s->m[n][0] = s->m[n][1] = s->m[n][2] = s->m[n][3] = 0;
#pragma unroll
    for (int q = 0; q < QB; q++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t at = q * 32 + 8 * s->t + 4 * k;
            float4 x = make_float4(0, 0, 0, 0), y = x;
            if (at < s->c->dim) {
                x = kept_mean(means, p0 + s->g, at);
                y = kept_mean(means, p0 + s->g + 8, at);
            }
#pragma unroll
            for (int term = 0; term < 3; term++) {
                uint32_t a[4] = {two(x.x, x.y), two(y.x, y.y), two(x.z, x.w), two(y.z, y.w)};
#pragma unroll
                for (int n = 0; n < NT; n++)
                    mma(s->m[n], a, s->b[q][k][n]);
                x = make_float4(x.x - seal_low(a[0]), x.y - seal_high(a[0]), x.z - seal_low(a[2]),
                                x.w - seal_high(a[2]));
                y = make_float4(y.x - seal_low(a[1]), y.y - seal_high(a[1]), y.z - seal_low(a[3]),
                                y.w - seal_high(a[3]));
            }
        }
}

/* 8 channels of a row; those behind head_dim are 0. */
__device__ inline uint4 load_eight(const struct seal_call *c, const uint8_t *row, uint32_t at)
{
    const uint32_t dim = c->dim;
    if (dim % 8 == 0)
        return at < dim ? seal_eight(c->number, row, at) : make_uint4(0, 0, 0, 0);
    uint2 x = make_uint2(0, 0), y = x;
    if (at < dim)
        x = seal_four(c->number, row, at);
    if (at + 4 < dim)
        y = seal_four(c->number, row, at + 4);
    return make_uint4(x.x, x.y, y.x, y.y);
}

/* y += projections of rows r (thread's g) and r8 (g + 8). */
template <int QB, int NT>
__device__ inline void project_rows(const struct coder<QB, NT> *s, uint32_t r, uint32_t r8,
                                    float (*y)[4])
{
    const uint8_t *row = seal_row(s->c, s->c->job->to, s->lane, s->half, r);
    const uint8_t *row8 = seal_row(s->c, s->c->job->to, s->lane, s->half, r8);
    uint4 lo[QB], hi[QB];
#pragma unroll
    for (int q = 0; q < QB; q++) {
        lo[q] = load_eight(s->c, row, q * 32 + 8 * s->t);
        hi[q] = load_eight(s->c, row8, q * 32 + 8 * s->t);
    }
#pragma unroll
    for (int q = 0; q < QB; q++) {
        uint32_t a[4] = {lo[q].x, hi[q].x, lo[q].y, hi[q].y};
        uint32_t b[4] = {lo[q].z, hi[q].z, lo[q].w, hi[q].w};
#pragma unroll
        for (int n = 0; n < NT; n++) {
            mma(y[n], a, s->b[q][0][n]);
            mma(y[n], b, s->b[q][1][n]);
        }
    }
}

/* To nearest; what is smaller than the least, or no number, is the least. */
__device__ inline uint32_t scale_code(float alpha)
{
    const uint32_t shift = 20, least = (127 - CODES_SCALE_EXP) << 3;
    if (!(alpha > 0x1p-20f))
        return 0;
    uint32_t bits = (__float_as_uint(alpha) + (1u << (shift - 1))) >> shift;
    return bits - least < 255 ? bits - least : 255;
}

__device__ inline float sum_four(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* One row's levels (this thread's directions of it) and scale; h: 0 for row g, 1 for g + 8. */
template <int QB, int NT>
__device__ inline uint32_t encode(const struct coder<QB, NT> *s, const float (*y)[4], int h,
                                  uint32_t (*level)[2])
{
    float sum = 0, above = 0, below = 0;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float z = y[n][2 * h + e] * s->inverse[n][e];
            sum = fmaf(z, z, sum);
        }
    float square = sum_four(sum) / (float)s->dirs;
    float to_one = square > 1e-30f ? 1.0f / sqrtf(square) : 0.0f;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float v = y[n][2 * h + e], z = v * s->inverse[n][e];
            level[n][e] =
                (z * to_one > -CODES_STEP) + (uint32_t)(z > 0) + (z * to_one > CODES_STEP);
            float x = ((float)level[n][e] - 1.5f) * CODES_STEP * s->sd[n][e];
            above = fmaf(v, x, above);
            below = fmaf(x, x, below);
        }
    return scale_code(sum_four(above) / sum_four(below));
}

/* Row i of pages p0 .. p0 + 15. */
template <int QB>
__device__ inline void code_keys(const struct coder<QB, 4> *s, uint32_t p0, uint32_t i,
                                 uint8_t *codes)
{
    const uint32_t rows = 1u << s->c->row_shift;
    float y[4][4];
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            y[n][k] = -s->m[n][k];
    project_rows<QB, 4>(s, (p0 + s->g) * rows + i, (p0 + s->g + 8) * rows + i, y);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t p = p0 + s->g + 8 * h;
        uint32_t level[4][2], word[2] = {0, 0}, scale = encode<QB, 4>(s, y, h, level);
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) /* direction 8 n + 2 t + e: codes.h */
                word[n / 2] |= level[n][e]
                               << (8 * (2 * (s->t % 2) + e) + 2 * (2 * (n % 2) + s->t / 2));
#pragma unroll
        for (int x = 0; x < 2; x++) {
            word[x] |= __shfl_xor_sync(~0u, word[x], 1);
            word[x] |= __shfl_xor_sync(~0u, word[x], 2);
        }
        bool coded = p * rows + i >= s->c->job->sink_rows;
        if (s->t < 2)
            *(uint32_t *)(codes + codes_k_byte(p, i, s->t * CODES_LANES, rows)) =
                coded ? (s->t == 0 ? word[0] : word[1]) : 0;
        else if (s->t == 2)
            codes[codes_k_scale(p, i, rows)] = (uint8_t)(coded ? scale : 0);
    }
}

/* Rows 16 v .. + 15 of those of pages p0 .. p0 + 15. */
template <int QB>
__device__ inline void code_values(const struct coder<QB, 2> *s, uint32_t p0, uint32_t v,
                                   uint8_t *codes)
{
    const uint32_t shift = s->c->row_shift, first = (p0 << shift) + 16 * v;
    float y[2][4];
    uint32_t word[2][2] = {{0}};
#pragma unroll
    for (int h = 0; h < 2; h++) { /* of which page are rows 8 h + g? */
        uint32_t p = (16 * v + 8 * h) >> shift, owner = p % 8 * 4 + s->t;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float low = __shfl_sync(~0u, s->m[n][e], owner);
                float high = __shfl_sync(~0u, s->m[n][2 + e], owner);
                y[n][2 * h + e] = -(p < 8 ? low : high);
            }
    }
    project_rows<QB, 2>(s, first + s->g, first + s->g + 8, y);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t r = first + s->g + 8 * h;
        uint32_t level[2][2], scale = encode<QB, 2>(s, y, h, level);
        bool coded = r >= s->c->job->sink_rows;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                word[n][e] |= coded ? level[n][e] << (8 * (r % 4) + codes_shift(r)) : 0;
        if (s->t == 0)
            codes[codes_v_scales() + r] = (uint8_t)(coded ? scale : 0);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            for (int x = 4; x < 32; x *= 2)
                word[n][e] |= __shfl_xor_sync(~0u, word[n][e], x);
            if (s->g == 0)
                *(uint32_t *)(codes + codes_v_byte(first, n * 8 + 2 * s->t + e)) = word[n][e];
        }
}

/* One CTA per lane and half, 8 times 16 rows per warp. Bound by HBM and L2: reads every row once. QB:
 * blocks of 32 channels. Op: seal. */
template <int QB>
__global__ void __launch_bounds__(ROW_WARPS * 32)
    codes_kernel(const __grid_constant__ struct seal_call c)
{
    const uint32_t lane = blockIdx.x, half = blockIdx.y, warp = threadIdx.x / 32;
    const uint32_t tiles = c.desc.parts / CODES_PAGES; /* 8, 4 or 2: 64 / R */
    const uint32_t p0 = warp % tiles * CODES_PAGES, first = warp / tiles * 8;
    if (c.lanes[lane].class_ != LANE_SPARSE)
        return;
    const uint8_t *record = seal_record(&c, lane, c.job->record);
    uint8_t *codes = (uint8_t *)record + c.layout.codes;
    const uint8_t *basis = seal_record(&c, lane, c.job->first_record) + c.layout.codes;
    const struct kept_means means = {&c, record, half};
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (half == 0) {
        struct coder<QB, 4> s = {
            &c, lane, 0, g, t
        };
        load_directions<QB, 4>(&s, basis + codes_k_basis(c.desc.values));
        project_means<QB, 4>(&s, &means, p0);
        for (uint32_t i = first; i < first + 8; i++)
            code_keys<QB>(&s, p0, i, codes);
    } else {
        struct coder<QB, 2> s = {
            &c, lane, 1, g, t
        };
        load_directions<QB, 2>(&s, basis + codes_v_basis(c.dim));
        project_means<QB, 2>(&s, &means, p0);
        for (uint32_t v = first; v < first + 8; v++)
            code_values<QB>(&s, p0, v, codes);
    }
}

size_t basis_bytes(uint32_t dim)
{
    size_t cov = dim <= BASIS_SHARED_DIM ? (size_t)dim * dim : 0;
    return (2 * (size_t)CODES_K * dim + CODES_K + cov) * sizeof(float);
}

} /* namespace */

bool seal_codes_in_shared(uint32_t dim)
{
    return dim <= BASIS_SHARED_DIM;
}

status seal_codes_open(struct cuda_backend *b)
{
    const void *kernels[] = {(const void *)basis_kernel<1>, (const void *)basis_kernel<2>,
                             (const void *)basis_kernel<4>};
    for (const void *k : kernels)
        if (!cuda_ok(b,
                     cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)basis_bytes(BASIS_SHARED_DIM)),
                     "seal: shared memory"))
            return err(b->error, "%s", b->text);
    return OK;
}

void seal_codes(struct cuda_backend *b, const struct seal_call *c)
{
    const dim3 grid(c->n_lanes, c->desc.values ? 2 : 1);
    const size_t bytes = basis_bytes(c->dim);
    if (c->first_segment && c->dim <= 64)
        basis_kernel<1><<<grid, BASIS_THREADS, bytes, b->stream>>>(*c);
    else if (c->first_segment && c->dim <= 128)
        basis_kernel<2><<<grid, BASIS_THREADS, bytes, b->stream>>>(*c);
    else if (c->first_segment)
        basis_kernel<4><<<grid, BASIS_THREADS, bytes, b->stream>>>(*c);
    if (c->dim <= 64)
        codes_kernel<2><<<grid, ROW_WARPS * 32, 0, b->stream>>>(*c);
    else if (c->dim <= 128)
        codes_kernel<4><<<grid, ROW_WARPS * 32, 0, b->stream>>>(*c);
    else
        codes_kernel<8><<<grid, ROW_WARPS * 32, 0, b->stream>>>(*c);
    cuda_launched(b, "seal: codes");
}
