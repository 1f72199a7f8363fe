/* Attention of planned rows, and what `known` wants of them: all (row, KV head) entries of a set in one launch
 * that fills the GPU once.
 *
 * Every CTA counts what there is to do, in units: splits of pages and tail, splits of estimates, each with a
 * weight that is about its time. Units stand in a line, pages and tails of all entries before the estimates
 * of all; a CTA's share is a piece of it, as long as everybody's. So one sequence and sixty keep all SMs at work
 * to the end, whatever the lists' lengths are. Who runs a unit cannot be seen in a result: its partial result
 * has a place of its own, and who arrives last at an entry folds them from the first to the last.
 *
 * Copies run ahead of the sums through splits and entries, STAGES tiles of them, so that the pipeline is filled
 * once per CTA. Each warp has 16 rows of every tile and waits for its own pages alone (attend_warp.h).
 * Bound by HBM: K and V are read once. With one row it is a chain of latencies: counts, list, pages,
 * partial results. Op: attend, known. */
#include "kernels/cuda/attend_estimate.h"
#include "kernels/cuda/attend_last.h"
#include "kernels/cuda/attend_shape.h"
#include "kernels/cuda/attend_warp.h"

namespace
{

enum {
    ENTRIES = 16,       /* that a CTA describes at once */
    PAGE_WEIGHT = 4,    /* of a split of pages or tail */
    ESTIMATE_WEIGHT = 4 /* of a split of estimates */
};

template <int DP, int ROWS> struct planned {
    enum {
        TILE_BYTES = tile<DP, ROWS>::BYTES,
        STAGES = DP == 64 || ROWS & ROWS_FP8 ? 5 : 3,
        /* Warps meet in a tile's place, unless that is too small. */
        MEETING_BYTES = ROWS & ROWS_FP8 ? sizeof(struct warp_meeting<DP>) : 0,
        PAGE_BYTES = STAGES * TILE_BYTES * 2 + MEETING_BYTES,
        ESTIMATE_BYTES = sizeof(struct estimate_memory<DP>),
        BYTES = (int)PAGE_BYTES > (int)ESTIMATE_BYTES ? (int)PAGE_BYTES : (int)ESTIMATE_BYTES,
        CTAS = DP == 256 ? 1 : 2, /* per SM */
    };
};

/* An entry, as far as a CTA has to do with it: units [from, to) of its pages and tail or of its
 * estimates. */
struct entry {
    struct attend_task k;
    struct lane_pages pages;
    struct attend_parts parts;
    float *tail; /* of `known`: partial results of the tail go there; else NULL */
    float *lse;  /* of `known`: masses go there; else NULL */
    const uint32_t *records;
    uint32_t number, n_estimates, n_units, from, to;
    uint32_t
        end; /* of the splits in [from, to): an entry without any has a unit too, to be ended */
};

/* n units from `unit` of an entry on. */
struct share {
    uint32_t entry, unit, n;
};

/* What the warps of a CTA tell each other; masks as each warp copied them. */
template <int DP> struct planned_memory {
    struct query_rows<DP> queries;
    struct entry entries[ENTRIES];
    struct share shares[2];
    uint32_t sums[4][2], taken;
    uint32_t masks[5][4][2]; /* [stage][warp][half] */
};

/* ---- what there is to do ---- */

__device__ uint32_t splits_of(uint32_t positions, uint32_t split)
{
    return (positions + split - 1) / split;
}

/* Units of an entry; all 0: the lane has no plan, or the row is beyond the last. */
struct units {
    uint32_t first_end, n_first, n_table, table_run, n_entries, n_estimates;
    uint32_t row, pos, n_segments;
};

__device__ bool has_row(const struct attend_set *s, const struct cuda_row *row)
{
    return s->part == SET_ALL || (s->part == SET_SPILLED) == (row->spilled != 0);
}

__device__ struct units units_of(const struct attend_call *c, uint32_t e)
{
    const struct attend_set *s = &c->set;
    const struct cuda_row *row = &s->rows[e / c->kv_heads];
    struct units u = {};
    u.row = has_row(s, row) ? row->row : ~0u;
    u.pos = row->pos;
    u.n_segments = row->n_segments;
    if (c->lanes[e % c->kv_heads] >> LANE_CLASS_SHIFT != LANE_SPARSE || u.row == ~0u) {
        u.row = ~0u;
        return u;
    }
    u.first_end = s->lse != NULL
                      ? s->sink_rows
                      : min(s->n_pages[e] << c->page_shift, s->page_cap << c->page_shift);
    u.n_first = splits_of(u.first_end, CUDA_PLAN_SPLIT);
    u.n_table = splits_of(u.pos + 1 - u.n_segments * SEGMENT_ROWS, CUDA_PLAN_SPLIT);
    u.table_run = s->runs_tail ? u.n_table : 0;
    u.n_entries = s->estimate_cap > 0 ? min(s->n_estimates[e], s->estimate_cap) : 0;
    u.n_estimates = u.n_entries > 0 ? splits_of(u.n_entries, s->estimate_split) : 0;
    return u;
}

__device__ uint32_t page_units(const struct units *u)
{
    return u->row == ~0u ? 0 : max(u->n_first + u->table_run, 1u);
}

/* Shares of pages and of estimates of this CTA. */
template <int DP>
__device__ void find_shares(const struct attend_call *c, struct planned_memory<DP> *m)
{
    const uint32_t n = c->set.n_rows * c->kv_heads, lane = threadIdx.x % 32;
    const uint32_t each = (n + CUDA_THREADS - 1) / CUDA_THREADS;
    const uint32_t first = min(n, threadIdx.x * each), end = min(n, first + each);
    uint32_t sum[2] = {}, before[2], all[2] = {};
    for (uint32_t e = first; e < end; e++) {
        struct units u = units_of(c, e);
        sum[0] += page_units(&u);
        sum[1] += u.n_estimates;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        before[i] = sum[i];
#pragma unroll
        for (uint32_t d = 1; d < 32; d *= 2) {
            uint32_t x = __shfl_up_sync(~0u, before[i], d);
            before[i] += lane >= d ? x : 0;
        }
        if (lane == 31)
            m->sums[threadIdx.x / 32][i] = before[i];
        before[i] -= sum[i];
    }
    if (threadIdx.x < 2)
        m->shares[threadIdx.x].n = 0;
    __syncthreads();
#pragma unroll
    for (uint32_t w = 0; w < 4; w++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            before[i] += w < threadIdx.x / 32 ? m->sums[w][i] : 0;
            all[i] += m->sums[w][i];
        }
    const uint64_t line = (uint64_t)all[0] * PAGE_WEIGHT + (uint64_t)all[1] * ESTIMATE_WEIGHT;
    const uint32_t from = (uint32_t)(line * blockIdx.x / gridDim.x);
    const uint32_t to = (uint32_t)(line * (blockIdx.x + 1) / gridDim.x);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t weight = i == 0 ? PAGE_WEIGHT : ESTIMATE_WEIGHT;
        const uint32_t begin = i == 0 ? 0 : all[0] * PAGE_WEIGHT;
        const uint32_t a = from > begin ? min((from - begin + weight - 1) / weight, all[i]) : 0;
        const uint32_t b = to > begin ? min((to - begin + weight - 1) / weight, all[i]) : 0;
        if (a >= b || a < before[i] || a >= before[i] + sum[i])
            continue;
        uint32_t e = first, unit = a - before[i];
        for (;; e++) { /* the entry of ours that has unit a */
            struct units u = units_of(c, e);
            const uint32_t own = i == 0 ? page_units(&u) : u.n_estimates;
            if (unit < own)
                break;
            unit -= own;
        }
        m->shares[i] = {e, unit, b - a};
    }
    __syncthreads();
}

template <int DP>
__device__ void describe(const struct attend_call *c, uint32_t number, const struct units *u,
                         struct entry *e)
{
    const struct attend_set *s = &c->set;
    const uint32_t head = number % c->kv_heads;
    const struct cuda_row *row = &s->rows[number / c->kv_heads];
    const bool known = s->lse != NULL;
    struct attend_task k = {};
    k.row = u->row;
    k.n_rows = 1;
    k.pos = u->pos;
    k.head = (uint16_t)head;
    k.first_end = u->first_end;
    k.begin = u->n_segments * SEGMENT_ROWS;
    k.end = u->pos + 1;
    k.planned = 1;
    k.n_first = u->n_first;
    k.n_splits = u->n_first + u->table_run;
    k.partial = s->partial + number * s->n_slots * c->group;
    k.counter = s->counter + number;
    e->k = k;
    struct lane_pages pages = lane_pages_of(c, head, LANE_SPARSE);
    pages.table = row->blocks;
    pages.first = known ? row->blocks : s->pages + (size_t)number * s->page_cap;
    pages.masks = s->masks != NULL ? s->masks + (size_t)number * s->page_cap : NULL;
    pages.n_first = u->n_first;
    e->pages = pages;
    float *tail =
        s->tail != NULL ? s->tail + (size_t)number * attend_tail_floats(c->group, DP) : NULL;
    struct attend_parts p = {};
    p.o = c->part_o + (size_t)k.partial * DP;
    p.ml = c->part_ml + k.partial;
    p.n = c->group;
    p.n_first = u->n_first;
    p.n_table = u->n_table;
    p.n_estimates = u->n_estimates;
    p.table_slot = s->slots.pages;
    p.estimate_slot = s->slots.pages + s->slots.tail;
    p.tail_o = tail;
    p.tail_ml = (const float2 *)(tail + (size_t)CUDA_TAIL_SPLITS * c->group * DP);
    e->parts = p;
    e->tail = known ? tail : NULL;
    e->lse = known ? s->lse + (size_t)number * c->group : NULL;
    e->records = row->records;
    e->number = number;
    e->n_estimates = u->n_entries;
    e->n_units = page_units(u) + u->n_estimates;
}

/* The next ENTRIES entries of a share, or fewer; the share becomes what is left. All threads. */
template <int DP>
__device__ void take(const struct attend_call *c, struct share *sh, bool estimates,
                     struct planned_memory<DP> *m)
{
    __syncthreads(); /* nobody reads those before any more */
    if (threadIdx.x < 32) {
        const uint32_t lane = threadIdx.x, number = sh->entry + lane;
        struct units u = {};
        u.row = ~0u;
        if (lane < ENTRIES && number < c->set.n_rows * c->kv_heads)
            u = units_of(c, number);
        const uint32_t from = lane == 0 ? sh->unit : 0;
        const uint32_t own = (estimates ? u.n_estimates : page_units(&u)) - from;
        uint32_t before = own;
#pragma unroll
        for (uint32_t d = 1; d < ENTRIES; d *= 2) {
            uint32_t x = __shfl_up_sync(~0u, before, d);
            before += lane >= d ? x : 0;
        }
        before -= own;
        const uint32_t n = before < sh->n ? min(own, sh->n - before) : 0;
        if (lane < ENTRIES) {
            struct entry *e = &m->entries[lane];
            e->from = from;
            e->to = from + n;
            e->end = estimates ? e->to : min(e->to, u.n_first + u.table_run);
            if (n > 0)
                describe<DP>(c, number, &u, e);
        }
        const uint32_t all = __reduce_add_sync(~0u, n);
        if (lane == 0)
            m->taken = all;
    }
    __syncthreads();
    sh->n -= m->taken;
    sh->entry += ENTRIES;
    sh->unit = 0;
}

/* ---- pages and tails ---- */

/* Copies of tiles to come. */
struct ahead {
    uint32_t entry; /* ENTRIES: there are none */
    struct cursor u;
    struct tile_pages at;
};

template <int DP> __device__ void enter_entry(const struct planned_memory<DP> *m, struct ahead *a)
{
    while (a->entry < ENTRIES && m->entries[a->entry].from >= m->entries[a->entry].end)
        a->entry++;
    if (a->entry == ENTRIES)
        return;
    a->u.split = m->entries[a->entry].from;
    cursor_enter(&a->u, &m->entries[a->entry].k);
}

template <int DP, int ROWS>
__device__ void copy_next(struct planned_memory<DP> *m, struct ahead *a, uint32_t ring,
                          uint32_t stage)
{
    if (a->entry < ENTRIES) {
        const uint32_t to = ring + stage * planned<DP, ROWS>::TILE_BYTES * 2;
        const struct entry *e = &m->entries[a->entry];
        if (threadIdx.x % 32 < 2)
            m->masks[stage][threadIdx.x / 32][threadIdx.x % 32] =
                threadIdx.x % 32 == 0 ? a->at.masks[0] : a->at.masks[1];
        copy_tile<DP, ROWS>(&e->pages, &a->at, a->u.pos, a->u.end, to,
                            to + planned<DP, ROWS>::TILE_BYTES);
        a->u.pos += CUDA_TILE;
        if (a->u.pos >= a->u.end) {
            if (++a->u.split < e->end) {
                cursor_enter(&a->u, &e->k);
            } else {
                a->entry++;
                enter_entry(m, a);
            }
        }
        if (a->entry < ENTRIES)
            find_pages<true>(&m->entries[a->entry].pages, &a->u, &a->at);
    }
    copies_end_group();
}

/* Scores of rows that do not exist, or that a mask leaves out, become -infinity. */
__device__ void hide(uint32_t pos, uint32_t end, const uint32_t masks[2], uint32_t in_page,
                     float s[2][4])
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const uint32_t row = pos + j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2;
        if (row >= end || !(masks[j / 4] >> (row & in_page) & 1))
            s[j / 4][j % 4] = -INFINITY;
    }
}

/* Where the partial result of a split goes. */
template <int DP> struct place {
    float *o;
    float2 *ml;
};

template <int DP>
__device__ struct place<DP> place_of(const struct attend_call *c, const struct entry *e,
                                     uint32_t split) {
    struct place<DP> p;
    const uint32_t n = e->parts.n;
    if (e->tail != NULL && split >= e->k.n_first) {
        const uint32_t i = split - e->k.n_first;
        p.o = e->tail + (size_t)i * n * DP;
        p.ml = (float2 *)(e->tail + (size_t)CUDA_TAIL_SPLITS * n * DP) + (size_t)i * n;
        return p;
    }
    const uint32_t slot = split < e->k.n_first ? split : split - e->k.n_first + e->parts.table_slot;
    const size_t at = e->k.partial + (size_t)slot * n;
    p.o = c->part_o + at * DP;
    p.ml = c->part_ml + at;
    return p;
}

/* Whoever arrives last at an entry, having done so many of its units, ends it. */
template <int DP>
__device__ void arrive(const struct attend_call *c, const struct entry *e, uint32_t n_units)
{
    if (!arrived_last(c->arrived + e->k.counter, n_units, e->n_units))
        return;
    for (uint32_t query = threadIdx.x / 32; query < e->parts.n; query += CUDA_THREADS / 32) {
        if (e->lse == NULL) {
            fold_query<DP>(c, &e->parts, query, result_at(c, &e->k, query));
        } else {
            float lse = mass_of(&e->parts, query);
            if (threadIdx.x % 32 == 0)
                e->lse[query] = lse;
        }
    }
}

/* Runs the splits of the entries that were taken. */
template <int DP, int ROWS>
__device__ void run_pages(const struct attend_call *c, struct planned_memory<DP> *m, uint8_t *ring)
{
    constexpr int stages = planned<DP, ROWS>::STAGES,
                  stage_bytes = planned<DP, ROWS>::TILE_BYTES * 2;
    constexpr bool apart = planned<DP, ROWS>::MEETING_BYTES != 0;
    static_assert(apart || sizeof(struct warp_meeting<DP>) <= stage_bytes, "a tile's place");
    const uint32_t at = shared_address(ring), warp = threadIdx.x / 32;
    const uint32_t in_page = (1u << c->page_shift) - 1;
    struct ahead next = {};
    enter_entry(m, &next);
    const uint32_t first = next.entry;
    if (first < ENTRIES) {
        find_pages<true>(&m->entries[first].pages, &next.u, &next.at);
        copy_queries<DP, ROWS>(c, &m->entries[first].k, &m->queries);
    }
    copies_end_group();
#pragma unroll 1
    for (uint32_t i = 0; i < stages; i++)
        copy_next<DP, ROWS>(m, &next, at, i);
    copies_wait<stages>();
    uint32_t stage = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < ENTRIES; i++) {
        const struct entry *e = &m->entries[i];
        if (e->from == e->to)
            continue;
        uint32_t q[DP / 16][4];
        if (i > first && e->from < e->end) {
            copy_queries<DP, ROWS>(c, &e->k, &m->queries);
            copies_end_group();
            copies_wait<0>();
        }
        if (e->from < e->end) {
            __syncthreads();
            load_queries<DP, ROWS>(&m->queries, c->group, q);
        }
#pragma unroll 1
        for (struct cursor u = {e->from, 0, 0}; u.split < e->end; u.split++) {
            struct warp_sums<DP> sum;
            warp_clear<DP>(&sum);
            cursor_enter(&u, &e->k);
#pragma unroll 1
            for (; u.pos < u.end; u.pos += CUDA_TILE) {
                const uint32_t k_at = at + stage * stage_bytes, pos = u.pos + warp * 16;
                copies_wait<stages - 1>();
                __syncwarp(); /* this warp's rows are there */
                const uint32_t rows[2] = {m->masks[stage][warp][0], m->masks[stage][warp][1]};
                if (pos < u.end) {
                    float s[2][4];
                    uint32_t p[4];
                    warp_score<DP, ROWS>(q, k_at, s);
                    if (pos + 16 > u.end || (rows[0] & rows[1]) != ~0u)
                        hide(pos, u.end, rows, in_page, s);
                    warp_weigh<DP>(c->scale, s, &sum, p);
                    warp_add<DP, ROWS>(p, k_at + planned<DP, ROWS>::TILE_BYTES, &sum);
                }
                if (u.pos + CUDA_TILE >= u.end) {
                    struct place<DP> to = place_of<DP>(c, e, u.split);
                    uint8_t *meeting = ring + (apart ? stages : stage) * stage_bytes;
                    warp_meet<DP, ROWS>(&sum, e->parts.n, (struct warp_meeting<DP> *)meeting, to.o,
                                        to.ml);
                }
                __syncwarp(); /* none of this warp reads them any more */
                copy_next<DP, ROWS>(m, &next, at, stage);
                stage = stage + 1 == stages ? 0 : stage + 1;
            }
        }
        arrive<DP>(c, e, e->to - e->from);
    }
}

/* ---- estimates ---- */

template <int DP, int ROWS>
__device__ void run_estimates(const struct attend_call *c, const struct planned_memory<DP> *m,
                              uint8_t *memory)
{
    const struct attend_set *s = &c->set;
#pragma unroll 1
    for (uint32_t i = 0; i < ENTRIES; i++) {
        const struct entry *w = &m->entries[i];
        if (w->from == w->to)
            continue;
        struct estimates e;
        e.s = s;
        e.records = w->records;
        e.scores = s->scores + (size_t)w->number * c->group * s->stride;
        e.digests = s->records + (size_t)(c->lanes[w->k.head] & ((1u << LANE_CLASS_SHIFT) - 1)) *
                                     s->record_lane_bytes;
        if (s->coded) {
            const float *q = c->q + w->k.row * c->q_stride + (size_t)w->k.head * c->group * c->dim;
            const uint8_t *first = e.digests + (size_t)w->records[0] * s->record_bytes;
            codes_query(&((struct estimate_memory<DP> *)memory)->codes, q, c->dim, c->group,
                        c->plain_scale, first + s->layout.codes,
                        ((struct estimate_memory<DP> *)memory)->directions);
        }
#pragma unroll 1
        for (uint32_t j = w->from; j < w->to; j++) {
            const uint32_t first = j * s->estimate_split;
            e.list = s->estimates + (size_t)w->number * s->estimate_cap + first;
            e.n = min(w->n_estimates - first, s->estimate_split);
            size_t at = w->k.partial + (size_t)(w->parts.estimate_slot + j) * c->group;
            estimate_split<DP, (ROWS & ROWS_WHOLE) != 0>(c, &e, memory, c->part_o + at * DP,
                                                         c->part_ml + at);
        }
        arrive<DP>(c, w, w->to - w->from);
    }
}

template <int DP, int ROWS>
__global__ void __launch_bounds__(CUDA_THREADS, planned<DP, ROWS>::CTAS)
    planned_kernel(const __grid_constant__ struct attend_call c)
{
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ struct planned_memory<DP> m;
    allow_next_kernel();
    if (c.set.part == SET_RESIDENT)
        __threadfence(); /* forgets what L1 has from before the kernel in front of the copies */
    else
        wait_for_kernel_before();
    find_shares<DP>(&c, &m);
    struct share pages = m.shares[0], estimates = m.shares[1];
    while (pages.n > 0) {
        take<DP>(&c, &pages, false, &m);
        run_pages<DP, ROWS>(&c, &m, memory);
    }
    while (estimates.n > 0) {
        take<DP>(&c, &estimates, true, &m);
        run_estimates<DP, ROWS>(&c, &m, memory);
    }
    if (c.set.part == SET_RESIDENT)
        wait_for_kernel_before(); /* who comes behind this one waits for no other */
}

/* Launched while the kernel before it still runs, as far as the device knows how. */
template <int DP, int ROWS> void launch(struct cuda_backend *b, const struct attend_call *c)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3(min(c->set.n_units, (uint32_t)b->sms * planned<DP, ROWS>::CTAS));
    how.blockDim = dim3(CUDA_THREADS);
    how.dynamicSmemBytes = planned<DP, ROWS>::BYTES;
    how.stream = b->stream;
    how.attrs = &early;
    how.numAttrs = b->overlaps ? 1 : 0;
    cuda_ok(b, cudaLaunchKernelEx(&how, planned_kernel<DP, ROWS>, *c), "attend (planned rows)");
}

} /* namespace */

void attend_run_planned(struct cuda_backend *b, const void *params)
{
    const struct attend_call *c = (const struct attend_call *)params;
    attend_by_shape(c->dim, c->fp8, [=](auto s) { launch<s.DP, s.ROWS>(b, c); });
}

void attend_prepare_planned(void)
{
    attend_each_shape([](auto s) {
        (void)cudaFuncSetAttribute(planned_kernel<s.DP, s.ROWS>,
                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   planned<s.DP, s.ROWS>::BYTES);
        (void)cudaGetLastError(); /* attend_fits() says what the device cannot run */
    });
}

size_t attend_planned_bytes(uint32_t dim, bool fp8)
{
    size_t bytes = 0;
    attend_by_shape(dim, fp8, [&](auto s) { bytes = planned<s.DP, s.ROWS>::BYTES; });
    return bytes + sizeof(struct planned_memory<CUDA_MAX_DIM>);
}

uint32_t attend_planned_ctas(uint32_t dim)
{
    uint32_t n = 0;
    attend_by_shape(dim, false, [&](auto s) { n = planned<s.DP, s.ROWS>::CTAS; });
    return n;
}
