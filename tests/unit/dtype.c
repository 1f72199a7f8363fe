/* Stored number formats against the Python package gguf (gguf.quants.dequantize): 512 numbers of each
 * type decoded from pseudo-random bytes, compared by four values and a hash of all bits. */
#include "kernels/dtype.h"
#include "tests/tap.h"

#include <math.h>

enum { NUMBERS = 512 };

/* values: numbers 0, 17, 100 and 511; hash: FNV-1a over the little-endian floats, -0 as 0. */
static const struct golden {
    enum dtype type;
    uint32_t hash;
    float values[4];
} goldens[] = {
    {DTYPE_F32, 0x64754584, {-1.78387253e-11f, 0.00393159827f, -5.5073747e-35f, -2.66226417e-38f}},
    {DTYPE_F16, 0x251c8738, {1.88946724e-05f, 1.78217888e-05f, -0.16027832f, -0.000507831573f}},
    {DTYPE_BF16, 0x901aa426, {-2.60208521e-18f, -4.16125e-36f, 0.00134277344f, 9.52912066e-21f}},
    {DTYPE_Q4_0, 0x2baaa40e, {0.0062084198f, -0.0165557861f, 0.00203704834f, 0.00372505188f}},
    {DTYPE_Q4_1, 0xe88f0fb0, {1.35735059f, 0.113270998f, 0.596040964f, 4.49259949f}},
    {DTYPE_Q5_0, 0xf47151e4, {-4.58349609f, -2.61914062f, 0.00014436245f, -0.227172852f}},
    {DTYPE_Q5_1, 0x4afe1b52, {0.115402937f, 0.114109516f, -0.150722504f, 0.0142464638f}},
    {DTYPE_Q8_0, 0xd161dbc6, {-0.325157166f, 0.197921753f, -0.533447266f, 205.769531f}},
    {DTYPE_Q4_K, 0x64a84894, {-0.335743904f, -0.336143017f, -0.481036663f, 0.59866333f}},
    {DTYPE_Q6_K, 0x83a90378, {17.609375f, 1.09375f, -10.2539062f, -3400.48828f}},
};

/* The bytes the golden values were made from: a linear congruential stream, with the top exponent
 * bit of every scale cleared, so that all are finite. */
static void make_blocks(enum dtype t, uint8_t *raw)
{
    const struct dtype_info *info = dtype_find((uint32_t)t);
    size_t bytes = dtype_row_bytes(t, NUMBERS);
    uint32_t s = 7 + (uint32_t)t;
    for (size_t i = 0; i < bytes; i++) {
        s = s * 1664525u + 1013904223u;
        raw[i] = (uint8_t)(s >> 24);
    }
    bool two = t == DTYPE_Q4_1 || t == DTYPE_Q5_1 || t == DTYPE_Q4_K;
    for (size_t b = 0; b < bytes; b += info->bytes) {
        size_t first = t == DTYPE_Q6_K ? 208 : t == DTYPE_F32 ? 2 : 0;
        raw[b + first + 1] &= 0xbf;
        if (two)
            raw[b + 3] &= 0xbf;
    }
}

static uint32_t hash_floats(const float *y, size_t n)
{
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < n; i++) {
        uint8_t bytes[4];
        float v = y[i] == 0 ? 0 : y[i];
        memcpy(bytes, &v, sizeof bytes);
        for (int k = 0; k < 4; k++)
            h = (h ^ bytes[k]) * 16777619u;
    }
    return h;
}

static void every_type_decodes_as_gguf_does(void)
{
    static const uint32_t at[] = {0, 17, 100, NUMBERS - 1};
    uint8_t raw[NUMBERS * 4];
    float y[NUMBERS];
    for (size_t i = 0; i < ARRAY_LEN(goldens); i++) {
        const struct golden *g = &goldens[i];
        make_blocks(g->type, raw);
        dtype_decode(g->type, raw, NUMBERS, y);
        bool same = hash_floats(y, NUMBERS) == g->hash;
        for (size_t k = 0; k < ARRAY_LEN(at); k++)
            same &= fabsf(y[at[k]] - g->values[k]) <= 1e-6f * fabsf(g->values[k]);
        ok(same, "512 numbers of %s decode to the bits that gguf gives",
           dtype_find((uint32_t)g->type)->name);
    }
}

static void types_are_found_by_gguf_id(void)
{
    ok(dtype_find(2)->type == DTYPE_Q4_0 && dtype_find(30)->type == DTYPE_BF16,
       "types are found by their GGUF id");
    ok(dtype_find(4) == NULL && dtype_find(9) == NULL && dtype_find(1u << 31) == NULL,
       "removed and unknown ids are not found");
    ok(dtype_row_bytes(DTYPE_Q4_1, 576) == 360 && dtype_row_bytes(DTYPE_Q6_K, 512) == 420,
       "a row's bytes follow from its blocks");
}

static void halves_survive_a_round_trip(void)
{
    bool same = true;
    for (uint32_t h = 0; h < 0x10000; h++) {
        float f = f16_to_f32((uint16_t)h);
        uint16_t back = f32_to_f16(f);
        same &= isnan(f) ? isnan(f16_to_f32(back)) : back == h;
    }
    ok(same, "all 65,536 half floats survive the way to float and back");
    same = true;
    for (uint32_t h = 0; h < 0x10000; h++) {
        float f = bf16_to_f32((uint16_t)h);
        same &= isnan(f) ? isnan(bf16_to_f32(f32_to_bf16(f))) : f32_to_bf16(f) == h;
    }
    ok(same, "all 65,536 bfloat16 survive the way to float and back");
}

/* Between two neighbours: below the middle down, above up, in the middle to the even one. */
static void halves_round_to_nearest_even(void)
{
    bool right = true;
    for (uint32_t h = 0; h < 0x7bff; h++) {
        float a = f16_to_f32((uint16_t)h), b = f16_to_f32((uint16_t)(h + 1));
        float middle = (a + b) / 2; /* exact */
        right &= f32_to_f16(middle) == (h & 1 ? h + 1 : h);
        right &= f32_to_f16(nextafterf(middle, -1)) == h;
        right &= f32_to_f16(nextafterf(middle, 1e9f)) == h + 1;
    }
    ok(right, "rounding to half goes to the nearest, ties to even");
    ok(f32_to_f16(65519.9f) == 0x7bff && f32_to_f16(65520.0f) == 0x7c00 &&
           f32_to_f16(-1e30f) == 0xfc00,
       "what rounds beyond 65504 becomes infinity");
    ok(f32_to_bf16(1.00390625f) == 0x3f80 && f32_to_bf16(1.01171875f) == 0x3f82,
       "rounding to bfloat16 sends ties to even");
}

/* The format's own table: value of a code from its fields. */
static float e4m3_by_fields(uint32_t code)
{
    int e = (int)(code >> 3 & 15), m = (int)(code & 7);
    float x = e == 0 ? ldexpf((float)m, -9) : ldexpf((float)(8 + m), e - 10);
    return code & 0x80 ? -x : x;
}

static void fp8_is_read_and_rounded(void)
{
    bool reads = true, back = true, halfway = true, sides = true;
    for (uint32_t c = 0; c < 256; c++) {
        float f = e4m3_to_f32((uint8_t)c);
        if ((c & 0x7f) == 0x7f) {
            reads &= isnan(f);
            continue;
        }
        reads &= f == e4m3_by_fields(c) && (signbit(f) != 0) == (c >= 128);
        back &= f32_to_e4m3(f) == c && bf16_to_f32(f32_to_bf16(f)) == f;
        if ((c & 0x7f) == 0x7e)
            continue;
        float middle = (f + e4m3_to_f32((uint8_t)(c + 1))) / 2, far = c & 0x80 ? -1e9f : 1e9f;
        halfway &= f32_to_e4m3(middle) == (c & 1 ? c + 1 : c);
        sides &= f32_to_e4m3(nextafterf(middle, -far)) == c &&
                 f32_to_e4m3(nextafterf(middle, far)) == c + 1;
    }
    ok(reads, "all 256 codes of e4m3 read as their fields say, 0x7f and 0xff as NaN");
    ok(back, "every number of e4m3 survives the way to float, and to bf16, and back");
    ok(halfway && sides, "rounding to e4m3 goes to the nearest, ties to even");
    ok(f32_to_e4m3(1e9f) == 0x7e && f32_to_e4m3(-INFINITY) == 0xfe && f32_to_e4m3(465) == 0x7e,
       "what is beyond 448 becomes 448");
    ok(f32_to_e4m3(NAN) == 0x7f && f32_to_e4m3(-NAN) == 0x7f && f32_to_e4m3(-0.0f) == 0x80,
       "NaN stays NaN, and -0 is kept");
}

int main(void)
{
    every_type_decodes_as_gguf_does();
    types_are_found_by_gguf_id();
    halves_survive_a_round_trip();
    halves_round_to_nearest_even();
    fp8_is_read_and_rounded();
    return tap_done();
}
