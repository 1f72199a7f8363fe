/* A backend: one table of functions over memory, copies and every numerical operation of a step.
 *
 * Operations queue and return nothing; the first error sticks to the backend and comes out of
 * `sync`. The engine thread alone calls these functions. Activations are f32 on the CPU; above this
 * header an activation buffer is opaque memory of `act_bytes` per number. A page (one lane's part of
 * a block) is opaque too: its inner order belongs to the backend.
 *
 * Batch invariance (DESIGN 6): the result for one row never depends on the other rows of the call,
 * on how a prompt was cut into calls, or on the number of threads: bit for bit on the CPU. So every
 * sum runs in an order fixed by position and splits have fixed sizes. */
#ifndef KERNELS_BACKEND_H
#define KERNELS_BACKEND_H

#include "kernels/base.h"
#include "kernels/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

struct backend; /* an open device */
struct weight;  /* a matrix in the backend's own form, made once at load */

/* The shape of KV blocks (DESIGN 2 and 4): block -> lane (layer, KV head) -> page -> K rows, V rows.
 * lane = layer * kv_heads + head; a page lies at block_base + lane * page_bytes. */
struct kv_geometry {
    uint32_t block_rows; /* R: positions per block; 8, 16 or 32 */
    uint32_t layers, kv_heads, head_dim;
    size_t page_bytes;  /* R * head_dim * 2 halves * 2 bytes (bf16) */
    size_t block_bytes; /* layers * kv_heads * page_bytes */
};

typedef uint32_t block_id;

/* Rows of one sequence in this step: n_rows consecutive positions from first_pos on, whose
 * activations are rows [first_row, first_row + n_rows) of the batch. */
struct batch_seq {
    uint32_t first_row, n_rows, first_pos;
    const block_id *blocks; /* [ceil((first_pos + n_rows) / R)], ids in the HBM arena */
};

/* One stored matrix, or several stacked along the output: q, k and v; gate and up. */
struct weight_part {
    const char *name; /* for error texts */
    enum dtype type;
    uint32_t rows;            /* output features */
    const void *data;         /* row-major [rows][cols], as in the file */
    const uint32_t *row_from; /* [rows]: output row i is file row row_from[i]; NULL: the same */
};

struct weight_desc {
    uint32_t cols, n_parts; /* cols: input features, common to all parts */
    struct weight_part parts[3];
    bool embedding; /* also used by `embed`: rows must stay addressable one by one */
};

enum linear_out {
    LINEAR_STORE,  /* out = W x                                         [rows][W.rows]     */
    LINEAR_ADD,    /* out += W x                                        [rows][W.rows]     */
    LINEAR_SWIGLU, /* W = gate over up: out = silu(gate x) * (up x)     [rows][W.rows / 2] */
};

struct embed_args {
    const struct weight *table;
    const uint32_t *tokens; /* [n_rows], each < rows of the table */
    uint32_t n_rows;
    void *out; /* act [n_rows][cols] */
};

struct linear_args {
    const struct weight *w;
    const void *in;       /* act [..][w.cols] */
    const uint32_t *rows; /* [n_rows] rows of `in` to use; NULL: 0 .. n_rows - 1 */
    uint32_t n_rows;
    const void *norm_gain; /* vector [w.cols]: RMSNorm the input row first; NULL: do not */
    float norm_eps;
    enum linear_out mode;
    void *out; /* act; one output row per input row, in order, without gaps */
};

/* RoPE (half-split pairs i, i + head_dim/2) on q and k, then k and v into their pages. */
struct append_args {
    const struct kv_geometry *geo;
    void *arena;           /* HBM arena base; block b lies at arena + b * block_bytes */
    uint32_t layer, heads; /* heads: query heads */
    const struct batch_seq *seqs;
    uint32_t n_seqs;
    const float *rope_cos, *rope_sin; /* [max_positions][head_dim / 2] */
    void *qkv; /* act [n_rows][(heads + 2 kv_heads) * head_dim]; q part is rotated in place */
};

/* Dense causal attention of every row over its own sequence, positions 0 .. its own. Query head h
 * reads KV head h / (heads / kv_heads). Softmax over entries (k, v); fp32 accumulation. */
struct attend_args {
    const struct kv_geometry *geo;
    const void *arena;
    uint32_t layer, heads;
    const struct batch_seq *seqs;
    uint32_t n_seqs;
    float scale;
    const void *qkv; /* as left by append: q is the first heads * head_dim of each row */
    void *out;       /* act [n_rows][heads * head_dim] */
};

enum { SAMPLE_MAX_LOGPROBS = 20, SAMPLE_DRAW = 0xffffffffu };

/* vLLM's sampling parameters, validated by the API (ranges: reference/api.md 2.3). */
struct sample_params {
    float temperature;                                             /* < 1e-5: greedy */
    float top_p;                                                   /* (0, 1]; 1: off */
    float min_p;                                                   /* [0, 1]; 0: off */
    float repetition_penalty, presence_penalty, frequency_penalty; /* 1, 0, 0: off */
    uint32_t top_k;                                                /* 0: off */
    uint32_t choice; /* index of the choice in its request: part of the random counter */
    uint64_t seed;
};

struct sample_top {
    uint32_t token;
    float logprob;
};

/* One row to sample or to score. Order of operations: reference/models.md 7.1. */
struct sample_row {
    struct sample_params params;
    uint32_t logits_row; /* row of sample_args.logits */
    uint32_t target;     /* SAMPLE_DRAW: draw a token; else report this token's logprob and rank */
    uint32_t position;   /* output tokens before this one: the other part of the counter */
    int32_t n_top;       /* -1: no logprobs wanted; 0..SAMPLE_MAX_LOGPROBS */
    const uint32_t *banned; /* [n_banned] ids set to -inf (min_tokens) */
    const uint32_t *bias_ids;
    const float *bias;       /* [n_bias], added */
    const uint32_t *history; /* [n_history] prompt then output ids; read only if a penalty is on */
    uint32_t n_banned, n_bias, n_prompt, n_history;
    /* results, valid after sync */
    uint32_t token, rank; /* rank: 1 + number of tokens with a larger raw logit */
    float logprob;        /* of token: log-softmax of the raw logits */
    bool bad;             /* a logit was NaN, or none was finite: token is undefined */
    struct sample_top top[SAMPLE_MAX_LOGPROBS]; /* [n_top], best first, ties by smaller id */
};

struct sample_args {
    const void *logits; /* act [..][vocab] */
    uint32_t vocab, n_rows;
    struct sample_row *rows;
};

struct backend_ops {
    const char *name; /* "cpu", "mock", later "cuda" */
    uint32_t act_bytes;
    void (*close)(struct backend *be);
    /* One line for the log: instruction set or device name, threads, memory. */
    const char *(*describe)(struct backend *be);

    void *(*alloc)(struct backend *be, size_t bytes); /* zeroed or fresh; NULL + err(ERR_MEMORY) */
    void (*free)(struct backend *be, void *p, size_t bytes);
    void (*copy)(struct backend *be, void *dst, const void *src, size_t bytes);
    status (*sync)(struct backend *be); /* waits; the first error since the last sync */

    /* Packs the parts; reports non-finite scales as ERR_FORMAT. The file may be unmapped after. */
    status (*weight_create)(struct backend *be, const struct weight_desc *d, struct weight **out);
    void (*weight_destroy)(struct backend *be, struct weight *w);
    size_t (*weight_bytes)(const struct weight *w);

    void (*embed)(struct backend *be, const struct embed_args *a);
    void (*linear)(struct backend *be, const struct linear_args *a);
    void (*append)(struct backend *be, const struct append_args *a);
    void (*attend)(struct backend *be, const struct attend_args *a);
    void (*sample)(struct backend *be, const struct sample_args *a);
};

struct backend {
    const struct backend_ops *ops;
};

/* isa: "auto", "avx512", "avx2" or "scalar"; n_threads 0: as many as the process may use.
 * The thread that runs operations is worker 0. pin: bind
 * workers to cores. */
struct cpu_options {
    const char *isa;
    uint32_t n_threads;
    bool pin;
};
status cpu_backend_open(struct backend **out, const struct cpu_options *o);

/* Deterministic tokens without arithmetic, for protocol, load and fault tests. Real copies. */
struct mock_options {
    uint32_t step_us;   /* time a step (from its first operation to sync) takes at least */
    uint32_t nan_every; /* every n-th sampled row is reported bad; 0: never */
    uint32_t
        eos_every; /* every n-th output position of a sequence draws token eos_token; 0: never */
    uint32_t eos_token, first_token, n_tokens; /* tokens cycle through [first_token, + n_tokens) */
    uint32_t fail_step;  /* this sync, counted from 1, returns ERR_DEVICE; 0: none */
    uint32_t fail_count; /* and so many in all do, from there on; 0 and 1: only that */
    const char *trace; /* file for the time of every step's end (uint64_t, clock_us); NULL: none */
};
status mock_backend_open(struct backend **out, const struct mock_options *o);

static inline size_t kv_page_offset(const struct kv_geometry *g, uint32_t layer, uint32_t head)
{
    return ((size_t)layer * g->kv_heads + head) * g->page_bytes;
}

#ifdef __cplusplus
}
#endif
#endif
