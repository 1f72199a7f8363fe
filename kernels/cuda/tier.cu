/* The DRAM arena: memory of the host that the device copies from and to at the speed of the bus, and that
 * kernels read (gather.cu). It must be pinned for that, which takes 0.24 s per GiB beside an H200, so a thread does it
 * behind the start: addresses are there at once, and [0, ready) of them may be used. Huge pages keep the
 * translation of addresses cheap on both sides.
 *
 * The thread begins when somebody first asks how far it is, which the engine does when it is ready: making pages holds
 * the lock of the process' addresses, and the driver, which loads kernels in the first steps, would wait 4 s for it.
 *
 * Pages are made first, outside of the driver, whose locks the engine needs in every step; what is left for
 * cudaHostRegister is short. A registered stretch is a thing of its own to the driver, so a copy is cut
 * where two meet.
 *
 * The engine thread owns all of it but what pin() says; `ready` and `ended` are how they talk. */
#include "kernels/cuda/cuda.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE \
    23 /* Linux 5.14; older ones refuse it, and registering makes the pages */
#endif

namespace
{

enum : size_t {
    HUGE_BYTES = 2u << 20,
    CHUNK_BYTES = 256u << 20, /* a registration, which stops launches for 5 ms (30 ms of 1 GiB) */
};

struct host_arena {
    struct host_arena *next;
    uint8_t *base;
    size_t bytes, mapped; /* mapped: whole huge pages */
    int device;
    pthread_t thread;
    bool began, has_thread;
    bool stop;     /* atomics from here on */
    size_t ready;  /* pinned */
    bool ended;    /* why is valid */
    char why[200]; /* "" : all of it is pinned */
};

} /* namespace */

struct cuda_tier {
    struct host_arena *arenas;
};

static double gib(size_t bytes)
{
    return (double)bytes / 1073741824.0;
}

static void give_up(struct host_arena *a, size_t at, const char *what)
{
    snprintf(
        a->why, sizeof a->why,
        "%s after %.1f of %.1f GiB were pinned: raise the limit of locked memory (ulimit -l), or "
        "give less --kv-dram",
        what, gib(at), gib(a->bytes));
}

/* The thread: chunk by chunk, until all is pinned, one fails or nobody wants it any more. */
static void *pin(void *arg)
{
    struct host_arena *a = (struct host_arena *)arg;
    (void)cudaSetDevice(a->device);
    for (size_t at = 0; at < a->mapped && !__atomic_load_n(&a->stop, __ATOMIC_RELAXED);) {
        size_t n = a->mapped - at < CHUNK_BYTES ? a->mapped - at : (size_t)CHUNK_BYTES;
        for (size_t i = 0; i < n && !__atomic_load_n(&a->stop, __ATOMIC_RELAXED); i += 64 << 20)
            if (madvise(a->base + at + i, n - i < 64 << 20 ? n - i : 64 << 20,
                        MADV_POPULATE_WRITE) != 0 &&
                errno == ENOMEM)
                break; /* registering will say so */
        if (__atomic_load_n(&a->stop, __ATOMIC_RELAXED))
            break;
        cudaError_t e =
            cudaHostRegister(a->base + at, n, cudaHostRegisterPortable | cudaHostRegisterMapped);
        if (e != cudaSuccess) {
            (void)cudaGetLastError();
            give_up(a, at, cudaGetErrorName(e));
            break;
        }
        at += n;
        __atomic_store_n(&a->ready, at < a->bytes ? at : a->bytes, __ATOMIC_RELEASE);
    }
    __atomic_store_n(&a->ended, true, __ATOMIC_RELEASE);
    return NULL;
}

/* Maps one huge page more than asked and gives the ends back, so that the start is aligned. */
static uint8_t *map_huge(size_t bytes)
{
    void *p = mmap(NULL, bytes + HUGE_BYTES, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    uint8_t *raw = (uint8_t *)p;
    size_t before = (HUGE_BYTES - (uintptr_t)raw % HUGE_BYTES) % HUGE_BYTES;
    if (before != 0)
        munmap(raw, before);
    munmap(raw + before + bytes, HUGE_BYTES - before);
    (void)madvise(raw + before, bytes, MADV_HUGEPAGE); /* refused: it is only slower */
    return raw + before;
}

void *cuda_alloc_host(struct backend *be, size_t bytes)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    size_t mapped = (bytes + !bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    int one_address = 0; /* of registered memory, for the host and the device */
    (void)cudaDeviceGetAttribute(&one_address, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                 b->device);
    if (!one_address) {
        err(ERR_DEVICE, "cuda: this device cannot read the host's memory at its own address: leave "
                        "--kv-dram 0");
        return NULL;
    }
    uint8_t *base = map_huge(mapped);
    if (base == NULL) {
        err(ERR_MEMORY, "cuda: no addresses for %.1f GiB of the host's memory", gib(bytes));
        return NULL;
    }
    struct host_arena *a = (struct host_arena *)mem_alloc(sizeof *a);
    a->base = base;
    a->bytes = bytes;
    a->mapped = mapped;
    a->device = b->device;
    a->next = b->tier->arenas;
    b->tier->arenas = a;
    return base;
}

static void begin_pinning(struct host_arena *a)
{
    a->began = true;
    a->has_thread = pthread_create(&a->thread, NULL, pin, a) == 0;
    if (!a->has_thread)
        (void)pin(a); /* at once, then */
}

static void unpin(struct host_arena *a)
{
    __atomic_store_n(&a->stop, true, __ATOMIC_RELAXED);
    if (a->has_thread)
        pthread_join(a->thread, NULL);
    size_t ready = a->ready == a->bytes ? a->mapped : a->ready;
    for (size_t at = 0; at < ready; at += CHUNK_BYTES)
        (void)cudaHostUnregister(a->base + at);
    munmap(a->base, a->mapped);
    mem_free(a);
}

void cuda_free_host(struct backend *be, void *p, size_t bytes)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    (void)bytes;
    if (p == NULL)
        return;
    cuda_flush(b);
    (void)cuda_ended(b, NULL, "waiting to free memory of the host");
    if (b->gone)
        return;
    for (struct host_arena **at = &b->tier->arenas; *at != NULL; at = &(*at)->next)
        if ((*at)->base == p) {
            struct host_arena *a = *at;
            *at = a->next;
            unpin(a);
            return;
        }
    CHECK(!"memory of alloc_host");
}

void cuda_host_progress(struct backend *be, const void *p, struct host_progress *out)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    struct host_arena *a = b->tier->arenas;
    while (a != NULL && a->base != p)
        a = a->next;
    CHECK(a != NULL);
    if (!a->began)
        begin_pinning(a);
    out->bytes = a->bytes;
    out->ended =
        __atomic_load_n(&a->ended, __ATOMIC_ACQUIRE); /* before ready: it grows no more then */
    out->ready = __atomic_load_n(&a->ready, __ATOMIC_ACQUIRE);
    out->why = out->ended && a->why[0] != '\0' ? a->why : NULL;
}

/* Bytes from p to the end of its registration; all of them where p is none of ours. */
static size_t stretch(const struct cuda_tier *t, const void *p, size_t bytes)
{
    for (const struct host_arena *a = t->arenas; a != NULL; a = a->next)
        if ((const uint8_t *)p >= a->base && (const uint8_t *)p < a->base + a->mapped) {
            size_t left = CHUNK_BYTES - (size_t)((const uint8_t *)p - a->base) % CHUNK_BYTES;
            return left < bytes ? left : bytes;
        }
    return bytes;
}

void cuda_tier_copy(struct cuda_backend *b, void *dst, const void *src, size_t bytes)
{
    uint8_t *to = (uint8_t *)dst;
    const uint8_t *from = (const uint8_t *)src;
    while (bytes > 0 && b->error == OK) {
        size_t n = stretch(b->tier, from, stretch(b->tier, to, bytes));
        cuda_ok(b, cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, b->stream), "copy");
        to += n;
        from += n;
        bytes -= n;
    }
}

status cuda_tier_open(struct cuda_backend *b)
{
    b->tier = (struct cuda_tier *)mem_alloc(sizeof *b->tier);
    return OK;
}

void cuda_tier_close(struct cuda_backend *b)
{
    if (b->tier == NULL)
        return;
    for (struct host_arena *a = b->tier->arenas, *next; a != NULL; a = next) {
        next = a->next;
        unpin(a);
    }
    mem_free(b->tier);
    b->tier = NULL;
}
