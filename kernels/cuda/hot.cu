/* What the host has done to hot sets between steps: the functions of kernels/core/hot_set.h, a CTA per
 * lane. The end of a step is a command like any other; what happens now and then (a hot set grows, shrinks,
 * opens) runs where it stands in the queue, with headers by value.
 *
 * Statistics come down through pinned memory and are handed out when the stream is known to be done. */
#include "kernels/core/hot_run.h"
#include "kernels/cuda/resolve.h"

#include <string.h>

namespace
{

enum { THREADS = 256, FIRST_BYTES = 1 << 20 };

struct step_call {
    const struct hot_set *sets; /* [n_sets]; n_lanes 0 behind the last */
    uint32_t n_lanes, n_sets;
};

struct change_call {
    struct hot_set set, old;
    enum hot_kind kind;
    uint32_t begin, end;
};

/* Bound by HBM: a byte read per slot, and written where it was in use. Op: hot. */
__global__ void __launch_bounds__(THREADS) step_kernel(const __grid_constant__ struct step_call c)
{
    resolve_wait();
    const struct hot_set h = c.sets[blockIdx.y];
    if (blockIdx.x < h.n_lanes)
        hot_step(&h, blockIdx.x, threadIdx.x, THREADS);
}

__global__ void __launch_bounds__(THREADS)
    change_kernel(const __grid_constant__ struct change_call c)
{
    hot_run_lane(c.kind, &c.set, &c.old, c.begin, c.end, blockIdx.x, threadIdx.x, THREADS);
}

/* Statistics on their way to the host. */
struct arrival {
    void *to;
    uint32_t *arrived;
    size_t at, bytes; /* in `pinned` */
    uint64_t step;
};

} /* namespace */

struct cuda_hot {
    uint8_t *pinned;
    size_t pinned_bytes, used;
    struct arrival *arrivals;
    size_t n_arrivals, max_arrivals;
};

static void run_step(struct cuda_backend *b, const void *params)
{
    const struct step_call *c = (const struct step_call *)params;
    struct cuda_launch l;
    cuda_launch_early(b, &l, dim3(c->n_lanes, c->n_sets), THREADS, 0);
    cuda_ok(b, cudaLaunchKernelEx(&l.config, step_kernel, *c), "end of a step of hot sets");
}

static void end_step(struct cuda_backend *b, const struct hot_args *a)
{
    enum { AT_ONCE = 32 };
    struct step_call c;
    for (uint32_t first = 0; first < a->n_sets; first += AT_ONCE) {
        struct hot_set list[AT_ONCE + AT_ONCE / 4];
        uint32_t n = a->n_sets - first < AT_ONCE ? a->n_sets - first : (uint32_t)AT_ONCE;
        memset(&c, 0, sizeof c);
        memset(list, 0, sizeof list);
        for (uint32_t i = 0; i < n; i++) {
            memcpy(&list[i], a->sets[first + i], sizeof list[i]);
            c.n_lanes = list[i].n_lanes > c.n_lanes ? list[i].n_lanes : c.n_lanes;
        }
        c.n_sets = (uint32_t)cuda_bucket(n);
        c.sets = (const struct hot_set *)cuda_stage(b, list, c.n_sets * sizeof *list);
        if (c.sets != NULL)
            cuda_do(b, run_step, &c, sizeof c);
    }
}

static void change(struct cuda_backend *b, const struct hot_args *a)
{
    struct change_call c;
    memset(&c, 0, sizeof c);
    c.set = *a->sets[0];
    c.kind = a->kind;
    c.begin = a->begin;
    c.end = a->end;
    if (a->old != NULL)
        c.old = *a->old;
    cuda_flush(b);
    change_kernel<<<c.set.n_lanes, THREADS, 0, b->stream>>>(c);
    cuda_launched(b, "a change of a hot set");
}

void cuda_hot_settle(struct cuda_backend *b, uint64_t step)
{
    struct cuda_hot *t = b->hot;
    size_t n = 0; /* in the order of steps */
    for (; n < t->n_arrivals && t->arrivals[n].step <= step; n++) {
        memcpy(t->arrivals[n].to, t->pinned + t->arrivals[n].at, t->arrivals[n].bytes);
        ++*t->arrivals[n].arrived;
    }
    t->n_arrivals -= n;
    if (t->n_arrivals > 0)
        memmove(t->arrivals, t->arrivals + n, t->n_arrivals * sizeof *t->arrivals);
    else
        t->used = 0;
}

/* Room for bytes; where there is none, what is under way has to arrive first. */
static bool room_for(struct cuda_backend *b, size_t bytes)
{
    struct cuda_hot *t = b->hot;
    if (t->pinned_bytes - t->used >= bytes)
        return true;
    size_t want = t->pinned_bytes > 0 ? 2 * t->pinned_bytes : (size_t)FIRST_BYTES;
    while (want < bytes)
        want *= 2;
    if (!cuda_ended(b, NULL, "statistics of hot sets"))
        return false;
    cuda_hot_settle(b, b->n_steps);
    cudaFreeHost(t->pinned);
    t->pinned = NULL;
    t->pinned_bytes = 0;
    if (!cuda_ok(b, cudaMallocHost((void **)&t->pinned, want), "pinned memory for statistics"))
        return false;
    t->pinned_bytes = want;
    return true;
}

static void read_stats(struct cuda_backend *b, const struct hot_args *a)
{
    struct cuda_hot *t = b->hot;
    const struct hot_set *h = a->sets[0];
    size_t bytes = h->n_lanes * sizeof *h->stats;
    cuda_flush(b);
    if (!room_for(b, bytes) || !cuda_ok(b,
                                        cudaMemcpyAsync(t->pinned + t->used, h->stats, bytes,
                                                        cudaMemcpyDeviceToHost, b->stream),
                                        "statistics of hot sets"))
        return;
    if (t->n_arrivals == t->max_arrivals) {
        size_t max = t->max_arrivals > 0 ? 2 * t->max_arrivals : 64;
        t->arrivals = (struct arrival *)mem_grow(t->arrivals, t->max_arrivals * sizeof *t->arrivals,
                                                 max * sizeof *t->arrivals);
        t->max_arrivals = max;
    }
    t->arrivals[t->n_arrivals++] = {a->to, a->arrived, t->used, bytes, b->n_steps};
    t->used += (bytes + 63) / 64 * 64;
}

void cuda_hot_op(struct backend *be, const struct hot_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    if (b->gone)
        return;
    switch (a->kind) {
    case HOT_STEP: end_step(b, a); break;
    case HOT_READ: read_stats(b, a); break;
    case HOT_FILL:
        cuda_flush(b);
        cuda_ok(b, cudaMemsetAsync(a->leaf, 0xff, a->leaf_bytes, b->stream), "a leaf");
        break;
    default: change(b, a); break;
    }
}

status cuda_hot_open(struct cuda_backend *b)
{
    b->hot = (struct cuda_hot *)mem_alloc(sizeof *b->hot);
    return OK;
}

void cuda_hot_close(struct cuda_backend *b)
{
    if (b->hot == NULL)
        return;
    cudaFreeHost(b->hot->pinned);
    mem_free(b->hot->arrivals);
    mem_free(b->hot);
    b->hot = NULL;
}
