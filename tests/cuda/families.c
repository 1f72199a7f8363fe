/* Made-up models of every architecture on both backends: the same weights, bit for bit, and the same
 * logits but for the rounding of bf16. So what an architecture adds before RoPE is compared too. */
#include "kernels/cuda_api.h"
#include "kernels/log.h"
#include "tests/model_rig.h"
#include "tests/tap.h"

#include <math.h>
#include <unistd.h>

/* Contexts of 1,100 tokens have all the splits that small models' attention has. */
enum { TOKENS = 1100, VOCAB = 301, SEQS = 3 };
static uint32_t n_tokens = TOKENS; /* of a sequence: fewer under a sanitizer */

static struct backend *cpu, *gpu;
static const struct backend_ops *gpu_ops; /* but for layers: counted here */
static uint32_t n_layers_steps;
static char path[] = "/tmp/spind-families-XXXXXX";

static void describe(const char *class, const char *more)
{
    FILE *f = fopen(path, "w");
    if (f == NULL)
        rig_must(ERR_IO);
    fprintf(f,
            "{\"architectures\": [\"%s\"], \"num_hidden_layers\": 3, \"vocab_size\": %d, "
            "\"max_position_embeddings\": 4096, %s}",
            class, VOCAB, more);
    fclose(f);
}

struct side {
    struct backend *be;
    struct model *m;
    struct rig r;
    float *logits; /* [TOKENS][VOCAB] on the host */
};

static void open_side(struct side *s, struct backend *be)
{
    s->be = be;
    rig_must(model_load_dummy(&s->m, be, path, 0));
    rig_must(model_reserve(s->m, TOKENS, TOKENS));
    rig_open(&s->r, be, s->m, 16, SEQS, TOKENS);
    s->logits = mem_alloc((size_t)TOKENS * VOCAB * sizeof *s->logits);
}

static void close_side(struct side *s)
{
    rig_close(&s->r);
    model_destroy(s->m);
    mem_free(s->logits);
}

static bool count_layers(struct backend *be, const struct layers_args *a)
{
    bool takes = gpu_ops->layers(be, a);
    n_layers_steps += takes;
    return takes;
}

/* Some rows at once, as a prompt, or one by one, as decoding does. */
static void run(struct side *s, const uint32_t *tokens, uint32_t piece)
{
    for (uint32_t pos = 0, n; pos < n_tokens; pos += n) {
        n = n_tokens - pos < piece ? n_tokens - pos : piece;
        struct rig_part part = {.first_pos = pos, .n = n, .tokens = tokens + pos};
        const float *logits = rig_step(&s->r, &part, 1, NULL, 0);
        s->be->ops->copy(s->be, s->logits + (size_t)pos * VOCAB, logits,
                         (size_t)n * VOCAB * sizeof *logits);
        rig_must(s->be->ops->sync(s->be));
    }
}

/* The same tokens in several sequences, a row of each in a step; logits: of the first, and not a number where another
 * differs. */
static void run_beside(struct side *s, const uint32_t *tokens, uint32_t n)
{
    float *all = mem_alloc((size_t)n * VOCAB * sizeof *all);
    for (uint32_t pos = 0; pos < n_tokens; pos++) {
        struct rig_part parts[SEQS];
        for (uint32_t i = 0; i < n; i++)
            parts[i] =
                (struct rig_part){.seq = i, .first_pos = pos, .n = 1, .tokens = tokens + pos};
        const float *logits = rig_step(&s->r, parts, n, NULL, 0);
        s->be->ops->copy(s->be, all, logits, (size_t)n * VOCAB * sizeof *all);
        rig_must(s->be->ops->sync(s->be));
        float *to = s->logits + (size_t)pos * VOCAB;
        memcpy(to, all, VOCAB * sizeof *to);
        for (uint32_t i = 1; i < n; i++)
            if (memcmp(all + (size_t)i * VOCAB, all, VOCAB * sizeof *to) != 0)
                to[0] = NAN;
    }
    mem_free(all);
}

/* Root of the mean squared difference, in deviations of the CPU's logits. */
static double distance(const struct side *a, const struct side *b)
{
    double diff = 0, size = 0;
    for (size_t i = 0; i < (size_t)n_tokens * VOCAB; i++) {
        double x = (double)a->logits[i], y = (double)b->logits[i];
        diff += (x - y) * (x - y);
        size += x * x;
    }
    return sqrt(diff / size);
}

static const struct family {
    const char *class, *more, *name;
} families[] = {
    {"LlamaForCausalLM",
     "\"hidden_size\": 256, \"intermediate_size\": 300, \"num_attention_heads\": 4, "
     "\"num_key_value_heads\": 2, \"rope_theta\": 500000, \"rope_scaling\": {\"rope_type\": "
     "\"llama3\", \"factor\": 8, \"low_freq_factor\": 1, \"high_freq_factor\": 4, "
     "\"original_max_position_embeddings\": 16}",
     "llama 3.1, heads of 64"},
    {"Qwen2ForCausalLM",
     "\"hidden_size\": 512, \"intermediate_size\": 192, \"num_attention_heads\": 4, "
     "\"num_key_value_heads\": 1, \"tie_word_embeddings\": true",
     "qwen2, heads of 128"},
    {"Qwen3ForCausalLM",
     "\"hidden_size\": 320, \"intermediate_size\": 256, \"num_attention_heads\": 8, "
     "\"num_key_value_heads\": 2, \"head_dim\": 128",
     "qwen3, heads of 128"},
    {"Qwen3ForCausalLM",
     "\"hidden_size\": 192, \"intermediate_size\": 256, \"num_attention_heads\": 6, "
     "\"num_key_value_heads\": 6, \"head_dim\": 64",
     "qwen3, heads of 64, as many KV heads"},
};

/* limit: how far apart logits may be. A key that differs in its last bits may be another number of fp8. */
static void compare(const struct family *f, double limit)
{
    const char *name = f->name;
    struct side a, b;
    uint32_t tokens[TOKENS];
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = (i * 7919u + 13) % VOCAB;
    describe(f->class, f->more);
    open_side(&a, cpu);
    open_side(&b, gpu);
    run(&a, tokens, n_tokens);
    run(&b, tokens, n_tokens);
    double all = distance(&a, &b);
    n_layers_steps = 0;
    run(&b, tokens, 1);
    double one = distance(&a, &b);
    run_beside(&b, tokens, 2);
    double two = distance(&a, &b);
    run_beside(&b, tokens, SEQS);
    double beside = distance(&a, &b);
    if (gpu_ops->layers != NULL && getenv("SPIND_CUDA_NO_LAYERS") == NULL)
        is_int(n_layers_steps, rig_kept == KV_BF16 ? 3 * n_tokens : 0,
               "steps of few rows are one kernel each, but for pages of fp8");
    ok(all < limit && one < limit, "%s: the logits are the CPU's (%.1e apart, one by one %.1e)",
       name, all, one);
    ok(two < limit && beside < limit,
       "%s: so are those of 2 and %d sequences side by side (%.1e, %.1e), which do not differ",
       name, SEQS, two, beside);
    close_side(&a);
    close_side(&b);
}

/* Through embed, which computes nothing: every number of a table whose rows are no multiple of anything. */
static void made_up_numbers_are_the_same(void)
{
    enum { ROWS = 77, COLS = 203, N = ROWS * COLS };
    struct backend *both[] = {cpu, gpu};
    float *host[2];
    uint32_t tokens[ROWS];
    for (uint32_t i = 0; i < ROWS; i++)
        tokens[i] = i;
    for (int i = 0; i < 2; i++) {
        struct backend *be = both[i];
        struct weight *w;
        const struct weight_desc d = {
            .cols = COLS,
            .n_parts = 2,
            .embedding = true,
            .parts = {{.name = "a", .type = DTYPE_BF16, .rows = 32, .seed = 7},
                      {.name = "b", .type = DTYPE_BF16, .rows = ROWS - 32, .seed = 1ull << 63}}};
        float *out = be->ops->alloc(be, N * sizeof *out);
        rig_must(be->ops->weight_create(be, &d, &w));
        be->ops->embed(
            be, &(struct embed_args){.table = w, .tokens = tokens, .n_rows = ROWS, .out = out});
        host[i] = mem_alloc(N * sizeof *out);
        be->ops->copy(be, host[i], out, N * sizeof *out);
        rig_must(be->ops->sync(be));
        be->ops->weight_destroy(be, w);
        be->ops->free(be, out, N * sizeof *out);
    }
    double sum = 0, squares = 0;
    for (int i = 0; i < N; i++) {
        sum += (double)host[0][i];
        squares += (double)host[0][i] * (double)host[0][i];
    }
    int bad = 0;
    for (int i = 0; i < N; i++)
        if (host[0][i] != host[1][i] && ++bad < 6)
            printf("#   row %d number %d: %.9g, CPU %.9g\n", i / COLS, i % COLS, (double)host[1][i],
                   (double)host[0][i]);
    if (!ok(bad == 0, "made-up weights are the same, bit for bit"))
        printf("#   %d of %d are not\n", bad, (int)N);
    ok(fabs(sum / N) < 2e-3 && fabs(squares / N * COLS - 1) < 0.05,
       "around 0, with a deviation of 1 / sqrt(cols)");
    mem_free(host[0]);
    mem_free(host[1]);
}

int main(void)
{
    const struct cpu_options usual = {.isa = "auto"};
    int fd = mkstemp(path);
    if (fd < 0)
        return 1;
    close(fd);
    log_set_level(LOG_ERROR);
    rig_must(cpu_backend_open(&cpu, &usual));
    rig_must(spind_cuda_open(&gpu, 0));
    struct backend_ops counted = *gpu->ops;
    gpu_ops = gpu->ops;
    counted.layers = gpu_ops->layers != NULL ? count_layers : NULL;
    gpu->ops = &counted;
    const size_t n_families = tap_small() ? 1 : ARRAY_LEN(families);
    n_tokens = tap_small() ? 40 : TOKENS;
    made_up_numbers_are_the_same();
    for (size_t i = 0; i < n_families; i++)
        compare(&families[i], 2e-2);
    rig_kept = KV_E4M3;
    printf("# pages of fp8\n");
    for (size_t i = 0; i < n_families; i++)
        compare(&families[i], 6e-2);
    unlink(path);
    gpu->ops = gpu_ops;
    gpu->ops->close(gpu);
    cpu->ops->close(cpu);
    return tap_done();
}
