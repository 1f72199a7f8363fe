/* The default model against transformers in float32, and against itself cut and batched differently.
 *
 * The golden file holds, for 2 x 1,024 positions of a novel, the 32 best next tokens with their log
 * probabilities and the mass of the rest; KL is computed over those 33 outcomes, a lower bound of the
 * full one. make_golden.py explains it and measures how tight it is, from the logits that
 * SPIND_DUMP_LOGITS=file makes this program write. SPIND_ISA chooses the instruction set. */
#include "tests/model_rig.h"
#include "tests/tap.h"

#include <math.h>

struct golden {
    uint32_t chunks, len, k, vocab;
    uint32_t *tokens;  /* [chunks][len] */
    uint16_t *top_ids; /* [chunks][len][k] */
    float *top_logp;   /* [chunks][len][k] */
    float *rest_logp;  /* [chunks][len] */
};

static void must_read(void *dst, size_t bytes, FILE *f)
{
    if (fread(dst, 1, bytes, f) == bytes)
        return;
    printf("Bail out! the golden file is too short\n");
    exit(1);
}

static void golden_read(struct golden *g, const char *path)
{
    char magic[8];
    FILE *f = fopen(path, "rb");
    if (f == NULL) {
        printf("Bail out! no golden file %s: tests run in the root of the repository\n", path);
        exit(1);
    }
    must_read(magic, sizeof magic, f);
    must_read(g, 4 * sizeof(uint32_t), f);
    CHECK(memcmp(magic, "SPGOLD1\n", 8) == 0 && g->vocab <= 65536 && g->k <= 64);
    size_t n = (size_t)g->chunks * g->len;
    must_read(g->tokens = mem_alloc(n * 4), n * 4, f);
    must_read(g->top_ids = mem_alloc(n * g->k * 2), n * g->k * 2, f);
    must_read(g->top_logp = mem_alloc(n * g->k * 4), n * g->k * 4, f);
    must_read(g->rest_logp = mem_alloc(n * 4), n * 4, f);
    fclose(f);
}

static void golden_free(struct golden *g)
{
    mem_free(g->tokens);
    mem_free(g->top_ids);
    mem_free(g->top_logp);
    mem_free(g->rest_logp);
}

static double kl_of(const struct golden *g, size_t pos, const float *logits)
{
    return rig_kl(g->k, g->top_ids + pos * g->k, g->top_logp + pos * g->k, g->rest_logp[pos],
                  logits, g->vocab);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void logits_agree_with_transformers(struct backend *be, struct model *m,
                                           const struct golden *g)
{
    enum { CHUNK = 256 };
    struct rig r;
    size_t n = (size_t)g->chunks * g->len, same = 0;
    double *kl = mem_alloc(n * sizeof *kl), sum = 0;
    const char *dump_path = getenv("SPIND_DUMP_LOGITS");
    FILE *dump = dump_path ? fopen(dump_path, "wb") : NULL;
    rig_open(&r, be, m, 16, g->chunks, g->len);
    for (size_t pos = 0; pos < n; pos += CHUNK) {
        struct rig_part part = {.seq = (uint32_t)(pos / g->len),
                                .first_pos = (uint32_t)(pos % g->len),
                                .n = CHUNK,
                                .tokens = g->tokens + pos};
        const float *logits = rig_step(&r, &part, 1, NULL, 0);
        if (dump != NULL)
            fwrite(logits, sizeof *logits, (size_t)CHUNK * g->vocab, dump);
        for (size_t i = 0; i < CHUNK; i++) {
            const float *row = logits + i * g->vocab;
            sum += kl[pos + i] = kl_of(g, pos + i, row);
            same += rig_best(row, g->vocab) == g->top_ids[(pos + i) * g->k];
        }
    }
    if (dump != NULL)
        fclose(dump);
    rig_close(&r);
    qsort(kl, n, sizeof *kl, ascending);
    double mean = sum / (double)n, agree = (double)same / (double)n;
    printf("# %s\n", be->ops->describe(be));
    printf("# against transformers in float32 | this | bar\n");
    printf("# positions of real text          | %zu | 2000\n", n);
    printf("# mean KL (top %u and rest)        | %.2e | < 1e-3\n", g->k, mean);
    printf("# KL, 99th percentile             | %.2e |\n", kl[n * 99 / 100]);
    printf("# KL, largest                     | %.2e |\n", kl[n - 1]);
    printf("# same most likely token          | %.2f %% | > 99 %%\n", 100 * agree);
    ok(mean < 1e-3, "the mean KL divergence from transformers is below 1e-3");
    ok(agree > 0.99, "the most likely token is the same in more than 99 %% of the positions");
    mem_free(kl);
}

/* Keeps the logits of every 16th position and of the last one. */
struct trace {
    uint32_t len, vocab;
    float *rows; /* [kept][vocab] */
};

enum { KEEP_EVERY = 16 };

static bool is_kept(const struct trace *t, uint32_t pos)
{
    return pos % KEEP_EVERY == 0 || pos + 1 == t->len;
}

static size_t kept_bytes(const struct trace *t)
{
    return (size_t)((t->len - 1) / KEEP_EVERY + 2) * t->vocab * sizeof(float);
}

static void run_in_chunks(struct rig *r, struct trace *t, const uint32_t *tokens, uint32_t chunk)
{
    size_t n_kept = 0;
    for (uint32_t pos = 0; pos < t->len; pos += chunk) {
        uint32_t n = t->len - pos < chunk ? t->len - pos : chunk, n_rows = 0, rows[RIG_MAX_ROWS];
        for (uint32_t i = 0; i < n; i++)
            if (is_kept(t, pos + i))
                rows[n_rows++] = i;
        struct rig_part part = {.seq = 0, .first_pos = pos, .n = n, .tokens = tokens + pos};
        const float *logits = rig_step(r, &part, 1, rows, n_rows);
        memcpy(t->rows + n_kept * t->vocab, logits, (size_t)n_rows * t->vocab * sizeof *logits);
        n_kept += n_rows;
    }
}

static void chunks_change_nothing(struct backend *be, struct model *m, const struct golden *g,
                                  uint32_t R)
{
    static const uint32_t chunks[] = {1, 16, 512};
    struct trace whole = {.len = 600, .vocab = g->vocab}, cut = whole;
    struct rig r;
    whole.rows = mem_alloc(kept_bytes(&whole));
    cut.rows = mem_alloc(kept_bytes(&cut));
    rig_open(&r, be, m, R, 1, whole.len);
    run_in_chunks(&r, &whole, g->tokens, whole.len);
    for (size_t i = 0; i < ARRAY_LEN(chunks); i++) {
        memset(cut.rows, 0, kept_bytes(&cut));
        run_in_chunks(&r, &cut, g->tokens, chunks[i]);
        ok(memcmp(cut.rows, whole.rows, kept_bytes(&cut)) == 0,
           "R = %u: chunks of %u give the logits of the whole prompt, bit for bit", R, chunks[i]);
    }
    rig_close(&r);
    mem_free(whole.rows);
    mem_free(cut.rows);
}

enum { SEQS = 16, DECODES = 6 };

static uint32_t prompt_len(uint32_t seq)
{
    return 3 + seq * 11;
}

/* Prompt and decode steps of one sequence by itself; out: [1 + DECODES][vocab]. */
static void run_alone(struct rig *r, const uint32_t *tokens, uint32_t seq, float *out,
                      uint32_t vocab)
{
    for (uint32_t step = 0; step <= DECODES; step++) {
        uint32_t from = step == 0 ? 0 : prompt_len(seq) + step - 1;
        struct rig_part part = {.seq = seq,
                                .first_pos = from,
                                .n = step == 0 ? prompt_len(seq) : 1,
                                .tokens = tokens + from};
        const uint32_t last = part.n - 1;
        memcpy(out + (size_t)step * vocab, rig_step(r, &part, 1, &last, 1), vocab * sizeof *out);
    }
}

/* All together: sequence s begins in step s % 3, so prompts meet decodes. out: [SEQS][1 + DECODES][vocab] */
static void run_together(struct rig *r, const struct golden *g, float *out)
{
    for (uint32_t step = 0; step <= DECODES + 2; step++) {
        struct rig_part parts[SEQS];
        uint32_t last[SEQS], n = 0, rows = 0;
        for (uint32_t s = 0; s < SEQS; s++) {
            if (step < s % 3 || step - s % 3 > DECODES)
                continue;
            uint32_t from = step == s % 3 ? 0 : prompt_len(s) + step - s % 3 - 1;
            parts[n] = (struct rig_part){.seq = s,
                                         .first_pos = from,
                                         .n = from ? 1 : prompt_len(s),
                                         .tokens = g->tokens + s * 50 + from};
            rows += parts[n].n;
            last[n++] = rows - 1;
        }
        const float *logits = rig_step(r, parts, n, last, n);
        for (uint32_t i = 0; i < n; i++) {
            size_t at = (size_t)parts[i].seq * (1 + DECODES) + step - parts[i].seq % 3;
            memcpy(out + at * g->vocab, logits + (size_t)i * g->vocab, g->vocab * sizeof *out);
        }
    }
}

static void company_changes_nothing(struct backend *be, struct model *m, const struct golden *g,
                                    uint32_t R)
{
    size_t one = (size_t)(1 + DECODES) * g->vocab;
    float *together = mem_alloc(SEQS * one * sizeof *together),
          *alone = mem_alloc(one * sizeof *alone);
    uint32_t equal = 0;
    struct rig r;
    rig_open(&r, be, m, R, SEQS, prompt_len(SEQS) + DECODES);
    run_together(&r, g, together);
    for (uint32_t s = 0; s < SEQS; s++) {
        run_alone(&r, g->tokens + s * 50, s, alone, g->vocab);
        equal += memcmp(alone, together + s * one, one * sizeof *alone) == 0;
    }
    is_int(equal, SEQS, "alone or among 16 the logits are the same, bit for bit");
    rig_close(&r);
    mem_free(together);
    mem_free(alone);
}

static void threads_change_nothing(struct model *m, struct backend *be, const struct golden *g,
                                   const struct cpu_options *o)
{
    struct cpu_options single = *o;
    struct backend *be1;
    struct model *m1;
    struct rig r;
    struct trace many = {.len = 64, .vocab = g->vocab}, one = many;
    single.n_threads = o->n_threads == 1 ? 3 : 1;
    many.rows = mem_alloc(kept_bytes(&many));
    one.rows = mem_alloc(kept_bytes(&one));
    rig_open(&r, be, m, 16, 1, 64);
    run_in_chunks(&r, &many, g->tokens, 24);
    rig_close(&r);
    rig_must(cpu_backend_open(&be1, &single));
    rig_must(model_load(&m1, be1, rig_model_path(), 256));
    rig_must(model_reserve(m1, 64, 64));
    rig_open(&r, be1, m1, 16, 1, 64);
    run_in_chunks(&r, &one, g->tokens, 24);
    rig_close(&r);
    ok(memcmp(many.rows, one.rows, kept_bytes(&one)) == 0, "the number of threads changes nothing");
    model_destroy(m1);
    be1->ops->close(be1);
    mem_free(many.rows);
    mem_free(one.rows);
}

int main(void)
{
    struct cpu_options o = {.isa = getenv("SPIND_ISA") ? getenv("SPIND_ISA") : "auto"};
    struct backend *be;
    struct model *m;
    struct golden g;
    const char *path = rig_model_path();
    golden_read(&g, "tests/golden/smollm2-austen.bin");
    rig_must(cpu_backend_open(&be, &o));
    uint64_t start = clock_us();
    rig_must(model_load(&m, be, path, 0));
    printf("# loaded in %.3f s\n", (double)(clock_us() - start) / 1e6);
    rig_must(model_reserve(m, 1100, 256));
    const struct model_info *info = model_info(m);
    ok(info->shape.layers == 30 && info->shape.vocab == g.vocab && info->n_params == 134515008,
       "the default model has 134,515,008 parameters");
    ok(info->n_end_ids == 2 && info->end_ids[0] == 2 && info->end_ids[1] == 0,
       "its texts end with <|im_end|> or <|endoftext|>");
    logits_agree_with_transformers(be, m, &g);
    for (uint32_t R = 8; R <= 16; R += 8) {
        chunks_change_nothing(be, m, &g, R);
        company_changes_nothing(be, m, &g, R);
    }
    threads_change_nothing(m, be, &g, &o);
    model_destroy(m);
    be->ops->close(be);
    golden_free(&g);
    return tap_done();
}
