/* A backend: one table of functions over memory, copies and every numerical operation of a step.
 *
 * Operations queue and return nothing; the first error sticks to the backend and comes out of
 * `sync`. Until sync or submit, what their arguments point to (arrays of rows, block tables, lists; not the
 * arguments themselves) stays where it is and does not change: a backend reads it once a step, by its address.
 * The engine thread alone calls these functions. Activations are f32 on the CPU; above this
 * header an activation buffer is opaque memory of `act_bytes` per number. A page (one lane's part of
 * a block) is opaque too: its inner order belongs to the backend.
 *
 * Batch invariance (DESIGN 6): the result for one row never depends on the other rows of the call,
 * on how a prompt was cut into calls, or on the number of threads: bit for bit, but for backends that
 * are `loose`. So every sum runs in an order fixed by position and splits have fixed sizes. */
#ifndef KERNELS_BACKEND_H
#define KERNELS_BACKEND_H

#include "kernels/base.h"
#include "kernels/core/core.h"
#include "kernels/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

struct backend; /* an open device */
struct weight;  /* a matrix in the backend's own form, made once at load */

/* How the KV of a lane (layer, KV head) is kept (DESIGN 2): a constant of model and head policy. */
enum lane_class {
    LANE_SPARSE, /* two tiers; decode attends what a plug-in selects */
    LANE_DENSE,  /* always in HBM, attended whole: exempt layers, retrieval heads of a policy */
    LANE_STREAM, /* sinks and a ring of recent rows only */
    LANE_CLASSES,
};

struct lane_place {
    uint16_t class_, index; /* enum lane_class; which page of that class's blocks */
};

enum {
    SEGMENT_ROWS = 1024, /* unit of sealing and of permutation (DESIGN 2) */
    TAIL_ROWS = 64,      /* younger positions that must exist before a segment is sealed */
};

/* How numbers of K and V are kept in pages (--kv-cache-dtype). Rows are rounded once, by append; everything
 * else reads what was rounded, exactly. */
enum kv_type {
    KV_BF16,
    KV_E4M3, /* kernels/dtype.h; no scale. Where the backend says keeps_fp8 */
};

/* auto, bf16 (bfloat16), fp8, fp8_e4m3: vLLM's names. ERR_ARG: another. */
status kv_type_find(const char *name, enum kv_type *out);
const char *kv_type_name(enum kv_type type);

CORE_FN uint32_t kv_number_bytes(enum kv_type t)
{
    return t == KV_E4M3 ? 1 : 2;
}

/* The shape of KV blocks (DESIGN 2 and 4): block -> lane -> page -> K rows, V rows. Each class has
 * arenas of its own; a page lies at block_base + lanes[..].index * page_bytes. */
struct kv_geometry {
    uint32_t block_rows; /* R: positions per block; 8, 16 or 32 */
    uint32_t layers, kv_heads, head_dim;
    enum kv_type type;
    size_t page_bytes; /* kv_page_bytes() */
    uint32_t n_lanes[LANE_CLASSES];
    size_t block_bytes[LANE_CLASSES];     /* n_lanes * page_bytes; 0: the class is not used */
    uint32_t stream_sinks, stream_recent; /* rows a STREAM lane attends: [0, sinks) and, for the row
                                             at p, [floor((p + 1 - recent) / 64) * 64, p] */
    const struct lane_place *lanes; /* [layers][kv_heads], borrowed; NULL: all SPARSE, in order */
};

/* Of K and V of R rows. */
CORE_FN size_t kv_page_bytes(const struct kv_geometry *g)
{
    return (size_t)g->block_rows * g->head_dim * 2 * kv_number_bytes(g->type);
}

/* Names a unit of a class's arena. BLOCK_IN_DRAM marks one of the DRAM arena; only SPARSE tables have
 * such entries, and only dense rows (prefill) and the oracle read through them, in place. */
typedef uint32_t block_id;
#define BLOCK_IN_DRAM 0x80000000u

/* Where KV lies: what append, attend, seal and score read and write. Constant after start. */
struct kv_memory {
    const struct kv_geometry *geo;
    void *hbm[LANE_CLASSES], *dram[LANE_CLASSES]; /* arena bases; block b at b * block_bytes */
    void
        *records; /* digest records: one per sealed segment of SPARSE lanes, in HBM. Record r of the
                      lane with index i lies at r * record_bytes + i * record_lane_bytes */
    size_t record_bytes, record_lane_bytes;
};

/* Rows of one sequence in this step: n_rows consecutive positions from first_pos on, whose
 * activations are rows [first_row, first_row + n_rows) of the batch. */
struct batch_seq {
    uint32_t first_row, n_rows, first_pos;
    /* [ceil((first_pos + n_rows) / R)] by class; NULL where the class is not used. Entries of a
     * STREAM table outside what its rows attend are undefined. Sealed segments may be permuted:
     * that changes no sum of a dense row but its order, which is fixed by position of storage. */
    const block_id *blocks[LANE_CLASSES];
    uint32_t first_plan; /* its rows attend plans [first_plan, + n_rows) in SPARSE lanes, ... */
    bool planned;        /* ... or everything, causally */
    bool spilled;        /* most of its blocks are in DRAM: read them once */
    uint32_t
        n_before; /* positions before first_pos that this step's append wrote as well: attend of a part */
};

/* One stored matrix, or several stacked along the output: q, k and v; gate and up. */
struct weight_part {
    const char *name; /* for error texts */
    enum dtype type;
    uint32_t rows;            /* output features */
    const void *data;         /* row-major [rows][cols], as in the file; NULL: made up from seed */
    const uint32_t *row_from; /* [rows]: output row i is file row row_from[i]; NULL: the same */
    uint64_t seed; /* data NULL: the numbers of kernels/core/dummy.h; type is DTYPE_BF16 */
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

/* In place of a token: the one that row i (EMBED_DRAWN | i) of the last `sample` before this drew. Only
 * where the backend has `submit`. */
#define EMBED_DRAWN 0x80000000u

struct embed_args {
    const struct weight *table;
    const uint32_t *tokens; /* [n_rows], each < rows of the table, or EMBED_DRAWN */
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
    /* A result that only one later linear reads, of the same rows: then a backend may keep it in a form of
     * its own. to_linear: so is out (SWIGLU); from_linear: so is in (no norm, no list of rows). from_attend: so is
     * in, which attend left behind an append with to_attend. */
    bool to_linear, from_linear, from_attend;
};

/* What the architecture does to q, k and v: adds a bias, normalises every head of q and of k, each where
 * it is given. Then RoPE (half-split pairs i, i + head_dim/2) on q and k, then k and v into their pages. */
struct append_args {
    const struct kv_memory *kv;
    uint32_t layer, heads; /* heads: query heads */
    const struct batch_seq *seqs;
    uint32_t n_seqs;
    const float *rope_cos, *rope_sin; /* [max_positions][head_dim / 2] */
    void *qkv; /* act [n_rows][(heads + 2 kv_heads) * head_dim]; q part is rotated in place */
    const float *bias;            /* [(heads + 2 kv_heads) * head_dim]; NULL: none */
    const float *q_norm, *k_norm; /* [head_dim] gains of RMSNorm, both or none; NULL: none */
    float norm_eps;
    /* What reads q of rows that attend by position is the attend of this layer and these rows that follows, and
     * what reads its result a linear with from_attend: then a backend may keep both in a form of its own. */
    bool to_attend;
};

/* ---- sparse attention: digests, scores, selection, residency ----
 *
 * Per layer: known -> score -> select -> resolve -> attend. Plan rows, and what they point to, are the
 * host's memory; all other arrays of these calls are backend memory, [plan row][KV head][...]; a plan row is one batch row that attends by plan. Rows of one call share
 * a plug-in instance; entries for KV heads that are not SPARSE in the layer are skipped. */

enum digest_order {
    ORDER_KEEP,   /* rows stay in position order */
    ORDER_BISECT, /* balanced clusters of one page each, recursive bisection (selection.md 2) */
    ORDER_KMEANS, /* free segmented k-means (wave-index.md 1): clusters of any size, stored in order */
};

enum digest_kind {
    DIGEST_NONE,
    DIGEST_BOUNDS,   /* channel-wise min and max of K, bf16 (Quest) */
    DIGEST_CENTROID, /* mean of the rows that are not outliers, then the `outliers` farthest rows */
    DIGEST_CODES, /* mean of the rows and a few bits of every row's distance from it, of K and, with
                        `values`, of V. Whole pages, no outliers. Depends on segment 0 too */
};

/* How a built-in plug-in digests a segment. PAGE maps have parts = SEGMENT_ROWS / R. A record's lane
 * part is: uint16_t position_of[SEGMENT_ROWS] (storage row -> position in the segment) unless order
 * is ORDER_KEEP; then uint16_t first_row[parts + 1] if order is ORDER_KMEANS; then what the backend
 * likes, from digest_offset() on. */
struct digest_desc {
    enum digest_order order;
    enum digest_kind kind;
    uint32_t parts;    /* partitions of a segment */
    uint32_t outliers; /* DIGEST_CENTROID: 0, 1 or 2 */
    uint32_t sinks;    /* first rows of the context: not permuted, whole pages of their own */
    bool values;       /* keep mean V per partition, for estimation */
};

CORE_FN size_t digest_offset(const struct digest_desc *d)
{
    size_t map = d->order == ORDER_KEEP ? 0 : SEGMENT_ROWS * sizeof(uint16_t);
    if (d->order == ORDER_KMEANS)
        map += ((size_t)d->parts + 1) * sizeof(uint16_t);
    return (map + 63) / 64 * 64;
}

/* Seals one segment of one sequence, all SPARSE lanes: orders its rows, writes them to `to` (which
 * may equal `from`) and its digests into the record. Depends on K, V and the segment's number only;
 * DIGEST_CODES also on segment 0 of the same sequence, through its record. */
struct seal_args {
    const struct kv_memory *kv;
    struct digest_desc desc;
    const block_id *from, *to; /* [SEGMENT_ROWS / R] SPARSE blocks in HBM */
    uint32_t segment, record;
    uint32_t first_record; /* segment 0's; with segment 0: record */
};

/* Copies the rows of a permuted segment whose position in it is < n_rows back into position order:
 * the inverse of the permutation, for a prefix that ends inside the segment. from may be in DRAM. */
struct unpermute_args {
    const struct kv_memory *kv;
    const block_id *from, *to; /* [SEGMENT_ROWS / R]; to: [ceil(n_rows / R)] in HBM */
    uint32_t record, n_rows;
};

/* Reads rows of a lane as numbers, whatever their order inside a page: for plug-ins that digest on the
 * host, and for tests. Runs at once. CPU backend; NULL where pages are not the host's to read. */
struct read_args {
    const struct kv_memory *kv;
    uint32_t layer, head;
    const block_id *blocks;     /* of the lane's class */
    uint32_t first_row, n_rows; /* counted from the first row of blocks[0] */
    float *k, *v;               /* [n_rows][head_dim]; NULL: not wanted */
};

struct hot_set; /* kernels/core/hot_set.h: slots of a SPILLED sequence */
struct hot_lane_stats;

/* One row that attends by plan. Its sealed positions are the first n_segments * SEGMENT_ROWS; the
 * tail, [n_segments * SEGMENT_ROWS, pos], is attended exactly through the block table. */
struct plan_row {
    uint32_t row, pos; /* of the batch; position in its sequence */
    uint32_t n_segments;
    const uint32_t *records; /* [n_segments] */
    const block_id *blocks;  /* SPARSE block table */
    struct hot_set *hot;     /* NULL: RESIDENT. At most one row per step of a SPILLED sequence */
    uint32_t budget;         /* rows to select per lane, beside sinks and tail */
    uint32_t estimate;       /* partitions to estimate after those selected */
    float top_p;             /* stop earlier once this share of the mass is selected; 1: off */
    float miss_threshold;    /* a miss whose share of the best partition's mass is below this is
                                    estimated now and fetched for the next step; 0: off */
};

enum score_kind {
    SCORE_MASS, /* log of the estimated attention mass of a partition, from DIGEST_CENTROID or _CODES */
    SCORE_BOUND, /* upper bound of q.k (times scale) in a partition, from DIGEST_BOUNDS */
    SCORE_EXACT, /* log of the true mass, from the keys themselves (oracle) */
};

/* scores[plan row][KV head][head of the group][partition], natural log, q.k scaled by `scale`.
 * Partition p of segment s is number s * parts + p. What lies in the sinks' pages is undefined. */
struct score_args {
    const struct kv_memory *kv;
    enum score_kind kind;
    struct digest_desc desc;
    uint32_t layer, heads;
    const struct plan_row *rows;
    uint32_t n_rows;
    float scale;
    const void *qkv;
    float *scores;
    uint32_t stride;       /* partitions per score row: >= the largest n_segments * parts */
    uint32_t coarse_group; /* partitions per coarse digest; 0: score all */
    float coarse_open;     /* share of the groups whose partitions are scored; others get -inf */
};

/* Attends the tail of a planned row before anything is selected, and says how much mass that and the
 * sinks' pages have, which are attended in any case:
 * lse[plan row][KV head][head of the group] = ln of the sum of e^(scale q.k) over their rows. `tail` keeps
 * what attend needs not compute again. Pages are found through the block table, so a sinks' page of a
 * SPILLED sequence may be in DRAM: it is read in place, before selection could bring it anywhere, and a
 * hot set must not depend on it. */
struct known_args {
    const struct kv_memory *kv;
    uint32_t layer, heads;
    uint32_t sinks; /* rows; whole pages are meant */
    const struct plan_row *rows;
    uint32_t n_rows;
    float scale;
    const void *qkv;
    float *lse;
    void *tail; /* [plan row][KV head], known_bytes each */
};

enum group_reduce {
    REDUCE_MAX_PROB,
    REDUCE_SUM_PROB,
    REDUCE_MEAN_RAW,
    REDUCE_MAX_RAW,
    REDUCE_NATIVE
};

enum partition_map { MAP_PAGE, MAP_RANGE, MAP_GATHER, MAP_TOKEN };

/* Reduces scores over the group and picks. Pages come out in ascending order, the sinks' included;
 * the budget is counted in rows of the partitions picked, best first, whole partitions only, at least
 * one. Ties: the smaller partition; so where no score is above -inf, the first ones, and nothing is estimated.
 * n_pages never exceeds page_cap: the caller sizes it from the
 * budget (every row of a TOKEN map may need a page of its own). */
struct select_args {
    const struct kv_memory *kv;
    struct digest_desc desc;
    enum partition_map map;
    enum group_reduce reduce;
    uint32_t layer, group;
    const struct plan_row *rows;
    uint32_t n_rows;
    const float *scores;
    uint32_t stride;
    const float *known; /* [plan row][KV head][group] from `known`: REDUCE_*_PROB are shares of this
                           mass and the partitions'; NULL: of the partitions' alone */
    uint32_t page_cap, estimate_cap;
    uint32_t *pages;     /* [..][page_cap] page index in the sequence */
    uint32_t *masks;     /* [..][page_cap] rows of the page to attend; NULL with MAP_PAGE: all */
    float *share;        /* [..][page_cap] mass relative to the best partition's; sinks: 1 */
    uint32_t *n_pages;   /* [..] */
    uint32_t *estimates; /* [..][estimate_cap] partitions, ascending */
    uint32_t *n_estimates;
    /* Counts (row, KV head) pairs with no score above -inf; NULL: does not. */
    uint32_t *unscored;
};

/* Turns pages into blocks in HBM, in place: through the block table where the sequence is RESIDENT;
 * else through its hot set, fetching what misses. With a miss threshold, a light miss moves from
 * pages to estimates. */
struct resolve_args {
    const struct kv_memory *kv;
    struct digest_desc desc;
    uint32_t layer;
    const struct plan_row *rows;
    uint32_t n_rows;
    uint32_t page_cap, estimate_cap;
    uint32_t *pages, *masks; /* in: page index; out: SPARSE block in HBM */
    const float *share;
    uint32_t *n_pages, *estimates, *n_estimates;
};

/* What the host has done to hot sets between steps. Their headers (struct hot_set) are the host's and read
 * within the call; the arrays behind them are backend memory. */
enum hot_kind {
    HOT_FILL,   /* a leaf's numbers become HOT_NEVER; no set */
    HOT_STEP,   /* ends a step of each set: nothing is in use; what its epoch must sweep is swept */
    HOT_CLEAR,  /* slots [begin, end) are empty, whatever they held */
    HOT_FORGET, /* empties slots [begin, end); their pages become ghosts */
    HOT_MOVE,   /* slots [0, n_slots) from the arrays of `old` */
    HOT_DECAY,  /* halves the distances that were counted; begin: how often that was done before */
    HOT_READ, /* statistics of all lanes to the host's memory `to`; then *arrived grows by one: at once
                   on the CPU, else in a sync, a wait or a free once it has happened. Before the set's stats are
                   freed both stay where they are. */
};

struct hot_args {
    enum hot_kind kind;
    const struct hot_set *const *sets; /* [n_sets]; but for HOT_FILL and HOT_STEP: one */
    uint32_t n_sets;
    const struct hot_set *old;
    uint32_t begin, end;
    uint16_t *leaf;
    size_t leaf_bytes;
    struct hot_lane_stats *to; /* [n_lanes] */
    uint32_t *arrived;
};

/* What the plans of a layer say: the outputs of resolve, as attend reads them. */
struct attend_plans {
    struct digest_desc desc;
    const struct plan_row *rows;
    uint32_t n_rows, page_cap, estimate_cap, stride;
    const uint32_t *pages, *masks, *n_pages, *estimates, *n_estimates;
    const float *scores; /* logits of the estimated entries, by query head */
    const void *tail;    /* what `known` kept of these rows; NULL: it was not called */
};

/* Attention of every row over its own sequence. Query head h reads KV head h / (heads / kv_heads).
 * Softmax over entries (k, v, beta) (DESIGN 5): exact rows have beta = 0; an estimated partition is
 * one entry with its score as logit (log-mass: beta = log of its size is inside) and its mean V.
 * Order of sums: pages of the plan in list order, then the tail in position order, then estimates. */
struct attend_args {
    const struct kv_memory *kv;
    uint32_t layer, heads;
    const struct batch_seq *seqs;
    uint32_t n_seqs;
    float scale;
    const void *qkv; /* as left by append: q is the first heads * head_dim of each row */
    const struct attend_plans
        *plans; /* [n_plans], one per plug-in instance; seqs' first_plan counts
                                         through all of them in order */
    uint32_t n_plans;
    void *out;  /* act [n_rows][heads * head_dim] */
    float *lse; /* [n_rows][heads] natural log of the sum, or NULL */
};

/* What the model has of a layer. */
struct layer_weights {
    struct weight *qkv, *out, *gate_up, *down;
    const float *attn_norm, *ffn_norm;       /* [hidden] gains of RMSNorm */
    const float *qkv_bias, *q_norm, *k_norm; /* as of append_args */
};

/* All layers of a step at once: embed, and per layer linear with attn_norm, append, attend, linear (ADD), linear
 * with ffn_norm (SWIGLU), linear (ADD). Row i of the batch is seqs[i], and all there is of it. */
struct layers_args {
    const struct layer_weights *layers; /* [n_layers], all of one shape */
    const struct weight *embedding;
    const struct kv_memory *kv;
    uint32_t n_layers, heads;
    const uint32_t *tokens; /* [n_seqs] as of embed_args */
    const struct batch_seq *seqs;
    uint32_t n_seqs;
    const float *rope_cos, *rope_sin;
    float norm_eps, scale;
    void *out; /* act [n_seqs][hidden]: the residual stream */
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
    /* results, valid after sync or wait */
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

/* How much of what alloc_host gave is there. */
struct host_progress {
    uint64_t ready, bytes; /* of bytes */
    bool ended;            /* ready grows no more */
    const char *why;       /* it ended before bytes; else NULL. What to do is said, too */
};

/* How steps were run since the device was opened, and what is kept to run them again. */
struct step_counts {
    uint64_t replayed, captured, listed; /* at one launch; recorded for that; command by command */
    uint64_t graphs, graph_bytes;        /* recorded steps that are kept; their device memory */
    uint64_t dropped, refused;           /* that made room for others; that could not be recorded */
    uint64_t
        slow; /* in which a prompt was attended by a slower kernel, for want of a plan or of memory */
    uint32_t busy_us,
        idle_us; /* of the last step waited for: of the device, from its first command to its last;
                                  and before it, from the end of the step in front. 0: not known */
};

struct backend_ops {
    const char *name; /* "cpu", "mock", "cuda" */
    uint32_t act_bytes;
    uint32_t step_rows, step_seqs; /* of a step where nobody says; loose: of prompts */
    bool loose;     /* the last bits of a row depend on how its prompt was cut, and on the batch */
    bool keeps_fp8; /* every operation takes pages of KV_E4M3; all backends take KV_BF16 */
    void (*close)(struct backend *be);
    /* One line for the log: instruction set or device name, threads, memory. */
    const char *(*describe)(struct backend *be);
    /* A line for the log that nobody has heard yet, or NULL: what was prepared behind the start, what is missing
     * and makes it slow (*bad). Valid until the next call. NULL: it never has any. */
    const char *(*news)(struct backend *be, bool *bad);

    void *(*alloc)(struct backend *be, size_t bytes); /* zeroed or fresh; NULL + err(ERR_MEMORY) */
    void (*free)(struct backend *be, void *p, size_t bytes);
    void (*copy)(struct backend *be, void *dst, const void *src, size_t bytes);
    status (*sync)(struct backend *be); /* waits; the first error since the last sync */
    /* After an error only sync may follow, until it has said so.
     * submit: what was queued begins to run, as one step, and what arguments pointed to is free again; but the
     * rows of `sample`, whose results are there when `wait`, which waits for the oldest step submitted,
     * returns. At most two are submitted at a time; sync waits for both. NULL, both: only sync. */
    void (*submit)(struct backend *be);
    status (*wait)(struct backend *be);
    /* n rounded up to one of few numbers: a step of answers that has so many rows runs as steps before it did
     * (step.c adds rows that belong to no sequence). NULL: numbers of rows make no difference. */
    uint32_t (*bucket)(uint32_t n);
    void (*counts)(struct backend *be,
                   struct step_counts *out); /* NULL: there is nothing to count */
    /* Bytes that alloc can still give. NULL: alloc gives the machine's own memory. */
    uint64_t (*memory)(struct backend *be);
    /* The second tier, where it is not alloc's memory: of the host, for the device to read as well. NULL:
     * alloc. Addresses are given at once; [0, ready) of them may be used, and from the first host_progress on
     * ready grows by itself. */
    void *(*alloc_host)(struct backend *be, size_t bytes); /* NULL + err(ERR_MEMORY) */
    void (*free_host)(struct backend *be, void *p, size_t bytes);
    void (*host_progress)(struct backend *be, const void *p, struct host_progress *out);

    /* Packs the parts; reports non-finite scales as ERR_FORMAT. The file may be unmapped after. */
    status (*weight_create)(struct backend *be, const struct weight_desc *d, struct weight **out);
    void (*weight_destroy)(struct backend *be, struct weight *w);
    size_t (*weight_bytes)(const struct weight *w);

    void (*embed)(struct backend *be, const struct embed_args *a);
    void (*linear)(struct backend *be, const struct linear_args *a);
    void (*append)(struct backend *be, const struct append_args *a);
    void (*attend)(struct backend *be, const struct attend_args *a);
    /* false: not for such shapes or such rows, and nothing was queued. NULL: for none. */
    bool (*layers)(struct backend *be, const struct layers_args *a);

    size_t (*digest_bytes)(const struct kv_geometry *geo, const struct digest_desc *d); /* of a
                                  record's lane part in all, digest_offset included; * 64 */
    void (*seal)(struct backend *be, const struct seal_args *a);
    void (*unpermute)(struct backend *be, const struct unpermute_args *a);
    void (*score)(struct backend *be, const struct score_args *a);
    size_t (*known_bytes)(const struct kv_geometry *geo, uint32_t heads); /* of a (row, KV head)'s
                                                                            tail; * 64 */
    void (*known)(struct backend *be, const struct known_args *a);
    void (*select)(struct backend *be, const struct select_args *a);
    void (*resolve)(struct backend *be, const struct resolve_args *a);
    void (*hot)(struct backend *be, const struct hot_args *a);
    void (*sample)(struct backend *be, const struct sample_args *a);
    void (*read)(struct backend *be, const struct read_args *a);
};

struct backend {
    const struct backend_ops *ops;
};

/* Can rows attend by plan? A backend has all that takes, or is asked for nothing of it. */
static inline bool backend_plans(const struct backend_ops *ops)
{
    return ops->digest_bytes != NULL && ops->seal != NULL && ops->unpermute != NULL &&
           ops->score != NULL && ops->known_bytes != NULL && ops->known != NULL &&
           ops->select != NULL && ops->resolve != NULL;
}

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
    uint32_t row_ns;    /* and what each of its rows takes on top: prompts take long */
    uint32_t nan_every; /* every n-th sampled row is reported bad; 0: never */
    uint32_t
        eos_every; /* every n-th output position of a sequence draws token eos_token; 0: never */
    uint32_t eos_token, first_token, n_tokens; /* tokens cycle through [first_token, + n_tokens) */
    uint32_t fail_step;  /* this step, counted from 1, returns ERR_DEVICE; 0: none */
    uint32_t fail_count; /* and so many in all do, from there on; 0 and 1: only that */
    const char *trace; /* file for the time of every step's end (uint64_t, clock_us); NULL: none */
};
status mock_backend_open(struct backend **out, const struct mock_options *o);

CORE_FN struct lane_place kv_lane(const struct kv_geometry *g, uint32_t layer, uint32_t head)
{
    uint32_t lane = layer * g->kv_heads + head;
    struct lane_place place = {LANE_SPARSE, (uint16_t)lane};
    return g->lanes != NULL ? g->lanes[lane] : place;
}

/* Of the lane's page from the beginning of a block of its class. */
CORE_FN size_t kv_page_offset(const struct kv_geometry *g, uint32_t layer, uint32_t head)
{
    return kv_lane(g, layer, head).index * g->page_bytes;
}

#ifdef __cplusplus
}
#endif
#endif
