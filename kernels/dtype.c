/* Stored number formats: their table and the reference decoder every fast path is tested against.
 *
 * Blocks are read with memcpy: 18-, 20-, 22- and 34-byte blocks leave their scales only 2-byte
 * aligned. In every 32-number nibble format the low nibbles are numbers 0..15 and the high ones
 * 16..31. Each value is one product and at most one sum in f32, in the order ggml computes them, so
 * packed forms that keep the same factors decode to the same bits. */
#include "kernels/dtype.h"

#include <string.h>

static const struct dtype_info infos[] = {
#define X(id, text, number, block, bytes) {text, id, block, bytes},
    DTYPE_LIST(X)
#undef X
};

const struct dtype_info *dtype_find(uint32_t id)
{
    for (size_t i = 0; i < ARRAY_LEN(infos); i++)
        if ((uint32_t)infos[i].type == id)
            return &infos[i];
    return NULL;
}

size_t dtype_row_bytes(enum dtype t, size_t n)
{
    const struct dtype_info *info = dtype_find(t);
    CHECK(info != NULL && n % info->block == 0);
    return n / info->block * info->bytes;
}

float f16_to_f32(uint16_t h)
{
    union {
        uint32_t u;
        float f;
    } v;
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, mag = h & 0x7fffu;
    if (mag >= 0x7c00u) { /* infinity or NaN */
        v.u = sign | 0x7f800000u | (mag & 0x3ffu) << 13;
    } else if (mag >= 0x400u) {
        v.u = sign | ((mag << 13) + (112u << 23));
    } else { /* subnormal: mag * 2^-24 is exact */
        v.f = (float)mag * 0x1p-24f;
        v.u |= sign;
    }
    return v.f;
}

uint16_t f32_to_f16(float f)
{
    union {
        float f;
        uint32_t u;
    } v = {f};
    uint32_t sign = v.u >> 16 & 0x8000u, mag = v.u & 0x7fffffffu;
    if (mag > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (mag >> 13 & 0x1ffu));
    if (mag >= 0x477ff000u) /* rounds to 65536 or more */
        return (uint16_t)(sign | 0x7c00u);
    if (mag < 0x38800000u) { /* below 2^-14: adding 0.5 lets the FPU round at 2^-24 */
        v.u = mag;
        v.f += 0.5f;
        return (uint16_t)(sign | (v.u - 0x3f000000u));
    }
    return (uint16_t)(sign | ((mag - (112u << 23) + 0xfffu + (mag >> 13 & 1u)) >> 13));
}

static float read_f16(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return f16_to_f32(h);
}

static void decode_q4(const uint8_t *b, bool has_min, float *y)
{
    float d = read_f16(b), m = has_min ? read_f16(b + 2) : 0;
    const uint8_t *qs = b + (has_min ? 4 : 2);
    int zero = has_min ? 0 : 8;
    for (int j = 0; j < 16; j++) {
        y[j] = d * (float)((qs[j] & 15) - zero) + m;
        y[j + 16] = d * (float)((qs[j] >> 4) - zero) + m;
    }
}

static void decode_q5(const uint8_t *b, bool has_min, float *y)
{
    float d = read_f16(b), m = has_min ? read_f16(b + 2) : 0;
    const uint8_t *qs = b + (has_min ? 8 : 6);
    int zero = has_min ? 0 : 16;
    uint32_t qh;
    memcpy(&qh, qs - 4, sizeof qh);
    for (int j = 0; j < 16; j++) {
        int lo = (qs[j] & 15) | (int)(qh >> j & 1) << 4;
        int hi = (qs[j] >> 4) | (int)(qh >> (j + 16) & 1) << 4;
        y[j] = d * (float)(lo - zero) + m;
        y[j + 16] = d * (float)(hi - zero) + m;
    }
}

static void decode_q8_0(const uint8_t *b, float *y)
{
    float d = read_f16(b);
    for (int j = 0; j < 32; j++)
        y[j] = d * (float)(int8_t)b[2 + j];
}

/* 256 numbers as 8 sub-blocks of 32; 6-bit scales and minima packed into 12 bytes. */
static void decode_q4_k(const uint8_t *b, float *y)
{
    float d = read_f16(b), dmin = read_f16(b + 2);
    const uint8_t *s = b + 4, *qs = b + 16;
    for (int j = 0; j < 8; j++) {
        int sc = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        int mn = j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4;
        float scale = d * (float)sc, min = dmin * (float)mn;
        const uint8_t *q = qs + 32 * (size_t)(j / 2);
        for (int l = 0; l < 32; l++)
            y[32 * j + l] = scale * (float)(j & 1 ? q[l] >> 4 : q[l] & 15) - min;
    }
}

/* 256 numbers as two halves of 128; 4 low and 2 high bits apart; a signed scale per 16. */
static void decode_q6_k(const uint8_t *b, float *y)
{
    float d = read_f16(b + 208);
    for (size_t h = 0; h < 2; h++, y += 128) {
        const uint8_t *ql = b + 64 * h, *qh = b + 128 + 32 * h;
        const int8_t *sc = (const int8_t *)(b + 192 + 8 * h);
        for (size_t part = 0; part < 4; part++) {
            for (size_t l = 0; l < 32; l++) {
                uint8_t low = ql[l + 32 * (part & 1)];
                int q = (part < 2 ? low & 15 : low >> 4) | (qh[l] >> 2 * part & 3) << 4;
                size_t at = 2 * part + l / 16;
                float scale = d * (float)sc[at];
                y[32 * part + l] = scale * (float)(q - 32);
            }
        }
    }
}

static void decode_block(enum dtype t, const uint8_t *b, float *y)
{
    uint16_t h;
    switch (t) {
    case DTYPE_F32: memcpy(y, b, 4); return;
    case DTYPE_F16: *y = read_f16(b); return;
    case DTYPE_BF16:
        memcpy(&h, b, 2);
        *y = bf16_to_f32(h);
        return;
    case DTYPE_Q4_0: decode_q4(b, false, y); return;
    case DTYPE_Q4_1: decode_q4(b, true, y); return;
    case DTYPE_Q5_0: decode_q5(b, false, y); return;
    case DTYPE_Q5_1: decode_q5(b, true, y); return;
    case DTYPE_Q8_0: decode_q8_0(b, y); return;
    case DTYPE_Q4_K: decode_q4_k(b, y); return;
    case DTYPE_Q6_K: decode_q6_k(b, y); return;
    }
    CHECK(!"a known dtype");
}

void dtype_decode(enum dtype t, const void *src, size_t n, float *dst)
{
    const struct dtype_info *info = dtype_find(t);
    CHECK(info != NULL && n % info->block == 0);
    const uint8_t *b = src;
    for (size_t i = 0; i < n; i += info->block, b += info->bytes)
        decode_block(t, b, dst + i);
}
