/* Attention of tasks with at most 16 queries (decode): a CTA runs some splits of one task.
 *
 * Each of 4 warps copies 16 positions of a tile, scores them (16 queries by 16 positions), and sums a
 * quarter of the dimensions over all 64 positions; greatest scores and probabilities go through shared
 * memory. Bound by HBM: K and V are read once; a few tiles per CTA are in flight, and two CTAs
 * or more live on an SM. A split of a task that has others too leaves a partial result; where there are
 * not many, the CTA that comes last folds them.
 *
 * CTAs of planned rows come first: they learn from device memory what they attend, and those beyond
 * the end of their list have nothing to do but arrive. `known` is the same for the sinks' pages
 * and the tail, whose partial results stay. Op: attend, known. */
#include "kernels/cuda/attend_estimate.h"
#include "kernels/cuda/attend_last.h"
#include "kernels/cuda/attend_shape.h"
#include "kernels/cuda/attend_warp.h"

namespace
{

template <int DP> struct few {
    enum {
        TILE_BYTES = CUDA_TILE * DP * 2, /* of K or V */
        STAGES = DP == 64 ? 5 : 3,
        BYTES = STAGES * TILE_BYTES * 2,
        CTAS = DP == 256 ? 1 : 2, /* per SM at least */
    };
};

/* What the warps tell each other of a tile. */
struct exchange {
    float greatest[4][CUDA_FEW];
    uint4 p[4][32]; /* probabilities of 16 positions as a matrix operand */
};

struct few_state {
    float m[2], l[4]; /* of queries g and g + 8; l: columns are alike, rows as in a result */
};

template <int DP>
__device__ void load_queries(const struct attend_call *c, const struct attend_task *k,
                             uint32_t a[DP / 16][4])
{
    const uint32_t lane = threadIdx.x % 32, n = k->n_rows * c->group;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t query = lane / 4 + i * 8;
        const float *q = query_at(c, k, min(query, n - 1));
#pragma unroll
        for (int s = 0; s < DP / 16; s++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t x = s * 16 + half * 8 + lane % 4 * 2;
                bool is = query < n && x < c->dim;
                a[s][half * 2 + i] = is ? pack(q[x], q[x + 1]) : 0;
            }
    }
}

/* Scores of this warp's 16 positions. */
template <int DP> __device__ void score(const uint32_t a[DP / 16][4], uint32_t k_at, float s[2][4])
{
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t row = threadIdx.x / 32 * 16 + lane % 8 + lane / 16 * 8, odd = lane / 8 % 2;
#pragma unroll
    for (int i = 0; i < 2; i++)
        s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
#pragma unroll
    for (int i = 0; i < DP / 16; i++) {
        uint32_t b[4];
        load_matrices(b, k_at + chunk_at<DP>(row, 2 * i + odd));
        multiply(s[0], a[i], b);
        multiply(s[1], a[i], b + 2);
    }
}

/* Turns scores of positions from `pos` on into probabilities, given all warps' greatest scores. */
__device__ void weigh(const struct attend_call *c, struct exchange *x, float s[2][4],
                      struct few_state *st, float alpha[2])
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = fmaxf(fmaxf(s[0][i * 2], s[0][i * 2 + 1]), fmaxf(s[1][i * 2], s[1][i * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        if (lane % 4 == 0)
            x->greatest[warp][lane / 4 + i * 8] = top;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t query = lane / 4 + i * 8;
        float top = fmaxf(fmaxf(x->greatest[0][query], x->greatest[1][query]),
                          fmaxf(x->greatest[2][query], x->greatest[3][query]));
        float m = fmaxf(st->m[i], __fmul_rn(top, c->scale));
        alpha[i] = exp2_fast(st->m[i] - m);
        st->m[i] = m;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float *v = &s[j / 2][i * 2 + j % 2];
            *v = exp2_fast(__fmaf_rn(*v, c->scale, -m));
        }
    }
    x->p[warp][lane] = make_uint4(pack(s[0][0], s[0][1]), pack(s[0][2], s[0][3]),
                                  pack(s[1][0], s[1][1]), pack(s[1][2], s[1][3]));
    __syncthreads();
}

/* Adds probabilities times this warp's dimensions of V. */
template <int DP>
__device__ void sum_values(const struct exchange *x, uint32_t v_at, float o[DP / 32][4], float l[4])
{
    const uint32_t lane = threadIdx.x % 32, ones[2] = {0x3f803f80, 0x3f803f80};
    const uint32_t first = threadIdx.x / 32 * (DP / 32); /* chunk */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 v = x->p[i][lane];
        uint32_t a[4] = {v.x, v.y, v.z, v.w}, row = i * 16 + lane % 16;
        multiply(l, a, ones);
#pragma unroll
        for (int j = 0; j < DP / 32; j += 2) {
            uint32_t b[4];
            load_matrices_turned(b, v_at + chunk_at<DP>(row, first + j + lane / 16));
            multiply(o[j], a, b);
            multiply(o[j + 1], a, b + 2);
        }
    }
}

/* What a CTA has to do. */
struct work {
    struct attend_task k;
    struct lane_pages pages;
    struct attend_parts parts; /* of the task, for who comes last and for where a split goes */
    float *tail;               /* of `known`: partial results of the tail go there; else NULL */
    float *lse;                /* of `known`: masses go there; else NULL */
    uint32_t estimate, end_estimate; /* splits of estimates; then there are no others */
    uint32_t entry, n_entries;       /* of a set; its estimates */
    const uint32_t *records;
};

/* Partial results of a split: o [n][DP], ml [n]. */
template <int DP> struct place {
    float *o;
    float2 *ml;
};

template <int DP>
__device__ struct place<DP> place_of(const struct attend_call *c, const struct work *w,
                                     uint32_t split) {
    struct place<DP> p;
    const uint32_t n = w->parts.n;
    if (w->tail != NULL && split >= w->k.n_first) {
        uint32_t i = split - w->k.n_first;
        p.o = w->tail + (size_t)i * n * DP;
        p.ml = (float2 *)(w->tail + (size_t)CUDA_TAIL_SPLITS * n * DP) + (size_t)i * n;
        return p;
    }
    uint32_t slot = split < w->k.n_first ? split : split - w->k.n_first + w->parts.table_slot;
    size_t at = w->k.partial + (size_t)slot * n;
    p.o = c->part_o + at * DP;
    p.ml = c->part_ml + at;
    return p;
}

/* The split's result: the final one where there is no other. */
template <int DP>
__device__ void store(const struct attend_call *c, const struct work *w, uint32_t split,
                      const struct few_state *st, float o[DP / 32][4])
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = w->parts.n;
    const bool whole = w->k.fold == FOLD_NONE;
    const struct place<DP> to = place_of<DP>(c, w, split);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t query = lane / 4 + i * 8;
        if (query >= n)
            continue;
        size_t at = result_at(c, &w->k, query);
        float m = st->m[i], l = st->l[i * 2];
#pragma unroll
        for (int j = 0; j < DP / 32; j++) {
            uint32_t x = warp * (DP / 4) + j * 8 + lane % 4 * 2;
            float a = o[j][i * 2], b = o[j][i * 2 + 1];
            if (!whole)
                *(float2 *)(to.o + (size_t)query * DP + x) = make_float2(a, b);
            else if (x < c->dim)
                *(float2 *)(c->out + at * c->dim + x) = make_float2(finish(a, l), finish(b, l));
        }
        if (warp != 0 || lane % 4 != 0)
            continue;
        if (!whole)
            to.ml[query] = make_float2(m, l);
        else if (c->lse != NULL)
            c->lse[at] = log_sum(m, l);
    }
}

/* Copies of tiles to come: of splits up to end_split. */
struct copies {
    struct cursor ahead;
    uint32_t end_split;
    struct tile_pages at; /* of the tile at `ahead` */
};

/* Masks of the tiles in the ring, as each warp copied them. */
struct mask_ring {
    uint32_t of[5][4][2]; /* [stage][warp][half] */
};

template <int DP, bool WHOLE>
__device__ void copy_next(const struct work *w, struct copies *n, uint32_t to,
                          struct mask_ring *masks, uint32_t stage)
{
    if (n->ahead.split < n->end_split) {
        if (w->pages.masks != NULL && threadIdx.x % 32 < 2)
            masks->of[stage][threadIdx.x / 32][threadIdx.x % 32] =
                n->at.masks[threadIdx.x % 32 == 0 ? 0 : 1];
        copy_tile<DP, WHOLE>(&w->pages, &n->at, n->ahead.pos, n->ahead.end, to,
                             to + few<DP>::TILE_BYTES);
        cursor_step(&n->ahead, &w->k);
        if (n->ahead.split < n->end_split)
            find_pages<true>(&w->pages, &n->ahead, &n->at);
    }
    copies_end_group();
}

/* Hides from the scores of this warp's positions what lies behind a query's row. */
__device__ void hide(uint32_t pos, const uint32_t limit[2], float s[2][4])
{
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (pos + threadIdx.x / 32 * 16 + j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2 >=
            limit[j / 2 % 2])
            s[j / 4][j % 4] = -INFINITY;
}

/* And rows that a mask leaves out. */
__device__ void hide_masked(const struct lane_pages *p, uint32_t pos, const uint32_t masks[2],
                            float s[2][4])
{
    const uint32_t in_page = (1u << p->shift) - 1;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        uint32_t row = pos + threadIdx.x / 32 * 16 + j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2;
        if (!(masks[j / 4] >> (row & in_page) & 1))
            s[j / 4][j % 4] = -INFINITY;
    }
}

/* Runs the splits of a CTA. ids: pages of its first tile. */
template <int DP, bool WHOLE>
__device__ void run_splits(const struct attend_call *c, const struct work *w,
                           const struct tile_pages *ids, uint8_t *ring, struct exchange *x,
                           struct mask_ring *masks, uint32_t first_bad[DP])
{
    constexpr int stages = few<DP>::STAGES, stage_bytes = few<DP>::TILE_BYTES * 2;
    const struct attend_task *k = &w->k;
    struct cursor u = {k->split, 0, 0};
    cursor_enter(&u, k);
    const uint32_t at = shared_address(ring);
    struct copies next = {u, k->end_split, *ids};
#pragma unroll
    for (uint32_t i = 0; i < stages - 1; i++)
        copy_next<DP, WHOLE>(w, &next, at + i * stage_bytes, masks, i);
    uint32_t q[DP / 16][4], causal[2];
    load_queries<DP>(c, k, q);
    for (int i = 0; i < 2; i++)
        causal[i] = query_limit(c, k, threadIdx.x % 32 / 4 + i * 8, false);
    float o[DP / 32][4] = {};
    struct few_state st = {{LOWEST, LOWEST}, {}};

    for (uint32_t i = 0; u.split < next.end_split; i++) {
        const uint32_t stage = i % stages, k_at = at + stage * stage_bytes;
        const bool first = u.split < k->n_first;
        uint32_t limit[2] = {first ? k->first_end : causal[0], first ? k->first_end : causal[1]};
        copies_wait<stages - 2>();
        __syncthreads(); /* the tile is there, and nobody reads the one before it any more */
        uint32_t rows[2] = {masks->of[stage][threadIdx.x / 32][0],
                            masks->of[stage][threadIdx.x / 32][1]};
        const uint32_t before = (i + stages - 1) % stages;
        copy_next<DP, WHOLE>(w, &next, at + before * stage_bytes, masks, before);
        uint8_t *v = ring + stage * stage_bytes + few<DP>::TILE_BYTES;
        const bool mixed = !first && k->n_rows > 1 && u.pos + CUDA_TILE > k->pos + 1;
        const bool bad = mixed && has_bad<DP>(v);
        if (bad)
            clear_bad<DP>(v, u.pos, first_bad);
        float s[2][4], alpha[2];
        score<DP>(q, k_at, s);
        if (u.pos + CUDA_TILE > min(limit[0], limit[1]))
            hide(u.pos, limit, s);
        if (first && w->pages.masks != NULL)
            hide_masked(&w->pages, u.pos, rows, s);
        weigh(c, x, s, &st, alpha);
#pragma unroll
        for (int j = 0; j < DP / 32 * 4; j++)
            o[j / 4][j % 4] *= alpha[j / 2 % 2];
#pragma unroll
        for (int j = 0; j < 4; j++)
            st.l[j] *= alpha[j / 2];
        sum_values<DP>(x, k_at + few<DP>::TILE_BYTES, o, st.l);
        if (bad) {
#pragma unroll
            for (int j = 0; j < DP / 32 * 4; j++)
                if (first_bad[threadIdx.x / 32 * (DP / 4) + j / 4 * 8 + threadIdx.x % 4 * 2 +
                              j % 2] < limit[j / 2 % 2])
                    o[j / 4][j % 4] = NAN;
        }
        uint32_t split = u.split;
        cursor_step(&u, k);
        if (u.split == split)
            continue;
        store<DP>(c, w, split, &st, o);
#pragma unroll
        for (int j = 0; j < DP / 32 * 4; j++)
            o[j / 4][j % 4] = 0;
        st = {{LOWEST, LOWEST}, {}};
    }
}

/* Runs the splits of a CTA of a planned row. ids: as above. */
template <int DP, bool WHOLE>
__device__ void run_planned(const struct attend_call *c, const struct work *w,
                            const struct tile_pages *ids, uint8_t *ring, struct mask_ring *masks)
{
    constexpr int stages = few<DP>::STAGES, stage_bytes = few<DP>::TILE_BYTES * 2;
    static_assert(sizeof(struct warp_meeting<DP>) <= stage_bytes, "a tile's place is enough");
    const struct attend_task *k = &w->k;
    const uint32_t at = shared_address(ring), warp = threadIdx.x / 32;
    struct cursor u = {k->split, 0, 0};
    cursor_enter(&u, k);
    struct copies next = {u, k->end_split, *ids};
#pragma unroll
    for (uint32_t i = 0; i < stages - 1; i++)
        copy_next<DP, WHOLE>(w, &next, at + i * stage_bytes, masks, i);
    uint32_t q[DP / 16][4];
    load_queries<DP>(c, k, q);
    struct warp_sums<DP> sum;
    warp_clear<DP>(&sum);

    for (uint32_t i = 0; u.split < next.end_split; i++) {
        const uint32_t stage = i % stages, k_at = at + stage * stage_bytes;
        const uint32_t before = (i + stages - 1) % stages, limit[2] = {u.end, u.end};
        copies_wait<stages - 2>();
        __syncwarp(); /* this warp's rows are there, and none of it reads those before any more */
        uint32_t rows[2] = {masks->of[stage][warp][0], masks->of[stage][warp][1]};
        copy_next<DP, WHOLE>(w, &next, at + before * stage_bytes, masks, before);
        if (u.pos + warp * 16 < u.end) {
            float s[2][4];
            uint32_t p[4];
            score<DP>(q, k_at, s);
            if (u.pos + CUDA_TILE > u.end)
                hide(u.pos, limit, s);
            if (u.split < k->n_first && w->pages.masks != NULL)
                hide_masked(&w->pages, u.pos, rows, s);
            warp_weigh<DP>(c->scale, s, &sum, p);
            warp_add<DP>(p, k_at + few<DP>::TILE_BYTES, &sum);
        }
        uint32_t split = u.split;
        cursor_step(&u, k);
        if (u.split == split)
            continue;
        struct place<DP> to = place_of<DP>(c, w, split);
        warp_meet<DP>(&sum, w->parts.n, (struct warp_meeting<DP> *)(ring + stage * stage_bytes),
                      to.o, to.ml);
        warp_clear<DP>(&sum);
    }
}

/* ---- who does what ---- */

/* The part of an entry of the list; false: it is beyond the last. */
__device__ bool find_listed(const struct attend_call *c, struct work *w, struct tile_pages *ids)
{
    w->k = c->tasks[blockIdx.x - c->set.n_items * c->set.n_rows * c->kv_heads];
    if (w->k.table == NULL)
        return false;
    w->pages = lane_pages_of(c, w->k.head, w->k.class_);
    w->pages.first = w->pages.table = w->k.table;
    w->pages.n_first = w->k.n_first;
    struct attend_parts p = {};
    p.n = w->k.n_rows * c->group;
    p.n_first = w->k.n_first;
    p.n_table = w->k.n_splits - w->k.n_first;
    p.table_slot = w->k.n_first;
    w->parts = p;
    w->tail = w->lse = NULL;
    w->estimate = w->end_estimate = 0;
    struct cursor u = {w->k.split, 0, 0};
    cursor_enter(&u, &w->k);
    wait_for_kernel_before();
    find_pages<true>(&w->pages, &u, ids);
    return true;
}

__device__ uint32_t plan_splits(uint32_t positions)
{
    return (positions + CUDA_PLAN_SPLIT - 1) / CUDA_PLAN_SPLIT;
}

/* Splits [*from, *to) of n that CTA `item` of a kind has. */
__device__ void share_of(uint32_t item, uint32_t per_item, uint32_t n, uint32_t *from, uint32_t *to)
{
    *from = min(item * per_item, n);
    *to = min(n, *from + per_item);
}

/* A CTA of a planned row; false: the row is beyond the last, or the lane has no plan. */
template <int DP>
__device__ bool find_planned(const struct attend_call *c, struct work *w, struct tile_pages *ids)
{
    const struct attend_set *s = &c->set;
    const uint32_t entry = blockIdx.x / s->n_items, item = blockIdx.x % s->n_items;
    const uint32_t head = entry % c->kv_heads, cap = s->page_cap << c->page_shift;
    const bool known = s->lse != NULL; /* sinks, through the block table, instead of a list */
    const struct cuda_row *row = &s->rows[entry / c->kv_heads];
    const uint32_t batch_row = row->row, pos = row->pos, n_segments = row->n_segments;
    const block_id *blocks = row->blocks;
    w->entry = entry;
    w->records = row->records;
    if (c->lanes[head] >> LANE_CLASS_SHIFT != LANE_SPARSE || batch_row == ~0u)
        return false;
    w->pages = lane_pages_of(c, head, LANE_SPARSE);
    w->pages.first = known ? blocks : s->pages + (size_t)entry * s->page_cap;
    w->pages.table = blocks;
    w->pages.masks = s->masks != NULL ? s->masks + (size_t)entry * s->page_cap : NULL;
    w->pages.n_first = ~0u;
    wait_for_kernel_before();
    /* Pages of the first tile are asked for before it is known how many there are. */
    struct cursor u = {0, item * s->per_item.pages * CUDA_PLAN_SPLIT, cap};
    if (item < s->items.pages && !known)
        find_pages<true>(&w->pages, &u, ids);
    const uint32_t n_pages = known ? 0 : s->n_pages[entry];
    const uint32_t n_entries =
        s->items.estimates > 0 ? min(s->n_estimates[entry], s->estimate_cap) : 0;
    struct attend_task *k = &w->k;
    memset(k, 0, sizeof *k);
    k->row = batch_row;
    k->n_rows = 1;
    k->pos = pos;
    k->head = (uint16_t)head;
    k->first_end = known ? s->sink_rows : min(n_pages << c->page_shift, cap);
    k->begin = n_segments * SEGMENT_ROWS;
    k->end = pos + 1;
    k->planned = 1;
    k->n_first = plan_splits(k->first_end);
    k->partial = s->partial + entry * s->n_slots * c->group;
    k->counter = s->counter + entry;
    k->n_items = (uint16_t)s->n_items;
    k->fold = FOLD_LAST;
    w->pages.n_first = k->n_first;
    struct attend_parts p = {};
    p.n = c->group;
    p.n_first = k->n_first;
    p.n_table = plan_splits(k->end - k->begin);
    p.n_estimates = n_entries > 0 ? (n_entries + s->estimate_split - 1) / s->estimate_split : 0;
    p.table_slot = s->slots.pages;
    p.estimate_slot = s->slots.pages + s->slots.tail;
    float *tail =
        s->tail != NULL ? s->tail + (size_t)entry * attend_tail_floats(c->group, DP) : NULL;
    p.tail_o = tail;
    p.tail_ml = (const float2 *)(tail + (size_t)CUDA_TAIL_SPLITS * c->group * DP);
    w->lse = known ? s->lse + (size_t)entry * c->group : NULL;
    w->tail = known ? tail : NULL;
    w->parts = p;
    w->n_entries = n_entries;
    k->n_splits = k->n_first + (s->items.tail > 0 ? p.n_table : 0);
    w->estimate = w->end_estimate = 0;
    if (item < s->items.pages) {
        share_of(item, s->per_item.pages, k->n_first, &k->split, &k->end_split);
    } else if (item < s->items.pages + s->items.tail) {
        share_of(item - s->items.pages, s->per_item.tail, p.n_table, &k->split, &k->end_split);
        k->split += k->n_first;
        k->end_split += k->n_first;
    } else {
        share_of(item - s->items.pages - s->items.tail, s->per_item.estimates, p.n_estimates,
                 &w->estimate, &w->end_estimate);
    }
    if (k->split >= k->end_split)
        return true;
    u.split = k->split;
    cursor_enter(&u, k);
    if (item >= s->items.pages || known)
        find_pages<true>(&w->pages, &u, ids);
    const uint32_t at = u.pos + threadIdx.x / 32 * 16;
#pragma unroll
    for (uint32_t i = 0; i < 2; i++)
        ids->pages[i] = at + i * 8 < u.end ? ids->pages[i] : 0;
    return true;
}

/* Runs the splits of estimates of a CTA. */
template <int DP, bool WHOLE>
__device__ void run_estimates(const struct attend_call *c, const struct work *w, uint8_t *memory)
{
    static_assert(sizeof(struct estimate_memory<DP>) <= few<DP>::BYTES, "fits");
    const struct attend_set *s = &c->set;
    struct estimates e;
    e.s = s;
    e.records = w->records;
    e.scores = s->scores + (size_t)w->entry * c->group * s->stride;
    e.digests = s->records + (size_t)(c->lanes[w->k.head] & ((1u << LANE_CLASS_SHIFT) - 1)) *
                                 s->record_lane_bytes;
    if (s->coded) {
        const float *q = c->q + w->k.row * c->q_stride + (size_t)w->k.head * c->group * c->dim;
        const uint8_t *first = e.digests + (size_t)w->records[0] * s->record_bytes;
        struct estimate_memory<DP> *m = (struct estimate_memory<DP> *)memory;
        codes_query(&m->codes, q, c->dim, c->group, c->plain_scale, first + s->layout.codes,
                    m->directions);
    }
    for (uint32_t i = w->estimate; i < w->end_estimate; i++) {
        const uint32_t first = i * s->estimate_split;
        e.list = s->estimates + (size_t)w->entry * s->estimate_cap + first;
        e.n = min(w->n_entries - first, s->estimate_split);
        size_t at = w->k.partial + (size_t)(w->parts.estimate_slot + i) * c->group;
        estimate_split<DP, WHOLE>(c, &e, memory, c->part_o + at * DP, c->part_ml + at);
    }
}

/* The last CTA of a task ends it. */
template <int DP> __device__ void end_task(const struct attend_call *c, struct work *w)
{
    const uint32_t n = w->parts.n;
    if (!arrived_last(c->arrived + w->k.counter, w->k.n_items))
        return;
    w->parts.o = c->part_o + (size_t)w->k.partial * DP;
    w->parts.ml = c->part_ml + w->k.partial;
    for (uint32_t query = threadIdx.x / 32; query < n; query += CUDA_THREADS / 32) {
        if (w->lse == NULL) {
            fold_query<DP>(c, &w->parts, query, result_at(c, &w->k, query));
        } else {
            float lse = mass_of(&w->parts, query);
            if (threadIdx.x % 32 == 0)
                w->lse[query] = lse;
        }
    }
}

template <int DP, bool WHOLE>
__global__ void __launch_bounds__(CUDA_THREADS, few<DP>::CTAS)
    few_kernel(const __grid_constant__ struct attend_call c)
{
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ struct exchange x;
    __shared__ struct mask_ring masks;
    __shared__ uint32_t first_bad[DP];
    struct work w;
    struct tile_pages ids = {};
    const bool planned = blockIdx.x < c.set.n_items * c.set.n_rows * c.kv_heads;
    allow_next_kernel();
    if (!(planned ? find_planned<DP>(&c, &w, &ids) : find_listed(&c, &w, &ids))) {
        wait_for_kernel_before(); /* a later kernel relies on it */
        return;
    }
    if (planned && w.k.split < w.k.end_split)
        run_planned<DP, WHOLE>(&c, &w, &ids, memory, &masks);
    else if (w.k.split < w.k.end_split)
        run_splits<DP, WHOLE>(&c, &w, &ids, memory, &x, &masks, first_bad);
    else if (w.estimate < w.end_estimate)
        run_estimates<DP, WHOLE>(&c, &w, memory);
    if (w.k.fold == FOLD_LAST)
        end_task<DP>(&c, &w);
}

/* Launched while the kernel before it still runs, as far as the device knows how. */
template <int DP, bool WHOLE> void launch(struct cuda_backend *b, const struct attend_call *c)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3(c->set.n_items * c->set.n_rows * c->kv_heads + c->n_tasks);
    how.blockDim = dim3(CUDA_THREADS);
    how.dynamicSmemBytes = few<DP>::BYTES;
    how.stream = b->stream;
    how.attrs = &early;
    how.numAttrs = b->overlaps ? 1 : 0;
    cuda_ok(b, cudaLaunchKernelEx(&how, few_kernel<DP, WHOLE>, *c), "attend (few rows)");
}

} /* namespace */

void attend_run_few(struct cuda_backend *b, const void *params)
{
    const struct attend_call *c = (const struct attend_call *)params;
    attend_by_shape(c->dim, [=](auto s) { launch<s.DP, s.WHOLE>(b, c); });
}

void attend_prepare_few(void)
{
    attend_each_shape([](auto s) {
        (void)cudaFuncSetAttribute(few_kernel<s.DP, s.WHOLE>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize, few<s.DP>::BYTES);
        (void)cudaGetLastError(); /* attend_fits() says what the device cannot run */
    });
}

size_t attend_few_bytes(uint32_t dim)
{
    size_t bytes = 0;
    attend_by_shape(dim, [&](auto s) { bytes = few<s.DP>::BYTES + s.DP * sizeof(uint32_t); });
    return bytes + sizeof(struct exchange) + sizeof(struct mask_ring);
}
