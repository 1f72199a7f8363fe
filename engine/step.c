/* Running a plan (step.h): build, run, settle.
 *
 * Blocks are offered to the prefix cache only when a finite logit has been seen behind them: KV of a
 * step that went wrong is never shared (reliability P10). Nor is what was computed by plan: a hit must
 * not depend on what another sequence selected. */
#include "engine/step.h"

#include "cache/residency.h"

#include <string.h>

status step_init(struct step *st, struct backend *be, struct model *model, struct kv *kv,
                 struct sched *sched, struct report *report)
{
    *st = (struct step){.be = be,
                        .model = model,
                        .kv = kv,
                        .at = sched->at,
                        .sched = sched,
                        .report = report,
                        .max_rows = sched->max_rows,
                        .max_seqs = sched->max_seqs,
                        .max_logits = sched->max_seqs + SCHED_SCORED_ROWS};
    if (st->max_logits > st->max_rows)
        st->max_logits = st->max_rows;
    st->tokens = mem_alloc(st->max_rows * sizeof *st->tokens);
    st->seqs = mem_alloc(st->max_seqs * sizeof *st->seqs);
    st->stepped = mem_alloc(st->max_seqs * sizeof(struct kv_seq *));
    st->logit_rows = mem_alloc(st->max_logits * sizeof *st->logit_rows);
    st->sample = mem_alloc(st->max_logits * sizeof *st->sample);
    return model_reserve(model, st->max_rows, st->max_logits);
}

void step_fini(struct step *st)
{
    mem_free(st->tokens);
    mem_free(st->seqs);
    mem_free(st->stepped);
    mem_free(st->logit_rows);
    mem_free(st->sample);
}

/* ---- build ---- */

static struct sample_row *want_logits(struct step *st, uint32_t row)
{
    CHECK(st->n_logits < st->max_logits);
    struct sample_row *r = &st->sample[st->n_logits];
    memset(r, 0, offsetof(struct sample_row, top)); /* of the row that was here in the last step */
    r->logits_row = st->n_logits;
    st->logit_rows[st->n_logits++] = row;
    return r;
}

/* Row p of the prompt predicts token p + 1. */
static void want_prompt_scores(struct step *st, const struct sequence *q, uint32_t first_row)
{
    if (!sequence_scores_prompt(q))
        return;
    for (uint32_t i = 0; i < q->n_scheduled; i++) {
        uint32_t index = q->n_computed + i + 1;
        if (index < q->n_scored || index >= q->n_prompt)
            continue;
        struct sample_row *r = want_logits(st, first_row + i);
        r->target = q->tokens[index];
        r->n_top = q->prompt_logprobs;
    }
}

static bool wants_token(const struct sequence *q)
{
    return q->n_computed + q->n_scheduled == q->n_tokens && sequence_n_output(q) < q->max_tokens;
}

static void want_token(struct step *st, const struct sequence *q, uint32_t last_row)
{
    struct sample_row *r = want_logits(st, last_row);
    bool too_short = sequence_n_output(q) < q->min_tokens;
    r->params = q->params;
    r->target = SAMPLE_DRAW;
    r->position = sequence_n_output(q);
    r->n_top = q->logprobs;
    r->banned = q->stop_ids;
    r->n_banned = too_short ? q->n_stop : 0;
    r->bias_ids = q->bias_ids;
    r->bias = q->bias;
    r->n_bias = q->n_bias;
    r->history = q->tokens;
    r->n_prompt = q->n_prompt;
    r->n_history = q->n_tokens;
}

/* Pages estimated for being absent, in all lanes; the difference of two calls is what counts. */
static uint32_t light_misses(const struct sequence *q)
{
    if (q->kv.hot == NULL || q->in->choice.miss_threshold <= 0)
        return 0;
    return (uint32_t)hot_set_light_misses(q->kv.hot);
}

static void plan_rows(struct step *st, struct sequence *q, struct batch_seq *b)
{
    b->planned = true;
    q->n_light_misses = light_misses(q); /* until settled: what there was before */
    b->first_plan = attention_rows(st->at);
    CHECK(q->kv.residence == KV_RESIDENT || b->n_rows == 1);
    for (uint32_t i = 0; i < b->n_rows; i++) {
        const struct plan_row row = {.row = b->first_row + i,
                                     .pos = b->first_pos + i,
                                     .n_segments = q->kv.n_segments,
                                     .records = q->kv.records,
                                     .blocks = q->kv.table[LANE_SPARSE],
                                     .hot = q->kv.hot};
        attention_add(st->at, q->in, q->keeps, &row);
    }
    st->planned_rows += b->n_rows;
}

static void build(struct step *st)
{
    const struct sched *s = st->sched;
    st->n_rows = st->n_logits = 0;
    if (st->at != NULL)
        attention_begin(st->at);
    for (uint32_t i = 0; i < s->n_plan; i++) {
        struct sequence *q = s->plan[i];
        struct batch_seq *b = &st->seqs[i];
        *b = (struct batch_seq){
            .first_row = st->n_rows, .n_rows = q->n_scheduled, .first_pos = q->n_computed};
        for (int c = 0; c < LANE_CLASSES; c++)
            b->blocks[c] = q->kv.table[c];
        if (sched_attends_by_plan(q))
            plan_rows(st, q, b);
        memcpy(st->tokens + st->n_rows, q->tokens + q->n_computed, (size_t)q->n_scheduled * 4);
        want_prompt_scores(st, q, st->n_rows);
        st->n_rows += q->n_scheduled;
        if (wants_token(q))
            want_token(st, q, st->n_rows - 1);
    }
    CHECK(st->n_rows == s->plan_rows && st->n_rows <= st->max_rows);
}

/* ---- run ---- */

static status run(struct step *st)
{
    const struct batch b = {.kv = kv_memory(st->kv),
                            .n_rows = st->n_rows,
                            .n_seqs = st->sched->n_plan,
                            .n_logits = st->n_logits,
                            .tokens = st->tokens,
                            .seqs = st->seqs,
                            .logit_rows = st->logit_rows,
                            .attention = st->at};
    if (st->sched->plan_fills) {
        TRY(model_fill(st->model, &b));
        return st->be->ops->sync(st->be);
    }
    const void *logits = model_forward(st->model, &b);
    if (st->n_logits > 0) {
        const struct sample_args a = {.logits = logits,
                                      .vocab = model_info(st->model)->shape.vocab,
                                      .n_rows = st->n_logits,
                                      .rows = st->sample};
        st->be->ops->sample(st->be, &a);
    }
    return st->be->ops->sync(st->be);
}

/* ---- settle ---- */

static void finish(struct step *st, struct sequence *q, enum done_reason reason, uint32_t token)
{
    report_done(st->report, q, reason, token, NULL);
    sched_remove(st->sched, q);
    sequence_destroy(q, st->at);
}

static bool is_stop(const struct sequence *q, uint32_t token)
{
    for (uint32_t i = 0; i < q->n_stop; i++)
        if (q->stop_ids[i] == token)
            return true;
    return false;
}

/* Takes the sequence's sample rows from *next on; false if a logit was not finite. */
static bool settle_scores(struct step *st, struct sequence *q, uint32_t *next, uint32_t end_row)
{
    while (*next < st->n_logits && st->logit_rows[*next] < end_row &&
           st->sample[*next].target != SAMPLE_DRAW) {
        const struct sample_row *r = &st->sample[(*next)++];
        if (r->bad)
            return false;
        report_prompt(st->report, q, q->n_scored, r);
        q->n_scored++;
    }
    return true;
}

static void settle_token(struct step *st, struct sequence *q, const struct sample_row *r,
                         uint64_t now_us)
{
    q->is_proven = true;
    if (!q->is_private)
        kv_seq_share(st->kv, &q->kv, q->tokens, q->in == NULL ? q->n_computed : q->n_prompt);
    q->tokens[q->n_tokens++] = r->token;
    st->output_tokens++;
    if (q->first_us == 0)
        q->first_us = now_us;
    q->last_us = now_us;
    report_token(st->report, q, r);
    if (is_stop(q, r->token))
        finish(st, q, DONE_STOP, r->token);
    else if (sequence_n_output(q) == q->max_tokens)
        finish(st, q, DONE_LENGTH, 0);
}

/* Before any of them may end. */
static void settle_plans(struct step *st)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < st->sched->n_plan; i++) {
        struct sequence *q = st->sched->plan[i];
        if (!st->seqs[i].planned)
            continue;
        q->n_light_misses = light_misses(q) - q->n_light_misses;
        st->stepped[n++] = &q->kv;
    }
    kv_step(st->kv, st->stepped, n);
}

static void settle(struct step *st, uint64_t now_us)
{
    struct sched *s = st->sched;
    uint32_t next = 0;
    settle_plans(st);
    /* Finishing a sequence changes s->running, never s->plan. */
    for (uint32_t i = 0; i < s->n_plan; i++) {
        struct sequence *q = s->plan[i];
        const struct batch_seq *b = &st->seqs[i];
        uint32_t end_row = b->first_row + b->n_rows, first_logit = next;
        bool draws = wants_token(q), decodes = sequence_decodes(q), fills = sequence_fills(q);
        bool good = settle_scores(st, q, &next, end_row);
        while (next < st->n_logits && st->logit_rows[next] < end_row)
            next++;
        q->n_computed += b->n_rows;
        q->n_scheduled = 0;
        q->planned = b->planned;
        st->prompt_tokens += decodes || fills ? 0 : b->n_rows;
        if (draws && next > first_logit && st->sample[next - 1].bad)
            good = false;
        if (!good)
            finish(st, q, DONE_NUMERIC, 0);
        else if (draws)
            settle_token(st, q, &st->sample[next - 1], now_us);
        else if (q->n_computed == q->n_tokens) /* max_tokens 0: only scored */
            finish(st, q, DONE_LENGTH, 0);
    }
}

status step_run(struct step *st)
{
    build(st);
    status result = run(st);
    if (result == OK) {
        settle(st, clock_us());
        return OK;
    }
    for (uint32_t i = 0; i < st->sched->n_plan; i++)
        finish(st, st->sched->plan[i], DONE_DEVICE, 0);
    kv_drop_prefixes(
        st->kv); /* segments are offered when their seal is queued: it may not have run */
    return result;
}
