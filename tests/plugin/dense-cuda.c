/* Stands in for libspind_cuda.so where no GPU is: the CPU backend behind the name and the table of the
 * CUDA backend, without plug-ins and, unless asked for one, without a second tier: what a device lacks is
 * refused, or auto takes the CPU, and this shows it. With FAULT_* it is one that must be refused.
 *
 * STAND_IN_FAILS=N: from its N-th sync on the device is broken. STAND_IN_DRAM=N: it has a second tier, of
 * which each look finds N MiB more; with a minus before it, no more than that ever comes. */
#include "kernels/cuda_api.h"

#include <stdlib.h>

struct stand_in {
    struct backend base;
    struct backend *host;
    struct backend_ops ops;
    long n_syncs, fails_at, grows;           /* grows: bytes */
    struct host_progress dram[LANE_CLASSES]; /* of each arena */
    const void *arenas[LANE_CLASSES];
    int n_arenas, n_news;
};

#define HOST(be) (((struct stand_in *)(void *)(be))->host)

static void stand_in_close(struct backend *be)
{
    HOST(be)->ops->close(HOST(be));
    mem_free(be);
}

static const char *stand_in_describe(struct backend *be)
{
    (void)be;
    return "cuda: a stand-in";
}

static const char *stand_in_news(struct backend *be, bool *bad)
{
    struct stand_in *s = (struct stand_in *)(void *)be;
    *bad = true;
    return s->n_news++ == 0 ? "it only stands in" : NULL;
}

static uint64_t stand_in_memory(struct backend *be)
{
    (void)be;
    return 64u << 20;
}

static void *stand_in_alloc(struct backend *be, size_t bytes)
{
    return HOST(be)->ops->alloc(HOST(be), bytes);
}

static void stand_in_free(struct backend *be, void *p, size_t bytes)
{
    HOST(be)->ops->free(HOST(be), p, bytes);
}

static void stand_in_copy(struct backend *be, void *dst, const void *src, size_t bytes)
{
    HOST(be)->ops->copy(HOST(be), dst, src, bytes);
}

static void *stand_in_alloc_host(struct backend *be, size_t bytes)
{
    struct stand_in *s = (struct stand_in *)(void *)be;
    int i = s->n_arenas % LANE_CLASSES; /* one that measures the bus was given back before */
    void *p = stand_in_alloc(be, bytes);
    s->n_arenas++;
    s->dram[i] = (struct host_progress){.bytes = bytes};
    s->arenas[i] = p;
    return p;
}

static void stand_in_progress(struct backend *be, const void *p, struct host_progress *out)
{
    struct stand_in *s = (struct stand_in *)(void *)be;
    struct host_progress *d = s->dram;
    uint64_t more = (uint64_t)labs(s->grows);
    for (int i = 0; i < LANE_CLASSES; i++)
        d = s->arenas[i] == p ? &s->dram[i] : d;
    if (!d->ended) {
        d->ready = d->ready + more < d->bytes ? d->ready + more : d->bytes;
        d->ended = d->ready == d->bytes || s->grows < 0;
    }
    if (d->ended && d->ready < d->bytes)
        d->why = "no more could be pinned: raise the limit of locked memory (ulimit -l)";
    *out = *d;
}

static status stand_in_sync(struct backend *be)
{
    struct stand_in *s = (struct stand_in *)(void *)be;
    if (s->fails_at > 0 && ++s->n_syncs >= s->fails_at)
        return err(ERR_DEVICE, "cuda: a step: cudaErrorIllegalAddress (a stand-in)");
    return HOST(be)->ops->sync(HOST(be));
}

static status stand_in_weight_create(struct backend *be, const struct weight_desc *d,
                                     struct weight **out)
{
    return HOST(be)->ops->weight_create(HOST(be), d, out);
}

static void stand_in_weight_destroy(struct backend *be, struct weight *w)
{
    HOST(be)->ops->weight_destroy(HOST(be), w);
}

#define PASS(op)                                                             \
    static void stand_in_##op(struct backend *be, const struct op##_args *a) \
    {                                                                        \
        HOST(be)->ops->op(HOST(be), a);                                      \
    }
PASS(embed)
PASS(linear)
PASS(append)
PASS(attend)
PASS(sample)

static status stand_in_open(struct backend **out, const struct cuda_options *o)
{
    struct backend *host;
    if (o->device != 0)
        return err(ERR_DEVICE, "cuda: there is no device %d: the driver shows 1", o->device);
    TRY(cpu_backend_open(&host, &(struct cpu_options){.isa = "auto"}));
    struct stand_in *s = mem_alloc(sizeof *s);
    s->host = host;
    s->ops = (struct backend_ops){.name = "cuda",
                                  .act_bytes = host->ops->act_bytes,
                                  .step_rows = host->ops->step_rows,
                                  .step_seqs = host->ops->step_seqs,
                                  .close = stand_in_close,
                                  .describe = stand_in_describe,
                                  .news = stand_in_news,
                                  .alloc = stand_in_alloc,
                                  .free = stand_in_free,
                                  .copy = stand_in_copy,
                                  .sync = stand_in_sync,
                                  .memory = stand_in_memory,
                                  .weight_create = stand_in_weight_create,
                                  .weight_destroy = stand_in_weight_destroy,
                                  .weight_bytes = host->ops->weight_bytes,
                                  .embed = stand_in_embed,
                                  .linear = stand_in_linear,
                                  .append = stand_in_append,
                                  .attend = stand_in_attend,
                                  .sample = stand_in_sample};
    const char *fails = getenv("STAND_IN_FAILS"), *dram = getenv("STAND_IN_DRAM");
    s->fails_at = fails != NULL ? atol(fails) : 0;
    if (dram != NULL) {
        s->grows = atol(dram) << 20;
        s->ops.alloc_host = stand_in_alloc_host;
        s->ops.free_host = stand_in_free;
        s->ops.host_progress = stand_in_progress;
    }
    s->base.ops = &s->ops;
    *out = &s->base;
    return OK;
}

#ifdef FAULT_SYMBOL
#define spind_cuda_api some_other_name
#endif
#ifdef FAULT_ABI
#define ABI 99
#else
#define ABI CUDA_ABI
#endif
#ifdef FAULT_SIZE
#define OPS_BYTES 8
#else
#define OPS_BYTES sizeof(struct backend_ops)
#endif
extern const struct cuda_api spind_cuda_api;
const struct cuda_api spind_cuda_api = {ABI, OPS_BYTES, stand_in_open};
