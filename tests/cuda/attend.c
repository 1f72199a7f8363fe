/* Append and attend of the CUDA backend against the CPU's, and against themselves: a row's result does
 * not depend on its batch, on how the prompt was cut, or on which kernel computed it, bit for bit. */
#include "tests/cuda/attend_world.h"

static struct backend *cpu, *gpu;

/* Relative distance from the CPU of the outputs of these rows; lse: the greatest difference. */
struct error {
    double out, lse;
};

static struct error compare(struct world *w, const struct piece *p, uint32_t n)
{
    struct error worst = {0, 0};
    for (uint32_t i = 0; i < n; i++) {
        uint32_t first = w->seqs[p[i].seq].first_row + p[i].from;
        float *a = fetch(&w->gpu, w->gpu.out, w->out_width, first, p[i].n);
        float *b = fetch(&w->cpu, w->cpu.out, w->out_width, first, p[i].n);
        float *la = fetch(&w->gpu, w->gpu.lse, w->heads, first, p[i].n);
        float *lb = fetch(&w->cpu, w->cpu.lse, w->heads, first, p[i].n);
        double d = distance(a, b, p[i].n * w->out_width);
        worst.out = d <= worst.out ? worst.out : d; /* NaN stays */
        for (size_t j = 0; j < (size_t)p[i].n * w->heads; j++) {
            d = fabs((double)la[j] - (double)lb[j]);
            worst.lse = d <= worst.lse ? worst.lse : d;
        }
        mem_free(a);
        mem_free(b);
        mem_free(la);
        mem_free(lb);
    }
    return worst;
}

static bool good(struct error e)
{
    return e.out <= 5e-3 && e.lse <= 2e-2;
}

static void check_append(struct world *w, const char *name)
{
    double worst = 0;
    append_all(w, &w->cpu, 333);
    append_all(w, &w->gpu, 190);
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        float *a = fetch(&w->gpu, w->gpu.qkv, w->width, w->seqs[i].first_row, w->seqs[i].len);
        float *b = fetch(&w->cpu, w->cpu.qkv, w->width, w->seqs[i].first_row, w->seqs[i].len);
        for (uint32_t r = 0; r < w->seqs[i].len; r++) {
            double d = distance(a + r * w->width, b + r * w->width, w->out_width);
            worst = d <= worst ? worst : d;
        }
        mem_free(a);
        mem_free(b);
    }
    if (!ok(worst <= 1e-6, "%s: q is rotated as the CPU rotates it", name))
        printf("#   off by %g\n", worst);
}

static struct error run_both(struct world *w, const struct piece *p, uint32_t n)
{
    poison_results(w, &w->gpu);
    poison_results(w, &w->cpu);
    attend(w, &w->cpu, p, n, true);
    attend(w, &w->gpu, p, n, true);
    return compare(w, p, n);
}

/* Chunks of so many rows go to cuDNN (kernels/cuda/prefill.cu), which sums in another order. */
enum { LONG_CHUNK = 520 };
static const double ROUNDING = 5e-3;

static bool close_to(const float *a, const float *b, size_t n)
{
    double off = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        off += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        norm += (double)b[i] * (double)b[i];
    }
    return off <= ROUNDING * ROUNDING * norm; /* not so with a NaN */
}

/* The same rows, cut otherwise and in other company, against `want` of row `first` on: the same bits, or, of
 * a long chunk, numbers that rounding explains. */
static bool same_rows(struct world *w, struct piece p, const float *out, const float *lse,
                      bool bits)
{
    uint32_t first = w->seqs[p.seq].first_row + p.from;
    float *a = fetch(&w->gpu, w->gpu.out, w->out_width, first, p.n);
    float *b = fetch(&w->gpu, w->gpu.lse, w->heads, first, p.n);
    bool same =
        bits ? memcmp(a, out, p.n * w->out_width * 4) == 0 &&
                   memcmp(b, lse, (size_t)p.n * w->heads * 4) == 0
             : close_to(a, out, p.n * w->out_width) && close_to(b, lse, (size_t)p.n * w->heads);
    for (size_t i = 0, said = 0; !same && i < p.n * w->out_width && said < 2; i++)
        if (a[i] != out[i] && ++said)
            printf("#   row %zu number %zu: %.9g, was %.9g\n", p.from + i / w->out_width,
                   i % w->out_width, (double)a[i], (double)out[i]);
    mem_free(a);
    mem_free(b);
    return same;
}

static void check_same(struct world *w, const struct piece *p, uint32_t n, const char *name)
{
    bool alone = true, cut = true;
    if (tap_small()) /* the same kernels, some hundred times */
        return;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t first = w->seqs[p[i].seq].first_row + p[i].from;
        bool bits = p[i].n < LONG_CHUNK;
        float *out = fetch(&w->gpu, w->gpu.out, w->out_width, first, p[i].n);
        float *lse = fetch(&w->gpu, w->gpu.lse, w->heads, first, p[i].n);
        for (uint32_t r = 0; r < p[i].n; r += 1 + r / 2) {
            struct piece one = {p[i].seq, p[i].from + r, 1};
            poison_results(w, &w->gpu);
            attend(w, &w->gpu, &one, 1, true);
            alone = same_rows(w, one, out + r * w->out_width, lse + (size_t)r * w->heads, bits) &&
                    alone;
        }
        struct piece parts[64];
        uint32_t m = 0;
        for (uint32_t r = 0, take = 1; r < p[i].n; r += take, m++) {
            take = p[i].n - r < m * 19 + 3 ? p[i].n - r : m * 19 + 3;
            parts[m] = (struct piece){p[i].seq, p[i].from + r, take};
        }
        poison_results(w, &w->gpu);
        attend(w, &w->gpu, parts, m, true);
        cut = same_rows(w, p[i], out, lse, bits) && cut;
        mem_free(out);
        mem_free(lse);
        attend(w, &w->gpu, p, n, true); /* the next piece's results again */
    }
    ok(alone, "%s: a row alone is as in its batch, to the bit but for long chunks", name);
    ok(cut, "%s: and so do rows that are cut otherwise", name);
}

static void check_shape(struct shape s, const char *name)
{
    const uint32_t lens[] = {700, 3000, 1, 130, 65};
    struct world *w = open_world(cpu, gpu, s, lens, ARRAY_LEN(lens));
    const struct piece mixed[] = {{0, 37, 301}, {1, 2999, 1}, {2, 0, 1}, {3, 0, 130}, {4, 64, 1}};
    const struct piece decode[] = {{0, 699, 1}, {1, 1024, 1}, {1, 1023, 1},
                                   {2, 0, 1},   {3, 127, 1},  {4, 63, 1}};
    const struct piece late[] = {{1, 2000, 517}, {0, 690, 10}, {3, 126, 3}};
    check_append(w, name);
    struct error e = run_both(w, mixed, ARRAY_LEN(mixed));
    ok(good(e), "%s: prefill and decode as on the CPU (%.2g, lse %.2g)", name, e.out, e.lse);
    check_same(w, mixed, ARRAY_LEN(mixed), name);
    e = run_both(w, decode, ARRAY_LEN(decode));
    ok(good(e), "%s: decode as on the CPU (%.2g, lse %.2g)", name, e.out, e.lse);
    e = run_both(w, late, ARRAY_LEN(late));
    ok(good(e), "%s: a chunk late in its prompt as on the CPU (%.2g, lse %.2g)", name, e.out,
       e.lse);
    check_same(w, late, ARRAY_LEN(late), name);
    for (uint32_t i = 0; i < w->n_seqs; i++)
        spill(w, &w->seqs[i]);
    w->seqs[1].spilled = false; /* our own kernel, however far the plans are */
    e = run_both(w, late, ARRAY_LEN(late));
    ok(good(e), "%s: blocks of the other arena are read there (%.2g, lse %.2g)", name, e.out,
       e.lse);
    close_world(w);
}

static void check_long(void)
{
    const struct shape s = {.rows = 16,
                            .dim = 128,
                            .kv_heads = 3,
                            .group = 4,
                            .sinks = 16,
                            .recent = 256,
                            .classes = true,
                            .q_size = 1.7f};
    const uint32_t lens[] = {9001, 5000};
    struct world *w = open_world(cpu, gpu, s, lens, ARRAY_LEN(lens));
    struct piece decode[14], whole[] = {{1, 0, 5000}}, chunk[] = {{0, 8200, 700}, {1, 4999, 1}};
    uint32_t at[] = {0, 1, 62, 63, 64, 65, 1022, 1023, 1024, 2047, 2048, 4095, 8191, 9000};
    check_append(w, "9001 rows");
    for (uint32_t i = 0; i < ARRAY_LEN(at); i++)
        decode[i] = (struct piece){0, at[i], 1};
    struct error e = run_both(w, decode, ARRAY_LEN(at));
    ok(good(e), "decode at 1 to 9001 rows as on the CPU (%.2g, lse %.2g)", e.out, e.lse);
    e = run_both(w, chunk, ARRAY_LEN(chunk));
    ok(good(e), "a chunk behind 8200 rows as on the CPU (%.2g, lse %.2g)", e.out, e.lse);
    check_same(w, chunk, ARRAY_LEN(chunk), "behind 8200 rows");
    e = run_both(w, whole, 1);
    ok(good(e), "a prompt of 5000 rows as on the CPU (%.2g, lse %.2g)", e.out, e.lse);
    check_same(w, whole, 1, "5000 rows");
    close_world(w);
}

/* Rows behind a row whose values are no numbers have none; rows before it never see them. */
static void a_row_that_is_no_number_spoils_none_before_it(struct shape s, uint32_t n)
{
    const uint32_t len = 1200, bad = 1050, first = 1040;
    struct world *w = open_world(cpu, gpu, s, &len, 1);
    append_all(w, &w->gpu, 400);
    struct piece p = {0, first, n};
    attend(w, &w->gpu, &p, 1, true);
    uint32_t before = bad - first, row = w->seqs[0].first_row + first;
    float *want = fetch(&w->gpu, w->gpu.out, w->out_width, row, before);
    size_t page = (size_t)w->seqs[0].blocks[LANE_SPARSE][bad / s.rows] * w->geo.block_bytes[0];
    for (uint32_t h = 0; h < s.kv_heads; h++) {
        size_t lane = kv_page_offset(&w->geo, LAYER, h);
        size_t at = page + lane + ((size_t)s.rows + bad % s.rows) * s.dim * 2;
        uint16_t *nan = mem_alloc(s.dim * 2);
        memset(nan, 0xff, s.dim * 2);
        gpu->ops->copy(gpu, (char *)w->gpu.kv.hbm[0] + at, nan, s.dim * 2);
        CHECK(gpu->ops->sync(gpu) == OK);
        mem_free(nan);
    }
    poison_results(w, &w->gpu);
    attend(w, &w->gpu, &p, 1, true);
    float *got = fetch(&w->gpu, w->gpu.out, w->out_width, row, n);
    bool same = memcmp(got, want, before * w->out_width * 4) == 0, nan = true;
    for (size_t i = before * w->out_width; i < n * w->out_width; i++)
        nan = nan && isnan(got[i]);
    ok(same, "d %u, %u rows: values that are no numbers change no bit of the rows before them",
       s.dim, n);
    ok(nan, "d %u, %u rows: and all of the rows that see them", s.dim, n);
    mem_free(want);
    mem_free(got);
    close_world(w);
}

/* Steps whose rows advance by one, queued one after the other without a look at results between. */
static void steps_in_a_row_are_right(void)
{
    const struct shape s = {16, 128, 2, 4, 16, 64, false, 1.5f};
    const uint32_t lens[] = {1100, 700, 64};
    struct world *w = open_world(cpu, gpu, s, lens, 3);
    append_all(w, &w->cpu, 400);
    append_all(w, &w->gpu, 400);
    double worst = 0;
    for (uint32_t i = 0; i < (tap_small() ? 4 : 40); i++) {
        struct piece p[] = {{0, 1010 + i, 1}, {1, 660 + i, 1}, {2, 24 + i, 1}};
        struct error e = run_both(w, p, 3);
        worst = e.out <= worst ? worst : e.out;
    }
    ok(worst <= 5e-3, "40 steps of decode, each as on the CPU (%.2g)", worst);
    close_world(w);
}

/* ---- rows that the step itself appends ---- */

enum { ROUNDS = 6, AGAIN = 100 }; /* of a step; steps */

/* Some sequences' rows of a step, and those of them that attend. */
struct fresh {
    struct piece appended[MAX_SEQS];
    uint32_t attending[MAX_SEQS]; /* the last so many of each */
    bool planned;                 /* pieces of one sequence follow one another */
    float *rows[ROUNDS]; /* [row of the world][width] q, k and v of a round; device memory */
    char *out;           /* [ROUNDS][row that attends][out_width] floats; device memory */
    size_t out_bytes;    /* of all rounds */
};

static void queue_append(struct world *w, struct side *d, uint32_t layer, const struct batch_seq *q,
                         uint32_t n)
{
    d->be->ops->append(d->be, &(struct append_args){.kv = &d->kv,
                                                    .layer = layer,
                                                    .heads = w->heads,
                                                    .seqs = q,
                                                    .n_seqs = n,
                                                    .rope_cos = d->cos,
                                                    .rope_sin = d->sin,
                                                    .qkv = d->qkv});
}

/* Rounds of fresh rows in the same pages: each appends and attends the last rows, as the last layer of a prompt
 * does. Appends in another layer come first, up to ROUNDS - 1 of them: all are launched while the first runs, and
 * attend too, long before the last append has written. For that they must be on the device together, so rows are
 * few. waits: for every operation to end. */
static void run_rounds(struct world *w, struct side *d, const struct fresh *f, bool waits)
{
    const struct backend_ops *ops = d->be->ops;
    struct batch_seq whole[MAX_SEQS], last[MAX_SEQS];
    char *to = f->out;
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        whole[i] = last[i] = batch_of(w, f->appended[i]);
        const uint32_t skip = whole[i].n_rows - f->attending[i];
        last[i].first_row += skip;
        last[i].first_pos += skip;
        last[i].n_rows -= skip;
        last[i].n_before = f->planned ? 0 : skip;
        last[i].planned = f->planned;
    }
    for (uint32_t round = 0; round < ROUNDS; round++) {
        ops->copy(d->be, d->qkv, f->rows[round], w->n_rows * w->width * 4);
        for (uint32_t i = 0; i <= round; i++) {
            queue_append(w, d, i == round ? LAYER : !LAYER, whole, w->n_seqs);
            CHECK(!waits || ops->sync(d->be) == OK);
        }
        ops->attend(d->be, &(struct attend_args){.kv = &d->kv,
                                                 .layer = LAYER,
                                                 .heads = w->heads,
                                                 .seqs = last,
                                                 .n_seqs = w->n_seqs,
                                                 .scale = 1.0f / sqrtf((float)w->s.dim),
                                                 .qkv = d->qkv,
                                                 .out = d->out});
        CHECK(!waits || ops->sync(d->be) == OK);
        for (uint32_t i = 0; i < w->n_seqs; i++) {
            const size_t bytes = last[i].n_rows * w->out_width * 4;
            ops->copy(d->be, to, d->out + last[i].first_row * w->out_width, bytes);
            to += bytes;
        }
    }
    CHECK(ops->sync(d->be) == OK);
}

static void make_rounds(struct world *w, struct side *d, struct fresh *f)
{
    const size_t numbers = w->n_rows * w->width;
    size_t attending = 0;
    float *host = mem_alloc(numbers * 4);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (size_t i = 0; i < numbers; i++)
            host[i] = 1.5f * noise(100 + round, (uint32_t)(i / w->width), (uint32_t)(i % w->width));
        f->rows[round] = put(d->be, host, numbers * 4);
    }
    mem_free(host);
    for (uint32_t i = 0; i < w->n_seqs; i++)
        attending += f->attending[i];
    f->out_bytes = ROUNDS * attending * w->out_width * 4;
    f->out = put_nan(d->be, f->out_bytes);
}

/* Counts the steps with a result that is not the one of operations that wait for each other. */
static void rows_of_this_step_are_not_read_early(struct backend *be, struct shape s, bool planned,
                                                 const char *name)
{
    const uint32_t lens[] = {520, 140, 701, 410}, again = tap_small() ? 4 : AGAIN;
    struct world *w = open_world(cpu, be, s, lens, ARRAY_LEN(lens));
    struct side *d = &w->gpu;
    struct fresh f = {{{0, 490, 30}, {1, 120, 20}, {2, 700, 1}, {3, 380, 30}},
                      {1, 3, 1, 2},
                      planned,
                      {0},
                      NULL,
                      0};
    append_all(w, d, 400);
    make_rounds(w, d, &f);
    void *want = mem_alloc(f.out_bytes), *got = mem_alloc(f.out_bytes);
    uint32_t wrong = 0;
    run_rounds(w, d, &f, true);
    be->ops->copy(be, want, f.out, f.out_bytes);
    for (uint32_t i = 0; i < again; i++) {
        run_rounds(w, d, &f, false);
        be->ops->copy(be, got, f.out, f.out_bytes);
        CHECK(be->ops->sync(be) == OK);
        wrong += memcmp(got, want, f.out_bytes) != 0;
    }
    ok(wrong == 0, "%s: nothing that a step appends is read before (%u of %u steps were wrong)",
       name, wrong, again);
    for (uint32_t round = 0; round < ROUNDS; round++)
        be->ops->free(be, f.rows[round], w->n_rows * w->width * 4);
    be->ops->free(be, f.out, f.out_bytes);
    mem_free(want);
    mem_free(got);
    close_world(w);
}

static void fresh_rows(struct backend *be, const char *how)
{
    static const struct shape plain = {16, 128, 2, 4, 16, 128, false, 1.5f},
                              classes = {32, 64, 3, 8, 16, 192, true, 2};
    char name[64];
    snprintf(name, sizeof name, "the last rows of a chunk, %s", how);
    rows_of_this_step_are_not_read_early(be, plain, false, name);
    if (tap_small())
        return;
    snprintf(name, sizeof name, "of a chunk of classes, %s", how);
    rows_of_this_step_are_not_read_early(be, classes, false, name);
    snprintf(name, sizeof name, "of planned pieces, %s", how);
    rows_of_this_step_are_not_read_early(be, classes, true, name);
}

static const struct {
    const char *name;
    struct shape s;
} shapes[] = {
    {"R 16 d 128 group 4", {16, 128, 2, 4, 16, 128, false, 1.5f}},
    {"R 8 d 128 group 5, classes", {8, 128, 4, 5, 4, 64, true, 2}},
    {"R 32 d 64 group 8, classes", {32, 64, 3, 8, 16, 192, true, 2}},
    {"R 16 d 64 group 1, classes", {16, 64, 5, 1, 100, 256, true, 1}},
    {"R 32 d 128 group 16", {32, 128, 1, 16, 0, 64, false, 1.5f}},
    {"R 8 d 256 group 2, classes", {8, 256, 3, 2, 64, 128, true, 1.5f}},
    {"R 16 d 80 group 3, classes", {16, 80, 3, 3, 16, 128, true, 1.5f}},
    {"R 8 d 6 group 7", {8, 6, 1, 7, 0, 64, false, 1.5f}},
    {"R 32 d 200 group 9, classes", {32, 200, 3, 9, 4, 200, true, 1}},
};

static void results_are_the_cpus(void)
{
    for (size_t i = 0; i < (tap_small() ? 1 : ARRAY_LEN(shapes)); i++)
        check_shape(shapes[i].s, shapes[i].name);
    if (!tap_small())
        check_long();
    kept = KV_E4M3;
    printf("# pages of fp8\n");
    for (size_t i = 0; i < (tap_small() ? 1 : ARRAY_LEN(shapes)); i++)
        if (shapes[i].s.dim % 4 == 0)
            check_shape(shapes[i].s, shapes[i].name);
    kept = KV_BF16;
    a_row_that_is_no_number_spoils_none_before_it((struct shape){16, 128, 2, 4, 0, 64, false, 1.5f},
                                                  150);
    a_row_that_is_no_number_spoils_none_before_it((struct shape){8, 64, 2, 1, 0, 64, false, 1.5f},
                                                  14);
    a_row_that_is_no_number_spoils_none_before_it((struct shape){8, 256, 1, 2, 0, 64, false, 1.5f},
                                                  60);
    steps_in_a_row_are_right();
}

int main(int argc, char **argv) /* fresh: rows that the step appends, alone */
{
    struct cpu_options o = {.isa = "auto"};
    CHECK(cpu_backend_open(&cpu, &o) == OK);
    if (spind_cuda_open(&gpu, 0) != OK)
        tap_skip_all(err_text());
    printf("# %s\n", gpu->ops->describe(gpu));
    if (argc == 1 || strcmp(argv[1], "fresh") != 0)
        results_are_the_cpus();
    fresh_rows(gpu, "as a graph");
    struct backend *eager;
    CHECK(cuda_load(&eager, &(struct cuda_options){.eager = true}) == OK);
    fresh_rows(eager, "launched one by one");
    eager->ops->close(eager);
    gpu->ops->close(gpu);
    cpu->ops->close(cpu);
    return tap_done();
}
