/* Head policies through the whole engine: SPARSE, DENSE and STREAM lanes in one sequence, on the CPU
 * backend, with a tiny model of random weights. What may never change an answer (contract/sparse.c) must
 * not change it here either: chunks, batches, residence, preemption, hits; and a window that is never
 * full must be no window at all, bit for bit. */
#include "kernels/log.h"
#include "tests/contract/engine_world.h"

static char gates_path[] = "/tmp/spind-policy-XXXXXX"; /* duo: the six lanes of the model */

enum { SINKS = 16, RECENT = 128 };

/* Layer 0: DENSE, STREAM; layer 1: STREAM, SPARSE; layer 2: SPARSE, STREAM. */
static struct engine_config mixed(void)
{
    struct engine_config cfg = config();
    cfg.heads = (struct head_policy_config){.name = "duo",
                                            .file = gates_path,
                                            .sparsity = 0.5f,
                                            .exempt_layers = 1,
                                            .sinks = SINKS,
                                            .recent = RECENT};
    return cfg;
}

static void write_gates(const char *text)
{
    FILE *f = fopen(gates_path, "w");
    CHECK(f != NULL && fputs(text, f) >= 0 && fclose(f) == 0);
}

static const char MIXED[] = "0.9 0.1\n0.2 0.8\n0.7 0.3\n";

/* All plug-ins; prompts that end before a border, behind it, at it; answers that cross one. */
static const struct ask asks[] = {
    {.n_prompt = 1150, .max_tokens = 30, .text = 1, .plugin = "wave", .budget = 0.1f},
    {.n_prompt = 1060, .max_tokens = 50, .text = 2, .plugin = "wave", .budget = 64},
    {.n_prompt = 2100, .max_tokens = 40, .text = 3, .plugin = "quest", .budget = 0.05f},
    {.n_prompt = 1100, .max_tokens = 20, .text = 4, .plugin = "oracle", .budget = 0.05f},
    {.n_prompt = 1100, .max_tokens = 20, .text = 5, .plugin = "dense", .budget = 1},
};
enum { N_ASKS = ARRAY_LEN(asks) };

static struct run alone; /* every ask by itself, RESIDENT: what all others are compared with */

static void lanes_differ(void)
{
    static const char *const policies[] = {"none", "streaming"};
    struct run *r = mem_alloc(sizeof *r);
    struct engine_config cfg = mixed();
    uint32_t good = 0;
    run(&cfg, asks, N_ASKS, false, &alone);
    for (uint32_t i = 0; i < N_ASKS; i++)
        good += alone.answers[i].n == asks[i].max_tokens;
    is_int(good, N_ASKS, "mixed lanes: every plug-in answers");
    ok(alone.last.residence.planned_rows > 100 && alone.last.residence.segments_sealed > 4,
       "rows attend by plan (%llu), segments are sealed (%llu)",
       (unsigned long long)alone.last.residence.planned_rows,
       (unsigned long long)alone.last.residence.segments_sealed);
    for (size_t p = 0; p < ARRAY_LEN(policies); p++) {
        uint32_t same = 0;
        cfg = config();
        cfg.heads = (struct head_policy_config){
            .name = policies[p], .sparsity = -1, .sinks = SINKS, .recent = RECENT};
        run(&cfg, asks, N_ASKS, true, r);
        good = 0;
        for (uint32_t i = 0; i < N_ASKS; i++) {
            good += r->answers[i].n == asks[i].max_tokens;
            same += same_answer(&r->answers[i], &alone.answers[i]);
        }
        is_int(good, N_ASKS, policies[p]);
        is_int(same, 0, "its answers are others (the test can see a difference)");
        ok((p == 0) == (r->last.residence.planned_rows > 0),
           "rows attend by plan where lanes are SPARSE");
    }
    mem_free(r);
}

/* The window covers everything: as if the lanes were DENSE. */
static void a_full_window_is_none(void)
{
    struct run *r = mem_alloc(sizeof *r), *want = mem_alloc(sizeof *want);
    struct engine_config cfg = config();
    struct ask a[N_ASKS];
    memcpy(a, asks, sizeof a);
    cfg.heads.exempt_layers = 1;
    cfg.heads.name = "none";
    run(&cfg, asks, N_ASKS, true, want);
    write_gates("0 0\n1 1\n1 1\n");
    cfg.heads = (struct head_policy_config){
        .name = "duo", .file = gates_path, .sparsity = 2 / 6.f, .sinks = 64, .recent = POSITIONS};
    run(&cfg, asks, N_ASKS, true, r);
    is_int(n_same(r, want, N_ASKS), N_ASKS, "STREAM lanes with a full window are DENSE lanes");
    write_gates(MIXED);
    for (uint32_t i = 0; i < N_ASKS; i++)
        a[i].plugin = "dense";
    cfg = config();
    run(&cfg, a, N_ASKS, true, want);
    cfg.heads =
        (struct head_policy_config){.name = "streaming", .sparsity = -1, .recent = POSITIONS};
    run(&cfg, a, N_ASKS, true, r);
    is_int(n_same(r, want, N_ASKS), N_ASKS, "streaming with a full window is none");
    mem_free(want);
    mem_free(r);
}

static void company_changes_nothing(void)
{
    static const uint32_t sizes[] = {16, 96, 512};
    struct run *r = mem_alloc(sizeof *r);
    for (uint32_t i = 0; i < ARRAY_LEN(sizes); i++) {
        struct engine_config cfg = mixed();
        cfg.max_batched_tokens = sizes[i];
        cfg.cpu.n_threads = i == 2 ? 1 : 2;
        run(&cfg, asks, N_ASKS, i > 0, r);
        is_int(n_same(r, &alone, N_ASKS), N_ASKS,
               i == 0   ? "chunks of 16 rows change no bit"
               : i == 1 ? "nor do chunks of 96, all sequences together"
                        : "nor does one thread");
    }
    mem_free(r);
}

/* All rows are about 830 blocks, a third of them SPARSE; the rings of five sequences, in chunks of 64, are
 * about 160 blocks of STREAM lanes. */
static void residence_changes_nothing(void)
{
    static const struct {
        uint32_t hbm, dram;
        const char *what;
        bool caching; /* parts that hits keep compete for the rings' places */
    } worlds[] = {
        {245, 2000, "a third of the blocks in HBM", false},
        {315, 350, "more, and prefixes kept", true},
        {245, 140, "little DRAM", false},
        {200, 350, "less HBM, and prefixes kept", true},
        {195, 0, "no DRAM", false},
    };
    struct run *r = mem_alloc(sizeof *r);
    uint64_t spills = 0, stops = 0;
    for (uint32_t i = 0; i < ARRAY_LEN(worlds); i++) {
        struct engine_config cfg = mixed();
        cfg.kv_hbm_bytes = worlds[i].hbm * BLOCK;
        cfg.kv_dram_bytes = worlds[i].dram * BLOCK;
        cfg.max_model_len = 2176;
        cfg.max_batched_tokens = 64;
        cfg.write_behind = i == 1;
        cfg.prefix_caching = worlds[i].caching;
        if (worlds[i].dram > 0)
            cfg.sparse = choice_of(&asks[0]);
        run(&cfg, asks, N_ASKS, true, r);
        const struct msg_residence *s = &r->last.residence;
        printf("# %s: %llu spills, %llu pauses, %llu restores, %llu preemptions, %llu misses\n",
               worlds[i].what, (unsigned long long)s->spills, (unsigned long long)s->pauses,
               (unsigned long long)s->restores, (unsigned long long)r->last.preemptions,
               (unsigned long long)s->page_misses);
        ok(n_same(r, &alone, N_ASKS) == N_ASKS, "%s: not a bit is different", worlds[i].what);
        spills += s->spills;
        stops += s->pauses + r->last.preemptions;
    }
    ok(spills > 0 && stops > 0, "sequences were spilled, and some had to go for others");
    mem_free(r);
}

static void hits_change_nothing(const char *plugin)
{
    const struct ask a[] = {
        {.n_prompt = 2200, .max_tokens = 20, .text = 1, .plugin = plugin, .budget = 0.05f},
        {.n_prompt = 2200, .max_tokens = 20, .text = 1, .plugin = plugin, .budget = 0.05f},
        {.n_prompt = 1900,
         .max_tokens = 20,
         .text = 1,
         .parts_at = 1300,
         .plugin = plugin,
         .budget = 0.1f},
        {.n_prompt = 1090, .max_tokens = 20, .text = 1, .plugin = plugin, .budget = 0.1f},
        {.n_prompt = 1000, .max_tokens = 20, .text = 1, .plugin = plugin, .budget = 0.1f},
    };
    static const uint32_t want[] = {0, 2048, 1024, 1024, 0};
    enum { N = ARRAY_LEN(a) };
    struct run *with = mem_alloc(sizeof *with), *without = mem_alloc(sizeof *without);
    struct engine_config cfg = mixed();
    run(&cfg, a + 1, N - 1, false, without); /* the first two ask the same */
    memmove(without->answers + 1, without->answers, (N - 1) * sizeof without->answers[0]);
    cfg.prefix_caching = true;
    run(&cfg, a, N, false, with);
    uint32_t right = 0;
    printf("# %s: cached", plugin);
    for (uint32_t i = 0; i < N; i++) {
        right += with->answers[i].done.n_cached == want[i];
        printf(" %u", with->answers[i].done.n_cached);
    }
    printf("\n");
    is_int(right, N, "hits end where segments end");
    ok(n_same(with, without, N) == N, "%s: a hit changes no bit", plugin);
    mem_free(with);
    mem_free(without);
}

int main(void)
{
    int model = mkstemp(model_path), gates = mkstemp(gates_path);
    if (model < 0 || gates < 0)
        return 1;
    close(model);
    close(gates);
    log_set_level(LOG_ERROR);
    make_model();
    write_gates(MIXED);
    lanes_differ();
    if (!TAP_SANITIZED) /* slow there, like two of the three below, and no other memory */
        a_full_window_is_none();
    company_changes_nothing();
    residence_changes_nothing();
    if (!TAP_SANITIZED) {
        hits_change_nothing("dense");
        hits_change_nothing("quest");
    }
    hits_change_nothing("wave");
    unlink(model_path);
    unlink(gates_path);
    return tap_done();
}
