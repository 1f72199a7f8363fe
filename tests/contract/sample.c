/* Sampling and scoring of the CPU backend, every instruction set. */
#include "kernels/cpu/cpu.h"
#include "tests/sample_cases.h"

static const char *const isa_names[] = {"scalar", "AVX2", "AVX-512"};

static struct cpu_backend open_isa(enum isa isa, uint32_t threads)
{
    struct cpu_backend b = {.isa = isa};
    CHECK(pool_create(&b.pool, threads, false) == OK);
    CHECK(cpu_sample_open(&b) == OK);
    return b;
}

static void close_isa(struct cpu_backend *b)
{
    cpu_sample_close(b);
    pool_destroy(b->pool);
}

static void run_cpu(const struct sampler *s, struct sample_row *r, uint32_t n, const float *logits,
                    uint32_t vocab)
{
    struct cpu_backend *b = s->with;
    cpu_sample(&b->base,
               &(struct sample_args){.logits = logits, .vocab = vocab, .n_rows = n, .rows = r});
}

int main(void)
{
    for (int i = ISA_SCALAR; i <= ISA_AVX512; i++) {
#if defined(__x86_64__)
        if (i == ISA_AVX512 && !__builtin_cpu_supports("avx512dq"))
            continue;
#endif
        struct cpu_backend two = open_isa((enum isa)i, 2), one = open_isa((enum isa)i, 1);
        sample_cases(&(struct sampler){isa_names[i], &two, run_cpu},
                     &(struct sampler){isa_names[i], &one, run_cpu});
        close_isa(&two);
        close_isa(&one);
    }
    return tap_done();
}
