/* Steps that are made larger by rows of nobody's (model.h), so that they run as steps before them did: what
 * sequences get is what they get without, and nobody's pages are written. Also on the CPU, bit for bit. */
#include "kernels/cuda_api.h"
#include "kernels/log.h"
#include "tests/model_rig.h"
#include "tests/tap.h"

#include <unistd.h>

enum { VOCAB = 301, SEQS = 40, POSITIONS = 24, PROMPT = 7, STEPS = 6 };

static char path[] = "/tmp/spind-spare-XXXXXX";

static void describe(void)
{
    FILE *f = fopen(path, "w");
    if (f == NULL)
        rig_must(ERR_IO);
    fprintf(f,
            "{\"architectures\": [\"LlamaForCausalLM\"], \"num_hidden_layers\": 3, \"vocab_size\": "
            "%d, \"max_position_embeddings\": 4096, \"hidden_size\": 256, \"intermediate_size\": "
            "320, \"num_attention_heads\": 4, \"num_key_value_heads\": 2}",
            VOCAB);
    fclose(f);
}

struct side {
    struct backend *be;
    struct model *m;
    struct rig r;
    float *logits;  /* [SEQS][VOCAB] on the host */
    uint8_t *pages; /* the arena's */
};

static void open_side(struct side *s, struct backend *be)
{
    s->be = be;
    rig_must(model_load_dummy(&s->m, be, path, 0));
    rig_must(model_reserve(s->m, 512, 512));
    rig_open(&s->r, be, s->m, 8, SEQS, POSITIONS);
    s->logits = mem_alloc((size_t)SEQS * VOCAB * sizeof *s->logits);
    s->pages = mem_alloc(s->r.arena_bytes);
}

static void close_side(struct side *s)
{
    rig_close(&s->r);
    model_destroy(s->m);
    mem_free(s->logits);
    mem_free(s->pages);
}

static uint32_t token_at(uint32_t seq, uint32_t pos)
{
    return (seq * 7919u + pos * 104729u + 13) % VOCAB;
}

/* Positions [pos, pos + n) of the first n_seqs sequences; the last row's logits of each are kept. */
static void run(struct side *s, uint32_t n_seqs, uint32_t pos, uint32_t n, uint32_t n_spare)
{
    static uint32_t tokens[SEQS][PROMPT];
    struct rig_part parts[SEQS];
    for (uint32_t i = 0; i < n_seqs; i++) {
        for (uint32_t j = 0; j < n; j++)
            tokens[i][j] = token_at(i, pos + j);
        parts[i] = (struct rig_part){.seq = i, .first_pos = pos, .n = n, .tokens = tokens[i]};
    }
    s->r.n_spare = n_spare;
    const float *logits = rig_step(&s->r, parts, n_seqs, NULL, 0);
    for (uint32_t i = 0; i < n_seqs; i++)
        s->be->ops->copy(s->be, s->logits + (size_t)i * VOCAB,
                         logits + ((size_t)i * n + n - 1) * VOCAB, VOCAB * sizeof *logits);
    s->be->ops->copy(s->be, s->pages, s->r.arena, s->r.arena_bytes);
    rig_must(s->be->ops->sync(s->be));
}

static double apart(const struct side *a, const struct side *b, uint32_t n_seqs)
{
    double diff = 0, size = 0;
    for (size_t i = 0; i < (size_t)n_seqs * VOCAB; i++) {
        double x = (double)a->logits[i], y = (double)b->logits[i];
        diff += (x - y) * (x - y);
        size += x * x;
    }
    return sqrt(diff / size);
}

/* Of numbers of pages: how many are set in one and not in the other. */
static uint32_t touched(const struct side *a, const struct side *b)
{
    uint32_t n = 0;
    for (size_t i = 0; i + 1 < a->r.arena_bytes; i += 2)
        n += (a->pages[i] | a->pages[i + 1]) == 0 ? (b->pages[i] | b->pages[i + 1]) != 0 : 0;
    return n;
}

static void compare(struct backend *be, uint32_t n_seqs, uint32_t n_spare, bool exact)
{
    struct side plain, spare;
    double worst = 0;
    uint32_t wrong = 0;
    open_side(&plain, be);
    open_side(&spare, be);
    run(&plain, n_seqs, 0, PROMPT, 0);
    run(&spare, n_seqs, 0, PROMPT, 0);
    for (uint32_t i = 0; i < STEPS; i++) {
        run(&plain, n_seqs, PROMPT + i, 1, 0);
        run(&spare, n_seqs, PROMPT + i, 1, n_spare);
        double d = apart(&plain, &spare, n_seqs);
        worst = d > worst || d != d ? d : worst;
        wrong += touched(&plain, &spare);
    }
    ok(exact ? worst == 0 : worst < 1e-2,
       "%s: %u rows and %u of nobody's: the same logits (%.1e apart)", be->ops->name, n_seqs,
       n_spare, worst);
    ok(wrong == 0 && (!exact || memcmp(plain.pages, spare.pages, plain.r.arena_bytes) == 0),
       "and the same pages");
    close_side(&plain);
    close_side(&spare);
}

int main(void)
{
    static const uint32_t sizes[][2] = {{1, 1},  {3, 5},  {9, 1},   {11, 5},
                                        {33, 7}, {39, 1}, {40, 216}};
    struct backend *cpu, *gpu;
    const struct cpu_options usual = {.isa = "auto", .n_threads = 2};
    int fd = mkstemp(path);
    if (fd < 0)
        return 1;
    close(fd);
    describe();
    log_set_level(LOG_ERROR);
    rig_must(cpu_backend_open(&cpu, &usual));
    compare(cpu, 9, 3, true);
    cpu->ops->close(cpu);
    if (spind_cuda_open(&gpu, 0) == OK) {
        for (size_t i = 0; i < (tap_small() ? 3 : ARRAY_LEN(sizes)); i++)
            compare(gpu, sizes[i][0], sizes[i][1], false);
        gpu->ops->close(gpu);
    } else {
        ok(0, "no device: %s", err_text());
    }
    unlink(path);
    return tap_done();
}
