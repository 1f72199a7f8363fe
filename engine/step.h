/* One step: the planned rows become a batch, the batch becomes logits, logits become tokens, tokens
 * become events. Engine thread only; its arrays are allocated once. */
#ifndef ENGINE_STEP_H
#define ENGINE_STEP_H

#include "engine/model/model.h"
#include "engine/report.h"
#include "engine/sched.h"

struct step {
    struct backend *be;
    struct model *model;
    struct kv *kv;
    struct attention *at; /* NULL: nothing attends by plan */
    struct sched *sched;
    struct report *report;
    uint32_t max_rows, max_seqs, max_logits;
    /* The batch being built, then run. */
    uint32_t *tokens;          /* [max_rows] */
    struct batch_seq *seqs;    /* [max_seqs] */
    struct kv_seq **stepped;   /* [max_seqs] those that attended by plan */
    uint32_t *logit_rows;      /* [max_logits] */
    struct sample_row *sample; /* [max_logits], one per logit row, in the same order */
    uint32_t n_rows, n_logits;
    uint64_t prompt_tokens, output_tokens; /* computed since start */
    uint64_t planned_rows;                 /* of these, rows that attended by plan */
};

/* max_rows, max_seqs, at: as the scheduler's. Reserves the model's activations too. */
status step_init(struct step *st, struct backend *be, struct model *model, struct kv *kv,
                 struct sched *sched, struct report *report);
void step_fini(struct step *st);

/* Runs sched->plan. A device error ends every sequence of the plan with DONE_DEVICE; a non-finite
 * logit ends its own sequence with DONE_NUMERIC. The text of a device error is in err_text(). */
status step_run(struct step *st);

#endif
