/* What weights, activations and the dot-product kernels agree on. Read this before pack.c, linear.c
 * and the linear_*.c of the instruction sets.
 *
 * Weights lie in tiles of 16 output rows x 32 inputs (TILE_COLS: one quantisation block of each row),
 * in the order a 16-lane register wants them: byte [g][row][c] holds input 4 g + c of a row, so one
 * vpdpbusd adds 4 inputs to 16 rows. The tiles of 16 rows (a group) follow each other along the
 * inputs, groups follow each other: a matrix is one forward stream. Stored values stay exact.
 *
 * Activations carry 15 bits, because 8 cost too much quality (measured: KL to float32 2.9e-3 over
 * 2,048 positions where 1e-3 is allowed; 12 bits or more are beyond doubt). Each block of 32 is
 * x = d * q with |q| <= 16256, q = 128 hi + lo: two signed byte planes. A kernel adds the hi plane,
 * shifts left by 7 and adds the lo plane into the same int32: exact, so any order of integer sums
 * gives the same bits (8-bit weights: 255 * 16256 * 32 < 2^31).
 *
 * Tokens come in blocks of up to TOKENS_MAX that share the unpacking of a tile; planes of a block are
 * interleaved per 32 inputs, [n_blocks][token][64 bytes]. A row's result is a sum over its blocks of
 * 32 in order, whatever the size of the token block: it never depends on the other tokens. */
#ifndef KERNELS_CPU_LINEAR_H
#define KERNELS_CPU_LINEAR_H

#include "kernels/cpu/cpu.h"

enum { TILE_ROWS = 16, TILE_COLS = 32, TOKENS_MAX = 12, ACT_MAX = 16256 };

/* d, m: scale and offset of a row's 32 inputs, value = d * q + m. Nibbles: byte [g & 3][row][c], low
 * half for g < 4. Bytes of the Q8 forms are value + 128. Scales stand before the bytes of each tile,
 * but for TILE_Q8, where this would push every register across a cache line: there they follow the
 * last tile of the group.     name, scale bytes, value bytes, from */
#define TILE_FORM_LIST(X)                                                       \
    X(TILE_Q4, 64, 256)       /* f16 d[16], m[16]           Q4_1, Q4_0       */ \
    X(TILE_Q4_WIDE, 128, 256) /* f32 d[16], m[16]           Q4_K             */ \
    X(TILE_Q8, 32, 512)       /* f16 d[16]; value = d (q - 128)  Q8_0, Q5_0  */ \
    X(TILE_Q8_MIN, 64, 512)   /* f16 d[16], m[16]; d (q - 128) + m    Q5_1   */ \
    X(TILE_Q8_HALF, 128, 512) /* f32 d[2][16]: one per 16 inputs      Q6_K   */ \
    X(TILE_F16, 0, 1024)      /* f16 [32][16]                                */ \
    X(TILE_BF16, 0, 1024)     /* bf16 [32][16]                               */ \
    X(TILE_F32, 0, 2048)      /* f32 [32][16]                                */

enum tile_form {
#define X(name, scales, values) name,
    TILE_FORM_LIST(X)
#undef X
        TILE_FORMS
};

enum tile_bytes {
#define X(name, scales, values) name##_SCALES = scales, name##_VALUES = values,
    TILE_FORM_LIST(X)
#undef X
};

struct tile_info {
    uint32_t scale_bytes, value_bytes; /* of one tile */
};
extern const struct tile_info tile_infos[TILE_FORMS];

static inline bool tile_is_float(enum tile_form f)
{
    return f >= TILE_F16;
}

/* Bytes of one group of n_blocks tiles, a multiple of 64. */
static inline size_t tile_group_bytes(enum tile_form f, uint32_t n_blocks)
{
    size_t bytes = (size_t)n_blocks * (tile_infos[f].scale_bytes + tile_infos[f].value_bytes);
    return (bytes + 63) & ~(size_t)63;
}

/* One stored matrix in tiles. */
struct weight_tiles {
    enum tile_form form;
    uint32_t rows, first_row; /* first_row: in the whole weight */
    uint32_t first_group, n_groups;
    size_t group_bytes;
    uint8_t *groups; /* [n_groups][group_bytes], 64-byte aligned */
};

struct weight {
    uint32_t cols, rows;
    uint32_t n_blocks; /* ceil(cols / 32): missing inputs are zero */
    uint32_t n_groups, n_parts;
    bool any_int, any_float; /* which forms of the activations its parts read */
    struct weight_tiles parts[3];
    size_t bytes;
    uint8_t *memory;
};

/* Beside the planes of one block of 32 activations. */
struct act_scale {
    float d;              /* value of q = 1 */
    float sum;            /* d * sum of q: what an offset m is multiplied with */
    int32_t neg_sum;      /* - sum of q: shifted by 7 it takes the 128 back out of the Q8 forms */
    int32_t neg_sum_half; /* - sum of the first 16 q */
};

/* A block of n tokens, ready for the kernels. */
struct act_block {
    const int8_t *q;            /* [n_blocks][n][2 planes][32] */
    const struct act_scale *sc; /* [n_blocks][n] */
    const float *x;             /* [n_blocks][n][32], for float weights */
    uint32_t n;                 /* 1 .. TOKENS_MAX */
    const uint8_t
        *next; /* the group that the caller multiplies next, to be fetched on the way, at the
                            distance of one group; NULL: none */
};

typedef float out_tile[TOKENS_MAX][TILE_ROWS]; /* results of one group, 64-byte aligned */

/* Where and how results of one group leave: n_rows of 16 lanes of n tokens. */
struct out_args {
    enum linear_out mode;
    uint32_t n, n_rows;
    float *out;
    size_t stride; /* numbers from token to token */
};

struct linear_kernels {
    /* y[t][r] = row r of the group times token t */
    void (*dot[TILE_FORMS])(const uint8_t *group, uint32_t n_blocks, const struct act_block *a,
                            out_tile y);
    /* RMSNorm: y = x / sqrt(mean(x^2) + eps) * gain */
    void (*norm)(const float *x, const float *gain, float eps, uint32_t n, float *y);
    /* Planes and scales of one token, one block every `step` units of 64 bytes or of scales. NaN and
     * infinity make d NaN, so that they reach every result. */
    void (*quantize)(const float *x, uint32_t n_blocks, uint32_t step, int8_t *q,
                     struct act_scale *sc);
    /* up: second operand of LINEAR_SWIGLU, else NULL */
    void (*store)(const struct out_args *a, out_tile y, out_tile up);
};

extern const struct linear_kernels linear_scalar, linear_avx2, linear_avx512;

/* Makes room for the activations of w. */
status cpu_linear_reserve(struct cpu_backend *b, const struct weight *w);

#endif
