/* Made-up weights (--load-format dummy): the same numbers on every backend, each from its place alone,
 * so that they are made where they will lie, in any order, by any number of threads.
 *
 * Uniform with a deviation of 1 / sqrt(cols): every linear layer keeps the size of what it is given, so
 * activations stay finite whatever the depth, scores of attention differ, and so do logits. (vLLM's
 * dummy weights are within 1e-3 of 0, which makes every attention flat.) */
#ifndef KERNELS_CORE_DUMMY_H
#define KERNELS_CORE_DUMMY_H

#include "kernels/core/core.h"

#include <math.h>

CORE_FN float dummy_scale(uint32_t cols)
{
    return sqrtf(3.0f / (float)cols);
}

/* Four numbers, 16 bits each: word i of a tensor. SplitMix64's i-th output. */
CORE_FN uint64_t dummy_word(uint64_t seed, uint64_t i)
{
    uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

CORE_FN uint64_t dummy_row_words(uint32_t cols)
{
    return ((uint64_t)cols + 3) / 4;
}

/* Number 0 .. 3 of a word, between -scale and scale. Only the last product rounds. */
CORE_FN float dummy_value(uint64_t word, uint32_t number, float scale)
{
    float bits = (float)(uint32_t)(word >> (16 * number) & 0xffff);
    return (bits - 32767.5f) * (scale * (1.0f / 32768.0f));
}

#endif
