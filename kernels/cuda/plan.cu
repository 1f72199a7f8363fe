/* The plans of a layer in one kernel: score (digests are centroids of pages of 16), select by shares of
 * probability, and resolve of RESIDENT rows; or the last two, of any scores of pages of 8 or 16. Score, select and
 * resolve as kernels of their own are for everything else; plans come out with the very same bits.
 *
 * A lane belongs to a cluster of up to 16 CTAs, each of which has a stretch of its pieces of 64 partitions, each
 * warp a stretch of these. Scores stay in registers: lane 4g + t of a warp has head t of partitions
 * 4g .. 4g + 3 of each 32, as the matrix instruction leaves them, and after the heads have agreed lane l has
 * the key of partition l.
 *
 * Bound by HBM where there is much to scan, else by latency: CTAs meet four or five times. They tell each other
 * greatest scores, then sums of exponentials, then how many keys lie in each of 512 bins; then everybody is told
 * the keys in the two bins that borders are in, and finds the borders and its own place in the lists
 * (plan_border.h). Sums are of whole numbers, so the cut into CTAs cannot be seen. */
#include "kernels/cuda/plan_border.h"

#include <string.h>

/* For the bench, which compares: how many of the three are one kernel at most: 1, 2, or 3. */
uint32_t cuda_plan_most = 3;

namespace
{

/* Without any score: the first ones, all alike, and no estimates. */
template <int P>
__device__ void take_first(struct plan_shared *s, const struct plan_call *c,
                           const struct plan_lane *l, uint32_t key[P * 2], struct border border[2],
                           uint32_t upto[2])
{
    const uint32_t lane = threadIdx.x % 32, n = l->n_pieces * PARTS - c->first;
    const uint32_t k = max(1u, min(l->selected, n));
    const uint32_t begin = (l->n_pieces + l->ranks - 1) / l->ranks * l->rank * PARTS;
#pragma unroll
    for (uint32_t j = 0; j < P * 2; j++) {
        uint32_t i = (l->first_piece + j / 2) * PARTS + j % 2 * 32 + lane;
        key[j] = j / 2 < l->n_warp && i >= c->first ? key_of(1.0f) : 0;
    }
    border[0].key = key_of(1.0f);
    border[0].end = c->first + k;
    border[1].key = 0xffffffffu;
    border[1].end = 0;
    upto[0] = begin > c->first ? min(begin - c->first, k) : 0;
    upto[1] = 0;
    if (threadIdx.x == 0) {
        s->k[0] = k;
        s->k[1] = 0;
        s->all_best = key_of(1.0f);
        if (l->rank == 0 && c->unscored != NULL)
            atomicAdd(c->unscored, 1u);
    }
    __syncthreads();
}

/* Which of a warp's keys are within the first border, and which only within the second: a bit per lane. */
template <int P>
__device__ void find_members(const struct plan_lane *l, const uint32_t key[P * 2],
                             const struct border border[2], bool estimates, uint32_t in[P * 2],
                             uint32_t out[P * 2])
{
#pragma unroll
    for (int j = 0; j < P * 2; j++) {
        const uint32_t i = (l->first_piece + j / 2) * PARTS + j % 2 * 32 + threadIdx.x % 32;
        in[j] = __ballot_sync(~0u, key[j] != 0 && is_within(&border[0], key[j], i));
        out[j] = 0;
        if (estimates)
            out[j] = __ballot_sync(~0u, key[j] != 0 && is_within(&border[1], key[j], i)) & ~in[j];
    }
}

/* Pages and estimates in ascending order. block: of partition j * 32 + lane. */
template <int W, int P>
__device__ void put_lists(struct plan_shared *s, const struct plan_call *c,
                          const struct plan_lane *l, const uint32_t key[P * 2],
                          const uint32_t block[P * 2], const struct border border[2],
                          const uint32_t upto[2])
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, below = (1u << lane) - 1;
    const bool estimates = s->k[1] > 0;
    uint32_t in[P * 2], out[P * 2], n = 0;
    find_members<P>(l, key, border, estimates, in, out);
#pragma unroll
    for (int j = 0; j < P * 2; j++)
        n += __popc(in[j]) + (__popc(out[j]) << 16);
    if (lane == 0)
        s->warp_n[warp] = n;
    __syncthreads();
    n = 0;
#pragma unroll
    for (uint32_t w = 0; w < W; w++)
        n += w < warp ? s->warp_n[w] : 0;
    uint32_t page = c->sink_pages + upto[0] + (n & 0xffff);
    uint32_t estimate = (upto[1] > upto[0] ? upto[1] - upto[0] : 0) + (n >> 16);
    const float best = rank_of(s->all_best), inverse = best > 0 ? 1.0f / best : 0.0f;
    uint32_t *const pages = c->pages + (size_t)l->lane * c->page_cap;
    float *const share = c->share + (size_t)l->lane * c->page_cap;
    uint32_t *const list = c->estimates + (size_t)l->lane * c->estimate_cap;
#pragma unroll
    for (int j = 0; j < P * 2; j++) {
        const uint32_t i = (l->first_piece + j / 2) * PARTS + j % 2 * 32 + lane;
        const uint32_t at = page + __popc(in[j] & below);
        if ((in[j] >> lane & 1) && at < c->page_cap) { /* more than that is the caller's fault */
            pages[at] = l->blocks != NULL ? block[j] : i;
            share[at] = rank_of(key[j]) * inverse;
        }
        if (out[j] >> lane & 1)
            list[estimate + __popc(out[j] & below)] = i;
        page += __popc(in[j]);
        estimate += __popc(out[j]);
    }
    if (l->rank != 0)
        return;
    for (uint32_t i = threadIdx.x; i < min(c->sink_pages, c->page_cap); i += W * 32) {
        pages[i] = l->blocks != NULL ? l->blocks[i] : i;
        share[i] = 1.0f;
    }
    if (threadIdx.x == 0) {
        c->n_pages[l->lane] = min(c->sink_pages + s->k[0], c->page_cap);
        c->n_estimates[l->lane] = estimates ? s->k[1] - s->k[0] : 0;
    }
}

/* ---- a lane ---- */

__device__ void clear(struct plan_shared *s)
{
    for (uint32_t i = threadIdx.x; i < BINS / 2; i += blockDim.x)
        s->hist[i] = 0;
    if (threadIdx.x < 2)
        s->own[threadIdx.x] = s->local_n[threadIdx.x] = 0;
    if (threadIdx.x == 0)
        s->own_best = 0;
}

/* That find registers: a thread has 8 numbers of each piece. */
constexpr uint32_t ctas_of_sm(uint32_t warps, uint32_t pieces)
{
    return (pieces > 4 ? 12 : 16) / warps;
}

/* W warps, each with up to P pieces, D of them in shared memory at a time; D = 0: their scores are in memory. Op:
 * score, select, resolve. */
template <int W, int P, int D>
__global__ void __launch_bounds__(W * 32, ctas_of_sm(W, P))
    plan_kernel(const __grid_constant__ struct plan_call c)
{
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ __align__(16) struct plan_shared s;
    const struct plan_lane l = lane_of<W>(&c);
    if (!l.exists || l.n_pieces == 0) {
        wait_for_kernel_before();
        if (l.exists && l.rank == 0 && threadIdx.x == 0)
            c.n_pages[l.lane] = c.n_estimates[l.lane] = 0;
        return;
    }
    clear(&s);
    open_rounds(&s, l.ranks);
    float x[P][2][4];
    if constexpr (D > 0)
        scan<P, D>(&c, &l, ring, x);
    else
        load<P>(&c, &l, x);
    allow_next_kernel(); /* behind its wait: what was appended is there for all that comes */
    const uint32_t lane = threadIdx.x % 32;
    float known = 0;
    if (c.known != NULL && lane % 4 < c.group)
        known = c.known[(size_t)l.lane * c.group + lane % 4];
    struct marks<P> m;
    mark<P>(&m, x);
    const uint32_t top = head_top<W, P>(&s, &l, x);
    const float shift = top > 0 ? -LOG2E * rank_of(top) : INFINITY;
    unsigned long long sum = head_sum<W, P>(&s, &l, shift, x);
    uint32_t most, key[P * 2], block[P * 2], upto[2];
    float factor = share_factor(&c, &l, top, sum, known, &most);
    make_keys<P>(&s, &c, &m, factor, most, x, key);
#pragma unroll
    for (uint32_t j = 0; j < P * 2; j++)
        block[j] = l.blocks != NULL && j / 2 < l.n_warp
                       ? l.blocks[(l.first_piece + j / 2) * PARTS + j % 2 * 32 + lane]
                       : 0;
    __syncthreads();
    const struct meeting meeting = meeting_of(ring, l.ranks);
    add_bins<W>(&s, &l, &meeting, TOLD_BINS);
    if (threadIdx.x < 64)
        find_place<W>(&s, &c, &l, threadIdx.x / 32);
    __syncthreads();
    struct border border[2];
    if (s.n_ranked == 0)
        take_first<P>(&s, &c, &l, key, border, upto);
    else
        find_borders<W, P>(&s, &l, key, most, ring, &meeting, border, upto);
    put_lists<W, P>(&s, &c, &l, key, block, border, upto);
}

/* ---- commands ---- */

enum { SM_SHARED = 228 << 10 };

typedef void plan_fn(struct plan_call);

struct shape {
    plan_fn *kernel;
    uint32_t warps;  /* of a CTA */
    uint32_t pieces; /* of a warp, at most */
    uint32_t depth;  /* of these in shared memory; 0: scores are read */
};

/* Eight warps, then four; small ones first. Eight pieces of a warp are not scanned here: `score` has more of them on
 * their way (1M tokens: 59 us as one kernel, 44 as two). */
const struct shape shapes[] = {
#define SHAPE(w, p, d)                \
    {                                 \
        plan_kernel<w, p, d>, w, p, d \
    }
    SHAPE(8, 1, 1), SHAPE(8, 2, 1), SHAPE(8, 4, 1), SHAPE(8, 1, 0), SHAPE(8, 2, 0),
    SHAPE(8, 4, 0), SHAPE(8, 8, 0), SHAPE(4, 1, 1), SHAPE(4, 2, 2), SHAPE(4, 2, 1),
    SHAPE(4, 4, 1), SHAPE(4, 1, 0), SHAPE(4, 2, 0), SHAPE(4, 4, 0), SHAPE(4, 8, 0),
#undef SHAPE
};

struct plan_command {
    struct plan_call c;
    uint32_t grid, shape;
};

size_t shared_of(const struct shape *s, uint32_t ranks)
{
    const size_t ring = (size_t)s->warps * s->depth * PIECE_BYTES, meeting = meeting_bytes(ranks);
    return ring > meeting ? ring : meeting;
}

void run_plan(struct cuda_backend *b, const void *params)
{
    const struct plan_command *m = (const struct plan_command *)params;
    const struct shape *s = &shapes[m->shape];
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attrs[2] = {};
    attrs[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attrs[0].val.programmaticStreamSerializationAllowed = 1;
    attrs[1].id = cudaLaunchAttributeClusterDimension;
    attrs[1].val.clusterDim.x = m->c.ranks;
    attrs[1].val.clusterDim.y = attrs[1].val.clusterDim.z = 1;
    config.gridDim = dim3(m->grid);
    config.blockDim = dim3(s->warps * 32);
    config.dynamicSmemBytes = shared_of(s, m->c.ranks);
    config.stream = b->stream;
    config.attrs = attrs;
    config.numAttrs = 1 + (m->c.ranks > 1);
    cuda_ok(b, cudaLaunchKernelEx(&config, s->kernel, m->c), "plan");
}

/* All CTAs at a time. */
bool fits(const struct cuda_backend *b, const struct shape *s, uint32_t ctas, uint32_t ranks,
          uint32_t per)
{
    const size_t of_cta = shared_of(s, ranks) + sizeof(struct plan_shared) + 1024;
    const uint32_t by_shared = (uint32_t)((size_t)SM_SHARED / of_cta);
    const uint32_t by_registers = ctas_of_sm(s->warps, s->pieces);
    return per <= s->warps * s->pieces &&
           ctas <= (uint32_t)b->sms * (by_registers < by_shared ? by_registers : by_shared);
}

/* CTAs of a lane, and what they look like: many where lanes are few, but no more in all than three to an SM; of eight
 * warps where an SM has one of them, else of four. scores: they are in memory. false: this is work for kernels that
 * pass over the device more than once. */
bool shape_of(const struct cuda_backend *b, struct plan_command *m, uint32_t lanes, uint32_t pieces,
              bool scores)
{
    const uint32_t sms = (uint32_t)b->sms;
    uint32_t ranks = 1;
    while (ranks < RANKS && pieces > ranks * 4 && lanes * ranks * 2 <= sms * 3)
        ranks *= 2;
    if (ranks == RANKS && (lanes * RANKS > sms || pieces <= RANKS * 4))
        ranks /= 2; /* a GPC has hardly more than 16 SMs */
    m->c.ranks = ranks;
    const uint32_t n = ARRAY_LEN(shapes), first = lanes * ranks <= sms ? 0 : n / 2;
    for (uint32_t j = 0; j < n; j++) {
        const uint32_t i = (first + j) % n;
        const struct shape *s = &shapes[i];
        m->shape = i;
        if ((s->depth == 0) == scores &&
            fits(b, s, lanes * ranks, ranks, (pieces + ranks - 1) / ranks))
            return true;
    }
    return false;
}

void fill(struct plan_call *c, const struct select_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    c->scores = (float *)a->scores;
    c->stride = a->stride;
    c->kv_heads = g->kv_heads;
    c->group = a->group;
    c->sum = a->reduce == REDUCE_SUM_PROB;
    c->pieces = a->desc.parts / PARTS;
    for (uint32_t rows = g->block_rows; rows > 1; rows /= 2)
        c->rows_log2++;
    c->sink_pages = (a->desc.sinks + g->block_rows - 1) / g->block_rows;
    c->first = c->sink_pages;
    c->known = a->known;
    c->page_cap = a->page_cap;
    c->estimate_cap = a->estimate_cap;
    c->pages = a->pages;
    c->n_pages = a->n_pages;
    c->estimates = a->estimates;
    c->n_estimates = a->n_estimates;
    c->unscored = a->unscored;
    c->share = a->share;
}

/* Digests instead of scores. */
void fill_scan(struct plan_call *c, const struct score_call *s)
{
    c->vectors = s->records + s->vectors;
    c->record_bytes = s->record_bytes;
    c->record_lane_bytes = s->record_lane_bytes;
    c->q = s->q;
    c->q_stride = s->q_stride;
    c->scale = s->scale;
    c->log_rows = s->log_rows;
}

/* Whether this kernel does what select would. */
bool takes(const struct select_args *a)
{
    for (uint32_t i = 0; i < a->n_rows; i++)
        if (a->rows[i].top_p < 1)
            return false;
    return a->group <= SCORE_HEADS && a->stride % 4 == 0 && (uintptr_t)a->scores % 16 == 0 &&
           a->map == MAP_PAGE && a->masks == NULL && a->desc.order != ORDER_KMEANS &&
           a->desc.parts % PARTS == 0 && a->desc.sinks < SEGMENT_ROWS &&
           (a->reduce == REDUCE_MAX_PROB || a->reduce == REDUCE_SUM_PROB);
}

/* ... and score, which is still to run. */
bool takes_score(const struct score_call *s, const struct select_args *a,
                 const struct cuda_row *rows)
{
    return s->rows == rows && s->stride == a->stride && s->group == a->group && s->four &&
           s->dim == DIM && s->parts == PARTS && a->desc.parts == PARTS && s->kinds == 1 &&
           s->codes == 0 && s->open == NULL && s->part_rows == SEGMENT_ROWS / PARTS;
}

} /* namespace */

bool cuda_plan_select(struct cuda_backend *b, const struct select_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    uint32_t rows = 0, segments = 0;
    struct plan_command m;
    if (!b->overlaps || cuda_plan_most < 2 || !takes(a))
        return false;
    const struct cuda_row *list = cuda_rows(b, g, a->rows, a->n_rows, &rows, &segments);
    const struct cuda_lane *places = cuda_lanes(b, g);
    if (list == NULL || places == NULL)
        return true; /* an error, which is noted */
    memset(&m, 0, sizeof m);
    m.c.rows = list;
    m.c.lanes = places + (size_t)a->layer * g->kv_heads;
    fill(&m.c, a);
    const uint32_t lanes = rows * g->kv_heads, pieces = segments * m.c.pieces;
    if (pieces * PARTS > (1u << 16) - (m.c.first == 0)) /* a bin counts to 2^16 - 1 */
        return false;
    const struct score_call *s = cuda_score_queued(b, a->scores);
    m.c.shift = pieces * PARTS > 16384 ? 18 : 19;
    if (s != NULL && cuda_plan_most > 2 && takes_score(s, a, list) &&
        shape_of(b, &m, lanes, pieces, false)) {
        fill_scan(&m.c, s);
        cuda_unqueue(b);
    } else if (!shape_of(b, &m, lanes, pieces, true)) {
        return false;
    }
    m.grid = lanes * m.c.ranks;
    cuda_do(b, run_plan, &m, sizeof m);
    return true;
}

bool cuda_plan_resolve(struct cuda_backend *b, const struct resolve_args *a)
{
    uint32_t rows = 0;
    struct plan_command *m = (struct plan_command *)cuda_queued(b, run_plan);
    if (m == NULL || m->c.pages != a->pages || m->c.page_cap != a->page_cap ||
        m->c.rows != cuda_rows(b, a->kv->geo, a->rows, a->n_rows, &rows, NULL))
        return false;
    m->c.resolves = 1;
    return true;
}

status cuda_plan_open(struct cuda_backend *b)
{
    for (size_t i = 0; b->overlaps && i < ARRAY_LEN(shapes); i++) {
        const void *kernel = (const void *)shapes[i].kernel;
        cuda_ok(b,
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)shared_of(&shapes[i], RANKS)),
                "shared memory of plans");
        cuda_ok(b, cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
                "clusters of plans");
        /* so that attention finds room beside it, and can come early */
        cuda_ok(b,
                cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared),
                "shared memory beside plans");
    }
    return b->error == OK ? OK : err(b->error, "%s", b->text);
}
