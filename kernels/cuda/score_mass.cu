/* SCORE_MASS: the mass of a partition from its centroid and outlier rows, or its centroid and the codes
 * of its rows (core/codes.h).
 *
 * Products of vectors are exact (score_dots.h): scores differ from the CPU's by the last bits of an offset and
 * a logarithm.
 *
 * Bound by HBM: 1 byte per channel and vector, 9 bytes per row of codes, each read once; 4 bytes per
 * score and head are written. A warp works alone: it copies pieces of 32 partitions (5 KiB at head_dim 128)
 * into its own ring, one ahead, and no barrier waits for its neighbours. */
#include "kernels/cuda/plan.h"
#include "kernels/cuda/score_dots.h"

#include <string.h>

namespace
{

enum {
    STAGES = 2,
    TILES = 2, /* of a piece */
    CODE_ROW = CODES_ROW_BYTES + CODES_PAGES
};

#define MAGIC      0x4b400000 /* 1.5 * 2^23: a sum of whole numbers on top of it is a float as it is */
#define MAGIC_F    12582912.0f
#define CODES_MOST 60.0f /* greatest logit of a row above its centroid's, base 2, as on the CPU */

__device__ inline float ln_fast(float x)
{
    float y;
    asm("lg2.approx.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y * 0.69314718056f;
}

__device__ inline float log_add(float a, float b)
{
    float most = fmaxf(a, b), least = fminf(a, b);
    return most + ln_fast(1.0f + exp2_fast((least - most) * 1.44269504f));
}

/* ---- codes ---- */

/* Queries of the heads of a chunk against the codes of a sequence (kernels/cpu/codes.h). */
struct code_queries {
    uint32_t k[2 * SCORE_HEADS][CODES_K / 4]; /* int8 */
    int32_t start[2 * SCORE_HEADS];
    float factor[2 * SCORE_HEADS], limit[2 * SCORE_HEADS];
};

/* A warp makes the query of one head: sd and directions, from segment 0's record, lie in shared memory.
 * Lane 4i + j sums channels i, i + 8, ... of directions 8j .. 8j + 7. */
template <int DP>
__device__ void code_query(struct code_queries *out, uint32_t head, const float *q, uint32_t dim,
                           const uint8_t *basis, float scale)
{
    const uint32_t lane = threadIdx.x % 32, first = lane % 4 * 8;
    const float *sd = (const float *)basis + first;
    const uint8_t *e = basis + CODES_K * sizeof(float) + first * 2;
    float g[8] = {0, 0, 0, 0, 0, 0, 0, 0}, top = 0, x[DP / 8];
#pragma unroll
    for (int i = 0; i < DP / 8; i++)
        x[i] = lane / 4 + i * 8 < dim ? q[lane / 4 + i * 8] : 0;
    copies_wait<STAGES - 1>(); /* of the basis */
    __syncthreads();
#pragma unroll
    for (int i = 0; i < DP / 8; i++) {
        uint32_t c = lane / 4 + i * 8;
        if (c >= dim)
            continue;
        uint4 v = *(const uint4 *)(e + c * CODES_K * 2);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            g[2 * k] = fmaf(__uint_as_float(words[k] << 16), x[i], g[2 * k]);
            g[2 * k + 1] = fmaf(__uint_as_float(words[k] & 0xffff0000u), x[i], g[2 * k + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int k = 4; k <= 16; k *= 2)
            g[i] += __shfl_xor_sync(~0u, g[i], k);
        g[i] = g[i] * sd[i] * (scale * 1.44269504f * CODES_STEP);
        top = fmaxf(top, fabsf(g[i]));
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    float inverse = top > 1e-30f ? __fdividef(127.0f, top) : 0.0f;
    int32_t sum = 0, most = 0;
    uint32_t word[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int32_t x = __float2int_rn(fminf(fmaxf(g[i] * inverse, -127.0f), 127.0f));
        sum += x;
        most += abs(x);
        word[i / 4] |= ((uint32_t)x & 0xff) << i % 4 * 8;
    }
#pragma unroll
    for (int k = 1; k <= 2; k *= 2) {
        sum += __shfl_xor_sync(~0u, sum, k);
        most += __shfl_xor_sync(~0u, most, k);
    }
    if (lane < 4) {
        out->k[head][first / 4] = word[0];
        out->k[head][first / 4 + 1] = word[1];
    }
    if (lane == 0) {
        float factor = top > 1e-30f ? top / 127.0f : 0.0f;
        out->start[head] = -3 * sum / 2;
        out->factor[head] = factor;
        out->limit[head] =
            fminf(0x1p12f, CODES_MOST / (1.5f * factor * (float)(most + 1) + 1e-30f));
    }
}

/* By all threads: queries of the heads [h0, h0 + n) of the group; those behind the group are zero, as is
 * what a head without a number is. */
template <int DP>
__device__ void code_queries_of(struct code_queries *out, const struct score_call *c,
                                const struct score_place *p, uint32_t h0, uint32_t n,
                                const uint8_t *basis)
{
    for (uint32_t h = threadIdx.x / 32; h < n; h += SCORE_WARPS) {
        uint32_t of = min(h0 + h, c->group - 1); /* all warps come to its barrier */
        float scale = h0 + h < c->group ? c->scale : 0;
        code_query<DP>(out, h, score_query(c, p, of), c->dim, basis, scale);
    }
    __syncthreads();
}

/* sd and directions into shared memory. */
__device__ inline void copy_basis(const struct score_call *c, const struct score_place *p,
                                  uint8_t *to)
{
    const uint8_t *from = p->base + p->records[0] * c->record_bytes + c->basis;
    const uint32_t n = (CODES_K * sizeof(float) + c->dim * CODES_K * 2) / 16;
    for (uint32_t i = threadIdx.x; i < n; i += SCORE_THREADS)
        copy_16(shared_address(to) + i * 16, from + i * 16, true);
    copies_end_group();
}

/* What a lane needs of them: head t's, and operands that put it into an even or an odd column. */
struct code_operand {
    uint32_t even[2], odd[2];
    int32_t start;
    float factor, limit;
};

__device__ void load_operand(struct code_operand *o, const struct code_queries *q, uint32_t h0)
{
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        uint32_t word = q->k[h0 + g / 2][k * 4 + t];
        o->even[k] = g % 2 ? 0 : word;
        o->odd[k] = g % 2 ? word : 0;
    }
    o->start = q->start[h0 + t];
    o->factor = q->factor[h0 + t];
    o->limit =
        fminf(fminf(q->limit[h0], q->limit[h0 + 1]), fminf(q->limit[h0 + 2], q->limit[h0 + 3]));
}

__device__ inline float alpha_of(uint32_t scales, int i)
{
    return __uint_as_float(((scales >> i * 8 & 0xff) << 20) + ((127 - CODES_SCALE_EXP) << 23));
}

__device__ inline uint4 levels_of(const uint8_t *p, uint32_t shift)
{
    uint4 v = *(const uint4 *)p;
    v.x = v.x >> shift & 0x03030303;
    v.y = v.y >> shift & 0x03030303;
    v.z = v.z >> shift & 0x03030303;
    v.w = v.w >> shift & 0x03030303;
    return v;
}

/* Adds e^r of all rows of 32 pages, as tile_dots has them: two rows at a time, one in the even columns
 * and one in the odd ones. */
template <int NT>
__device__ void row_masses(const uint8_t *tiles, uint32_t rows, const struct code_operand o[NT],
                           float sum[NT][4])
{
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, shift = lane % 4 * 2;
    const uint8_t *tile = tiles + g / 4 * (rows * CODE_ROW) + g % 4 * 16;
    const uint8_t *scales = tiles + g / 4 * (rows * CODE_ROW) + rows * CODES_ROW_BYTES + g % 4 * 4;
#pragma unroll 2
    for (uint32_t i = 0; i < rows; i += 2, tile += 2 * CODES_ROW_BYTES, scales += 2 * CODES_PAGES) {
        uint4 a0 = levels_of(tile, shift), a1 = levels_of(tile + CODES_VECTOR, shift);
        uint4 b0 = levels_of(tile + CODES_ROW_BYTES, shift);
        uint4 b1 = levels_of(tile + CODES_ROW_BYTES + CODES_VECTOR, shift);
        uint32_t of_a = *(const uint32_t *)scales;
        uint32_t of_b = *(const uint32_t *)(scales + CODES_PAGES);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            int32_t x[2][4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                x[0][k] = x[1][k] = MAGIC + o[n].start;
            multiply_bytes(x[0], a0.x, a0.y, a1.x, a1.y, o[n].even);
            multiply_bytes(x[1], a0.z, a0.w, a1.z, a1.w, o[n].even);
            multiply_bytes(x[0], b0.x, b0.y, b1.x, b1.y, o[n].odd);
            multiply_bytes(x[1], b0.z, b0.w, b1.z, b1.w, o[n].odd);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float fa = fminf(alpha_of(of_a, k), o[n].limit) * o[n].factor;
                float fb = fminf(alpha_of(of_b, k), o[n].limit) * o[n].factor;
                float xa = __int_as_float(x[k / 2][k % 2 * 2]) - MAGIC_F;
                float xb = __int_as_float(x[k / 2][k % 2 * 2 + 1]) - MAGIC_F;
                sum[n][k] += exp2_fast(xa * fa) + exp2_fast(xb * fb);
            }
        }
    }
}

/* ---- pieces ---- */

/* A warp's piece i, and what is copied of it. */
struct piece {
    uint32_t segment, first, tiles; /* first tile of the segment, tiles that exist */
    const uint8_t *lane;            /* the lane's part of the record */
};

__device__ inline struct piece piece_of(const struct score_call *c, const struct score_place *p,
                                        uint32_t number, uint32_t record)
{
    struct piece x;
    x.segment = number / c->pieces;
    x.first = number % c->pieces * c->tiles;
    x.tiles = min(c->tiles, digest_tiles(c->parts) - x.first);
    x.lane = p->base + record * c->record_bytes;
    return x;
}

/* Base and step of a kind, then the tiles. */
template <int DP, bool WHOLE>
__device__ void copy_vectors(const struct score_call *c, const struct piece *x, uint32_t kind,
                             uint32_t to)
{
    const uint32_t lane = threadIdx.x % 32, dim = WHOLE ? DP : c->dim, head = dim * 8;
    const uint8_t *from = x->lane + c->vectors + kind * c->vector_bytes;
    for (uint32_t i = lane; i < dim / 2; i += 32)
        copy_16(to + i * 16, from + i * 16, true);
    from += digest_round(head) + (size_t)x->first * dim * DIGEST_TILE;
    to += head;
    if (WHOLE) {
#pragma unroll 4
        for (uint32_t i = lane; i < x->tiles * DP; i += 32)
            copy_16(to + swizzled(i) * 16, from + i * 16, true);
    } else {
        for (uint32_t i = lane; i < x->tiles * dim; i += 32) {
            uint32_t tile = i / dim;
            copy_16(to + (tile * dim + swizzled(i % dim)) * 16, from + i * 16, true);
        }
    }
}

__device__ inline void copy_codes(const struct score_call *c, const struct piece *x, uint32_t to)
{
    const uint32_t bytes = c->part_rows * CODE_ROW;
    const uint8_t *from = x->lane + c->codes + (size_t)x->first * bytes;
#pragma unroll 4
    for (uint32_t i = threadIdx.x % 32; i < x->tiles * bytes / 16; i += 32)
        copy_16(to + i * 16, from + i * 16, true);
}

/* ln of the rows that the centroids of 4 partitions stand for. */
__device__ inline void add_rows(const struct score_call *c, const struct piece *x, uint32_t p,
                                float out[4])
{
    const uint16_t *first = (const uint16_t *)(x->lane + c->first_row);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        float n = c->log_rows;
        if (c->part_rows == 0) {
            uint32_t at = min(p + i, c->parts - 1);
            n = logf((float)(first[at + 1] - first[at])); /* of 0: no score */
        }
        out[i] += n;
    }
}

__device__ inline bool piece_is_open(const struct score_call *c, uint32_t lane,
                                     const struct piece *x)
{
    uint32_t first = x->segment * c->parts + x->first * DIGEST_TILE;
    uint32_t end = min(first + x->tiles * DIGEST_TILE, (x->segment + 1) * c->parts);
    const uint8_t *open = c->open + (size_t)lane * c->open_stride;
    bool any = false;
    for (uint32_t i = first / c->open_group + threadIdx.x % 32; i * c->open_group < end; i += 32)
        any = any || open[i] != 0;
    return __any_sync(~0u, any);
}

/* A vector's part of the logits of a piece: x = or log_add. */
template <int DP, bool WHOLE, int NT>
__device__ inline void score_vectors(const struct score_call *c, const struct piece *of,
                                     const uint8_t *stage, const half_query<DP> q[NT],
                                     bool centroid, bool counted, float x[NT][4])
{
    const uint32_t g = threadIdx.x % 32 / 4, dim = WHOLE ? DP : c->dim;
#pragma unroll
    for (int i = 0; i < NT; i++) {
        uint32_t b[DP / 32][2];
        float factor, offset, dot[4];
        fold_query<DP, WHOLE>(q[i], (const float *)stage, dim, c->scale, b, &factor, &offset);
        tile_dots<DP, WHOLE>(shared_address(stage) + dim * 8, dim, b, dot);
#pragma unroll
        for (int k = 0; k < 4; k++)
            dot[k] = fmaf(dot[k], factor, offset);
        if (centroid && counted)
            add_rows(c, of, (of->first + g / 4) * DIGEST_TILE + g % 4 * 4, dot);
#pragma unroll
        for (int k = 0; k < 4; k++)
            x[i][k] = centroid ? dot[k] : log_add(x[i][k], dot[k]);
    }
}

/* One warp: `depth` pieces of a lane, each fourth from its first on; NT * 4 heads of the group. Rows and
 * records are read while the kernel before this one still runs: the former are staged, and seal, which
 * writes the latter, lets no kernel start before it ends. Op: score. */
template <int DP, bool WHOLE, int NT, bool CODES>
__global__ void __launch_bounds__(SCORE_THREADS, NT == 1 && DP <= 128 ? 4 : 3)
    mass_kernel(const __grid_constant__ struct score_call c)
{
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ struct code_queries queries;
    const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, dim = WHOLE ? DP : c.dim;
    allow_next_kernel();
    struct score_place at = score_place_of(&c, SCORE_WARPS * c.depth);
    if (at.none) {
        wait_for_kernel_before(); /* whoever waits for this kernel relies on that one too */
        return;
    }
    const uint32_t first = at.stretch * SCORE_WARPS * c.depth + threadIdx.x / 32;
    const uint32_t end = min(at.n_segments * c.pieces, (at.stretch + 1) * SCORE_WARPS * c.depth);
    const uint32_t n = first < end ? (end - first + SCORE_WARPS - 1) / SCORE_WARPS : 0;
    const uint32_t record = lane < n ? at.records[(first + lane * SCORE_WARPS) / c.pieces] : 0;
    const uint32_t per = c.kinds + CODES, total = n * per;
    uint8_t *own = ring + threadIdx.x / 32 * (STAGES * c.stage_bytes);
    uint8_t *basis = ring + SCORE_WARPS * STAGES * c.stage_bytes;
    if (c.open != NULL)
        wait_for_kernel_before(); /* which chose what is open */

    auto piece = [&](uint32_t k) {
        uint32_t i = k / per;
        return piece_of(&c, &at, first + i * SCORE_WARPS, __shfl_sync(~0u, record, i));
    };
    auto copy = [&](uint32_t k) {
        if (k < total) {
            struct piece x = piece(k);
            uint32_t to = shared_address(own + k % STAGES * c.stage_bytes);
            if (c.open != NULL && !piece_is_open(&c, at.lane, &x))
                ; /* its scores are -inf whatever lies there */
            else if (CODES && k % per == c.kinds)
                copy_codes(&c, &x, to);
            else
                copy_vectors<DP, WHOLE>(&c, &x, k % per, to);
        }
        copies_end_group();
    };

    if (CODES)
        copy_basis(&c, &at, basis);
    for (int k = 0; k < STAGES - 1; k++)
        copy(k);
    wait_for_kernel_before();
    const uint32_t h0 = at.chunk * NT * SCORE_HEADS;
    half_query<DP> q[NT];
    struct code_operand codes[NT];
#pragma unroll
    for (int i = 0; i < NT; i++) {
        uint32_t h = h0 + i * SCORE_HEADS + g / 2;
        load_query<DP, WHOLE>(&q[i], score_query(&c, &at, h), h < c.group, dim);
    }
    if (CODES) {
        code_queries_of<DP>(&queries, &c, &at, h0, NT * SCORE_HEADS, basis);
#pragma unroll
        for (int i = 0; i < NT; i++)
            load_operand(&codes[i], &queries, i * SCORE_HEADS);
    }
    float x[NT][4];
    for (uint32_t k = 0; k < total; k++) {
        copy(k + STAGES - 1);
        copies_wait<STAGES - 1>();
        __syncwarp();
        const uint8_t *stage = own + k % STAGES * c.stage_bytes;
        const uint32_t kind = k % per;
        struct piece of = piece(k);
        if (CODES && kind == c.kinds) {
            float sum[NT][4] = {};
            row_masses<NT>(stage, c.part_rows, codes, sum);
#pragma unroll
            for (int i = 0; i < NT * 4; i++)
                x[i / 4][i % 4] += ln_fast(sum[i / 4][i % 4]);
        } else {
            score_vectors<DP, WHOLE, NT>(&c, &of, stage, q, kind == 0, !CODES, x);
        }
        uint32_t p = (of.first + g / 4) * DIGEST_TILE + g % 4 * 4;
        if (kind + 1 == per && g / 4 < of.tiles && p < c.parts)
#pragma unroll
            for (int i = 0; i < NT; i++)
                if (h0 + i * SCORE_HEADS + t < c.group)
                    score_put(&c, at.lane, h0 + i * SCORE_HEADS + t, of.segment, p, x[i]);
        __syncwarp(); /* before the next copy overwrites this stage */
    }
}

typedef void mass_fn(struct score_call);

/* [head_dim][two n-tiles][codes] */
mass_fn *const kernels[3][2][2] = {
    {{mass_kernel<64, true, 1, false>, mass_kernel<64, true, 1, true>},
     {mass_kernel<64, true, 2, false>, mass_kernel<64, true, 2, true>}},
    {{mass_kernel<128, true, 1, false>, mass_kernel<128, true, 1, true>},
     {mass_kernel<128, true, 2, false>, mass_kernel<128, true, 2, true>}},
    {{mass_kernel<256, false, 1, false>, mass_kernel<256, false, 1, true>}, {NULL, NULL}}};

mass_fn *kernel_of(const struct score_call *c)
{
    uint32_t dim = c->dim == 64 ? 0 : c->dim == 128 ? 1 : 2;
    return kernels[dim][dim < 2 && c->group > SCORE_HEADS][c->codes != 0];
}

struct mass_command {
    struct score_call c;
    uint32_t grid, basis_bytes;
};

void run_mass(struct cuda_backend *b, const void *params)
{
    const struct mass_command *m = (const struct mass_command *)params;
    size_t shared = (size_t)SCORE_WARPS * STAGES * m->c.stage_bytes + m->basis_bytes;
    score_launch(b, kernel_of(&m->c), &m->c, m->grid, SCORE_THREADS, shared, "score");
}

} /* namespace */

status cuda_score_mass_open(struct cuda_backend *b)
{
    int most = 0;
    cuda_ok(b, cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, b->device),
            "shared memory");
    for (uint32_t i = 0; i < 12; i++) {
        mass_fn *kernel = kernels[i / 4][i / 2 % 2][i % 2];
        if (kernel != NULL)
            cuda_ok(b,
                    cudaFuncSetAttribute((const void *)kernel,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, most - 1024),
                    "shared memory of score");
    }
    return b->error == OK ? OK : err(b->error, "%s", b->text);
}

void cuda_score_mass(struct cuda_backend *b, const struct score_call *from, uint32_t lanes)
{
    struct mass_command m;
    memset(&m, 0, sizeof m);
    m.c = *from;
    struct score_call *c = &m.c;
    bool wide = (c->dim == 128 || c->dim == 64) && c->group > SCORE_HEADS;
    uint32_t tiles = digest_tiles(c->parts), heads = wide ? 2u * SCORE_HEADS : 1u * SCORE_HEADS;
    c->tiles = tiles < TILES ? tiles : (uint32_t)TILES;
    c->pieces = (tiles + c->tiles - 1) / c->tiles;
    c->chunks = (c->group + heads - 1) / heads;
    /* An odd tile has a neighbour that is computed, but not used. */
    size_t vectors = c->dim * 8 + (size_t)TILES * c->dim * DIGEST_TILE, codes = 0;
    if (c->codes != 0) {
        codes = (size_t)TILES * c->part_rows * CODE_ROW;
        m.basis_bytes = CODES_K * sizeof(float) + c->dim * CODES_K * 2;
    }
    c->stage_bytes = (uint32_t)digest_round(vectors > codes ? vectors : codes);
    score_cut(c, lanes, (uint32_t)b->sms * (wide ? 3 : 4));
    m.grid = lanes * c->chunks * c->stretches;
    cuda_do(b, run_mass, &m, sizeof m);
}

const struct score_call *cuda_score_queued(struct cuda_backend *b, const float *scores)
{
    const struct mass_command *m = (const struct mass_command *)cuda_queued(b, run_mass);
    return m != NULL && m->c.out == scores ? &m->c : NULL;
}
