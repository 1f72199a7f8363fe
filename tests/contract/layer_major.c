/* Prompts longer than HBM, read layer by layer (engine/layer_major.h), against the same prompts where HBM holds all:
 * the same answers, bit for bit, alone and beside others, from pages of bf16 and of fp8, with hits and without. A cancel
 * after any unit leaves nothing behind. */
#include "engine/layer_major.h"
#include "engine/engine_internal.h"
#include "kernels/log.h"
#include "tests/contract/engine_world.h"

#include <math.h>

enum { LONG = 6 * 1024 + 70, OUTPUT = 30, LENGTH = LONG + 64, R = 8 };

static uint32_t layers; /* of the model */

static void make_deep_model(uint32_t n_layers)
{
    struct gguf_writer w = {0};
    tiny_model(&w, &(struct tiny_spec){.type = DTYPE_Q8_0,
                                       .embed_type = DTYPE_Q8_0,
                                       .layers = n_layers,
                                       .hidden = 32,
                                       .ff = 32,
                                       .heads = 1,
                                       .kv_heads = 1,
                                       .positions = 8192,
                                       .seed = 3});
    struct bytes f = gw_finish(&w);
    bytes_save(&f, model_path);
    bytes_free(&f);
    layers = n_layers;
}

/* hbm: blocks of R positions: of one KV head of 32 numbers in every layer. */
static struct engine_config sized(const struct ask *a, uint32_t hbm)
{
    struct engine_config cfg = config();
    uint64_t block = (uint64_t)layers * R * 32 * 2 * kv_number_bytes(kept);
    cfg.max_batched_tokens = 1088;
    cfg.max_model_len = LENGTH;
    cfg.kv_hbm_bytes = hbm * block;
    cfg.kv_dram_bytes = 3000 * block;
    cfg.sparse = choice_of(a);
    return cfg;
}

/* ---- whole answers ---- */

static const struct ask asks[] = {
    {.n_prompt = LONG, .max_tokens = OUTPUT, .text = 1, .plugin = "wave", .budget = 0.05f},
    {.n_prompt = LONG, .max_tokens = OUTPUT, .text = 2, .plugin = "quest", .budget = 64},
    {.n_prompt = 40, .max_tokens = 150, .text = 3, .plugin = "dense", .budget = 1},
};
enum { N_LONG = 2, N = ARRAY_LEN(asks), PLENTY = 4000, QUARTER = LONG / R / 4 };

static void answers_are_the_same(const char *what)
{
    struct run *plenty = mem_alloc(sizeof *plenty), *r = mem_alloc(sizeof *r);
    struct engine_config cfg = sized(&asks[0], PLENTY);
    run(&cfg, asks, N, false, plenty);
    printf("# pages of %s\n", what);
    is_int(plenty->last.residence.by_layers, 0, "what HBM holds is read chunk by chunk");
    cfg = sized(&asks[0], QUARTER);
    cfg.prefix_caching = true;
    run(&cfg, asks, N_LONG, false, r);
    is_int(r->last.residence.by_layers, N_LONG, "prompts of four times HBM are read by layers");
    is_int(n_same(r, plenty, N_LONG), N_LONG, "and not a bit of the answers is another");
    is_int(r->last.residence.segments_sealed, 12, "segments are sealed as layers end");
    is_int(r->last.residence.layers_permille, 0, "nothing is being read in the end");
    cfg = sized(&asks[0], QUARTER + 40);
    cfg.max_batched_tokens = 512;
    run(&cfg, asks, N, true, r);
    is_int(n_same(r, plenty, N), N, "nor where all run together, in other chunks");
    is_int(r->last.residence.by_layers, N_LONG, "the long ones one after the other");
    mem_free(plenty);
    mem_free(r);
}

/* What was read by layers is found by whoever asks again, chunk by chunk then. */
static void prefixes_are_kept(void)
{
    const struct ask again[] = {asks[0], asks[0]};
    struct run *r = mem_alloc(sizeof *r);
    struct engine_config cfg = sized(&asks[0], QUARTER);
    cfg.prefix_caching = true;
    run(&cfg, again, 2, false, r);
    is_int(r->last.residence.by_layers, 1, "the second of two equal prompts is not read again");
    is_int(r->answers[1].done.n_cached, LONG / R * R - (LONG % R == 0 ? R : 0),
           "it finds all blocks of the first");
    ok(same_answer(&r->answers[0], &r->answers[1]), "and its answer is the same");
    mem_free(r);
}

/* A layer that is exempt has its KV in HBM from the beginning. */
static void exempt_layers_stay(void)
{
    struct run *plenty = mem_alloc(sizeof *plenty), *r = mem_alloc(sizeof *r);
    struct engine_config cfg = sized(&asks[0], PLENTY);
    cfg.heads = (struct head_policy_config){.name = "none", .exempt_layers = 1};
    run(&cfg, asks, 1, false, plenty);
    cfg.kv_hbm_bytes = sized(&asks[0], QUARTER * 3 / 2).kv_hbm_bytes;
    run(&cfg, asks, 1, false, r);
    is_int(r->last.residence.by_layers, 1, "with an exempt layer: read by layers");
    is_int(n_same(r, plenty, 1), 1, "and the same");
    mem_free(plenty);
    mem_free(r);
}

/* ---- step by step ---- */

struct rig {
    struct engine *e;
    struct sequence *deep, *beside; /* NULL: ended, or there is none */
    uint64_t next_id;
};

static uint32_t rig_chunk = 1088;

static void rig_open(struct rig *g, uint32_t hbm, bool loose)
{
    struct engine_config cfg = sized(&asks[0], hbm);
    cfg.prefix_caching = true;
    cfg.max_batched_tokens = rig_chunk;
    *g = (struct rig){0};
    if (engine_create(&g->e, &cfg, NULL, NULL) != OK) {
        printf("Bail out! %s\n", err_text());
        exit(1);
    }
    g->e->sched.loose = loose;
    report_abandon(&g->e->report);
}

static struct sequence *rig_submit(struct rig *g, const struct ask *a)
{
    size_t bytes = sizeof(struct msg_submit) + (a->n_prompt + 1) / 2 * 8;
    struct msg_submit *m = mem_alloc(bytes);
    *m = (struct msg_submit){.head = {.kind = MSG_SUBMIT, .bytes = (uint32_t)bytes},
                             .id = ++g->next_id,
                             .params = {.top_p = 1, .repetition_penalty = 1, .seed = 1},
                             .n_prompt = a->n_prompt,
                             .max_tokens = a->max_tokens,
                             .logprobs = -1,
                             .prompt_logprobs = -1,
                             .sparse = choice_of(a)};
    for (uint32_t i = 0; i < a->n_prompt; i++)
        ((uint32_t *)(m + 1))[i] = word(a->text, i);
    struct sequence *q = sequence_create(m, g->next_id, 1);
    mem_free(m);
    if (strcmp(a->plugin, "dense") != 0) {
        q->in = attention_instance(g->e->at, &q->sparse);
        q->keeps = attention_seq_create(g->e->at, q->in, q->id, a->n_prompt + a->max_tokens);
    }
    sched_submit(&g->e->sched, q);
    return q;
}

static void rig_cancel(struct rig *g, struct sequence *q)
{
    step_forget(&g->e->step, q);
    sched_remove(&g->e->sched, q);
    sequence_destroy(q, g->e->at);
}

static void admitted(void *arg, struct sequence *q)
{
    (void)arg, (void)q;
}

static void refused(void *arg, struct sequence *q, status why)
{
    (void)arg, (void)q;
    printf("Bail out! refused (%d): %s\n", why, err_text());
    exit(1);
}

static void audit(struct rig *g)
{
    const struct sched *s = &g->e->sched;
    struct kv_seq *open[4];
    uint32_t n = 0;
    CHECK(s->queue.n_sequences <= ARRAY_LEN(open));
    for (uint32_t i = 0; i < s->n_running; i++)
        open[n++] = &s->running[i]->kv;
    for (struct sequence *q = s->queue.lines[0].first; q != NULL; q = q->next)
        if (q->state == SEQUENCE_PAUSED)
            open[n++] = &q->kv;
    kv_audit(g->e->kv, open, n);
}

static void rig_step(struct rig *g)
{
    CHECK(sched_plan(&g->e->sched, 1, admitted, refused, NULL));
    step_launch(&g->e->step);
    CHECK(step_settle(&g->e->step) == OK);
    audit(g);
}

static uint32_t blocks_home(struct rig *g)
{
    struct kv_counts c;
    kv_counts(g->e->kv, &c);
    return c.free[KV_HBM] + c.cached[KV_HBM] == c.total[KV_HBM] &&
           c.free[KV_DRAM] + c.cached[KV_DRAM] == c.total[KV_DRAM];
}

/* Beside an answer a step has one unit. */
static void cancels_leave_nothing(void)
{
    struct ask a = {
        .n_prompt = 2400, .max_tokens = 20, .text = 1, .plugin = "wave", .budget = 0.05f};
    struct ask other = {
        .n_prompt = 8, .max_tokens = 2000, .text = 3, .plugin = "dense", .budget = 1};
    struct rig g;
    uint32_t n_units = 0, n_good = 0, n_answered = 0;
    rig_open(&g, 290, false);
    struct sequence *beside = rig_submit(&g, &other);
    for (bool ends = false; !ends; n_units++) {
        struct sequence *q = rig_submit(&g, &a);
        uint32_t before = sequence_n_output(beside);
        for (uint32_t i = 0; i <= n_units; i++)
            rig_step(&g);
        n_answered += sequence_n_output(beside) >= before + n_units;
        ends = q->layers == NULL;
        CHECK(q->kv.residence == KV_SPILLED && (ends || g.e->sched.deep == q));
        rig_cancel(&g, q);
        audit(&g);
        n_good += g.e->sched.deep == NULL;
        kv_drop_prefixes(g.e->kv);
    }
    ok(n_units == 9 && n_good == n_units, "a cancel after each of %u units leaves nothing",
       n_units);
    is_int(n_answered, n_units, "an answer beside it went on with every unit");
    rig_cancel(&g, beside);
    ok(blocks_home(&g), "every block is home");
    struct kv_counts c;
    kv_counts(g.e->kv, &c);
    is_int(c.moved_down, 2 * 1024 / R, "blocks that were copied are those of the one that ended");
    is_int(c.spills, 0, "and nobody was spilled");
    engine_destroy(g.e);
}

/* A prompt, an answer beside it, and HBM from .. to. */
struct tight {
    struct ask a, beside;
    uint32_t chunk, from, to, step;
};

/* While it is read, by one chunk a step, the answer grows by 14 blocks. */
static const struct tight while_it_is_read = {
    .a = {.n_prompt = 2400, .max_tokens = 300, .text = 1, .plugin = "wave", .budget = 0.05f},
    .beside = {.n_prompt = 8, .max_tokens = 200, .text = 3, .plugin = "dense", .budget = 1},
    .chunk = 64,
    .from = 250,
    .to = 300,
    .step = 6};
/* In a deep model its hot set is larger than all that its reading takes, if much is selected. */
static const struct tight behind_it = {
    .a = {.n_prompt = 3400, .max_tokens = 300, .text = 1, .plugin = "wave", .budget = 0.5f},
    .beside = {.n_prompt = 600, .max_tokens = 200, .text = 3, .plugin = "dense", .budget = 1},
    .chunk = 1088,
    .from = 376,
    .to = 424,
    .step = 16};

/* Whoever runs keeps what it was promised at its admission: a prompt that needs all of HBM waits for that. */
static void nobody_is_pushed_out(const struct tight *t)
{
    uint32_t n = 0, n_by_layers = 0, n_pushed = 0;
    rig_chunk = t->chunk;
    for (uint32_t hbm = t->from; hbm < t->to; hbm += t->step, n++) {
        struct rig g;
        rig_open(&g, hbm, false);
        struct sequence *beside = rig_submit(&g, &t->beside);
        while (sequence_n_output(beside) == 0)
            rig_step(&g);
        struct sequence *q = rig_submit(&g, &t->a);
        while (sequence_n_output(beside) < 190 && g.e->sched.n_retired == 0)
            rig_step(&g);
        rig_cancel(&g, beside);
        while (sequence_n_output(q) == 0)
            rig_step(&g);
        n_by_layers += g.e->sched.n_deep > 0;
        n_pushed += g.e->sched.n_retired > 0;
        rig_cancel(&g, q);
        CHECK(blocks_home(&g));
        engine_destroy(g.e);
    }
    rig_chunk = 1088;
    is_int(n_by_layers, n, "prompts of more than HBM are read by layers, with more and with less");
    is_int(n_pushed, 0, "nobody has to go, while they are read or behind them");
}

/* Is `a` read by layers, alone, with so much HBM? *lacks: what it is told to be short of. */
static bool by_layers_in(const struct ask *a, uint32_t hbm, uint32_t *lacks)
{
    struct rig g;
    rig_open(&g, hbm, false);
    struct sequence *q = rig_submit(&g, a);
    rig_step(&g);
    *lacks = layer_major_lacks(&g.e->sched, q, 0);
    bool is_deep = g.e->sched.n_deep > 0;
    rig_cancel(&g, q);
    engine_destroy(g.e);
    return is_deep;
}

/* Too little HBM for it is no error, and nobody notices but by the time: what is missing must be right. */
static void what_is_missing_is_told(void)
{
    const struct ask a = {
        .n_prompt = 2400, .max_tokens = 300, .text = 1, .plugin = "wave", .budget = 0.05f};
    enum { LITTLE = 200 };
    uint32_t lacks, none;
    ok(!by_layers_in(&a, LITTLE, &lacks) && lacks > 1, "in %d blocks a prompt goes by chunks",
       LITTLE);
    ok(!by_layers_in(&a, LITTLE + lacks - 1, &none) && none == 1, "in %u more too", lacks - 1);
    ok(by_layers_in(&a, LITTLE + lacks, &none) && none == 0, "in %u more by layers", lacks);
    ok(!by_layers_in(&a, PLENTY, &none) && none == 0, "and what HBM holds lacks nothing");
}

/* Where borders may be crossed, segments are sealed together. */
static void groups_are_the_same(const char *plugin)
{
    struct ask a = asks[0];
    struct rig g[2];
    struct sequence *q[2];
    a.plugin = plugin;
    rig_open(&g[0], PLENTY, true);
    rig_open(&g[1], LONG / R - 8, true);
    for (int i = 0; i < 2; i++) {
        q[i] = rig_submit(&g[i], &a);
        while (sequence_n_output(q[i]) < OUTPUT - 1)
            rig_step(&g[i]);
    }
    printf("# %s\n", plugin);
    is_int(g[0].e->sched.n_deep * 10 + g[1].e->sched.n_deep, 1, "one of two is read by layers");
    ok(memcmp(q[0]->tokens, q[1]->tokens, q[0]->n_tokens * sizeof *q[0]->tokens) == 0,
       "and its answer is the same where segments are sealed in groups");
    is_int(g[1].e->sched.segments_sealed, g[0].e->sched.segments_sealed, "as many as ever");
    for (int i = 0; i < 2; i++) {
        rig_cancel(&g[i], q[i]);
        ok(blocks_home(&g[i]), "every block is home");
        engine_destroy(g[i].e);
    }
}

int main(void)
{
    int fd = mkstemp(model_path);
    if (fd < 0)
        return 1;
    close(fd);
    log_set_level(LOG_ERROR);
    make_deep_model(16);
    if (!TAP_SANITIZED) { /* fifteen times as slow there, and no other code than below */
        answers_are_the_same("bf16");
        prefixes_are_kept();
        kept = KV_E4M3;
        answers_are_the_same("fp8");
        kept = KV_BF16;
    }
    make_deep_model(3);
    groups_are_the_same("wave");
    if (!TAP_SANITIZED)
        groups_are_the_same("quest");
    cancels_leave_nothing();
    what_is_missing_is_told();
    nobody_is_pushed_out(&while_it_is_read);
    if (!TAP_SANITIZED) { /* like the first */
        make_deep_model(16);
        nobody_is_pushed_out(&behind_it);
        exempt_layers_stay();
    }
    unlink(model_path);
    return tap_done();
}
