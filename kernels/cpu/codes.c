/* Which kernels of row codes this machine runs, and the estimates of a task of attention. */
#include "kernels/cpu/codes.h"
#include "kernels/cpu/cpu.h"

void cpu_codes_open(struct cpu_backend *b)
{
    b->codes = &codes_scalar;
#if defined(__x86_64__)
    if (b->isa == ISA_AVX512)
        b->codes = &codes_avx512;
    else if (b->isa == ISA_AVX2)
        b->codes = &codes_avx2;
#endif
}
