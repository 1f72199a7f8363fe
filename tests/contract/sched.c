/* The scheduler against random traffic from a seed: whatever comes, every sequence ends, no step is
 * larger than allowed, answers go first, prompts are not starved, and blocks all come home. Of sequences that
 * attend by plan: residence.c. */
#include "tests/contract/sched_world.h"

static void world_open(struct world *w, uint32_t blocks, uint32_t max_seqs, uint32_t max_rows,
                       bool caching)
{
    const struct size z = {.hbm = blocks,
                           .dram = blocks / 2,
                           .max_seqs = max_seqs,
                           .max_rows = max_rows,
                           .caching = caching};
    world_open_sized(w, &z);
}

static void random_traffic_always_ends(uint64_t seed, bool caching, bool by_turns)
{
    struct world w;
    rng_state = seed;
    world_open(&w, 40 + rnd(100), 1 + rnd(16), 16 + rnd(100), caching);
    if (by_turns)
        w.s.whole = w.s.max_rows - w.s.max_seqs / 2;
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
    printf("# seed %llu: %u sequences, %llu steps, %llu preemptions\n", (unsigned long long)seed,
           w.submitted, (unsigned long long)w.steps, (unsigned long long)w.s.preemptions);
    ok(w.finished + w.refused == w.submitted && w.s.queue.n_sequences == 0, "every sequence ended");
    ok(w.refused == w.too_large, "only what can never fit was refused (%u)", w.refused);
    ok(w.rows_bounded, "no step was larger than allowed and every row had a block");
    ok(w.answers_advance, "every running answer got its row in every step%s",
       by_turns ? ", or in every other one" : "");
    ok(w.preempted_max <= SCHED_MAX_PREEMPTIONS, "no sequence was preempted more than twice");
    ok(!w.passed_too_often, "no prompt was passed without bound");
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

/* How often a step had so many rows of q, and whether any of them began elsewhere than at a multiple. */
struct chunks {
    uint32_t whole, apart, least, most_rows, steps;
};

static struct chunks read_all(struct world *w, struct sequence *q, uint32_t whole)
{
    struct chunks c = {.least = UINT32_MAX};
    while (q->n_computed < q->n_prompt) {
        const uint32_t before = q->n_computed;
        step(w);
        const uint32_t rows = q->n_computed - before;
        c.steps++;
        if (rows == 0)
            continue;
        c.whole += rows == whole;
        c.apart += rows == whole && before % whole != 0;
        c.least = rows < c.least ? rows : c.least;
        c.most_rows = w->s.plan_rows > c.most_rows ? w->s.plan_rows : c.most_rows;
    }
    return c;
}

static void chunks_are_whole_beside_answers(void)
{
    enum { WHOLE = 64, SEQS = 8 };
    struct world w;
    world_open(&w, 4000, SEQS, WHOLE + SEQS, true);
    w.s.whole = WHOLE;
    struct sequence *answer = submit(&w, 10, 2000, 3, 0);
    submit(&w, 10, 2000, 4, 0);
    submit(&w, 10, 2000, 5, 0);
    step(&w);
    struct sequence *a = submit(&w, 5 * WHOLE + 20, 4, 1, 0);
    struct chunks c = read_all(&w, a, WHOLE);
    ok(c.whole == 5 && c.apart == 0,
       "a prompt beside three answers is read in whole chunks (%u, %u)", c.whole, c.apart);
    ok(c.most_rows == WHOLE && c.steps == 11 && sequence_n_output(answer) == 7,
       "by turns with them (%u, %u, %u)", c.most_rows, c.steps, sequence_n_output(answer));
    struct sequence *b = submit(&w, WHOLE + 50, 4, 8, 0), *d = submit(&w, 5 * WHOLE, 4, 9, 0);
    c = read_all(&w, b, WHOLE);
    ok(d->n_computed == WHOLE - 50, "what a prompt leaves of its last step is the next one's");
    c = read_all(&w, d, WHOLE);
    ok(c.whole == 4 && c.apart == 0 && c.least == 50,
       "which then goes on to where whole chunks begin (%u, %u, %u)", c.whole, c.apart, c.least);
    struct sequence *e = submit(&w, WHOLE + 52, 4, 10, 0), *f = submit(&w, WHOLE + 50, 4, 11, 0);
    read_all(&w, f, WHOLE);
    c = read_all(&w, e, WHOLE);
    ok(e->n_computed == WHOLE + 52 && c.apart == 1 && c.least == 52 - (WHOLE - 50),
       "and not where none would follow (%u, %u)", c.apart, c.least);
    struct sequence *g = submit(&w, 5 * WHOLE, 4, 12, 0);
    step(&w);
    step(&w);
    struct sequence *h = submit(&w, 20, 4, 13, 0);
    step(&w);
    ok(g->n_computed == WHOLE && sequence_n_output(h) == 1,
       "a short prompt that came meanwhile is answered with the answers, before the next chunk");
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

/* Documents wait for each other; whoever comes with little, and again and again, does not wait for them:
 * eight steps' worth of such rows are less than a document. */
static void many_short_prompts_pass_documents(void)
{
    struct world w;
    uint32_t waited = 0, most = 0;
    world_open(&w, 2000, 16, 64, true);
    for (uint32_t i = 0; i < 8; i++)
        submit(&w, 1280, 1, i, 0);
    for (uint32_t i = 0; i<60; i++, most = waited> most ? waited : most) {
        uint64_t id = submit(&w, 20, 1, 50 + i, 0)->id;
        for (waited = 0; sched_find(&w.s, id) != NULL; waited++)
            step(&w);
    }
    is_int(most, 1, "60 short prompts, one behind the other, each pass 8 documents in a step");
    while (step(&w))
        ;
    is_int(w.finished, 68, "and all end");
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
        random_traffic_always_ends(seed + i, i % 3 != 0, i % 2 != 0);
    a_short_prompt_overtakes_a_long_one();
    chunks_are_whole_beside_answers();
    the_long_prompt_is_not_starved();
    many_short_prompts_pass_documents();
    scoring_prompts_do_not_hold_up_the_others();
    siblings_find_their_leaders_blocks();
    what_can_never_fit_is_refused();
    return tap_done();
}
