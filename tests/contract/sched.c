/* The scheduler against random traffic from a seed: whatever comes, every sequence ends, no step is
 * larger than allowed, answers go first, prompts are not starved, and blocks all come home.
 *
 * The model is replaced by "every planned row was computed"; tokens are a hash of what came before,
 * so a preempted sequence that did not keep its tokens would be seen. */
#include "engine/sched.h"
#include "tests/tap.h"

static uint64_t rng_state;

static uint32_t rnd(uint32_t n)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((rng_state >> 33) % n);
}

/* ---- a backend with memory and nothing else ---- */

static void *fake_alloc(struct backend *be, size_t bytes)
{
    (void)be;
    return mem_try_alloc(bytes);
}

static void fake_free(struct backend *be, void *p, size_t bytes)
{
    (void)be, (void)bytes;
    mem_free(p);
}

static void fake_copy(struct backend *be, void *dst, const void *src, size_t bytes)
{
    (void)be;
    memcpy(dst, src, bytes);
}

static const struct backend_ops fake_ops = {
    .name = "fake", .alloc = fake_alloc, .free = fake_free, .copy = fake_copy};
static struct backend fake = {.ops = &fake_ops};

/* ---- the world ---- */

struct world {
    struct kv *kv;
    struct sched s;
    uint64_t next_id, steps, order;
    uint32_t submitted, finished, refused, too_large, overtaken_max, preempted_max;
    uint32_t blocks;
    bool rows_bounded, answers_advance;
};

static void world_open(struct world *w, uint32_t blocks, uint32_t max_seqs, uint32_t max_rows,
                       bool caching)
{
    *w = (struct world){.blocks = blocks, .rows_bounded = true, .answers_advance = true};
    const struct kv_config kc = {.geo = kv_geometry_make(8, 1, 1, 2),
                                 .blocks = {{blocks, blocks / 2}},
                                 .prefix_caching = caching,
                                 .secret = {1, 2}};
    CHECK(kv_create(&w->kv, &fake, &kc) == OK);
    sched_init(&w->s, w->kv, max_seqs, max_rows, caching);
}

static void world_close(struct world *w)
{
    sched_fini(&w->s);
    kv_destroy(w->kv);
}

struct submission {
    struct msg_submit m;
    uint32_t tokens[4096];
};

static struct sequence *submit(struct world *w, uint32_t n_prompt, uint32_t max_tokens,
                               uint32_t family, uint64_t leader)
{
    static struct submission sub;
    sub.m = (struct msg_submit){.head = {.kind = MSG_SUBMIT, .bytes = sizeof sub},
                                .id = ++w->next_id,
                                .leader = leader,
                                .n_prompt = n_prompt,
                                .max_tokens = max_tokens,
                                .logprobs = -1,
                                .prompt_logprobs = -1};
    for (uint32_t i = 0; i < n_prompt; i++)
        sub.tokens[i] = family * 1000 + (i < 24 ? i : i * (uint32_t)w->next_id);
    struct sequence *q = sequence_create(&sub.m, ++w->order, 1);
    sched_submit(&w->s, q);
    w->submitted++;
    return q;
}

static uint32_t next_token(const struct sequence *q)
{
    uint32_t h = 2166136261u;
    for (uint32_t i = 0; i < q->n_tokens; i++)
        h = (h ^ q->tokens[i]) * 16777619u;
    return h;
}

static void on_admitted(void *arg, struct sequence *q)
{
    (void)arg;
    CHECK(q->state == SEQUENCE_RUNNING);
}

static void on_refused(void *arg, struct sequence *q)
{
    struct world *w = arg;
    w->refused++;
    w->too_large += q->n_prompt + q->max_tokens > w->blocks * 8;
    sched_remove(&w->s, q);
    sequence_destroy(q);
}

static void check_plan(struct world *w)
{
    const struct sched *s = &w->s;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < s->n_plan; i++) {
        const struct sequence *q = s->plan[i];
        rows += q->n_scheduled;
        if (q->n_scheduled == 0 || q->n_scheduled > sequence_left(q) ||
            q->kv.n_blocks * 8 < q->n_computed + q->n_scheduled)
            w->rows_bounded = false;
    }
    if (rows != s->plan_rows || rows > s->max_rows || s->n_running > s->max_seqs)
        w->rows_bounded = false;
    /* Every running answer is in the plan. */
    for (uint32_t i = 0; i < s->n_running; i++) {
        const struct sequence *q = s->running[i];
        if (sequence_decodes(q) && q->n_scheduled != 1)
            w->answers_advance = false;
        if (q->n_preempted > w->preempted_max)
            w->preempted_max = q->n_preempted;
        if (q->n_bypassed > w->overtaken_max)
            w->overtaken_max = q->n_bypassed;
    }
}

/* Plans and "computes" one step; false: nothing to do. */
static bool step(struct world *w)
{
    struct sched *s = &w->s;
    if (!sched_plan(s, 1, on_admitted, on_refused, w))
        return false;
    w->steps++;
    check_plan(w);
    for (uint32_t i = 0; i < s->n_plan; i++) {
        struct sequence *q = s->plan[i];
        q->n_computed += q->n_scheduled;
        q->n_scheduled = 0;
        if (q->n_computed < q->n_tokens)
            continue;
        kv_seq_share(w->kv, &q->kv, q->tokens, q->n_computed);
        q->tokens[q->n_tokens] = next_token(q);
        q->n_tokens++;
        if (sequence_n_output(q) == q->max_tokens) {
            w->finished++;
            sched_remove(s, q);
            sequence_destroy(q);
        }
    }
    return true;
}

static bool all_blocks_home(const struct world *w)
{
    struct kv_counts c;
    kv_counts(w->kv, &c);
    return c.active == 0 && c.free[0] + c.cached[0] == c.total[0] &&
           c.free[1] + c.cached[1] == c.total[1];
}

static void cancel_any(struct world *w)
{
    struct sequence *q = sched_find(&w->s, 1 + rnd((uint32_t)w->next_id + 1));
    if (q == NULL)
        return;
    sched_remove(&w->s, q);
    sequence_destroy(q);
    w->finished++;
}

static void random_traffic_always_ends(uint64_t seed, bool caching)
{
    struct world w;
    rng_state = seed;
    world_open(&w, 40 + rnd(100), 1 + rnd(16), 16 + rnd(100), caching);
    for (int i = 0; i < 3000; i++) {
        if (rnd(4) == 0)
            submit(&w, 1 + rnd(200), 1 + rnd(rnd(5) == 0 ? 600 : 60), rnd(5), 0);
        if (rnd(30) == 0) {
            uint64_t leader = submit(&w, 60, 20, 9, 0)->id;
            submit(&w, 60, 20, 9, leader);
            submit(&w, 60, 20, 9, leader);
        }
        if (rnd(20) == 0)
            cancel_any(&w);
        step(&w);
    }
    uint64_t before = w.steps;
    while (step(&w) && w.steps < before + 200000)
        ;
    printf("# seed %llu: %u sequences, %llu steps, %llu preemptions, %u overtakings at most\n",
           (unsigned long long)seed, w.submitted, (unsigned long long)w.steps,
           (unsigned long long)w.s.preemptions, w.overtaken_max);
    ok(w.finished + w.refused == w.submitted && w.s.n_sequences == 0, "every sequence ended");
    ok(w.refused == w.too_large, "only what can never fit was refused (%u)", w.refused);
    ok(w.rows_bounded, "no step was larger than allowed and every row had a block");
    ok(w.answers_advance, "every running answer got its row in every step");
    ok(w.preempted_max <= SCHED_MAX_PREEMPTIONS, "no sequence was preempted more than twice");
    ok(w.overtaken_max <= SCHED_MAX_BYPASS + 16 /* those that are due wait for each other */,
       "no prompt was overtaken without bound");
    ok(all_blocks_home(&w), "every block came home");
    world_close(&w);
}

static void a_short_prompt_overtakes_a_long_one(void)
{
    struct world w;
    world_open(&w, 1000, 8, 64, true);
    struct sequence *lng = submit(&w, 2000, 4, 1, 0);
    step(&w);
    struct sequence *sht = submit(&w, 30, 4, 2, 0);
    step(&w);
    ok(sequence_n_output(sht) == 1, "a short prompt is answered in the step after it came");
    ok(lng->n_computed > 64 && lng->n_computed < 2000, "while the long one goes on with the rest");
    while (step(&w))
        ;
    world_close(&w);
}

static void the_long_prompt_is_not_starved(void)
{
    struct world w;
    world_open(&w, 2000, 8, 64, true);
    struct sequence *lng = submit(&w, 640, 1, 1, 0);
    uint64_t id = lng->id;
    int steps = 0;
    /* Two fresh short prompts fill every step. */
    while (sched_find(&w.s, id) != NULL && steps < 1000) {
        submit(&w, 32, 1, 3, 0);
        submit(&w, 32, 1, 4, 0);
        step(&w);
        steps++;
    }
    ok(steps < 10 * (SCHED_MAX_BYPASS + 3),
       "a long prompt ends although short ones keep coming (%d steps)", steps);
    while (step(&w))
        ;
    world_close(&w);
}

/* Scoring takes logits rows, of which a step has few; the rest of the step is for others. */
static void scoring_prompts_do_not_hold_up_the_others(void)
{
    struct world w;
    world_open(&w, 4000, 64, 512, false);
    for (uint32_t i = 0; i < 40; i++)
        submit(&w, 500, 1, i, 0)->prompt_logprobs = 0;
    struct sequence *chat = submit(&w, 2000, 1, 77, 0);
    uint64_t id = chat->id;
    int steps = 0;
    while (sched_find(&w.s, id) != NULL && steps < 1000) {
        step(&w);
        steps++;
    }
    ok(steps <= 6, "a prompt of 2,000 passes 40 that are scored in %d steps of 512 rows", steps);
    while (step(&w))
        ;
    ok(all_blocks_home(&w), "and they end as well");
    world_close(&w);
}

static void siblings_find_their_leaders_blocks(void)
{
    struct world w;
    world_open(&w, 200, 8, 64, true);
    uint64_t leader = submit(&w, 100, 2, 1, 0)->id;
    struct sequence *b = submit(&w, 100, 2, 1, 0);
    b->leader = leader;
    memcpy(b->tokens, sched_find(&w.s, leader)->tokens, 100 * 4);
    step(&w);
    ok(b->state == SEQUENCE_WAITING, "a sibling waits while its leader prefills");
    step(&w);
    step(&w);
    ok(b->n_cached == 96, "then it finds every full block of the prompt");
    while (step(&w))
        ;
    world_close(&w);
}

static void what_can_never_fit_is_refused(void)
{
    struct world w;
    world_open(&w, 10, 4, 64, true);
    submit(&w, 70, 20, 1, 0);
    submit(&w, 70, 10, 1, 0);
    while (step(&w))
        ;
    ok(w.refused == 1 && w.finished == 1,
       "90 positions do not fit 10 blocks of 8 and are refused; 80 do");
    world_close(&w);
}

int main(int argc, char **argv)
{
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    for (uint64_t i = 0; i < 10; i++)
        random_traffic_always_ends(seed + i, i % 3 != 0);
    a_short_prompt_overtakes_a_long_one();
    the_long_prompt_is_not_starved();
    scoring_prompts_do_not_hold_up_the_others();
    siblings_find_their_leaders_blocks();
    what_can_never_fit_is_refused();
    return tap_done();
}
