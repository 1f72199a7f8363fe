/* Digests of a sealed segment, from its rows in the order of storage (kernels/core/digest.h has the
 * layout). Means are sums in the order of rows and exact divisions, as on the CPU.
 *
 * A lane's K and V are a CTA each. K is read twice where there are outliers; the second time it lies in
 * L1 or L2. Where move has left the means no rows are read. Vectors are rounded once the least and greatest of
 * each channel over the segment are known: until then centroids wait in scratch. */
#include "kernels/cuda/seal.h"

namespace
{

enum {
    THREADS = 512,
    WARPS = THREADS / 32,  /* one per partition of a tile */
    COARSE = DIGEST_KINDS, /* behind the kinds */
    SETS = DIGEST_KINDS + 1,
};
static_assert((int)WARPS == (int)DIGEST_TILE, "a warp per partition of a tile");

struct digest_shared {
    int low[SETS][SEAL_MAX_DIM], high[SETS][SEAL_MAX_DIM]; /* sortable */
    int any[SETS];
    /* A tile on its way out, padded: [dim / 4][16] words of vectors + 1, or [dim / 2][32] of bounds + 1 */
    uint32_t tile[SEAL_MAX_DIM / 2 * 33];
};

struct lane_digest {
    const struct seal_call *c;
    struct digest_shared *s;
    uint32_t lane;
    uint8_t *record;
};

/* A thread's channels: 4 (lane of the warp) + 128 v. */
template <int NV> struct channels {
    float x[NV * 4];
};

template <int NV, int NUMBER>
__device__ inline struct channels<NV> load_row(const struct lane_digest *d, uint32_t half,
                                               uint32_t r) {
    struct channels<NV> out;
    const uint8_t *row = seal_row(d->c, d->c->job->to, d->lane, half, r);
#pragma unroll
    for (int v = 0; v < NV; v++) {
        uint32_t at = 4 * (threadIdx.x % 32) + 128 * v;
        uint2 w = at < d->c->dim ? seal_four(NUMBER, row, at) : make_uint2(0, 0);
        out.x[4 * v] = seal_low(w.x);
        out.x[4 * v + 1] = seal_high(w.x);
        out.x[4 * v + 2] = seal_low(w.y);
        out.x[4 * v + 3] = seal_high(w.y);
    }
    return out;
}

template <int NV>
__device__ inline struct channels<NV> load_floats(const struct lane_digest *d, const float *from) {
    struct channels<NV> out;
#pragma unroll
    for (int v = 0; v < NV; v++) {
        uint32_t at = 4 * (threadIdx.x % 32) + 128 * v;
        float4 f = at < d->c->dim ? *(const float4 *)(from + at) : make_float4(0, 0, 0, 0);
        out.x[4 * v] = f.x;
        out.x[4 * v + 1] = f.y;
        out.x[4 * v + 2] = f.z;
        out.x[4 * v + 3] = f.w;
    }
    return out;
}

template <int NV>
__device__ inline void store_floats(const struct lane_digest *d, float *to,
                                    const struct channels<NV> &x)
{
#pragma unroll
    for (int v = 0; v < NV; v++)
        if (uint32_t at = 4 * (threadIdx.x % 32) + 128 * v; at < d->c->dim)
            *(float4 *)(to + at) =
                make_float4(x.x[4 * v], x.x[4 * v + 1], x.x[4 * v + 2], x.x[4 * v + 3]);
}

/* Partitions that lie in the sinks' pages, or have no rows, have no digest. */
__device__ inline bool has_digest(const struct lane_digest *d, uint32_t p, uint32_t *first,
                                  uint32_t *n)
{
    *n = digest_rows(d->record, &d->c->desc, p, first);
    return *n > 0 && *first + *n > d->c->job->sink_rows;
}

/* Mean of rows [first, + n) but the `n_skip` (at most 2) in skip. */
template <int NV, int NUMBER>
__device__ inline struct channels<NV> rows_mean(const struct lane_digest *d, uint32_t half,
                                                uint32_t first, uint32_t n, uint32_t skip0,
                                                uint32_t skip1, uint32_t n_skip) {
    struct channels<NV> sum = {
        {
            0
        }
    };
#pragma unroll 8
    for (uint32_t i = 0; i < n; i++) {
        struct channels<NV> x = load_row<NV, NUMBER>(d, half, first + i);
        bool skips = (n_skip > 0 && i == skip0) || (n_skip > 1 && i == skip1);
#pragma unroll
        for (int v = 0; v < NV * 4; v++)
            sum.x[v] = skips ? sum.x[v] : sum.x[v] + x.x[v];
    }
#pragma unroll
    for (int v = 0; v < NV * 4; v++)
        sum.x[v] = __fdiv_rn(sum.x[v], (float)(n - n_skip));
    return sum;
}

/* The two rows farthest from a mean, farthest first, ties to the first. */
template <int NV, int NUMBER>
__device__ inline void farthest(const struct lane_digest *d, uint32_t first, uint32_t n,
                                const struct channels<NV> &mean, bool two, uint32_t *far)
{
    float best[2] = {-1.0f, -1.0f};
    far[0] = 0;
    far[1] = 1;
#pragma unroll 8
    for (uint32_t i = 0; i < n; i++) {
        struct channels<NV> x = load_row<NV, NUMBER>(d, 0, first + i);
        float square = 0;
#pragma unroll
        for (int v = 0; v < NV * 4; v++) {
            uint32_t at = 4 * (threadIdx.x % 32) + 128 * (v / 4);
            float off = at < d->c->dim ? x.x[v] - mean.x[v] : 0;
            square = fmaf(off, off, square);
        }
        square = seal_warp_sum(square);
        if (square > best[0]) {
            best[1] = best[0];
            far[1] = far[0];
            best[0] = square;
            far[0] = i;
        } else if (two && square > best[1]) {
            best[1] = square;
            far[1] = i;
        }
    }
    if (far[1] == far[0]) /* all at least as close as nothing: NaN keys */
        far[1] = far[0] == 0;
}

/* ---- least and greatest of a set of vectors ---- */

template <int NV> struct range {
    struct channels<NV> low, high;
    bool any;
};

template <int NV> __device__ inline void clear(struct range<NV> *r)
{
    for (int v = 0; v < NV * 4; v++) {
        r->low.x[v] = 3e38f;
        r->high.x[v] = -3e38f;
    }
    r->any = false;
}

template <int NV> __device__ inline void widen(struct range<NV> *r, const struct channels<NV> &x)
{
#pragma unroll
    for (int v = 0; v < NV * 4; v++) {
        r->low.x[v] = fminf(r->low.x[v], x.x[v]);
        r->high.x[v] = fmaxf(r->high.x[v], x.x[v]);
    }
    r->any = true;
}

template <int NV>
__device__ inline void publish(const struct lane_digest *d, const struct range<NV> *r, uint32_t set)
{
    if (!r->any)
        return;
    for (int v = 0; v < NV * 4; v++)
        if (uint32_t at = 4 * (threadIdx.x % 32) + 128 * (v / 4) + v % 4; at < d->c->dim) {
            atomicMin(&d->s->low[set][at], seal_sortable(r->low.x[v]));
            atomicMax(&d->s->high[set][at], seal_sortable(r->high.x[v]));
        }
    d->s->any[set] = 1;
}

/* ---- centroids ---- */

__device__ inline float *centroid_of(const struct lane_digest *d, uint32_t p)
{
    return d->c->vectors + ((size_t)d->lane * d->c->desc.parts + p) * d->c->dim;
}
__device__ inline float *mean_value_of(const struct lane_digest *d, uint32_t p)
{
    return d->c->mean_values + ((size_t)d->lane * d->c->desc.parts + p) * d->c->dim;
}
__device__ inline float *coarse_of(const struct lane_digest *d, uint32_t g)
{
    return d->c->coarse + ((size_t)d->lane * (d->c->desc.parts / DIGEST_COARSE) + g) * d->c->dim;
}
__device__ inline uint32_t *far_of(const struct lane_digest *d, uint32_t p)
{
    return d->c->far + (size_t)d->lane * d->c->desc.parts + p;
}

/* Centroids and outliers of all partitions: to scratch, and their ranges to shared memory. */
template <int NV, int NUMBER> __device__ void find_centroids(const struct lane_digest *d)
{
    const uint32_t outliers = d->c->desc.outliers;
    struct range<NV> ranges[DIGEST_KINDS];
    for (int k = 0; k < DIGEST_KINDS; k++)
        clear(&ranges[k]);
    for (uint32_t p = threadIdx.x / 32; p < d->c->desc.parts; p += WARPS) {
        uint32_t first, n, far[2];
        if (!has_digest(d, p, &first, &n))
            continue;
        if (d->c->means) {
            widen(&ranges[0], load_floats<NV>(d, centroid_of(d, p)));
            continue;
        }
        struct channels<NV> mean = rows_mean<NV, NUMBER>(d, 0, first, n, 0, 0, 0);
        if (outliers > 0) {
            farthest<NV, NUMBER>(d, first, n, mean, outliers > 1, far);
            mean = rows_mean<NV, NUMBER>(d, 0, first, n, far[0], far[1], outliers);
            widen(&ranges[1], load_row<NV, NUMBER>(d, 0, first + far[0]));
            if (outliers > 1)
                widen(&ranges[2], load_row<NV, NUMBER>(d, 0, first + far[1]));
            if (threadIdx.x % 32 == 0)
                *far_of(d, p) = far[0] | far[1] << 16;
        }
        widen(&ranges[0], mean);
        store_floats(d, centroid_of(d, p), mean);
    }
    for (int k = 0; k < DIGEST_KINDS; k++)
        publish(d, &ranges[k], k);
}

/* Means of DIGEST_COARSE neighbours. */
template <int NV> __device__ void find_coarse(const struct lane_digest *d)
{
    struct range<NV> range;
    clear(&range);
    for (uint32_t g = threadIdx.x / 32; g < d->c->desc.parts / DIGEST_COARSE; g += WARPS) {
        struct channels<NV> sum = {
            {
                0
            }
        };
        uint32_t count = 0, first, n;
        for (uint32_t p = g * DIGEST_COARSE; p < (g + 1) * DIGEST_COARSE; p++) {
            if (!has_digest(d, p, &first, &n))
                continue;
            struct channels<NV> x = load_floats<NV>(d, centroid_of(d, p));
            for (int v = 0; v < NV * 4; v++)
                sum.x[v] += x.x[v];
            count++;
        }
        for (int v = 0; v < NV * 4; v++)
            sum.x[v] *= count > 0 ? 1.0f / (float)count : 0.0f;
        if (count > 0)
            widen(&range, sum);
        store_floats(d, coarse_of(d, g), sum);
    }
    publish(d, &range, COARSE);
}

/* Of a set, vector p; false: it has none. */
template <int NV, int NUMBER>
__device__ inline bool load_vector(const struct lane_digest *d, uint32_t set, uint32_t p,
                                   struct channels<NV> *out)
{
    uint32_t first, n;
    if (set == COARSE) {
        bool has = false;
        for (uint32_t i = 0; i < DIGEST_COARSE; i++)
            has |= has_digest(d, p * DIGEST_COARSE + i, &first, &n);
        *out = load_floats<NV>(d, coarse_of(d, p));
        return has;
    }
    if (!has_digest(d, p, &first, &n))
        return false;
    *out = set == 0
               ? load_floats<NV>(d, centroid_of(d, p))
               : load_row<NV, NUMBER>(d, 0, first + (*far_of(d, p) >> 16 * (set - 1) & 0xffff));
    return true;
}

/* Rounds a set to 8 bits between the least and the greatest of each channel. */
template <int NV, int NUMBER>
__device__ void write_vectors(const struct lane_digest *d, uint32_t set, uint32_t parts,
                              struct digest_vectors out)
{
    const uint32_t dim = d->c->dim, warp = threadIdx.x / 32;
    const bool any = d->s->any[set];
    float low[NV * 4], inverse[NV * 4];
    for (int v = 0; v < NV * 4; v++) {
        uint32_t at = 4 * (threadIdx.x % 32) + 128 * (v / 4) + v % 4;
        low[v] = inverse[v] = 0;
        if (at >= dim)
            continue;
        low[v] = any ? seal_unsortable(d->s->low[set][at]) : 0;
        float step = any ? __fmul_rn(seal_unsortable(d->s->high[set][at]) - low[v], 1.0f / 255) : 0;
        inverse[v] = step > 1e-30f ? 1.0f / step : 0.0f;
        if (warp == 0) {
            out.base[at] = low[v];
            out.step[at] = step;
        }
    }
    for (uint32_t t = 0; t < digest_tiles(parts); t++) {
        uint32_t p = t * DIGEST_TILE + warp;
        struct channels<NV> x;
        bool has = p < parts && load_vector<NV, NUMBER>(d, set, p, &x);
        for (int v = 0; v < NV; v++) {
            uint32_t at = 4 * (threadIdx.x % 32) + 128 * v, four = 0;
            for (int j = 0; j < 4 && has; j++) {
                float y = __fmul_rn(x.x[4 * v + j] - low[4 * v + j], inverse[4 * v + j]);
                four |= (uint32_t)__float2int_rn(fminf(fmaxf(y, 0.0f), 255.0f)) << 8 * j;
            }
            if (at < dim)
                d->s->tile[at / 4 * 17 + warp] = four;
        }
        __syncthreads();
        uint32_t *to = (uint32_t *)(out.tiles + (size_t)t * DIGEST_TILE * dim);
        for (uint32_t i = threadIdx.x; i < dim / 4 * 16; i += THREADS)
            to[i] = d->s->tile[i / 16 * 17 + i % 16];
        __syncthreads();
    }
}

template <int NV, int NUMBER> __device__ void digest_centroids(const struct lane_digest *d)
{
    const struct digest_layout *l = &d->c->layout;
    for (uint32_t i = threadIdx.x; i < SETS * SEAL_MAX_DIM; i += THREADS) {
        d->s->low[0][i] = seal_sortable(3e38f);
        d->s->high[0][i] = seal_sortable(-3e38f);
    }
    if (threadIdx.x < SETS)
        d->s->any[threadIdx.x] = 0;
    __syncthreads();
    find_centroids<NV, NUMBER>(d);
    __syncthreads();
    if (l->coarse != 0)
        find_coarse<NV>(d);
    __syncthreads();
    for (uint32_t k = 0; k < l->kinds; k++)
        write_vectors<NV, NUMBER>(d, k, l->parts, digest_vectors_of(d->record, l, k));
    if (l->coarse != 0)
        write_vectors<NV, NUMBER>(d, COARSE, l->parts / DIGEST_COARSE,
                                  digest_vectors_at(d->record + l->coarse, l->dim));
}

/* ---- bounds ---- */

/* Two floats that are bf16, as bits. */
__device__ inline uint32_t pack(float a, float b)
{
    return __float_as_uint(a) >> 16 | (__float_as_uint(b) & 0xffff0000u);
}

template <int NV, int NUMBER> __device__ void digest_minmax(const struct lane_digest *d)
{
    const struct digest_layout *l = &d->c->layout;
    const uint32_t dim = l->dim, warp = threadIdx.x / 32;
    float most[NV * 4] = {0};
    for (uint32_t i = threadIdx.x; i < dim; i += THREADS)
        d->s->high[0][i] = 0; /* bits of a float that is not negative: whole numbers of its order */
    for (uint32_t t = 0; t < digest_tiles(l->parts); t++) {
        uint32_t p = t * DIGEST_TILE + warp, first, n;
        struct channels<NV> low = {{0}}, high = {
            {
                0
            }
        };
        if (p < l->parts && has_digest(d, p, &first, &n)) {
            low = high = load_row<NV, NUMBER>(d, 0, first);
#pragma unroll 8
            for (uint32_t i = 1; i < n; i++) {
                struct channels<NV> x = load_row<NV, NUMBER>(d, 0, first + i);
                for (int v = 0; v < NV * 4; v++) { /* a NaN that came first stays */
                    low.x[v] = x.x[v] < low.x[v] ? x.x[v] : low.x[v];
                    high.x[v] = x.x[v] > high.x[v] ? x.x[v] : high.x[v];
                }
            }
            for (int v = 0; v < NV * 4; v++) {
                float a = fabsf(low.x[v]), b = fabsf(high.x[v]), both = a > b ? a : b;
                most[v] = both > most[v] ? both : most[v];
            }
        }
        for (int v = 0; v < NV * 4; v += 2) {
            uint32_t pair = (4 * (threadIdx.x % 32) + 128 * (v / 4) + v % 4) / 2;
            if (2 * pair >= dim)
                continue;
            d->s->tile[pair * 33 + warp] = pack(low.x[v], low.x[v + 1]);
            d->s->tile[pair * 33 + 16 + warp] = pack(high.x[v], high.x[v + 1]);
        }
        __syncthreads();
        uint32_t *to =
            (uint32_t *)(digest_bounds(d->record, l) + digest_bound(dim, t * DIGEST_TILE, 0));
        for (uint32_t i = threadIdx.x; i < dim / 2 * 32; i += THREADS)
            to[i] = d->s->tile[i / 32 * 33 + i % 32];
        __syncthreads();
    }
    for (int v = 0; v < NV * 4; v++)
        if (uint32_t at = 4 * (threadIdx.x % 32) + 128 * (v / 4) + v % 4; at < dim)
            atomicMax(&d->s->high[0][at], __float_as_int(most[v]));
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < dim; i += THREADS)
        digest_magnitude(d->record, l)[i] = __int_as_float(d->s->high[0][i]);
}

/* ---- mean values ---- */

template <int NV, int NUMBER> __device__ void digest_values(const struct lane_digest *d)
{
    const struct digest_layout *l = &d->c->layout;
    float *scales = (float *)(d->record + l->scales);
    for (uint32_t p = threadIdx.x / 32; p < l->parts; p += WARPS) {
        uint32_t *row = (uint32_t *)(d->record + l->values + (size_t)p * l->dim), first, n;
        bool has = has_digest(d, p, &first, &n);
        struct channels<NV> mean = {
            {
                0
            }
        };
        float top = 0;
        if (has && d->c->means)
            mean = load_floats<NV>(d, mean_value_of(d, p));
        else if (has)
            mean = rows_mean<NV, NUMBER>(d, 1, first, n, 0, 0, 0);
        for (int v = 0; v < NV * 4; v++)
            if (4 * (threadIdx.x % 32) + 128 * (v / 4) < l->dim)
                top = fmaxf(top, fabsf(mean.x[v]));
        for (int i = 16; i > 0; i /= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        float scale = __fdiv_rn(top, 127.0f), inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
        for (int v = 0; v < NV; v++) {
            uint32_t at = 4 * (threadIdx.x % 32) + 128 * v, four = 0;
            for (int j = 0; j < 4 && has; j++) {
                float y = fminf(fmaxf(__fmul_rn(mean.x[4 * v + j], inverse), -127.0f), 127.0f);
                four |= ((uint32_t)__float2int_rn(y) & 0xff) << 8 * j;
            }
            if (at < l->dim)
                row[at / 4] = four;
        }
        if (threadIdx.x % 32 == 0)
            scales[p] = has ? scale : 0;
    }
}

/* One CTA per lane and half, a warp per partition, threads along head_dim. Bound by HBM and L2: reads
 * every row once or twice. NV: 128s of channels; NUMBER: c.number, since both ways to load a row at once
 * would not fit the registers. Op: seal. */
template <int NV, int NUMBER>
__global__ void __launch_bounds__(THREADS) digest_kernel(const __grid_constant__ struct seal_call c)
{
    __shared__ struct digest_shared s;
    struct lane_digest d = {&c, &s, blockIdx.x, NULL};
    if (c.lanes[d.lane].class_ != LANE_SPARSE)
        return;
    d.record = seal_record(&c, d.lane, c.job->record);
    if (blockIdx.y == 1 && c.desc.values)
        digest_values<NV, NUMBER>(&d);
    else if (blockIdx.y == 0 && c.desc.kind == DIGEST_BOUNDS)
        digest_minmax<NV, NUMBER>(&d);
    else if (blockIdx.y == 0 && c.desc.kind != DIGEST_NONE)
        digest_centroids<NV, NUMBER>(&d);
}

template <int NUMBER> void launch(struct cuda_backend *b, const struct seal_call *c)
{
    dim3 grid(c->n_lanes, c->desc.values ? 2 : 1);
    if (c->dim <= 128)
        digest_kernel<1, NUMBER><<<grid, THREADS, 0, b->stream>>>(*c);
    else
        digest_kernel<2, NUMBER><<<grid, THREADS, 0, b->stream>>>(*c);
    cuda_launched(b, "seal: digest");
}

} /* namespace */

void seal_digest(struct cuda_backend *b, const struct seal_call *c)
{
    if (c->number == 1)
        launch<1>(b, c);
    else
        launch<2>(b, c);
}
