/* The scheduler against random traffic from a seed: whatever comes, every sequence ends, no step is
 * larger than allowed, answers go first, prompts are not starved, and blocks all come home. Also with
 * sequences that attend by plan, spill, shrink, pause and come back.
 *
 * The model is replaced by "every planned row was computed": its block gets a mark made of sequence and
 * position, and marks are looked up wherever the tables say that the rows are. Tokens are a hash of
 * what came before, so a preempted sequence that did not keep its tokens would be seen. */
#include "engine/sched.h"
#include "engine/residence.h"
#include "kernels/core/hot_run.h"
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

static size_t fake_digest_bytes(const struct kv_geometry *geo, const struct digest_desc *d)
{
    (void)geo, (void)d;
    return 64;
}

/* Rows stay in order, so the inverse is a copy. */
static void *block_at(const struct kv_memory *kv, block_id b)
{
    char *base = (b & BLOCK_IN_DRAM) != 0 ? kv->dram[LANE_SPARSE] : kv->hbm[LANE_SPARSE];
    return base + (size_t)(b & ~BLOCK_IN_DRAM) * kv->geo->block_bytes[LANE_SPARSE];
}

static void fake_seal(struct backend *be, const struct seal_args *a)
{
    (void)be;
    for (uint32_t i = 0; i < SEGMENT_ROWS / a->kv->geo->block_rows; i++)
        if (a->from[i] != a->to[i])
            memcpy(block_at(a->kv, a->to[i]), block_at(a->kv, a->from[i]),
                   a->kv->geo->block_bytes[LANE_SPARSE]);
}

static void fake_unpermute(struct backend *be, const struct unpermute_args *a)
{
    (void)be;
    for (uint32_t i = 0; i * a->kv->geo->block_rows < a->n_rows; i++)
        memcpy(block_at(a->kv, a->to[i]), block_at(a->kv, a->from[i]),
               a->kv->geo->block_bytes[LANE_SPARSE]);
}

static size_t fake_known_bytes(const struct kv_geometry *g, uint32_t heads)
{
    (void)g, (void)heads;
    return 0;
}

static void fake_hot(struct backend *be, const struct hot_args *a)
{
    (void)be;
    hot_run(a);
}

static const struct backend_ops fake_ops = {.name = "fake",
                                            .hot = fake_hot,
                                            .alloc = fake_alloc,
                                            .free = fake_free,
                                            .copy = fake_copy,
                                            .digest_bytes = fake_digest_bytes,
                                            .known_bytes = fake_known_bytes,
                                            .seal = fake_seal,
                                            .unpermute = fake_unpermute};
static struct backend fake = {.ops = &fake_ops};

/* Its DRAM comes behind the start. */
static struct backend_ops growing_ops;
static struct backend growing = {.ops = &growing_ops};
static struct host_progress dram_progress;

static struct backend *be = &fake; /* of the worlds that are opened */

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

/* ---- the world ---- */

enum { R = 8 };

struct world {
    struct lane_place lanes[2];
    struct kv *kv;
    struct attention *at;
    struct sched s;
    uint64_t next_id, steps, order;
    uint32_t submitted, finished, refused, too_large, preempted_max;
    uint32_t blocks, dram;
    bool rows_bounded, answers_advance, slots_suffice, borders_kept, marks_right, passed_too_often;
};

struct size {
    uint32_t hbm, dram; /* blocks */
    uint32_t max_seqs, max_rows;
    bool caching;
    uint32_t ring[2];    /* blocks of STREAM lanes, by tier; 0: there are none */
    uint64_t leaf_bytes; /* bound of the leaf pool; 0: none */
};

static void world_open_sized(struct world *w, const struct size *z)
{
    *w = (struct world){.blocks = z->hbm,
                        .dram = z->dram,
                        .rows_bounded = true,
                        .answers_advance = true,
                        .slots_suffice = true,
                        .borders_kept = true,
                        .marks_right = true};
    static const uint8_t classes[] = {LANE_SPARSE, LANE_STREAM};
    uint32_t heads = z->ring[KV_HBM] > 0 ? 2 : 1;
    struct kv_geometry geo = kv_geometry_make(R, 1, heads, 2);
    kv_geometry_classify(&geo, classes, w->lanes, 16, 64);
    const struct kv_config kc = {.geo = geo,
                                 .blocks = {[LANE_SPARSE] = {z->hbm, z->dram},
                                            [LANE_STREAM] = {z->ring[KV_HBM], z->ring[KV_DRAM]}},
                                 .n_records = (z->hbm + z->dram) * R / SEGMENT_ROWS + 1,
                                 .record_lane_bytes = 64,
                                 .leaf_bytes = z->leaf_bytes,
                                 .prefix_caching = z->caching,
                                 .secret = {1, 2}};
    CHECK(kv_create(&w->kv, be, &kc) == OK);
    CHECK(attention_create(&w->at, be, kv_memory(w->kv), heads, 1, z->max_rows, 1 << 16) == OK);
    sched_init(&w->s, w->kv, w->at, z->max_seqs, z->max_rows, z->caching);
}

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

static void world_close(struct world *w)
{
    sched_fini(&w->s);
    attention_destroy(w->at);
    kv_destroy(w->kv);
}

struct submission {
    struct msg_submit m;
    uint32_t tokens[1 << 19];
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

/* The same, attending by plan. */
static struct sequence *submit_sparse(struct world *w, uint32_t n_prompt, uint32_t max_tokens,
                                      uint32_t family, const char *plugin, float budget)
{
    uint32_t i;
    CHECK(sparse_find(plugin, &i) == OK);
    const struct sparse_choice c = sparse_choice_make(i, budget);
    struct sequence *q = submit(w, n_prompt, max_tokens, family, 0);
    q->sparse = c;
    q->in = attention_instance(w->at, &c);
    CHECK(q->in != NULL);
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

/* Whole in HBM; or in DRAM, with slots and tail in HBM. */
static bool can_never_fit(const struct world *w, const struct sequence *q)
{
    uint32_t rows = q->n_prompt + q->max_tokens, blocks = (rows + R - 1) / R;
    uint32_t tail = (SEGMENT_ROWS + TAIL_ROWS) / R;
    bool dram = q->in != NULL && blocks <= w->dram &&
                attention_min_slots(q->in, kv_geometry(w->kv), rows) + tail <= w->blocks;
    return blocks > w->blocks && !dram;
}

static void on_refused(void *arg, struct sequence *q, status why)
{
    struct world *w = arg;
    w->refused++;
    w->too_large += why == ERR_FULL && can_never_fit(w, q);
    sched_remove(&w->s, q);
    sequence_destroy(q, w->at);
}

/* ---- marks: what a row's K and V would be ---- */

static uint64_t mark_of(const struct sequence *q, uint32_t pos)
{
    uint64_t h = 1469598103934665603u; /* rows of equal prefixes are equal: they are shared */
    for (uint32_t i = 0; i <= pos; i += pos - i < 8 ? 1 : (pos - i) / 2)
        h = (h ^ q->tokens[i]) * 1099511628211u;
    return h ^ pos;
}

static uint64_t *mark_at(const struct world *w, const struct sequence *q, uint32_t pos)
{
    const struct kv_memory *kv = kv_memory(w->kv);
    char *block = block_at(kv, q->kv.table[LANE_SPARSE][pos / R]);
    return (uint64_t *)(void *)(block + (size_t)(pos % R) * 8);
}

static void check_marks(struct world *w, const struct sequence *q)
{
    for (int i = 0; i < 16 && q->n_computed > 0; i++) {
        uint32_t pos = rnd(q->n_computed);
        if (*mark_at(w, q, pos) != mark_of(q, pos))
            w->marks_right = false;
    }
}

static void check_sparse(struct world *w, const struct sequence *q)
{
    uint32_t end = q->n_computed + q->n_scheduled;
    if (q->in == NULL)
        return;
    if (q->kv.n_segments != kv_segments_due(q->n_computed) ||
        kv_segments_due(end - 1) != q->kv.n_segments ||
        (q->n_computed < q->n_prompt && end > q->n_prompt))
        w->borders_kept = false;
    if (q->kv.residence == KV_SPILLED && sched_attends_by_plan(q) &&
        (q->n_scheduled != 1 ||
         q->kv.n_slots < attention_min_slots(q->in, kv_geometry(w->kv), end)))
        w->slots_suffice = false;
}

static void check_plan(struct world *w)
{
    const struct sched *s = &w->s;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < s->n_plan; i++) {
        const struct sequence *q = s->plan[i];
        rows += q->n_scheduled;
        if (q->n_scheduled == 0 || q->n_scheduled > sequence_left(q) ||
            q->kv.n_blocks * R < q->n_computed + q->n_scheduled)
            w->rows_bounded = false;
        check_sparse(w, q);
        check_marks(w, q);
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
        /* Those that are due wait for each other, which passes nobody; a step is not cut in the middle. */
        if (q->passed_rows > q->n_prompt + (SCHED_MAX_BYPASS + 16) * (uint64_t)s->max_rows)
            w->passed_too_often = true;
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
        for (uint32_t pos = q->n_computed; pos < q->n_computed + q->n_scheduled; pos++)
            *mark_at(w, q, pos) = mark_of(q, pos);
        q->n_computed += q->n_scheduled;
        q->n_scheduled = 0;
        if (q->n_computed < q->n_tokens)
            continue;
        q->is_proven = true;
        if (!q->is_private)
            kv_seq_share(w->kv, &q->kv, q->tokens, q->in == NULL ? q->n_computed : q->n_prompt);
        q->tokens[q->n_tokens] = next_token(q);
        q->n_tokens++;
        if (sequence_n_output(q) == q->max_tokens) {
            w->finished++;
            sched_remove(s, q);
            sequence_destroy(q, w->at);
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
    sequence_destroy(q, w->at);
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
    printf("# seed %llu: %u sequences, %llu steps, %llu preemptions\n", (unsigned long long)seed,
           w.submitted, (unsigned long long)w.steps, (unsigned long long)w.s.preemptions);
    ok(w.finished + w.refused == w.submitted && w.s.n_sequences == 0, "every sequence ended");
    ok(w.refused == w.too_large, "only what can never fit was refused (%u)", w.refused);
    ok(w.rows_bounded, "no step was larger than allowed and every row had a block");
    ok(w.answers_advance, "every running answer got its row in every step");
    ok(w.preempted_max <= SCHED_MAX_PREEMPTIONS, "no sequence was preempted more than twice");
    ok(!w.passed_too_often, "no prompt was passed without bound");
    ok(all_blocks_home(&w), "every block came home");
    world_close(&w);
}

/* ---- sequences that attend by plan ---- */

static void audit(const struct world *w)
{
    struct kv_seq *open[64];
    uint32_t n = 0;
    for (uint32_t i = 0; i < w->s.n_running; i++)
        open[n++] = &w->s.running[i]->kv;
    for (struct sequence *q = w->s.first; q != NULL && n < 64; q = q->next)
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
    ok(w.finished + w.refused == w.submitted && w.s.n_sequences == 0, "%s: every sequence ended",
       what);
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
    const struct size z = {900, 4000, 8, 256, true, {0}, 0};
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
static void dram_that_comes_later_takes_who_waits(void)
{
    struct world w;
    growing_ops = fake_ops;
    growing_ops.alloc_host = growing_alloc;
    growing_ops.free_host = fake_free;
    growing_ops.host_progress = growing_progress;
    const struct size z = {800, 800, 4, 4096, false, {0}, 0};
    be = &growing;
    world_open_sized(&w, &z);
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
        random_traffic_always_ends(seed + i, i % 3 != 0);
    a_short_prompt_overtakes_a_long_one();
    the_long_prompt_is_not_starved();
    many_short_prompts_pass_documents();
    scoring_prompts_do_not_hold_up_the_others();
    siblings_find_their_leaders_blocks();
    what_can_never_fit_is_refused();
    with_room_nothing_moves();
    rings_are_enough_for_all_that_run(false);
    rings_are_enough_for_all_that_run(true);
    a_tenth_of_the_blocks_serves_all();
    spilled_sequences_come_back();
    a_prompt_that_is_read_is_spilled_last();
    alone_in_a_tight_arena_nobody_hangs();
    too_small_a_budget_is_refused_with_numbers();
    without_memory_for_tables_one_is_refused();
    pinned_sequences_pause();
    a_full_dram_lets_back_what_is_in_it();
    dram_that_comes_later_takes_who_waits();
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
