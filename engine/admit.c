/* Admission (admit.h): open, look whether it fits, and close again where it does not.
 *
 * Rings of STREAM lanes are not counted here: max_seqs is no more than there are (engine/memory_plan.c),
 * and whoever runs holds a window and, in a step, that step's rows (kv_seq_settle). */
#include "engine/admit.h"

#include "engine/layer_major.h"
#include "engine/residence.h"

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Positions that admission reckons with: its tokens and the first stretch of its answer; all of it if
 * it must not be preempted again. */
static uint32_t rows_expected(const struct sequence *q)
{
    uint32_t output =
        sched_is_pinned(q) ? q->max_tokens : min_u32(q->max_tokens, SCHED_FIRST_OUTPUT);
    uint32_t rows = q->n_prompt + output;
    return rows < q->n_tokens ? q->n_tokens : rows;
}

static bool fits_beside_running(const struct sched *s, const struct sequence *q, uint32_t spare)
{
    uint64_t need = spare + residence_wanted(s, q, rows_expected(q));
    for (uint32_t i = 0; i < s->n_running; i++)
        need += residence_wanted(s, s->running[i], rows_expected(s->running[i]));
    return need <= kv_available(s->kv);
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
    tenants_count_cached(&s->tenants, q->tenant, n_hit);
    if (q->prompt_logprobs < 0 && s->prefix_caching) {
        s->queried_tokens += q->n_prompt;
        s->cached_tokens += n_hit;
    }
}

enum admission { ADMITTED, BLOCKED, PASSED_OVER, AT_BOUND, REFUSED };

/* A hit never covers rows that attend by plan: another sequence may have computed them densely. */
static struct kv_open open_args(const struct sched *s, const struct sequence *q)
{
    struct kv_open o = {.salt = {q->salt[0], q->salt[1]},
                        .tokens = q->tokens,
                        .n = q->n_tokens,
                        .max_rows = q->n_prompt + q->max_tokens};
    if (s->prefix_caching && !sequence_scores_prompt(q) && !q->is_private)
        o.max_hit = (q->in != NULL ? q->n_prompt : q->n_tokens) - 1;
    o.chunk = sched_chunk(s);
    if (q->in != NULL)
        o.layout = (struct kv_layout){
            .layout_id = q->in->layout_id, .digest_id = q->in->digest_id, .seals = true};
    return o;
}

/* Back from DRAM: whole, or with the least it needs while others give. */
static bool resume(struct sched *s, struct sequence *q, bool whole)
{
    if (whole && q->kv.n_blocks <= residence_room(s, q) && kv_seq_resume(s->kv, &q->kv, 0) == OK)
        return true;
    uint32_t slots = residence_can_spill(s, q) ? residence_min_slots(s, q, q->n_tokens) : 0;
    uint32_t sealed =
        slots > 0 ? kv_segments_due(q->n_computed) * SEGMENT_ROWS / kv_geometry(s->kv)->block_rows
                  : 0;
    while (q->kv.n_blocks - sealed + slots > residence_room(s, q))
        if (!residence_squeeze(s, q->tenant))
            return false;
    while (kv_seq_resume(s->kv, &q->kv, slots) != OK)
        if (!residence_squeeze(s, RESIDENCE_ANYBODY))
            return false;
    return true;
}

/* A hit larger than what its tenant may have goes down at once, or is cut to it. */
static void fit_hit(struct sched *s, struct sequence *q, struct kv_open *o, uint32_t *n_hit)
{
    const uint32_t room = residence_room(s, q), rows = kv_geometry(s->kv)->block_rows;
    if (residence_holds(s, q, KV_HBM) <= room)
        return;
    uint32_t slots = residence_open_slots(s, q, o->max_rows);
    if (q->kv.residence == KV_RESIDENT && slots > 0 && slots <= HOT_MAX_SLOTS &&
        kv_seq_spill(s->kv, &q->kv, slots) == OK && residence_holds(s, q, KV_HBM) <= room)
        return;
    kv_seq_close(s->kv, &q->kv);
    o->max_hit = min_u32(o->max_hit, room * rows);
    s->why_refused = kv_seq_open(s->kv, &q->kv, o, HOT_MAX_SLOTS + 1, n_hit);
}

/* Opens it with as much of its hit as there is room for; up: RESIDENT if that fits, wherever it lies. Returns
 * the positions that it has; why_refused. */
static uint32_t open_sequence(struct sched *s, struct sequence *q, bool up)
{
    struct kv_open o = open_args(s, q);
    uint32_t n_hit = 0;
    o.up = up;
    s->why_refused = kv_seq_open(s->kv, &q->kv, &o, residence_open_slots(s, q, o.max_rows), &n_hit);
    if (s->why_refused == OK)
        fit_hit(s, q, &o, &n_hit);
    return s->why_refused == ERR_MEMORY && !up ? open_sequence(s, q, true) : n_hit;
}

static bool dram_is_coming(const struct sched *s)
{
    struct kv_counts c;
    kv_counts(s->kv, &c);
    return kv_has_dram(s->kv) && !c.dram_ended;
}

/* Nobody is there to give, or to wait for. */
static bool is_alone(const struct sched *s)
{
    return s->n_running == 0 && !dram_is_coming(s);
}

/* whole: beside what runs, with nobody giving anything. SPILLED it takes DRAM as it grows, and its share of the
 * bus: that is asked under pressure. */
static bool fits_now(const struct sched *s, const struct sequence *q, bool *whole)
{
    *whole = q->kv.residence != KV_SPILLED && fits_beside_running(s, q, 0);
    return *whole || is_alone(s) || residence_fits_under_pressure(s, q, rows_expected(q), 0);
}

/* q is open. Where it fits only RESIDENT it is opened again so; false: it is closed, or why_refused. */
static bool fits_somewhere(struct sched *s, struct sequence *q, uint32_t *n_hit)
{
    bool whole, spilled = q->kv.residence == KV_SPILLED;
    if (fits_now(s, q, &whole))
        return true;
    kv_seq_close(s->kv, &q->kv);
    if (!spilled)
        return false;
    *n_hit = open_sequence(s, q, true);
    if (s->why_refused != OK || fits_now(s, q, &whole))
        return s->why_refused == OK;
    kv_seq_close(s->kv, &q->kv);
    return false;
}

/* When it is seen first, and when room is made for the cut. Not by every look at one that waits: each would make its
 * prefix younger than what was used since. */
static void keep_cut(struct sched *s, struct sequence *q)
{
    const struct kv_open o = open_args(s, q);
    if (q->kv.n_cut > 0)
        kv_seq_keep_cut(s->kv, &q->kv, &o);
}

/* What the index has, but for which HBM has no room, is not computed again while others can give it: since the
 * sequence fits under pressure, they would be asked anyway. */
static uint32_t open_whole(struct sched *s, struct sequence *q, uint32_t n_hit)
{
    uint32_t before = kv_available(s->kv);
    keep_cut(s, q);
    while (q->kv.n_cut > 0 && residence_squeeze(s, RESIDENCE_ANYBODY) &&
           kv_available(s->kv) > before) {
        kv_seq_close(s->kv, &q->kv);
        n_hit = open_sequence(s, q, false);
        if (s->why_refused != OK)
            return 0;
        before = kv_available(s->kv);
    }
    return n_hit;
}

static enum admission blocked(struct sched *s, const struct sequence *q)
{
    s->blocked_tenant = q->tenant;
    s->blocked_priority = q->priority;
    s->blocked_at = kv_available(s->kv);
    s->blocked_dram = kv_dram_available(s->kv);
    return BLOCKED;
}

static enum admission begin_running(struct sched *s, struct sequence *q, uint64_t now_us)
{
    sched_move(s, q, SEQUENCE_RUNNING);
    q->waits_for_layers = false; /* preempted or paused it comes back without */
    if (q->scheduled_us == 0)
        q->scheduled_us = now_us;
    return ADMITTED;
}

/* q is open, with or without a hit; it is closed again where it is not admitted. */
static enum admission admit_layers(struct sched *s, struct sequence *q, uint64_t now_us)
{
    struct kv_open o = open_args(s, q);
    uint32_t n_hit;
    kv_seq_close(s->kv, &q->kv);
    q->waits_for_layers = s->deep != NULL;
    if (q->waits_for_layers)
        return PASSED_OVER;
    o.max_hit = 0;
    s->why_refused = kv_seq_open(s->kv, &q->kv, &o, residence_min_slots(s, q, o.max_rows), &n_hit);
    if (s->why_refused != OK)
        return REFUSED;
    if (layer_major_begin(s, q) == OK) {
        count_hits(s, q, 0);
        return begin_running(s, q, now_us);
    }
    struct kv_counts c;
    kv_counts(s->kv, &c);
    kv_seq_close(s->kv, &q->kv);
    q->by_chunks = s->n_running == 0 && c.dram_ended; /* nothing to wait for */
    return blocked(s, q);
}

/* Out of the queue with what there is of its prompt. */
static enum admission admit_new(struct sched *s, struct sequence *q, uint64_t now_us)
{
    uint32_t n_hit = open_sequence(s, q, false);
    if (s->why_refused != OK)
        return REFUSED;
    if (!q->was_seen)
        keep_cut(s, q);
    q->was_seen = true;
    if (!q->by_chunks && layer_major_suits(s, q, n_hit)) {
        enum admission a = admit_layers(s, q, now_us);
        return q->by_chunks ? admit_new(s, q, now_us) : a;
    }
    if (!fits_somewhere(s, q, &n_hit))
        return s->why_refused != OK ? REFUSED : blocked(s, q);
    n_hit = open_whole(s, q, n_hit);
    if (s->why_refused != OK)
        return REFUSED;
    count_hits(s, q, n_hit);
    residence_widen(s, q);
    return begin_running(s, q, now_us);
}

/* Out of DRAM with all it had. */
static enum admission admit_paused(struct sched *s, struct sequence *q, uint64_t now_us)
{
    bool whole, alone = s->n_running == 0;
    if (fits_now(s, q, &whole)) {
        if (resume(s, q, whole))
            return begin_running(s, q, now_us);
        if (alone) /* never: but then rather compute it again than hang */
            sched_retire(s, q, SEQUENCE_WAITING);
    }
    return blocked(s, q);
}

/* ---- whose turn it is ---- */

/* It has more than its share of the machine, running. */
static bool is_over_share(const struct sched *s, const struct tenant *n, double share)
{
    struct kv_counts c;
    kv_counts(s->kv, &c);
    return n->n_running > share * s->max_seqs || n->blocks[KV_HBM] > share * c.total[KV_HBM];
}

/* Behind q the reserve is still there (sched.h). */
static bool leaves_reserve(const struct sched *s, const struct sequence *q)
{
    struct kv_counts c;
    kv_counts(s->kv, &c);
    const uint32_t seats = (s->max_seqs + SCHED_RESERVE - 1) / SCHED_RESERVE;
    const uint32_t spare = c.total[KV_HBM] / SCHED_RESERVE;
    return s->max_seqs - s->n_running > seats &&
           (fits_beside_running(s, q, spare) ||
            residence_fits_under_pressure(s, q, rows_expected(q), spare));
}

/* What holds q back is its own tenant's. Of a tenant of whom nobody runs paused ones may have to be computed again,
 * or nobody would ever run. */
static bool tenant_holds_back(struct sched *s, const struct sequence *q)
{
    const struct tenant *n = &s->tenants.of[q->tenant];
    if (n->n_running >= n->max_running)
        return true;
    while (!residence_fits_bounds(s, q, rows_expected(q)))
        if (n->n_running > 0 || !residence_take_back(s, q))
            return true;
    return s->tenants.n_told > 1 && is_over_share(s, n, tenants_share(&s->tenants, q->tenant)) &&
           !leaves_reserve(s, q);
}

static enum admission admit(struct sched *s, struct sequence *q, uint64_t now_us)
{
    if (q->is_stuck) {
        s->why_refused = err(ERR_MEMORY, "no memory for what a sequence of %u positions needs",
                             q->n_prompt + q->max_tokens);
        return REFUSED;
    }
    s->why_refused = residence_check_bounds(s, q);
    if (s->why_refused != OK)
        return REFUSED;
    if (tenant_holds_back(s, q))
        return AT_BOUND;
    return q->state == SEQUENCE_WAITING ? admit_new(s, q, now_us) : admit_paused(s, q, now_us);
}

/* Nothing has changed since its tenant's first did not fit. */
static bool still_blocked(const struct sched *s, const struct sequence *q)
{
    return s->blocked_at != SCHED_NOT_BLOCKED && s->n_running > 0 &&
           s->blocked_tenant == q->tenant && s->blocked_priority <= q->priority &&
           kv_available(s->kv) <= s->blocked_at && kv_dram_available(s->kv) <= s->blocked_dram;
}

/* Prompt rows of q, from n_computed on, that its tenant will be charged for. */
static uint32_t rows_uncharged(const struct sequence *q)
{
    const uint32_t from = q->n_computed > q->n_charged ? q->n_computed : q->n_charged;
    return from < q->n_prompt ? q->n_prompt - from : 0;
}

static void begin_admission(struct sched *s)
{
    const struct tenants *ts = &s->tenants;
    for (uint32_t i = 0; i < ts->n_active; i++) {
        const uint32_t t = ts->active[i];
        s->queue.lines[t].next = s->queue.lines[t].first;
        ts->of[t].pending = 0;
    }
    for (uint32_t i = 0; i < s->n_running; i++)
        ts->of[s->running[i]->tenant].pending += rows_uncharged(s->running[i]);
    if (ts->n_told > 1)
        residence_weigh(s);
}

/* Of the tenant that was served least, its first; takes it out of those to be looked at. */
static struct sequence *next_waiting(struct sched *s)
{
    const struct tenants *ts = &s->tenants;
    struct sequence *best = NULL;
    double least = 0;
    for (uint32_t i = 0; i < ts->n_active; i++) {
        struct sequence *q = s->queue.lines[ts->active[i]].next;
        if (q == NULL)
            continue;
        const double served = tenants_reckoned(ts, q->tenant);
        if (best == NULL || served < least || (served == least && q->order < best->order)) {
            best = q;
            least = served;
        }
    }
    if (best != NULL)
        s->queue.lines[best->tenant].next = best->next;
    return best;
}

static void count_admitted(struct sched *s, const struct sequence *q)
{
    struct tenant *n = &s->tenants.of[q->tenant];
    n->pending += rows_uncharged(q);
    for (int tier = 0; tier < 2; tier++)
        n->blocks[tier] += residence_holds(s, q, tier);
}

/* The first that does not fit holds back those behind it, of every tenant, so that a large one is not starved by
 * small ones. */
void admit_waiting(struct sched *s, uint64_t now_us,
                   void (*admitted)(void *arg, struct sequence *q),
                   void (*refuse)(void *arg, struct sequence *q, status why), void *arg)
{
    begin_admission(s);
    for (struct sequence *q; s->n_running < s->max_seqs && (q = next_waiting(s)) != NULL;) {
        if (waits_for_leader(s, q) || (s->deep != NULL && q->waits_for_layers))
            continue;
        if (still_blocked(s, q))
            return;
        bool first_time = q->scheduled_us == 0;
        switch (admit(s, q, now_us)) {
        case ADMITTED:
            count_admitted(s, q);
            if (first_time)
                admitted(arg, q);
            break;
        case BLOCKED: return;
        case PASSED_OVER: break; /* one at a time is read layer by layer; others need not wait */
        case AT_BOUND: s->queue.lines[q->tenant].next = NULL; break; /* others' turn */
        case REFUSED: refuse(arg, q, s->why_refused); break;
        }
    }
}
