/* The partition contract (DESIGN 5): how a sparse-attention algorithm says which rows a query
 * attends, exactly or approximately. One file per algorithm, one line in registry.c; the same table
 * in a shared object is loaded with --plugin FILE.so.
 *
 * A plug-in groups the sealed rows of a lane into partitions, keeps a digest for each in the
 * sequence's digest records, and scores digests against queries. The rest is the host's
 * (engine/attention.c): always-on sets, reduction over the group, top-k and top-p, budgets, residency,
 * fetching, attention, merging. A plug-in works on all lanes of a layer at once, never allocates in a
 * step, never synchronises and never sees where a page lies; what it does by the backend's operations
 * runs wherever the backend runs, and when it likes: what their arguments point to (not the arguments
 * themselves) must live on until the layer is attended, and results are there after `copy` or `read` only. */
#ifndef SPARSE_PLUGIN_H
#define SPARSE_PLUGIN_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SPARSE_ABI = 2, SPARSE_MAX_OPTIONS = 12, SPARSE_MAX_PLUGINS = 16 };

/* A preset that leaves the value to describe(): below every range. */
#define SPARSE_PRESET_AUTO (-1.0)

enum sparse_option_type { SPARSE_BOOL, SPARSE_COUNT, SPARSE_NUMBER, SPARSE_CHOICE };

/* One option of a plug-in: `"sparse": {"estimate": 0.25}` of a request, `--sparse-option
 * estimate=0.25` of the server. A value is a double: 0 or 1, a whole number, a number, or the index
 * of a choice. */
struct sparse_option {
    const char *name, *help;
    enum sparse_option_type type;
    double preset, min, max; /* preset: in range, or SPARSE_PRESET_AUTO */
    const char *choices;     /* SPARSE_CHOICE: "a|b|c" */
};

/* What a request asks for; flat, so that it travels in a message. */
struct sparse_choice {
    uint32_t plugin;      /* index in the registry */
    uint32_t interval;    /* select every n-th step; 1: in every step */
    float budget;         /* (0, 1]: share of the context; > 1: rows. Selected rows per lane */
    float top_p;          /* 1: off */
    float miss_threshold; /* 0: off */
    uint32_t min_rows; /* the budget is at least so many rows, where the context has them; 0: off */
    double values[SPARSE_MAX_OPTIONS];
};

/* What one instance (a plug-in with values for its options, on this model) is. */
struct sparse_traits {
    enum partition_map map;
    bool attends_all; /* `dense`: nothing is selected; nothing below is read */
    uint32_t parts;   /* partitions of a segment: SEGMENT_ROWS / R for MAP_PAGE */
    enum group_reduce reduce;
    bool known_mass; /* REDUCE_*_PROB count the rows attended in any case to the mass */
    uint32_t sinks;  /* rows at the start that are always attended */
    float estimate;  /* share of all partitions estimated after the selected ones; 0: none */
    bool
        on_host; /* seal or score read or write backend memory themselves, or by `read`: served where
                        that is the host's (the CPU backend) */
    bool permutes; /* seal changes the order of rows: the prefix cache keeps such blocks apart */
    struct digest_desc digest; /* of the built-in kinds; kind DIGEST_NONE: `digest_bytes` is ours */
    size_t digest_bytes; /* of a lane's part of a record; filled from the backend if kind is not
                            DIGEST_NONE. At most what the process was started with */
};

/* The lanes of a layer and the rows that query them. */
struct sparse_rows {
    const struct kv_memory *kv;
    struct backend *be;
    uint32_t layer, heads, group; /* group: query heads per KV head */
    const struct plan_row *rows;
    uint32_t n_rows;
    const void *qkv; /* act [batch rows][(heads + 2 kv_heads) * head_dim], q rotated */
    float scale;
};

/* The lane's part of a record, as sealed: where a plug-in with digests of its own reads and writes
 * them. NULL if the lane is not SPARSE. */
static inline void *sparse_digest(const struct kv_memory *kv, uint32_t record, uint32_t layer,
                                  uint32_t head)
{
    struct lane_place p = kv_lane(kv->geo, layer, head);
    if (p.class_ != LANE_SPARSE)
        return NULL;
    return (char *)kv->records + (size_t)record * kv->record_bytes +
           p.index * kv->record_lane_bytes;
}

/* Query head h (of the layer) of plan row i, for plug-ins that score on the host (CPU backend). */
static inline const float *sparse_query(const struct sparse_rows *r, uint32_t i, uint32_t h)
{
    const struct kv_geometry *g = r->kv->geo;
    size_t width = (size_t)(r->heads + 2 * g->kv_heads) * g->head_dim;
    return (const float *)r->qkv + r->rows[i].row * width + (size_t)h * g->head_dim;
}

struct sparse_plugin {
    uint32_t abi;                        /* SPARSE_ABI */
    const char *name;                    /* [a-z][a-z0-9_]*, at most 15 characters */
    const char *help;                    /* one line */
    const struct sparse_option *options; /* [n_options] */
    uint32_t n_options;

    /* Traits for these values on this model. ERR_ARG with a text that names the option and what is
     * allowed. */
    status (*describe)(const struct kv_geometry *geo, const double *values,
                       struct sparse_traits *out);
    /* Orders a segment's rows and writes its digests (all SPARSE lanes). Called once per segment, in
     * order; depends on nothing but the rows and the segment's number; with DIGEST_CODES also on
     * segment 0's record (seal_args.first_record). NULL: nothing to keep. */
    void (*seal)(struct backend *be, const struct sparse_traits *t, const double *values,
                 const struct seal_args *a);
    /* scores[plan row][KV head][head of the group][stride]: see score_args. NULL with attends_all. */
    void (*score)(const struct sparse_rows *r, const struct sparse_traits *t, const double *values,
                  float *scores, uint32_t stride);
};

/* ---- registry.c ---- */

/* Built-ins first, in DESIGN's order, then what --plugin loaded. */
uint32_t sparse_count(void);
const struct sparse_plugin *sparse_at(uint32_t i);
/* ERR_ARG: unknown name; the text lists the known ones. */
status sparse_find(const char *name, uint32_t *out);
/* Loads a shared object whose symbol `spind_sparse_plugin` is a struct sparse_plugin. ERR_ARG with
 * what is wrong: no file, no symbol, another ABI, a name that is taken or malformed, no score. Before
 * any thread starts. */
status sparse_load(const char *file);

/* A field that every choice has ("budget", ...): no plug-in's option is called so. */
bool sparse_is_common(const char *name);
bool sparse_option_takes(const struct sparse_option *o, double value); /* is it in range? */
/* Presets of the plug-in's options, interval 1, nothing else. */
struct sparse_choice sparse_choice_make(uint32_t plugin, float budget);
/* Sets one option from text ("on", "8", "0.25", a choice). ERR_ARG: unknown name or value out of
 * range; the text names the allowed ones. */
status sparse_choice_set(struct sparse_choice *c, const char *name, const char *value);
/* The same from a number (JSON), choices by text only; also budget, min_rows, interval, top_p
 * and miss_threshold. */
status sparse_choice_set_number(struct sparse_choice *c, const char *name, double value);
/* Ranges of every option, describe(), and ranges of the common fields. A choice of zeros is `dense`,
 * of which nothing else is checked. */
status sparse_choice_check(const struct sparse_choice *c, const struct kv_geometry *geo,
                           struct sparse_traits *out);
/* The same plug-in, with the same values for everything? */
bool sparse_choice_equal(const struct sparse_choice *a, const struct sparse_choice *b);
/* Bytes of a lane's part of a record; 0: no digests. of: the backend's digest_bytes, which is asked
 * about its own kinds and orders alone. */
size_t sparse_digest_bytes(const struct sparse_traits *t, const struct kv_geometry *geo,
                           size_t (*of)(const struct kv_geometry *geo,
                                        const struct digest_desc *d));
/* Names the order of rows and the digests: equal for choices that may share sealed segments. 0: rows
 * in position order. */
uint64_t sparse_layout_id(const struct sparse_choice *c, const struct sparse_traits *t);
/* Names the digests: sequences of equal id may share records. 0: no digests. */
uint64_t sparse_digest_id(const struct sparse_choice *c, const struct sparse_traits *t);

#ifdef __cplusplus
}
#endif
#endif
