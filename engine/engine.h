/* The engine: one thread that owns sequences, blocks and the device, and runs steps.
 *
 * Everything it hears and says goes through its mailbox (engine/message.h). engine_create opens the
 * device and the model on the calling thread, with progress on the log; engine_start begins to
 * serve. */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include "engine/catalog.h"
#include "engine/mailbox.h"
#include "kernels/cuda_api.h"
#include "sparse/head_policy.h"

struct engine;
struct tokenizer;
struct chat_template;

struct engine_config {
    const char *model;  /* path of a GGUF file; NULL with device "mock": a made-up model */
    bool dummy;         /* model is a config.json (or its folder) whose weights are made up */
    const char *device; /* "auto", "cpu", "cuda", "mock" */
    struct cpu_options cpu;
    struct mock_options mock;
    struct cuda_options cuda;
    uint32_t block_rows;  /* R: 8, 16 or 32 */
    enum kv_type kv_type; /* of pages; a device that lacks it is refused */
    double
        device_share; /* of a device's memory that is free behind the weights, for KV and digests where
                            kv_hbm_bytes does not say; 0 or less: all but what a step needs */
    uint64_t kv_hbm_bytes;       /* 0: chosen from max_model_len and max_num_seqs */
    uint64_t kv_dram_bytes;      /* 0: no second tier */
    uint32_t max_model_len;      /* 0: the model's */
    uint32_t max_num_seqs;       /* sequences that run together; 0: as suits the device */
    uint32_t max_batched_tokens; /* rows of a step; 0: as suits the device */
    bool prefix_caching;
    struct sparse_choice sparse; /* of requests that do not say (catalog_choose); zeros: dense */
    uint32_t sparse_offered;     /* catalog_make */
    uint32_t sparse_min_context; /* prompts with fewer tokens attend everything */
    struct head_policy_config heads;
    double transfer_headroom; /* predicted time to fetch misses, as a share of a step's; a sequence
                                 that would bring it above this waits. 0: no limit */
    bool write_behind;        /* copy sealed blocks to spare DRAM before it is needed */
    const char *record_selection; /* file for what every row selects; NULL: none */
    uint64_t seed;        /* secret of the prefix cache's hash; from the system's randomness */
    size_t to_loop_bytes; /* event ring; 0: default */
};

/* What the API must know of the model. Borrowed from the engine; constant after engine_create. */
struct engine_info {
    const char *architecture, *name; /* name: general.name, or the file name */
    const char *backend;             /* one line: device, instruction set, threads */
    const struct tokenizer *tokenizer;
    const struct chat_template *chat; /* NULL: the model has no template */
    uint64_t n_params, weight_bytes;
    uint32_t vocab;         /* width of the logits */
    uint32_t max_model_len; /* after clamping to what the block pool can hold */
    uint32_t
        max_dense_len; /* of it, where every row attends everything: HBM holds it whole; 0: all */
    uint32_t block_rows, max_num_seqs, max_batched_tokens;
    enum kv_type kv_type;
    uint64_t kv_blocks[2], kv_block_bytes; /* HBM, DRAM */
    uint32_t end_ids[8], n_end_ids;        /* tokens that end a generation */
    bool prefix_caching;
    const struct catalog *catalog; /* what requests may ask of sparse attention; NULL: nothing */
};

/* Loads everything, on the calling thread (which need not be the loop's: weights take a while and
 * /health must answer). wake/arg: see mailbox_create. */
status engine_create(struct engine **out, const struct engine_config *cfg, void (*wake)(void *),
                     void *arg);
/* What such an engine would put where, line by line, without allocating it (`spind inspect`). Loads the
 * model. The same errors as engine_create. */
typedef void engine_line(void *arg, const char *text);
status engine_inspect(const struct engine_config *cfg, engine_line *line, void *arg);
/* Whether such an engine could be: flags, the model's header and what they say of each other; no device is
 * opened, no memory taken. One line of what would be loaded; none for the mock. */
status engine_check(const struct engine_config *cfg, engine_line *line, void *arg);
const struct engine_info *engine_info(const struct engine *e);
struct mailbox *engine_mailbox(struct engine *e);
status engine_start(struct engine *e); /* starts the thread */
/* Asks the thread to end (MSG_QUIT), joins it and frees everything. The loop must go on draining
 * nothing: events still queued are dropped. */
void engine_destroy(struct engine *e);

#endif
