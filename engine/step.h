/* One step: the planned rows become a batch, the batch becomes logits, logits become tokens, tokens
 * become events. Engine thread only; its arrays are allocated once.
 *
 * A step is launched, then settled. Where the backend can queue a step behind one that runs, and all that
 * runs are answers, the next step is launched *ahead*, before the tokens of the one before are known: the
 * device takes them from itself, and the host reads and reports them while it computes. Who turns out to
 * have ended has a row in the step ahead that nobody reads. */
#ifndef ENGINE_STEP_H
#define ENGINE_STEP_H

#include "engine/model/model.h"
#include "engine/report.h"
#include "engine/sched.h"

enum {
    STEP_MAX_AHEAD = 31
}; /* steps in a row without a plan: residence looks at budgets now and then */

/* A step that was launched, or is being built. */
struct flight {
    struct sequence **plan;    /* [max_seqs]; NULL: ended since */
    uint32_t *tokens;          /* [max_rows] */
    struct batch_seq *seqs;    /* [max_seqs] */
    uint32_t *logit_rows;      /* [max_logits] */
    struct sample_row *sample; /* [max_logits], one per logit row, in the same order */
    uint32_t n_plan, n_rows, n_logits, n_decodes;
    uint32_t n_units;   /* of sched->deep, behind its rows; its rows may also be the last unit's */
    uint32_t n_submits; /* steps of the backend that it is */
    bool fills;         /* sched->plan_fills */
    bool stepped;       /* hot sets know that it is over */
};

struct step {
    struct backend *be;
    struct model *model;
    struct kv *kv;
    struct attention *at; /* NULL: nothing attends by plan */
    struct sched *sched;
    struct report *report;
    uint32_t max_rows, max_seqs, max_logits;
    struct flight flights[2]; /* the oldest is flights[first] */
    uint32_t first, n_flights;
    uint32_t n_ahead;                      /* steps since one was planned */
    status failed;                         /* of what a launch found out at once */
    struct kv_seq **stepped;               /* [max_seqs] those that attended by plan */
    uint64_t wait_us;                      /* what the last settling waited for the device */
    uint64_t prompt_tokens, output_tokens; /* computed since start */
    uint64_t planned_rows;                 /* of these, rows that attended by plan */
};

/* max_rows, max_seqs, at: as the scheduler's. Reserves the model's activations too. */
status step_init(struct step *st, struct backend *be, struct model *model, struct kv *kv,
                 struct sched *sched, struct report *report);
void step_fini(struct step *st);

/* Launches sched->plan; nothing may be in flight. */
void step_launch(struct step *st);
/* Launches another step of the sequences of the one in flight; false: that needs a plan, or the backend
 * cannot. At most one is ahead. */
bool step_ahead(struct step *st);
/* Waits for the oldest step in flight and tells its tokens. A device error ends every sequence in flight
 * with DONE_DEVICE; a non-finite logit ends its own sequence with DONE_NUMERIC. The text of a device error
 * is in err_text(). */
status step_settle(struct step *st);
/* The sequence is about to be destroyed by somebody else. */
void step_forget(struct step *st, const struct sequence *q);

#endif
