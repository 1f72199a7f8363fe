/* Attention kernels over vectors of VW floats, written once: attend_avx2.c and attend_avx512.c
 * define the vector operations (vf_*, vp_*) and include this file.
 *
 * Two forms of the same sums. One row (decode): K and V are unpacked in registers, shared by the
 * heads of the group; bound by memory (25 GB/s per core from DRAM), so the next group is prefetched one
 * group (16 KiB at head_dim 64) ahead: its pages lie block_bytes apart, where no hardware prefetcher
 * looks. With R = 8, pages of two groups fall into the same sets of L1 and do not fit into 12 ways:
 * half a group ahead, values while keys are read, then the next keys. Several rows (prefill): a group is unpacked once to floats in L1 and multiplied
 * with all queries; bound by two FMA per cycle.
 *
 * What depends on the type of a page's numbers is a constant where it matters (fp8): everything is compiled
 * twice.
 *
 * bf16 dot products (vdpbf16ps) would round q and p as well, and run at a quarter of the FMA rate
 * on the machines measured: floats are both faster and more exact. */
#include "kernels/cpu/attend.h"
#include "kernels/dtype.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")
/* Keeps a loaded vector in its register: the compiler would load it again for each use, and two
 * loads per cycle would bound what two FMA per cycle should. */
#define HOLD(x) __asm__("" : "+v"(x))

enum {
    QT = 4,         /* queries of a register tile at most */
    TILE = VW * NV, /* positions or dimensions of a register tile */
    GROUP = ATTEND_GROUP,
};

/* Results and scratch of one call, by query. */
struct part_state {
    const struct attend_part *a;
    uint32_t dim, rows; /* head_dim, R */
    float *kv;          /* [dim][GROUP] keys or [GROUP][o_stride] values, as floats */
    float *scores;      /* [n][GROUP], then probabilities */
    float *sums;        /* [n][VW]: sums of p, by position modulo VW */
    float *alpha;       /* [n] factor of what was summed before this group */
    float scale;        /* of scores, to base 2 */
    uint64_t nan; /* rows of this group whose score is NaN although their numbers do not read so */
    const uint8_t *page[ATTEND_PAGES]; /* of this group; beyond its end: the last page again */
    /* Halves of pages to prefetch, this group's or the following one's. */
    const uint8_t *with_keys[ATTEND_PAGES], *with_values[ATTEND_PAGES];
};

/* Rows of the group that have a NaN: their key's first number, in pages of e4m3 (attend.h). */
static uint64_t nan_rows(const struct part_state *s)
{
    uint64_t some = 0, rows = 0;
    for (uint32_t i = 0; i < GROUP; i += 4) {
        uint64_t four; /* 7 bits of ones and 1 carry into the eighth */
        memcpy(&four, s->page[i / s->rows] + (size_t)(i % s->rows) * 2, sizeof four);
        some |= (four & 0x007f007f007f007fu) + 0x0001000100010001u;
    }
    for (uint32_t i = 0; i < GROUP && (some & 0x0080008000800080u) != 0; i++)
        rows |= (uint64_t)((s->page[i / s->rows][(size_t)(i % s->rows) * 2] & 0x7f) == 0x7f) << i;
    return rows;
}

INLINE void find_pages(struct part_state *s, uint32_t pos, const bool fp8)
{
    const struct attend_part *a = s->a;
    const struct attend_table *next = &a->table;
    uint32_t n = GROUP / s->rows, last = (a->end - 1) / s->rows, first = pos / s->rows;
    uint32_t next_first = first + n, n_next = next_first <= last ? last - next_first + 1 : 0;
    if (n_next == 0 && a->n_ahead > 0) {
        next = &a->ahead;
        next_first = 0;
        n_next = a->n_ahead;
    }
    size_t row = (size_t)s->dim * (fp8 ? 1 : 2), half = s->rows * row;
    bool near = s->rows < 16 || row > 128; /* two groups do not fit into L1 */
    for (uint32_t i = 0; i < n; i++) {
        s->page[i] = attend_page(&a->table, first + i < last ? first + i : last);
        const uint8_t *after = i < n_next ? attend_page(next, next_first + i) : s->page[i];
        s->with_keys[i] = near ? s->page[i] + half : after;
        s->with_values[i] = near ? after : after + half;
    }
    s->nan = fp8 ? nan_rows(s) : 0;
}

/* Rows of the group that its masks show; n positions of the group are there. */
static uint64_t shown_rows(const struct part_state *s, uint32_t pos, uint32_t n)
{
    uint64_t all = ~0ull >> (GROUP - n), shown = 0;
    if (s->a->masks == NULL)
        return all;
    const uint32_t *masks = s->a->masks + pos / s->rows;
    for (uint32_t i = 0; i * s->rows < n; i++)
        shown |= (masks[i] & (~0u >> (32 - s->rows))) * (1ull << (i * s->rows));
    return shown & all;
}

/* VW pairs of a page's numbers, apart. Of fp8: 2^-8 of what they are. */
struct pairs {
    vf first, second;
};

INLINE struct pairs pairs_of(vp x)
{
    HOLD(x);
    return (struct pairs){vp_first(x), vp_second(x)};
}

INLINE struct pairs pairs_of8(vp8 x)
{
    HOLD(x);
    return (struct pairs){vp8_first(x), vp8_second(x)};
}

/* The first n of VW pairs; what lies beyond is not read. */
INLINE struct pairs load_pairs(const uint8_t *p, uint32_t n, const bool fp8)
{
    if (n == VW)
        return fp8 ? pairs_of8(vp8_load(p)) : pairs_of(vp_load(p));
    return fp8 ? pairs_of8(vp8_load_n(p, n)) : pairs_of(vp_load_n(p, n));
}

/* Pairs of dimensions (2i, 2i + 1) of VW positions from `pos` of the group on. */
INLINE struct pairs key_pairs(const uint8_t *const *page, uint32_t pos, const uint32_t rows,
                              uint32_t i, const bool fp8)
{
    const uint32_t pair = fp8 ? 2 : 4;
    const uint8_t *p = page[pos / rows] + ((size_t)i * rows + pos % rows) * pair;
    if (rows < VW) { /* 8 rows in a vector of 16: two pages */
        const uint8_t *q = page[pos / rows + 1] + (size_t)i * rows * pair;
        return fp8 ? pairs_of8(vp8_load_halves(p, q)) : pairs_of(vp_load_halves(p, q));
    }
    return load_pairs(p, VW, fp8);
}

/* In the order in which lines of keys are read: every line once. */
INLINE void prefetch_with_keys(const struct part_state *s, uint32_t pos, const uint32_t rows,
                               uint32_t i, const bool fp8)
{
    const uint32_t step = rows * (fp8 ? 2 : 4); /* bytes of a dimension pair in a page */
    const uint32_t every = step < 64 ? 64 / step : 1, pages = rows < VW ? VW / rows : 1;
    if (step >= 64 && pos % rows * (fp8 ? 2 : 4) % 64 == 0)
        __builtin_prefetch(s->with_keys[pos / rows] + (size_t)i * step +
                           pos % rows * (fp8 ? 2 : 4));
    else if (step < 64 && pos % rows == 0 && i % every < pages)
        __builtin_prefetch(s->with_keys[pos / rows + i % every] + (size_t)(i / every) * 64);
}

/* Scores of nq heads against TILE positions from `at` of the group on; one row. */
INLINE void direct_scores(const struct part_state *s, uint32_t h0, const int nq, uint32_t at,
                          const uint32_t rows, const bool fp8)
{
    const float *q = s->a->q + (size_t)h0 * s->dim;
    vf acc[QT][NV];
    UNROLL for (int h = 0; h < nq; h++) UNROLL for (int v = 0; v < NV; v++) acc[h][v] = vf_zero();
    for (uint32_t i = 0; i < s->dim / 2; i++) {
        vf even[QT], odd[QT];
        UNROLL for (int h = 0; h < nq; h++)
        {
            even[h] = vf_set1(q[(size_t)h * s->dim + 2 * i]);
            odd[h] = vf_set1(q[(size_t)h * s->dim + 2 * i + 1]);
        }
        UNROLL for (uint32_t v = 0; v < NV; v++)
        {
            struct pairs k = key_pairs(s->page, at + v * VW, rows, i, fp8);
            prefetch_with_keys(s, at + v * VW, rows, i, fp8);
            UNROLL for (int h = 0; h < nq; h++) acc[h][v] = vf_fma(k.first, even[h], acc[h][v]);
            UNROLL for (int h = 0; h < nq; h++) acc[h][v] = vf_fma(k.second, odd[h], acc[h][v]);
        }
    }
    float *out = s->scores + (size_t)h0 * GROUP + at;
    UNROLL for (int h = 0; h < nq; h++) UNROLL for (int v = 0; v < NV; v++)
        vf_store(out + (size_t)h * GROUP + v * VW, acc[h][v]);
}

/* Online softmax of one query over the positions `seen` of the group, at least one: scores become
 * probabilities relative to the greatest score so far, in base 2; the others become 0. Without
 * branches: whether the greatest score changes cannot be predicted, and a factor of exp2(0) = 1
 * changes nothing. */
INLINE void soften(const struct part_state *s, uint32_t query, uint64_t seen)
{
    enum { N = GROUP / VW };
    float *x = s->scores + (size_t)query * GROUP, *m = &s->a->m[query];
    float *sums = s->sums + (size_t)query * VW;
    for (uint64_t bad = s->nan & seen; bad != 0; bad &= bad - 1)
        x[__builtin_ctzll(bad)] = NAN;
    vf scale = vf_set1(s->scale), v[N], before = vf_set1(*m), top;
    UNROLL for (uint32_t i = 0; i < N; i++) v[i] =
        vf_keep(vf_mul(vf_load(x + i * VW), scale), seen >> (i * VW), ATTEND_LOWEST);
    top = vf_max(vf_max(v[0], v[1]), vf_max(v[2], v[3]));
    UNROLL for (uint32_t i = 4; i < N; i++) top = vf_max(top, v[i]);
    top = vf_hmax(vf_max(top, before));
    vf alpha = vf_exp2(vf_sub(before, top)), sum = vf_mul(vf_load(sums), alpha);
    UNROLL for (uint32_t i = 0; i < N; i++)
    {
        v[i] = vf_exp2(vf_sub(v[i], top));
        sum = vf_add(sum, v[i]);
        vf_store(x + i * VW, v[i]);
    }
    vf_store(sums, sum);
    *m = vf_lane0(top);
    s->alpha[query] = vf_lane0(alpha);
}

/* acc += p * v for a pair of rows, or only the first of them: what lies beyond the last position is
 * not ours, maybe NaN. */
INLINE void add_values(vf acc[QT][NV], const uint8_t *src, const float *p, const int nq,
                       const int nv, uint32_t tail, const bool both, const bool fp8)
{
    const int pair = fp8 ? 2 : 4;
    UNROLL for (int v = 0; v < nv; v++)
    {
        struct pairs x = load_pairs(src + v * VW * pair, v + 1 < nv ? VW : tail, fp8);
        UNROLL for (int h = 0; h < nq; h++) acc[h][v] =
            vf_fma(x.first, vf_set1(p[(size_t)h * GROUP]), acc[h][v]);
        if (both)
            UNROLL for (int h = 0; h < nq; h++) acc[h][v] =
                vf_fma(x.second, vf_set1(p[(size_t)h * GROUP + 1]), acc[h][v]);
    }
}

/* o = alpha * o + sum of p * v over n positions, TILE dimensions (the last vector has `tail` of
 * them); one row. */
INLINE void direct_values(const struct part_state *s, uint32_t h0, const int nq, uint32_t j,
                          const int nv, uint32_t tail, uint32_t n, const bool fp8)
{
    const struct attend_part *a = s->a;
    const uint32_t pair = fp8 ? 2 : 4;
    size_t step = (size_t)s->dim * pair, half = s->rows / 2 * step;
    float *o = a->o + (size_t)h0 * a->o_stride + j;
    const float *p = s->scores + (size_t)h0 * GROUP;
    vf acc[QT][NV];
    UNROLL for (int h = 0; h < nq; h++) UNROLL for (int v = 0; v < nv; v++) acc[h][v] =
        vf_mul(vf_load(o + (size_t)h * a->o_stride + v * VW), vf_set1(s->alpha[h0 + (uint32_t)h]));
    for (uint32_t k = 0; k * s->rows < n; k++) {
        const uint8_t *src = s->page[k] + half + (size_t)j * pair;
        const uint8_t *ahead = s->with_values[k] + (size_t)j * pair;
        uint32_t left = n - k * s->rows < s->rows ? n - k * s->rows : s->rows;
        for (; left >= 2; left -= 2, p += 2, src += step, ahead += step) {
            UNROLL for (int v = 0; v < nv; v += (fp8 ? 32 : 16) / VW)
                __builtin_prefetch(ahead + (uint32_t)v * VW * pair);
            add_values(acc, src, p, nq, nv, tail, true, fp8);
        }
        if (left == 1)
            add_values(acc, src, p, nq, nv, tail, false, fp8);
    }
    UNROLL for (int h = 0; h < nq; h++) UNROLL for (int v = 0; v < nv; v++)
        vf_store(o + (size_t)h * a->o_stride + v * VW, acc[h][v]);
}

/* One group for nq heads of one row. */
INLINE void direct_group(const struct part_state *s, uint32_t h0, const int nq, uint32_t n,
                         uint64_t seen, const bool fp8)
{
    for (uint32_t at = 0; at < n; at += TILE) {
        if (s->rows == 16)
            direct_scores(s, h0, nq, at, 16, fp8);
        else if (s->rows == 8)
            direct_scores(s, h0, nq, at, 8, fp8);
        else
            direct_scores(s, h0, nq, at, 32, fp8);
    }
    for (int h = 0; h < nq; h++)
        soften(s, h0 + (uint32_t)h, seen);
    uint32_t j = 0;
    for (; j + TILE <= s->dim; j += TILE)
        direct_values(s, h0, nq, j, NV, VW, n, fp8);
    for (; j < s->dim; j += VW)
        direct_values(s, h0, nq, j, 1, s->dim - j < VW ? s->dim - j : VW, n, fp8);
}

/* How many of `left` queries the next register tile takes: 3 and 4 keep both FMA units busy. */
static uint32_t tile_queries(uint32_t left)
{
    return left % 4 == 0 ? 4 : left >= 3 ? 3 : left;
}

INLINE void part_one_row(struct part_state *s, const bool fp8)
{
    const struct attend_part *a = s->a;
    for (uint32_t pos = a->begin; pos < a->end; pos += GROUP) {
        uint32_t n = a->end - pos < GROUP ? a->end - pos : GROUP;
        uint64_t seen = shown_rows(s, pos, n);
        if (seen == 0)
            continue;
        find_pages(s, pos, fp8);
        for (uint32_t h = 0, nq; h < a->group; h += nq) {
            nq = tile_queries(a->group - h);
            if (nq == 4)
                direct_group(s, h, 4, n, seen, fp8);
            else if (nq == 3)
                direct_group(s, h, 3, n, seen, fp8);
            else if (nq == 2)
                direct_group(s, h, 2, n, seen, fp8);
            else
                direct_group(s, h, 1, n, seen, fp8);
        }
    }
}

INLINE void unpack_keys_of(const struct part_state *s, uint32_t n, const uint32_t rows,
                           const bool fp8)
{
    for (uint32_t at = 0; at < n; at += VW)
        for (uint32_t i = 0; i < s->dim / 2; i++) {
            struct pairs x = key_pairs(s->page, at, rows, i, fp8);
            float *out = s->kv + (size_t)i * 2 * GROUP + at;
            vf_store(out, x.first);
            vf_store(out + GROUP, x.second);
        }
}

INLINE void unpack_keys(const struct part_state *s, uint32_t n, const bool fp8)
{
    if (s->rows == 16)
        unpack_keys_of(s, n, 16, fp8);
    else if (s->rows == 8)
        unpack_keys_of(s, n, 8, fp8);
    else
        unpack_keys_of(s, n, 32, fp8);
}

INLINE void unpack_values(const struct part_state *s, uint32_t n, const bool fp8)
{
    const uint32_t pair = fp8 ? 2 : 4;
    size_t step = (size_t)s->dim * pair, half = s->rows / 2 * step, stride = s->a->o_stride;
    for (uint32_t t = 0; t < n; t += 2) {
        const uint8_t *src = s->page[t / s->rows] + half + t % s->rows / 2 * step;
        float *out = s->kv + t * stride;
        for (uint32_t j = 0; j < s->dim; j += VW) {
            uint32_t left = s->dim - j;
            struct pairs x = load_pairs(src + (size_t)j * pair, left < VW ? left : VW, fp8);
            vf_store(out + j, x.first);
            vf_store(out + stride + j, x.second);
        }
    }
}

/* Scores of queries [q0, q0 + nq) against nv vectors of positions from `at` of the group on. */
INLINE void tile_scores(const struct part_state *s, const float *const *q, uint32_t q0,
                        const int nq, uint32_t at, const int nv)
{
    vf acc[QT][NV];
    const float *k = s->kv + at;
    UNROLL for (int h = 0; h < nq; h++) UNROLL for (int v = 0; v < nv; v++) acc[h][v] = vf_zero();
    _Pragma("GCC unroll 4") for (uint32_t i = 0; i < s->dim; i++, k += GROUP)
    {
        vf key[NV];
        UNROLL for (int v = 0; v < nv; v++)
        {
            key[v] = vf_load(k + v * VW);
            HOLD(key[v]);
        }
        UNROLL for (int h = 0; h < nq; h++)
        {
            vf x = vf_set1(q[h][i]);
            UNROLL for (int v = 0; v < nv; v++) acc[h][v] = vf_fma(key[v], x, acc[h][v]);
        }
    }
    float *out = s->scores + (size_t)q0 * GROUP + at;
    UNROLL for (int h = 0; h < nq; h++) UNROLL for (int v = 0; v < nv; v++)
        vf_store(out + (size_t)h * GROUP + v * VW, acc[h][v]);
}

/* o += sum of p * v over positions [t0, t1) of the group, nv vectors of dimensions from j on. The
 * first stretch also applies alpha. */
INLINE void tile_values(const struct part_state *s, uint32_t q0, const int nq, uint32_t j,
                        const int nv, uint32_t t0, uint32_t t1)
{
    size_t stride = s->a->o_stride;
    float *o = s->a->o + q0 * stride + j;
    const float *p = s->scores + (size_t)q0 * GROUP, *src = s->kv + t0 * stride + j;
    vf acc[QT][NV];
    UNROLL for (int h = 0; h < nq; h++) UNROLL for (int v = 0; v < nv; v++)
    {
        acc[h][v] = vf_load(o + (size_t)h * stride + v * VW);
        if (t0 == 0)
            acc[h][v] = vf_mul(acc[h][v], vf_set1(s->alpha[q0 + (uint32_t)h]));
    }
    _Pragma("GCC unroll 4") for (uint32_t t = t0; t < t1; t++, src += stride)
    {
        vf value[NV];
        UNROLL for (int v = 0; v < nv; v++)
        {
            value[v] = vf_load(src + v * VW);
            HOLD(value[v]);
        }
        UNROLL for (int h = 0; h < nq; h++)
        {
            vf x = vf_set1(p[(size_t)h * GROUP + t]);
            UNROLL for (int v = 0; v < nv; v++) acc[h][v] = vf_fma(value[v], x, acc[h][v]);
        }
    }
    UNROLL for (int h = 0; h < nq; h++) UNROLL for (int v = 0; v < nv; v++)
        vf_store(o + (size_t)h * stride + v * VW, acc[h][v]);
}

INLINE void tile_values_all(const struct part_state *s, uint32_t q0, const int nq, uint32_t t0,
                            uint32_t t1)
{
    uint32_t j = 0;
    for (; j + TILE <= s->a->o_stride; j += TILE)
        tile_values(s, q0, nq, j, NV, t0, t1);
    for (; j < s->dim; j += VW)
        tile_values(s, q0, nq, j, 1, t0, t1);
}

/* Positions of the group at `pos` that a query may see. */
static uint32_t visible(const struct part_state *s, uint32_t query, uint32_t pos)
{
    uint32_t end = s->a->first_pos + query / s->a->group + 1;
    end = end < s->a->end ? end : s->a->end;
    return end <= pos ? 0 : end - pos < GROUP ? end - pos : GROUP;
}

INLINE void group_scores(const struct part_state *s, uint32_t q0, const int nq, uint32_t pos)
{
    const float *q[QT];
    for (uint32_t h = 0; h < (uint32_t)nq; h++)
        q[h] = s->a->q + (q0 + h) / s->a->group * s->a->q_stride +
               (size_t)((q0 + h) % s->a->group) * s->dim;
    uint32_t n = visible(s, q0 + (uint32_t)nq - 1, pos);
    for (uint32_t at = 0; at < n; at += TILE) {
        uint32_t vectors = (n - at + VW - 1) / VW; /* fewer at the causal border */
        if (vectors >= NV)
            tile_scores(s, q, q0, nq, at, NV);
        else if (vectors == 3)
            tile_scores(s, q, q0, nq, at, NV < 3 ? NV : 3);
        else if (vectors == 2)
            tile_scores(s, q, q0, nq, at, 2);
        else
            tile_scores(s, q, q0, nq, at, 1);
    }
}

/* Queries of a tile may end at different rows: together as far as the first one sees, then alone. */
INLINE void group_values(const struct part_state *s, uint32_t q0, const int nq, uint32_t pos)
{
    uint32_t common = visible(s, q0, pos);
    tile_values_all(s, q0, nq, 0, common);
    for (uint32_t h = 1; h < (uint32_t)nq; h++)
        if (visible(s, q0 + h, pos) > common)
            tile_values_all(s, q0 + h, 1, common, visible(s, q0 + h, pos));
}

#define BY_QUERIES(nq, call, ...)       \
    do {                                \
        if ((nq) == 4)                  \
            call(s, q, 4, __VA_ARGS__); \
        else if ((nq) == 3)             \
            call(s, q, 3, __VA_ARGS__); \
        else if ((nq) == 2)             \
            call(s, q, 2, __VA_ARGS__); \
        else                            \
            call(s, q, 1, __VA_ARGS__); \
    } while (0)

INLINE void part_rows(struct part_state *s, const bool fp8)
{
    const struct attend_part *a = s->a;
    uint32_t n_queries = a->n_rows * a->group;
    for (uint32_t pos = a->begin; pos < a->end; pos += GROUP) {
        uint32_t n = a->end - pos < GROUP ? a->end - pos : GROUP;
        /* rows before the group see nothing of it */
        uint32_t first = pos > a->first_pos ? (pos - a->first_pos) * a->group : 0;
        find_pages(s, pos, fp8);
        unpack_keys(s, n, fp8);
        for (uint32_t q = first, nq; q < n_queries; q += nq) {
            nq = a->group % 3 == 0 ? 3 : tile_queries(n_queries - q);
            BY_QUERIES(nq, group_scores, pos);
        }
        /* a phase of its own: the chains of different queries overlap */
        for (uint32_t q = first, r = first / a->group; r < a->n_rows; r++) {
            uint64_t seen = ~0ull >> (GROUP - visible(s, q, pos));
            for (uint32_t h = 0; h < a->group; h++)
                soften(s, q++, seen);
        }
        unpack_values(s, n, fp8);
        for (uint32_t q = first, nq; q < n_queries; q += nq) {
            nq = a->group % 3 == 0 ? 3 : tile_queries(n_queries - q);
            BY_QUERIES(nq, group_values, pos);
        }
    }
}

/* Apart, so that each is compiled once with its constants. */
static __attribute__((noinline)) void one_row(struct part_state *s)
{
    part_one_row(s, false);
}
static __attribute__((noinline)) void one_row8(struct part_state *s)
{
    part_one_row(s, true);
}
static __attribute__((noinline)) void some_rows(struct part_state *s)
{
    part_rows(s, false);
}
static __attribute__((noinline)) void some_rows8(struct part_state *s)
{
    part_rows(s, true);
}

static void part(const struct attend_part *a)
{
    const bool fp8 = a->geo->type == KV_E4M3;
    uint32_t n = a->n_rows * a->group;
    struct part_state s = {.a = a, .dim = a->geo->head_dim, .rows = a->geo->block_rows};
    s.scale = a->scale * (float)M_LOG2E * (fp8 ? 0x1p8f : 1);
    s.kv = a->work;
    s.scores = s.kv + (size_t)GROUP * a->o_stride;
    s.sums = s.scores + (size_t)n * GROUP;
    s.alpha = s.sums + (size_t)n * VW;
    memset(a->o, 0, (size_t)n * a->o_stride * sizeof *a->o);
    memset(s.sums, 0, (size_t)n * VW * sizeof *s.sums);
    for (uint32_t q = 0; q < n; q++)
        a->m[q] = ATTEND_LOWEST;
    if (a->n_rows == 1)
        (fp8 ? one_row8 : one_row)(&s);
    else
        (fp8 ? some_rows8 : some_rows)(&s);
    for (uint32_t q = 0; q < n; q++)
        a->l[q] = vf_hsum(vf_load(s.sums + (size_t)q * VW));
    for (size_t i = 0; fp8 && i < (size_t)n * a->o_stride; i += VW)
        vf_store(a->o + i, vf_mul(vf_load(a->o + i), vf_set1(0x1p8f)));
}

/* Probabilities of one head's entries, times their factors: m, l, and logits spoilt. */
static void soften_estimates(const struct attend_estimates *a, uint32_t h)
{
    float *x = a->logits + (size_t)h * ATTEND_SPLIT;
    vf top = vf_set1(ATTEND_LOWEST), sum = vf_zero(), low = top;
    for (uint32_t i = 0; i < a->n; i += VW) {
        vf v = vf_max(low, vf_mul(vf_load(x + i), vf_set1((float)M_LOG2E))); /* NaN passes */
        vf_store(x + i, v);
        top = vf_max(top, v);
    }
    top = vf_hmax(top);
    a->m[h] = vf_lane0(top);
    a->l[h] = 0;
    if (a->m[h] == ATTEND_LOWEST) { /* every logit is -inf */
        memset(x, 0, a->n * sizeof *x);
        return;
    }
    for (uint32_t i = 0; i < a->n; i += VW) {
        vf p = vf_exp2(vf_sub(vf_load(x + i), top));
        sum = vf_add(sum, p);
        vf_store(x + i, vf_mul(p, vf_load(a->factors + i)));
    }
    a->l[h] = vf_hsum(sum);
}

/* o = sum of p * v, TILE dimensions (the last vector has `tail` of them). */
INLINE void estimate_values(const struct attend_estimates *a, uint32_t h0, const int nq, uint32_t j,
                            const int nv, uint32_t tail)
{
    const float *p = a->logits + (size_t)h0 * ATTEND_SPLIT;
    float *o = a->o + (size_t)h0 * a->o_stride + j;
    vf acc[QT][NV];
    UNROLL for (int h = 0; h < nq; h++) UNROLL for (int v = 0; v < nv; v++) acc[h][v] = vf_zero();
    for (uint32_t t = 0; t < a->n; t++) {
        const int8_t *src = a->values[t] + j;
        UNROLL for (int v = 0; v < nv; v++)
        {
            vf x = v + 1 < nv || tail == VW ? vf_load_i8(src + v * VW)
                                            : vf_load_i8_n(src + v * VW, tail);
            UNROLL for (int h = 0; h < nq; h++) acc[h][v] =
                vf_fma(x, vf_set1(p[(size_t)h * ATTEND_SPLIT + t]), acc[h][v]);
        }
    }
    UNROLL for (int h = 0; h < nq; h++) UNROLL for (int v = 0; v < nv; v++)
        vf_store(o + (size_t)h * a->o_stride + v * VW, acc[h][v]);
}

INLINE void estimate_heads(const struct attend_estimates *a, uint32_t h0, const int nq)
{
    uint32_t j = 0;
    for (; j + TILE <= a->dim; j += TILE)
        estimate_values(a, h0, nq, j, NV, VW);
    for (; j < a->dim; j += VW)
        estimate_values(a, h0, nq, j, 1, a->dim - j < VW ? a->dim - j : VW);
}

static void estimate(const struct attend_estimates *a)
{
    memset(a->o, 0, (size_t)a->group * a->o_stride * sizeof *a->o);
    for (uint32_t h = 0; h < a->group; h++)
        soften_estimates(a, h);
    for (uint32_t h = 0, nq; h < a->group; h += nq) {
        nq = tile_queries(a->group - h);
        if (nq == 4)
            estimate_heads(a, h, 4);
        else if (nq == 3)
            estimate_heads(a, h, 3);
        else if (nq == 2)
            estimate_heads(a, h, 2);
        else
            estimate_heads(a, h, 1);
    }
}

static void fold(float *o, float *m, float *l, const float *part_o, const float *part_m,
                 const float *part_l, uint32_t n, uint32_t o_stride)
{
    for (uint32_t q = 0; q < n; q++, o += o_stride, part_o += o_stride) {
        float max = m[q] > part_m[q] ? m[q] : part_m[q];
        float a = exp2f(m[q] - max), b = exp2f(part_m[q] - max);
        for (uint32_t j = 0; j < o_stride; j += VW) {
            vf x = vf_mul(vf_load(part_o + j), vf_set1(b));
            vf_store(o + j, vf_fma(vf_load(o + j), vf_set1(a), x));
        }
        l[q] = l[q] * a + part_l[q] * b;
        m[q] = max;
    }
}

static void finish(const float *o, float l, float *out, uint32_t dim)
{
    uint32_t j = 0;
    float scale = 1.0f / l;
    for (; j + VW <= dim; j += VW)
        vf_store(out + j, vf_mul(vf_load(o + j), vf_set1(scale)));
    for (; j < dim; j++)
        out[j] = o[j] * scale;
}

static void rotate(float *x, const float *c, const float *s, uint32_t half)
{
    uint32_t i = 0;
    for (; i + VW <= half; i += VW) {
        vf a = vf_load(x + i), b = vf_load(x + half + i), co = vf_load(c + i), si = vf_load(s + i);
        vf_store(x + i, vf_sub(vf_mul(a, co), vf_mul(b, si)));
        vf_store(x + half + i, vf_add(vf_mul(b, co), vf_mul(a, si)));
    }
    for (; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * c[i] - b * s[i];
        x[half + i] = b * c[i] + a * s[i];
    }
}

/* As f32_to_bf16, or f32_to_e4m3, for dim numbers. */
INLINE void round_row(uint8_t *out, const float *x, uint32_t dim, const bool fp8)
{
    uint32_t i = 0;
    for (; i + VW <= dim; i += VW)
        if (fp8)
            vf_store_e4m3(out + i, vf_load(x + i));
        else
            vf_store_bf16(out + (size_t)i * 2, vf_load(x + i));
    for (; i < dim; i++) {
        uint16_t h = f32_to_bf16(x[i]);
        if (fp8)
            out[i] = f32_to_e4m3(x[i]);
        else
            memcpy(out + (size_t)i * 2, &h, 2);
    }
}

/* Is one of n numbers of e4m3 NaN? n is even. */
static bool any_nan8(const uint8_t *x, uint32_t n)
{
    uint64_t some = 0;
    for (uint32_t i = 0; i < n; i += 8) {
        uint64_t eight = 0; /* 7 bits of ones and 1 carry into the eighth */
        memcpy(&eight, x + i, n - i < 8 ? n - i : 8);
        some |= (eight & 0x7f7f7f7f7f7f7f7fu) + 0x0101010101010101u;
    }
    return (some & 0x8080808080808080u) != 0;
}

/* k and v of one head into row `row` of their page. Bound by stores: head_dim / 2 of a pair for k,
 * head_dim of a number for v. */
INLINE void append_head(uint8_t *page, uint32_t row, uint32_t rows, uint32_t dim, const float *k,
                        const float *v, const bool fp8)
{
    enum { PIECE = 128 }; /* numbers rounded at a time */
    const uint32_t number = fp8 ? 1 : 2;
    uint8_t *value = page + ((size_t)rows + row / 2 * 2) * dim * number;
    bool nan = false;
    for (uint32_t j = 0; j < dim; j += PIECE) {
        uint32_t n = dim - j < PIECE ? dim - j : PIECE;
        uint8_t key[PIECE * 2], val[PIECE * 2];
        round_row(key, k + j, n, fp8);
        round_row(val, v + j, n, fp8);
        for (uint32_t i = 0; i < n; i += 2)
            memcpy(page + ((size_t)(j + i) / 2 * rows + row) * 2 * number, key + i * number,
                   2 * (size_t)number);
        for (uint32_t i = 0; i < n; i++)
            memcpy(value + ((size_t)(j + i) * 2 + row % 2) * number, val + i * number, number);
        nan |= fp8 && (any_nan8(key, n) || any_nan8(val, n));
    }
    if (nan)
        page[row * 2] = 0x7f; /* attend.h */
}

static void append(const struct append_row *a)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t dim = g->head_dim, rows = g->block_rows;
    float *k = a->qkv + (size_t)a->heads * dim;
    const float *v = k + (size_t)g->kv_heads * dim;
    for (uint32_t h = 0; h < a->heads + g->kv_heads; h++)
        rotate(a->qkv + (size_t)h * dim, a->cos, a->sin, dim / 2);
    for (uint32_t h = 0; h < g->kv_heads; h++, k += dim, v += dim)
        if (g->type == KV_E4M3)
            append_head(append_page(a, h), a->page_row, rows, dim, k, v, true);
        else
            append_head(append_page(a, h), a->page_row, rows, dim, k, v, false);
}
