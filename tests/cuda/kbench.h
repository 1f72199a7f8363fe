/* The line that every bench of a kernel prints, and `make kbench` collects into one table:
 *
 *     kbench KERNEL SHAPE US VALUE LIMIT SHARE%
 *     kbench attend B8/131072 258.3 4159GB/s 4275GB/s 97.3%
 *
 * Six words without spaces in them. US: median microseconds of one call, on data that is not in L2. VALUE
 * and LIMIT: what was reached and what the machine can, with the unit (GB/s or TFLOP/s), or "-" and a
 * time ("23us") where the limit is a latency. SHARE: VALUE / LIMIT, or the limit's time / US. What a call
 * moves or computes is counted as what it must, once: bytes that are read twice are not work. */
#ifndef TESTS_CUDA_KBENCH_H
#define TESTS_CUDA_KBENCH_H

#include <stdio.h>

/* What an H200 does, measured (DESIGN 7, reference/kernels.md): a copy in HBM; pages out of pinned DRAM by
 * loads of 16 CTAs; a large GEMM in bf16; cuDNN's causal prefill attention on contiguous K and V, 600 to 620. */
#define KBENCH_HBM_GBS      4275.0
#define KBENCH_PCIE_GBS     51.3
#define KBENCH_GEMM_TFLOPS  750.0
#define KBENCH_CUDNN_TFLOPS 610.0

/* bytes: what one call must move. */
static inline void kbench_bytes(const char *kernel, const char *shape, double us, double bytes,
                                double limit_gbs)
{
    double gbs = bytes / us / 1e3;
    printf("kbench %s %s %.2f %.0fGB/s %.0fGB/s %.1f%%\n", kernel, shape, us, gbs, limit_gbs,
           100 * gbs / limit_gbs);
    fflush(stdout);
}

/* flops: multiplications and additions of one call. */
static inline void kbench_flops(const char *kernel, const char *shape, double us, double flops,
                                double limit_tflops)
{
    double tflops = flops / us / 1e6;
    printf("kbench %s %s %.2f %.0fTFLOP/s %.0fTFLOP/s %.1f%%\n", kernel, shape, us, tflops,
           limit_tflops, 100 * tflops / limit_tflops);
    fflush(stdout);
}

/* A call that is latency alone: limit_us is what the least of its kind takes. */
static inline void kbench_time(const char *kernel, const char *shape, double us, double limit_us)
{
    printf("kbench %s %s %.2f - %.2fus %.1f%%\n", kernel, shape, us, limit_us, 100 * limit_us / us);
    fflush(stdout);
}

#endif
