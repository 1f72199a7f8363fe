/* Planning (sched.h). A plan touches the cache only to open, grow and close sequences; it knows
 * nothing of models, messages or clocks, so a test can run it from a seed. */
#include "engine/sched.h"

#include "cache/budget.h"
#include "engine/admit.h"
#include "engine/layer_major.h"
#include "engine/residence.h"

#include <string.h>

void sched_init(struct sched *s, struct kv *kv, struct attention *at, uint32_t max_seqs,
                uint32_t max_rows, bool prefix_caching)
{
    CHECK(max_seqs > 0 && max_rows >= max_seqs);
    *s = (struct sched){.kv = kv,
                        .at = at,
                        .max_seqs = max_seqs,
                        .max_rows = max_rows,
                        .prefix_caching = prefix_caching,
                        .blocked_at = SCHED_NOT_BLOCKED};
    s->running = mem_alloc(max_seqs * sizeof *s->running);
    s->plan = mem_alloc(max_seqs * sizeof *s->plan);
    queue_init(&s->queue);
    struct kv_counts c;
    kv_counts(kv, &c);
    /* Answers in all of HBM; only a prompt of twice as many rows, which lies in DRAM, is more. */
    tenants_init(&s->tenants,
                 (double)TENANT_OUTPUT_COST * c.total[KV_HBM] * kv_geometry(kv)->block_rows);
    s->claims = mem_alloc(max_seqs * sizeof *s->claims);
}

static void drop(struct sched *s, struct sequence *q)
{
    sched_remove(s, q);
    sequence_destroy(q, s->at);
}

void sched_fini(struct sched *s)
{
    while (s->n_running > 0)
        drop(s, s->running[0]);
    while (s->tenants.n_active > 0)
        drop(s, s->queue.lines[s->tenants.active[0]].first);
    mem_free(s->running);
    mem_free(s->plan);
    queue_fini(&s->queue);
    tenants_fini(&s->tenants);
    mem_free(s->claims);
}

struct sequence *sched_find(const struct sched *s, uint64_t id)
{
    return queue_find(&s->queue, id);
}

static void running_take(struct sched *s, struct sequence *q)
{
    uint32_t i = 0;
    while (i < s->n_running && s->running[i] != q)
        i++;
    CHECK(i < s->n_running);
    memmove(s->running + i, s->running + i + 1, (s->n_running - i - 1) * sizeof *s->running);
    s->n_running--;
}

void sched_move(struct sched *s, struct sequence *q, enum sequence_state to)
{
    CHECK(q->state != SEQUENCE_DONE && q->state != to);
    CHECK(to != SEQUENCE_PAUSED || q->kv.residence == KV_PAUSED);
    tenants_move(&s->tenants, q->tenant, q->state, to);
    if (q->state == SEQUENCE_PAUSED || to == SEQUENCE_PAUSED)
        residence_count_paused(s, q, to == SEQUENCE_PAUSED);
    if (q->state == SEQUENCE_RUNNING)
        running_take(s, q);
    else
        queue_take(&s->queue, q);
    if (to == SEQUENCE_WAITING || to == SEQUENCE_DONE) {
        layer_major_end(s, q);
        kv_seq_close(s->kv, &q->kv);
        q->n_computed = 0;
        q->is_proven = false;
    }
    q->n_scheduled = 0;
    if (to == SEQUENCE_RUNNING)
        s->running[s->n_running++] = q;
    else if (to != SEQUENCE_DONE)
        queue_insert(&s->queue, q);
    q->state = to;
    s->blocked_at = SCHED_NOT_BLOCKED; /* whoever was blocked may fit now */
}

void sched_submit(struct sched *s, struct sequence *q)
{
    queue_note(&s->queue, q);
    q->state = SEQUENCE_WAITING;
    tenants_arrive(&s->tenants, q->tenant);
    queue_insert(&s->queue, q);
}

void sched_remove(struct sched *s, struct sequence *q)
{
    sched_move(s, q, SEQUENCE_DONE);
    queue_forget(&s->queue, q);
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

bool sched_is_pinned(const struct sequence *q)
{
    return q->n_preempted >= SCHED_MAX_PREEMPTIONS;
}

/* ---- the plan ---- */

void sched_unplan(struct sched *s, const struct sequence *q)
{
    for (uint32_t i = 0; i < s->n_plan; i++) {
        if (s->plan[i] != q)
            continue;
        s->plan_rows -= q->n_scheduled;
        s->plan_decodes -= sequence_decodes(q);
        memmove(s->plan + i, s->plan + i + 1, (s->n_plan - i - 1) * sizeof *s->plan);
        s->n_plan--;
        return;
    }
}

void sched_retire(struct sched *s, struct sequence *q, enum sequence_state to)
{
    sched_unplan(s, q);
    s->n_retired++;
    if (to == SEQUENCE_WAITING) {
        tenants_count_preemption(&s->tenants, q->tenant);
        q->n_preempted++;
        s->preemptions++;
    }
    sched_move(s, q, to);
}

static uint32_t rows_to_border(const struct sequence *q)
{
    return kv_next_border(q->n_computed) - q->n_computed;
}

/* Rows of q in one step, of `want`: see sched.h on sealing. */
static uint32_t rows_in_step(const struct sched *s, const struct sequence *q, uint32_t want)
{
    if (sequence_fills(q))
        want = min_u32(want, q->n_filled - q->n_computed);
    if (q->in == NULL)
        return want;
    if (sched_attends_by_plan(q) && q->kv.residence == KV_SPILLED)
        return 1; /* a hot set serves one row at a time */
    if (q->n_computed >= q->n_prompt || !s->loose)
        want = min_u32(want, rows_to_border(q));
    return q->n_computed < q->n_prompt ? min_u32(want, q->n_prompt - q->n_computed) : want;
}

/* Seals what is due before the next row of q. Whose rows are all dense and whose logits were finite may
 * be shared. ERR_FULL: no room for the copy of a segment that others read. */
static status seal_due(struct sched *s, struct sequence *q)
{
    while (q->in != NULL && q->kv.n_segments < kv_segments_due(q->n_computed)) {
        struct kv_seal seal;
        bool shares =
            q->is_proven && !q->is_private && (q->kv.n_segments + 1) * SEGMENT_ROWS <= q->n_prompt;
        TRY(kv_seq_seal_begin(s->kv, &q->kv, shares ? q->tokens : NULL, &seal));
        if (!seal.found)
            attention_seal(s->at, q->in, seal.segment, seal.record,
                           seal.segment > 0 ? q->kv.records[0] : seal.record, seal.from, seal.to);
        if (seal.found && q->in->digest_id != 0)
            s->segments_found++;
        else
            s->segments_sealed++;
        kv_seq_seal_end(s->kv, &q->kv, &seal);
        s->blocked_at = SCHED_NOT_BLOCKED; /* who has sealed rows can be spilled */
    }
    return OK;
}

static status prepare_rows(struct sched *s, struct sequence *q, uint32_t rows)
{
    TRY(seal_due(s, q));
    if (!residence_may_grow(s, q, q->n_computed + rows))
        return ERR_FULL;
    TRY(residence_ensure_slots(s, q, q->n_computed + rows));
    return kv_seq_grow(s->kv, &q->kv, q->n_computed + rows);
}

/* Room for so many rows of q, of `want`. Before anybody has to go a long chunk ends at a border instead: what that
 * completes can be sealed, and go down. false: q itself had to go. */
static bool make_room(struct sched *s, struct sequence *q, uint32_t rows, uint32_t *want)
{
    const bool own = !residence_may_grow(s, q, q->n_computed + rows);
    const uint32_t of = own ? q->tenant : RESIDENCE_ANYBODY; /* whose bound is short */
    q->n_wanted = rows;
    bool squeezed = residence_squeeze(s, of);
    q->n_wanted = 0;
    if (squeezed)
        return true;
    if (rows <= rows_to_border(q))
        return residence_send_away(s, q, of);
    *want = rows_to_border(q);
    return true;
}

/* Whatever a row needs, while others give; q itself may have to go. */
static void plan_add(struct sched *s, struct sequence *q, uint32_t want)
{
    uint32_t rows = rows_in_step(s, q, want);
    while (prepare_rows(s, q, rows) != OK) {
        if (!make_room(s, q, rows, &want))
            return;
        rows = rows_in_step(s, q, want); /* it may have been spilled */
    }
    q->n_scheduled = rows;
    s->plan[s->n_plan++] = q;
    s->plan_rows += rows;
    s->plan_decodes += sequence_decodes(q);
}

static void plan_decodes(struct sched *s)
{
    for (uint32_t i = 0; i < s->n_running;) {
        struct sequence *q = s->running[i];
        if (sequence_decodes(q) && q->n_scheduled == 0)
            plan_add(s, q, 1);
        /* A preemption may have moved the array under us. */
        i = i < s->n_running && s->running[i] == q ? i + 1 : 0;
    }
}

/* Younger prompts may pass one with as many rows as it has itself, and with those of some steps. So who
 * comes back to a long conversation does not wait for other people's documents, and a document takes at
 * most twice its time. */
static bool is_due(const struct sched *s, const struct sequence *q)
{
    uint64_t some = (uint64_t)SCHED_MAX_BYPASS * s->max_rows, own = q->n_tokens - q->n_cached;
    return q->passed_rows >= (own > some ? own : some);
}

/* What of a step is left for prompts. */
struct shares {
    uint32_t scored;  /* logits rows, for those that want every position scored */
    uint32_t spilled; /* chunks of SPILLED sequences: each reads all before it over PCIe */
    bool answers;     /* those that came back in this step */
};

static struct shares all_shares(bool answers)
{
    return (struct shares){
        .scored = SCHED_SCORED_ROWS, .spilled = SCHED_SPILLED_CHUNKS, .answers = answers};
}

/* Its rows attend all of what lies in DRAM, not by plan. */
static bool reads_dram(const struct sequence *q)
{
    return q->kv.residence == KV_SPILLED && q->layers == NULL && !sched_attends_by_plan(q);
}

static bool has_share(const struct shares *left, const struct sequence *q)
{
    return (left->scored > 0 || !sequence_scores_prompt(q)) &&
           (left->spilled > 0 || !reads_dram(q)) && (left->answers || !sequence_decodes(q));
}

/* It has passed the one that is read layer by layer often enough. */
static bool waits_for_deep(const struct sched *s, const struct sequence *q)
{
    return s->deep != NULL && q->tenant == s->deep->tenant && q->order > s->deep->order &&
           is_due(s, s->deep);
}

/* Between tenants an answer that came back, then who was served less; of one, who was passed too often, oldest first, else who has the least left. */
static bool prompt_goes_before(const struct sched *s, const struct sequence *a,
                               const struct sequence *b)
{
    const double served_a = s->tenants.of[a->tenant].served,
                 served_b = s->tenants.of[b->tenant].served;
    const bool due_a = is_due(s, a), due_b = is_due(s, b);
    if (served_a != served_b)
        return sequence_decodes(a) != sequence_decodes(b) ? sequence_decodes(a)
                                                          : served_a < served_b;
    if (due_a || due_b)
        return due_a && (!due_b || a->order < b->order);
    return sequence_left(a) < sequence_left(b);
}

/* The prompt to serve next. */
static struct sequence *next_prompt(const struct sched *s, const struct shares *left)
{
    struct sequence *best = NULL;
    for (uint32_t i = 0; i < s->n_running; i++) {
        struct sequence *q = s->running[i];
        if (q->n_scheduled > 0 || !has_share(left, q) || sequence_fills(q) || q->layers != NULL ||
            waits_for_deep(s, q))
            continue;
        if (best == NULL || prompt_goes_before(s, q, best))
            best = q;
    }
    return best;
}

/* Who got nothing while its tenant's younger prompts did has been passed by their rows (between tenants counters see
 * to it that nobody starves, and a prompt that is due must not buy its tenant more); who waits for the step's read of DRAM by
 * a whole step. */
static void count_passed(struct sched *s)
{
    for (uint32_t i = 0; i < s->n_running; i++) {
        struct sequence *q = s->running[i];
        const bool waits = q->n_scheduled == 0 && !sequence_decodes(q);
        for (uint32_t k = s->plan_decodes; waits && k < s->n_plan; k++)
            if (s->plan[k]->order > q->order && s->plan[k]->tenant == q->tenant)
                q->passed_rows +=
                    reads_dram(q) && reads_dram(s->plan[k]) ? s->max_rows : s->plan[k]->n_scheduled;
    }
}

void sched_charge(struct sched *s, struct sequence *q, uint32_t from, uint32_t rows, bool token)
{
    const uint32_t first = from > q->n_charged ? from : q->n_charged;
    const uint32_t end = min_u32(from + rows, q->n_prompt);
    tenants_charge(&s->tenants, q->tenant, first < end ? end - first : 0, token);
    if (end > q->n_charged)
        q->n_charged = end;
}

uint32_t sched_chunk(const struct sched *s)
{
    return s->whole > 0 ? s->whole : s->max_rows;
}

/* Rows of a prompt, of `most`: up to where whole chunks begin, if such a chunk follows. */
static uint32_t prompt_rows(const struct sched *s, const struct sequence *q, uint32_t most)
{
    const uint32_t left = sequence_left(q), rows = min_u32(left, most);
    if (s->whole == 0)
        return rows;
    const uint32_t to_whole = s->whole - q->n_computed % s->whole;
    return to_whole < rows && left - to_whole >= s->whole ? to_whole : rows;
}

/* So many rows of a prompt beside answers take longer than both by turns. */
static bool better_apart(const struct sched *s, uint32_t rows)
{
    return s->whole > 0 && s->plan_decodes > 0 && rows >= s->whole / 2;
}

static void plan_prompts(struct sched *s, bool answers)
{
    struct shares left = all_shares(answers);
    const uint32_t most = min_u32(s->max_rows, s->plan_rows + sched_chunk(s));
    for (struct sequence *q; s->plan_rows < most && (q = next_prompt(s, &left)) != NULL;) {
        uint32_t rows = prompt_rows(s, q, most - s->plan_rows);
        if (sequence_scores_prompt(q)) {
            rows = min_u32(rows, left.scored);
            left.scored -= rows;
        }
        s->prompts_turn = better_apart(s, rows);
        if (s->prompts_turn)
            break;
        plan_add(s, q, rows);
        left.spilled -= reads_dram(q) && left.spilled > 0;
    }
    count_passed(s);
}

/* Rows that are made up come in steps of their own (a measurement's first ones). */
static bool plan_fills(struct sched *s)
{
    for (uint32_t i = 0; i < s->n_running && s->plan_rows < s->max_rows;) {
        struct sequence *q = s->running[i];
        if (sequence_fills(q) && q->n_scheduled == 0)
            plan_add(s, q, s->max_rows - s->plan_rows);
        i = i < s->n_running && s->running[i] == q ? i + 1 : 0;
    }
    return s->plan_fills = s->n_plan > 0;
}

/* The unit that ends a prompt read layer by layer: with its rows, in a step of its own. */
static bool plan_last_unit(struct sched *s)
{
    bool last;
    if (s->deep == NULL)
        return false;
    uint32_t n = layer_major_next(s->deep->layers, &last);
    if (!last)
        return false;
    s->deep->n_computed = s->deep->n_prompt - n;
    s->deep->n_scheduled = n;
    s->plan[s->n_plan++] = s->deep;
    s->plan_rows += n;
    return true;
}

static void plan_step(struct sched *s, uint64_t now_us,
                      void (*admitted)(void *arg, struct sequence *q),
                      void (*refuse)(void *arg, struct sequence *q, status why), void *arg)
{
    uint64_t retired = s->n_retired;
    if (plan_fills(s) || plan_last_unit(s))
        return;
    const struct shares prompts = all_shares(false);
    const bool answers = !s->prompts_turn || next_prompt(s, &prompts) == NULL;
    s->prompts_turn = false;
    if (answers)
        plan_decodes(s);
    /* Admission before the prompts' share: a short new prompt may overtake a long one at once. After
     * somebody had to go nobody is admitted in the same step: that would undo it. */
    if (s->n_retired == retired)
        admit_waiting(s, now_us, admitted, refuse, arg);
    if (s->n_plan > 0 || !plan_fills(s))
        plan_prompts(s, answers);
}

bool sched_plan(struct sched *s, uint64_t now_us, void (*admitted)(void *arg, struct sequence *q),
                void (*refuse)(void *arg, struct sequence *q, status why), void *arg)
{
    uint64_t retired;
    for (uint32_t i = 0; i < s->n_running; i++) {
        s->running[i]->n_scheduled = 0;
        kv_seq_settle(s->kv, &s->running[i]->kv, s->running[i]->n_computed);
    }
    s->n_plan = s->plan_rows = s->plan_decodes = s->plan_units = 0;
    s->n_steps++;
    residence_balance(s);
    do { /* again, if all that ran had to go */
        retired = s->n_retired;
        plan_step(s, now_us, admitted, refuse, arg);
    } while (s->n_plan == 0 && s->n_retired != retired);
    if (s->deep != NULL && s->deep->n_scheduled == 0 && !s->plan_fills)
        s->plan_units = s->n_plan > 0 ? 1 : LAYER_MAJOR_AT_ONCE;
    return s->n_plan > 0 || s->plan_units > 0;
}
