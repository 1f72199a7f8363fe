/* Number formats of stored weights, with GGUF's type ids. A row of `n` numbers is n / block blocks.
 * Layouts: reference ggml formats; `kernels/cpu/dequant.c` holds the reference decoder. */
#ifndef KERNELS_DTYPE_H
#define KERNELS_DTYPE_H

#include "kernels/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/*        name      id  numbers/block  bytes/block */
#define DTYPE_LIST(X)                   \
    X(DTYPE_F32, "F32", 0, 1, 4)        \
    X(DTYPE_F16, "F16", 1, 1, 2)        \
    X(DTYPE_Q4_0, "Q4_0", 2, 32, 18)    \
    X(DTYPE_Q4_1, "Q4_1", 3, 32, 20)    \
    X(DTYPE_Q5_0, "Q5_0", 6, 32, 22)    \
    X(DTYPE_Q5_1, "Q5_1", 7, 32, 24)    \
    X(DTYPE_Q8_0, "Q8_0", 8, 32, 34)    \
    X(DTYPE_Q4_K, "Q4_K", 12, 256, 144) \
    X(DTYPE_Q6_K, "Q6_K", 14, 256, 210) \
    X(DTYPE_BF16, "BF16", 30, 1, 2)

enum dtype {
#define X(name, text, id, block, bytes) name = id,
    DTYPE_LIST(X)
#undef X
};

struct dtype_info {
    const char *name;
    enum dtype type;
    uint32_t block; /* numbers per block */
    uint32_t bytes; /* per block */
};

const struct dtype_info *dtype_find(uint32_t id); /* NULL: a type we do not read */
size_t dtype_row_bytes(enum dtype t, size_t n);   /* n is a multiple of the block */
/* Decodes n numbers (a multiple of the block) to float: the reference for every fast path. */
void dtype_decode(enum dtype t, const void *src, size_t n, float *dst);

static inline float bf16_to_f32(uint16_t h)
{
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)h << 16};
    return v.f;
}

/* Round to nearest even; NaN stays NaN. */
static inline uint16_t f32_to_bf16(float f)
{
    union {
        float f;
        uint32_t u;
    } v;
    v.f = f;
    if ((v.u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((v.u >> 16) | 0x40u);
    return (uint16_t)((v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16);
}

float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f); /* round to nearest even */

#ifdef __cplusplus
}
#endif
#endif
