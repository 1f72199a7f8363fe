/* The linear layers of the CPU backend against a float64 product over reference-decoded weights:
 * every stored type, every instruction set this machine has, every mode; and batch invariance, bit
 * for bit: a row alone, inside any batch, gathered, on one thread or several. */
#include "kernels/backend.h"
#include "tests/tap.h"

#include <math.h>

enum { MAX_TOKENS = 230 };

static const enum dtype types[] = {
#define X(id, text, number, block, bytes) id,
    DTYPE_LIST(X)
#undef X
};

static uint64_t rng_state = 88172645463325252u;

static uint32_t rng(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return (uint32_t)(rng_state >> 32);
}

static float gauss(void)
{
    float sum = 0;
    for (int i = 0; i < 12; i++)
        sum += (float)rng() * 0x1p-32f;
    return sum - 6;
}

static void put_half(uint8_t *p, float f)
{
    uint16_t h = f32_to_f16(f);
    memcpy(p, &h, sizeof h);
}

/* Random blocks with scales that give values around 1. */
static uint8_t *random_rows(enum dtype t, uint32_t rows, uint32_t cols)
{
    const struct dtype_info *info = dtype_find((uint32_t)t);
    size_t bytes = rows * dtype_row_bytes(t, cols);
    uint8_t *data = mem_alloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)rng();
    for (uint8_t *b = data; b < data + bytes; b += info->bytes) {
        float f = gauss() * 0.2f + 0.02f;
        uint16_t h = f32_to_bf16(gauss());
        switch (t) {
        case DTYPE_F32:
            f = gauss();
            memcpy(b, &f, 4);
            break;
        case DTYPE_BF16: memcpy(b, &h, 2); break;
        case DTYPE_F16: put_half(b, gauss()); break;
        case DTYPE_Q6_K: put_half(b + 208, f * 0.002f); break;
        case DTYPE_Q8_0: put_half(b, f * 0.1f); break;
        case DTYPE_Q4_K:
            put_half(b, f * 0.02f);
            put_half(b + 2, f * 0.1f);
            break;
        default:
            put_half(b, f);
            if (t == DTYPE_Q4_1 || t == DTYPE_Q5_1)
                put_half(b + 2, -8 * f);
        }
    }
    return data;
}

static float *random_floats(size_t n)
{
    float *x = mem_alloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = gauss() * (i % 97 == 0 ? 20.0f : 1.0f); /* with outliers, as real ones */
    return x;
}

static struct backend *open_cpu(const char *isa, uint32_t threads)
{
    struct backend *be = NULL;
    struct cpu_options o = {.isa = isa, .n_threads = threads};
    return cpu_backend_open(&be, &o) == OK ? be : NULL;
}

/* A matrix with its decoded copy. */
struct matrix {
    struct weight_desc d;
    struct weight *w;
    uint32_t rows;
    double *values; /* [rows][cols] */
};

static void add_part(struct matrix *m, enum dtype t, uint32_t rows, bool reversed)
{
    uint32_t cols = m->d.cols;
    uint8_t *data = random_rows(t, rows, cols);
    uint32_t *from = reversed ? mem_alloc(rows * sizeof *from) : NULL;
    float *row = mem_alloc(cols * sizeof *row);
    m->values = mem_grow(m->values, (size_t)m->rows * cols * sizeof(double),
                         (size_t)(m->rows + rows) * cols * sizeof(double));
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t file_row = reversed ? rows - 1 - r : r;
        if (reversed)
            from[r] = file_row;
        dtype_decode(t, data + file_row * dtype_row_bytes(t, cols), cols, row);
        for (uint32_t k = 0; k < cols; k++)
            m->values[((size_t)m->rows + r) * cols + k] = row[k];
    }
    mem_free(row);
    m->rows += rows;
    m->d.parts[m->d.n_parts++] = (struct weight_part){
        .name = "test", .type = t, .rows = rows, .data = data, .row_from = from};
}

static void load(struct matrix *m, struct backend *be)
{
    if (be->ops->weight_create(be, &m->d, &m->w) != OK) {
        printf("Bail out! %s\n", err_text());
        exit(1);
    }
}

static void forget(struct matrix *m)
{
    for (uint32_t i = 0; i < m->d.n_parts; i++) {
        mem_free(m->d.parts[i].data);
        mem_free(m->d.parts[i].row_from);
    }
    mem_free(m->values);
}

/* One exact product, and how far rounding of a 15-bit activation and of f32 sums may be off. */
static double exact_dot(const struct matrix *m, uint32_t row, const float *x, double *slack)
{
    const double *w = m->values + (size_t)row * m->d.cols;
    double sum = 0;
    *slack = 1e-6;
    for (uint32_t k0 = 0; k0 < m->d.cols; k0 += 32) {
        double max = 0;
        for (uint32_t k = k0; k < k0 + 32 && k < m->d.cols; k++)
            max = fmax(max, fabs((double)x[k]));
        for (uint32_t k = k0; k < k0 + 32 && k < m->d.cols; k++) {
            sum += w[k] * (double)x[k];
            *slack += fabs(w[k]) * max * (0.25 / 16256);
        }
    }
    return sum;
}

/* The largest error over the slack, of STORE or ADD. */
static double worst_error(const struct matrix *m, const float *in, const float *base,
                          const float *out, uint32_t n)
{
    double worst = 0;
    for (uint32_t t = 0; t < n; t++) {
        for (uint32_t r = 0; r < m->rows; r++) {
            double slack, want = exact_dot(m, r, in + (size_t)t * m->d.cols, &slack);
            size_t at = (size_t)t * m->rows + r;
            want += base != NULL ? (double)base[at] : 0;
            double e = fabs((double)out[at] - want) / slack;
            worst = e > worst || isnan(e) ? e : worst;
        }
    }
    return worst;
}

static void every_type_multiplies_exactly(struct backend *be, const char *isa)
{
    enum { COLS = 512, ROWS = 37, TOKENS = 14 };
    float *in = random_floats((size_t)TOKENS * COLS), *base = random_floats((size_t)TOKENS * ROWS);
    float *out = mem_alloc((size_t)TOKENS * ROWS * sizeof *out);
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        struct matrix m = {.d = {.cols = COLS}};
        add_part(&m, types[i], ROWS, i & 1);
        load(&m, be);
        struct linear_args a = {
            .w = m.w, .in = in, .n_rows = TOKENS, .mode = LINEAR_ADD, .out = out};
        memcpy(out, base, (size_t)TOKENS * ROWS * sizeof *out);
        be->ops->linear(be, &a);
        double worst = worst_error(&m, in, base, out, TOKENS);
        const char *name = dtype_find((uint32_t)types[i])->name;
        if (!ok(worst < 1, "%s: %s times activations is the float64 product, added", isa, name))
            printf("#   worst error %g of what is allowed\n", worst);
        a.mode = LINEAR_STORE;
        be->ops->linear(be, &a);
        worst = worst_error(&m, in, NULL, out, TOKENS);
        if (!ok(worst < 1, "%s: %s times activations is the float64 product, stored", isa, name))
            printf("#   worst error %g of what is allowed\n", worst);
        be->ops->weight_destroy(be, m.w);
        forget(&m);
    }
    mem_free(in);
    mem_free(base);
    mem_free(out);
}

static void an_embedded_row_is_the_decoded_row(struct backend *be, const char *isa)
{
    enum { COLS = 256, ROWS = 50 };
    float out[3 * COLS];
    static const uint32_t tokens[] = {49, 0, 17};
    bool same = true;
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        struct matrix m = {.d = {.cols = COLS, .embedding = true}};
        add_part(&m, types[i], ROWS, false);
        load(&m, be);
        struct embed_args a = {.table = m.w, .tokens = tokens, .n_rows = 3, .out = out};
        be->ops->embed(be, &a);
        for (int t = 0; t < 3; t++)
            for (int k = 0; k < COLS; k++)
                same &= (double)out[t * COLS + k] == m.values[(size_t)tokens[t] * COLS + k];
        be->ops->weight_destroy(be, m.w);
        forget(&m);
    }
    ok(same, "%s: embed gives exactly the decoded rows of every type", isa);
}

static void parts_of_any_type_and_size_stack(struct backend *be, const char *isa)
{
    enum { COLS = 96, TOKENS = 3 };
    struct matrix m = {.d = {.cols = COLS}};
    add_part(&m, DTYPE_Q4_1, 41, false);
    add_part(&m, DTYPE_F16, 1, false);
    add_part(&m, DTYPE_Q8_0, 16, true);
    load(&m, be);
    float *in = random_floats(TOKENS * COLS), *out = mem_alloc(TOKENS * 59 * sizeof *out);
    out[(size_t)TOKENS * m.rows] = 42;
    struct linear_args a = {.w = m.w, .in = in, .n_rows = TOKENS, .out = out};
    be->ops->linear(be, &a);
    ok(worst_error(&m, in, NULL, out, TOKENS) < 1 && out[(size_t)TOKENS * m.rows] == 42,
       "%s: parts of 41, 1 and 16 rows and three types stack without gaps", isa);
    be->ops->weight_destroy(be, m.w);
    forget(&m);
    mem_free(in);
    mem_free(out);
}

static void a_float_matrix_may_have_any_width(struct backend *be, const char *isa)
{
    enum { COLS = 45, TOKENS = 2 };
    struct matrix m = {.d = {.cols = COLS}};
    add_part(&m, DTYPE_F32, 7, false);
    load(&m, be);
    float *in = random_floats(TOKENS * COLS), out[TOKENS * 7];
    struct linear_args a = {.w = m.w, .in = in, .n_rows = TOKENS, .out = out};
    be->ops->linear(be, &a);
    ok(worst_error(&m, in, NULL, out, TOKENS) < 1, "%s: a float matrix may have 45 columns", isa);
    be->ops->weight_destroy(be, m.w);
    forget(&m);
    mem_free(in);
}

/* gate over up, with and without whole groups of 16 rows, after an RMSNorm. */
static void swiglu_pairs_gate_and_up(struct backend *be, const char *isa, uint32_t half)
{
    enum { COLS = 160, TOKENS = 13 };
    struct matrix m = {.d = {.cols = COLS}};
    add_part(&m, DTYPE_Q4_1, half, false);
    add_part(&m, DTYPE_Q5_0, half, false);
    load(&m, be);
    float *in = random_floats(TOKENS * COLS), *gain = random_floats(COLS);
    float *out = mem_alloc(TOKENS * half * sizeof *out), x[COLS];
    struct linear_args a = {.w = m.w,
                            .in = in,
                            .n_rows = TOKENS,
                            .norm_gain = gain,
                            .norm_eps = 1e-5f,
                            .mode = LINEAR_SWIGLU,
                            .out = out};
    be->ops->linear(be, &a);
    double worst = 0;
    for (uint32_t t = 0; t < TOKENS; t++) {
        double squares = 0;
        for (uint32_t k = 0; k < COLS; k++)
            squares += (double)in[t * COLS + k] * (double)in[t * COLS + k];
        for (uint32_t k = 0; k < COLS; k++)
            x[k] =
                (float)((double)in[t * COLS + k] / sqrt(squares / COLS + 1e-5) * (double)gain[k]);
        for (uint32_t r = 0; r < half; r++) {
            double sg, su, g = exact_dot(&m, r, x, &sg), u = exact_dot(&m, r + half, x, &su);
            double want = g / (1 + exp(-g)) * u;
            double slack = 1.1 * sg * fabs(u) + su * fabs(g) + 1e-6 * fabs(want) + 1e-6;
            double e = fabs((double)out[t * half + r] - want) / slack;
            worst = e > worst || isnan(e) ? e : worst;
        }
    }
    if (!ok(worst < 1, "%s: SwiGLU of %u pairs after RMSNorm is the float64 result", isa, half))
        printf("#   worst error %g of what is allowed\n", worst);
    be->ops->weight_destroy(be, m.w);
    forget(&m);
    mem_free(in);
    mem_free(gain);
    mem_free(out);
}

static bool same_bits(const float *a, const float *b, size_t n)
{
    return memcmp(a, b, n * sizeof *a) == 0;
}

/* Runs rows of a batch in calls of n and compares with every row run alone. */
static bool batches_agree(struct backend *be, struct linear_args a, const float *alone,
                          uint32_t n_tokens, uint32_t n, size_t cols, size_t rows)
{
    float *out = mem_alloc(n * rows * sizeof *out);
    const float *in = a.in;
    bool same = true;
    for (uint32_t t = 0; t + n <= n_tokens && same; t += n) {
        a.in = in + t * cols;
        a.n_rows = n;
        a.out = out;
        be->ops->linear(be, &a);
        same = same_bits(out, alone + t * rows, n * rows);
    }
    mem_free(out);
    return same;
}

static void a_row_never_depends_on_its_batch(struct backend *one, struct backend *many,
                                             const char *isa, enum dtype t, enum linear_out mode)
{
    enum { COLS = 256 };
    /* Portable code is slow and works on one group of 16 rows at a time; the others on several. */
    bool slow = strcmp(isa, "scalar") == 0;
    uint32_t rows = slow ? 64 : 224;
    struct matrix m = {.d = {.cols = COLS}}, m_many;
    add_part(&m, t, rows, false);
    m_many = m;
    load(&m, one);
    load(&m_many, many);
    uint32_t out_cols = mode == LINEAR_SWIGLU ? rows / 2 : rows, order[MAX_TOKENS];
    float *in = random_floats((size_t)MAX_TOKENS * COLS), *gain = random_floats(COLS);
    float *alone = mem_alloc((size_t)MAX_TOKENS * out_cols * sizeof *alone);
    float *out = mem_alloc((size_t)MAX_TOKENS * out_cols * sizeof *out);
    struct linear_args a = {
        .w = m.w, .n_rows = 1, .norm_gain = gain, .norm_eps = 1e-5f, .mode = mode};
    for (uint32_t i = 0; i < MAX_TOKENS; i++) {
        a.in = in + (size_t)i * COLS;
        a.out = alone + (size_t)i * out_cols;
        one->ops->linear(one, &a);
    }
    a.in = in;
    bool same = true, same_many = true, gathered = true;
    for (uint32_t n = 1; n <= MAX_TOKENS; n += n < (slow ? 14 : 40) ? 1 : slow ? 72 : 38) {
        same &= batches_agree(one, a, alone, MAX_TOKENS, n, COLS, out_cols);
        a.w = m_many.w;
        same_many &= batches_agree(many, a, alone, MAX_TOKENS, n, COLS, out_cols);
        a.w = m.w;
    }
    for (uint32_t i = 0; i < MAX_TOKENS; i++)
        order[i] = (i * 7 + 3) % MAX_TOKENS;
    a = (struct linear_args){.w = m_many.w,
                             .in = in,
                             .rows = order,
                             .n_rows = MAX_TOKENS,
                             .norm_gain = gain,
                             .norm_eps = 1e-5f,
                             .mode = mode,
                             .out = out};
    many->ops->linear(many, &a);
    for (uint32_t i = 0; i < MAX_TOKENS; i++)
        gathered &=
            same_bits(out + (size_t)i * out_cols, alone + (size_t)order[i] * out_cols, out_cols);
    const char *name = dtype_find((uint32_t)t)->name;
    ok(same, "%s %s: a row alone and in batches of 2 to 230 gives the same bits", isa, name);
    ok(same_many, "%s %s: one thread and several give the same bits", isa, name);
    ok(gathered, "%s %s: gathered rows give the same bits", isa, name);
    one->ops->weight_destroy(one, m.w);
    many->ops->weight_destroy(many, m_many.w);
    forget(&m);
    mem_free(in);
    mem_free(gain);
    mem_free(alone);
    mem_free(out);
}

static void a_bad_scale_is_refused_by_name(struct backend *be, const char *isa)
{
    uint8_t data[2 * 20] = {0};
    put_half(data + 22, INFINITY);
    struct weight_desc d = {
        .cols = 32, .n_parts = 1, .parts = {{.name = "blk.7.x", .type = DTYPE_Q4_1, .rows = 2}}};
    d.parts[0].data = data;
    struct weight *w = NULL;
    status st = be->ops->weight_create(be, &d, &w);
    ok(st == ERR_FORMAT && strstr(err_text(), "blk.7.x") && w == NULL,
       "%s: an infinite offset is refused with the tensor's name", isa);
    d.cols = 48;
    ok(be->ops->weight_create(be, &d, &w) == ERR_FORMAT,
       "%s: a width that is no multiple of the block is refused", isa);
}

static void bad_activations_reach_the_result(struct backend *be, const char *isa)
{
    enum { COLS = 64, ROWS = 16 };
    struct matrix m = {.d = {.cols = COLS}};
    add_part(&m, DTYPE_Q8_0, ROWS, false);
    load(&m, be);
    float in[3 * COLS] = {0}, out[3 * ROWS];
    in[5] = NAN;
    in[COLS + 40] = -INFINITY;
    in[2 * COLS + 1] = 1e-40f; /* too small for a scale: zero */
    struct linear_args a = {.w = m.w, .in = in, .n_rows = 3, .out = out};
    be->ops->linear(be, &a);
    bool bad = true, zero = true;
    for (int r = 0; r < ROWS; r++) {
        bad &= !isfinite(out[r]) && !isfinite(out[ROWS + r]);
        zero &= fabsf(out[2 * ROWS + r]) < 1e-30f;
    }
    ok(bad, "%s: NaN and infinity in a row reach all its results", isa);
    ok(zero, "%s: a row of nearly nothing gives zero", isa);
    be->ops->weight_destroy(be, m.w);
    forget(&m);
}

static void run_isa(const char *isa)
{
    struct backend *one = open_cpu(isa, 1), *many = open_cpu(isa, 0);
    if (one == NULL) {
        printf("# %s: %s\n", isa, err_text());
        return;
    }
    printf("# %s\n", many->ops->describe(many));
    every_type_multiplies_exactly(many, isa);
    an_embedded_row_is_the_decoded_row(one, isa);
    parts_of_any_type_and_size_stack(many, isa);
    a_float_matrix_may_have_any_width(many, isa);
    swiglu_pairs_gate_and_up(many, isa, 48);
    swiglu_pairs_gate_and_up(many, isa, 21);
    for (size_t i = 0; i < ARRAY_LEN(types); i++)
        a_row_never_depends_on_its_batch(one, many, isa, types[i],
                                         i & 1 ? LINEAR_STORE : LINEAR_SWIGLU);
    a_bad_scale_is_refused_by_name(many, isa);
    bad_activations_reach_the_result(many, isa);
    one->ops->close(one);
    many->ops->close(many);
}

int main(void)
{
    run_isa("avx512");
    run_isa("avx2");
    run_isa("scalar");
    return tap_done();
}
