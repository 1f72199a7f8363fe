/* How fast is the engine without server and scheduler: model_forward and greedy sampling?
 *
 * Does the same work as the llama.cpp loop in tests/bench/peer.py, which runs both in turn. Reads
 * commands on stdin, answers each with a line of tokens per second on stdout, and sleeps in between:
 *     decode STREAMS CONTEXT STEPS      after an untimed prefill of CONTEXT tokens each
 *     prefill TOKENS                    to the logits of the last one
 * usage: engine MODEL.gguf [THREADS [ISA]] */
#include "cache/kv.h"
#include "engine/model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    BLOCK_ROWS = 16,
    CHUNK = 512, /* rows of a prefill step, as llama.cpp's n_ubatch */
    MAX_STREAMS = 64,
    MAX_POSITIONS = 8192,
    ARENA_ROWS = 16384,
};

static struct backend *be;
static struct model *model;
static struct kv *kv;
static struct kv_seq seqs[MAX_STREAMS];
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

/* One step: n_rows[i] tokens of each sequence from first_pos on; the last row of each is sampled. */
static void step(uint32_t first, uint32_t n, uint32_t first_pos, uint32_t n_rows,
                 const uint32_t *tokens)
{
    struct batch_seq parts[MAX_STREAMS];
    uint32_t logit_rows[MAX_STREAMS];
    static struct sample_row rows[MAX_STREAMS];
    for (uint32_t i = 0; i < n; i++) {
        must(kv_seq_grow(kv, &seqs[first + i], first_pos + n_rows));
        parts[i] = (struct batch_seq){.first_row = i * n_rows,
                                      .n_rows = n_rows,
                                      .first_pos = first_pos,
                                      .blocks = {seqs[first + i].table[LANE_SPARSE]}};
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
                      .logit_rows = logit_rows};
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

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: engine MODEL.gguf [THREADS [ISA]]\n");
        return 2;
    }
    struct cpu_options cpu = {.isa = argc > 3 ? argv[3] : "auto",
                              .n_threads = argc > 2 ? (uint32_t)atoi(argv[2]) : 0,
                              .pin = false /* as the daemon's default */};
    must(cpu_backend_open(&be, &cpu));
    must(model_load(&model, be, argv[1], MAX_POSITIONS));
    const struct model_shape *s = &model_info(model)->shape;
    struct kv_config cfg = {.geo =
                                kv_geometry_make(BLOCK_ROWS, s->layers, s->kv_heads, s->head_dim),
                            .blocks = {{ARENA_ROWS / BLOCK_ROWS}}};
    must(kv_create(&kv, be, &cfg));
    must(model_reserve(model, CHUNK, MAX_STREAMS));
    printf("ready %s\n", be->ops->describe(be));
    fflush(stdout);

    char line[128];
    while (fgets(line, sizeof line, stdin) != NULL) {
        unsigned a, b, c;
        double rate = 0;
        if (sscanf(line, "decode %u %u %u", &a, &b, &c) == 3)
            rate = run_decode(a, b, c);
        else if (sscanf(line, "prefill %u", &a) == 1)
            rate = run_prefill(a);
        printf("%.2f\n", rate);
        fflush(stdout);
    }
    kv_destroy(kv);
    model_destroy(model);
    be->ops->close(be);
    return 0;
}
