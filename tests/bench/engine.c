/* How fast is the engine without server and scheduler: model_forward and greedy sampling?
 *
 * Does the same work as the llama.cpp loop in tests/bench/peer.py, which runs both in turn. Reads
 * commands on stdin, answers each with a line of tokens per second on stdout, and sleeps in between:
 *     decode STREAMS CONTEXT STEPS      after an untimed prefill of CONTEXT tokens each
 *     prefill TOKENS                    to the logits of the last one
 *     plan PLUGIN BUDGET CONTEXT STEPS  one stream behind one prefill: dense, by plan RESIDENT, by plan
 *                                       SPILLED with a hot set of 5 times what a plan names: three rates
 * The first two layers are exempt, as by default. usage: engine MODEL.gguf [THREADS [ISA [R]]] */
#include "engine/attention.h"
#include "engine/model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    EXEMPT_LAYERS = 2,
    PRESET = 5,        /* hot set, times the pages of a plan */
    SETTLE_STEPS = 16, /* for the hot set, before the clock */
    CHUNK = 512,       /* rows of a prefill step, as llama.cpp's n_ubatch */
    MAX_STREAMS = 64,
    MAX_POSITIONS = 8192,
    ARENA_ROWS = 16384,
};

static struct backend *be;
static struct model *model;
static struct kv *kv;
static struct kv_seq seqs[MAX_STREAMS];
static struct attention *attention;
static const struct sparse_instance *by_plan; /* of the step; NULL: rows attend everything */
static uint32_t n_seqs;
static uint32_t next_token[MAX_STREAMS];

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void must(status st)
{
    if (st == OK)
        return;
    fprintf(stderr, "engine: %s\n", err_text());
    exit(1);
}

static uint32_t random_id(void)
{
    return 100 + (uint32_t)rand() % 39900; /* peer.py's range */
}

static void open_seqs(uint32_t n, uint32_t max_rows)
{
    const struct kv_open o = {.max_rows = max_rows};
    uint32_t n_hit;
    CHECK(n <= MAX_STREAMS);
    for (n_seqs = 0; n_seqs < n; n_seqs++)
        must(kv_seq_open(kv, &seqs[n_seqs], &o, 0, &n_hit));
}

static void close_seqs(void)
{
    while (n_seqs > 0)
        kv_seq_close(kv, &seqs[--n_seqs]);
}

static void add_plan(const struct kv_seq *s, struct batch_seq *b)
{
    const struct plan_row row = {.row = b->first_row,
                                 .pos = b->first_pos,
                                 .n_segments = s->n_segments,
                                 .records = s->records,
                                 .blocks = s->table[LANE_SPARSE],
                                 .hot = s->hot};
    CHECK(b->n_rows == 1);
    b->planned = true;
    b->first_plan = attention_rows(attention);
    attention_add(attention, by_plan, NULL, &row);
}

/* One step: n_rows[i] tokens of each sequence from first_pos on; the last row of each is sampled. */
static void step(uint32_t first, uint32_t n, uint32_t first_pos, uint32_t n_rows,
                 const uint32_t *tokens)
{
    struct batch_seq parts[MAX_STREAMS];
    uint32_t logit_rows[MAX_STREAMS];
    static struct sample_row rows[MAX_STREAMS];
    attention_begin(attention);
    for (uint32_t i = 0; i < n; i++) {
        must(kv_seq_grow(kv, &seqs[first + i], first_pos + n_rows));
        parts[i] =
            (struct batch_seq){.first_row = i * n_rows, .n_rows = n_rows, .first_pos = first_pos};
        for (int c = 0; c < LANE_CLASSES; c++)
            parts[i].blocks[c] = seqs[first + i].table[c];
        if (by_plan != NULL)
            add_plan(&seqs[first + i], &parts[i]);
        logit_rows[i] = (i + 1) * n_rows - 1;
        rows[i] = (struct sample_row){.params = {.top_p = 1, .repetition_penalty = 1},
                                      .logits_row = i,
                                      .target = SAMPLE_DRAW,
                                      .n_top = -1};
    }
    struct batch b = {.kv = kv_memory(kv),
                      .n_rows = n * n_rows,
                      .n_seqs = n,
                      .n_logits = n,
                      .tokens = tokens,
                      .seqs = parts,
                      .logit_rows = logit_rows,
                      .attention = by_plan != NULL ? attention : NULL};
    struct sample_args sample = {.logits = model_forward(model, &b),
                                 .vocab = model_info(model)->shape.vocab,
                                 .n_rows = n,
                                 .rows = rows};
    be->ops->sample(be, &sample);
    must(be->ops->sync(be));
    for (uint32_t i = 0; i < n; i++) {
        CHECK(!rows[i].bad);
        next_token[first + i] = rows[i].token;
    }
}

static void prefill(uint32_t stream, uint32_t n)
{
    uint32_t tokens[CHUNK];
    for (uint32_t at = 0; at < n; at += CHUNK) {
        uint32_t rows = n - at < CHUNK ? n - at : CHUNK;
        for (uint32_t i = 0; i < rows; i++)
            tokens[i] = random_id();
        step(stream, 1, at, rows, tokens);
    }
}

static double run_prefill(uint32_t n)
{
    open_seqs(1, n);
    double start = now_s();
    prefill(0, n);
    double seconds = now_s() - start;
    close_seqs();
    return n / seconds;
}

static double run_decode(uint32_t streams, uint32_t context, uint32_t steps)
{
    open_seqs(streams, context + steps);
    for (uint32_t i = 0; i < streams; i++)
        prefill(i, context);
    double start = now_s();
    for (uint32_t k = 0; k < steps; k++)
        step(0, streams, context + k, 1, next_token);
    double seconds = now_s() - start;
    close_seqs();
    return streams * steps / seconds;
}

/* ---- by plan ---- */

static void seal_due(const struct sparse_instance *in, struct kv_seq *s, uint32_t n_rows)
{
    while (s->n_segments < kv_segments_due(n_rows)) {
        struct kv_seal seal;
        must(kv_seq_seal_begin(kv, s, NULL, &seal));
        attention_seal(attention, in, seal.segment, seal.record, seal.from, seal.to);
        kv_seq_seal_end(kv, s, &seal);
    }
}

static double rate_of(struct kv_seq *s, uint32_t *at, uint32_t steps)
{
    double start = 0;
    for (uint32_t k = 0; k < SETTLE_STEPS + steps; k++) {
        if (k == SETTLE_STEPS)
            start = now_s();
        step(0, 1, (*at)++, 1, next_token);
        kv_seq_step(kv, s);
    }
    return steps / (now_s() - start);
}

static void run_plan(const char *plugin, float budget, uint32_t context, uint32_t steps)
{
    uint32_t i, n_hit, at = 0, tokens[CHUNK], end = context + 3 * (steps + SETTLE_STEPS);
    must(sparse_find(plugin, &i));
    const struct sparse_choice choice = sparse_choice_make(i, budget);
    const struct sparse_instance *in = attention_instance(attention, &choice);
    struct kv_seq *s = &seqs[0];
    if (in == NULL)
        must(ERR_ARG);
    const struct kv_open o = {
        .max_rows = end,
        .layout = {.layout_id = in->layout_id, .digest_id = in->digest_id, .seals = true}};
    must(kv_seq_open(kv, s, &o, 0, &n_hit));
    while (at < context) {
        uint32_t n = kv_next_border(at) - at;
        n = n < CHUNK ? n : CHUNK;
        n = n < context - at ? n : context - at;
        for (uint32_t k = 0; k < n; k++)
            tokens[k] = random_id();
        seal_due(in, s, at);
        step(0, 1, at, n, tokens);
        at += n;
    }
    seal_due(in, s, at);
    CHECK(kv_next_border(at) >= end);
    double dense = rate_of(s, &at, steps);
    by_plan = in;
    double resident = rate_of(s, &at, steps);
    must(kv_seq_spill(kv, s, PRESET * attention_min_slots(in, kv_geometry(kv), context)));
    double spilled = rate_of(s, &at, steps);
    by_plan = NULL;
    struct kv_counts c;
    kv_seq_close(kv, s);
    kv_counts(kv, &c);
    attention_release(attention, in);
    printf("%.2f %.2f %.2f (hits %.3f)\n", dense, resident, spilled,
           (double)c.page_hits / (double)(c.page_hits + c.page_misses));
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: engine MODEL.gguf [THREADS [ISA [R]]]\n");
        return 2;
    }
    struct cpu_options cpu = {.isa = argc > 3 ? argv[3] : "auto",
                              .n_threads = argc > 2 ? (uint32_t)atoi(argv[2]) : 0,
                              .pin = false /* as the daemon's default */};
    must(cpu_backend_open(&be, &cpu));
    must(model_load(&model, be, argv[1], MAX_POSITIONS));
    const struct model_shape *s = &model_info(model)->shape;
    uint32_t block_rows = argc > 4 ? (uint32_t)atoi(argv[4]) : 16;
    static uint8_t classes[256 * 64];
    static struct lane_place lanes[256 * 64];
    struct kv_geometry geo = kv_geometry_make(block_rows, s->layers, s->kv_heads, s->head_dim);
    CHECK(s->layers * s->kv_heads <= ARRAY_LEN(lanes));
    for (uint32_t i = 0; i < EXEMPT_LAYERS * s->kv_heads; i++)
        classes[i] = LANE_DENSE;
    kv_geometry_classify(&geo, classes, lanes, 0, 0);
    uint32_t blocks = ARENA_ROWS / block_rows;
    struct kv_config cfg = {.geo = geo,
                            .blocks = {{blocks, blocks}, {blocks, 0}},
                            .n_records = ARENA_ROWS / SEGMENT_ROWS,
                            .record_lane_bytes = 64 << 10};
    must(kv_create(&kv, be, &cfg));
    must(model_reserve(model, CHUNK, MAX_STREAMS));
    must(attention_create(&attention, be, kv_memory(kv), s->heads, model_info(model)->attn_scale,
                          MAX_STREAMS, MAX_POSITIONS));
    printf("ready %s\n", be->ops->describe(be));
    fflush(stdout);

    char line[128];
    while (fgets(line, sizeof line, stdin) != NULL) {
        unsigned a, b, c;
        char name[16];
        double rate = 0;
        float share;
        if (sscanf(line, "decode %u %u %u", &a, &b, &c) == 3)
            rate = run_decode(a, b, c);
        else if (sscanf(line, "prefill %u", &a) == 1)
            rate = run_prefill(a);
        else if (sscanf(line, "plan %15s %f %u %u", name, &share, &a, &b) == 4) {
            run_plan(name, share, a, b);
            fflush(stdout);
            continue;
        }
        printf("%.2f\n", rate);
        fflush(stdout);
    }
    attention_destroy(attention);
    kv_destroy(kv);
    model_destroy(model);
    be->ops->close(be);
    return 0;
}
