/* What does a token behind a long context cost: attending everything, by plan with everything in HBM
 * (RESIDENT), by plan with a hot set of five budgets (SPILLED)?
 *
 * The engine's path without scheduler and server: cache, plug-in, attention_layer, model_forward and
 * sampling, one sequence. Reads commands on stdin, answers each with a line on stdout, and sleeps in
 * between; tests/bench/peer.py runs it in turn with llama.cpp.
 *     run WHO MODE STEPS       WHO: dense, wave or spilled. Tokens per second, the share of the pages
 *                              named that the hot set lacked, a digest of the tokens sampled
 *     profile WHO MODE STEPS   JSON: microseconds of a step by operation. The clock is read around every
 *                              operation, so a step is a little slower
 * MODE is `greedy` (a token is sampled from what came before, and fed) or `text` (sampled all the same,
 * but the text's own next token is fed: a small model's answers repeat themselves, and a hot set likes that).
 *
 * Prompts are computed once, at the first command that needs them. A run starts WARM_ROWS in front of
 * CONTEXT: these rows go through the contender's own path, untimed, so that it finds caches, hot set and
 * threads as in the middle of an answer. A SPILLED sequence is restored and spilled again before, so its
 * hot set has never seen what comes. Rows behind CONTEXT are written again by the next run.
 *
 * STEPS is a multiple of 32: so often does the cache collect what hot sets counted.
 *
 * usage: decode MODEL.gguf BLOCK_ROWS CONTEXT [TEXT_FILE|- [THREADS [ISA]]]     -: generated prose */
#include "cache/kv.h"
#include "engine/attention.h"
#include "engine/model/model.h"
#include "engine/text/tokenizer.h"
#include "engine/tool/prose.h"
#include "sparse/head_policy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    CHUNK = 512,       /* rows of a prefill step, as llama.cpp's n_ubatch */
    WARM_ROWS = 32,    /* decoded before the clock starts */
    MAX_STEPS = 256,   /* of a run */
    STEPS_UNIT = 32,   /* COLLECT_STEPS of cache/kv_spill.c */
    EXEMPT_LAYERS = 1, /* configs/default.json: the first layer looks everywhere */
    HOT_BUDGETS = 5,   /* hot set of the SPILLED sequence, in budgets: the bar's */
    BYTES_PER_TOKEN = 6,
};

static const float BUDGET = 0.05f;

enum who { DENSE, WAVE, SPILLED, N_WHO };
static const char *const who_names[] = {"dense", "wave", "spilled"};

static struct backend *be;
static struct model *model;
static struct kv *kv;
static struct attention *at;
static const struct sparse_instance *wave;
static struct kv_seq seqs[N_WHO];
static bool is_open[N_WHO];
static uint32_t context, n_slots;
static uint32_t *text; /* [context + MAX_STEPS + 1] tokens */

static void must(status st)
{
    if (st == OK)
        return;
    fprintf(stderr, "decode: %s\n", err_text());
    exit(1);
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- where the time goes: the backend's operations, with a clock around each ---- */

#define TIMED(X) X(embed) X(linear) X(append) X(score) X(known) X(select) X(resolve) X(sample)
/* attend, by whether a layer's rows have a plan; the exempt layers of a wave step have none */
#define SLOTS(X) TIMED(X) X(planned) X(whole)

enum slot {
#define NAME(op) SLOT_##op,
    SLOTS(NAME)
#undef NAME
        N_SLOTS
};

static const struct backend_ops *real_ops;
static double spent[N_SLOTS];

#define WRAP(op)                                                         \
    static void timed_##op(struct backend *b, const struct op##_args *a) \
    {                                                                    \
        double start = now_s();                                          \
        real_ops->op(b, a);                                              \
        spent[SLOT_##op] += now_s() - start;                             \
    }
TIMED(WRAP)
#undef WRAP

static void timed_attend(struct backend *b, const struct attend_args *a)
{
    double start = now_s();
    real_ops->attend(b, a);
    spent[a->n_plans > 0 ? SLOT_planned : SLOT_whole] += now_s() - start;
}

static void time_operations(bool on)
{
    static struct backend_ops ops;
    if (real_ops == NULL)
        real_ops = be->ops;
    be->ops = on ? &ops : real_ops;
    if (!on)
        return;
    ops = *real_ops;
#define SET(op) ops.op = timed_##op;
    TIMED(SET)
#undef SET
    ops.attend = timed_attend;
}

/* ---- a step ---- */

static void plan_row(const struct kv_seq *s, uint32_t pos)
{
    const struct plan_row row = {.pos = pos,
                                 .n_segments = s->n_segments,
                                 .records = s->records,
                                 .blocks = s->table[LANE_SPARSE],
                                 .hot = s->hot};
    attention_begin(at);
    attention_add(at, wave, NULL, &row);
}

/* Rows [pos, pos + n) of a sequence; the token that its last row predicts. As engine/step.c. */
static uint32_t step(struct kv_seq *s, const uint32_t *tokens, uint32_t pos, uint32_t n,
                     bool planned)
{
    const uint32_t last = n - 1;
    static struct sample_row sampled;
    must(kv_seq_grow(kv, s, pos + n));
    struct batch_seq part = {.n_rows = n, .first_pos = pos, .planned = planned};
    for (int c = 0; c < LANE_CLASSES; c++)
        part.blocks[c] = s->table[c];
    attention_begin(at);
    if (planned)
        plan_row(s, pos);
    const struct batch b = {.kv = kv_memory(kv),
                            .n_rows = n,
                            .n_seqs = 1,
                            .n_logits = 1,
                            .tokens = tokens,
                            .seqs = &part,
                            .logit_rows = &last,
                            .attention = at};
    sampled = (struct sample_row){
        .params = {.top_p = 1, .repetition_penalty = 1}, .target = SAMPLE_DRAW, .n_top = -1};
    const struct sample_args a = {.logits = model_forward(model, &b),
                                  .vocab = model_info(model)->shape.vocab,
                                  .n_rows = 1,
                                  .rows = &sampled};
    be->ops->sample(be, &a);
    must(be->ops->sync(be));
    CHECK(!sampled.bad);
    if (planned)
        kv_step(kv, &s, 1);
    return sampled.token;
}

/* ---- prompts ---- */

static void seal_due(struct kv_seq *s, uint32_t pos)
{
    while (s->layout.seals && s->n_segments < kv_segments_due(pos)) {
        struct kv_seal seal;
        must(kv_seq_seal_begin(kv, s, text, &seal));
        if (!seal.found)
            attention_seal(at, wave, seal.segment, seal.record,
                           seal.segment > 0 ? s->records[0] : seal.record, seal.from, seal.to);
        kv_seq_seal_end(kv, s, &seal);
    }
}

/* The prompt ends where a run begins. The second sequence that attends by plan finds the first one's
 * prompt in the prefix cache. */
static void open_seq(enum who w)
{
    const uint32_t n = context - WARM_ROWS;
    struct kv_open o = {.tokens = text, .n = n, .max_rows = context + MAX_STEPS, .max_hit = n - 1};
    uint32_t pos;
    if (w != DENSE)
        o.layout = (struct kv_layout){
            .layout_id = wave->layout_id, .digest_id = wave->digest_id, .seals = true};
    must(kv_seq_open(kv, &seqs[w], &o, n_slots, &pos));
    while (pos < n) {
        uint32_t rows = n - pos < CHUNK ? n - pos : CHUNK, border = kv_next_border(pos);
        if (o.layout.seals && pos + rows > border)
            rows = border - pos;
        seal_due(&seqs[w], pos);
        step(&seqs[w], text + pos, pos, rows, false);
        pos += rows;
        kv_seq_share(kv, &seqs[w], text, pos);
    }
    seal_due(&seqs[w], n);
    is_open[w] = true;
}

/* ---- runs ---- */

struct result {
    double seconds, missing; /* missing: share of the pages named */
    uint32_t answer;         /* a digest of the tokens sampled */
};

static struct result run(enum who w, bool greedy, uint32_t steps)
{
    struct kv_seq *s = &seqs[w];
    struct kv_counts before, after;
    struct result r = {0};
    uint32_t fed = 0;
    double start = 0;
    if (!is_open[w])
        open_seq(w);
    if (s->residence == KV_SPILLED)
        must(kv_seq_restore(kv, s));
    if (w == SPILLED)
        must(kv_seq_spill(kv, s, n_slots));
    for (uint32_t i = 0; i < WARM_ROWS + steps; i++) {
        uint32_t pos = context - WARM_ROWS + i;
        if (i == WARM_ROWS) {
            memset(spent, 0, sizeof spent);
            kv_counts(kv, &before);
            start = now_s();
        }
        if (i <= WARM_ROWS || !greedy)
            fed = text[pos];
        fed = step(s, &fed, pos, 1, w != DENSE);
        r.answer = (r.answer ^ fed) * 0x01000193u; /* FNV's prime */
    }
    r.seconds = now_s() - start;
    kv_counts(kv, &after);
    double hits = (double)(after.page_hits - before.page_hits);
    double misses = (double)(after.page_misses - before.page_misses);
    r.missing = hits + misses > 0 ? misses / (hits + misses) : 0;
    return r;
}

static void print_profile(const struct result *r, uint32_t steps)
{
    double rest = r->seconds;
    printf("{");
#define PRINT(op)                                                  \
    printf("\"" #op "\": %.1f, ", spent[SLOT_##op] * 1e6 / steps); \
    rest -= spent[SLOT_##op];
    SLOTS(PRINT)
#undef PRINT
    printf("\"rest\": %.1f, \"step\": %.1f}\n", rest * 1e6 / steps, r->seconds * 1e6 / steps);
}

/* One line of stdin; false: not a command. */
static bool answer(const char *line)
{
    char verb[16], name[16], mode[16];
    unsigned steps, w = 0;
    if (sscanf(line, "%15s %15s %15s %u", verb, name, mode, &steps) != 4)
        return false;
    while (w < N_WHO && strcmp(name, who_names[w]) != 0)
        w++;
    bool profiles = strcmp(verb, "profile") == 0, greedy = strcmp(mode, "greedy") == 0;
    if (w == N_WHO || steps == 0 || steps > MAX_STEPS || steps % STEPS_UNIT != 0 ||
        (!greedy && strcmp(mode, "text") != 0))
        return false;
    if (!profiles && strcmp(verb, "run") != 0)
        return false;
    time_operations(profiles);
    struct result r = run((enum who)w, greedy, steps);
    time_operations(false);
    if (profiles)
        print_profile(&r, steps);
    else
        printf("%.2f %.4f %08x\n", steps / r.seconds, r.missing, r.answer);
    return true;
}

/* ---- life ---- */

static char *read_file(const char *path, size_t *len)
{
    FILE *f = fopen(path, "rb");
    long size = f != NULL && fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
    if (size <= 0) {
        fprintf(stderr, "decode: %s: cannot be read, or is empty\n", path);
        exit(1);
    }
    rewind(f);
    char *out = mem_alloc((size_t)size);
    *len = fread(out, 1, (size_t)size, f);
    fclose(f);
    return out;
}

static void read_text(const char *path)
{
    size_t len, n, wanted = context + MAX_STEPS + 1;
    char *bytes = strcmp(path, "-") == 0 ? prose_text(1, wanted * BYTES_PER_TOKEN, &len)
                                         : read_file(path, &len);
    struct token_scratch *scratch = token_scratch_create();
    text = mem_alloc((len + 1) * sizeof *text);
    must(tokenize(model_tokenizer(model), scratch, bytes, len, 0, text, len + 1, &n));
    token_scratch_destroy(scratch);
    mem_free(bytes);
    if (n < wanted) {
        fprintf(stderr, "decode: %s: %zu tokens, %zu are needed\n", path, n, wanted);
        exit(1);
    }
}

/* Room for both kinds of sequence, their copies and the hot set; and DRAM for what is spilled. */
static void open_cache(uint32_t block_rows)
{
    static struct lane_place *lanes;
    const struct model_shape *s = &model_info(model)->shape;
    struct kv_geometry geo = kv_geometry_make(block_rows, s->layers, s->kv_heads, s->head_dim);
    const struct head_policy_config policy = {.exempt_layers = EXEMPT_LAYERS};
    uint8_t *classes = mem_alloc((size_t)s->layers * s->kv_heads);
    uint32_t sinks, recent, plugin, n = s->layers * s->kv_heads;
    must(head_policy_make(&policy, s->layers, s->kv_heads, classes, &sinks, &recent));
    lanes = mem_alloc(n * sizeof *lanes);
    kv_geometry_classify(&geo, classes, lanes, sinks, recent);
    mem_free(classes);

    must(sparse_find("wave", &plugin));
    struct sparse_choice choice = sparse_choice_make(plugin, BUDGET);
    struct sparse_traits traits;
    must(sparse_choice_check(&choice, &geo, &traits));
    uint32_t blocks = (context + MAX_STEPS + SEGMENT_ROWS) / block_rows;
    const struct kv_config cfg = {.geo = geo,
                                  .blocks = {{4 * blocks, 2 * blocks}, {4 * blocks, 2 * blocks}},
                                  .n_records = 4 * (context / SEGMENT_ROWS + 1),
                                  .record_lane_bytes = be->ops->digest_bytes(&geo, &traits.digest),
                                  .prefix_caching = true};
    must(kv_create(&kv, be, &cfg));
    must(attention_create(&at, be, kv_memory(kv), s->heads, model_info(model)->attn_scale, 1,
                          context + MAX_STEPS));
    wave = attention_instance(at, &choice);
    must(wave != NULL ? OK : ERR_ARG);
    uint32_t least = attention_min_slots(wave, kv_geometry(kv), context + MAX_STEPS);
    n_slots = HOT_BUDGETS * (attention_budget(wave, kv_geometry(kv), context) / block_rows);
    CHECK(n_slots >= least);
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr,
                "usage: decode MODEL.gguf BLOCK_ROWS CONTEXT [TEXT_FILE|- [THREADS [ISA]]]\n");
        return 2;
    }
    const struct cpu_options cpu = {.isa = argc > 6 ? argv[6] : "auto",
                                    .n_threads = argc > 5 ? (uint32_t)atoi(argv[5]) : 0};
    context = (uint32_t)atoi(argv[3]);
    must(cpu_backend_open(&be, &cpu));
    must(model_load(&model, be, argv[1], context + MAX_STEPS));
    must(model_reserve(model, CHUNK, 1));
    read_text(argc > 4 ? argv[4] : "-");
    open_cache((uint32_t)atoi(argv[2]));
    printf("ready %s, blocks of %s, hot set %u of %u blocks\n", be->ops->describe(be), argv[2],
           n_slots, kv_segments_due(context) * SEGMENT_ROWS / kv_geometry(kv)->block_rows);
    fflush(stdout);

    char line[128];
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (!answer(line)) {
            fprintf(stderr, "decode: not a command: %s", line);
            return 2;
        }
        fflush(stdout);
    }
    for (int w = 0; w < N_WHO; w++)
        if (is_open[w])
            kv_seq_close(kv, &seqs[w]);
    attention_release(at, wave);
    attention_destroy(at);
    kv_destroy(kv);
    model_destroy(model);
    be->ops->close(be);
    mem_free(text);
    return 0;
}
