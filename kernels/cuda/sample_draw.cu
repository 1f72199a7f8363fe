/* One row of logits: the greatest, a draw, logprobs. A block of SAMPLE_THREADS; all functions here are
 * called by all its threads, and results are the same in all.
 *
 * Filters keep a set of best tokens, and nearly always a small one: candidates are collected by a bound
 * on the logit that certainly holds all that can be kept, and a cut is found among them by radix selection
 * over the bits of the logit, three counting passes whatever the distribution. The draw then passes over
 * the whole row once more, in the order of ids: sums of stretches of it, a scan, and the stretch where the
 * number falls. */
#include "kernels/core/philox.h"
#include "kernels/cuda/sample.h"

namespace
{

enum {
    WARPS = SAMPLE_THREADS / 32,
    BUCKETS = 2048,    /* of a counting pass */
    STRETCHES = 2048,  /* partial sums of a row at most */
    STRETCH_MIN = 128, /* tokens of a stretch at least: 4 for each thread of a warp */
    UNIT_BITS = 40,    /* probabilities relative to the greatest are whole numbers of 2^-40 */
};

constexpr float greedy_below = 1e-5f;                 /* vLLM's bound on the temperature */
constexpr double top_p_slack = 1.0 - 1.0 / 1048576.0; /* as kernels/cpu/sample_filter.c */
constexpr float never = -INFINITY;

struct shared {
    uint64_t wide[WARPS];
    uint32_t narrow[WARPS], id[WARPS];
    float most[WARPS];
    uint64_t mass[BUCKETS]; /* also of stretches */
    uint32_t count[BUCKETS];
    uint64_t answer[2];
};

/* What a row is drawn from. */
struct view {
    const float *x;
    uint32_t n;
    float t, top;  /* y = x / t; the greatest y */
    float min_p;   /* tokens with a smaller probability, relative to the best, are out */
    uint32_t key;  /* and with a smaller key(y) */
    uint32_t tied; /* of those with just this key so many stay, by smaller id */
};

/* Unsigned integers in the order of the floats; -0 and 0 are one. */
__device__ uint32_t key_of(float x)
{
    uint32_t u = __float_as_uint(x + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

__device__ uint64_t mass_of(float y, float top)
{
    return (uint64_t)((double)expf(y - top) * (double)(1ull << UNIT_BITS));
}

__device__ float y_of(const struct view *v, uint32_t i)
{
    return __fdiv_rn(v->x[i], v->t);
}

/* ---- over the block ---- */

__device__ uint64_t sum_u64(struct shared *s, uint64_t v)
{
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(~0u, v, d);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        s->wide[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < WARPS; i++)
        v += s->wide[i];
    return v;
}

/* The best of what the threads have; id ~0: has none. */
__device__ void best_of_block(struct shared *s, float *x, uint32_t *id)
{
    for (int d = 16; d > 0; d /= 2) {
        float y = __shfl_xor_sync(~0u, *x, d);
        uint32_t other = __shfl_xor_sync(~0u, *id, d);
        if (peak_better(y, other, *x, *id)) {
            *x = y;
            *id = other;
        }
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        s->most[threadIdx.x / 32] = *x;
        s->id[threadIdx.x / 32] = *id;
    }
    __syncthreads();
    for (int i = 0; i < WARPS; i++)
        if (peak_better(s->most[i], s->id[i], *x, *id)) {
            *x = s->most[i];
            *id = s->id[i];
        }
}

__device__ struct peak find_peak(struct shared *s, const float *x, uint32_t n)
{
    struct peak p = {never, ~0u, 0};
    int nan = 0;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        float v = x[i];
        nan |= v != v;
        if (peak_better(v, i, p.max, p.id)) {
            p.max = v;
            p.id = i;
        }
    }
    best_of_block(s, &p.max, &p.id);
    p.nan = __syncthreads_or(nan) != 0;
    return p;
}

/* Of what was found part by part. */
__device__ struct peak fold_peaks(const struct peak *parts)
{
    struct peak p = parts[threadIdx.x % 32];
    static_assert(SAMPLE_PARTS == 32, "a lane each");
    peak_of_warp(&p);
    return p;
}

__device__ bool usable(struct peak p)
{
    return !p.nan && isfinite(p.max);
}

/* ---- filters ---- */

/* Ids with x >= least, in any order; how many. */
__device__ uint32_t collect(struct shared *s, const float *x, uint32_t n, float least,
                            uint32_t *ids)
{
    __syncthreads();
    if (threadIdx.x == 0)
        s->narrow[0] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
        if (x[i] >= least)
            ids[atomicAdd(&s->narrow[0], 1u)] = i;
    __syncthreads();
    return s->narrow[0];
}

/* ---- one warp ---- */

/* Inclusive sums over the lanes. */
__device__ uint64_t scan(uint64_t v)
{
    for (int d = 1; d < 32; d *= 2) {
        uint64_t below = __shfl_up_sync(~0u, v, d);
        v += threadIdx.x % 32 >= (uint32_t)d ? below : 0;
    }
    return v;
}

/* From the greatest bucket down until `want` is reached; s->answer: the bucket, and what lies above it.
 * Where rounding leaves the sum short: the last bucket that has anything. */
__device__ void walk_down(struct shared *s, bool masses, uint64_t above, uint64_t want)
{
    const uint32_t part = BUCKETS / 32, lane = threadIdx.x, first = BUCKETS - 1 - lane * part;
    __syncthreads();
    if (threadIdx.x < 32) {
        uint64_t own = 0;
        uint32_t last = ~0u;
        for (uint32_t i = 0; i < part; i++) {
            own += masses ? s->mass[first - i] : s->count[first - i];
            last = s->count[first - i] > 0 ? first - i : last;
        }
        uint64_t passed = above + scan(own) - own;
        uint32_t reached = __ballot_sync(~0u, passed + own >= want && last != ~0u);
        uint32_t filled = __ballot_sync(~0u, last != ~0u);
        uint32_t who = reached != 0 ? __ffs(reached) - 1 : 31 - __clz(filled);
        if (lane == who) {
            for (uint32_t b = first; b + 1 > last; b--) {
                uint64_t m = masses ? s->mass[b] : s->count[b];
                if (b == last || (s->count[b] > 0 && passed + m >= want)) {
                    last = b;
                    break;
                }
                passed += m;
            }
            s->answer[0] = last;
            s->answer[1] = passed;
        }
    }
    __syncthreads();
}

/* ---- cuts ---- */

__device__ bool leaves_in(const struct view *v, float y)
{
    return key_of(y) >= v->key && (v->min_p == 0 || expf(y - v->top) >= v->min_p);
}

/* The cut at which weights of candidates that v leaves, summed from the greatest key down, reach `want`.
 * masses: weights are probabilities; else 1 each, and all that tie with the last one stay. */
__device__ void find_cut(struct shared *s, struct view *v, const uint32_t *ids, uint32_t n_ids,
                         bool masses, uint64_t want)
{
    const uint32_t shifts[] = {21, 10, 0}, bits[] = {0x7ff, 0x7ff, 0x3ff};
    uint32_t prefix = 0, above_shift = 0, key = 0;
    uint64_t above = 0;
    for (int level = 0; level < 3; level++) {
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < BUCKETS; i += blockDim.x) {
            s->count[i] = 0;
            s->mass[i] = 0;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n_ids; i += blockDim.x) {
            float y = y_of(v, ids[i]);
            uint32_t k = key_of(y);
            if (!leaves_in(v, y) || (level > 0 && k >> above_shift != prefix))
                continue;
            atomicAdd(&s->count[k >> shifts[level] & bits[level]], 1u);
            if (masses)
                atomicAdd((unsigned long long *)&s->mass[k >> shifts[level] & bits[level]],
                          (unsigned long long)mass_of(y, v->top));
        }
        walk_down(s, masses, above, want);
        uint32_t b = (uint32_t)s->answer[0];
        above = s->answer[1];
        prefix = level == 0 ? b : prefix << (above_shift - shifts[level]) | b;
        above_shift = shifts[level];
        key = b;
    }
    uint64_t each = masses ? s->mass[key] / s->count[key] : 1;
    uint64_t need = each > 0 && want > above ? (want - above + each - 1) / each : 1;
    v->key = prefix;
    v->tied = !masses ? ~0u : need < 1 ? 1 : need < s->count[key] ? (uint32_t)need : s->count[key];
}

/* Candidates down to the depths below the best: how many, and their mass. */
struct depth {
    uint64_t n, mass;
};

__device__ struct depth measure(struct shared *s, const struct view *v, float depth)
{
    struct depth d = {0, 0};
    for (uint32_t i = threadIdx.x; i < v->n; i += blockDim.x) {
        float y = y_of(v, i);
        if (y < v->top - depth)
            continue;
        d.n++;
        d.mass += mass_of(y, v->top);
    }
    d.n = sum_u64(s, d.n);
    d.mass = sum_u64(s, d.mass);
    return d;
}

/* A bound on y that leaves all that the filters can keep: one nat less than measured. */
__device__ float bound_of(struct shared *s, const struct view *v, const struct sample_params *p,
                          uint64_t total)
{
    const float depths[] = {4, 9, 20};
    for (int i = 0; i < 3; i++) {
        if (p->min_p > 0 && expf(-(depths[i] - 1)) < 0.999f * p->min_p)
            return v->top - depths[i];
        if (p->min_p > 0 && p->top_k == 0)
            continue;
        struct depth d = measure(s, v, depths[i] - 1);
        bool enough = p->top_k > 0
                          ? d.n >= p->top_k
                          : p->min_p == 0 && (double)d.mass >= (double)p->top_p * (double)total;
        if (enough)
            return v->top - depths[i];
    }
    return never;
}

/* Mass and number of what v leaves, of candidates. */
__device__ struct depth left_of(struct shared *s, const struct view *v, const uint32_t *ids,
                                uint32_t n_ids)
{
    struct depth d = {0, 0};
    for (uint32_t i = threadIdx.x; i < n_ids; i += blockDim.x) {
        float y = y_of(v, ids[i]);
        if (!leaves_in(v, y))
            continue;
        d.n++;
        d.mass += mass_of(y, v->top);
    }
    d.n = sum_u64(s, d.n);
    d.mass = sum_u64(s, d.mass);
    return d;
}

__device__ void apply_filters(struct shared *s, struct view *v, const struct sample_params *p,
                              uint64_t total, uint32_t *ids)
{
    float bound = bound_of(s, v, p, total);
    /* x is compared: y = x / t rounds, so a little below */
    float x_least = bound * v->t - 1e-3f * (fabsf(bound * v->t) + 1);
    uint32_t n = collect(s, v->x, v->n, bound == never ? never : x_least, ids);
    v->min_p = p->min_p;
    struct depth left = left_of(s, v, ids, n);
    if (p->top_k > 0 && p->top_k < left.n) {
        find_cut(s, v, ids, n, false, p->top_k);
        left = left_of(s, v, ids, n);
    }
    if (p->top_p < 1) {
        /* of what min_p and top_k left: without them of everything, not of the candidates */
        uint64_t of = p->top_k > 0 || p->min_p > 0 ? left.mass : total;
        find_cut(s, v, ids, n, true, (uint64_t)((double)p->top_p * (double)of * top_p_slack));
    }
}

/* ---- the draw ---- */

/* Tokens of a stretch: a multiple of STRETCH_MIN, so that STRETCHES are enough. */
__device__ uint32_t stretch_of(uint32_t n)
{
    return (n + STRETCHES * STRETCH_MIN - 1) / (STRETCHES * STRETCH_MIN) * STRETCH_MIN;
}

__device__ uint64_t kept_mass(const struct view *v, uint32_t i, uint32_t *tie)
{
    float y = y_of(v, i);
    *tie = key_of(y) == v->key && v->tied != ~0u;
    return leaves_in(v, y) ? mass_of(y, v->top) : 0;
}

/* Per stretch: mass without limited ties in s->mass, their number in s->count. A warp per stretch. */
__device__ void sum_stretches(struct shared *s, const struct view *v, uint32_t stretch,
                              uint32_t n_stretches)
{
    uint32_t lane = threadIdx.x % 32;
    __syncthreads();
    for (uint32_t j = threadIdx.x / 32; j < n_stretches; j += WARPS) {
        uint64_t mass = 0;
        uint32_t ties = 0, end = min((j + 1) * stretch, v->n);
        for (uint32_t i = j * stretch + lane; i < end; i += 32) {
            uint32_t tie;
            uint64_t m = kept_mass(v, i, &tie);
            mass += tie ? 0 : m;
            ties += tie;
        }
        for (int d = 16; d > 0; d /= 2) {
            mass += __shfl_xor_sync(~0u, mass, d);
            ties += __shfl_xor_sync(~0u, ties, d);
        }
        if (lane == 0) {
            s->mass[j] = mass;
            s->count[j] = ties;
        }
    }
    __syncthreads();
}

/* One warp. The first `tied` ties become mass (s->count: how many of each stretch stay); then the stretch
 * in which `uniform` of the whole falls, and what lies before that, go to s->answer. */
__device__ void find_stretch(struct shared *s, const struct view *v, uint32_t n_stretches,
                             uint64_t tie_mass, double uniform)
{
    uint32_t part = (n_stretches + 31) / 32, lane = threadIdx.x;
    uint32_t first = min(lane * part, n_stretches), end = min(first + part, n_stretches);
    uint64_t ties = 0, own = 0;
    for (uint32_t j = first; j < end; j++)
        ties += s->count[j];
    uint64_t gone = scan(ties) - ties, left = v->tied > gone ? v->tied - gone : 0;
    uint32_t last = 0;
    for (uint32_t j = first; j < end; j++) {
        s->count[j] = (uint32_t)(s->count[j] < left ? s->count[j] : left);
        left -= s->count[j];
        s->mass[j] += s->count[j] * tie_mass;
        own += s->mass[j];
        last = s->mass[j] > 0 ? j + 1 : last;
    }
    uint64_t passed = scan(own), total = __shfl_sync(~0u, passed, 31);
    uint64_t at = (uint64_t)(uniform * (double)total);
    uint32_t beyond = __ballot_sync(~0u, passed > at), any = __ballot_sync(~0u, last > 0);
    uint32_t who = beyond != 0 ? __ffs(beyond) - 1 : 31 - __clz(any | 1);
    if (lane == who) {
        uint64_t before = passed - own;
        uint32_t j = first;
        for (; j + 1 < last && before + s->mass[j] <= at; j++)
            before += s->mass[j];
        s->answer[0] = j;
        s->answer[1] = at - before;
    }
    __syncwarp();
}

/* One warp: the token within the stretch. */
__device__ uint32_t find_token(const struct shared *s, const struct view *v, uint32_t stretch)
{
    uint32_t j = (uint32_t)s->answer[0], end = min((j + 1) * stretch, v->n), lane = threadIdx.x;
    uint32_t ties = s->count[j], last = j * stretch;
    uint64_t sum = 0;
    for (uint32_t i = j * stretch + lane; i - lane < end; i += 32) {
        uint32_t tie = 0;
        uint64_t m = i < end ? kept_mass(v, i, &tie) : 0;
        uint32_t tied = __ballot_sync(~0u, m > 0 && tie);
        if (tie && __popc(tied & ((1u << lane) - 1)) >= ties)
            m = 0;
        ties -= min(ties, (uint32_t)__popc(tied));
        uint64_t passed = sum + scan(m);
        uint32_t beyond = __ballot_sync(~0u, m > 0 && passed > s->answer[1]);
        uint32_t some = __ballot_sync(~0u, m > 0);
        if (beyond != 0)
            return i - lane + __ffs(beyond) - 1;
        if (some != 0)
            last = i - lane + 31 - __clz(some);
        sum = __shfl_sync(~0u, passed, 31);
    }
    return last;
}

__device__ float value_of_key(uint32_t key)
{
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ uint32_t draw(struct shared *s, const struct draw_row *r, const float *x, uint32_t n,
                         float max, uint32_t *ids)
{
    const struct sample_params *p = &r->params;
    struct view v = {x, n, p->temperature, __fdiv_rn(max, p->temperature), 0, 0, ~0u};
    bool filtered = p->min_p > 0 || p->top_p < 1 || (p->top_k > 0 && p->top_k < n);
    if (filtered) {
        uint64_t total =
            p->top_p < 1 && p->top_k == 0 && p->min_p == 0 ? measure(s, &v, INFINITY).mass : 0;
        apply_filters(s, &v, p, total, ids);
    }
    uint32_t stretch = stretch_of(n), n_stretches = (n + stretch - 1) / stretch;
    sum_stretches(s, &v, stretch, n_stretches);
    if (threadIdx.x < 32) {
        uint64_t tie_mass = v.tied != ~0u ? mass_of(value_of_key(v.key), v.top) : 0;
        find_stretch(s, &v, n_stretches, tie_mass, philox_uniform(p->seed, p->choice, r->position));
        uint32_t token = find_token(s, &v, stretch);
        if (threadIdx.x == 0)
            s->id[0] = token;
    }
    __syncthreads();
    return s->id[0];
}

/* ---- logprobs ---- */

__device__ void best_tokens(struct shared *s, const float *x, uint32_t n, float max, uint32_t want,
                            double lse, uint32_t *ids, struct drawn *d)
{
    const float depths[] = {3, 8, 20, INFINITY};
    uint32_t n_ids = 0;
    for (int i = 0; i < 4 && n_ids < want; i++)
        n_ids = collect(s, x, n, max - depths[i], ids);
    float bound = INFINITY; /* what was taken last */
    uint32_t bound_id = 0;
    for (uint32_t j = 0; j < want; j++) {
        float best = never;
        uint32_t id = ~0u;
        for (uint32_t i = threadIdx.x; i < n_ids; i += blockDim.x) {
            bool taken = j > 0 && !peak_better(bound, bound_id, x[ids[i]], ids[i]);
            if (!taken && peak_better(x[ids[i]], ids[i], best, id)) {
                best = x[ids[i]];
                id = ids[i];
            }
        }
        best_of_block(s, &best, &id);
        bound = best;
        bound_id = id;
        if (threadIdx.x == 0) {
            d->top[j].token = id;
            d->top[j].logprob = (float)((double)best - lse);
        }
    }
}

__device__ void score(struct shared *s, const struct draw_row *r, const float *x, uint32_t n,
                      float max, uint32_t token, uint32_t *ids, struct drawn *d)
{
    uint64_t mass = 0, above = 0;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        mass += mass_of(x[i], max);
        above += x[i] > x[token];
    }
    mass = sum_u64(s, mass);
    above = sum_u64(s, above);
    double lse = (double)max + log((double)mass / (double)(1ull << UNIT_BITS));
    if (threadIdx.x == 0) {
        d->logprob = (float)((double)x[token] - lse);
        d->rank = 1 + (uint32_t)above;
    }
    if (r->n_top > 0)
        best_tokens(s, x, n, max, (uint32_t)r->n_top, lse, ids, d);
}

/* Op: sample. */
__global__ void __launch_bounds__(SAMPLE_THREADS) draw_kernel(struct sample_call c)
{
    __shared__ struct shared s;
    const struct draw_row *r = &c.rows[blockIdx.x];
    sample_wait(); /* also of a block with nothing to do: a later kernel relies on it */
    if (r->host == NULL)
        return;
    struct drawn *d = &c.out[blockIdx.x];
    const float *raw = c.logits + (size_t)r->logits_row * c.vocab;
    uint32_t *ids = c.ids + (size_t)blockIdx.x * c.vocab;
    bool draws = r->target == SAMPLE_DRAW;
    struct peak first = fold_peaks(c.peaks + (size_t)blockIdx.x * SAMPLE_PARTS), peak = first;
    bool bad = !usable(first) || (!draws && r->target >= c.vocab);
    uint32_t token = draws ? 0 : r->target;
    const float *x = r->changed ? c.x + (size_t)blockIdx.x * c.vocab : raw;
    if (!bad && draws && r->changed) {
        peak = find_peak(&s, x, c.vocab);
        bad = !usable(peak);
    }
    if (!bad && draws)
        token =
            r->params.temperature < greedy_below ? peak.id : draw(&s, r, x, c.vocab, peak.max, ids);
    if (threadIdx.x == 0) {
        d->token = bad ? 0 : token;
        d->rank = 0;
        d->logprob = 0;
        d->bad = bad;
    }
    __syncthreads();
    if (!bad && (!draws || r->n_top >= 0))
        score(&s, r, raw, c.vocab, first.max, token, ids, d);
    __syncthreads();
    if (threadIdx.x < sizeof *d / 4)
        ((uint32_t *)r->host)[threadIdx.x] = ((const uint32_t *)d)[threadIdx.x];
}

} /* namespace */

bool sample_needs_ids(const struct draw_row *r, uint32_t vocab)
{
    const struct sample_params *p = &r->params;
    bool filtered = p->min_p > 0 || p->top_p < 1 || (p->top_k > 0 && p->top_k < vocab);
    bool draws = r->target == SAMPLE_DRAW && p->temperature >= greedy_below;
    return (draws && filtered) || r->n_top > 0;
}

void sample_launch(struct cuda_backend *b, const struct sample_call *c)
{
    struct cuda_launch how;
    cuda_launch_early(b, &how, dim3(c->n_rows), SAMPLE_THREADS, 0);
    cuda_ok(b, cudaLaunchKernelEx(&how.config, draw_kernel, *c), "sample");
}
