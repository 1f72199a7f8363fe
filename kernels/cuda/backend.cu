/* The CUDA backend: opens the device, hands out its memory, and copies.
 *
 * Everything queues on one stream, so operations need no order of their own; `sync` waits for it and
 * reports the first error.
 *
 * The engine thread owns all of it. Another thread may have opened it: CUDA's current device belongs
 * to a thread and is 0 unless set, so every entry that may be a thread's first sets it. */
#include "kernels/cuda/layers.h"
#include "kernels/cuda/prefill.h"
#include "kernels/cuda_api.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- errors ---- */

bool cuda_ok(struct cuda_backend *b, cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return true;
    (void)cudaGetLastError(); /* else the next launch would be blamed */
    if (b->error == OK) {
        b->error = e == cudaErrorMemoryAllocation ? ERR_MEMORY : ERR_DEVICE;
        snprintf(b->text, sizeof b->text, "cuda: %s: %s (%s)", what, cudaGetErrorName(e),
                 cudaGetErrorString(e));
    }
    return false;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Whoever has operations in flight, or asks for more, hears of it: it does not heal. */
static void give_up(struct cuda_backend *b, const char *what)
{
    b->gone = true;
    b->error = ERR_DEVICE;
    snprintf(b->text, sizeof b->text,
             "cuda: %s: the GPU does not answer for %u s (--device-timeout): see nvidia-smi, and "
             "dmesg for Xid, then restart, or reset the GPU",
             what, b->patience_s);
}

/* Asks again and again, as cudaEventSynchronize does, so that nothing is noticed later; what takes a second anyway is
 * asked for now and then. What blocks inside the driver has no end: a launch into a full queue. */
bool cuda_ended(struct cuda_backend *b, cudaEvent_t event, const char *what)
{
    const struct timespec a_little = {0, 50000};
    cudaError_t e = cudaSuccess;
    double begin = 0, waited = 0;
    while (!b->gone && (e = event != NULL ? cudaEventQuery(event) : cudaStreamQuery(b->stream)) ==
                           cudaErrorNotReady) {
        waited = begin > 0 ? now() - begin : 0;
        begin = begin > 0 ? begin : now();
        if (waited > 1)
            nanosleep(&a_little, NULL);
        if (waited > b->patience_s)
            give_up(b, what);
    }
    if (begin > 0)
        (void)cudaGetLastError(); /* that it was not ready is none */
    return !b->gone && cuda_ok(b, e, what);
}

static void use_device(struct cuda_backend *b)
{
    cuda_ok(b, cudaSetDevice(b->device), "cudaSetDevice");
}

/* ---- memory ---- */

static double gib(size_t bytes)
{
    return (double)bytes / 1073741824.0;
}

/* Of a step: the text goes to the log and to whoever asks /health. */
static bool no_scratch(struct cuda_backend *b, size_t need)
{
    char what[192];
    size_t free_bytes = 0, total = 0;
    (void)cudaMemGetInfo(&free_bytes, &total);
    snprintf(what, sizeof what,
             "scratch of %.2f GiB where %.2f are free (give KV less by --gpu-memory-utilization or "
             "--kv-hbm, or steps fewer rows by --max-num-batched-tokens)",
             gib(need), gib(free_bytes));
    return cuda_ok(b, cudaErrorMemoryAllocation, what);
}

bool cuda_reserve(struct cuda_backend *b, void **p, size_t *have, size_t need)
{
    if (need <= *have)
        return true;
    if (*p != NULL) {
        cuda_flush(b);
        if (!cuda_ended(b, NULL, "waiting to grow scratch"))
            return false;
        cudaFree(*p);
        *p = NULL;
        *have = 0;
    }
    cudaError_t e = cudaMalloc(p, need);
    if (e != cudaSuccess)
        return e == cudaErrorMemoryAllocation ? no_scratch(b, need) : cuda_ok(b, e, "scratch");
    *have = need;
    return true;
}

/* Zeroed in stream order: nobody but the stream reads it. */
static void *cuda_alloc(struct backend *be, size_t bytes)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    void *p = NULL;
    size_t free_bytes = 0, total = 0;
    if (b->gone) {
        err(ERR_DEVICE, "%s", b->text);
        return NULL;
    }
    use_device(b);
    if (cudaMalloc(&p, bytes + !bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        (void)cudaMemGetInfo(&free_bytes, &total);
        err(ERR_MEMORY, "cuda: no memory for %zu bytes: %.2f of %.2f GiB are free", bytes,
            gib(free_bytes), gib(total));
        return NULL;
    }
    cuda_ok(b, cudaMemsetAsync(p, 0, bytes, b->stream), "clearing memory");
    return p;
}

static void cuda_free(struct backend *be, void *p, size_t bytes)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    (void)bytes;
    if (p == NULL || b->gone) /* to free would wait */
        return;
    use_device(b);
    cuda_flush(b);
    (void)cuda_ended(b, NULL, "waiting to free memory");
    if (b->gone)
        return;
    cuda_hot_settle(b, b->n_steps); /* statistics that were read from there */
    cuda_ok(b, cudaFree(p), "cudaFree");
}

static uint64_t cuda_memory(struct backend *be)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    size_t free_bytes = 0, total = 0;
    use_device(b);
    cuda_ok(b, cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
    return free_bytes;
}

struct copy_params {
    void *dst;
    const void *src;
    size_t bytes;
};

static void run_copy(struct cuda_backend *b, const void *params)
{
    const struct copy_params *p = (const struct copy_params *)params;
    cuda_ok(b, cudaMemcpyAsync(p->dst, p->src, p->bytes, cudaMemcpyDefault, b->stream), "copy");
}

static bool on_device(const void *p)
{
    struct cudaPointerAttributes at;
    bool known = cudaPointerGetAttributes(&at, p) == cudaSuccess;
    return known && at.type == cudaMemoryTypeDevice;
}

/* Between the tiers or to the host the copy runs where it stands in the queue: ordinary memory of the
 * host may change when the call has returned. */
static void cuda_copy(struct backend *be, void *dst, const void *src, size_t bytes)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    struct copy_params p = {dst, src, bytes};
    if (bytes == 0 || b->gone)
        return;
    if (on_device(dst) && on_device(src)) {
        cuda_do(b, run_copy, &p, sizeof p);
        return;
    }
    cuda_flush(b);
    cuda_tier_copy(b, dst, src, bytes);
}

static status take_error(struct cuda_backend *b)
{
    status st = b->error;
    if (!b->gone)
        b->error = OK;
    return st == OK ? OK : err(st, "%s", b->text);
}

static status cuda_sync(struct backend *be)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    use_device(b);
    cuda_step_end(b);
    cuda_layers_settle(b);
    cuda_resolve_settle(b);
    cuda_hot_settle(b, b->n_steps);
    while (cuda_sample_settle(b, b->n_steps, b->error == OK))
        ;
    return take_error(b);
}

static status cuda_wait(struct backend *be)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    use_device(b);
    uint64_t ended;
    if (!cuda_step_wait(b, &ended)) /* somebody has waited for everything */
        return take_error(b);
    cuda_hot_settle(b, ended);
    cuda_layers_settle(b);
    cuda_resolve_settle(b);
    while (cuda_sample_settle(b, ended, b->error == OK))
        ;
    return take_error(b);
}

static const char *cuda_describe(struct backend *be)
{
    return ((struct cuda_backend *)be)->description;
}

static const char *cuda_news(struct backend *be, bool *bad)
{
    return cuda_prefill_news((struct cuda_backend *)be, bad);
}

static void cuda_counts(struct backend *be, struct step_counts *out)
{
    cuda_step_counts(be, out);
    out->slow = cuda_prefill_slow((struct cuda_backend *)be);
}

/* ---- opening ---- */

static void cuda_close(struct backend *be)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    use_device(b);
    if (b->stream != NULL) /* what is still queued never runs */
        (void)cuda_ended(b, NULL, "waiting to close");
    if (b->gone) /* what it holds it keeps until the process ends: to free would wait */
        return;
    cuda_select_close(b);
    cuda_score_close(b);
    cuda_sample_close(b);
    cuda_prefill_close(b);
    cuda_seal_close(b);
    cuda_layers_close(b);
    cuda_attend_close(b);
    cuda_linear_close(b);
    cuda_resolve_close(b);
    cuda_hot_close(b);
    cuda_tier_close(b);
    cuda_step_close(b);
    if (b->stream != NULL)
        cudaStreamDestroy(b->stream);
    mem_free(b);
}

static uint32_t bucket_of_rows(uint32_t n)
{
    return (uint32_t)cuda_bucket(n);
}

static const struct backend_ops cuda_ops = {
    .name = "cuda",
    .act_bytes = sizeof(float),
    .step_rows = 8192,
    .step_seqs = 256,
    .loose = true, /* libraries choose their tiles by the number of rows */
    .keeps_fp8 = true,
    .close = cuda_close,
    .describe = cuda_describe,
    .news = cuda_news,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .copy = cuda_copy,
    .sync = cuda_sync,
    .submit = cuda_submit,
    .wait = cuda_wait,
    .bucket = bucket_of_rows,
    .counts = cuda_counts,
    .memory = cuda_memory,
    .alloc_host = cuda_alloc_host,
    .free_host = cuda_free_host,
    .host_progress = cuda_host_progress,
    .weight_create = cuda_weight_create,
    .weight_destroy = cuda_weight_destroy,
    .weight_bytes = cuda_weight_bytes,
    .embed = cuda_embed,
    .linear = cuda_linear,
    .append = cuda_append,
    .attend = cuda_attend,
    .layers = cuda_layers,
    /* The engine asks for these: without score every row attends everything. */
    .digest_bytes = cuda_digest_bytes,
    .seal = cuda_seal,
    .unpermute = cuda_unpermute,
    .score = cuda_score,
    .known_bytes = cuda_known_bytes,
    .known = cuda_known,
    .select = cuda_select,
    .resolve = cuda_resolve,
    .hot = cuda_hot_op,
    .sample = cuda_sample,
    .read = NULL, /* pages are not the host's to read */
};

static __global__ void nothing(void)
{
}

/* Which of the things that can be missing is. */
static status no_device(cudaError_t e)
{
    int driver = 0;
    (void)cudaGetLastError();
    (void)cudaDriverGetVersion(&driver);
    if (driver == 0)
        return err(ERR_DEVICE, "cuda: no NVIDIA driver answers (libcuda.so.1): install one, until "
                               "nvidia-smi shows the GPU");
    if (e == cudaErrorInsufficientDriver)
        return err(
            ERR_DEVICE,
            "cuda: the driver is for CUDA %d.%d, this library needs %d.%d: update the driver",
            driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    if (e == cudaErrorNoDevice || e == cudaSuccess)
        return err(ERR_DEVICE, "cuda: the driver shows no GPU: see nvidia-smi, and what "
                               "CUDA_VISIBLE_DEVICES leaves");
    return err(ERR_DEVICE, "cuda: %s (%s): see whether nvidia-smi shows the GPU",
               cudaGetErrorName(e), cudaGetErrorString(e));
}

static status check_device(int device, struct cudaDeviceProp *prop)
{
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0)
        return no_device(e);
    if (device < 0 || device >= n)
        return err(ERR_DEVICE, "cuda: there is no device %d: the driver shows %d", device, n);
    if ((e = cudaSetDevice(device)) != cudaSuccess ||
        (e = cudaGetDeviceProperties(prop, device)) != cudaSuccess)
        return no_device(e);
    struct cudaFuncAttributes a;
    if ((e = cudaFuncGetAttributes(&a, nothing)) == cudaErrorNoKernelImageForDevice)
        return err(ERR_DEVICE,
                   "cuda: this library has no code for %s (sm_%d%d), but for sm_" CUDA_ARCHS
                   ": make CUDA=1 CUDA_ARCHS=%d%d",
                   prop->name, prop->major, prop->minor, prop->major, prop->minor);
    return e == cudaSuccess ? OK : no_device(e);
}

static status open_parts(struct cuda_backend *b)
{
    if (!cuda_ok(b, cudaStreamCreate(&b->stream), "stream"))
        return err(b->error, "%s", b->text);
    TRY(cuda_step_open(b));
    TRY(cuda_linear_open(b));
    TRY(cuda_attend_open(b));
    TRY(cuda_layers_open(b));
    TRY(cuda_tier_open(b));
    TRY(cuda_hot_open(b));
    TRY(cuda_resolve_open(b));
    TRY(cuda_prefill_open(b));
    TRY(cuda_seal_open(b));
    TRY(cuda_score_open(b));
    TRY(cuda_select_open(b));
    return cuda_sample_open(b);
}

static status cuda_open(struct backend **out, const struct cuda_options *o)
{
    struct cudaDeviceProp prop;
    TRY(check_device(o->device, &prop));
    struct cuda_backend *b = (struct cuda_backend *)mem_alloc(sizeof *b);
    b->base.ops = &cuda_ops;
    b->device = o->device;
    b->sms = prop.multiProcessorCount;
    b->overlaps = prop.major >= 9;
    b->eager = o->eager;
    b->log = o->log;
    b->patience_s = o->patience_s > 0 ? o->patience_s : (uint32_t)CUDA_PATIENCE_S;
    status st = open_parts(b);
    if (st != OK) {
        cuda_close(&b->base);
        return st;
    }
    snprintf(b->description, sizeof b->description, "cuda: %.48s, sm_%d%d, %d SMs, %.1f GiB%s",
             prop.name, prop.major, prop.minor, b->sms, gib(prop.totalGlobalMem),
             b->eager ? ", no graphs" : "");
    *out = &b->base;
    return OK;
}

extern "C" __attribute__((visibility("default"))) const struct cuda_api spind_cuda_api;
const struct cuda_api spind_cuda_api = {CUDA_ABI, sizeof(struct backend_ops), cuda_open};
