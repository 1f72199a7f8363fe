/* Numbers that tests and their expectations make up alike. */
#ifndef TESTS_CUDA_NOISE_H
#define TESTS_CUDA_NOISE_H

#include <stdint.h>

static inline uint32_t hash(uint32_t a, uint32_t b)
{
    uint32_t x = a * 0x9e3779b1u ^ b * 0x85ebca6bu;
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    x ^= x >> 12;
    x *= 0x297a2d39u;
    return x ^ x >> 15;
}

/* In [-1, 1). */
static inline float noise(uint32_t a, uint32_t b)
{
    return (float)hash(a, b) / 2147483648.0f - 1.0f;
}

#endif
