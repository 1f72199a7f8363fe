/* What the two files of engine/attention.h share: attention_instance.c keeps choices and what
 * sequences keep, attention.c runs a step. */
#ifndef ENGINE_ATTENTION_INTERNAL_H
#define ENGINE_ATTENTION_INTERNAL_H

#include "engine/attention.h"

struct instance {
    struct sparse_instance pub; /* first: what callers hold points here */
    uint32_t refs;
    struct instance *next;
    uint32_t *unscored; /* selections without a score. Backend memory */
    bool warned;        /* of them */
    /* Of the step being planned: sizes that suit each of its rows. */
    uint32_t stride, page_cap, estimate_cap;
    size_t row_bytes;
};

/* A selection per layer, as select wrote it. Backend memory. */
struct attention_seq {
    uint64_t id;
    uint32_t n_lists;                /* layers * kv_heads */
    uint32_t page_cap, estimate_cap; /* 0: interval 1, nothing is kept */
    uint32_t pos, n_segments;        /* of the row that was kept */
    bool has;
    size_t bytes;
    uint32_t *pages, *masks, *estimates; /* [n_lists][cap] */
    float *share;
    uint32_t *n_pages, *n_estimates; /* [n_lists] */
};

/* A row of the step, beside its plan_row. */
struct planned {
    struct instance *in;
    struct attention_seq *seq;
    bool selects;
    bool keeps; /* the last of its sequence in the tile, and a later row may re-use its selection */
};

/* Rows of one instance in one tile. */
struct group {
    struct instance *in;
    uint32_t first, n; /* of at->rows */
    float *scores;     /* [n][kv_heads][group][stride] */
    float *known;      /* [n][kv_heads][group] */
    void *tail;        /* [n][kv_heads], of the backend */
    uint32_t *pages, *masks, *estimates, *n_pages, *n_estimates;
    float *share;
};

struct tile {
    uint32_t first_seq, n_seqs;     /* of at->seqs */
    uint32_t first_group, n_groups; /* of at->groups, at->plans */
};

struct attention {
    struct backend *be;
    const struct kv_memory *kv;
    uint32_t heads, max_rows, max_positions;
    float scale;
    struct instance *instances;
    attention_recorder *record;
    void *record_arg;
    uint64_t unscored; /* of instances that are gone */

    uint32_t n_rows;
    bool is_cut;                       /* tiles are made; the first layer of a step does it */
    struct plan_row *added, *rows;     /* [max_rows] as added; by tile and instance */
    struct planned *added_with, *with; /* [max_rows] beside added and rows */
    struct tile *tiles;                /* [max_rows + 1] */
    struct group *groups;              /* [max_rows] */
    struct attend_plans *plans;        /* [max_rows] beside groups */
    uint32_t n_tiles, n_groups;
    struct batch_seq *seqs; /* [max_seqs] the batch's, cut and with first_plan of the tile */
    uint32_t n_seqs, max_seqs;
    void *buffer; /* backend memory, shared by the tiles one after the other */
    size_t buffer_bytes;
    size_t kept_bytes; /* of all attention_seqs: at most ATTENTION_KEPT_BYTES */
};

static inline uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static inline uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static inline uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return a / b + (a % b != 0);
}

static inline uint32_t group_size(const struct attention *at)
{
    return at->heads / at->kv->geo->kv_heads;
}

/* Pages that a row with this budget may name (attention_instance.c). */
uint32_t attention_page_cap(const struct sparse_instance *in, const struct kv_geometry *geo,
                            uint32_t budget, uint32_t n_segments);
/* Partitions to estimate. */
uint32_t attention_estimates(const struct sparse_traits *t, uint32_t n_segments);

#endif
