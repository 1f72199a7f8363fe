/* The portable kernels: what the others are tested against, and what other machines run. Bound by
 * plain integer arithmetic, some 50 times slower than AVX-512. Same tiles, same planes. */
#include "kernels/cpu/linear.h"

#include <math.h>
#include <string.h>

static float half_at(const uint8_t *p, uint32_t i)
{
    uint16_t h;
    memcpy(&h, p + 2 * (size_t)i, sizeof h);
    return f16_to_f32(h);
}

static float float_at(const uint8_t *p, uint32_t i)
{
    float f;
    memcpy(&f, p + 4 * (size_t)i, sizeof f);
    return f;
}

/* Value k of a row; the Q8 forms without their 128. */
static int32_t int_at(enum tile_form form, const uint8_t *values, uint32_t row, uint32_t k)
{
    uint32_t g = k / 4, at = row * 4 + k % 4;
    if (form == TILE_Q4 || form == TILE_Q4_WIDE) {
        uint8_t b = values[(g & 3) * 64 + at];
        return g < 4 ? b & 15 : b >> 4;
    }
    return (int32_t)values[g * 64 + at] - 128;
}

static int32_t int_dot(enum tile_form form, const uint8_t *values, uint32_t row, const int8_t *q,
                       uint32_t k0, uint32_t k1)
{
    int32_t hi = 0, lo = 0;
    for (uint32_t k = k0; k < k1; k++) {
        int32_t w = int_at(form, values, row, k);
        hi += w * q[k];
        lo += w * q[TILE_COLS + k];
    }
    return hi * 128 + lo;
}

/* One block of 32 of one row and token, added to acc. */
static float add_block(enum tile_form form, const uint8_t *scales, const uint8_t *values,
                       uint32_t row, const int8_t *q, const struct act_scale *sc, float acc)
{
    if (form == TILE_Q8_HALF) {
        float a = (float)int_dot(form, values, row, q, 0, 16) * sc->d;
        float b = (float)int_dot(form, values, row, q, 16, 32) * sc->d;
        acc += a * float_at(scales, row);
        return acc + b * float_at(scales, 16 + row);
    }
    float v = (float)int_dot(form, values, row, q, 0, 32) * sc->d;
    if (form == TILE_Q4_WIDE) {
        acc += float_at(scales, 16 + row) * sc->sum;
        return acc + v * float_at(scales, row);
    }
    if (form != TILE_Q8)
        acc += half_at(scales, 16 + row) * sc->sum;
    return acc + v * half_at(scales, row);
}

static void dot_int(enum tile_form form, const uint8_t *group, uint32_t n_blocks,
                    const struct act_block *a, out_tile y)
{
    const struct tile_info *info = &tile_infos[form];
    bool apart = form == TILE_Q8;
    uint32_t scale_step = info->scale_bytes + (apart ? 0 : info->value_bytes);
    uint32_t value_step = info->value_bytes + (apart ? 0 : info->scale_bytes);
    const uint8_t *scales = apart ? group + (size_t)n_blocks * info->value_bytes : group;
    const uint8_t *values = apart ? group : group + info->scale_bytes;
    memset(y, 0, sizeof(out_tile));
    for (uint32_t b = 0; b < n_blocks; b++, scales += scale_step, values += value_step) {
        for (uint32_t t = 0; t < a->n; t++) {
            const int8_t *q = a->q + ((size_t)b * a->n + t) * 64;
            const struct act_scale *sc = &a->sc[(size_t)b * a->n + t];
            for (uint32_t r = 0; r < TILE_ROWS; r++)
                y[t][r] = add_block(form, scales, values, r, q, sc, y[t][r]);
        }
    }
}

static void dot_float(enum tile_form form, const uint8_t *group, uint32_t n_blocks,
                      const struct act_block *a, out_tile y)
{
    float w[TILE_ROWS];
    memset(y, 0, sizeof(out_tile));
    for (uint32_t b = 0; b < n_blocks; b++) {
        for (uint32_t k = 0; k < TILE_COLS; k++) {
            const uint8_t *at = group + ((size_t)b * TILE_COLS + k) * TILE_ROWS *
                                            (form == TILE_F32 ? sizeof(float) : sizeof(uint16_t));
            dtype_decode(form == TILE_F32   ? DTYPE_F32
                         : form == TILE_F16 ? DTYPE_F16
                                            : DTYPE_BF16,
                         at, TILE_ROWS, w);
            for (uint32_t t = 0; t < a->n; t++)
                for (uint32_t r = 0; r < TILE_ROWS; r++)
                    y[t][r] += w[r] * a->x[((size_t)b * a->n + t) * TILE_COLS + k];
        }
    }
}

#define DOT(kind, form)                                                                        \
    static void dot_##form(const uint8_t *group, uint32_t n_blocks, const struct act_block *a, \
                           out_tile y)                                                         \
    {                                                                                          \
        dot_##kind(form, group, n_blocks, a, y);                                               \
    }
DOT(int, TILE_Q4)
DOT(int, TILE_Q4_WIDE)
DOT(int, TILE_Q8)
DOT(int, TILE_Q8_MIN)
DOT(int, TILE_Q8_HALF)
DOT(float, TILE_F16)
DOT(float, TILE_BF16)
DOT(float, TILE_F32)
#undef DOT

static void norm(const float *x, const float *gain, float eps, uint32_t n, float *y)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    float scale = 1.0f / sqrtf((float)(sum / n) + eps);
    for (uint32_t i = 0; i < n; i++)
        y[i] = x[i] * scale * gain[i];
}

static void quantize_block(const float *x, int8_t *q, struct act_scale *sc)
{
    float max = 0;
    bool finite = true;
    for (uint32_t i = 0; i < TILE_COLS; i++) {
        finite &= isfinite(x[i]) != 0;
        max = fmaxf(max, fabsf(x[i]));
    }
    memset(q, 0, 2 * (size_t)TILE_COLS);
    *sc = (struct act_scale){0};
    if (!finite)
        sc->d = sc->sum = NAN;
    if (!finite || max < 1e-30f) /* ACT_MAX / max would overflow: nothing that small matters */
        return;
    float inverse = (float)ACT_MAX / max;
    sc->d = max * (1.0f / (float)ACT_MAX);
    for (uint32_t i = 0; i < TILE_COLS; i++) {
        int32_t v = (int32_t)rintf(x[i] * inverse);
        int32_t hi = (v + 64) >> 7;
        q[i] = (int8_t)hi;
        q[TILE_COLS + i] = (int8_t)(v - hi * 128);
        sc->neg_sum -= v;
        sc->neg_sum_half -= i < 16 ? v : 0;
    }
    sc->sum = sc->d * -(float)sc->neg_sum;
}

static void quantize(const float *x, uint32_t n_blocks, uint32_t step, int8_t *q,
                     struct act_scale *sc)
{
    for (uint32_t b = 0; b < n_blocks; b++)
        quantize_block(x + (size_t)b * TILE_COLS, q + (size_t)b * step * 64, sc + (size_t)b * step);
}

static void store(const struct out_args *a, out_tile y, out_tile up)
{
    for (uint32_t t = 0; t < a->n; t++) {
        float *out = a->out + t * a->stride;
        for (uint32_t r = 0; r < a->n_rows; r++) {
            if (a->mode == LINEAR_ADD)
                out[r] += y[t][r];
            else if (a->mode == LINEAR_SWIGLU)
                out[r] = y[t][r] / (1.0f + expf(-y[t][r])) * up[t][r];
            else
                out[r] = y[t][r];
        }
    }
}

const struct linear_kernels linear_scalar = {
    .dot =
        {
            [TILE_Q4] = dot_TILE_Q4,
            [TILE_Q4_WIDE] = dot_TILE_Q4_WIDE,
            [TILE_Q8] = dot_TILE_Q8,
            [TILE_Q8_MIN] = dot_TILE_Q8_MIN,
            [TILE_Q8_HALF] = dot_TILE_Q8_HALF,
            [TILE_F16] = dot_TILE_F16,
            [TILE_BF16] = dot_TILE_BF16,
            [TILE_F32] = dot_TILE_F32,
        },
    .norm = norm,
    .quantize = quantize,
    .store = store,
};
