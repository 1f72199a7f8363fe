/* Philox4x32-10: a counter-based random generator (Salmon, Moraes, Dror, Shaw, "Parallel random
 * numbers: as easy as 1, 2, 3", SC 2011). Four words come from a counter and a key alone, so a draw
 * depends on nothing but (seed, choice, position): not on the batch, on preemption or on threads.
 * Compiled as C and as CUDA: both backends draw the same integers. */
#ifndef KERNELS_CORE_PHILOX_H
#define KERNELS_CORE_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define PHILOX_FN static __host__ __device__ inline
#else
#define PHILOX_FN static inline
#endif

struct philox_words {
    uint32_t w[4];
};

PHILOX_FN struct philox_words philox_round(struct philox_words c, uint32_t k0, uint32_t k1)
{
    uint64_t a = (uint64_t)0xd2511f53u * c.w[0];
    uint64_t b = (uint64_t)0xcd9e8d57u * c.w[2];
    struct philox_words next = {{(uint32_t)(b >> 32) ^ c.w[1] ^ k0, (uint32_t)b,
                                 (uint32_t)(a >> 32) ^ c.w[3] ^ k1, (uint32_t)a}};
    return next;
}

PHILOX_FN struct philox_words philox4x32(struct philox_words counter, uint64_t key)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int i = 0; i < 10; i++) {
        counter = philox_round(counter, k0, k1);
        k0 += 0x9e3779b9u; /* the golden ratio and sqrt(3) - 1, as in the paper */
        k1 += 0xbb67ae85u;
    }
    return counter;
}

/* The uniform number in [0, 1), a multiple of 2^-53, that draws output token `position` of choice
 * `choice` of the request with this seed. */
PHILOX_FN double philox_uniform(uint64_t seed, uint32_t choice, uint32_t position)
{
    struct philox_words counter = {{choice, position, 0, 0}};
    struct philox_words r = philox4x32(counter, seed);
    uint64_t bits = ((uint64_t)(r.w[0] >> 5) << 26) | (r.w[1] >> 6);
    return (double)bits * (1.0 / 9007199254740992.0);
}

#endif
