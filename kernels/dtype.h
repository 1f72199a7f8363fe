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

/* e4m3 (fp8 of the Open Compute Project): a sign, 4 bits of exponent, 3 of fraction. Subnormals below
 * 2^-6, 448 at most, no infinity; NaN is 0x7f or 0xff. Each is a bf16 number and a f16 one. */
static inline float e4m3_to_f32(uint8_t b)
{
    union {
        uint32_t u;
        float f;
    } v;
    uint32_t mag = b & 0x7fu;
    if (mag == 0x7fu) {
        v.u = 0x7fc00000u;
    } else if (mag >= 8) {
        v.u = (mag << 20) + (120u << 23);
    } else {
        v.f = (float)mag * 0x1p-9f;
    }
    v.u |= (uint32_t)(b & 0x80u) << 24;
    return v.f;
}

/* Round to nearest even; beyond 448 (infinity too): 448; NaN: 0x7f. As cvt.rn.satfinite on a GPU. */
static inline uint8_t f32_to_e4m3(float f)
{
    union {
        float f;
        uint32_t u;
    } v;
    v.f = f;
    uint32_t sign = v.u >> 24 & 0x80u, mag = v.u & 0x7fffffffu, code;
    if (mag > 0x7f800000u)
        return 0x7f;
    if (mag < 0x3c800000u) { /* below 2^-6: adding 2^14 lets the FPU round at 2^-9 */
        v.u = mag;
        v.f += 0x1p14f;
        code = v.u - 0x46800000u;
    } else {
        code = ((mag + 0x7ffffu + (mag >> 20 & 1u)) >> 20) - (120u << 3);
        code = code < 0x7eu ? code : 0x7eu;
    }
    return (uint8_t)(sign | code);
}

float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f); /* round to nearest even */

#ifdef __cplusplus
}
#endif
#endif
