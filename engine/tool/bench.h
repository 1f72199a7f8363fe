/* What the commands of `spind bench` share: the words, and which engines and settings they ask for. */
#ifndef ENGINE_TOOL_BENCH_H
#define ENGINE_TOOL_BENCH_H

#include "engine/tool/args.h"
#include "engine/tool/bench_run.h"
#include "engine/tool/sheet.h"

enum { BENCH_MAX_SETTINGS = 32, BENCH_MAX_NUMBERS = ARGS_LIST_MAX };

struct bench_setting {
    char label[48]; /* "wave 0.02" */
    struct sparse_choice choice;
    double budget; /* as said; 0: dense */
};

struct bench_numbers {
    double v[BENCH_MAX_NUMBERS];
    uint32_t n;
};

struct bench {
    /* words */
    const char *model, *device, *isa, *load_format, *kv_hbm, *kv_dram, *json, *svg, *fill;
    struct args_list batches, contexts, plugins, budgets, options, hot, feeds, tokens;
    const char *kv_cache_dtype;
    uint32_t threads, block_rows, steps, warm, chunk, exempt_layers, seed, repeat, patience_s;
    uint32_t min_rows, mock_step_us, churn, max_model_len;
    double top_p;
    bool debug;
    /* from them */
    struct engine_config config; /* of an engine for everything RESIDENT */
    struct bench_setting settings[BENCH_MAX_SETTINGS];
    uint32_t n_settings;
    cJSON *sheet;
};

/* Whole numbers in [min, max]; `preset` where none was given. ERR_ARG names the option. */
status bench_numbers(struct bench_numbers *out, const struct args_list *words, const char *name,
                     const char *preset, double min, double max);
status bench_decode(struct bench *b);  /* bench_decode.c */
status bench_prefill(struct bench *b); /* bench_prefill.c */

#endif
