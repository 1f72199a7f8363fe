/* What the commands of `spind eval` share: their words, the open run, the text, the settings to
 * compare, and the results. Used by eval*.c alone. */
#ifndef ENGINE_TOOL_EVAL_H
#define ENGINE_TOOL_EVAL_H

#include "engine/tool/args.h"
#include "engine/tool/eval_run.h"
#include "engine/tool/plot.h"
#include "engine/tool/sheet.h"
#include "engine/tool/tasks.h"

enum { EVAL_MAX_SETTINGS = 64 };

/* One thing to measure: a plug-in with options and a budget. */
struct eval_setting {
    char label[48]; /* "wave", "wave outliers=0" */
    struct sparse_choice choice;
    double budget; /* as asked for */
};

struct eval {
    /* words */
    const char *model, *isa, *text_file, *json, *svg, *policy, *policy_file, *out, *cache;
    const char *kv_cache_dtype;
    struct args_list plugins, options, budgets, tasks, lengths, modes, pieces;
    uint32_t threads, block_rows, exempt_layers, context, tokens, offset, depths, samples, rows;
    uint32_t interval;
    bool quick;
    double rope_scale, top_p;
    uint32_t seed;

    enum kv_type kv_type; /* of the next eval_open */
    struct eval_run *run;
    const struct kv_geometry *geo; /* of the run, or of a trace: what options are checked against */
    struct token_scratch *scratch;
    char *text; /* [text_len] read or generated */
    size_t text_len;
    uint32_t *text_tokens, n_text_tokens;
    struct eval_setting settings[EVAL_MAX_SETTINGS];
    uint32_t n_settings;
    const float *reference; /* what KL is measured against; NULL: the run's own dense rows */
    cJSON *sheet;
    uint32_t n_done, n_todo; /* progress: pieces of work */
    uint64_t start_us;
};

/* One command: presets are set before the words are read. */
struct eval_command {
    const char *name, *help;
    void (*preset)(struct eval *e);
    status (*run)(struct eval *e);
};
extern const struct eval_command eval_kl, eval_passkey, eval_ruler, eval_turns, eval_robustness,
    eval_planted, eval_quality;

/* Opens the model for sequences of max_positions; a run that is open already is closed first. */
status eval_open(struct eval *e, uint32_t max_positions);
void eval_shut(struct eval *e);
/* Text: of --text, or generated; at least `tokens` of it behind --offset. ERR_ARG: too short. */
status eval_read_text(struct eval *e, uint32_t tokens);
/* settings := plug-ins x budgets with the options; needs the open run. */
status eval_make_settings(struct eval *e);
/* One more. options: "a=1,b=2", or NULL. */
status eval_add_setting(struct eval *e, const char *label, const char *plugin, const char *options,
                        double budget);
double eval_list_number(const char *text, double *out); /* returns it too; NAN: not a number */

void eval_expect(struct eval *e, uint32_t pieces);
/* One more piece is done: a line of progress on stderr with what it found. */
void eval_progress(struct eval *e, const char *fmt, ...) PRINTF_LIKE(2, 3);

/* ---- pieces that `quality` runs too ---- */

/* Prefills e->context tokens and computes e->tokens behind them densely, which makes the text that
 * eval_kl_rows compares on. logits: [tokens][vocab]. */
status eval_kl_dense(struct eval *e, float *logits);
/* Where pages are to be of fp8: the same with pages of bf16 into *out, allocated, and e->reference; so what
 * follows is compared with that, and KL is what both cost together. Else nothing. The model is closed. */
status eval_kl_reference(struct eval *e, float **out);
/* A row for each setting: KL over e->tokens teacher-forced tokens behind e->context, to
 * e->reference or else to the dense rows of this run. */
status eval_kl_rows(struct eval *e, cJSON *rows);
/* What tasks came to, for one setting. */
struct eval_outcome {
    uint32_t asked, right_dense, right, kept; /* references: in all, found by ... , by both */
    uint32_t n_answer;                        /* answer tokens */
    double kl, logprob, logprob_dense;        /* sums over them */
};
/* Runs a task with dense and then with each setting, and adds to outcomes[n_settings]. */
status eval_task(struct eval *e, const struct task *t, struct eval_outcome *outcomes);
/* Keys of an outcome into a row: dense_right, right, kept, kept_share, kl, logprob, logprob_dense. */
void eval_outcome_row(cJSON *row, const struct eval_outcome *o);
/* Passkeys at e->depths depths; a row for each setting. */
status eval_passkey_rows(struct eval *e, cJSON *rows);
/* Recall of the heaviest rows over e->rows rows behind e->context; a row for each setting. */
status eval_robustness_rows(struct eval *e, cJSON *rows);
/* The tasks of e->tasks at e->lengths, and five questions in turn: e->samples prompts each. */
status eval_ruler_rows(struct eval *e, cJSON *rows);
status eval_turns_rows(struct eval *e, cJSON *rows);
/* Traces of e->modes at e->lengths, for the plug-ins and budgets in the words; needs no run. */
status eval_planted_rows(struct eval *e, cJSON *rows);
/* plug-in, options, budget and what it costs, into a row. */
status eval_setting_row(struct eval *e, cJSON *row, const struct eval_setting *s, uint32_t context);

#endif
