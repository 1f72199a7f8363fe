/* Orders of a segment's rows, once for every instruction set (vec16.h).
 *
 * ORDER_BISECT: rows, centred on the segment's mean and of unit length, are split in two again and
 * again. The axis of a split comes from two far rows and SEAL_ROUNDS rounds of 2-means; rows are
 * sorted along it (ties: the earlier position) and cut at the multiple of R that keeps sub-trees
 * aligned, so that neighbouring pages are neighbours in space at every level. Depth first: all but
 * the upper three levels run in L1.
 *
 * ORDER_KMEANS: spherical k-means of RetroInfer (wave-index.md 1.3), inside the segment. */
#include "kernels/cpu/seal.h"
#include "kernels/cpu/vec16.h"

enum { CHUNK = 4 }; /* vectors of a row that are summed at a time */

/* Scratch of one lane. Rows are [..][stride]. */
struct order_state {
    uint32_t dim, stride, rows; /* head_dim, padded; R */
    float *x[2];                /* [SEGMENT_ROWS][stride]: rows move from one to the other */
    uint16_t *position[2];      /* [SEGMENT_ROWS] */
    uint16_t *target;           /* [SEGMENT_ROWS]: where rows of the node go */
    float *dots, *weight;       /* [SEGMENT_ROWS + V16] of the node's rows, from 0 */
    float *mean, *a, *b, *axis; /* [stride] */
    float *sums;                /* [stride] */
    uint16_t *order;            /* out: storage row -> position */
};

/* out[i] = x[i] . y; n is padded to 16 with zeros. */
static void rows_dot(const float *x, uint32_t n, const float *y, uint32_t stride, float *out)
{
    uint32_t i = 0;
    for (; i + V16 <= n; i += V16, x += (size_t)V16 * stride) {
        v16f acc[V16];
        V16_UNROLL for (uint32_t r = 0; r < V16; r++) acc[r] =
            v16_mul(v16_load(x + (size_t)r * stride), v16_load(y));
        for (uint32_t j = V16; j < stride; j += V16) {
            v16f v = v16_load(y + j);
            V16_UNROLL for (uint32_t r = 0; r < V16; r++) acc[r] =
                v16_fma(v16_load(x + (size_t)r * stride + j), v, acc[r]);
        }
        v16_store(out + i, v16_hsums(acc));
    }
    if (i == n)
        return;
    v16f acc[V16];
    for (uint32_t r = 0; r < V16; r++) {
        acc[r] = v16_zero();
        for (uint32_t j = 0; j < stride && i + r < n; j += V16)
            acc[r] = v16_fma(v16_load(x + (size_t)r * stride + j), v16_load(y + j), acc[r]);
    }
    v16_store(out + i, v16_hsums(acc));
}

/* One chunk of vectors from column c on: sums = sum of the rows by their weight. Even and odd rows
 * are summed apart: two chains hide the latency of one. */
V16_FN void chunk_sum(const float *x, uint32_t n, const float *weight, uint32_t stride, uint32_t c,
                      const uint32_t nv, float *sums)
{
    v16f even[CHUNK], odd[CHUNK];
    V16_UNROLL for (uint32_t v = 0; v < nv; v++) even[v] = odd[v] = v16_zero();
    x += c;
    for (uint32_t i = 0; i + 1 < n;
         i += 2, x += 2 * (size_t)stride) { /* n: a multiple of R, even */
        v16f p = v16_set1(weight[i]), q = v16_set1(weight[i + 1]);
        V16_UNROLL for (uint32_t v = 0; v < nv; v++)
        {
            even[v] = v16_fma(v16_load(x + (size_t)v * V16), p, even[v]);
            odd[v] = v16_fma(v16_load(x + stride + (size_t)v * V16), q, odd[v]);
        }
    }
    V16_UNROLL for (uint32_t v = 0; v < nv; v++)
        v16_store(sums + c + (size_t)v * V16, v16_add(even[v], odd[v]));
}

/* sums = sum of the rows whose dot product is above the threshold; returns how many. weight: [n + 16] */
static uint32_t rows_above(const float *x, uint32_t n, const float *dots, float threshold,
                           uint32_t stride, float *weight, float *sums)
{
    uint32_t count = 0, c = 0;
    for (uint32_t i = 0; i < n; i += V16) {
        v16_mask m = v16_gt(v16_load(dots + i), v16_set1(threshold)) & v16_first_lanes(n - i);
        v16_store(weight + i, v16_pick(m, v16_set1(1.0f), v16_zero()));
        count += (uint32_t)__builtin_popcount(m);
    }
    for (; c + CHUNK * V16 <= stride; c += CHUNK * V16)
        chunk_sum(x, n, weight, stride, c, CHUNK, sums);
    for (; c < stride; c += V16)
        chunk_sum(x, n, weight, stride, c, 1, sums);
    return count;
}

static float dot(const float *x, const float *y, uint32_t stride)
{
    v16f acc = v16_zero();
    for (uint32_t j = 0; j < stride; j += V16)
        acc = v16_fma(v16_load(x + j), v16_load(y + j), acc);
    return v16_hsum(acc);
}

static void scale_to(float *out, const float *x, float factor, uint32_t stride)
{
    v16f f = v16_set1(factor);
    for (uint32_t j = 0; j < stride; j += V16)
        v16_store(out + j, v16_mul(v16_load(x + j), f));
}

/* out = (total - part) * factor */
static void rest_to(float *out, const float *total, const float *part, float factor,
                    uint32_t stride)
{
    v16f f = v16_set1(factor);
    for (uint32_t j = 0; j < stride; j += V16)
        v16_store(out + j, v16_mul(v16_sub(v16_load(total + j), v16_load(part + j)), f));
}

/* The first of the least of n numbers; x has room for whole vectors. With NaN some row. */
static uint32_t least(const float *x, uint32_t n)
{
    v16f low = v16_set1(INFINITY);
    for (uint32_t i = 0; i < n; i += V16)
        low = v16_min(v16_pick(v16_first_lanes(n - i), v16_load(x + i), low), low);
    low = v16_set1(-v16_hmax(v16_sub(v16_zero(), low)));
    for (uint32_t i = 0; i < n; i += V16) {
        v16_mask m = ~v16_gt(v16_load(x + i), low) & v16_first_lanes(n - i);
        if (m != 0)
            return i + (uint32_t)__builtin_ctz(m);
    }
    return 0;
}

/* ---- bisection ------------------------------------------------------------------------------ */

/* dots = projections of the node's rows on the axis of its split. Rows have unit length, so the row
 * farthest from a point is the one with the least dot product. */
static void project(struct order_state *s, const float *x, uint32_t n)
{
    uint32_t stride = s->stride;
    float *total = s->mean;
    memset(s->dots, 0, n * sizeof *s->dots);
    rows_above(x, n, s->dots, -1.0f, stride, s->weight, total);
    rows_dot(x, n, total, stride, s->dots);
    memcpy(s->a, x + (size_t)least(s->dots, n) * stride, stride * sizeof *s->a);
    rows_dot(x, n, s->a, stride, s->dots);
    memcpy(s->b, x + (size_t)least(s->dots, n) * stride, stride * sizeof *s->b);
    for (int round = 0; round < SEAL_ROUNDS; round++) {
        float threshold = 0.5f * (dot(s->a, s->a, stride) - dot(s->b, s->b, stride));
        rest_to(s->axis, s->a, s->b, 1.0f, stride);
        rows_dot(x, n, s->axis, stride, s->dots);
        uint32_t n_a = rows_above(x, n, s->dots, threshold, stride, s->weight, s->sums);
        if (n_a == 0 || n_a == n)
            break; /* nothing would change any more */
        scale_to(s->a, s->sums, 1.0f / (float)n_a, stride);
        rest_to(s->b, total, s->sums, 1.0f / (float)(n - n_a), stride);
    }
    rest_to(s->axis, s->a, s->b, 1.0f, stride);
    rows_dot(x, n, s->axis, stride, s->dots);
}

/* Numbers as integers of the same order. */
static void sortable(float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += V16) {
        v16i bits = v16_bits(v16_load(x + i));
        v16i flip = v16i_and(v16i_sar(bits, 31), v16i_set1(0x7fffffff));
        v16i_store(x + i, v16i_xor(bits, flip));
    }
}

/* A key that k of n keys are not above, 1 <= k <= n, or if there is none the k-th smallest: by halves,
 * because n is small and compares are cheap. */
static int32_t kth_key(const int32_t *keys, uint32_t n, uint32_t k)
{
    int64_t low = INT32_MIN, high = INT32_MAX; /* the answer is in [low, high] */
    uint32_t last = n % V16 == 0 ? 0xffffu : (1u << n % V16) - 1;
    while (low < high) {
        int32_t mid = (int32_t)(low + (high - low) / 2);
        uint32_t above = 0;
        v16i m = v16i_set1(mid);
        for (uint32_t i = 0; i < n; i += V16) {
            v16_mask gt = v16i_gt(v16i_load(keys + i), m);
            above += (uint32_t)__builtin_popcount(i + V16 < n ? gt : gt & last);
        }
        if (n - above == k)
            return mid;
        if (n - above > k)
            high = mid;
        else
            low = (int64_t)mid + 1;
    }
    return (int32_t)low;
}

/* Moves the n_left rows of least projection before the others, keeping the order of positions. */
static void part_rows(struct order_state *s, uint32_t first, uint32_t n, uint32_t n_left, int from)
{
    sortable(s->dots, n);
    const int32_t *keys = (const int32_t *)(const void *)s->dots;
    int32_t border = kth_key(keys, n, n_left);
    uint32_t at_border = n_left, left = first, right = first + n_left;
    for (uint32_t i = 0; i < n; i++)
        at_border -= keys[i] < border;
    for (uint32_t i = 0; i < n; i++) {
        bool tie = keys[i] == border && at_border > 0, goes_left = (keys[i] < border) | tie;
        at_border -= tie;
        s->target[i] =
            (uint16_t)(goes_left ? left : right); /* no branch: it could not be predicted */
        left += goes_left;
        right += !goes_left;
    }
    for (uint32_t i = 0; i < n; i++)
        s->position[!from][s->target[i]] = s->position[from][first + i];
    if (n <= 2 * s->rows)
        return; /* the children are pages: nobody reads their rows */
    const float *src = s->x[from] + (size_t)first * s->stride;
    for (uint32_t i = 0; i < n; i++, src += s->stride) {
        float *dst = s->x[!from] + (size_t)s->target[i] * s->stride;
        for (uint32_t j = 0; j < s->stride; j += V16)
            v16_store(dst + j, v16_load(src + j));
    }
}

/* Where pages [a, b) are cut: at the multiple of the highest power of two. */
static uint32_t cut(uint32_t a, uint32_t b)
{
    uint32_t bit = 31 - (uint32_t)__builtin_clz(a ^ (b - 1));
    return (b - 1) >> bit << bit;
}

// NOLINTNEXTLINE(misc-no-recursion): at most log2(SEGMENT_ROWS / 8) deep
static void bisect(struct order_state *s, uint32_t first, uint32_t n, int from)
{
    if (n <= s->rows) {
        memcpy(s->order + first, s->position[from] + first, n * sizeof *s->order);
        return;
    }
    uint32_t n_left = cut(first / s->rows, (first + n) / s->rows) * s->rows - first;
    project(s, s->x[from] + (size_t)first * s->stride, n);
    part_rows(s, first, n, n_left, from);
    bisect(s, first, n_left, !from);
    bisect(s, first + n_left, n - n_left, !from);
}

/* x[0] = rows [first, SEGMENT_ROWS) minus their mean; unit: of length 1 (or 0). */
static void centre(struct order_state *s, const uint16_t *keys, uint32_t first, bool unit)
{
    uint32_t stride = s->stride, n = SEGMENT_ROWS - first;
    float *x = s->x[0] + (size_t)first * stride;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < stride; j += V16)
            v16_store(x + (size_t)i * stride + j,
                      v16_load_bf16(keys + (size_t)(first + i) * stride + j));
    memset(s->dots, 0, n * sizeof *s->dots);
    rows_above(x, n, s->dots, -1.0f, stride, s->weight, s->sums);
    scale_to(s->mean, s->sums, 1.0f / (float)n, stride);
    for (uint32_t i = 0; i < n; i++, x += stride) {
        rest_to(x, x, s->mean, 1.0f, stride);
        if (!unit)
            continue;
        float square = dot(x, x, stride);
        scale_to(x, x, square > 1e-30f ? 1.0f / sqrtf(square) : 0.0f, stride);
    }
}

static void order_bisect(struct order_state *s, const uint16_t *keys, uint32_t first)
{
    for (uint32_t i = 0; i < SEGMENT_ROWS; i++)
        s->order[i] = s->position[0][i] = (uint16_t)i;
    centre(s, keys, first, true);
    bisect(s, first, SEGMENT_ROWS - first, 0);
}

/* ---- k-means -------------------------------------------------------------------------------- */

struct kmeans {
    uint32_t parts, padded; /* clusters; rounded up to whole vectors */
    float *centroids;       /* [parts][stride] */
    float *across;          /* [stride][padded]: the same, transposed */
    float *sums;            /* [parts][stride] */
    uint16_t *cluster;      /* [SEGMENT_ROWS] */
    uint32_t *counts;       /* [parts] */
};

/* The cluster of greatest dot product, ties to the first. */
static uint32_t nearest(const struct kmeans *k, const float *row, uint32_t dim)
{
    float best = -INFINITY;
    uint32_t at = 0;
    for (uint32_t c = 0; c < k->padded; c += CHUNK * V16) {
        v16f acc[CHUNK];
        uint32_t nv = (k->padded - c) / V16 < CHUNK ? (k->padded - c) / V16 : CHUNK;
        V16_UNROLL for (uint32_t v = 0; v < CHUNK; v++) acc[v] = v16_zero();
        const float *y = k->across + c;
        if (nv == CHUNK) {
            for (uint32_t i = 0; i < dim; i++, y += k->padded)
                V16_UNROLL for (uint32_t v = 0; v < CHUNK; v++) acc[v] =
                    v16_fma(v16_load(y + (size_t)v * V16), v16_set1(row[i]), acc[v]);
        } else {
            for (uint32_t i = 0; i < dim; i++, y += k->padded)
                for (uint32_t v = 0; v < nv; v++)
                    acc[v] = v16_fma(v16_load(y + (size_t)v * V16), v16_set1(row[i]), acc[v]);
        }
        for (uint32_t v = 0; v < nv; v++) {
            float dots[V16];
            if (v16_gt(acc[v], v16_set1(best)) == 0)
                continue;
            v16_store(dots, acc[v]);
            for (uint32_t i = 0; i < V16 && c + v * V16 + i < k->parts; i++)
                if (dots[i] > best) {
                    best = dots[i];
                    at = c + v * V16 + i;
                }
        }
    }
    return at;
}

static void transpose(const struct order_state *s, struct kmeans *k)
{
    for (uint32_t c = 0; c < k->parts; c++)
        for (uint32_t i = 0; i < s->dim; i++)
            k->across[(size_t)i * k->padded + c] = k->centroids[(size_t)c * s->stride + i];
}

static void assign(const struct order_state *s, struct kmeans *k, uint32_t first)
{
    transpose(s, k);
    memset(k->counts, 0, k->parts * sizeof *k->counts);
    for (uint32_t i = first; i < SEGMENT_ROWS; i++) {
        k->cluster[i] = (uint16_t)nearest(k, s->x[0] + (size_t)i * s->stride, s->dim);
        k->counts[k->cluster[i]]++;
    }
}

/* Centroids of unit length; an empty cluster, or one whose rows cancel out, keeps its own. */
static void update(const struct order_state *s, struct kmeans *k, uint32_t first)
{
    memset(k->sums, 0, (size_t)k->parts * s->stride * sizeof *k->sums);
    for (uint32_t i = first; i < SEGMENT_ROWS; i++) {
        float *sum = k->sums + (size_t)k->cluster[i] * s->stride;
        const float *row = s->x[0] + (size_t)i * s->stride;
        for (uint32_t j = 0; j < s->stride; j += V16)
            v16_store(sum + j, v16_add(v16_load(sum + j), v16_load(row + j)));
    }
    for (uint32_t c = 0; c < k->parts; c++) {
        const float *sum = k->sums + (size_t)c * s->stride;
        float square = dot(sum, sum, s->stride);
        if (k->counts[c] > 0 && square > 1e-30f)
            scale_to(k->centroids + (size_t)c * s->stride, sum, 1.0f / sqrtf(square), s->stride);
    }
}

/* first_row[parts + 1]: rows of storage of each cluster; inside it rows keep the order of positions. */
static void order_kmeans(struct order_state *s, struct kmeans *k, const uint16_t *keys,
                         uint32_t first, uint16_t *first_row)
{
    uint32_t n = SEGMENT_ROWS - first;
    centre(s, keys, first, false);
    for (uint32_t c = 0; c < k->parts; c++) {
        uint32_t seed = first + (uint32_t)((2 * (uint64_t)c + 1) * n / (2 * (uint64_t)k->parts));
        memcpy(k->centroids + (size_t)c * s->stride, s->x[0] + (size_t)seed * s->stride,
               s->stride * sizeof *k->centroids);
    }
    for (int i = 1; i < SEAL_KMEANS_ITERATIONS; i++) {
        assign(s, k, first);
        update(s, k, first);
    }
    assign(s, k, first);
    uint32_t at = first;
    for (uint32_t c = 0; c < k->parts; c++) {
        first_row[c] = (uint16_t)at;
        at += k->counts[c];
        k->counts[c] = first_row[c]; /* from here on: where its next row goes */
    }
    first_row[k->parts] = (uint16_t)at;
    for (uint32_t i = 0; i < first; i++)
        s->order[i] = (uint16_t)i;
    for (uint32_t i = first; i < SEGMENT_ROWS; i++)
        s->order[k->counts[k->cluster[i]]++] = (uint16_t)i;
}
