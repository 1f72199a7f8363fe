/* The scheduler between tenants, against random traffic from seeds. What each is served is counted here, from the
 * steps, and not taken from the scheduler's counters: with VTC two tenants that wait all the time never
 * drift apart by more than 2 max(w_in L, w_out M) (arXiv 2401.00588, theorem 4.4; L: the longest prompt, M: rows of
 * all blocks), who was away has saved nothing up, and bounds are kept in every step. */
#include "tests/contract/sched_world.h"

#include <math.h>

enum { TENANTS = 33, IDS = 1 << 18 };

/* What was seen. Of one world at a time. */
static struct seen {
    uint32_t end[IDS];                       /* by id: prompt rows computed at least once */
    uint64_t rows[TENANTS], tokens[TENANTS]; /* served, by tenant */
    uint64_t last;                           /* id of them all */
    uint64_t step, first[IDS]; /* the step in which its first token came; 0: it did not */
} seen;

static void forget(void)
{
    memset(seen.end, 0, (seen.last + 1) * sizeof seen.end[0]);
    memset(seen.first, 0, (seen.last + 1) * sizeof seen.first[0]);
    memset(seen.rows, 0, sizeof seen.rows);
    memset(seen.tokens, 0, sizeof seen.tokens);
    seen.step = seen.last = 0;
}

static void see(const struct sequence *q, uint32_t from, uint32_t rows, bool token)
{
    uint32_t end = from + rows < q->n_prompt ? from + rows : q->n_prompt;
    CHECK(q->id < IDS);
    uint32_t *was = &seen.end[q->id];
    seen.last = q->id > seen.last ? q->id : seen.last;
    uint32_t first = from > *was ? from : *was;
    seen.rows[q->tenant] += end > first ? end - first : 0;
    *was = end > *was ? end : *was;
    seen.tokens[q->tenant] += token;
    if (token && seen.first[q->id] == 0)
        seen.first[q->id] = seen.step;
}

static double served(uint32_t t)
{
    return (double)seen.rows[t] + 2 * (double)seen.tokens[t];
}

static void world_open(struct world *w, uint32_t blocks, uint32_t max_seqs, uint32_t max_rows)
{
    const struct size z = {.hbm = blocks,
                           .dram = blocks / 2,
                           .max_seqs = max_seqs,
                           .max_rows = max_rows,
                           .caching = true};
    world_open_sized(w, &z);
    w->probes = 1;
    w->computed = see;
    forget();
}

static void entitle(struct world *w, uint32_t t, double weight)
{
    const struct tenant_bounds b = {weight, TENANT_NO_BOUND, {TENANT_NO_BOUND, TENANT_NO_BOUND}};
    tenants_entitle(&w->s.tenants, t, &b);
}

static struct sequence *submit_of(struct world *w, uint32_t t, uint32_t n_prompt, uint32_t output)
{
    w->tenant = t;
    return submit(w, n_prompt, output, (uint32_t)w->next_id, 0);
}

static bool tick(struct world *w)
{
    seen.step++;
    return step(w);
}

static void run_out(struct world *w)
{
    uint64_t before = w->steps;
    while (tick(w) && w->steps < before + 200000)
        ;
}

static const struct tenant *tenant(const struct world *w, uint32_t t)
{
    return &w->s.tenants.of[t];
}

/* ---- who waits all the time ---- */

/* A tenant's load: so many of its sequences wait at any time. */
struct load {
    uint32_t prompt, output; /* at most */
    uint32_t depth;
};

static void keep_waiting(struct world *w, uint32_t t, const struct load *l)
{
    while (tenant(w, t)->n_waiting < l->depth)
        submit_of(w, t, 1 + rnd(l->prompt), 1 + rnd(l->output));
}

/* How far two tenants drift apart, per weight, over any stretch of a run. */
struct drift {
    double least, most;
};

static void drift_take(struct drift *d, double weight_a, double weight_b)
{
    double gap = served(1) / weight_a - served(2) / weight_b;
    d->least = gap < d->least ? gap : d->least;
    d->most = gap > d->most ? gap : d->most;
}

static struct drift run_two(struct world *w, const struct load *a, const struct load *b,
                            double weight_a, double weight_b, uint32_t steps)
{
    struct drift d = {INFINITY, -INFINITY};
    for (uint32_t i = 0; i < steps; i++) {
        keep_waiting(w, 1, a);
        keep_waiting(w, 2, b);
        if (i == 0)
            drift_take(&d, weight_a, weight_b);
        tick(w);
        drift_take(&d, weight_a, weight_b);
    }
    return d;
}

static double bound_of(const struct world *w, uint32_t longest)
{
    double by_blocks = 2 * (double)w->blocks * R;
    return 2 * (longest > by_blocks ? longest : by_blocks);
}

static void two_that_wait_are_never_far_apart(uint64_t seed, uint32_t histories)
{
    double worst = 0, sum = 0, longest_run = 0;
    for (uint32_t i = 0; i < histories; i++) {
        struct world w;
        rng_state = seed + i;
        const uint32_t blocks = 12 + rnd(16), most = blocks * R / 3;
        const uint32_t seats = 1 + rnd(6), depth = seats + 1; /* somebody waits whoever is seated */
        const struct load a = {1 + rnd(most), 1 + rnd(most), depth + rnd(4)},
                          b = {1 + rnd(most), 1 + rnd(most), depth + rnd(4)};
        world_open(&w, blocks, seats, 8 + rnd(40));
        const struct drift d = run_two(&w, &a, &b, 1, 1, 400);
        const double share =
            (d.most - d.least) / bound_of(&w, a.prompt > b.prompt ? a.prompt : b.prompt);
        const double run = (served(1) + served(2)) / bound_of(&w, most);
        worst = share > worst ? share : worst;
        longest_run = run > longest_run ? run : longest_run;
        sum += share;
        world_close(&w);
    }
    printf("# %u histories of two that wait all the time: %.2f of the bound in the mean, %.2f at "
           "most, in runs of up to "
           "%.0f bounds\n",
           histories, sum / histories, worst, longest_run);
    ok(worst <= 1, "two tenants that wait all the time never drift apart by more than the bound");
}

static void shares_follow_weights(double weight_a, double weight_b)
{
    struct world w;
    rng_state = 7;
    world_open(&w, 200, 8, 64);
    entitle(&w, 1, weight_a);
    entitle(&w, 2, weight_b);
    const struct load l = {120, 60, 10};
    run_two(&w, &l, &l, weight_a, weight_b, 30000);
    double percent = 100 * served(1) / (served(1) + served(2));
    double wanted = 100 * weight_a / (weight_a + weight_b);
    ok(fabs(percent - wanted) <= 5, "weights of %.0f:%.0f give %.1f %% of the tokens", weight_a,
       weight_b, percent);
    ok(fabs(served(1) - (double)(tenant(&w, 1)->prompt_tokens + 2 * tenant(&w, 1)->output_tokens)) <
           1,
       "and the totals that are told are those");
    world_close(&w);
}

/* One long request after the other, against hundreds of small ones under the same number. */
static void splitting_gains_nothing(void)
{
    struct world w;
    rng_state = 8;
    world_open(&w, 200, 8, 64);
    const struct load few = {400, 200, 1}, many = {12, 6, 200};
    run_two(&w, &few, &many, 1, 1, 30000);
    double percent = 100 * served(2) / (served(1) + served(2));
    ok(fabs(percent - 50) <= 5, "who splits its work into 200 small requests has %.1f %%", percent);
    world_close(&w);
}

static void who_was_away_has_saved_nothing_up(void)
{
    struct world w;
    rng_state = 9;
    world_open(&w, 60, 4, 32);
    const struct load l = {60, 40, 6}, none = {1, 1, 0};
    run_two(&w, &l, &l, 1, 1, 500);
    const double before = served(2);
    run_two(&w, &l, &none, 1, 1, 6000); /* the second asks nothing */
    const double missed = served(1) - served(2), bound = bound_of(&w, 60);
    const double a = served(1), b = served(2);
    const uint64_t came = seen.step, id = w.next_id + 1;
    ok(b - before < bound && missed > 4 * bound,
       "one tenant was away for %.0f tokens of the other's", missed);
    submit_of(&w, 2, 30, 10);
    run_two(&w, &l, &l, 1, 1, 2000);
    ok(seen.first[id] > 0 && seen.first[id] - came < 60,
       "when it is back its first token comes in step %d", (int)(seen.first[id] - came));
    ok(fabs((served(2) - b) - (served(1) - a)) <= bound,
       "and from then on it has no more than the other: %.0f and %.0f tokens", served(2) - b,
       served(1) - a);
    world_close(&w);
}

/* A little all the time saves nothing up either. */
static void who_asked_little_has_saved_nothing_up(void)
{
    struct world w;
    rng_state = 10;
    world_open(&w, 60, 4, 32);
    const struct load l = {60, 40, 6};
    for (uint32_t i = 0; i < 6000; i++) {
        keep_waiting(&w, 1, &l);
        if (tenant(&w, 2)->n_running + tenant(&w, 2)->n_waiting < 2)
            submit_of(&w, 2, 1, 100 + rnd(100)); /* never without a sequence */
        tick(&w);
    }
    const double missed = served(1) - served(2), a = served(1), b = served(2);
    run_two(&w, &l, &l, 1, 1, 1500);
    ok(missed > 2 * bound_of(&w, 60) && fabs((served(2) - b) - (served(1) - a)) <= bound_of(&w, 60),
       "a tenant that asked for %.0f tokens less than the other does not get them afterwards (%.0f "
       "and %.0f)",
       missed, served(2) - b, served(1) - a);
    world_close(&w);
}

static void a_light_tenant_beside_31_heavy_ones(void)
{
    enum { HEAVY = 31 };
    const struct load l = {24, 12, 4};
    struct world w;
    rng_state = 11;
    world_open(&w, 120, 8, 32);
    entitle(&w, 32, 1);
    for (uint32_t t = 1; t <= HEAVY; t++)
        entitle(&w, t, 100);
    uint64_t came = 0, id = 0;
    double from = 0, at = 0;
    for (uint32_t i = 0; i < 40000; i++) {
        for (uint32_t t = 1; t <= HEAVY; t++)
            keep_waiting(&w, t, &l);
        if (i == 2000) {
            came = seen.step;
            id = w.next_id + 1;
            for (uint32_t t = 1; t <= HEAVY; t++)
                from += served(t);
        }
        if (i >= 2000)
            keep_waiting(&w, 32, &l);
        tick(&w);
    }
    for (uint32_t t = 1; t <= HEAVY; t++)
        at += served(t);
    const double fair = (at - from) / (100 * HEAVY + 1);
    printf("# weight 1 of 3,101: first token after %d steps; %.0f tokens, its share is %.0f\n",
           (int)(seen.first[id] - came), served(32), fair);
    ok(seen.first[id] > 0 && seen.first[id] - came < 100,
       "a tenant of weight 1 beside 31 of weight 100 has its first token soon");
    ok(fabs(served(32) - fair) <= 2 * (24 + 2 * 12), "and its share, give or take two requests");
    world_close(&w);
}

/* ---- priorities ---- */

static void priorities_are_inside_a_tenant(void)
{
    struct world w;
    rng_state = 12;
    world_open(&w, 60, 2, 32);
    const struct load l = {60, 40, 6};
    for (uint32_t i = 0; i < 8000; i++) {
        w.priority = 0;
        keep_waiting(&w, 1, &l);
        w.priority = -1000;
        keep_waiting(&w, 2, &l);
        tick(&w);
    }
    double percent = 100 * served(2) / (served(1) + served(2));
    ok(fabs(percent - 50) <= 5, "who calls all it asks urgent has %.1f %%", percent);
    world_close(&w);

    uint64_t ids[6];
    bool ordered = true;
    static const int32_t priorities[] = {3, -2, 0, 7, -5, 0};
    static const int order[] = {4, 1, 2, 5, 0, 3};
    world_open(&w, 60, 1, 32);
    for (int i = 0; i < 6; i++) {
        w.priority = priorities[i];
        ids[i] = submit_of(&w, 1, 10, 3)->id;
    }
    run_out(&w);
    for (int i = 1; i < 6; i++)
        ordered &= seen.first[ids[order[i - 1]]] < seen.first[ids[order[i]]];
    ok(ordered, "inside a tenant the smaller number goes first, then who came first");
    world_close(&w);
}

/* ---- rows of steps ---- */

/* Everybody is seated and nobody waits in the queue; what is scarce are rows, and the least that is left goes first
 * inside a tenant only. */
static void rows_are_shared_between_those_that_are_seated(void)
{
    struct world w;
    rng_state = 14;
    world_open(&w, 4000, 32, 64);
    for (uint32_t i = 0; i < 6000; i++) {
        while (tenant(&w, 1)->n_waiting + tenant(&w, 1)->n_running < 4)
            submit_of(&w, 1, 1000, 2);
        while (tenant(&w, 2)->n_waiting + tenant(&w, 2)->n_running < 12)
            submit_of(&w, 2, 40, 2);
        tick(&w);
    }
    double percent = 100 * served(1) / (served(1) + served(2));
    ok(fabs(percent - 50) <= 5,
       "documents of one tenant beside short prompts of another have %.1f %%", percent);
    world_close(&w);
}

/* ---- bounds ---- */

static void a_tenant_at_its_bound_holds_nobody_back(void)
{
    struct world w;
    world_open(&w, 200, 8, 64);
    struct tenant_bounds b = {1, 1, {TENANT_NO_BOUND, TENANT_NO_BOUND}};
    tenants_entitle(&w.s.tenants, 1, &b);
    for (int i = 0; i < 3; i++)
        submit_of(&w, 1, 20, 100);
    const uint64_t id = submit_of(&w, 2, 20, 5)->id;
    tick(&w);
    ok(tenant(&w, 1)->n_running == 1 && seen.first[id] == 1,
       "a tenant that is at its bound of sequences holds nobody back");
    b = (struct tenant_bounds){1, TENANT_NO_BOUND, {20, TENANT_NO_BOUND}};
    tenants_entitle(&w.s.tenants, 1, &b);
    const uint64_t other = submit_of(&w, 2, 20, 5)->id;
    tick(&w);
    ok(tenant(&w, 1)->n_running == 1 && seen.first[other] == 2, "nor one at its bound of blocks");
    run_out(&w);
    is_int(w.finished, 5, "and all end");
    world_close(&w);
}

static void note_blocks(void *arg, struct sequence *q)
{
    struct world *w = arg;
    w->blocks = residence_holds(&w->s, q, KV_HBM);
}

/* Another tenant had the same prompt computed: what is found is more than this one may have in HBM. */
static void a_hit_beyond_the_bound_goes_down(void)
{
    const struct size z = {
        .hbm = 2000, .dram = 4000, .max_seqs = 8, .max_rows = 256, .caching = true};
    const struct tenant_bounds b = {1, TENANT_NO_BOUND, {260, TENANT_NO_BOUND}};
    struct world w;
    world_open_sized(&w, &z);
    struct sequence *first = submit_sparse(&w, 4200, 2, 1, "quest", 0.05f);
    uint32_t *tokens = mem_alloc(4200 * sizeof *tokens);
    memcpy(tokens, first->tokens, 4200 * sizeof *tokens);
    while (step(&w))
        ;
    tenants_entitle(&w.s.tenants, 1, &b);
    w.tenant = 1;
    struct sequence *q = submit_sparse(&w, 4200, 300, 1, "quest", 0.15f);
    memcpy(q->tokens, tokens, 4200 * sizeof *tokens);
    CHECK(sched_plan(&w.s, 1, note_blocks, on_refused, &w));
    bool kept = w.blocks > 0 && w.blocks <= 260;
    uint32_t steps = 0;
    for (; step(&w) && w.finished < 2; steps++)
        kept &= residence_holds(&w.s, q, KV_HBM) <= 260;
    ok(kept && steps > 290 && w.finished == 2,
       "a hit of 525 blocks for a tenant that may have 260 goes down at once, and stays there");
    ok(w.s.cached_tokens >= 4096, "and is not cut: %llu rows",
       (unsigned long long)w.s.cached_tokens);
    mem_free(tokens);
    world_close(&w);
}

/* ---- who has to go ---- */

struct two {
    struct sequence *older, *younger;
};

/* Two whose answers outgrow HBM together, the older one with more blocks. */
static struct two grow_until_one_has_to_go(struct world *w, uint32_t tenant_of_younger,
                                           double its_weight, int32_t priority_of_older)
{
    struct two t;
    const struct size z = {.hbm = 100, .max_seqs = 4, .max_rows = 64};
    world_open_sized(w, &z);
    entitle(w, tenant_of_younger, its_weight);
    w->priority = priority_of_older;
    t.older = submit_of(w, 1, 60, 700);
    w->priority = 0;
    t.younger = submit_of(w, tenant_of_younger, 20, 700);
    while (w->s.preemptions == 0)
        CHECK(step(w));
    return t;
}

static void who_has_most_by_its_weight_goes_first(void)
{
    struct world w;
    struct two t = grow_until_one_has_to_go(&w, 2, 1, 0);
    ok(t.older->n_preempted == 1 && t.younger->n_preempted == 0,
       "of two tenants that of the one with more blocks has to go, though it is older");
    world_close(&w);
    t = grow_until_one_has_to_go(&w, 2, 0.5, 0);
    ok(t.older->n_preempted == 0 && t.younger->n_preempted == 1, "by its weight");
    world_close(&w);
    t = grow_until_one_has_to_go(&w, 1, 1, 0);
    ok(t.older->n_preempted == 0 && t.younger->n_preempted == 1, "of one tenant the younger");
    world_close(&w);
    t = grow_until_one_has_to_go(&w, 1, 1, 5);
    ok(t.older->n_preempted == 1 && t.younger->n_preempted == 0,
       "but first whose priority is lower");
    world_close(&w);
}

/* ---- the bus ---- */

static struct sequence *spilled(struct world *w, uint32_t t)
{
    w->tenant = t;
    struct sequence *q = submit_sparse(w, 2000, 500, (uint32_t)w->next_id, "quest", 0.05f);
    while (q->n_computed < q->n_prompt)
        CHECK(step(w));
    CHECK(step(w));
    CHECK(kv_seq_spill(w->kv, &q->kv, residence_min_slots(&w->s, q, q->n_tokens)) == OK);
    return q;
}

static bool fits(struct world *w, const struct sequence *q)
{
    return residence_fits_under_pressure(&w->s, q, 2256, 0);
}

static void the_bus_is_shared_by_weight(void)
{
    const struct size z = {.hbm = 2000, .dram = 4000, .max_seqs = 8, .max_rows = 256};
    struct world w;
    world_open_sized(&w, &z);
    spilled(&w, 1);
    spilled(&w, 1);
    w.tenant = 1;
    struct sequence *more = submit_sparse(&w, 2000, 500, 8, "quest", 0.05f);
    w.tenant = 2;
    struct sequence *first = submit_sparse(&w, 2000, 500, 9, "quest", 0.05f);
    ok(fits(&w, more) && fits(&w, first), "without a bound on transfers everybody fits");
    w.s.headroom = w.s.step_us = 1;
    for (w.s.fetch_us = 1e-9; fits(&w, more) && w.s.fetch_us < 1; w.s.fetch_us *= 1.1)
        ;
    ok(!fits(&w, more), "where the bus is used up a third of its tenant does not");
    ok(fits(&w, first), "and one of a tenant within its share does");
    entitle(&w, 1, 100);
    ok(!fits(&w, first), "which it is by weight");
    world_close(&w);
}

/* ---- the reserve ---- */

/* Steps until a tenant that asks little has its first token, at worst, while another has 64 long answers and a queue. */
static uint32_t worst_wait(bool told)
{
    struct world w;
    uint32_t worst = 0;
    rng_state = 13;
    world_open(&w, 4000, 64, 256);
    for (uint32_t t = 1; t <= 2 && told; t++)
        entitle(&w, t, 1);
    const struct load flood = {100, 400, 200};
    for (uint32_t i = 0; i < 40; i++) {
        for (uint32_t k = 0; k < 20; k++) {
            while (tenant(&w, 1)->n_waiting < flood.depth)
                submit_of(&w, 1, 100, 400);
            tick(&w);
        }
        uint64_t came = seen.step, id = submit_of(&w, 2, 50, 5)->id;
        while (seen.first[id] == 0 && seen.step < came + 5000)
            tick(&w);
        uint32_t waited = (uint32_t)(seen.step - came);
        worst = waited > worst ? waited : worst;
    }
    world_close(&w);
    return worst;
}

static void a_quiet_tenant_does_not_wait_for_answers_to_end(void)
{
    uint32_t with = worst_wait(true), without = worst_wait(false);
    ok(with <= 3, "beside a flood of long answers a quiet tenant's first token comes in step %u",
       with);
    ok(without > 100, "without the reserve it comes when an answer has ended, in step %u", without);
}

/* ---- histories of everything ---- */

struct history {
    struct world w;
    uint32_t n;
    struct tenant_bounds bounds[8];
    bool kept;
    uint32_t never; /* submitted, and larger than its tenant's bounds at their largest */
};

static void blocks_now(const struct world *w, const struct sequence *q, uint32_t blocks[2])
{
    uint32_t sealed = q->kv.n_segments * (SEGMENT_ROWS / R);
    (void)w;
    if (q->kv.residence == KV_PAUSED) {
        blocks[KV_DRAM] += q->kv.n_blocks;
    } else if (q->kv.residence == KV_SPILLED) {
        blocks[KV_HBM] += q->kv.n_blocks - sealed + q->kv.n_slots;
        blocks[KV_DRAM] += sealed;
    } else {
        blocks[KV_HBM] += q->kv.n_blocks;
    }
}

static void check_bounds(struct history *h)
{
    const struct sched *s = &h->w.s;
    for (uint32_t t = 0; t < h->n; t++) {
        uint32_t blocks[2] = {0, 0}, n = 0, waiting = 0;
        for (uint32_t i = 0; i < s->n_running; i++) {
            if (s->running[i]->tenant != t)
                continue;
            n++;
            blocks_now(&h->w, s->running[i], blocks);
        }
        for (const struct sequence *q = s->queue.lines[t].first; q != NULL; q = q->next, waiting++)
            if (q->state == SEQUENCE_PAUSED)
                blocks_now(&h->w, q, blocks);
        const struct tenant_bounds *b = &h->bounds[t];
        h->kept &= n <= b->max_running && blocks[0] <= b->max_blocks[0] &&
                   blocks[1] <= b->max_blocks[1] && n == tenant(&h->w, t)->n_running &&
                   waiting == tenant(&h->w, t)->n_waiting;
    }
}

static void random_bounds(struct history *h, uint32_t t)
{
    struct tenant_bounds *b = &h->bounds[t];
    *b = (struct tenant_bounds){1 + rnd(4), TENANT_NO_BOUND, {TENANT_NO_BOUND, TENANT_NO_BOUND}};
    if (rnd(3) == 0)
        b->max_running = 1 + rnd(4);
    if (rnd(2) == 0)
        b->max_blocks[KV_HBM] = h->w.blocks / 4 + rnd(h->w.blocks);
    if (rnd(3) == 0)
        b->max_blocks[KV_DRAM] = rnd(h->w.dram + 1);
    if (rnd(4) > 0)
        tenants_entitle(&h->w.s.tenants, t, b);
    else
        *b = (struct tenant_bounds){1, TENANT_NO_BOUND, {TENANT_NO_BOUND, TENANT_NO_BOUND}};
}

static void history_open(struct history *h, uint64_t seed, const struct size *z)
{
    *h = (struct history){.kept = true};
    rng_state = seed;
    world_open_sized(&h->w, z);
    h->w.probes = 1;
    h->w.computed = see;
    forget();
    h->n = 1 + rnd(8);
    for (uint32_t t = 0; t < h->n; t++)
        random_bounds(h, t);
}

/* Everybody ended, and only what can never fit was refused. */
static bool history_ends(struct history *h)
{
    uint64_t before = h->w.steps;
    while (tick(&h->w) && h->w.steps < before + 20000)
        check_bounds(h);
    const struct world *w = &h->w;
    for (uint32_t t = 0; t < h->n;
         t++) /* what was computed again after a preemption is not charged */
        h->kept &= tenant(w, t)->prompt_tokens == seen.rows[t] &&
                   tenant(w, t)->output_tokens == seen.tokens[t];
    bool good = w->finished + w->refused == w->submitted && w->s.queue.n_sequences == 0 &&
                w->s.tenants.n_active == 0 && w->s.queue.n_waiting == 0 && w->rows_bounded &&
                w->answers_advance && w->marks_right && w->borders_kept && w->slots_suffice &&
                w->refused == h->never && all_blocks_home(w);
    return good && h->kept;
}

static void submit_any(struct history *h)
{
    struct world *w = &h->w;
    uint32_t prompt = 1 + rnd(w->blocks * R / 3),
             output = 1 + rnd(rnd(4) == 0 ? w->blocks * 5 : 20);
    w->tenant = rnd(h->n);
    w->priority = (int32_t)rnd(3) - 1;
    uint32_t longest = (prompt + output + R - 1) / R;
    h->never += longest > h->bounds[w->tenant].max_blocks[KV_HBM] || longest > w->blocks;
    submit(w, prompt, output, rnd(5), 0);
}

static void short_histories_end_well(uint64_t seed, uint32_t histories)
{
    uint64_t steps = 0, submitted = 0, preemptions = 0, refused = 0;
    uint32_t bad = 0;
    static struct history h;
    for (uint32_t i = 0; i < histories; i++) {
        rng_state = seed + i;
        const uint32_t blocks = rnd(10) > 0 ? 12 + rnd(30) : 60 + rnd(60);
        const struct size z = {.hbm = blocks,
                               .dram = rnd(2) == 0 ? 0 : blocks / 2,
                               .max_seqs = 1 + rnd(8),
                               .max_rows = 8 + rnd(40),
                               .caching = rnd(2) == 0};
        history_open(&h, seed + i, &z);
        for (int k = 0; k < 40; k++) {
            if (rnd(2) == 0)
                submit_any(&h);
            tick(&h.w);
            check_bounds(&h);
        }
        if (!history_ends(&h) && bad++ == 0)
            printf("# first bad history: seed %llu, %u of %u ended, %u refused, %u never fit; "
                   "bounds %s\n",
                   (unsigned long long)(seed + i), h.w.finished + h.w.refused, h.w.submitted,
                   h.w.refused, h.never, h.kept ? "kept" : "broken");
        steps += h.w.steps;
        submitted += h.w.submitted;
        refused += h.w.refused;
        preemptions += h.w.s.preemptions;
        world_close(&h.w);
    }
    printf("# %u histories: %llu sequences, %llu refused, %llu steps, %llu preemptions\n",
           histories, (unsigned long long)submitted, (unsigned long long)refused,
           (unsigned long long)steps, (unsigned long long)preemptions);
    ok(bad == 0, "in %u histories all end, bounds are kept in every step and blocks come home",
       histories);
    ok(preemptions > 0 && refused > 0, "with preemptions, and refusals of what can never fit");
}

/* The same with sequences that attend by plan, spill, and pause. */
static void long_histories_end_well(uint64_t seed, uint32_t histories)
{
    static const char *const plugins[] = {"quest", "wave", "oracle"};
    uint64_t spills = 0, pauses = 0, preemptions = 0, submitted = 0, refused = 0;
    uint32_t bad = 0;
    static struct history h;
    for (uint32_t i = 0; i < histories; i++) {
        const struct size z = {.hbm = 700,
                               .dram = i % 3 == 0 ? 600 : 3000,
                               .max_seqs = 8,
                               .max_rows = 256,
                               .caching = i % 2 == 0};
        history_open(&h, seed + i, &z);
        for (uint32_t t = 0; t < h.n; t++) { /* what is refused is another test's */
            struct tenant_bounds *l = &h.bounds[t];
            if (l->max_blocks[KV_HBM] == TENANT_NO_BOUND)
                continue;
            l->max_blocks[KV_HBM] = 250 + rnd(300);
            if (l->max_blocks[KV_HBM] < 450 && l->max_blocks[KV_DRAM] != TENANT_NO_BOUND)
                l->max_blocks[KV_DRAM] = 450;
            tenants_entitle(&h.w.s.tenants, t, l);
        }
        for (int k = 0; k < 400; k++) {
            h.w.tenant = rnd(h.n);
            h.w.priority = (int32_t)rnd(3) - 1;
            if (rnd(12) == 0)
                submit_sparse(&h.w, 1 + rnd(2500), 1 + rnd(rnd(4) == 0 ? 900 : 100), rnd(4),
                              plugins[rnd(3)], rnd(2) == 0 ? 0.05f : 0.2f);
            else if (rnd(20) == 0)
                submit(&h.w, 1 + rnd(500), 1 + rnd(100), rnd(4), 0);
            tick(&h.w);
            check_bounds(&h);
        }
        if (!history_ends(&h) && bad++ == 0)
            printf("# first bad history: seed %llu, %u of %u ended, %u refused; bounds %s\n",
                   (unsigned long long)(seed + i), h.w.finished + h.w.refused, h.w.submitted,
                   h.w.refused, h.kept ? "kept" : "broken");
        struct kv_counts c;
        kv_counts(h.w.kv, &c);
        spills += c.spills;
        pauses += c.pauses;
        preemptions += h.w.s.preemptions;
        submitted += h.w.submitted;
        refused += h.w.refused;
        world_close(&h.w);
    }
    printf("# %u long histories: %llu sequences, %llu refused, %llu spills, %llu pauses, %llu "
           "preemptions\n",
           histories, (unsigned long long)submitted, (unsigned long long)refused,
           (unsigned long long)spills, (unsigned long long)pauses, (unsigned long long)preemptions);
    ok(bad == 0, "in %u histories with spills and pauses all end, bounds are kept in every step",
       histories);
    ok(spills > 0 && pauses > 0 && preemptions > 0, "and there were some of each");
}

/* A world is many allocations, slow to check. */
enum { HISTORIES = TAP_SANITIZED ? 1000 : 10000, LONG_ONES = TAP_SANITIZED ? 10 : 40 };

int main(int argc, char **argv)
{
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    two_that_wait_are_never_far_apart(seed, 300);
    shares_follow_weights(1, 1);
    shares_follow_weights(3, 1);
    splitting_gains_nothing();
    who_was_away_has_saved_nothing_up();
    who_asked_little_has_saved_nothing_up();
    a_light_tenant_beside_31_heavy_ones();
    priorities_are_inside_a_tenant();
    rows_are_shared_between_those_that_are_seated();
    a_tenant_at_its_bound_holds_nobody_back();
    a_hit_beyond_the_bound_goes_down();
    who_has_most_by_its_weight_goes_first();
    the_bus_is_shared_by_weight();
    a_quiet_tenant_does_not_wait_for_answers_to_end();
    short_histories_end_well(seed, HISTORIES);
    long_histories_end_well(seed, LONG_ONES);
    return tap_done();
}
