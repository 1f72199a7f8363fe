/* Resolve: pages become blocks in HBM. A RESIDENT row is a look-up per page; a SPILLED one goes through its
 * hot set, a CTA per lane, with the very results of kernels/core/hot_set.h: the same hits, the same slots,
 * the same victims for the same misses. What misses goes to a list that the next kernel copies (gather.cu).
 *
 * hot_touch walks pages and slots one after the other; here each warp has a stretch of them, counts what
 * lies in it, and after a sum over the warps knows the rank of everything it has. A page that the lane has
 * no slot for is an error that the host finds at its next sync. */
#include "kernels/core/resolve.h"
#include "kernels/cuda/plan.h"
#include "kernels/cuda/resolve.h"

#include <stdio.h>
#include <string.h>

namespace
{

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    SHARED_PAGES =
        1920, /* plans up to here keep their lists in shared memory: 47 KiB with the ages */
    AGE_BYTES = HOT_MAX_SLOTS + 1,
    IN_USE = 0xff,        /* as an age */
    FETCHED = 0x80000000, /* beside a slot: it missed */
};

struct resolve_call {
    const struct cuda_row *rows;
    const struct cuda_lane *lanes;                            /* [kv_heads] of the layer */
    uint32_t n_rows, kv_heads, page_cap, estimate_cap, layer; /* n_rows: as cuda_bucket has it */
    uint32_t *pages, *n_pages, *estimates, *n_estimates;
    const float *share;
    uint32_t light;  /* light misses may be estimated */
    uint32_t beside; /* RESIDENT rows are done */
    uint32_t *lists; /* [rows][heads][2][page_cap]; NULL: in shared memory */
    uint32_t *old;   /* light: [rows][heads][estimate_cap] */
    struct hot_fetch *jobs;
    uint32_t *n_jobs, *bad;    /* bad: layer + 1 of a plan that does not fit; the host's */
    struct gather_call gather; /* jobs NULL: nothing is SPILLED */
};

/* What a CTA knows of its lane. */
struct lane_work {
    struct hot_set h;
    uint32_t lane, n; /* n: pages */
    uint32_t *pages;  /* [n] as selected */
    uint32_t *slots;  /* [n] where they are or will be, FETCHED beside; HOT_NO_PAGE: nowhere */
    uint32_t *misses; /* [n_misses] which pages miss and are covered */
    uint8_t *ages;    /* [n_slots] */
};

struct lane_shared {
    uint32_t count[HOT_AGES + 1], sums[WARPS], n_missing, first_job;
    struct hot_cut cut;
};

/* The stretch of n things that a warp has, in whole rounds of 32. */
struct stretch {
    uint32_t begin, end;
};

__device__ struct stretch stretch_of(uint32_t n)
{
    uint32_t warp = threadIdx.x / 32, per = (n + THREADS - 1) / THREADS * 32;
    struct stretch s = {min(warp * per, n), min(warp * per + per, n)};
    return s;
}

__device__ uint32_t lanes_below(void)
{
    return (1u << threadIdx.x % 32) - 1;
}

/* The sum over warps before mine; *total: over all. The whole CTA calls. */
__device__ uint32_t sum_before(struct lane_shared *s, uint32_t mine, uint32_t *total)
{
    uint32_t before = 0, all = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        s->sums[threadIdx.x / 32] = mine;
    __syncthreads();
    for (uint32_t w = 0; w < WARPS; w++) {
        before += w < threadIdx.x / 32 ? s->sums[w] : 0;
        all += s->sums[w];
    }
    *total = all;
    return before;
}

/* hot_probe for a page. *covered: whether it could be brought in. */
__device__ uint32_t probe(struct lane_work *w, uint32_t page, uint32_t *age, bool *covered)
{
    size_t first = (size_t)w->lane * w->h.max_slots;
    const uint16_t *entry = hot_entry(&w->h, w->lane, page);
    uint32_t e = entry != NULL ? *entry : (uint32_t)HOT_NEVER;
    *covered = entry != NULL;
    *age = HOT_AGES - 1;
    if ((e & HOT_GHOST) && e != HOT_NEVER)
        *age = hot_age(hot_distance(w->h.epoch, e & ~(uint32_t)HOT_GHOST));
    if (e & HOT_GHOST)
        return HOT_NO_PAGE;
    *age = hot_age(hot_distance(w->h.epoch, hot_last_touch(&w->h, first + e)));
    w->h.slot_epoch[first + e] = (uint16_t)w->h.epoch;
    w->h.slot_flags[first + e] = HOT_IN_USE;
    return e;
}

/* Looks all pages up, counts, lists the misses that are covered. Returns how many these are;
 * s->n_missing: all. */
__device__ uint32_t probe_all(struct lane_work *w, struct lane_shared *s)
{
    struct stretch p = stretch_of(w->n);
    uint32_t mine = 0, total, missing = 0;
    for (uint32_t i = p.begin + threadIdx.x % 32; i < p.end; i += 32) {
        uint32_t age;
        bool covered;
        uint32_t slot = probe(w, w->pages[i], &age, &covered);
        atomicAdd(&s->count[age], 1);
        missing += slot == HOT_NO_PAGE;
        w->slots[i] = slot == HOT_NO_PAGE && covered ? (uint32_t)FETCHED : slot; /* to be set */
    }
    if (missing > 0)
        atomicAdd(&s->n_missing, missing);
    __syncwarp();
    for (uint32_t i = p.begin; i < p.end; i += 32) {
        uint32_t at = i + threadIdx.x % 32;
        mine += __popc(__ballot_sync(~0u, at < p.end && w->slots[at] == FETCHED));
    }
    uint32_t rank = sum_before(s, mine, &total);
    for (uint32_t i = p.begin; i < p.end; i += 32) {
        uint32_t at = i + threadIdx.x % 32;
        bool misses = at < p.end && w->slots[at] == FETCHED;
        uint32_t all = __ballot_sync(~0u, misses);
        if (misses)
            w->misses[rank + __popc(all & lanes_below())] = at;
        rank += __popc(all);
    }
    return total;
}

/* The lane's counters are this CTA's alone in a launch. */
__device__ void add_stats(struct lane_work *w, struct lane_shared *s)
{
    struct hot_lane_stats *stats = &w->h.stats[w->lane];
    for (uint32_t age = threadIdx.x; age < HOT_AGES; age += THREADS)
        if (s->count[age] > 0)
            stats->distance[age] += s->count[age];
    if (threadIdx.x == 0) {
        stats->hits += w->n - s->n_missing;
        stats->misses += s->n_missing;
    }
}

/* The ages of all slots, and how many have each; neighbours are often as old as each other. */
__device__ void list_ages(struct lane_work *w, struct lane_shared *s)
{
    size_t first = (size_t)w->lane * w->h.max_slots;
    for (uint32_t i = threadIdx.x & ~31u; i < w->h.n_slots; i += THREADS) {
        uint32_t slot = i + threadIdx.x % 32, age = IN_USE;
        if (slot < w->h.n_slots) {
            if (!(w->h.slot_flags[first + slot] & HOT_IN_USE))
                age = hot_slot_age(&w->h, first + slot);
            w->ages[slot] = (uint8_t)age;
        }
        uint32_t same = __match_any_sync(~0u, age);
        if (age != IN_USE && (same & lanes_below()) == 0)
            atomicAdd(&s->count[age], (uint32_t)__popc(same));
    }
}

/* As hot_find_cut has it, from the counts. The first warp; a lane has three ages, oldest first. */
__device__ void find_cut(struct lane_shared *s)
{
    enum { EACH = 3 };
    uint32_t lane = threadIdx.x, want = s->n_missing, sum = 0, c[EACH];
    for (uint32_t i = 0; i < EACH; i++) {
        uint32_t d = lane * EACH + i;
        c[i] = d <= HOT_AGES ? s->count[HOT_AGES - d] : 0;
        sum += c[i];
    }
    uint32_t before = sum;
    for (uint32_t d = 1; d < 32; d *= 2) {
        uint32_t other = __shfl_up_sync(~0u, before, d);
        before += lane >= d ? other : 0;
    }
    before -= sum;
    for (uint32_t i = 0; i < EACH; i++) {
        uint32_t d = lane * EACH + i;
        bool ends = d == HOT_AGES || before + c[i] >= want;
        if (d <= HOT_AGES && before < want && ends) {
            s->cut.age = HOT_AGES - d;
            s->cut.n_of_age = min(want - before, c[i]);
        }
        before += c[i];
    }
}

/* Victims in ascending order of slots take the misses in order of pages. Returns how many did. */
__device__ uint32_t replace(struct lane_work *w, struct lane_shared *s, uint32_t n_misses,
                            struct hot_fetch *jobs, uint32_t *n_jobs)
{
    const struct hot_cut cut = s->cut;
    struct stretch p = stretch_of(w->h.n_slots);
    uint32_t mine = 0, total; /* older slots, and in the high half those of the age of the cut */
    for (uint32_t i = p.begin; i < p.end; i += 32) {
        uint32_t slot = i + threadIdx.x % 32, age = slot < p.end ? w->ages[slot] : (uint32_t)IN_USE;
        mine += __popc(__ballot_sync(~0u, age != IN_USE && age > cut.age));
        mine += (uint32_t)__popc(__ballot_sync(~0u, age == cut.age)) << 16;
    }
    uint32_t before = sum_before(s, mine, &total);
    uint32_t n = min((total & 0xffff) + min(total >> 16, cut.n_of_age), n_misses);
    if (threadIdx.x == 0 && n > 0)
        s->first_job = atomicAdd(n_jobs, n);
    __syncthreads();
    uint32_t older = before & 0xffff, equal = before >> 16;
    for (uint32_t i = p.begin; i < p.end; i += 32) {
        uint32_t slot = i + threadIdx.x % 32, age = slot < p.end ? w->ages[slot] : (uint32_t)IN_USE;
        uint32_t olds = __ballot_sync(~0u, age != IN_USE && age > cut.age);
        uint32_t equals = __ballot_sync(~0u, age == cut.age);
        uint32_t my_older = older + __popc(olds & lanes_below());
        uint32_t my_equal = equal + __popc(equals & lanes_below());
        bool leaves = (olds >> threadIdx.x % 32 & 1) ||
                      ((equals >> threadIdx.x % 32 & 1) && my_equal < cut.n_of_age);
        uint32_t rank = my_older + min(my_equal, cut.n_of_age);
        older += __popc(olds);
        equal += __popc(equals);
        if (!leaves || rank >= n)
            continue;
        uint32_t at = w->misses[rank], page = w->pages[at];
        hot_replace(&w->h, w->lane, slot, page, hot_entry(&w->h, w->lane, page));
        w->slots[at] = slot | FETCHED;
        struct hot_fetch *f = &jobs[s->first_job + rank];
        f->lane = w->lane;
        f->from = w->h.dram_blocks[page];
        f->to = w->h.slot_blocks[slot];
    }
    return n;
}

/* hot_touch. false: a page has no slot. */
__device__ bool touch(struct lane_work *w, struct lane_shared *s, const struct resolve_call *c)
{
    for (uint32_t age = threadIdx.x; age <= HOT_AGES; age += THREADS)
        s->count[age] = 0;
    if (threadIdx.x == 0)
        s->n_missing = 0;
    __syncthreads();
    uint32_t n_misses = probe_all(w, s);
    add_stats(w, s);
    if (s->n_missing == 0)
        return true;
    __syncthreads();
    for (uint32_t age = threadIdx.x; age <= HOT_AGES; age += THREADS)
        s->count[age] = 0;
    __syncthreads();
    list_ages(w, s);
    __syncthreads();
    if (threadIdx.x < 32)
        find_cut(s);
    __syncthreads();
    uint32_t n = replace(w, s, n_misses, c->jobs, c->n_jobs);
    __syncthreads();
    return n == s->n_missing;
}

/* ---- light misses ---- */

__device__ uint32_t lower_bound(const uint32_t *list, uint32_t n, uint32_t value)
{
    uint32_t begin = 0;
    while (n > begin) {
        uint32_t middle = (begin + n) / 2;
        if (list[middle] < value)
            begin = middle + 1;
        else
            n = middle;
    }
    return begin;
}

/* resolve_merge: `light`, ascending, into the ascending list. */
__device__ void merge(uint32_t *list, uint32_t n_old, const uint32_t *light, uint32_t n_light,
                      uint32_t *old)
{
    for (uint32_t i = threadIdx.x; i < n_old; i += THREADS)
        old[i] = list[i];
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n_old; i += THREADS)
        list[i + lower_bound(light, n_light, old[i])] = old[i];
    for (uint32_t i = threadIdx.x; i < n_light; i += THREADS)
        list[i + lower_bound(old, n_old, light[i])] = light[i];
}

/* resolve_place where some misses may be estimated: at most `room`, the first ones. */
__device__ void place_light(const struct resolve_call *c, struct lane_work *w,
                            struct lane_shared *s, size_t at, float threshold, uint32_t room)
{
    struct stretch p = stretch_of(w->n);
    const float *share = c->share + at * c->page_cap;
    uint32_t *light = w->misses, mine = 0, total;
    for (uint32_t i = p.begin; i < p.end; i += 32) {
        uint32_t j = i + threadIdx.x % 32;
        mine += __popc(
            __ballot_sync(~0u, j < p.end && (w->slots[j] & FETCHED) && share[j] < threshold));
    }
    uint32_t rank = sum_before(s, mine, &total), n_light = min(total, room);
    for (uint32_t i = p.begin; i < p.end; i += 32) {
        uint32_t j = i + threadIdx.x % 32;
        bool is_light = j < p.end && (w->slots[j] & FETCHED) && share[j] < threshold;
        uint32_t all = __ballot_sync(~0u, is_light), my = rank + __popc(all & lanes_below());
        rank += __popc(all);
        if (is_light && my < room)
            light[my] = w->pages[j];
    }
    rank -= mine;
    __syncthreads(); /* no page is read any more */
    for (uint32_t i = p.begin; i < p.end; i += 32) {
        uint32_t j = i + threadIdx.x % 32;
        bool is_light = j < p.end && (w->slots[j] & FETCHED) && share[j] < threshold;
        uint32_t all = __ballot_sync(~0u, is_light), my = rank + __popc(all & lanes_below());
        rank += __popc(all);
        if (j < p.end && !(is_light && my < room))
            w->pages[j - min(my, room)] = w->h.slot_blocks[w->slots[j] & ~(uint32_t)FETCHED];
    }
    if (n_light == 0)
        return;
    uint32_t n_old = c->n_estimates[at];
    merge(c->estimates + at * c->estimate_cap, n_old, light, n_light,
          c->old + at * c->estimate_cap);
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    c->n_pages[at] = w->n - n_light;
    c->n_estimates[at] = n_old + n_light;
    w->h.stats[w->lane].light_misses += n_light;
}

/* ---- a lane ---- */

__device__ void resolve_spilled(const struct resolve_call *c, const struct cuda_row *r,
                                uint32_t lane, size_t at, uint8_t *dynamic)
{
    __shared__ struct lane_shared s;
    struct lane_work w;
    w.h = r->hot;
    w.lane = lane;
    w.n = c->n_pages[at];
    w.pages = c->pages + at * c->page_cap;
    w.ages = dynamic;
    w.slots =
        c->lists != NULL ? c->lists + at * 2 * c->page_cap : (uint32_t *)(dynamic + AGE_BYTES);
    w.misses = w.slots + c->page_cap;
    if (!touch(&w, &s, c)) {
        if (threadIdx.x == 0) {
            c->n_pages[at] = 0;
            *(volatile uint32_t *)c->bad = c->layer + 1;
        }
        return;
    }
    __syncthreads();
    uint32_t room = c->light && r->miss_threshold > 0 ? c->estimate_cap - c->n_estimates[at] : 0;
    if (room > 0 && s.n_missing > 0) {
        place_light(c, &w, &s, at, r->miss_threshold, room);
        return;
    }
    for (uint32_t i = threadIdx.x; i < w.n; i += THREADS)
        w.pages[i] = w.h.slot_blocks[w.slots[i] & ~(uint32_t)FETCHED];
}

/* A CTA per (plan row, KV head). Bound by latency: four dependent reads of tables to find the pages, and
 * where some miss 7 bytes of every slot. Op: resolve. */
__global__ void __launch_bounds__(THREADS)
    resolve_kernel(const __grid_constant__ struct resolve_call c)
{
    extern __shared__ __align__(16) uint8_t dynamic[];
    resolve_wait();
    const struct cuda_row *r = &c.rows[blockIdx.y];
    const struct cuda_lane lane = c.lanes[blockIdx.x];
    size_t at = (size_t)blockIdx.y * c.kv_heads + blockIdx.x;
    if (r->row == ~0u || lane.class_ != LANE_SPARSE)
        return;
    if (r->spilled) {
        resolve_spilled(&c, r, lane.index, at, dynamic);
        return;
    }
    if (c.beside)
        return;
    uint32_t *pages = c.pages + at * c.page_cap, n = c.n_pages[at];
    const block_id *blocks = r->blocks;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS)
        pages[i] = blocks[pages[i]];
}

} /* namespace */

struct cuda_resolver {
    uint32_t *counts;           /* [2] of jobs */
    uint32_t *bad, *bad_device; /* pinned; as the device sees it */
    struct hot_fetch *jobs;
    uint32_t *lists, *old;
    size_t jobs_bytes, lists_bytes, old_bytes;
    const uint32_t
        *copied; /* the lists of the last call, if pages of theirs are copied; else NULL */
};

static void run_resolve(struct cuda_backend *b, const void *params)
{
    const struct resolve_call *c = (const struct resolve_call *)params;
    struct cuda_launch l;
    size_t shared = AGE_BYTES + (c->lists == NULL ? 8 * (size_t)c->page_cap : 0);
    cuda_launch_early(b, &l, dim3(c->kv_heads, c->n_rows), THREADS,
                      c->gather.jobs != NULL ? shared : 0);
    if (cuda_ok(b, cudaLaunchKernelEx(&l.config, resolve_kernel, *c), "resolve") &&
        c->gather.jobs != NULL)
        gather_launch(b, &c->gather);
}

/* Lists for the lanes of SPILLED rows: sized by what a plan may hold, so that their addresses stay. */
static bool reserve_lists(struct cuda_backend *b, struct resolve_call *c)
{
    struct cuda_resolver *v = b->resolver;
    size_t lanes = (size_t)c->n_rows * c->kv_heads;
    if (!cuda_reserve(b, (void **)&v->jobs, &v->jobs_bytes, lanes * c->page_cap * sizeof *v->jobs))
        return false;
    if (c->page_cap > SHARED_PAGES &&
        !cuda_reserve(b, (void **)&v->lists, &v->lists_bytes, lanes * 2 * c->page_cap * 4))
        return false;
    if (c->light && !cuda_reserve(b, (void **)&v->old, &v->old_bytes, lanes * c->estimate_cap * 4))
        return false;
    c->jobs = v->jobs;
    c->lists = c->page_cap > SHARED_PAGES ? v->lists : NULL;
    c->old = c->light ? v->old : NULL;
    return true;
}

static void fill_gather(struct cuda_resolver *v, const struct kv_memory *kv, struct gather_call *g)
{
    g->jobs = v->jobs;
    g->n_jobs = v->counts;
    g->dram = (const uint8_t *)kv->dram[LANE_SPARSE];
    g->hbm = (uint8_t *)kv->hbm[LANE_SPARSE];
    g->block_bytes = kv->geo->block_bytes[LANE_SPARSE];
    g->page_bytes = kv->geo->page_bytes;
}

void cuda_resolve(struct backend *be, const struct resolve_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    struct cuda_resolver *v = b->resolver;
    const struct kv_geometry *g = a->kv->geo;
    struct resolve_call c;
    bool spilled = false, light = false;
    if (a->n_rows == 0)
        return;
    for (uint32_t i = 0; i < a->n_rows; i++) {
        spilled |= a->rows[i].hot != NULL;
        light |= a->rows[i].hot != NULL && a->rows[i].miss_threshold > 0;
    }
    memset(&c, 0, sizeof c);
    c.beside = cuda_plan_resolve(b, a);
    if (c.beside && !spilled)
        return;
    c.rows = cuda_rows(b, g, a->rows, a->n_rows, &c.n_rows, NULL);
    c.lanes = cuda_lanes(b, g);
    if (c.rows == NULL || c.lanes == NULL)
        return;
    c.lanes += (size_t)a->layer * g->kv_heads;
    c.kv_heads = g->kv_heads;
    c.page_cap = a->page_cap;
    c.estimate_cap = a->estimate_cap;
    c.pages = a->pages;
    c.n_pages = a->n_pages;
    c.estimates = a->estimates;
    c.n_estimates = a->n_estimates;
    c.share = a->share;
    c.layer = a->layer;
    c.light = light && resolve_may_estimate(a);
    c.n_jobs = v->counts;
    c.bad = v->bad_device;
    v->copied = spilled ? a->pages : NULL;
    if (spilled && !reserve_lists(b, &c))
        return;
    if (spilled)
        fill_gather(v, a->kv, &c.gather);
    cuda_do(b, run_resolve, &c, sizeof c);
}

bool resolve_copies(const struct cuda_backend *b, const uint32_t *pages)
{
    /* Without early launches attention would begin behind the copies anyway, on fewer SMs. */
    return b->overlaps && gather_leaves(b) >= (uint32_t)b->sms / 2 &&
           pages == b->resolver->copied && cuda_queued(b, run_resolve) != NULL;
}

void cuda_resolve_settle(struct cuda_backend *b)
{
    uint32_t bad = *(volatile uint32_t *)b->resolver->bad;
    if (bad == 0)
        return;
    *b->resolver->bad = 0;
    if (b->error == OK) {
        b->error = ERR_DEVICE;
        snprintf(b->text, sizeof b->text,
                 "layer %u: plans name more pages than their hot sets hold", bad - 1);
    }
}

status cuda_resolve_open(struct cuda_backend *b)
{
    struct cuda_resolver *v = (struct cuda_resolver *)mem_alloc(sizeof *v);
    b->resolver = v;
    if (!cuda_ok(b, cudaMalloc((void **)&v->counts, 256), "resolve") ||
        !cuda_ok(b, cudaMemset(v->counts, 0, 256), "resolve") ||
        !cuda_ok(b, cudaHostAlloc((void **)&v->bad, 64, cudaHostAllocMapped), "resolve") ||
        !cuda_ok(b, cudaHostGetDevicePointer((void **)&v->bad_device, v->bad, 0), "resolve"))
        return err(b->error, "%s", b->text);
    *v->bad = 0;
    return OK;
}

void cuda_resolve_close(struct cuda_backend *b)
{
    struct cuda_resolver *v = b->resolver;
    if (v == NULL)
        return;
    cudaFree(v->counts);
    cudaFreeHost(v->bad);
    cudaFree(v->jobs);
    cudaFree(v->lists);
    cudaFree(v->old);
    mem_free(v);
    b->resolver = NULL;
}
