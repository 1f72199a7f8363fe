/* What layers.cu (shapes, memory, the host's part) and layers_kernel.h (the kernel) share. */
#ifndef KERNELS_CUDA_LAYERS_H
#define KERNELS_CUDA_LAYERS_H

#include "kernels/cuda/cuda.h"

enum {
    LAYERS_ROWS = 4,  /* with more, kernels of their own are faster; 8 are possible */
    LAYERS_MAX = 64,  /* layers */
    LAYERS_WARPS = 8, /* of a CTA; there is one on a multiprocessor */
    LAYERS_UNIT = 8, /* outputs of a product that a CTA computes together: of gate and of up each */
    LAYERS_SPLITS = 8,  /* of a row's context at most */
    LAYERS_SPLIT = 128, /* positions of a split at least: 16 for each warp */
    LAYERS_KEEPS = 8,   /* units of the residual stream that a CTA may own */
};

/* Products of a layer, in order; attention is behind the first. */
enum { LAYERS_QKV, LAYERS_OUT, LAYERS_GATE_UP, LAYERS_DOWN, LAYERS_PHASES };

struct layers_phase {
    uint32_t rows, steps; /* outputs; the pitch in steps of 32 */
    uint32_t units, more; /* of every CTA; CTAs that have one more */
    uint32_t skip;        /* numbers from a unit of a CTA to its next */
    uint32_t up;          /* numbers from gate to up, which make one output */
    uint32_t mail;        /* where its results go */
};

/* Weights of a layer, as the kernel reads them. */
struct layers_layer {
    const __nv_bfloat16 *w[LAYERS_PHASES];
    const float *attn_norm, *ffn_norm, *bias, *q_norm, *k_norm; /* the last three may be NULL */
};

/* A row: the newest position of a sequence of its own. */
struct layers_row {
    uint32_t pos, token;
    const block_id *tables[LANE_CLASSES];
};

/* Words of a layer's mail (layers_kernel.h), where each kind begins. */
struct layers_mail {
    size_t qkv, att, mass, mid, ff, x, words;
};

struct layers_call {
    const struct layers_layer *layers; /* [n_layers] */
    const struct layers_row *rows;     /* [n_rows] */
    const struct cuda_lane *lanes;     /* [n_layers][kv_heads] */
    const __nv_bfloat16 *embedding;
    const uint32_t *drawn;
    uint32_t drawn_stride, n_layers, n_rows, hidden, ff, heads, kv_heads, group, dim;
    uint32_t hidden_steps, ff_steps, att_steps; /* pitches of what multiplies these */
    uint32_t splits;                            /* of a row at most */
    uint32_t ahead;                             /* layers whose weights are on their way to L2 */
    uint32_t page_shift;
    const uint8_t *dram[LANE_CLASSES];
    uint8_t *hbm[LANE_CLASSES];
    size_t block_bytes[LANE_CLASSES], page_bytes;
    const float *cos, *sin;
    float eps, over_hidden, scale; /* 1 / hidden; of q.k, times log2(e) */
    struct layers_mail at;
    struct layers_phase phases[LAYERS_PHASES];
    uint64_t *mail; /* [n_layers][at.words] */
    uint32_t *turn; /* launches so far */
    uint32_t *lost; /* the host's: set where mail did not come */
    float *out;     /* [n_rows][hidden] */
};

struct cuda_layers {
    void *mail;
    size_t mail_bytes;
    uint32_t *turn;
    uint32_t *lost, *lost_device; /* pinned; as the device knows it */
    const char *told;             /* why the last refusal */
    uint32_t n_turns;             /* what *turn will be behind all that is queued, at most */
};

/* Makes mail that did not come an error: for wait and sync, once the stream is done. */
void cuda_layers_settle(struct cuda_backend *b);

#endif
