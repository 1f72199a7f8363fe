/* What may never change an answer that attends by plan: the engine through its mailbox, on the CPU
 * backend, with a tiny model of random weights. Tokens and log-probabilities must be the same bit for
 * bit with chunks of any size, alone and in any batch, RESIDENT and SPILLED with any hot set, paused,
 * preempted, and with any hit in the prefix cache. */
#include "engine/tool/trace.h"
#include "kernels/log.h"
#include "tests/contract/engine_world.h"

#include <math.h>

/* Prompts that end before a border, behind it, at it; answers that cross one; all plug-ins. */
static const struct ask asks[] = {
    {.n_prompt = 1150, .max_tokens = 40, .text = 1, .plugin = "wave", .budget = 0.1f},
    {.n_prompt = 1060, .max_tokens = 60, .text = 2, .plugin = "wave", .budget = 64},
    {.n_prompt = 2130, .max_tokens = 40, .text = 3, .plugin = "wave", .budget = 0.05f},
    {.n_prompt = 1088, .max_tokens = 30, .text = 4, .plugin = "quest", .budget = 0.1f},
    {.n_prompt = 1070, .max_tokens = 50, .text = 5, .plugin = "quest", .budget = 0.05f},
    {.n_prompt = 1100, .max_tokens = 30, .text = 6, .plugin = "oracle", .budget = 0.05f},
    {.n_prompt = 1100,
     .max_tokens = 40,
     .text = 7,
     .plugin = "wave",
     .budget = 0.1f,
     .interval = 4},
    {.n_prompt = 1100, .max_tokens = 30, .text = 8, .plugin = "dense", .budget = 1},
};
enum { N_ASKS = ARRAY_LEN(asks) };

static struct run alone; /* every ask by itself, RESIDENT: what all others are compared with */

static void plans_are_followed(void)
{
    struct engine_config cfg = config();
    run(&cfg, asks, N_ASKS, false, &alone);
    const struct msg_residence *r = &alone.last.residence;
    uint32_t good = 0;
    for (uint32_t i = 0; i < N_ASKS; i++)
        good += alone.answers[i].n == asks[i].max_tokens;
    is_int(good, N_ASKS, "every answer has its tokens");
    ok(r->planned_rows > 200 && r->segments_sealed == 8,
       "rows attended by plan (%llu) and segments were sealed (%llu)",
       (unsigned long long)r->planned_rows, (unsigned long long)r->segments_sealed);
    ok(r->spills + r->pauses + r->moved_down + r->moved_up + r->page_misses == 0 &&
           alone.leaf_bytes_max == 0,
       "resident first: with room for all no byte moved and no leaf was made");
    struct ask other = asks[0];
    struct run *dense = mem_alloc(sizeof *dense);
    other.plugin = "dense";
    other.budget = 1;
    run(&cfg, &other, 1, false, dense);
    ok(!same_answer(&dense->answers[0], &alone.answers[0]),
       "a small budget is not the dense answer (the test can see a difference)");
    mem_free(dense);
}

static void a_budget_of_everything_is_dense(void)
{
    struct run *r = mem_alloc(sizeof *r);
    struct engine_config cfg = config();
    static const char *const plugins[] = {"dense", "wave", "quest", "oracle"};
    struct ask a[4];
    for (uint32_t i = 0; i < 4; i++)
        a[i] = (struct ask){
            .n_prompt = 2130, .max_tokens = 60, .text = 3, .plugin = plugins[i], .budget = 1};
    run(&cfg, a, 4, true, r);
    for (uint32_t i = 1; i < 4; i++) {
        double worst = 0;
        uint32_t n = 0;
        const struct answer *d = &r->answers[0], *s = &r->answers[i];
        for (; n < d->n && d->tokens[n] == s->tokens[n]; n++)
            worst = fmax(worst, fabs((double)d->logprobs[n] - (double)s->logprobs[n]));
        ok(n == 60 && worst < 1e-3, "%s with a budget of everything is dense (%.1e apart)",
           plugins[i], worst);
    }
    mem_free(r);
}

static void chunks_change_nothing(void)
{
    static const uint32_t sizes[] = {16, 64, 512};
    struct run *r = mem_alloc(sizeof *r);
    for (uint32_t i = 0; i < ARRAY_LEN(sizes); i++) {
        struct engine_config cfg = config();
        cfg.max_batched_tokens = sizes[i];
        cfg.max_num_seqs = 8;
        run(&cfg, asks, N_ASKS, i == 1, r);
        ok(n_same(r, &alone, N_ASKS) == N_ASKS, "chunks of %u rows%s change no bit", sizes[i],
           i == 1 ? ", all sequences together," : "");
    }
    mem_free(r);
}

static void neighbours_change_nothing(void)
{
    struct run *r = mem_alloc(sizeof *r);
    struct ask turned[N_ASKS];
    struct engine_config cfg = config();
    uint32_t same = 0;
    run(&cfg, asks, N_ASKS, true, r);
    ok(n_same(r, &alone, N_ASKS) == N_ASKS, "a batch of all changes no bit");
    for (uint32_t i = 0; i < N_ASKS; i++)
        turned[i] = asks[(i * 5 + 3) % N_ASKS];
    cfg.cpu.n_threads = 1;
    run(&cfg, turned, N_ASKS, true, r);
    for (uint32_t i = 0; i < N_ASKS; i++)
        same += same_answer(&r->answers[i], &alone.answers[(i * 5 + 3) % N_ASKS]);
    ok(same == N_ASKS, "nor does another order, on one thread");
    mem_free(r);
}

/* All rows are about 1,270 blocks. */
static void residence_changes_nothing(void)
{
    static const struct {
        uint32_t hbm, dram;
        const char *what;
    } worlds[] = {
        {730, 3000, "half of the blocks in HBM"},
        {330, 3000, "a fourth"},
        {340, 300, "a fourth, and little DRAM"}, /* some wait for others */
    };
    struct run *r = mem_alloc(sizeof *r);
    for (uint32_t i = 0; i < ARRAY_LEN(worlds); i++) {
        struct engine_config cfg = config();
        cfg.kv_hbm_bytes = worlds[i].hbm * BLOCK;
        cfg.kv_dram_bytes = worlds[i].dram * BLOCK;
        cfg.max_model_len = 2304;
        cfg.write_behind = i == 1;
        /* What nobody chose is dense, but the longest context is what DRAM holds. */
        cfg.sparse = choice_of(&asks[0]);
        run(&cfg, asks, N_ASKS, true, r);
        const struct msg_residence *s = &r->last.residence;
        printf("# %s: %llu spills, %llu pauses, %llu restores, %llu preemptions, %llu hits, %llu "
               "misses\n",
               worlds[i].what, (unsigned long long)s->spills, (unsigned long long)s->pauses,
               (unsigned long long)s->restores, (unsigned long long)r->last.preemptions,
               (unsigned long long)s->page_hits, (unsigned long long)s->page_misses);
        ok(n_same(r, &alone, N_ASKS) == N_ASKS, "%s: not a bit is different", worlds[i].what);
        ok(s->spills > 0 && s->page_misses > 0, "%s: pages were fetched", worlds[i].what);
    }
    mem_free(r);
}

/* Two that are admitted with the first stretch of their answers, and HBM for no more. */
static void what_is_computed_again_is_the_same(void)
{
    enum { ROWS = 8, PROMPT = 1100, TOKENS = 290, FIRST = 256 };
    static const struct ask two[] = {
        {.n_prompt = PROMPT, .max_tokens = TOKENS, .text = 1, .plugin = "wave", .budget = 0.1f},
        {.n_prompt = PROMPT, .max_tokens = TOKENS, .text = 2, .plugin = "quest", .budget = 0.1f}};
    struct run *each = mem_alloc(sizeof *each), *both = mem_alloc(sizeof *both);
    struct engine_config cfg = config();
    run(&cfg, two, 2, false, each);
    cfg.max_model_len = PROMPT + TOKENS;
    cfg.kv_hbm_bytes = (2 * ((PROMPT + FIRST) / ROWS + 1) + 1) * BLOCK;
    run(&cfg, two, 2, true, both);
    ok(both->last.preemptions > 0, "of two answers that outgrow HBM one is preempted (%llu)",
       (unsigned long long)both->last.preemptions);
    ok(n_same(both, each, 2) == 2, "and computed again it is the same, to the bit");
    mem_free(each);
    mem_free(both);
}

/* ---- prefix hits ---- */

/* Prompts that share a beginning with one that ran before: to its end, inside its tail, inside a
 * sealed segment that is permuted, behind a border. */
static void hits_change_nothing(const char *plugin, bool from_dram)
{
    const struct ask a[] = {
        {.n_prompt = 2200, .max_tokens = 30, .text = 1, .plugin = plugin, .budget = 0.05f},
        {.n_prompt = 2200, .max_tokens = 30, .text = 1, .plugin = plugin, .budget = 0.05f},
        {.n_prompt = 1900,
         .max_tokens = 30,
         .text = 1,
         .parts_at = 1300,
         .plugin = plugin,
         .budget = 0.1f},
        {.n_prompt = 2150,
         .max_tokens = 30,
         .text = 1,
         .parts_at = 2130,
         .plugin = plugin,
         .budget = 0.1f},
        {.n_prompt = 1100, .max_tokens = 60, .text = 1, .plugin = plugin, .budget = 0.1f},
        {.n_prompt = 1500,
         .max_tokens = 30,
         .text = 1,
         .parts_at = 1050,
         .plugin = plugin,
         .budget = 0.1f},
    };
    enum { N = ARRAY_LEN(a) };
    static struct run without; /* the same wherever blocks lie */
    static const char *without_of;
    struct run *with = mem_alloc(sizeof *with);
    struct engine_config cfg = config();
    if (plugin != without_of) {
        run(&cfg, a + 1, N - 1, false, &without);
        memmove(without.answers + 1, without.answers, (N - 1) * sizeof without.answers[0]);
        without_of = plugin; /* the first two ask the same */
    }
    cfg.prefix_caching = true;
    if (from_dram) {
        cfg.sparse = choice_of(&a[0]);
        cfg.kv_hbm_bytes = 290 * BLOCK;
        cfg.kv_dram_bytes = 3000 * BLOCK;
        cfg.max_model_len = 2304;
    }
    run(&cfg, a, N, false, with);
    uint32_t hits = 0;
    for (uint32_t i = 1; i < N; i++)
        hits += with->answers[i].done.n_cached >= (a[i].parts_at != 0 ? a[i].parts_at - 64 : 1024);
    printf("# %s: cached", plugin);
    for (uint32_t i = 0; i < N; i++)
        printf(" %u", with->answers[i].done.n_cached);
    printf("; %llu blocks came up\n", (unsigned long long)with->last.residence.moved_up);
    is_int(hits, N - 1, "prompts find what was computed before");
    ok(n_same(with, &without, N) == N, "%s%s: a hit changes no bit, wherever it ends", plugin,
       from_dram ? ", in DRAM" : "");
    mem_free(with);
}

static void selections_are_recorded(void)
{
    struct run *r = mem_alloc(sizeof *r);
    struct engine_config cfg = config();
    char path[] = "/tmp/spind-trace-XXXXXX";
    int fd = mkstemp(path);
    struct trace_reader *t;
    struct trace_record rec;
    uint32_t n = 0;
    bool more = true, right = true;
    CHECK(fd >= 0 && close(fd) == 0 && unlink(path) == 0);
    cfg.record_selection = path;
    run(&cfg, &asks[2], 1, false, r); /* rows 2,130 to 2,168: two segments are sealed */
    CHECK(trace_open(&t, path) == OK);
    while (right && trace_next(t, &rec, &more) == OK && more) {
        right = rec.sequence == 1 && rec.pos >= 2130 && rec.pos < 2169 && rec.n_pages >= 3 &&
                rec.pages[0] == 0 && rec.pages[1] == 1 && rec.pages[rec.n_pages - 1] < 256;
        n++;
    }
    trace_close(t);
    unlink(path);
    ok(right && n == 39 * 6, "every row's selection in every lane is recorded (%u)", n);
    ok(same_answer(&r->answers[0], &alone.answers[2]), "and recording changes nothing");
    mem_free(r);
}

/* Spilled, and with pages of 8 and of 16 rows, whose digests are of other kinds. */
static void what_is_not_estimated_need_not_be_kept(void)
{
    struct ask a[] = {asks[2], asks[2]};
    struct run *r = mem_alloc(sizeof *r);
    a[0].exact = a[1].bare = true;
    for (uint32_t rows = 8; rows <= 16; rows += 8) {
        struct engine_config cfg = config();
        cfg.block_rows = rows;
        cfg.sparse = choice_of(&a[0]);
        cfg.kv_hbm_bytes = 300 * BLOCK;
        cfg.kv_dram_bytes = 3000 * BLOCK;
        run(&cfg, a, 2, true, r);
        ok(same_answer(&r->answers[0], &r->answers[1]) && r->answers[0].n == a[0].max_tokens,
           "pages of %u rows: an answer without mean values is that with them", rows);
    }
    ok(!same_answer(&r->answers[0], &alone.answers[2]), "and not that with estimates");
    mem_free(r);
}

static void small_budgets_are_refused(void)
{
    struct run *r = mem_alloc(sizeof *r);
    struct engine_config cfg = config();
    struct ask a = {
        .n_prompt = 2200, .max_tokens = 40, .text = 1, .plugin = "wave", .budget = 0.5f};
    cfg.kv_hbm_bytes = 200 * BLOCK;
    cfg.kv_dram_bytes = 3000 * BLOCK;
    cfg.max_model_len = 2304;
    cfg.sparse = choice_of(&a);
    struct engine *e = NULL;
    status st = engine_create(&e, &cfg, NULL, NULL);
    ok(st == ERR_MEMORY && strstr(err_text(), "--max-model-len to ") != NULL,
       "nor does a server start that could not serve the longest sequence (%s)", err_text());
    cfg.max_model_len = 0;
    CHECK(engine_create(&e, &cfg, NULL, NULL) == OK);
    ok(engine_info(e)->max_model_len == 200 * 8 && engine_info(e)->max_dense_len == 200 * 8,
       "where no length was asked it is cut to what can be served (%u)",
       engine_info(e)->max_model_len);
    engine_destroy(e);
    cfg.max_model_len = 2304;
    cfg.sparse = choice_of(&(struct ask){.plugin = "quest", .budget = 0.05f});
    CHECK(engine_create(&e, &cfg, NULL, NULL) == OK);
    ok(engine_info(e)->max_model_len == 2304 && engine_info(e)->max_dense_len == 200 * 8,
       "what attends everything is as long as HBM");
    engine_destroy(e);
    run(&cfg, &a, 1, false, r);
    ok(r->answers[0].done.reason == DONE_REFUSED &&
           strstr(r->answers[0].done.text, "--kv-hbm") != NULL,
       "what cannot have its minimum is refused (%s)", r->answers[0].done.text);
    mem_free(r);
}

/* Rows are rounded when they are written, so nothing above depends on what they are rounded to. */
static void the_same_in_pages_of_fp8(void)
{
    static const char wave[] =
        "wave"; /* hits_change_nothing knows it from the other by its address */
    struct run *wide = mem_alloc(sizeof *wide);
    *wide = alone;
    kept = KV_E4M3;
    printf("# pages of fp8\n");
    plans_are_followed();
    ok(n_same(&alone, wide, N_ASKS) < N_ASKS / 2, "fp8: most answers have other bits");
    mem_free(wide);
    if (!TAP_SANITIZED) {
        neighbours_change_nothing();
        residence_changes_nothing();
        what_is_computed_again_is_the_same();
    }
    hits_change_nothing(wave, true);
    kept = KV_BF16;
}

int main(void)
{
    int fd = mkstemp(model_path);
    if (fd < 0)
        return 1;
    close(fd);
    log_set_level(LOG_ERROR);
    make_model();
    plans_are_followed();
    a_budget_of_everything_is_dense();
    chunks_change_nothing();
    neighbours_change_nothing();
    residence_changes_nothing();
    static const char wave[] = "wave";
    if (!TAP_SANITIZED) {
        what_is_computed_again_is_the_same();
        hits_change_nothing("quest", false);
        hits_change_nothing(wave, false);
    }
    hits_change_nothing(wave, true);
    selections_are_recorded();
    what_is_not_estimated_need_not_be_kept();
    small_budgets_are_refused();
    the_same_in_pages_of_fp8();
    unlink(model_path);
    return tap_done();
}
