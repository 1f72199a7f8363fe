/* The scheduler and engine/residence.c with sequences that attend by plan: they spill, shrink, pause and come
 * back, and every one ends, computing nothing twice where that can be. Random traffic from a seed, and
 * one story for each thing that can happen. */
#include "engine/residence.h"
#include "tests/contract/sched_world.h"

#include <unistd.h>

/* Its DRAM comes behind the start. */
static struct backend_ops growing_ops;
static struct backend growing = {.ops = &growing_ops};
static struct host_progress dram_progress;

static void *growing_alloc(struct backend *self, size_t bytes)
{
    dram_progress = (struct host_progress){.bytes = bytes};
    return fake_alloc(self, bytes);
}

static void growing_progress(struct backend *self, const void *p, struct host_progress *out)
{
    (void)self, (void)p;
    *out = dram_progress;
}

static void audit(const struct world *w)
{
    struct kv_seq *open[64];
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->s.n_running; i++)
        open[n++] = &w->s.running[i]->kv;
    for (struct sequence *q = w->s.queue.lines[0].first; q != NULL && n < 64; q = q->next)
        if (q->state == SEQUENCE_PAUSED)
            open[n++] = &q->kv;
    kv_audit(w->kv, open, n);
}

static void spilled_traffic_always_ends(uint64_t seed, const struct size *z, const char *what)
{
    static const char *const plugins[] = {"quest", "wave", "oracle"};
    struct world w;
    rng_state = seed;
    world_open_sized(&w, z);
    for (int i = 0; i < 1500; i++) {
        uint32_t family = rnd(4), output = 1 + rnd(rnd(4) == 0 ? 1200 : 100);
        if (rnd(40) == 0)
            submit_sparse(&w, 1 + rnd(2500), output, family, plugins[rnd(3)],
                          rnd(2) == 0 ? 0.05f : 0.2f);
        if (rnd(60) == 0)
            submit(&w, 1 + rnd(500), 1 + rnd(100), family, 0);
        if (rnd(100) == 0)
            cancel_any(&w);
        step(&w);
        if (i % 16 == 0)
            audit(&w);
    }
    uint64_t before = w.steps;
    while (step(&w) && w.steps < before + 200000)
        ;
    struct kv_counts c;
    kv_counts(w.kv, &c);
    printf("# %s, seed %llu: %u sequences, %llu steps, %llu spills, %llu restores, %llu pauses, "
           "%llu preemptions\n",
           what, (unsigned long long)seed, w.submitted, (unsigned long long)w.steps,
           (unsigned long long)c.spills, (unsigned long long)c.restores,
           (unsigned long long)c.pauses, (unsigned long long)w.s.preemptions);
    ok(w.finished + w.refused == w.submitted && w.s.queue.n_sequences == 0,
       "%s: every sequence ended", what);
    ok(w.refused == w.too_large, "%s: only what can never fit was refused (%u)", what, w.refused);
    ok(w.rows_bounded && w.answers_advance, "%s: steps are bounded, answers go first", what);
    ok(w.borders_kept, "%s: no step crosses a border, and what is due is sealed before", what);
    ok(w.slots_suffice, "%s: no plan names more pages than its hot set has slots", what);
    ok(w.marks_right, "%s: every row is where the tables say, in either tier", what);
    /* Nobody is admitted by rings: that there are as many as may run together is the memory plan's
     * work. With fewer, all end, and what is computed is lost again and again. */
    bool starved = z->ring[KV_HBM] > 0 && z->ring[KV_HBM] < z->max_seqs * 20;
    ok(starved || w.preempted_max <= SCHED_MAX_PREEMPTIONS,
       "%s: no sequence was preempted more than twice", what);
    ok(all_blocks_home(&w), "%s: every block came home", what);
    world_close(&w);
}

/* Segments sealed by the next step. */
static uint32_t seals_of_step(struct world *w)
{
    uint64_t before = w->s.segments_sealed;
    CHECK(step(w));
    return (uint32_t)(w->s.segments_sealed - before);
}

/* Where borders may be crossed: no row of a prompt needs its last chunk's segments, so they wait for the
 * answer's second row. */
static void the_last_chunk_is_sealed_behind_the_first_token(void)
{
    const struct size z = {2000, 0, 4, 4096, false, {0}, 0};
    struct world w;
    world_open_sized(&w, &z);
    w.s.loose = true;
    submit_sparse(&w, 4096, 4, 1, "wave", 0.05f);
    is_int(seals_of_step(&w), 0, "a prompt of one chunk has its first token with nothing sealed");
    is_int(seals_of_step(&w), 3, "then three segments of 4,096 rows are due");
    while (w.finished == 0)
        step(&w);
    submit_sparse(&w, 8192, 4, 2, "wave", 0.05f);
    is_int(seals_of_step(&w), 0, "of two chunks, the first waits for nothing");
    is_int(seals_of_step(&w), 3, "the second for what the first completed");
    is_int(seals_of_step(&w), 4, "and the answer for the rest");
    world_close(&w);
}

/* The most segments that steps without a prompt's row seal, of answers to prompts of one length. */
static uint32_t most_seals_of_answers(uint32_t max_rows)
{
    enum { SEQS = 8, PROMPT = 1200 };
    const struct size z = {4000, 0, SEQS, max_rows, false, {0}, 0};
    struct world w;
    uint32_t most = 0, prompts = 0;
    world_open_sized(&w, &z);
    w.s.loose = true;
    for (uint32_t i = 0; i < SEQS; i++)
        submit_sparse(&w, PROMPT, 1000, i, "wave", 0.05f);
    while (w.finished == 0 && prompts < 64) {
        uint32_t n = seals_of_step(&w);
        if (w.s.plan_rows > w.s.plan_decodes)
            prompts++;
        else if (w.s.n_running > 0 && w.s.running[0]->n_computed > PROMPT + SEQS)
            most = n > most ? n : most;
    }
    world_close(&w);
    return most;
}

/* A segment is due at a position, so answers seal together where they stand alike: if their prompts ended in
 * one step. Prompts that fill steps end in different ones. */
static void answers_seal_together_only_if_they_began_together(void)
{
    is_int(most_seals_of_answers(1200 + 8), 1, "prompts read one by one: a seal a step");
    is_int(most_seals_of_answers(8 * 1200), 8, "eight prompts read in one step: eight at once");
}

/* As many rings as the memory plan counts, and prompts that pass one another, each in the middle of a
 * long one: whoever was passed over must not keep the rows of its last chunk from the others. */
static void rings_are_enough_for_all_that_run(bool caching)
{
    enum { SEQS = 8, ROWS = 256, WINDOW = (16 + 64 + 64) / R + 2, CHUNK = ROWS / R + 1 };
    struct world w;
    const struct size z = {8000, 0, SEQS, ROWS, caching, {SEQS * WINDOW + 2 * CHUNK, 0}, 0};
    world_open_sized(&w, &z);
    for (uint32_t i = 0; i < SEQS; i++) {
        submit(&w, 6000 - 700 * i, 20, i, 0);
        for (int k = 0; k < 2; k++)
            step(&w);
    }
    while (step(&w))
        ;
    is_int(w.finished, SEQS, "with a ring for each, prompts that pass one another end");
    is_int(w.s.n_retired, 0, "and nobody has to go for another's ring");
    world_close(&w);
}

static void with_room_nothing_moves(void)
{
    struct world w;
    const struct size z = {2000, 2000, 8, 256, true, {0}, 0};
    world_open_sized(&w, &z);
    for (uint32_t i = 0; i < 4; i++)
        submit_sparse(&w, 2200, 40, i, "wave", 0.05f);
    while (step(&w))
        ;
    struct kv_counts c;
    kv_counts(w.kv, &c);
    ok(w.finished == 4 && c.spills + c.pauses + c.moved_down + c.moved_up == 0 && c.leaf_bytes == 0,
       "with enough HBM no sequence is spilled and no byte moves");
    world_close(&w);
}

/* 8 x 2,240 rows are 2,240 blocks. */
static void a_tenth_of_the_blocks_serves_all(void)
{
    struct world w;
    const struct size z = {224, 4000, 8, 256, true, {0}, 0};
    uint32_t together = 0;
    world_open_sized(&w, &z);
    for (uint32_t i = 0; i < 8; i++)
        submit_sparse(&w, 2200, 40, i, "wave", 0.02f);
    while (step(&w))
        together = w.s.n_running > together ? w.s.n_running : together;
    struct kv_counts c;
    kv_counts(w.kv, &c);
    ok(w.finished == 8 && c.spills > 0 && w.s.preemptions == 0,
       "HBM for a tenth of the rows serves all of them, computing nothing twice (%llu spills, "
       "%llu pauses)",
       (unsigned long long)c.spills, (unsigned long long)c.pauses);
    printf("# %u ran together\n", together);
    world_close(&w);
}

static void spilled_sequences_come_back(void)
{
    struct world w;
    const struct size z = {800, 4000, 8, 256, true, {0}, 0};
    world_open_sized(&w, &z);
    submit_sparse(&w, 2200, 60, 2, "wave", 0.05f);
    struct sequence *q = submit_sparse(&w, 2200, 1000, 1, "wave", 0.05f);
    for (uint32_t i = 0; i < 2; i++)
        submit_sparse(&w, 2200, 60, 3 + i, "wave", 0.05f);
    bool spilled = false;
    while (w.finished < 3 && step(&w))
        spilled = spilled || q->kv.residence == KV_SPILLED;
    for (uint32_t i = 0; i < 4 * RESIDENCE_CALM; i++)
        step(&w);
    ok(spilled && q->kv.residence == KV_RESIDENT,
       "who was spilled for others is RESIDENT again when they have gone");
    while (step(&w))
        ;
    world_close(&w);
}

static struct sequence *spilled_one(const struct world *w)
{
    for (uint32_t i = 0; i < w->s.n_running; i++)
        if (w->s.running[i]->kv.residence == KV_SPILLED)
            return w->s.running[i];
    return NULL;
}

static uint64_t spills(const struct world *w)
{
    struct kv_counts c;
    kv_counts(w->kv, &c);
    return c.spills;
}

/* All that is free, as if its curve had asked for it. */
static void take_all(struct world *w, struct sequence *q)
{
    if (q->kv.residence == KV_SPILLED)
        CHECK(kv_seq_resize(w->kv, &q->kv, q->kv.n_slots + kv_available(w->kv)) == OK);
}

/* Three of four go on, two of them RESIDENT; what the fourth leaves is not enough for the third to be. */
static void hot_sets_have_what_is_left(void)
{
    struct world w;
    const struct size z = {800, 4000, 8, 256, false, {0}, 0};
    world_open_sized(&w, &z);
    submit_sparse(&w, 2200, 100, 0, "wave", 0.05f);
    for (uint32_t i = 1; i < 4; i++)
        submit_sparse(&w, 2200, 2000, i, "wave", 0.05f);
    while (w.finished == 0 && step(&w))
        ;
    struct sequence *q = spilled_one(&w);
    CHECK(q != NULL);
    uint32_t named = attention_min_slots(q->in, kv_geometry(w.kv), q->n_computed);
    uint32_t before = q->kv.n_slots;
    for (uint32_t i = 0; i <= RESIDENCE_EVERY; i++)
        step(&w);
    ok(q->kv.residence == KV_SPILLED && before < 4 * named &&
           q->kv.n_slots >= RESIDENCE_PRESET * named,
       "a hot set grows at once into room that is free: %u, %u slots for %u pages", before,
       q->kv.n_slots, named);
    uint64_t moved = spills(&w);
    take_all(&w, q);
    uint32_t most = q->kv.n_slots;
    for (uint32_t i = 0; i < 10 * RESIDENCE_EVERY; i++)
        step(&w);
    ok(q->kv.n_slots < most && q->kv.n_slots >= RESIDENCE_PRESET * named && spills(&w) == moved,
       "it gives way to the rows of answers, and none is spilled: %u of %u", q->kv.n_slots, most);
    take_all(&w, q);
    uint32_t finished = w.finished;
    submit(&w, 300, 10, 5, 0);
    while (w.finished == finished && step(&w))
        ;
    ok(spills(&w) == moved && w.s.preemptions == 0, "and to a prompt that comes");
    audit(&w);
    while (step(&w))
        ;
    ok(w.marks_right && w.slots_suffice && w.finished == w.submitted, "and all end");
    world_close(&w);
}

/* On a backend whose chunks cross borders: one that wants more of HBM than there is must neither ask for slots that
 * it is about to give, for ever, nor send anybody away. */
static void a_long_chunk_takes_what_there_is(uint32_t hbm)
{
    struct world w;
    const struct size z = {hbm, 4000, 4, 4096, false, {0}, 0};
    world_open_sized(&w, &z);
    w.s.loose = true;
    submit_sparse(&w, 1500, 400, 0, "wave", 0.2f);
    submit_sparse(&w, 6000, 20, 1, "wave", 0.2f);
    alarm(60);
    uint32_t n = 0;
    while (step(&w) && ++n < 2000)
        ;
    alarm(0);
    ok(w.finished == 2 && w.s.preemptions == 0 && w.marks_right && w.slots_suffice,
       "%u blocks: a prompt of 6,000 rows in chunks of 4,096 ends: %u steps, %llu preemptions", hbm,
       n, (unsigned long long)w.s.preemptions);
    world_close(&w);
}

/* Two are left, both SPILLED, and the younger one has all the room. */
static void room_in_a_hot_set_is_room_to_come_back(void)
{
    struct world w;
    const struct size z = {500, 4000, 8, 256, false, {0}, 0};
    world_open_sized(&w, &z);
    submit_sparse(&w, 2200, 100, 0, "wave", 0.05f);
    struct sequence *q = submit_sparse(&w, 2200, 2000, 1, "wave", 0.05f);
    struct sequence *other = submit_sparse(&w, 2200, 2000, 2, "wave", 0.05f);
    while (w.finished == 0 && step(&w))
        ;
    uint32_t least = residence_min_slots(&w.s, q, q->n_computed);
    CHECK(q->kv.residence == KV_SPILLED && kv_seq_resize(w.kv, &q->kv, least) == OK &&
          kv_seq_spill(w.kv, &other->kv, least) == OK);
    take_all(&w, other);
    for (uint32_t i = 0; i <= RESIDENCE_CALM + RESIDENCE_EVERY; i++)
        step(&w);
    is_int(q->kv.residence, KV_RESIDENT, "one is RESIDENT again in room that a hot set had");
    ok(other->kv.n_slots >= least, "which keeps %u slots, of which it needs %u", other->kv.n_slots,
       least);
    while (step(&w))
        ;
    ok(w.marks_right && w.slots_suffice && w.finished == w.submitted, "and all end");
    world_close(&w);
}

/* Whose blocks the next chunk reads all of. The document would free more than the answer beside it. */
static void a_prompt_that_is_read_is_spilled_last(void)
{
    struct world w;
    const struct size z = {860, 4000, 4, 256, true, {0}, 0};
    bool answer_spilled = false, document_spilled = false;
    world_open_sized(&w, &z);
    struct sequence *answer = submit_sparse(&w, 2200, 3000, 1, "wave", 0.05f);
    while (answer->n_computed < answer->n_prompt && step(&w))
        ;
    struct sequence *document = submit_sparse(&w, 5600, 10, 2, "wave", 0.05f);
    do {
        CHECK(step(&w));
        answer_spilled = answer_spilled || answer->kv.residence == KV_SPILLED;
        document_spilled = document_spilled || document->kv.residence == KV_SPILLED;
    } while (document->n_computed < document->n_prompt);
    ok(answer_spilled && !document_spilled,
       "a prompt that is being read stays in HBM while an answer can be SPILLED");
    world_close(&w);
}

/* Prompts of so many conversations, of which `known` positions were computed before. Returns how many of those
 * were computed again. */
static uint64_t say_again(struct world *w, uint32_t n, uint32_t known, uint32_t n_prompt)
{
    uint64_t before = w->s.cached_tokens, next = w->next_id;
    for (w->next_id = 0; w->next_id < n;)
        submit_sparse(w, n_prompt, 4, (uint32_t)w->next_id, "wave", 0.05f);
    w->next_id = next;
    for (uint32_t end = w->finished + n; w->finished < end && step(w);)
        ;
    return (uint64_t)n * known - (w->s.cached_tokens - before);
}

/* Both tiers together: all conversations and the answers between, with a third or a twentieth to spare. */
static void who_comes_back_finds_all_that_is_there(uint32_t dram)
{
    enum { CONVERSATIONS = 6, ROWS = 2200 };
    const struct size z = {900, dram, 12, 256, true, {0}, 0};
    struct world w;
    world_open_sized(&w, &z);
    say_again(&w, CONVERSATIONS, 0, ROWS);
    is_int(say_again(&w, CONVERSATIONS, ROWS, ROWS + 8), 0,
           "what is in DRAM is not computed again");
    for (uint32_t i = 0; i < 3; i++)
        submit_sparse(&w, ROWS, 1000, 10 + i, "wave", 0.05f);
    while (w.s.n_running < 3 || !sequence_decodes(w.s.running[2]))
        step(&w);
    is_int(say_again(&w, CONVERSATIONS, ROWS + 8, ROWS + 16), 0,
           "nor when answers have taken all of HBM");
    audit(&w);
    while (step(&w))
        ;
    ok(w.marks_right && w.finished == w.submitted, "and all end");
    world_close(&w);
}

/* Two conversations are in DRAM, the older one comes back when answers have all of HBM: who is spilled for it takes
 * DRAM from the younger one. */
static void room_for_a_hit_is_not_made_of_it(void)
{
    enum { ROWS = 2200, ANSWERS = 3, WRITTEN = 160 };
    const struct size z = {900, 800, 12, 256, true, {0}, 0};
    struct world w;
    world_open_sized(&w, &z);
    say_again(&w, 2, 0, ROWS);
    for (uint32_t i = 0; i < ANSWERS; i++)
        submit_sparse(&w, ROWS, 1000, 10 + i, "wave", 0.05f);
    while (w.s.n_running < ANSWERS || !sequence_decodes(w.s.running[ANSWERS - 1]))
        step(&w);
    for (uint32_t i = 0; i < WRITTEN; i++)
        step(&w);
    is_int(say_again(&w, 1, ROWS, ROWS + 8), 0, "room for a hit is not made by dropping its end");
    while (step(&w))
        ;
    ok(w.marks_right && w.finished == w.submitted, "and all end");
    world_close(&w);
}

static void conversations_do_not_push_each_other_out(void)
{
    enum { CONVERSATIONS = 6, ROWS = 2200 };
    const struct size z = {900, 4000, 12, 256, true, {0}, 0};
    struct world w;
    struct kv_counts before, after;
    world_open_sized(&w, &z);
    say_again(&w, CONVERSATIONS, 0, ROWS);
    kv_counts(w.kv, &before);
    say_again(&w, CONVERSATIONS, ROWS, ROWS + 8);
    kv_counts(w.kv, &after);
    uint64_t moved = after.moved_up + after.moved_down - before.moved_up - before.moved_down;
    ok(moved < CONVERSATIONS * ROWS / R * 2 / 3,
       "who comes back moves less than two thirds of what is there (%llu of %u blocks)",
       (unsigned long long)moved, CONVERSATIONS * ROWS / R);
    world_close(&w);
}

/* Slots and tail just fit; the prompt begins like one that is cached, so sealing would copy. */
static void alone_in_a_tight_arena_nobody_hangs(void)
{
    struct world w;
    const struct size z = {160, 4000, 4, 256, true, {0}, 0};
    world_open_sized(&w, &z);
    submit(&w, 40, 4, 1, 0);
    while (step(&w))
        ;
    submit_sparse(&w, 3000, 1500, 1, "wave", 0.02f);
    while (step(&w))
        audit(&w);
    ok(w.finished == 2 && w.marks_right && w.s.preemptions == 0,
       "a sequence that cannot have the copy of a shared segment seals it in place");
    world_close(&w);
}

static void too_small_a_budget_is_refused_with_numbers(void)
{
    struct world w;
    const struct size z = {150, 4000, 8, 256, true, {0}, 0};
    world_open_sized(&w, &z);
    submit_sparse(&w, 8000, 10, 1, "wave", 0.2f);
    submit_sparse(&w, 2200, 10, 1, "wave", 0.02f);
    (void)err(OK, "nothing");
    while (step(&w))
        ;
    ok(w.refused == 1 && w.too_large == 1 && w.finished == 1,
       "a sequence whose minimum hot set and tail are larger than HBM is refused; a smaller one "
       "runs");
    world_close(&w);
}

/* A prompt longer than HBM must spill, and its hot set cannot get one leaf. */
static void without_memory_for_tables_one_is_refused(void)
{
    struct world w;
    const struct size z = {
        .hbm = 160, .dram = 4000, .max_seqs = 4, .max_rows = 256, .caching = true, .leaf_bytes = 1};
    world_open_sized(&w, &z);
    submit_sparse(&w, 3000, 100, 1, "wave", 0.02f);
    struct sequence *q = submit(&w, 40, 4, 2, 0);
    uint64_t id = q->id;
    while (step(&w))
        audit(&w);
    ok(w.refused == 1 && w.too_large == 0 && w.finished == 1 && sched_find(&w.s, id) == NULL,
       "a sequence whose tables find no memory is refused, not as too large; another one runs");
    world_close(&w);
}

/* Everybody may be pinned when HBM runs short: what was admitted is not what is needed. */
static void pinned_sequences_pause(void)
{
    struct world w;
    const struct size z = {95, 95, 4, 64, false, {0}, 0};
    world_open_sized(&w, &z);
    struct sequence *a = submit(&w, 100, 400, 1, 0), *b = submit(&w, 100, 400, 2, 0);
    step(&w);
    CHECK(a->state == SEQUENCE_RUNNING && b->state == SEQUENCE_RUNNING);
    a->n_preempted = b->n_preempted = SCHED_MAX_PREEMPTIONS;
    while (step(&w))
        audit(&w);
    struct kv_counts c;
    kv_counts(w.kv, &c);
    ok(w.finished == 2 && c.pauses > 0 && w.s.preemptions == 0 && w.marks_right,
       "where all that run are pinned, one is paused and computes nothing again");
    world_close(&w);
}

/* What is PAUSED has its rows in DRAM: to come back SPILLED it needs no more of it. */
static void a_full_dram_lets_back_what_is_in_it(void)
{
    struct world w;
    const struct size z = {400, 275, 4, 256, false, {0}, 0};
    world_open_sized(&w, &z);
    const struct sequence *dense = submit(&w, 1200, 200, 1, 0);
    struct sequence *q = submit_sparse(&w, 2200, 40, 2, "quest", 0.05f);
    while (sequence_n_output(q) == 0 && step(&w))
        ;
    CHECK(q->state == SEQUENCE_RUNNING || q->state == SEQUENCE_PAUSED);
    if (q->state == SEQUENCE_RUNNING) {
        CHECK(kv_seq_pause(w.kv, &q->kv) == OK);
        sched_retire(&w.s, q, SEQUENCE_PAUSED);
    }
    printf("# paused with %u blocks, DRAM has %u left\n", q->kv.n_blocks, kv_dram_available(w.kv));
    step(&w);
    ok(dense->state == SEQUENCE_RUNNING && q->state == SEQUENCE_RUNNING &&
           q->kv.residence == KV_SPILLED,
       "a paused sequence comes back SPILLED although DRAM is full");
    while (step(&w))
        audit(&w);
    ok(w.finished == 2 && w.marks_right, "and ends");
    world_close(&w);
}

/* On a GPU nothing of DRAM is pinned yet when the scheduler is made. */
static void growing_open(struct world *w, const struct size *z)
{
    growing_ops = fake_ops;
    growing_ops.alloc_host = growing_alloc;
    growing_ops.free_host = fake_free;
    growing_ops.host_progress = growing_progress;
    be = &growing;
    world_open_sized(w, z);
}

static void dram_that_comes_later_takes_who_waits(void)
{
    struct world w;
    const struct size z = {800, 800, 4, 4096, false, {0}, 0};
    growing_open(&w, &z);
    struct sequence *a = submit_sparse(&w, 4000, 400, 1, "quest", 0.05f);
    const struct sequence *b = submit_sparse(&w, 4000, 400, 2, "quest", 0.05f);
    for (int i = 0; i < 20; i++)
        step(&w);
    ok(a->state == SEQUENCE_RUNNING && b->state == SEQUENCE_WAITING,
       "while there is no DRAM yet, the second of two waits");
    dram_progress.ready = dram_progress.bytes;
    kv_poll(w.kv);
    for (int i = 0; i < 20; i++, audit(&w))
        step(&w);
    ok(a->kv.residence == KV_SPILLED || b->kv.residence == KV_SPILLED,
       "when it has come, one of them is spilled,");
    ok(sequence_n_output(a) > 0 && sequence_n_output(b) > 0, "and both are answered");
    while (step(&w))
        ;
    is_int(w.finished, 2, "to the end");
    world_close(&w);
    be = &fake;
}

/* It would be refused when its rows find no room, though seconds later there is. */
static void who_needs_dram_that_comes_waits_alone(void)
{
    struct world w;
    const struct size z = {400, 800, 4, 256, false, {0}, 0};
    growing_open(&w, &z);
    const struct sequence *q = submit_sparse(&w, 4000, 100, 1, "quest", 0.05f);
    for (int i = 0; i < 40; i++)
        step(&w);
    ok(q->state == SEQUENCE_WAITING && w.refused == 0, "alone it waits for DRAM that it needs");
    for (uint32_t part = 1; part <= 800; part++) { /* a block each */
        dram_progress.ready = dram_progress.bytes / 800 * part;
        dram_progress.ended = part == 800;
        kv_poll(w.kv);
        for (int i = 0; i < 40; i++)
            step(&w);
    }
    ok(w.finished == 1 && w.refused == 0 && w.s.preemptions == 0,
       "and runs as soon as enough has come, once");
    world_close(&w);
    growing_open(&w, &z);
    submit_sparse(&w, 4000, 100, 1, "quest", 0.05f);
    dram_progress.ended = true; /* no more could be pinned */
    kv_poll(w.kv);
    while (step(&w))
        ;
    ok(w.finished == 0 && w.refused == 1, "where it has ended too early, it is refused");
    world_close(&w);
    be = &fake;
}

/* PRESET times what a plan names, and all that is sealed, are more than slots can be counted in. */
static void hot_sets_end_where_slots_do(void)
{
    struct world w;
    const struct size z = {44000, 60000, 4, 8192, true, {0}, 0};
    uint32_t most = 0;
    world_open_sized(&w, &z);
    struct sequence *q = submit_sparse(&w, 360000, 3 * RESIDENCE_EVERY, 1, "quest", 0.15f);
    while (step(&w))
        if (w.finished == 0 && q->kv.n_slots > most)
            most = q->kv.n_slots;
    is_int(w.finished, 1, "a sequence whose preset is above the largest hot set runs");
    is_int(most, HOT_MAX_SLOTS, "with the largest");
    submit_sparse(&w, 400000, 10, 1, "quest", 0.7f);
    while (step(&w))
        ;
    is_int(w.refused, 1, "one that needs more than that and does not fit HBM is refused");
    world_close(&w);
}

int main(int argc, char **argv)
{
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    with_room_nothing_moves();
    the_last_chunk_is_sealed_behind_the_first_token();
    answers_seal_together_only_if_they_began_together();
    rings_are_enough_for_all_that_run(false);
    rings_are_enough_for_all_that_run(true);
    a_tenth_of_the_blocks_serves_all();
    spilled_sequences_come_back();
    hot_sets_have_what_is_left();
    room_in_a_hot_set_is_room_to_come_back();
    for (uint32_t hbm = 300; hbm <= 700; hbm += 20)
        a_long_chunk_takes_what_there_is(hbm);
    who_comes_back_finds_all_that_is_there(4000);
    who_comes_back_finds_all_that_is_there(2100);
    room_for_a_hit_is_not_made_of_it();
    conversations_do_not_push_each_other_out();
    a_prompt_that_is_read_is_spilled_last();
    alone_in_a_tight_arena_nobody_hangs();
    too_small_a_budget_is_refused_with_numbers();
    without_memory_for_tables_one_is_refused();
    pinned_sequences_pause();
    a_full_dram_lets_back_what_is_in_it();
    dram_that_comes_later_takes_who_waits();
    who_needs_dram_that_comes_waits_alone();
    hot_sets_end_where_slots_do();
    const struct size worlds[] = {
        {500, 3000, 8, 128, true, {0}, 0},
        {300, 900, 12, 200, false, {0}, 0},
        {700, 700, 16, 64, true, {0}, 0},
        /* As memory_plan.c reckons: (16 + 64 + 64) / 8 + 2 blocks each, and two steps. */
        {500, 3000, 4, 128, true, {4 * 20 + 2 * 17, 60}, 0},
        {300, 900, 8, 64, false, {8 * 20 + 2 * 9, 0}, 0},
        /* Far fewer rings than sequences: one fits. */
        {500, 3000, 8, 128, true, {40, 20}, 0},
        {300, 900, 8, 128, false, {40, 200}, 0},
    };
    static const char *const names[] = {"roomy DRAM",
                                        "little DRAM",
                                        "equal tiers",
                                        "rings",
                                        "rings, no DRAM",
                                        "one ring",
                                        "one ring, and DRAM for others"};
    enum { WORLDS = ARRAY_LEN(worlds) };
    for (uint64_t i = 0; i < 2 * WORLDS; i++)
        spilled_traffic_always_ends(seed + 100 + i, &worlds[i % WORLDS], names[i % WORLDS]);
    return tap_done();
}
