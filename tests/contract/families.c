/* Every architecture against transformers in float32, on every instruction set: small random models, some
 * made up from a config.json on both sides, some whole GGUF files. tests/golden/make_families.py made the
 * file and says what is in it; the divergence is that of parity.c, over the best tokens and the rest. */
#include "kernels/log.h"
#include "tests/model_rig.h"
#include "tests/tap.h"

#include <math.h>
#include <unistd.h>

enum { MAX_ROWS = 512, MAX_TOP = 64 };

struct golden {
    uint32_t blob_bytes, n, k, vocab;
    char name[32];
    uint8_t *blob;
    uint32_t *tokens;  /* [n] */
    uint16_t *top_ids; /* [n][k] */
    float *top_logp;   /* [n][k] */
    float *rest_logp;  /* [n] */
};

static char path[] = "/tmp/spind-families-XXXXXX";

static void *read_array(FILE *f, size_t bytes)
{
    void *p = mem_alloc(bytes);
    if (fread(p, 1, bytes, f) == bytes)
        return p;
    printf("Bail out! the golden file is too short\n");
    exit(1);
}

static void read_model(struct golden *g, FILE *f)
{
    void *head = read_array(f, 48);
    memcpy(g, head, 48);
    mem_free(head);
    CHECK(g->n <= MAX_ROWS && g->k <= MAX_TOP && g->name[31] == '\0');
    g->blob = read_array(f, (g->blob_bytes + 3) / 4 * (size_t)4);
    g->tokens = read_array(f, g->n * sizeof *g->tokens);
    g->top_ids = read_array(f, (size_t)g->n * g->k * sizeof *g->top_ids);
    g->top_logp = read_array(f, (size_t)g->n * g->k * sizeof *g->top_logp);
    g->rest_logp = read_array(f, g->n * sizeof *g->rest_logp);
}

static void free_model(struct golden *g)
{
    mem_free(g->blob);
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

static struct model *load(struct backend *be, const struct golden *g)
{
    struct model *m;
    FILE *f = fopen(path, "wb");
    if (f == NULL || fwrite(g->blob, 1, g->blob_bytes, f) != g->blob_bytes || fclose(f) != 0)
        rig_must(ERR_IO);
    bool described = g->blob[0] == '{';
    rig_must((described ? model_load_dummy : model_load)(&m, be, path, 0));
    return m;
}

/* Another token may win only where two are almost as likely. */
static bool is_best(const struct golden *g, size_t pos, const float *row, uint32_t *n_same)
{
    const uint16_t *ids = g->top_ids + pos * g->k;
    const float *logp = g->top_logp + pos * g->k;
    uint32_t at = rig_best(row, g->vocab), i = 0;
    while (i < g->k && ids[i] != at)
        i++;
    *n_same += i == 0;
    return i < g->k && (double)logp[0] - (double)logp[i] < 0.1;
}

static struct {
    uint32_t n, same;
} tally; /* of one instruction set */

static void compare(struct backend *be, const char *isa, const struct golden *g)
{
    struct rig r;
    struct model *m = load(be, g);
    double sum = 0, worst = 0;
    bool good = true;
    uint32_t cut = g->n / 3;
    rig_must(model_reserve(m, g->n, g->n));
    rig_open(&r, be, m, 8, 1, g->n);
    for (uint32_t pos = 0, n; pos < g->n; pos += n) { /* in two pieces */
        n = pos == 0 ? cut : g->n - cut;
        struct rig_part part = {.first_pos = pos, .n = n, .tokens = g->tokens + pos};
        const float *logits = rig_step(&r, &part, 1, NULL, 0);
        for (uint32_t i = 0; i < n; i++) {
            const float *row = logits + (size_t)i * g->vocab;
            double kl = kl_of(g, pos + i, row);
            sum += kl;
            worst = kl <= worst ? worst : kl; /* NaN stays */
            good = is_best(g, pos + i, row, &tally.same) && good;
        }
    }
    double mean = sum / g->n;
    ok(model_info(m)->shape.vocab == g->vocab && mean < 1e-3 && worst < 1e-2,
       "%s, %s: the mean KL divergence from transformers is below 1e-3 (%.1e, largest %.1e)", isa,
       g->name, mean, worst);
    ok(good, "%s, %s: the most likely token is, too, but for near ties", isa, g->name);
    tally.n += g->n;
    rig_close(&r);
    model_destroy(m);
}

static void compare_all(const char *isa, const struct golden *all, uint32_t n)
{
    struct backend *be;
    const struct cpu_options o = {.isa = isa, .n_threads = 2};
    if (cpu_backend_open(&be, &o) != OK) {
        printf("# this machine has no %s\n", isa);
        return;
    }
    tally.n = tally.same = 0;
    for (uint32_t i = 0; i < n; i++)
        compare(be, isa, &all[i]);
    ok(tally.same * 100 >= tally.n * 99, "%s: the same most likely token in %u of %u positions",
       isa, tally.same, tally.n);
    be->ops->close(be);
}

int main(void)
{
    static const char *const isas[] = {"scalar", "avx2", "avx512"};
    enum { MOST = 32 };
    static struct golden all[MOST];
    char magic[8];
    uint32_t n;
    int fd = mkstemp(path);
    FILE *f = fopen("tests/golden/families.bin", "rb");
    if (fd < 0 || f == NULL) {
        printf("Bail out! no tests/golden/families.bin: tests run in the root of the repository\n");
        return 1;
    }
    close(fd);
    CHECK(fread(magic, 1, 8, f) == 8 && memcmp(magic, "SPFAMLY1", 8) == 0);
    CHECK(fread(&n, 4, 1, f) == 1 && n <= MOST);
    for (uint32_t i = 0; i < n; i++)
        read_model(&all[i], f);
    fclose(f);
    log_set_level(LOG_ERROR);
    for (size_t i = 0; i < ARRAY_LEN(isas); i++)
        compare_all(isas[i], all, n);
    for (uint32_t i = 0; i < n; i++)
        free_model(&all[i]);
    unlink(path);
    return tap_done();
}
