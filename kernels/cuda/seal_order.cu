/* Orders of a segment's rows, for every shape and every device: one CTA per lane, which reads rows from
 * their pages again and again. What seal_bisect.cu can take it does several times faster; the
 * definitions are kernels/cpu/seal_order_vec.h's.
 *
 * Rows are centred on the segment's mean as they are read. */
#include "kernels/cuda/seal.h"

namespace
{

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    PAIRS = SEAL_MAX_DIM / 64, /* pairs of channels of a lane of a warp */
};

struct lane_rows {
    const struct seal_call *c;
    uint32_t lane, first; /* rows behind the sinks */
    const float *mean;    /* [dim] shared */
};

/* This thread's channels of row `position` minus the mean: pair v is channels 2 (lane + 32 v). */
__device__ inline void read_row(const struct lane_rows *s, uint32_t position, float *x)
{
    const uint8_t *row = seal_row(s->c, s->c->job->from, s->lane, 0, position);
    for (int v = 0; v < PAIRS; v++) {
        uint32_t i = threadIdx.x % 32 + 32 * v;
        x[2 * v] = x[2 * v + 1] = 0;
        if (2 * i < s->c->dim) {
            uint32_t w = seal_two(s->c->number, row, 2 * i);
            x[2 * v] = seal_low(w) - s->mean[2 * i];
            x[2 * v + 1] = seal_high(w) - s->mean[2 * i + 1];
        }
    }
}

/* This thread's channels of a vector in shared memory. */
__device__ inline void read_vector(const float *from, uint32_t dim, float *x)
{
    for (int v = 0; v < PAIRS; v++) {
        uint32_t i = 2 * (threadIdx.x % 32 + 32 * v);
        x[2 * v] = i < dim ? from[i] : 0;
        x[2 * v + 1] = i < dim ? from[i + 1] : 0;
    }
}

__device__ inline float dot(const float *x, const float *y)
{
    float sum = 0;
    for (int i = 0; i < 2 * PAIRS; i++)
        sum = fmaf(x[i], y[i], sum);
    return seal_warp_sum(sum);
}

/* Sums over the warps of what each has for its rows; all threads. part: [WARPS][SEAL_MAX_DIM] */
__device__ void sum_warps(const float *acc, uint32_t dim, float *part, float *out)
{
    float *mine = part + threadIdx.x / 32 * SEAL_MAX_DIM;
    for (int v = 0; v < PAIRS; v++) {
        uint32_t i = 2 * (threadIdx.x % 32 + 32 * v);
        mine[i] = acc[2 * v];
        mine[i + 1] = acc[2 * v + 1];
    }
    __syncthreads();
    for (uint32_t c = threadIdx.x; c < dim; c += THREADS) {
        float sum = 0;
        for (int w = 0; w < WARPS; w++)
            sum += part[w * SEAL_MAX_DIM + c];
        out[c] = sum;
    }
    __syncthreads();
}

/* mean = that of the rows behind the sinks. Until then it is 0. */
__device__ void find_mean(const struct lane_rows *s, float *mean, float *part)
{
    float x[2 * PAIRS], acc[2 * PAIRS] = {0};
    uint32_t dim = s->c->dim;
    for (uint32_t c = threadIdx.x; c < dim; c += THREADS)
        mean[c] = 0;
    __syncthreads();
    for (uint32_t i = s->first + threadIdx.x / 32; i < SEGMENT_ROWS; i += WARPS) {
        read_row(s, i, x);
        for (int v = 0; v < 2 * PAIRS; v++)
            acc[v] += x[v];
    }
    sum_warps(acc, dim, part, mean);
    for (uint32_t c = threadIdx.x; c < dim; c += THREADS)
        mean[c] *= 1.0f / (float)(SEGMENT_ROWS - s->first);
    __syncthreads();
}

/* ---- bisection ---- */

struct bisect_shared {
    float inverse[SEGMENT_ROWS];   /* of a row's length, by position */
    int keys[SEGMENT_ROWS];        /* projections of the node's rows, sortable */
    uint16_t row[2][SEGMENT_ROWS]; /* positions in the order of storage */
    float mean[SEAL_MAX_DIM], total[SEAL_MAX_DIM], a[SEAL_MAX_DIM], b[SEAL_MAX_DIM];
    float axis[SEAL_MAX_DIM], sums[SEAL_MAX_DIM];
    float part[WARPS * SEAL_MAX_DIM];
    uint32_t counts[WARPS];
    unsigned long long best[WARPS];
};

struct node {
    struct lane_rows rows;
    struct bisect_shared *s;
    const uint16_t *row; /* [n] */
    uint32_t n;
};

/* keys = projections on a vector in shared memory. */
__device__ void project(const struct node *k, const float *on)
{
    float y[2 * PAIRS], x[2 * PAIRS];
    read_vector(on, k->rows.c->dim, y);
    for (uint32_t i = threadIdx.x / 32; i < k->n; i += WARPS) {
        read_row(&k->rows, k->row[i], x);
        float d = dot(x, y) * k->s->inverse[k->row[i]];
        if (threadIdx.x % 32 == 0)
            k->s->keys[i] = seal_sortable(d);
    }
    __syncthreads();
}

/* out = sum of the rows whose key is above the threshold (all: of all); returns how many. */
__device__ uint32_t sum_above(const struct node *k, bool all, float threshold, float *out)
{
    float x[2 * PAIRS], acc[2 * PAIRS] = {0};
    uint32_t count = 0;
    for (uint32_t i = threadIdx.x / 32; i < k->n; i += WARPS) {
        if (!all && !(seal_unsortable(k->s->keys[i]) > threshold))
            continue;
        read_row(&k->rows, k->row[i], x);
        for (int v = 0; v < 2 * PAIRS; v++)
            acc[v] = fmaf(x[v], k->s->inverse[k->row[i]], acc[v]);
        count++;
    }
    if (threadIdx.x % 32 == 0)
        k->s->counts[threadIdx.x / 32] = count;
    sum_warps(acc, k->rows.c->dim, k->s->part, out);
    count = 0;
    for (int w = 0; w < WARPS; w++)
        count += k->s->counts[w];
    __syncthreads();
    return count;
}

/* out = the row of least key, ties to the first. */
__device__ void take_least(const struct node *k, float *out)
{
    unsigned long long best = ~0ull;
    float x[2 * PAIRS];
    for (uint32_t i = threadIdx.x; i < k->n; i += THREADS) {
        unsigned long long key =
            (unsigned long long)((uint32_t)k->s->keys[i] ^ 0x80000000u) << 32 | i;
        best = key < best ? key : best;
    }
    for (int i = 16; i > 0; i /= 2) {
        unsigned long long other = __shfl_xor_sync(~0u, best, i);
        best = other < best ? other : best;
    }
    if (threadIdx.x % 32 == 0)
        k->s->best[threadIdx.x / 32] = best;
    __syncthreads();
    for (int w = 0; w < WARPS; w++)
        best = k->s->best[w] < best ? k->s->best[w] : best;
    uint32_t at = k->row[(uint32_t)best];
    if (threadIdx.x < 32) {
        read_row(&k->rows, at, x);
        for (int v = 0; v < PAIRS; v++)
            for (int j = 0; j < 2; j++)
                if (uint32_t i = 2 * (threadIdx.x + 32 * v) + j; i < k->rows.c->dim)
                    out[i] = x[2 * v + j] * k->s->inverse[at];
    }
    __syncthreads();
}

/* keys = projections on the axis of the node's split. */
__device__ void find_axis(const struct node *k)
{
    struct bisect_shared *s = k->s;
    const uint32_t dim = k->rows.c->dim;
    float x[2 * PAIRS], y[2 * PAIRS];
    sum_above(k, true, 0, s->total);
    project(k, s->total);
    take_least(k, s->a);
    project(k, s->a);
    take_least(k, s->b);
    for (int round = 0; round <= SEAL_ROUNDS; round++) {
        read_vector(s->a, dim, x);
        read_vector(s->b, dim, y);
        float threshold = 0.5f * (dot(x, x) - dot(y, y));
        for (uint32_t c = threadIdx.x; c < dim; c += THREADS)
            s->axis[c] = s->a[c] - s->b[c];
        __syncthreads();
        project(k, s->axis);
        if (round == SEAL_ROUNDS)
            return;
        uint32_t n_a = sum_above(k, false, threshold, s->sums);
        if (n_a == 0 || n_a == k->n)
            return; /* nothing would change any more */
        for (uint32_t c = threadIdx.x; c < dim; c += THREADS) {
            s->a[c] = s->sums[c] * (1.0f / (float)n_a);
            s->b[c] = (s->total[c] - s->sums[c]) * (1.0f / (float)(k->n - n_a));
        }
        __syncthreads();
    }
}

/* The n_left-th smallest key, by halves. */
__device__ int border_key(const struct node *k, uint32_t n_left)
{
    long long low = -2147483647ll - 1, high = 2147483647ll;
    while (low < high) {
        long long mid = low + (high - low) / 2;
        uint32_t below = 0;
        for (uint32_t i = 0; i < k->n; i += THREADS)
            below += (uint32_t)__syncthreads_count(i + threadIdx.x < k->n &&
                                                   k->s->keys[i + threadIdx.x] <= (int)mid);
        if (below >= n_left)
            high = mid;
        else
            low = mid + 1;
    }
    return (int)low;
}

/* Moves the n_left rows of least key before the others, each side in its old order: one warp. */
__device__ void part_rows(const struct node *k, uint32_t n_left, uint16_t *to)
{
    int border = border_key(k, n_left);
    const uint32_t me = threadIdx.x % 32, before = (1u << me) - 1;
    if (threadIdx.x >= 32)
        return;
    uint32_t left = 0, right = n_left, below = 0;
    for (uint32_t i = me; i < k->n; i += 32)
        below += k->s->keys[i] < border;
    uint32_t ties = n_left - __reduce_add_sync(~0u, below); /* that go left, the first ones */
    for (uint32_t i = 0; i < k->n; i += 32) {
        bool valid = i + me < k->n;
        int key = valid ? k->s->keys[i + me] : 0;
        uint32_t equal = __ballot_sync(~0u, valid && key == border);
        bool goes_left =
            valid && (key < border || (key == border && (uint32_t)__popc(equal & before) < ties));
        uint32_t lefts = __ballot_sync(~0u, goes_left), all = __ballot_sync(~0u, valid);
        uint32_t target =
            goes_left ? left + __popc(lefts & before) : right + __popc(all & ~lefts & before);
        if (valid)
            to[target] = k->row[i + me];
        left += __popc(lefts);
        right += __popc(all & ~lefts);
        uint32_t n_equal = (uint32_t)__popc(equal);
        ties -= n_equal < ties ? n_equal : ties;
    }
}

/* One CTA per lane. Bound by the latency of its passes: a node of the tree after the other, twelve passes
 * each. Op: seal. */
__global__ void __launch_bounds__(THREADS) bisect_kernel(const __grid_constant__ struct seal_call c)
{
    extern __shared__ uint4 shared[];
    struct bisect_shared *s = (struct bisect_shared *)shared;
    const uint32_t lane = blockIdx.x, first = c.job->sink_rows;
    if (c.lanes[lane].class_ != LANE_SPARSE)
        return;
    struct node k = {{&c, lane, first, s->mean}, s, NULL, 0};
    float x[2 * PAIRS];
    for (uint32_t i = threadIdx.x; i < SEGMENT_ROWS; i += THREADS)
        s->row[0][i] = s->row[1][i] = (uint16_t)i;
    find_mean(&k.rows, s->mean, s->part);
    for (uint32_t i = first + threadIdx.x / 32; i < SEGMENT_ROWS; i += WARPS) {
        read_row(&k.rows, i, x);
        float square = dot(x, x);
        if (threadIdx.x % 32 == 0)
            s->inverse[i] = square > 1e-30f ? 1.0f / sqrtf(square) : 0.0f;
    }
    __syncthreads();
    uint32_t at = 0; /* which of the two orders is new */
    for (uint32_t size = SEGMENT_ROWS; size > 1u << c.row_shift; size /= 2, at ^= 1)
        for (uint32_t begin = 0; begin < SEGMENT_ROWS; begin += size) {
            uint32_t low = begin > first ? begin : first, middle = begin + size / 2;
            uint32_t end = begin + size;
            if (low >= middle) { /* all of it is in the right half: the next level cuts it */
                for (uint32_t i = begin + threadIdx.x; i < end; i += THREADS)
                    s->row[at ^ 1][i] = s->row[at][i];
                continue;
            }
            for (uint32_t i = begin + threadIdx.x; i < low; i += THREADS)
                s->row[at ^ 1][i] = s->row[at][i];
            k.row = s->row[at] + low;
            k.n = end - low;
            find_axis(&k);
            part_rows(&k, middle - low, s->row[at ^ 1] + low);
            __syncthreads();
        }
    __syncthreads();
    uint16_t *order = (uint16_t *)seal_record(&c, lane, c.job->record);
    for (uint32_t i = threadIdx.x; i < SEGMENT_ROWS; i += THREADS)
        order[i] = s->row[at][i];
}

/* ---- k-means ---- */

enum { TILE = 64, TILE_STRIDE = TILE + 4 };

struct kmeans_shared {
    float rows[TILE * TILE_STRIDE], centroids[TILE * TILE_STRIDE]; /* 64 channels of 64 of them */
    float mean[SEAL_MAX_DIM], part[WARPS * SEAL_MAX_DIM];
    uint16_t cluster[SEGMENT_ROWS];
    uint16_t first_row[SEGMENT_ROWS + 1];
};

struct kmeans {
    struct lane_rows rows;
    struct kmeans_shared *s;
    float *centroids; /* [parts][dim], scratch in memory */
};

/* 64 channels from c0 on of rows or centroids [i0, + 64); zeros beyond them. */
__device__ void load_tiles(const struct kmeans *k, uint32_t i0, uint32_t p0, uint32_t c0)
{
    const uint32_t dim = k->rows.c->dim, parts = k->rows.c->desc.parts;
    for (uint32_t i = threadIdx.x; i < TILE * TILE / 2; i += THREADS) {
        uint32_t r = i / (TILE / 2), c = i % (TILE / 2) * 2;
        float *x = k->s->rows + r * TILE_STRIDE + c, *y = k->s->centroids + r * TILE_STRIDE + c;
        x[0] = x[1] = y[0] = y[1] = 0;
        if (c0 + c >= dim)
            continue;
        if (i0 + r < SEGMENT_ROWS) {
            const uint8_t *row = seal_row(k->rows.c, k->rows.c->job->from, k->rows.lane, 0, i0 + r);
            uint32_t w = seal_two(k->rows.c->number, row, c0 + c);
            x[0] = seal_low(w) - k->s->mean[c0 + c];
            x[1] = seal_high(w) - k->s->mean[c0 + c + 1];
        }
        if (p0 + r < parts) {
            y[0] = k->centroids[(size_t)(p0 + r) * dim + c0 + c];
            y[1] = k->centroids[(size_t)(p0 + r) * dim + c0 + c + 1];
        }
    }
    __syncthreads();
}

/* Products of this thread's 4 rows and 4 centroids over the channels in shared memory. */
__device__ inline void multiply_tiles(const struct kmeans_shared *s, uint32_t y, uint32_t x,
                                      float (*acc)[4])
{
    for (int c = 0; c < TILE; c += 4) {
        float4 a[4], b[4];
        for (int i = 0; i < 4; i++) {
            a[i] = *(const float4 *)&s->rows[(y + 16 * i) * TILE_STRIDE + c];
            b[i] = *(const float4 *)&s->centroids[(x + 16 * i) * TILE_STRIDE + c];
        }
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++)
                acc[i][j] = fmaf(
                    a[i].w, b[j].w,
                    fmaf(a[i].z, b[j].z, fmaf(a[i].y, b[j].y, fmaf(a[i].x, b[j].x, acc[i][j]))));
    }
    __syncthreads();
}

/* Every row to the cluster of greatest dot product, ties to the first. */
__device__ void assign(const struct kmeans *k)
{
    const uint32_t x = threadIdx.x % 16, y = threadIdx.x / 16, dim = k->rows.c->dim;
    const uint32_t parts = k->rows.c->desc.parts;
    for (uint32_t i0 = k->rows.first; i0 < SEGMENT_ROWS; i0 += TILE) {
        float best[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
        uint32_t at[4] = {0};
        for (uint32_t p0 = 0; p0 < parts; p0 += TILE) {
            float acc[4][4] = {{0}};
            for (uint32_t c0 = 0; c0 < dim; c0 += TILE) {
                load_tiles(k, i0, p0, c0);
                multiply_tiles(k->s, y, x, acc);
            }
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    if (uint32_t p = p0 + x + 16 * j; p < parts && acc[i][j] > best[i]) {
                        best[i] = acc[i][j];
                        at[i] = p;
                    }
        }
        for (int i = 0; i < 4; i++) {
            for (int m = 8; m > 0; m /= 2) {
                float other = __shfl_xor_sync(~0u, best[i], m);
                uint32_t where = __shfl_xor_sync(~0u, at[i], m);
                if (other > best[i] || (other == best[i] && where < at[i])) {
                    best[i] = other;
                    at[i] = where;
                }
            }
            if (x == 0 && i0 + y + 16 * i < SEGMENT_ROWS)
                k->s->cluster[i0 + y + 16 * i] = (uint16_t)at[i];
        }
    }
    __syncthreads();
}

/* Centroids of unit length; an empty cluster, or one whose rows cancel out, keeps its own. One warp per
 * cluster, rows in the order of positions. */
__device__ void update(const struct kmeans *k)
{
    const uint32_t me = threadIdx.x % 32, dim = k->rows.c->dim;
    for (uint32_t p = threadIdx.x / 32; p < k->rows.c->desc.parts; p += WARPS) {
        float x[2 * PAIRS], sum[2 * PAIRS] = {0};
        uint32_t count = 0;
        for (uint32_t i = 0; i < SEGMENT_ROWS; i += 32) {
            uint32_t mine =
                __ballot_sync(~0u, i + me >= k->rows.first && k->s->cluster[i + me] == p);
            for (count += __popc(mine); mine != 0; mine &= mine - 1) {
                read_row(&k->rows, i + __ffs((int)mine) - 1, x);
                for (int v = 0; v < 2 * PAIRS; v++)
                    sum[v] += x[v];
            }
        }
        float square = dot(sum, sum), scale = 1.0f / sqrtf(square);
        for (int v = 0; v < PAIRS && count > 0 && square > 1e-30f; v++)
            if (uint32_t c = 2 * (me + 32 * v); c < dim) {
                k->centroids[(size_t)p * dim + c] = sum[2 * v] * scale;
                k->centroids[(size_t)p * dim + c + 1] = sum[2 * v + 1] * scale;
            }
    }
    __syncthreads();
}

/* Centroids begin as rows at even distances. */
__device__ void seed(const struct kmeans *k)
{
    const uint32_t me = threadIdx.x % 32, dim = k->rows.c->dim, parts = k->rows.c->desc.parts;
    const uint32_t n = SEGMENT_ROWS - k->rows.first;
    for (uint32_t p = threadIdx.x / 32; p < parts; p += WARPS) {
        float x[2 * PAIRS];
        read_row(&k->rows,
                 k->rows.first + (uint32_t)((2 * (uint64_t)p + 1) * n / (2 * (uint64_t)parts)), x);
        for (int v = 0; v < PAIRS; v++)
            if (uint32_t c = 2 * (me + 32 * v); c < dim) {
                k->centroids[(size_t)p * dim + c] = x[2 * v];
                k->centroids[(size_t)p * dim + c + 1] = x[2 * v + 1];
            }
    }
    __syncthreads();
}

/* Rows cluster by cluster; inside one they keep the order of positions. */
__device__ void store_order(const struct kmeans *k, uint16_t *order, uint16_t *first_row)
{
    const uint32_t me = threadIdx.x % 32, parts = k->rows.c->desc.parts, first = k->rows.first;
    uint16_t *at = k->s->first_row;
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t p = threadIdx.x / 32; p < parts; p += WARPS) {
            uint32_t to = pass == 1 ? at[p] : 0;
            for (uint32_t i = 0; i < SEGMENT_ROWS; i += 32) {
                bool is = i + me >= first && k->s->cluster[i + me] == p;
                uint32_t mine = __ballot_sync(~0u, is);
                if (is && pass == 1)
                    order[to + __popc(mine & ((1u << me) - 1))] = (uint16_t)(i + me);
                to += __popc(mine);
            }
            if (pass == 0 && me == 0)
                at[p] = (uint16_t)to;
        }
        __syncthreads();
        if (pass == 0 && threadIdx.x == 0) {
            uint32_t sum = first;
            for (uint32_t p = 0; p < parts; p++) {
                uint32_t n = at[p];
                at[p] = (uint16_t)sum;
                sum += n;
            }
            at[parts] = (uint16_t)sum;
        }
        __syncthreads();
    }
    for (uint32_t i = threadIdx.x; i < first; i += THREADS)
        order[i] = (uint16_t)i;
    for (uint32_t p = threadIdx.x; p <= parts; p += THREADS)
        first_row[p] = at[p];
}

/* One CTA per lane. Bound by multiplications, two loads from shared memory per 8 of them: ten times rows x
 * parts x head_dim. Op: seal. */
__global__ void __launch_bounds__(THREADS) kmeans_kernel(const __grid_constant__ struct seal_call c)
{
    extern __shared__ uint4 shared[];
    struct kmeans_shared *s = (struct kmeans_shared *)shared;
    const uint32_t lane = blockIdx.x;
    if (c.lanes[lane].class_ != LANE_SPARSE)
        return;
    struct kmeans k = {
        {&c, lane, c.job->sink_rows, s->mean}, s, c.vectors + (size_t)lane * c.desc.parts * c.dim};
    find_mean(&k.rows, s->mean, s->part);
    seed(&k);
    for (int i = 1; i < SEAL_KMEANS_ITERATIONS; i++) {
        assign(&k);
        update(&k);
    }
    assign(&k);
    uint8_t *record = seal_record(&c, lane, c.job->record);
    store_order(&k, (uint16_t *)record, (uint16_t *)(record + c.layout.first_row));
}

} /* namespace */

void seal_order(struct cuda_backend *b, const struct seal_call *c)
{
    if (c->desc.order == ORDER_KMEANS)
        kmeans_kernel<<<c->n_lanes, THREADS, sizeof(struct kmeans_shared), b->stream>>>(*c);
    else
        bisect_kernel<<<c->n_lanes, THREADS, sizeof(struct bisect_shared), b->stream>>>(*c);
    cuda_launched(b, "seal: order");
}
