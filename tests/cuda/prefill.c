/* Chunks of a prompt that go to cuDNN, where there is one: against the CPU's attention, rows around them
 * untouched, in company, cut otherwise. Where there is no cuDNN our own kernel must pass the same. */
#include "tests/cuda/attend_world.h"

#include <time.h>

static struct backend *cpu, *gpu;

/* Relative distance of the results, greatest difference of the sums' logarithms. */
struct error {
    double out, lse;
};

static struct error compare(struct world *w, struct piece p)
{
    uint32_t first = w->seqs[p.seq].first_row + p.from;
    float *a = fetch(&w->gpu, w->gpu.out, w->out_width, first, p.n);
    float *b = fetch(&w->cpu, w->cpu.out, w->out_width, first, p.n);
    float *la = fetch(&w->gpu, w->gpu.lse, w->heads, first, p.n);
    float *lb = fetch(&w->cpu, w->cpu.lse, w->heads, first, p.n);
    struct error worst = {0, 0};
    for (uint32_t r = 0; r < p.n; r++) { /* every row: a bad one must not drown */
        double d = distance(a + r * w->out_width, b + r * w->out_width, w->out_width);
        worst.out = d <= worst.out ? worst.out : d; /* NaN stays */
    }
    for (size_t i = 0; i < (size_t)p.n * w->heads; i++) {
        double d = fabs((double)la[i] - (double)lb[i]);
        worst.lse = d <= worst.lse ? worst.lse : d;
    }
    mem_free(a);
    mem_free(b);
    mem_free(la);
    mem_free(lb);
    return worst;
}

/* Numbers of other rows than these that are not NaN any more. */
static size_t touched(struct world *w, const struct piece *p, uint32_t n)
{
    float *out = fetch(&w->gpu, w->gpu.out, w->out_width, 0, w->n_rows);
    float *lse = fetch(&w->gpu, w->gpu.lse, w->heads, 0, w->n_rows);
    size_t count = 0;
    for (uint32_t r = 0; r < w->n_rows; r++) {
        bool ours = false;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t first = w->seqs[p[i].seq].first_row + p[i].from;
            ours = ours || (r >= first && r < first + p[i].n);
        }
        for (size_t k = 0; !ours && k < w->out_width; k++)
            count += !isnan(out[r * w->out_width + k]);
        for (size_t k = 0; !ours && k < w->heads; k++)
            count += !isnan(lse[r * w->heads + k]);
    }
    mem_free(out);
    mem_free(lse);
    return count;
}

static void check(struct world *w, const struct piece *p, uint32_t n, const char *name,
                  const char *what)
{
    struct error worst = {0, 0};
    poison_results(w, &w->gpu);
    poison_results(w, &w->cpu);
    attend(w, &w->cpu, p, n, true);
    attend(w, &w->gpu, p, n, true);
    for (uint32_t i = 0; i < n; i++) {
        struct error e = compare(w, p[i]);
        worst.out = e.out <= worst.out ? worst.out : e.out;
        worst.lse = e.lse <= worst.lse ? worst.lse : e.lse;
    }
    ok(worst.out <= 1e-2 && worst.lse <= 2e-2, "%s: %s: every row as on the CPU (%.2g, lse %.2g)",
       name, what, worst.out, worst.lse);
    size_t strange = touched(w, p, n);
    ok(strange == 0, "%s: %s: no other row is touched (%zu)", name, what, strange);
}

/* The same rows in one call and in several, and again: the same bits. */
static void check_cuts(struct world *w, struct piece p, const uint32_t *cuts, uint32_t n_cuts,
                       const char *name)
{
    uint32_t first = w->seqs[p.seq].first_row + p.from, at = 0;
    poison_results(w, &w->gpu);
    attend(w, &w->gpu, &p, 1, false);
    float *want = fetch(&w->gpu, w->gpu.out, w->out_width, first, p.n);
    poison_results(w, &w->gpu);
    attend(w, &w->gpu, &p, 1, false);
    float *again = fetch(&w->gpu, w->gpu.out, w->out_width, first, p.n);
    ok(memcmp(want, again, p.n * w->out_width * 4) == 0, "%s: the same call gives the same bits",
       name);
    poison_results(w, &w->gpu);
    for (uint32_t i = 0; i <= n_cuts; i++) {
        uint32_t end = i < n_cuts ? cuts[i] : p.n;
        struct piece part = {p.seq, p.from + at, end - at};
        attend(w, &w->gpu, &part, 1, false);
        at = end;
    }
    float *cut = fetch(&w->gpu, w->gpu.out, w->out_width, first, p.n);
    ok(memcmp(want, cut, p.n * w->out_width * 4) == 0,
       "%s: rows that are cut otherwise have the same bits", name);
    mem_free(want);
    mem_free(again);
    mem_free(cut);
}

static void check_shape(struct shape s, const char *name)
{
    const uint32_t lens[] = {3300, 1100, 70};
    struct world *w = open_world(cpu, gpu, s, lens, ARRAY_LEN(lens));
    const struct piece whole = {0, 0, 3300}, late = {0, 2000, 1029}, few = {0, 2500, 150};
    const struct piece mixed[] = {{0, 1500, 1777}, {2, 69, 1}, {1, 3, 1090}, {2, 0, 69}};
    const uint32_t cuts[] = {1100, 2150};
    append_all(w, &w->cpu, 333);
    append_all(w, &w->gpu, 190);
    check(w, &whole, 1, name, "a prompt");
    check(w, &late, 1, name, "a chunk behind 2000 rows");
    check(w, mixed, ARRAY_LEN(mixed), name, "chunks and decodes");
    check_cuts(w, whole, cuts, ARRAY_LEN(cuts), name);
    spill(w, &w->seqs[0]);
    check(w, &late, 1, name, "a third of the blocks in the other arena");
    check(w, &few, 1, name, "few rows of a sequence in the other arena");
    close_world(w);
}

enum { OUTPUTS = 160 };

static void multiply(struct world *w, struct side *d, const struct weight *m, float *out,
                     bool from_attend)
{
    d->be->ops->linear(d->be, &(struct linear_args){.w = m,
                                                    .in = d->out,
                                                    .n_rows = w->n_rows,
                                                    .mode = LINEAR_STORE,
                                                    .out = out,
                                                    .from_attend = from_attend});
}

/* What a layer does: append, attend, and a product of the result, in one step; q and the result are nobody else's.
 * Returns the product. */
static float *pass(struct world *w, struct side *d, const struct piece *p, uint32_t n,
                   const struct weight *m, float *out)
{
    struct batch_seq b[MAX_SEQS];
    const struct backend_ops *ops = d->be->ops;
    for (uint32_t i = 0; i < n; i++)
        b[i] = batch_of(w, p[i]);
    ops->append(d->be, &(struct append_args){.kv = &d->kv,
                                             .layer = LAYER,
                                             .heads = w->heads,
                                             .seqs = b,
                                             .n_seqs = n,
                                             .rope_cos = d->cos,
                                             .rope_sin = d->sin,
                                             .qkv = d->qkv,
                                             .to_attend = true});
    ops->attend(d->be, &(struct attend_args){.kv = &d->kv,
                                             .layer = LAYER,
                                             .heads = w->heads,
                                             .seqs = b,
                                             .n_seqs = n,
                                             .scale = 1.0f / sqrtf((float)w->s.dim),
                                             .qkv = d->qkv,
                                             .out = d->out});
    multiply(w, d, m, out, true);
    return fetch(d, out, OUTPUTS, 0, w->n_rows);
}

/* A world with a product behind attention, on both sides. */
struct passing {
    struct world *w;
    struct weight *cpu, *gpu;
    float *cpu_out, *gpu_out;
};

static struct passing open_passing(struct shape s, const uint32_t *lens, uint32_t n)
{
    struct passing p = {.w = open_world(cpu, gpu, s, lens, n)};
    const struct weight_desc d = {
        .cols = (uint32_t)p.w->out_width,
        .n_parts = 1,
        .parts = {{.name = "w", .type = DTYPE_BF16, .rows = OUTPUTS, .seed = 7}}};
    CHECK(cpu->ops->weight_create(cpu, &d, &p.cpu) == OK);
    CHECK(gpu->ops->weight_create(gpu, &d, &p.gpu) == OK);
    p.cpu_out = put_nan(cpu, (size_t)p.w->n_rows * OUTPUTS * 4);
    p.gpu_out = put_nan(gpu, (size_t)p.w->n_rows * OUTPUTS * 4);
    return p;
}

static void close_passing(struct passing *p)
{
    cpu->ops->free(cpu, p->cpu_out, (size_t)p->w->n_rows * OUTPUTS * 4);
    gpu->ops->free(gpu, p->gpu_out, (size_t)p->w->n_rows * OUTPUTS * 4);
    cpu->ops->weight_destroy(cpu, p->cpu);
    gpu->ops->weight_destroy(gpu, p->gpu);
    close_world(p->w);
}

/* The worst row of the device's product. */
static double pass_error(struct passing *p, const struct piece *all, uint32_t n, const float *want)
{
    float *got = pass(p->w, &p->w->gpu, all, n, p->gpu, p->gpu_out);
    double worst = 0;
    for (uint32_t r = 0; r < p->w->n_rows; r++) {
        double e = distance(got + (size_t)r * OUTPUTS, want + (size_t)r * OUTPUTS, OUTPUTS);
        worst = e <= worst ? worst : e;
    }
    mem_free(got);
    return worst;
}

/* Whole sequences on from append into a product. */
static void check_lengths(struct shape s, const uint32_t *lens, uint32_t n, const char *name,
                          const char *what)
{
    struct piece all[MAX_SEQS];
    for (uint32_t i = 0; i < n; i++)
        all[i] = (struct piece){i, 0, lens[i]};
    struct passing p = open_passing(s, lens, n);
    float *want = pass(p.w, &p.w->cpu, all, n, p.cpu, p.cpu_out);
    double worst = pass_error(&p, all, n, want);
    ok(worst <= 2e-2, "%s: %s from append into a product: every row as on the CPU (%.2g)", name,
       what, worst);
    mem_free(want);
    close_passing(&p);
}

/* By cuDNN, between other rows; by our own kernels, of many and of few queries; so few that nothing stays bf16. */
static void check_pass(struct shape s, const char *name)
{
    const uint32_t chunks[] = {40, 700, 1300, 30, 600}, many[] = {40, 37, 130},
                   few[] = {3, 2, 4, 1, 3}, fewer[] = {2, 1, 3};
    check_lengths(s, chunks, ARRAY_LEN(chunks), name, "chunks");
    check_lengths(s, many, ARRAY_LEN(many), name, "short prompts");
    check_lengths(s, few, ARRAY_LEN(few), name, "few rows");
    check_lengths(s, fewer, ARRAY_LEN(fewer), name, "fewer rows");
}

enum { PIECES = 4096 };

/* All memory that the device still has; returns the number of pieces. */
static uint32_t take_memory(void *pieces[PIECES])
{
    uint32_t n = 0;
    for (size_t bytes = (size_t)1 << 30; bytes >= (size_t)2 << 20; bytes /= 2)
        while (n < PIECES && (pieces[n] = gpu->ops->alloc(gpu, bytes)) != NULL)
            n++;
    CHECK(gpu->ops->sync(gpu) == OK);
    return n;
}

/* No room for q and results of all rows as bf16, but for those of one call of cuDNN. */
static void check_short_of_memory(void)
{
    const struct shape s = {16, 128, 8, 4, 16, 128, false, 1.5f};
    const uint32_t lens[] = {1300, 1300, 1300, 1300, 1300};
    const struct piece all[] = {
        {0, 0, 1300}, {1, 0, 1300}, {2, 0, 1300}, {3, 0, 1300}, {4, 0, 1300}};
    struct passing p = open_passing(s, lens, ARRAY_LEN(lens));
    static void *pieces[PIECES];
    bool bad = false;
    float *want = pass(p.w, &p.w->cpu, all, ARRAY_LEN(all), p.cpu, p.cpu_out);
    multiply(p.w, &p.w->gpu, p.gpu, p.gpu_out, false); /* has its scratch now */
    CHECK(gpu->ops->sync(gpu) == OK);
    uint32_t n = take_memory(pieces);
    double worst = pass_error(&p, all, ARRAY_LEN(all), want);
    ok(worst <= 2e-2, "without memory for a batch as bf16: every row as on the CPU (%.2g)", worst);
    const char *text = gpu->ops->news(gpu, &bad);
    ok(text != NULL && bad && strstr(text, "no memory") != NULL, "and it is said: %s",
       text != NULL ? text : "no news");
    while (n > 0)
        gpu->ops->free(gpu, pieces[--n], 0);
    const uint64_t before = gpu->ops->memory(gpu);
    mem_free(pass(p.w, &p.w->gpu, all, ARRAY_LEN(all), p.gpu, p.gpu_out));
    const uint64_t after = gpu->ops->memory(gpu), room = p.w->n_rows * p.w->out_width * 2;
    ok(after + room / 2 > before && gpu->ops->news(gpu, &bad) == NULL,
       "once, and it is not tried again (%llu bytes taken)", (unsigned long long)(before - after));
    mem_free(want);
    close_passing(&p);
}

/* More rows than one call of cuDNN takes; then again, when there was time to make the plan that the last rows had
 * wished for. */
static void check_long(void)
{
    const struct shape s = {16, 64, 1, 2, 0, 64, false, 1.5f};
    const uint32_t lens[] = {10000, 9300};
    struct world *w = open_world(cpu, gpu, s, lens, ARRAY_LEN(lens));
    const struct piece both[] = {{0, 0, 9500}, {1, 1, 9298}};
    append_all(w, &w->cpu, 4000);
    append_all(w, &w->gpu, 4000);
    check(w, both, ARRAY_LEN(both), "R 16 d 64 group 2", "prompts of 9500 and 9298 rows");
    nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    check(w, both, ARRAY_LEN(both), "R 16 d 64 group 2", "the same, with a plan of its own");
    close_world(w);
}

static const struct {
    const char *name;
    struct shape s;
} shapes[] = {
    {"R 16 d 128 8 heads group 4", {16, 128, 8, 4, 16, 128, false, 1.5f}},
    {"R 8 d 128 group 5", {8, 128, 2, 5, 4, 64, false, 2}},
    {"R 32 d 64 group 3", {32, 64, 3, 3, 16, 192, false, 2}},
    {"R 16 d 128 group 8, DENSE", {16, 128, 1, 8, 16, 192, true, 1}},
    {"R 8 d 128 group 1, DENSE and STREAM", {8, 128, 2, 1, 100, 256, true, 1}},
    {"R 16 d 80 group 2", {16, 80, 2, 2, 16, 128, false, 1.5f}},
};

/* Plans are made in the background, once a step has attended; until then our own kernel serves. */
static void wait_for_plans(void)
{
    const struct shape s = shapes[0].s;
    const uint32_t len = 8;
    const struct piece p = {0, 0, 8};
    struct world *w = open_world(cpu, gpu, s, &len, 1);
    const char *text = NULL;
    bool bad = false;
    append_all(w, &w->gpu, 8);
    attend(w, &w->gpu, &p, 1, false);
    for (int i = 0; i < 100 && (text = gpu->ops->news(gpu, &bad)) == NULL; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
        attend(w, &w->gpu, &p, 1, false); /* a step looks anew */
    }
    printf("# %s\n", text != NULL ? text : "no news");
    ok(text != NULL && !bad, "plans for prompts are made, and it is said");
    close_world(w);
}

int main(void)
{
    struct cpu_options o = {.isa = "auto"};
    CHECK(cpu_backend_open(&cpu, &o) == OK);
    if (spind_cuda_open(&gpu, 0) != OK)
        tap_skip_all(err_text());
    printf("# %s\n", gpu->ops->describe(gpu));
    wait_for_plans();
    for (size_t i = 0; i < (tap_small() ? 1 : ARRAY_LEN(shapes)); i++)
        check_shape(shapes[i].s, shapes[i].name);
    if (tap_small())
        return tap_done();
    check_pass((struct shape){16, 128, 8, 4, 16, 128, false, 1.5f}, "R 16 d 128 8 heads group 4");
    check_pass((struct shape){16, 64, 3, 3, 16, 128, false, 1.5f}, "R 16 d 64 group 3");
    check_pass((struct shape){16, 128, 2, 1, 16, 128, true, 1.5f}, "R 16 d 128, DENSE and STREAM");
    check_long();
    kept = KV_E4M3;
    printf("# pages of fp8\n");
    check_shape(shapes[0].s, shapes[0].name);
    check_shape(shapes[4].s, shapes[4].name);
    check_pass((struct shape){16, 128, 2, 1, 16, 128, true, 1.5f}, "R 16 d 128, DENSE and STREAM");
    kept = KV_BF16;
    check_short_of_memory(); /* the last: it is remembered */
    gpu->ops->close(gpu);
    cpu->ops->close(cpu);
    return tap_done();
}
