/* Running a plan (step.h): build, run, settle.
 *
 * Blocks are offered to the prefix cache only when a finite logit has been seen behind them: KV of a
 * step that went wrong is never shared (reliability P10). Nor is what was computed by plan: a hit must
 * not depend on what another sequence selected. */
#include "engine/step.h"

#include "cache/residency.h"
#include "engine/layer_major.h"
#include "engine/residence.h"

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
    st->stepped = mem_alloc(st->max_seqs * sizeof(struct kv_seq *));
    for (size_t i = 0; i < ARRAY_LEN(st->flights); i++) {
        struct flight *f = &st->flights[i];
        f->plan = mem_alloc(st->max_seqs * sizeof(struct sequence *));
        f->tokens = mem_alloc(st->max_rows * sizeof *f->tokens);
        f->seqs = mem_alloc(st->max_seqs * sizeof *f->seqs);
        f->logit_rows = mem_alloc(st->max_logits * sizeof *f->logit_rows);
        f->sample = mem_alloc(st->max_logits * sizeof *f->sample);
    }
    return model_reserve(model, st->max_rows, st->max_logits);
}

void step_fini(struct step *st)
{
    mem_free(st->stepped);
    for (size_t i = 0; i < ARRAY_LEN(st->flights); i++) {
        struct flight *f = &st->flights[i];
        mem_free(f->plan);
        mem_free(f->tokens);
        mem_free(f->seqs);
        mem_free(f->logit_rows);
        mem_free(f->sample);
    }
}

/* The i-th step in flight; i == n_flights: the one to be built. */
static struct flight *flight_at(struct step *st, uint32_t i)
{
    return &st->flights[(st->first + i) % ARRAY_LEN(st->flights)];
}

/* ---- build ---- */

static struct sample_row *want_logits(const struct step *st, struct flight *f, uint32_t row)
{
    CHECK(f->n_logits < st->max_logits);
    struct sample_row *r = &f->sample[f->n_logits];
    memset(r, 0, offsetof(struct sample_row, top)); /* of the row that was here before */
    r->logits_row = f->n_logits;
    f->logit_rows[f->n_logits++] = row;
    return r;
}

/* Row p of the prompt predicts token p + 1. */
static void want_prompt_scores(const struct step *st, struct flight *f, const struct sequence *q,
                               uint32_t first_row)
{
    if (!sequence_scores_prompt(q))
        return;
    for (uint32_t i = 0; i < q->n_scheduled; i++) {
        uint32_t index = q->n_computed + i + 1;
        if (index < q->n_scored || index >= q->n_prompt)
            continue;
        struct sample_row *r = want_logits(st, f, first_row + i);
        r->target = q->tokens[index];
        r->n_top = q->prompt_logprobs;
    }
}

/* Do n_rows more rows end with the one that draws the next token? */
static bool wants_token(const struct sequence *q, uint32_t n_rows)
{
    return q->n_computed + n_rows == q->n_tokens && sequence_n_output(q) < q->max_tokens;
}

/* n_ahead: tokens of the answer that are not known yet. */
static void want_token(const struct step *st, struct flight *f, const struct sequence *q,
                       uint32_t last_row, uint32_t n_ahead)
{
    struct sample_row *r = want_logits(st, f, last_row);
    uint32_t n_output = sequence_n_output(q) + n_ahead;
    bool too_short = n_output < q->min_tokens;
    r->params = q->params;
    r->target = SAMPLE_DRAW;
    r->position = n_output;
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

/* The sequence's rows from position first_pos on; their tokens are the caller's to fill. */
static void add_seq(struct step *st, struct flight *f, struct sequence *q, uint32_t first_pos,
                    uint32_t n_rows)
{
    struct batch_seq *b = &f->seqs[f->n_plan];
    f->plan[f->n_plan++] = q;
    *b = (struct batch_seq){.first_row = f->n_rows,
                            .n_rows = n_rows,
                            .first_pos = first_pos,
                            .spilled = q->kv.residence == KV_SPILLED};
    for (int c = 0; c < LANE_CLASSES; c++)
        b->blocks[c] = q->kv.table[c];
    if (sched_attends_by_plan(q))
        plan_rows(st, q, b);
    f->n_rows += n_rows;
    CHECK(f->n_rows <= st->max_rows);
}

static void clear(struct step *st, struct flight *f)
{
    f->n_plan = f->n_rows = f->n_logits = f->n_decodes = f->n_units = f->n_submits = 0;
    f->fills = f->stepped = false;
    if (st->at != NULL)
        attention_begin(st->at);
}

static void build(struct step *st, struct flight *f)
{
    const struct sched *s = st->sched;
    clear(st, f);
    f->fills = s->plan_fills;
    f->n_decodes = s->plan_decodes;
    f->n_units = s->plan_units;
    for (uint32_t i = 0; i < s->n_plan; i++) {
        struct sequence *q = s->plan[i];
        uint32_t first = f->n_rows, n = q->n_scheduled;
        add_seq(st, f, q, q->n_computed, n);
        memcpy(f->tokens + first, q->tokens + q->n_computed, (size_t)n * sizeof *f->tokens);
        want_prompt_scores(st, f, q, first);
        if (wants_token(q, n))
            want_token(st, f, q, f->n_rows - 1, 0);
    }
    CHECK(f->n_rows == s->plan_rows);
}

/* ---- run ---- */

/* Spare rows, where the backend likes steps of answers (a row each, which draws) to have few numbers of rows: as
 * many as there is room for. They compute what nobody reads. */
static uint32_t add_spare(const struct step *st, struct flight *f)
{
    const struct backend_ops *ops = st->be->ops;
    uint32_t most = st->max_rows < st->max_logits ? st->max_rows : st->max_logits;
    if (ops->bucket == NULL || f->n_logits != f->n_rows)
        return 0;
    uint32_t wanted = ops->bucket(f->n_rows), n = (wanted < most ? wanted : most) - f->n_rows;
    for (uint32_t i = f->n_rows; i < f->n_rows + n; i++) {
        f->tokens[i] = 0;
        f->logit_rows[i] = i;
    }
    return n;
}

static void submit(struct step *st, struct flight *f)
{
    if (st->be->ops->submit != NULL)
        st->be->ops->submit(st->be);
    f->n_submits++;
}

static const void *forward(struct step *st, struct flight *f)
{
    const struct batch b = {.kv = kv_memory(st->kv),
                            .n_rows = f->n_rows,
                            .n_seqs = f->n_plan,
                            .n_logits = f->n_logits,
                            .tokens = f->tokens,
                            .seqs = f->seqs,
                            .logit_rows = f->logit_rows,
                            .n_spare = f->fills ? 0 : add_spare(st, f),
                            .attention = st->at};
    if (f->fills)
        st->failed = model_fill(st->model, &b);
    return f->fills ? NULL : model_forward(st->model, &b);
}

/* Its rows, or a prompt's last unit, which are sequences' like any other. */
static void queue_rows(struct step *st, struct flight *f)
{
    struct layer_major *lm = f->plan[0]->layers;
    const void *logits = lm != NULL
                             ? layer_major_run(lm, st->be, st->model, f->logit_rows, f->n_logits)
                             : forward(st, f);
    const struct sample_args a = {.logits = logits,
                                  .vocab = model_info(st->model)->shape.vocab,
                                  .n_rows = f->n_logits,
                                  .rows = f->sample};
    if (f->n_logits > 0 && !f->fills)
        st->be->ops->sample(st->be, &a);
    submit(st, f);
}

/* A step of the backend apart from the answers': what they queue comes again, and this does not. */
static void queue_units(struct step *st, struct flight *f)
{
    struct layer_major *lm = st->sched->deep->layers;
    for (uint32_t i = 0; i < f->n_units; i++) {
        bool last;
        (void)layer_major_next(lm, &last);
        if (last) /* it comes through a plan */
            break;
        (void)layer_major_run(lm, st->be, st->model, NULL, 0);
    }
    submit(st, f);
}

static void queue(struct step *st, struct flight *f)
{
    if (f->n_rows > 0)
        queue_rows(st, f);
    if (f->n_units > 0)
        queue_units(st, f);
    st->n_flights++;
}

void step_launch(struct step *st)
{
    CHECK(st->n_flights == 0);
    st->failed = OK;
    st->n_ahead = 0;
    build(st, flight_at(st, 0));
    queue(st, flight_at(st, 0));
}

/* ---- ahead ---- */

/* Its next row needs nothing that only the tokens in flight, or a plan, could tell. */
static bool can_go_ahead(const struct step *st, struct sequence *q)
{
    const struct sample_params *p = &q->params;
    uint32_t next = q->n_computed + 1;
    bool penalty =
        p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0;
    if (penalty || !sequence_decodes(q))
        return false;
    if (q->in != NULL &&
        (q->kv.n_segments < kv_segments_due(next) || q->in->choice.miss_threshold > 0))
        return false;
    return residence_may_grow(st->sched, q, next + 1) &&
           residence_ensure_slots(st->sched, q, next + 1) == OK &&
           kv_seq_grow(st->kv, &q->kv, next + 1) == OK;
}

static bool ends_by_length(const struct sequence *q)
{
    return sequence_n_output(q) + 1 >= q->max_tokens;
}

/* Of the sequences in flight all that go on can. */
static bool all_can(const struct step *st, const struct flight *f)
{
    const struct sched *s = st->sched;
    uint32_t n_live = 0, n_going = 0;
    for (uint32_t i = 0; i < f->n_plan; i++) {
        n_live += f->plan[i] != NULL;
        if (f->plan[i] == NULL || ends_by_length(f->plan[i]))
            continue;
        if (!can_go_ahead(st, f->plan[i]))
            return false;
        n_going++;
    }
    return n_going > 0 && n_live == s->n_running;
}

static void end_plans(struct step *st, struct flight *f);

bool step_ahead(struct step *st)
{
    struct flight *now = flight_at(st, 0), *next = flight_at(st, 1);
    if (st->be->ops->submit == NULL || st->n_flights != 1 || st->n_ahead == STEP_MAX_AHEAD ||
        st->failed != OK || st->sched->queue.n_waiting > 0 || now->fills ||
        now->n_decodes != now->n_plan || !all_can(st, now))
        return false;
    CHECK(now->n_logits == now->n_plan); /* a row each, which draws */
    end_plans(st, now);
    clear(st, next);
    for (uint32_t i = 0; i < now->n_plan; i++) {
        struct sequence *q = now->plan[i];
        if (q == NULL || ends_by_length(q))
            continue;
        next->tokens[next->n_rows] = EMBED_DRAWN | i;
        add_seq(st, next, q, q->n_computed + 1, 1);
        want_token(st, next, q, next->n_rows - 1, 1);
    }
    next->n_decodes = next->n_plan;
    st->n_ahead++;
    st->sched->n_steps++;
    queue(st, next);
    return true;
}

/* ---- settle ---- */

static void finish(struct step *st, struct sequence *q, enum done_reason reason, uint32_t token)
{
    report_done(st->report, q, reason, token, NULL);
    step_forget(st, q);
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
static bool settle_scores(struct step *st, const struct flight *f, struct sequence *q,
                          uint32_t *next, uint32_t end_row)
{
    while (*next < f->n_logits && f->logit_rows[*next] < end_row &&
           f->sample[*next].target != SAMPLE_DRAW) {
        const struct sample_row *r = &f->sample[(*next)++];
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
    sched_charge(st->sched, q, q->n_computed, 0, true);
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

/* Hot sets learn that the step is over: before any of its sequences may end, and before the next one is
 * queued. */
static void end_plans(struct step *st, struct flight *f)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < f->n_plan && !f->stepped; i++) {
        struct sequence *q = f->plan[i];
        if (q == NULL || !f->seqs[i].planned)
            continue;
        q->n_light_misses = light_misses(q) - q->n_light_misses;
        st->stepped[n++] = &q->kv;
    }
    f->stepped = true;
    kv_step(st->kv, st->stepped, n);
}

static void settle_seq(struct step *st, const struct flight *f, uint32_t i, uint32_t *next,
                       uint64_t now_us)
{
    struct sequence *q = f->plan[i];
    const struct batch_seq *b = &f->seqs[i];
    uint32_t end_row = b->first_row + b->n_rows, first_logit = *next;
    bool good = true, draws = false, decodes = false, fills = false;
    if (q != NULL) {
        draws = wants_token(q, b->n_rows);
        decodes = sequence_decodes(q);
        fills = sequence_fills(q);
        good = settle_scores(st, f, q, next, end_row);
    }
    while (*next < f->n_logits && f->logit_rows[*next] < end_row)
        (*next)++;
    if (q == NULL)
        return;
    bool read = q->layers != NULL; /* layer by layer, and this was the last unit */
    layer_major_end(st->sched, q);
    q->n_computed += b->n_rows;
    q->n_scheduled = 0;
    q->planned = b->planned;
    const uint32_t rows = read ? q->n_computed : b->n_rows;
    st->prompt_tokens += decodes || fills ? 0 : rows;
    if (!fills)
        sched_charge(st->sched, q, q->n_computed - rows, rows, false);
    if (draws && *next > first_logit && f->sample[*next - 1].bad)
        good = false;
    if (!good)
        finish(st, q, DONE_NUMERIC, 0);
    else if (draws)
        settle_token(st, q, &f->sample[*next - 1], now_us);
    else if (q->n_computed == q->n_tokens) /* max_tokens 0: only scored */
        finish(st, q, DONE_LENGTH, 0);
}

/* Nothing of what is in flight came to be, and nothing that was queued with it, for whomever: copies, seals. */
static void fail_all(struct step *st)
{
    for (; st->n_flights > 0;
         st->n_flights--, st->first = (st->first + 1) % ARRAY_LEN(st->flights)) {
        struct flight *f = flight_at(st, 0);
        for (uint32_t i = 0; i < f->n_plan; i++)
            if (f->plan[i] != NULL)
                finish(st, f->plan[i], DONE_DEVICE, 0);
    }
    while (st->sched->n_running > 0)
        finish(st, st->sched->running[0], DONE_DEVICE, 0);
    kv_drop_prefixes(
        st->kv); /* segments are offered when their seal is queued: it may not have run */
}

status step_settle(struct step *st)
{
    struct flight *f = flight_at(st, 0);
    const struct backend_ops *ops = st->be->ops;
    CHECK(st->n_flights > 0);
    uint64_t from = clock_us();
    status result = ops->submit == NULL ? ops->sync(st->be) : OK;
    for (uint32_t i = 0; i < f->n_submits && ops->submit != NULL && result == OK; i++)
        result = ops->wait(st->be);
    uint64_t now_us = clock_us();
    st->wait_us = now_us - from;
    if (result == OK)
        result = st->failed;
    if (result != OK) {
        if (ops->submit != NULL) /* the one ahead, too */
            (void)ops->sync(st->be);
        fail_all(st);
        return result;
    }
    uint32_t next = 0;
    end_plans(st, f);
    for (uint32_t i = 0; i < f->n_plan; i++)
        settle_seq(st, f, i, &next, now_us);
    st->first = (st->first + 1) % ARRAY_LEN(st->flights);
    st->n_flights--;
    return OK;
}

void step_forget(struct step *st, const struct sequence *q)
{
    for (uint32_t k = 0; k < st->n_flights; k++) {
        struct flight *f = flight_at(st, k);
        for (uint32_t i = 0; i < f->n_plan; i++)
            if (f->plan[i] == q)
                f->plan[i] = NULL;
    }
}
