/* Spilling, shrinking, pausing, and their undoing (residence.h).
 *
 * Numbers are HBM blocks of the scarcest class. What is reckoned here are estimates: where they are
 * wrong somebody is spilled or paused who need not have been, and nothing worse. */
#include "engine/residence.h"

#include "cache/budget.h"
#include "cache/residency.h"
#include "engine/sched.h"

#include <math.h>

static const double UNKNOWN_MISS = 0.1; /* miss ratio of a hot set of which nothing is known yet */

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static uint32_t less(uint32_t a, uint32_t b)
{
    return a > b ? a - b : 0;
}

static uint32_t blocks_for(const struct sched *s, uint32_t rows)
{
    uint32_t r = kv_geometry(s->kv)->block_rows;
    return (uint32_t)(((uint64_t)rows + r - 1) / r);
}

static uint32_t sealed_blocks(const struct sched *s, const struct sequence *q)
{
    return q->kv.n_segments * (SEGMENT_ROWS / kv_geometry(s->kv)->block_rows);
}

/* Blocks of the longest tail. */
static uint32_t tail_blocks(const struct sched *s)
{
    return blocks_for(s, SEGMENT_ROWS + TAIL_ROWS);
}

/* ---- what a sequence needs ---- */

/* With one segment of growth: a hot set is not resized with every block. */
uint32_t residence_min_slots(const struct sched *s, const struct sequence *q, uint32_t rows)
{
    uint32_t longest = q->n_prompt + q->max_tokens;
    return attention_min_slots(q->in, kv_geometry(s->kv), min_u32(rows + SEGMENT_ROWS, longest));
}

/* Of RESIDENCE_PRESET times what a plan names; never more than is sealed, or than slots can count. */
static uint32_t preset_slots(const struct sched *s, const struct sequence *q)
{
    uint32_t min = residence_min_slots(s, q, q->n_computed);
    uint32_t named = attention_min_slots(q->in, kv_geometry(s->kv), q->n_computed);
    uint32_t most = min_u32(sealed_blocks(s, q), HOT_MAX_SLOTS);
    return max_u32(min, min_u32(RESIDENCE_PRESET * named, most));
}

static const struct tenant *tenant_of(const struct sched *s, const struct sequence *q)
{
    return &s->tenants.of[q->tenant];
}

bool residence_can_spill(const struct sched *s, const struct sequence *q)
{
    uint32_t longest = q->n_prompt + q->max_tokens;
    if (q->in == NULL || !kv_has_dram(s->kv) ||
        blocks_for(s, longest) > tenant_of(s, q)->max_blocks[KV_DRAM])
        return false;
    return attention_min_slots(q->in, kv_geometry(s->kv), longest) <= HOT_MAX_SLOTS;
}

/* Positions that a running sequence is reckoned with: all of it if it must not be preempted again. */
static uint32_t rows_reserved(const struct sequence *q, uint32_t output)
{
    uint32_t longest = q->n_prompt + q->max_tokens;
    return sched_is_pinned(q) ? longest : min_u32(q->n_tokens + output, longest);
}

/* HBM blocks of a spilled sequence of so many rows. */
static uint32_t floor_blocks(const struct sched *s, const struct sequence *q, uint32_t rows)
{
    return min_u32(blocks_for(s, rows), residence_min_slots(s, q, rows) + tail_blocks(s));
}

/* What the tail of a sequence that is spilled, or might be, will still take on the way to `rows`. */
static uint32_t tail_growth(const struct sched *s, const struct sequence *q, uint32_t rows)
{
    uint32_t tail = q->kv.n_blocks - sealed_blocks(s, q);
    return min_u32(less(tail_blocks(s), tail), less(blocks_for(s, rows), q->kv.n_blocks));
}

/* What sealing may take for a moment, if it is due before the next row: others may read the segment. */
static uint32_t seal_copy(const struct sched *s, const struct sequence *q)
{
    bool due = q->in != NULL && q->kv.n_segments < kv_segments_due(q->n_computed);
    return due && q->in->traits.permutes && s->prefix_caching ? blocks_for(s, SEGMENT_ROWS) : 0;
}

uint32_t residence_wanted(const struct sched *s, const struct sequence *q, uint32_t rows)
{
    uint32_t whole = blocks_for(s, rows);
    if (q->kv.residence == KV_RESIDENT)
        return less(whole, q->kv.n_blocks);
    if (q->kv.residence == KV_PAUSED)
        return whole + seal_copy(s, q);
    return tail_growth(s, q, rows) + less(residence_min_slots(s, q, rows), q->kv.n_slots);
}

/* ---- what a tenant may have ---- */

uint32_t residence_holds(const struct sched *s, const struct sequence *q, int tier)
{
    uint32_t sealed = q->kv.residence == KV_SPILLED ? sealed_blocks(s, q) : 0;
    if (q->kv.residence == KV_PAUSED)
        return tier == KV_DRAM ? q->kv.n_blocks : 0;
    return tier == KV_DRAM ? sealed : less(q->kv.n_blocks, sealed) + q->kv.n_slots;
}

void residence_weigh(struct sched *s)
{
    struct tenants *ts = &s->tenants;
    for (uint32_t i = 0; i < ts->n_active; i++) {
        struct tenant *n = &ts->of[ts->active[i]];
        n->blocks[KV_HBM] = 0;
        n->blocks[KV_DRAM] = n->paused_blocks;
    }
    for (uint32_t i = 0; i < s->n_running; i++)
        for (int tier = 0; tier < 2; tier++)
            ts->of[s->running[i]->tenant].blocks[tier] += residence_holds(s, s->running[i], tier);
}

/* DRAM blocks that a sequence is reckoned with while anything of it is there: it grows there. */
static uint32_t dram_claim(const struct sched *s, const struct sequence *q)
{
    return residence_can_spill(s, q) ? blocks_for(s, q->n_prompt + q->max_tokens) : q->kv.n_blocks;
}

void residence_count_paused(struct sched *s, struct sequence *q, bool paused)
{
    struct tenant *n = &s->tenants.of[q->tenant];
    if (paused) {
        q->paused[0] = q->kv.n_blocks;
        q->paused[1] = dram_claim(s, q);
    }
    n->paused_blocks += paused ? q->paused[0] : -q->paused[0];
    n->paused_claims += paused ? q->paused[1] : -q->paused[1];
}

/* DRAM blocks that the tenant of q may still come to have, q apart: of what runs, of those that are there, and of
 * those that must be able to go there. */
static uint32_t dram_left(const struct sched *s, const struct sequence *q)
{
    const struct tenant *n = tenant_of(s, q);
    uint64_t taken = n->paused_claims - (q->state == SEQUENCE_PAUSED ? q->paused[1] : 0);
    if (n->max_blocks[KV_DRAM] == TENANT_NO_BOUND)
        return TENANT_NO_BOUND;
    for (uint32_t i = 0; i < s->n_running; i++) {
        const struct sequence *r = s->running[i];
        if (r != q && r->tenant == q->tenant &&
            (r->kv.residence == KV_SPILLED || (sched_is_pinned(r) && residence_can_spill(s, r))))
            taken += dram_claim(s, r);
    }
    return taken < n->max_blocks[KV_DRAM] ? n->max_blocks[KV_DRAM] - (uint32_t)taken : 0;
}

static bool may_lie_in_dram(const struct sched *s, const struct sequence *q)
{
    return tenant_of(s, q)->max_blocks[KV_DRAM] == TENANT_NO_BOUND ||
           q->kv.residence != KV_RESIDENT || dram_claim(s, q) <= dram_left(s, q);
}

uint32_t residence_open_slots(const struct sched *s, const struct sequence *q, uint32_t rows)
{
    if (q->in == NULL)
        return 0;
    bool never = !residence_can_spill(s, q) || dram_claim(s, q) > dram_left(s, q);
    bool bounded = tenant_of(s, q)->max_blocks[KV_DRAM] != TENANT_NO_BOUND;
    return bounded && never ? HOT_MAX_SLOTS + 1 : residence_min_slots(s, q, rows);
}

/* HBM blocks with which it is reckoned: one that must not be preempted again, with all it will ever need. */
static uint32_t reckoned(const struct sched *s, const struct sequence *q, uint32_t holds)
{
    uint32_t longest = q->n_prompt + q->max_tokens;
    if (!sched_is_pinned(q))
        return holds;
    return max_u32(holds, residence_can_spill(s, q) ? floor_blocks(s, q, longest)
                                                    : blocks_for(s, longest));
}

uint32_t residence_room(const struct sched *s, const struct sequence *q)
{
    uint64_t taken = 0, most = tenant_of(s, q)->max_blocks[KV_HBM];
    if (most == TENANT_NO_BOUND)
        return TENANT_NO_BOUND;
    for (uint32_t i = 0; i < s->n_running; i++)
        if (s->running[i] != q && s->running[i]->tenant == q->tenant)
            taken += reckoned(s, s->running[i], residence_holds(s, s->running[i], KV_HBM));
    return taken < most ? (uint32_t)(most - taken) : 0;
}

bool residence_may_grow(const struct sched *s, const struct sequence *q, uint32_t n_rows)
{
    if (tenant_of(s, q)->max_blocks[KV_HBM] == TENANT_NO_BOUND)
        return true;
    uint32_t holds = max_u32(q->kv.n_blocks, blocks_for(s, n_rows));
    if (q->kv.residence == KV_SPILLED)
        holds = less(holds, sealed_blocks(s, q)) +
                max_u32(q->kv.n_slots, residence_min_slots(s, q, n_rows));
    return reckoned(s, q, holds) <= residence_room(s, q);
}

static bool has_bounds(const struct tenant *n)
{
    return n->max_blocks[KV_HBM] != TENANT_NO_BOUND || n->max_blocks[KV_DRAM] != TENANT_NO_BOUND;
}

status residence_check_bounds(const struct sched *s, const struct sequence *q)
{
    const struct tenant *n = tenant_of(s, q);
    struct kv_counts c;
    if (!has_bounds(n))
        return OK;
    kv_counts(s->kv, &c);
    uint32_t longest = q->n_prompt + q->max_tokens, whole = blocks_for(s, longest), least = whole;
    uint32_t hbm = min_u32(n->max_blocks[KV_HBM], c.total[KV_HBM]);
    bool dram_holds = !c.dram_ended || whole <= c.total[KV_DRAM];
    if (whole <= hbm)
        return OK;
    if (q->in != NULL && kv_has_dram(s->kv) && whole > n->max_blocks[KV_DRAM])
        return err(ERR_ARG,
                   "%u positions need %u KV blocks, and this tenant may have %u in HBM and %u in "
                   "DRAM: lower max_tokens, or raise its bounds",
                   longest, whole, hbm, n->max_blocks[KV_DRAM]);
    if (residence_can_spill(s, q) && dram_holds)
        least = floor_blocks(s, q, longest);
    if (least <= hbm ||
        n->max_blocks[KV_HBM] > c.total[KV_HBM]) /* the machine's is kv_seq_open's to say */
        return OK;
    return err(ERR_ARG,
               "%u positions need %u KV blocks in HBM, and this tenant may have %u: lower "
               "max_tokens, or raise its bound",
               longest, least, hbm);
}

/* HBM blocks that it needs for so many rows, if it goes to DRAM wherever there is room for it, *dram. */
static uint32_t least_needed(const struct sched *s, const struct sequence *q, uint32_t rows,
                             uint32_t *dram)
{
    bool can = residence_can_spill(s, q);
    if (q->kv.residence == KV_SPILLED || (q->state == SEQUENCE_PAUSED && can))
        return floor_blocks(s, q, rows);
    uint32_t whole = max_u32(blocks_for(s, rows), q->kv.n_blocks);
    if (!can || dram_claim(s, q) > *dram)
        return whole;
    *dram -= dram_claim(s, q);
    return min_u32(whole, floor_blocks(s, q, rows));
}

bool residence_fits_bounds(const struct sched *s, const struct sequence *q, uint32_t rows)
{
    const struct tenant *n = tenant_of(s, q);
    if (!has_bounds(n))
        return true;
    uint32_t dram = min_u32(dram_left(s, q), kv_dram_available(s->kv));
    struct kv_counts c;
    kv_counts(s->kv, &c);
    /* Larger than HBM: it waits for its tenant's DRAM; or kv_seq_open says that it never fits. */
    if (q->state == SEQUENCE_WAITING &&
        blocks_for(s, q->n_prompt + q->max_tokens) > c.total[KV_HBM] &&
        (!residence_can_spill(s, q) || dram_claim(s, q) > dram))
        return !residence_can_spill(s, q);
    uint64_t need = least_needed(s, q, rows, &dram);
    for (uint32_t i = 0; i < s->n_running; i++)
        if (s->running[i]->tenant == q->tenant)
            need += least_needed(s, s->running[i], rows_reserved(s->running[i], SCHED_FIRST_OUTPUT),
                                 &dram);
    return need <= n->max_blocks[KV_HBM];
}

/* ---- making room ---- */

static bool is_of(const struct sequence *q, uint32_t tenant)
{
    return tenant == RESIDENCE_ANYBODY || q->tenant == tenant;
}

/* A row that attends by plan, in a step with others of its sequence, must stay RESIDENT. */
static bool may_spill(const struct sched *s, const struct sequence *q)
{
    return q->kv.residence == KV_RESIDENT && q->kv.n_segments > 0 &&
           !(q->n_scheduled > 1 && sched_attends_by_plan(q)) && residence_can_spill(s, q) &&
           may_lie_in_dram(s, q);
}

/* Every chunk of a prompt attends all of its rows before it: from DRAM at the speed of the bus. */
static bool reads_prompt(const struct sequence *q)
{
    return q->n_computed < q->n_prompt;
}

/* The RESIDENT sequence that frees most, the youngest of equals, at its preset or its minimum; of those that read
 * their prompt, or of the others. */
static struct sequence *best_to_spill(const struct sched *s, uint32_t of, bool prompts, bool preset,
                                      uint32_t *slots)
{
    struct sequence *best = NULL;
    uint32_t most = 0;
    for (uint32_t i = 0; i < s->n_running; i++) {
        struct sequence *q = s->running[i];
        if (!is_of(q, of) || reads_prompt(q) != prompts || !may_spill(s, q))
            continue;
        uint32_t n = preset ? preset_slots(s, q) : residence_min_slots(s, q, q->n_computed);
        uint32_t gain = kv_spill_gain(s->kv, &q->kv, n);
        if (gain > most || (gain == most && gain > 0 && q->order > best->order)) {
            best = q;
            most = gain;
            *slots = n;
        }
    }
    return best;
}

static bool spill_best(struct sched *s, uint32_t of, bool prompts)
{
    uint32_t slots;
    struct sequence *q = best_to_spill(s, of, prompts, true, &slots);
    if (q == NULL)
        q = best_to_spill(s, of, prompts, false, &slots);
    if (q == NULL || kv_seq_spill(s->kv, &q->kv, slots) != OK)
        return false;
    s->spilled_at = s->n_steps;
    return true;
}

/* What a hot set has beyond the least it needs; for whose rows room is being made, with these: it would ask for
 * them back at once, for ever. */
static uint32_t excess(const struct sched *s, const struct sequence *q)
{
    if (q->kv.residence != KV_SPILLED)
        return 0;
    return less(q->kv.n_slots, residence_min_slots(s, q, q->n_computed + q->n_wanted));
}

/* What it has beyond what a spill would give it: it grew into room that there was. */
static uint32_t surplus(const struct sched *s, const struct sequence *q)
{
    uint32_t most = excess(s, q);
    return most > 0 ? min_u32(most, less(q->kv.n_slots, preset_slots(s, q))) : 0;
}

typedef uint32_t beyond_what(const struct sched *s, const struct sequence *q);

/* By half of what the largest has beyond; but: not this one's. */
static bool shrink_largest(struct sched *s, uint32_t of, beyond_what *beyond,
                           const struct sequence *but)
{
    struct sequence *best = NULL;
    uint32_t most = 0;
    for (uint32_t i = 0; i < s->n_running; i++) {
        struct sequence *q = s->running[i];
        if (q == but || !is_of(q, of) || beyond(s, q) <= most)
            continue;
        best = q;
        most = beyond(s, q);
    }
    return best != NULL && kv_seq_resize(s->kv, &best->kv, best->kv.n_slots - (most + 1) / 2) == OK;
}

bool residence_squeeze(struct sched *s, uint32_t of)
{
    return shrink_largest(s, of, surplus, NULL) || spill_best(s, of, false) ||
           shrink_largest(s, of, excess, NULL) || spill_best(s, of, true);
}

/* Who has to go first: of the tenant that has most blocks by its weight; of one tenant, who is served last. */
static bool goes_first(const struct sched *s, const struct sequence *a, const struct sequence *b)
{
    const struct tenant *x = tenant_of(s, a), *y = tenant_of(s, b);
    if (x == y)
        return sequence_goes_before(b, a);
    double blocks_x = ((double)x->blocks[KV_HBM] + x->blocks[KV_DRAM]) / x->weight;
    double blocks_y = ((double)y->blocks[KV_HBM] + y->blocks[KV_DRAM]) / y->weight;
    return blocks_x != blocks_y ? blocks_x > blocks_y : a->order > b->order;
}

/* The first that may go; whose prompt is read layer by layer has all it needs for that. There is one whenever
 * blocks run short: those that are pinned were admitted with all they will ever need. */
static struct sequence *youngest_running(const struct sched *s, uint32_t of)
{
    struct sequence *q = NULL;
    for (uint32_t i = 0; i < s->n_running; i++)
        if (is_of(s->running[i], of) && !sched_is_pinned(s->running[i]) &&
            s->running[i]->layers == NULL && (q == NULL || goes_first(s, s->running[i], q)))
            q = s->running[i];
    return q;
}

/* A pinned one only where nobody else is left; but: not this one. */
static struct sequence *youngest_paused(const struct sched *s, uint32_t of, bool pinned,
                                        const struct sequence *but)
{
    const struct tenants *ts = &s->tenants;
    struct sequence *best = NULL;
    for (uint32_t i = 0; i < ts->n_active; i++) {
        uint32_t t = ts->active[i];
        struct sequence *q = ts->of[t].n_paused > 0 && (of == RESIDENCE_ANYBODY || of == t)
                                 ? s->queue.lines[t].last
                                 : NULL;
        while (q != NULL &&
               (q == but || q->state != SEQUENCE_PAUSED || sched_is_pinned(q) != pinned))
            q = q->prev;
        if (q != NULL && (best == NULL || goes_first(s, q, best)))
            best = q;
    }
    return best;
}

bool residence_take_back(struct sched *s, const struct sequence *q)
{
    struct sequence *paused = youngest_paused(s, q->tenant, false, q);
    if (paused == NULL)
        paused = youngest_paused(s, q->tenant, true, q);
    if (paused != NULL)
        sched_retire(s, paused, SEQUENCE_WAITING);
    return paused != NULL;
}

bool residence_send_away(struct sched *s, struct sequence *q, uint32_t of)
{
    residence_weigh(s);
    struct sequence *victim = youngest_running(s, of),
                    *paused = youngest_paused(s, of, false, NULL);
    struct sequence *first =
        victim != NULL ? victim : q; /* pinned: pausing computes nothing again */
    bool last = s->n_running == 1,
         alone = last || (of != RESIDENCE_ANYBODY && tenant_of(s, q)->n_running == 1);
    if (!alone && may_lie_in_dram(s, first) && kv_seq_pause(s->kv, &first->kv) == OK) {
        sched_retire(s, first, SEQUENCE_PAUSED);
        return first != q;
    }
    /* DRAM is full too. */
    if (paused == NULL && alone)
        paused = youngest_paused(s, of, true, NULL);
    if (paused != NULL && (victim == NULL || alone || goes_first(s, paused, victim))) {
        sched_retire(s, paused, SEQUENCE_WAITING);
        return true;
    }
    if (last) { /* kv_seq_open saw that it fits; but not with copies of segments that it shares */
        q->is_stuck = q->is_private; /* without them either: memory for its tables has run out */
        q->is_private = true;
        victim = q;
    }
    if (victim == NULL)
        victim = q;
    sched_retire(s, victim, SEQUENCE_WAITING);
    return victim != q;
}

status residence_ensure_slots(struct sched *s, struct sequence *q, uint32_t n_rows)
{
    if (q->kv.residence != KV_SPILLED)
        return OK;
    uint32_t least = attention_min_slots(q->in, kv_geometry(s->kv), n_rows);
    if (q->kv.n_slots >= least)
        return OK;
    if (kv_seq_resize(s->kv, &q->kv, residence_min_slots(s, q, n_rows)) == OK)
        return OK;
    return kv_seq_resize(s->kv, &q->kv, least);
}

/* Most slots that its tenant's bound leaves its hot set. */
static uint32_t slots_allowed(const struct sched *s, const struct sequence *q)
{
    uint32_t others = residence_holds(s, q, KV_HBM) - q->kv.n_slots;
    return less(residence_room(s, q), others);
}

void residence_widen(struct sched *s, struct sequence *q)
{
    if (q->kv.residence != KV_SPILLED)
        return;
    uint32_t slots = min_u32(preset_slots(s, q), slots_allowed(s, q));
    if (slots > q->kv.n_slots)
        (void)kv_seq_resize(s->kv, &q->kv, slots); /* ERR_FULL: it has what it needs */
}

/* ---- admission under pressure ---- */

/* Bytes a step fetches for a sequence with a hot set of n_slots; of all its SPARSE lanes. */
static double fetch_bytes(const struct sched *s, const struct sequence *q, double miss)
{
    const struct kv_geometry *g = kv_geometry(s->kv);
    return miss * attention_min_slots(q->in, g, q->n_computed > 0 ? q->n_computed : q->n_prompt) *
           (double)g->block_bytes[LANE_SPARSE];
}

static double predicted_fetch(const struct sched *s, const struct sequence *q)
{
    if (q->kv.residence != KV_SPILLED)
        return 0;
    const struct miss_curve *c = hot_set_curve(q->kv.hot);
    double miss = c->n > 0 ? (double)miss_curve_at(c, (float)q->kv.n_slots) : UNKNOWN_MISS;
    return fetch_bytes(s, q, miss);
}

/* One more that is spilled, it or another in its place. What others have of the bus beyond their share by weight does
 * not hold back a tenant that is within its own. */
static bool within_headroom(const struct sched *s, const struct sequence *q)
{
    if (s->headroom <= 0 || s->step_us <= 0)
        return true;
    double bytes = q->in == NULL ? 0 : fetch_bytes(s, q, UNKNOWN_MISS), own = bytes;
    for (uint32_t i = 0; i < s->n_running; i++) {
        double fetches = predicted_fetch(s, s->running[i]);
        bytes += fetches;
        own += s->running[i]->tenant == q->tenant ? fetches : 0;
    }
    double most = s->headroom * s->step_us;
    return bytes * s->fetch_us <= most ||
           (s->tenants.n_active > 1 &&
            own * s->fetch_us <= most * tenants_share_now(&s->tenants, q->tenant));
}

/* Blocks of what is sealed at so many rows: of a SPILLED sequence they are in DRAM. */
static uint32_t sealed_at(const struct sched *s, uint32_t rows)
{
    return kv_segments_due(rows) * (SEGMENT_ROWS / kv_geometry(s->kv)->block_rows);
}

/* HBM blocks that q takes, and in *down DRAM blocks, beside what it has: with the least hot set where it
 * can have one, else whole. */
static uint64_t needed_under_pressure(const struct sched *s, const struct sequence *q,
                                      uint32_t rows, uint64_t *down)
{
    uint32_t below = sealed_at(s, rows); /* of its own, in DRAM */
    if (q->state == SEQUENCE_PAUSED)
        below = less(below, q->kv.n_blocks);
    else if (q->kv.residence == KV_SPILLED) /* a hit in DRAM */
        below = less(below, sealed_blocks(s, q));
    bool spilled = q->kv.residence == KV_SPILLED;
    bool whole = !spilled && (!residence_can_spill(s, q) || below > kv_dram_available(s->kv));
    *down = whole ? 0 : below;
    return whole || spilled ? residence_wanted(s, q, rows) : floor_blocks(s, q, rows);
}

/* DRAM blocks that a running sequence will still take, beside what is sealed: of a pinned one, since it
 * must not be preempted again. */
static uint32_t dram_reserved(const struct sched *s, const struct sequence *q)
{
    uint32_t longest = q->n_prompt + q->max_tokens;
    return sched_is_pinned(q) ? less(sealed_at(s, longest), sealed_blocks(s, q)) : 0;
}

bool residence_fits_under_pressure(const struct sched *s, const struct sequence *q, uint32_t rows,
                                   uint32_t spare)
{
    uint64_t available = kv_available(s->kv), dram = kv_dram_available(s->kv), down;
    uint64_t need = needed_under_pressure(s, q, rows, &down) + spare;
    if (s->prefix_caching) /* the copy of a segment that others read, while it is sealed */
        need += blocks_for(s, SEGMENT_ROWS);
    for (uint32_t i = 0; i < s->n_running; i++) {
        const struct sequence *r = s->running[i];
        uint32_t sealed = sealed_blocks(s, r), expected = rows_reserved(r, SEGMENT_ROWS);
        if (may_spill(s, r) && down + sealed <= dram) {
            available += kv_spill_gain(s->kv, &r->kv, residence_min_slots(s, r, r->n_computed));
            down += sealed + dram_reserved(s, r);
            need += tail_growth(s, r, expected) + less(residence_min_slots(s, r, expected),
                                                       residence_min_slots(s, r, r->n_computed));
        } else if (r->kv.residence == KV_SPILLED) {
            available += excess(s, r);
            down += dram_reserved(s, r);
            need += tail_growth(s, r, expected) +
                    less(residence_min_slots(s, r, expected), r->kv.n_slots - excess(s, r));
        } else {
            need += residence_wanted(s, r, expected);
        }
    }
    return need <= available && down <= dram && within_headroom(s, q);
}

/* ---- when pressure falls ---- */

static uint64_t reserved_for(const struct sched *s, uint32_t output)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < s->n_running; i++)
        n += residence_wanted(s, s->running[i], rows_reserved(s->running[i], output));
    return n;
}

uint64_t residence_reserved(const struct sched *s)
{
    return reserved_for(s, SCHED_FIRST_OUTPUT);
}

/* What a restore moves: its blocks up, others down for them, is less than what it would still read of DRAM: misses of
 * its answer, and all of it in every chunk of its prompt. */
static bool pays_back(const struct sched *s, const struct sequence *q, uint32_t n_blocks)
{
    uint32_t steps = min_u32(less(q->n_prompt + q->max_tokens, q->n_tokens), RESIDENCE_HORIZON);
    double chunks = ceil((double)less(q->n_prompt, q->n_computed) / sched_chunk(s));
    double block = (double)kv_geometry(s->kv)->block_bytes[LANE_SPARSE];
    return predicted_fetch(s, q) * steps + chunks * sealed_blocks(s, q) * block >
           2 * n_blocks * block;
}

static uint32_t restore_needs(const struct sched *s, const struct sequence *q)
{
    return less(sealed_blocks(s, q), q->kv.n_slots);
}

/* The oldest that is SPILLED and better were not. */
static struct sequence *next_to_restore(const struct sched *s)
{
    struct sequence *best = NULL;
    for (uint32_t i = 0; i < s->n_running; i++) {
        struct sequence *q = s->running[i];
        if (q->kv.residence == KV_SPILLED && q->layers == NULL &&
            (best == NULL || q->order < best->order) && pays_back(s, q, restore_needs(s, q)) &&
            restore_needs(s, q) <= less(residence_room(s, q), residence_holds(s, q, KV_HBM)))
            best = q;
    }
    return best;
}

/* Behind a restore the margin is there, or in hot sets that have grown into it. */
static void restore_one(struct sched *s)
{
    if (s->queue.n_waiting > 0 || s->n_steps - s->spilled_at < RESIDENCE_CALM)
        return;
    struct sequence *q = next_to_restore(s);
    if (q == NULL)
        return;
    struct kv_counts c;
    kv_counts(s->kv, &c);
    uint64_t needs = restore_needs(s, q) + residence_reserved(s), room = kv_available(s->kv);
    for (uint32_t i = 0; i < s->n_running; i++)
        room += s->running[i] == q ? 0 : excess(s, s->running[i]);
    if (needs + c.total[KV_HBM] / RESIDENCE_MARGIN > room)
        return;
    while (needs > kv_available(s->kv) && shrink_largest(s, RESIDENCE_ANYBODY, excess, q))
        ;
    (void)kv_seq_restore(s->kv, &q->kv); /* ERR_FULL: another time */
}

/* As many as it holds selections: the larger it is, the longer ago was who leaves used last, and ages are few. */
static uint32_t epoch_steps(const struct sched *s, const struct sequence *q)
{
    uint32_t named = max_u32(1, attention_min_slots(q->in, kv_geometry(s->kv), q->n_computed));
    return max_u32(1, min_u32(q->kv.n_slots / named, RESIDENCE_MAX_EPOCH));
}

/* Claims of the spilled sequences, in the order of `running`, by curves of the last look; which have this one's when
 * budgets are looked at next. */
static uint32_t make_claims(struct sched *s, uint64_t *minima, uint64_t *now)
{
    uint32_t n = 0;
    *minima = *now = 0;
    for (uint32_t i = 0; i < s->n_running; i++) {
        struct sequence *q = s->running[i];
        if (q->kv.residence != KV_SPILLED)
            continue;
        hot_set_look(q->kv.hot);
        hot_set_pace(q->kv.hot, epoch_steps(s, q));
        uint32_t min = min_u32(residence_min_slots(s, q, q->n_computed), q->kv.n_slots);
        uint32_t max = max_u32(min_u32(sealed_blocks(s, q), HOT_MAX_SLOTS), min);
        s->claims[n++] =
            (struct budget_claim){.curve = hot_set_curve(q->kv.hot),
                                  .min = min,
                                  .preset = min_u32(max_u32(preset_slots(s, q), min), max),
                                  .max = max,
                                  .now = q->kv.n_slots,
                                  .weight = (float)tenant_of(s, q)->weight,
                                  .bytes_per_miss_ratio = (float)fetch_bytes(s, q, 1)};
        *minima += min;
        *now += q->kv.n_slots;
    }
    return n;
}

/* First those that give, then those that take. */
static void apply_claims(struct sched *s, bool gives)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_running; i++) {
        struct sequence *q = s->running[i];
        if (q->kv.residence != KV_SPILLED)
            continue;
        uint32_t granted =
            min_u32(s->claims[n++].granted, max_u32(slots_allowed(s, q), q->kv.n_slots));
        if (granted != q->kv.n_slots && (granted < q->kv.n_slots) == gives)
            (void)kv_seq_resize(s->kv, &q->kv, granted); /* ERR_FULL: as it was */
    }
}

/* Into what nobody will take for a while; and back, before the next rows of answers find no room. */
static void share_budgets(struct sched *s)
{
    uint64_t minima, now, n = make_claims(s, &minima, &now);
    if (n == 0)
        return;
    struct kv_counts c;
    kv_counts(s->kv, &c);
    uint64_t spare = kv_available(s->kv), later = residence_reserved(s), total = now, free = 0;
    uint64_t soon = reserved_for(s, 2 * RESIDENCE_EVERY), there = c.free[KV_HBM] + c.cached[KV_HBM];
    if (s->queue.n_waiting == 0 && spare > later) {
        total += spare - later;
        free = spare - later < c.free[KV_HBM] ? spare - later : c.free[KV_HBM];
    } else if (there < soon) { /* not where another class is what is short */
        total = now - minima > soon - there ? now - (soon - there) : minima;
    }
    if (budget_share(s->claims, (uint32_t)n, (uint32_t)total, (uint32_t)free) != OK)
        return; /* the minima do not fit: shrinking is done where blocks are asked for */
    apply_claims(s, true);
    apply_claims(s, false);
}

void residence_learn(struct sched *s)
{
    uint32_t most = 1 + s->n_running / RESIDENCE_EVERY;
    for (uint32_t i = 0; i < s->n_running && most > 0; i++)
        if (s->running[i]->kv.residence == KV_SPILLED)
            most -= hot_set_learn(s->running[i]->kv.hot);
}

void residence_balance(struct sched *s)
{
    if (s->n_steps - s->looked_at < RESIDENCE_EVERY)
        return;
    s->looked_at = s->n_steps;
    restore_one(s);
    share_budgets(s);
}
