/* Planning (sched.h). A plan touches the cache only to open, grow and close sequences; it knows
 * nothing of models, messages or clocks, so a test can run it from a seed. */
#include "engine/sched.h"

#include <string.h>

void sched_init(struct sched *s, struct kv *kv, uint32_t max_seqs, uint32_t max_rows,
                bool prefix_caching)
{
    CHECK(max_seqs > 0 && max_rows >= max_seqs);
    *s = (struct sched){.kv = kv,
                        .max_seqs = max_seqs,
                        .max_rows = max_rows,
                        .prefix_caching = prefix_caching,
                        .n_buckets = 1024,
                        .blocked_at = SCHED_NOT_BLOCKED};
    s->running = mem_alloc(max_seqs * sizeof *s->running);
    s->plan = mem_alloc(max_seqs * sizeof *s->plan);
    s->buckets = mem_alloc(s->n_buckets * sizeof *s->buckets);
}

static void drop(struct sched *s, struct sequence *q)
{
    sched_remove(s, q);
    sequence_destroy(q);
}

void sched_fini(struct sched *s)
{
    while (s->n_running > 0)
        drop(s, s->running[0]);
    while (s->first != NULL)
        drop(s, s->first);
    mem_free(s->running);
    mem_free(s->plan);
    mem_free(s->buckets);
}

/* ---- the id table ---- */

static struct sequence **bucket_of(const struct sched *s, uint64_t id)
{
    return &s->buckets[(id * 0x9e3779b97f4a7c15u >> 32) & (s->n_buckets - 1)];
}

struct sequence *sched_find(const struct sched *s, uint64_t id)
{
    struct sequence *q = *bucket_of(s, id);
    while (q != NULL && q->id != id)
        q = q->next_in_bucket;
    return q;
}

static void table_take(struct sched *s, struct sequence *q)
{
    struct sequence **at = bucket_of(s, q->id);
    while (*at != q) {
        CHECK(*at != NULL);
        at = &(*at)->next_in_bucket;
    }
    *at = q->next_in_bucket;
}

/* ---- the queue, in order of submission ---- */

static void queue_insert(struct sched *s, struct sequence *q)
{
    /* New ones go to the end, a preempted one near the head: search from the end it is closer to. */
    struct sequence *before = s->last;
    if (s->first != NULL && q->order < s->first->order)
        before = NULL;
    while (before != NULL && before->order > q->order)
        before = before->prev;
    q->prev = before;
    q->next = before != NULL ? before->next : s->first;
    *(before != NULL ? &before->next : &s->first) = q;
    *(q->next != NULL ? &q->next->prev : &s->last) = q;
    s->n_waiting++;
}

static void queue_take(struct sched *s, struct sequence *q)
{
    *(q->prev != NULL ? &q->prev->next : &s->first) = q->next;
    *(q->next != NULL ? &q->next->prev : &s->last) = q->prev;
    q->next = q->prev = NULL;
    s->n_waiting--;
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

/* The one door of sequence states: WAITING -> RUNNING -> WAITING (preempted), any -> DONE. */
static void sequence_move(struct sched *s, struct sequence *q, enum sequence_state to)
{
    CHECK(q->state != SEQUENCE_DONE && q->state != to);
    if (q->state == SEQUENCE_WAITING)
        queue_take(s, q);
    if (q->state == SEQUENCE_RUNNING) {
        running_take(s, q);
        kv_seq_close(s->kv, &q->kv);
        q->n_computed = q->n_scheduled = 0;
    }
    if (to == SEQUENCE_WAITING)
        queue_insert(s, q);
    if (to == SEQUENCE_RUNNING)
        s->running[s->n_running++] = q;
    q->state = to;
    s->blocked_at = SCHED_NOT_BLOCKED; /* whoever was blocked may fit now */
}

void sched_submit(struct sched *s, struct sequence *q)
{
    struct sequence **at = bucket_of(s, q->id);
    q->next_in_bucket = *at;
    *at = q;
    q->state = SEQUENCE_WAITING;
    queue_insert(s, q);
    s->n_sequences++;
}

void sched_remove(struct sched *s, struct sequence *q)
{
    sequence_move(s, q, SEQUENCE_DONE);
    table_take(s, q);
    s->n_sequences--;
}

/* ---- admission ---- */

static uint32_t blocks_for(const struct sched *s, uint32_t rows)
{
    uint32_t r = kv_geometry(s->kv)->block_rows;
    return (uint32_t)(((uint64_t)rows + r - 1) / r);
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static bool is_pinned(const struct sequence *q)
{
    return q->n_preempted >= SCHED_MAX_PREEMPTIONS;
}

/* Blocks this sequence will still take for its tokens and the first stretch of its answer; for all of
 * it if it must not be preempted again. */
static uint32_t blocks_wanted(const struct sched *s, const struct sequence *q)
{
    uint32_t output = is_pinned(q) ? q->max_tokens : min_u32(q->max_tokens, SCHED_FIRST_OUTPUT);
    uint32_t rows = q->n_prompt + output;
    if (rows < q->n_tokens)
        rows = q->n_tokens;
    uint32_t blocks = blocks_for(s, rows);
    return blocks > q->kv.n_blocks ? blocks - q->kv.n_blocks : 0;
}

static bool fits_beside_running(const struct sched *s, const struct sequence *q)
{
    uint64_t need = blocks_wanted(s, q);
    for (uint32_t i = 0; i < s->n_running; i++)
        need += blocks_wanted(s, s->running[i]);
    return s->n_running == 0 || need <= kv_available(s->kv);
}

/* Siblings of one prompt wait until the first has prefilled: then they find its blocks. */
static bool waits_for_leader(const struct sched *s, const struct sequence *q)
{
    if (q->leader == 0 || !s->prefix_caching || q->n_preempted > 0)
        return false;
    const struct sequence *leader = sched_find(s, q->leader);
    return leader != NULL && leader->n_computed < leader->n_prompt;
}

static void count_hits(struct sched *s, struct sequence *q, uint32_t n_hit)
{
    q->n_computed = n_hit;
    if (q->scheduled_us != 0)
        return; /* once per sequence, not once per preemption */
    q->n_cached = n_hit;
    if (q->prompt_logprobs < 0 && s->prefix_caching) {
        s->queried_tokens += q->n_prompt;
        s->cached_tokens += n_hit;
    }
}

enum admission { ADMITTED, BLOCKED, REFUSED };

static enum admission admit(struct sched *s, struct sequence *q, uint64_t now_us)
{
    uint32_t n_hit = 0;
    bool may_hit = s->prefix_caching && !sequence_scores_prompt(q);
    const struct kv_open o = {.salt = {q->salt[0], q->salt[1]},
                              .tokens = q->tokens,
                              .n = q->n_tokens,
                              .max_rows = q->n_prompt + q->max_tokens,
                              .max_hit = may_hit ? q->n_tokens - 1 : 0};
    status st = kv_seq_open(s->kv, &q->kv, &o, 0, &n_hit);
    if (st != OK)
        return REFUSED;
    if (!fits_beside_running(s, q)) {
        kv_seq_close(s->kv, &q->kv);
        s->blocked_at = kv_available(s->kv);
        return BLOCKED;
    }
    count_hits(s, q, n_hit);
    sequence_move(s, q, SEQUENCE_RUNNING);
    if (q->scheduled_us == 0)
        q->scheduled_us = now_us;
    return ADMITTED;
}

/* In order of submission; the first that does not fit holds back those behind it, so that a large
 * one is not starved by small ones. */
static void admit_waiting(struct sched *s, uint64_t now_us,
                          void (*admitted)(void *arg, struct sequence *q),
                          void (*refuse)(void *arg, struct sequence *q), void *arg)
{
    for (struct sequence *q = s->first, *next; q != NULL && s->n_running < s->max_seqs; q = next) {
        next = q->next;
        if (waits_for_leader(s, q))
            continue;
        if (s->blocked_at != SCHED_NOT_BLOCKED && kv_available(s->kv) <= s->blocked_at &&
            s->n_running > 0)
            return;
        bool first_time = q->scheduled_us == 0;
        switch (admit(s, q, now_us)) {
        case ADMITTED:
            if (first_time)
                admitted(arg, q);
            break;
        case BLOCKED: return;
        case REFUSED: refuse(arg, q); break;
        }
    }
}

/* ---- the plan ---- */

/* The youngest that may be preempted. There is one whenever blocks run short: those that are pinned
 * were admitted with all they will ever need. */
static struct sequence *choose_victim(const struct sched *s)
{
    struct sequence *q = NULL;
    for (uint32_t i = 0; i < s->n_running; i++)
        if (!is_pinned(s->running[i]) && (q == NULL || s->running[i]->order > q->order))
            q = s->running[i];
    CHECK(q != NULL);
    return q;
}

static void plan_take(struct sched *s, const struct sequence *q)
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

/* Makes room for `rows` more rows of q, preempting others as long as it must; false if q itself was
 * the victim. */
static bool grow(struct sched *s, struct sequence *q, uint32_t rows)
{
    while (kv_seq_grow(s->kv, &q->kv, q->n_computed + rows) != OK) {
        struct sequence *victim = choose_victim(s);
        CHECK(s->n_running > 1); /* a sequence alone always fits: kv_seq_open saw to it */
        plan_take(s, victim);
        victim->n_preempted++;
        s->preemptions++;
        sequence_move(s, victim, SEQUENCE_WAITING);
        if (victim == q)
            return false;
    }
    return true;
}

static void plan_add(struct sched *s, struct sequence *q, uint32_t rows)
{
    if (!grow(s, q, rows))
        return;
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

/* The prompt to serve next: one passed over too often, else the one with the least left. may_score:
 * logits rows are left for those that want every position scored. */
static struct sequence *next_prompt(const struct sched *s, bool may_score)
{
    struct sequence *best = NULL;
    for (uint32_t i = 0; i < s->n_running; i++) {
        struct sequence *q = s->running[i];
        if (q->n_scheduled > 0 || (!may_score && sequence_scores_prompt(q)))
            continue;
        bool due = q->n_bypassed >= SCHED_MAX_BYPASS;
        bool best_due = best != NULL && best->n_bypassed >= SCHED_MAX_BYPASS;
        if (best == NULL || (due && (!best_due || q->order < best->order)) ||
            (!due && !best_due && sequence_left(q) < sequence_left(best)))
            best = q;
    }
    return best;
}

/* Who got nothing while a younger prompt got a chunk has been passed over once more. */
static void count_bypassed(struct sched *s)
{
    uint64_t served = 0; /* order of the youngest prompt in the plan */
    for (uint32_t i = 0; i < s->n_plan; i++)
        if (!sequence_decodes(s->plan[i]) && s->plan[i]->order > served)
            served = s->plan[i]->order;
    for (uint32_t i = 0; i < s->n_running; i++) {
        struct sequence *q = s->running[i];
        if (q->n_scheduled > 0)
            q->n_bypassed = 0;
        else if (q->order < served)
            q->n_bypassed++;
    }
}

static void plan_prompts(struct sched *s)
{
    uint32_t scored_left = SCHED_SCORED_ROWS;
    for (struct sequence *q;
         s->plan_rows < s->max_rows && (q = next_prompt(s, scored_left > 0)) != NULL;) {
        uint32_t rows = min_u32(sequence_left(q), s->max_rows - s->plan_rows);
        if (sequence_scores_prompt(q)) {
            rows = min_u32(rows, scored_left);
            scored_left -= rows;
        }
        plan_add(s, q, rows);
    }
    count_bypassed(s);
}

bool sched_plan(struct sched *s, uint64_t now_us, void (*admitted)(void *arg, struct sequence *q),
                void (*refuse)(void *arg, struct sequence *q), void *arg)
{
    for (uint32_t i = 0; i < s->n_running; i++)
        s->running[i]->n_scheduled = 0;
    s->n_plan = s->plan_rows = s->plan_decodes = 0;
    uint64_t preempted = s->preemptions;
    plan_decodes(s);
    /* Admission before the prompts' share: a short new prompt may overtake a long one at once. After
     * a preemption nobody is admitted in the same step: that would undo it. */
    if (s->preemptions == preempted)
        admit_waiting(s, now_us, admitted, refuse, arg);
    plan_prompts(s);
    return s->n_plan > 0;
}
