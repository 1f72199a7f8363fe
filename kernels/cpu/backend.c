/* The CPU backend: chooses the instruction set once, owns the thread pool, hands out memory.
 *
 * score and known wait for select (plan.c); everything else runs to its end inside the call, on the
 * pool. `sync` reports the first error. Everything here belongs to the engine thread. */
#include "kernels/cpu/cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    ALIGN_BYTES = 64,            /* a cache line, a zmm register */
    HUGE_BYTES = 2 * 1024 * 1024 /* from here on: own mapping, aligned to and made of huge pages */
};

static size_t round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Maps one huge page more than asked and gives the ends back, so that the start is aligned. */
static void *map_huge(size_t bytes)
{
    size_t len = round_up(bytes, HUGE_BYTES);
    if (len < bytes || len + HUGE_BYTES < len)
        return NULL;
    uint8_t *raw = mmap(NULL, len + HUGE_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        return NULL;
    size_t before = (HUGE_BYTES - (uintptr_t)raw % HUGE_BYTES) % HUGE_BYTES;
    if (before != 0)
        munmap(raw, before);
    munmap(raw + before + len, HUGE_BYTES - before);
    (void)madvise(raw + before, len, MADV_HUGEPAGE); /* refused: it is only slower */
    return raw + before;
}

static void *cpu_alloc(struct backend *be, size_t bytes)
{
    (void)be;
    void *p = NULL;
    if (bytes >= HUGE_BYTES)
        p = map_huge(bytes);
    else if (posix_memalign(&p, ALIGN_BYTES, round_up(bytes + !bytes, ALIGN_BYTES)) == 0)
        memset(p, 0, round_up(bytes + !bytes, ALIGN_BYTES));
    else
        p = NULL;
    if (p == NULL)
        err(ERR_MEMORY, "cpu: no memory for %zu bytes", bytes);
    return p;
}

static void cpu_free(struct backend *be, void *p, size_t bytes)
{
    cpu_plan_flush((struct cpu_backend *)be);
    if (p == NULL)
        return;
    if (bytes >= HUGE_BYTES)
        munmap(p, round_up(bytes, HUGE_BYTES));
    else
        free(p);
}

static void cpu_copy(struct backend *be, void *dst, const void *src, size_t bytes)
{
    cpu_plan_flush((struct cpu_backend *)be);
    if (bytes != 0)
        memcpy(dst, src, bytes);
}

static status cpu_sync(struct backend *be)
{
    struct cpu_backend *b = (struct cpu_backend *)be;
    cpu_plan_flush(b);
    status st = b->error;
    b->error = OK;
    return st;
}

static const char *cpu_describe(struct backend *be)
{
    return ((struct cpu_backend *)be)->description;
}

static void cpu_close(struct backend *be)
{
    struct cpu_backend *b = (struct cpu_backend *)be;
    cpu_sample_close(b);
    cpu_resolve_close(b);
    cpu_plan_close(b);
    cpu_known_close(b);
    cpu_select_close(b);
    cpu_score_close(b);
    cpu_seal_close(b);
    cpu_attend_close(b);
    cpu_linear_close(b);
    pool_destroy(b->pool);
    mem_free(b);
}

static const struct backend_ops cpu_ops = {
    .name = "cpu",
    .act_bytes = sizeof(float),
    .step_rows = 256,
    .step_seqs = 64,
    .keeps_fp8 = true,
    .close = cpu_close,
    .describe = cpu_describe,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .copy = cpu_copy,
    .sync = cpu_sync,
    .weight_create = cpu_weight_create,
    .weight_destroy = cpu_weight_destroy,
    .weight_bytes = cpu_weight_bytes,
    .embed = cpu_embed,
    .linear = cpu_linear,
    .append = cpu_append,
    .attend = cpu_attend,
    .resolve = cpu_resolve,
    .hot = cpu_hot,
    .digest_bytes = cpu_digest_bytes,
    .seal = cpu_seal,
    .unpermute = cpu_unpermute,
    .score = cpu_score,
    .known_bytes = cpu_known_bytes,
    .known = cpu_known,
    .select = cpu_select,
    .sample = cpu_sample,
    .read = cpu_read,
};

/* What the machine and its operating system can run; the built-in asks for both. */
static enum isa best_isa(void)
{
#if defined(__x86_64__)
    uint32_t a, b, c = 0, d; /* clang's built-in does not know F16C; AVX2 covers its registers */
    bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni"))
        return ISA_AVX512;
    if (avx2)
        return ISA_AVX2;
#endif
    return ISA_SCALAR;
}

static const char *const isa_titles[] = {"portable C", "AVX2", "AVX-512 VNNI"};

static status choose_isa(enum isa *out, const char *name)
{
    static const char *const names[] = {"scalar", "avx2", "avx512"};
    enum isa best = best_isa();
    if (name == NULL || strcmp(name, "auto") == 0) {
        *out = best;
        return OK;
    }
    for (uint32_t i = 0; i < ARRAY_LEN(names); i++) {
        if (strcmp(name, names[i]) != 0)
            continue;
        if (i > (uint32_t)best)
            return err(ERR_ARG, "cpu: this machine has no %s: its best is %s", isa_titles[i],
                       isa_titles[best]);
        *out = (enum isa)i;
        return OK;
    }
    return err(ERR_ARG, "cpu: unknown instruction set \"%s\": auto, avx512, avx2 or scalar", name);
}

status cpu_backend_open(struct backend **out, const struct cpu_options *o)
{
    struct cpu_backend *b = mem_alloc(sizeof *b);
    status st = choose_isa(&b->isa, o->isa);
    if (st == OK)
        st = pool_create(&b->pool, o->n_threads, o->pin);
    if (st == OK)
        st = cpu_linear_open(b);
    if (st == OK)
        st = cpu_attend_open(b);
    if (st == OK)
        st = cpu_resolve_open(b);
    cpu_codes_open(b);
    if (st == OK)
        st = cpu_seal_open(b);
    if (st == OK)
        st = cpu_score_open(b);
    if (st == OK)
        st = cpu_select_open(b);
    if (st == OK)
        st = cpu_known_open(b);
    if (st == OK)
        st = cpu_plan_open(b);
    if (st == OK)
        st = cpu_sample_open(b);
    b->base.ops = &cpu_ops;
    if (st != OK) {
        cpu_close(&b->base);
        return st;
    }
    uint32_t n = pool_threads(b->pool);
    snprintf(b->description, sizeof b->description, "cpu: %s, %u thread%s", isa_titles[b->isa], n,
             n == 1 ? "" : "s");
    *out = &b->base;
    return OK;
}
