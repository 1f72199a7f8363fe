/* Append and attend of the CPU backend: right against float64, and bit for bit independent of how
 * a prompt was cut, of the batch, of threads and of R.
 *
 * All of it with pages of bf16 and of e4m3: what is rounded is rounded once, and then exact.
 * Every case makes rows from (stream, position) alone, so the same stream can be run in different
 * ways and compared. The reference rotates and rounds k and v itself and sums in double. */
#include "kernels/cpu/cpu.h"
#include "tests/tap.h"

#include <math.h>

struct shape {
    uint32_t rows, heads, kv_heads, dim; /* rows: R */
};

enum { LAYERS = 2, LAYER = 1, MAX_SEQS = 16 };

static const char *const isa_names[] = {"scalar", "AVX2", "AVX-512"};

/* What the cases that run keep in pages. */
static enum kv_type kept;
static const char *const kept_names[] = {"bf16", "e4m3"};

static float rounded(float x)
{
    return kept == KV_E4M3 ? e4m3_to_f32(f32_to_e4m3(x)) : bf16_to_f32(f32_to_bf16(x));
}

static bool isa_runs(enum isa isa)
{
#if defined(__x86_64__)
    if (isa == ISA_AVX512)
        return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl");
    if (isa == ISA_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return isa == ISA_SCALAR;
}

static float noise(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t x = a * 0x9e3779b1u ^ b * 0x85ebca6bu ^ c * 0xc2b2ae35u;
    x ^= x >> 15;
    x *= 0x2c1b3c6du;
    x ^= x >> 12;
    x *= 0x297a2d39u;
    x ^= x >> 15;
    return (float)x / 2147483648.0f - 1.0f;
}

/* Row of a stream before append; queries are large enough for a peaked softmax. */
static void make_row(float *row, const struct shape *s, uint32_t stream, uint32_t pos)
{
    uint32_t n = (s->heads + 2 * s->kv_heads) * s->dim;
    for (uint32_t i = 0; i < n; i++)
        row[i] = noise(stream, pos, i) * (i < s->heads * s->dim ? 3.0f : 1.5f);
}

struct tables {
    float *cos, *sin;
};

static struct tables make_tables(uint32_t max, uint32_t dim)
{
    struct tables t = {mem_alloc((size_t)max * dim * 2), mem_alloc((size_t)max * dim * 2)};
    for (uint32_t p = 0; p < max; p++)
        for (uint32_t i = 0; i < dim / 2; i++) {
            double angle = p * pow(10000.0, -2.0 * i / dim);
            t.cos[(size_t)p * (dim / 2) + i] = (float)cos(angle);
            t.sin[(size_t)p * (dim / 2) + i] = (float)sin(angle);
        }
    return t;
}

static void free_tables(struct tables t)
{
    mem_free(t.cos);
    mem_free(t.sin);
}

static void rotate(float *x, const struct tables *t, uint32_t pos, uint32_t dim)
{
    for (uint32_t i = 0; i < dim / 2; i++) {
        float c = t->cos[(size_t)pos * (dim / 2) + i], s = t->sin[(size_t)pos * (dim / 2) + i];
        float a = x[i], b = x[dim / 2 + i];
        x[i] = a * c - b * s;
        x[dim / 2 + i] = b * c + a * s;
    }
}

/* ---- the backend under test ---- */

struct world {
    struct cpu_backend be;
    struct kv_geometry geo;
    struct shape s;
    struct tables t;
    uint8_t *arena;
    struct kv_memory kv;
    size_t arena_bytes;
    block_id *blocks[MAX_SEQS];
};

/* Blocks of the sequences are interleaved and descending; everything unwritten is NaN. */
static struct world *open_world(enum isa isa, uint32_t threads, struct shape s, uint32_t n_seqs,
                                uint32_t max_len)
{
    struct world *w = mem_alloc(sizeof *w);
    uint32_t per_seq = (max_len + s.rows - 1) / s.rows, n_blocks = per_seq * n_seqs;
    w->s = s;
    w->be.isa = isa;
    CHECK(pool_create(&w->be.pool, threads, false) == OK);
    CHECK(cpu_attend_open(&w->be) == OK && cpu_plan_open(&w->be) == OK);
    w->geo = (struct kv_geometry){
        .block_rows = s.rows, .layers = LAYERS, .kv_heads = s.kv_heads, .head_dim = s.dim};
    w->geo.type = kept;
    w->geo.page_bytes = kv_page_bytes(&w->geo);
    w->geo.block_bytes[LANE_SPARSE] = w->geo.page_bytes * LAYERS * s.kv_heads;
    w->arena_bytes = n_blocks * w->geo.block_bytes[LANE_SPARSE];
    w->arena = mem_alloc(w->arena_bytes);
    memset(w->arena, 0xff, w->arena_bytes);
    w->kv = (struct kv_memory){.geo = &w->geo, .hbm = {w->arena}};
    for (uint32_t i = 0; i < n_seqs; i++) {
        w->blocks[i] = mem_alloc(per_seq * sizeof(block_id));
        for (uint32_t b = 0; b < per_seq; b++)
            w->blocks[i][b] = n_blocks - 1 - (b * n_seqs + i);
    }
    w->t = make_tables(max_len, s.dim);
    return w;
}

static void close_world(struct world *w)
{
    cpu_attend_close(&w->be);
    cpu_plan_close(&w->be);
    pool_destroy(w->be.pool);
    for (int i = 0; i < MAX_SEQS; i++)
        mem_free(w->blocks[i]);
    mem_free(w->arena);
    free_tables(w->t);
    mem_free(w);
}

/* One step: rows [from[i], to[i]) of stream i, in one batch; results go to out[i][pos]. */
static void step(struct world *w, uint32_t n, const uint32_t *streams, const uint32_t *from,
                 const uint32_t *to, float *const *out)
{
    struct batch_seq seqs[MAX_SEQS];
    size_t width = (size_t)(w->s.heads + 2 * w->s.kv_heads) * w->s.dim;
    size_t out_width = (size_t)w->s.heads * w->s.dim, n_rows = 0;
    for (uint32_t i = 0; i < n; i++) {
        seqs[i] = (struct batch_seq){.first_row = (uint32_t)n_rows,
                                     .n_rows = to[i] - from[i],
                                     .first_pos = from[i],
                                     .blocks = {w->blocks[i]}};
        n_rows += to[i] - from[i];
    }
    float *qkv = mem_alloc(n_rows * width * sizeof *qkv);
    float *res = mem_alloc(n_rows * out_width * sizeof *res);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t r = 0; r < seqs[i].n_rows; r++)
            make_row(qkv + (seqs[i].first_row + r) * width, &w->s, streams[i], from[i] + r);
    cpu_append(&w->be.base, &(struct append_args){.kv = &w->kv,
                                                  .layer = LAYER,
                                                  .heads = w->s.heads,
                                                  .seqs = seqs,
                                                  .n_seqs = n,
                                                  .rope_cos = w->t.cos,
                                                  .rope_sin = w->t.sin,
                                                  .qkv = qkv});
    cpu_attend(&w->be.base, &(struct attend_args){.kv = &w->kv,
                                                  .layer = LAYER,
                                                  .heads = w->s.heads,
                                                  .seqs = seqs,
                                                  .n_seqs = n,
                                                  .scale = 1.0f / sqrtf((float)w->s.dim),
                                                  .qkv = qkv,
                                                  .out = res});
    for (uint32_t i = 0; i < n; i++)
        if (out[i] != NULL)
            memcpy(out[i] + from[i] * out_width, res + seqs[i].first_row * out_width,
                   seqs[i].n_rows * out_width * sizeof *res);
    mem_free(qkv);
    mem_free(res);
}

/* Runs one stream alone in chunks; returns [len][heads * dim]. */
static float *run_alone(enum isa isa, uint32_t threads, struct shape s, uint32_t stream,
                        uint32_t len, uint32_t chunk)
{
    struct world *w = open_world(isa, threads, s, 1, len);
    float *out = mem_alloc((size_t)len * s.heads * s.dim * sizeof *out);
    for (uint32_t from = 0; from < len; from += chunk) {
        uint32_t to = from + chunk < len ? from + chunk : len;
        step(w, 1, &stream, &from, &to, &out);
    }
    close_world(w);
    return out;
}

/* ---- the reference ---- */

struct reference {
    struct shape s;
    uint32_t stream;
    struct tables t;
    double *k, *v; /* [len][kv_heads][dim], rounded */
};

static struct reference make_reference(struct shape s, uint32_t stream, uint32_t len)
{
    struct reference r = {.s = s, .stream = stream, .t = make_tables(len, s.dim)};
    size_t kv = (size_t)s.kv_heads * s.dim;
    r.k = mem_alloc(len * kv * sizeof(double));
    r.v = mem_alloc(len * kv * sizeof(double));
    float *row = mem_alloc(((size_t)s.heads * s.dim + 2 * kv) * sizeof *row);
    for (uint32_t p = 0; p < len; p++) {
        make_row(row, &s, stream, p);
        float *k = row + (size_t)s.heads * s.dim;
        for (uint32_t h = 0; h < s.kv_heads; h++)
            rotate(k + (size_t)h * s.dim, &r.t, p, s.dim);
        for (size_t i = 0; i < kv; i++) {
            r.k[p * kv + i] = (double)rounded(k[i]);
            r.v[p * kv + i] = (double)rounded(k[kv + i]);
        }
    }
    mem_free(row);
    return r;
}

static void free_reference(struct reference *r)
{
    free_tables(r->t);
    mem_free(r->k);
    mem_free(r->v);
}

static void reference_head(const struct reference *r, const float *q, uint32_t pos, uint32_t h,
                           double *out)
{
    uint32_t dim = r->s.dim;
    size_t kv = (size_t)r->s.kv_heads * dim, at = (size_t)(h / (r->s.heads / r->s.kv_heads)) * dim;
    double *p = mem_alloc((pos + 1) * sizeof *p), max = -INFINITY, sum = 0;
    for (uint32_t t = 0; t <= pos; t++) {
        p[t] = 0;
        for (uint32_t i = 0; i < dim; i++)
            p[t] += (double)q[i] * r->k[t * kv + at + i];
        p[t] /= sqrt(dim);
        max = fmax(max, p[t]);
    }
    memset(out, 0, dim * sizeof *out);
    for (uint32_t t = 0; t <= pos; t++) {
        double e = exp(p[t] - max);
        sum += e;
        for (uint32_t i = 0; i < dim; i++)
            out[i] += e * r->v[t * kv + at + i];
    }
    for (uint32_t i = 0; i < dim; i++)
        out[i] /= sum;
    mem_free(p);
}

/* Largest difference of row `pos` from the reference, relative to the largest value (about 1). */
static double row_error(const struct reference *r, const float *out, uint32_t pos)
{
    uint32_t dim = r->s.dim;
    double worst = 0, *want = mem_alloc(dim * sizeof *want);
    float *row = mem_alloc((size_t)(r->s.heads + 2 * r->s.kv_heads) * dim * sizeof *row);
    make_row(row, &r->s, r->stream, pos);
    for (uint32_t h = 0; h < r->s.heads; h++) {
        rotate(row + (size_t)h * dim, &r->t, pos, dim);
        reference_head(r, row + (size_t)h * dim, pos, h, want);
        for (uint32_t i = 0; i < dim; i++) {
            double e = fabs((double)out[((size_t)pos * r->s.heads + h) * dim + i] - want[i]);
            worst = e <= worst ? worst : e; /* NaN comes through */
        }
    }
    mem_free(row);
    mem_free(want);
    return worst;
}

/* ---- cases ---- */

static double borders_error(enum isa isa, struct shape s, uint32_t len, uint32_t chunk)
{
    const uint32_t borders[] = {1,   s.rows - 1, s.rows, s.rows + 1, 15,   16,   17,  63,
                                64,  65,         127,    128,        129,  255,  256, 257,
                                300, 511,        512,    513,        1024, 1799, 1800};
    float *out = run_alone(isa, 2, s, 7, len, chunk);
    struct reference r = make_reference(s, 7, len);
    double worst = 0;
    for (size_t i = 0; i < ARRAY_LEN(borders); i++)
        if (borders[i] <= len) {
            double e = row_error(&r, out, borders[i] - 1);
            worst = e <= worst ? worst : e;
        }
    free_reference(&r);
    mem_free(out);
    return worst;
}

/* Portable code is slow, most of all under sanitizers, and has one loop for every number of dimensions:
 * long contexts are attended with a quarter of them, and of R each shape below has one, in turn. */
static struct shape small_if_scalar(enum isa isa, struct shape s)
{
    if (isa == ISA_SCALAR)
        s.dim /= 4;
    return s;
}

static void every_shape_agrees_with_float64(enum isa isa)
{
    static const uint32_t rows[] = {8, 16, 32}, dims[] = {64, 128, 80, 36, 6};
    static const uint32_t heads[][2] = {{2, 2}, {9, 3}, {4, 1}, {8, 1}, {10, 2}};
    /* Pages of fp8 differ in how a number is read. */
    const bool in_turn = isa == ISA_SCALAR || kept == KV_E4M3 || TAP_SANITIZED;
    for (size_t d = 0; d < ARRAY_LEN(dims); d++)
        for (size_t h = 0; h < ARRAY_LEN(heads); h++) {
            double worst = 0;
            for (size_t r = 0; r < ARRAY_LEN(rows); r++) {
                struct shape s = {rows[r], heads[h][0], heads[h][1], dims[d]};
                if (in_turn && (d + h) % ARRAY_LEN(rows) != r)
                    continue;
                uint32_t len = isa == ISA_SCALAR ? 130 : d < 2 && !TAP_SANITIZED ? 530 : 270;
                worst = fmax(worst, borders_error(isa, s, len, 1));
                double e = borders_error(isa, s, len, 512);
                worst = e <= worst ? worst : e;
            }
            ok(worst < 1e-5,
               "%s, %s: %u heads over %u, %u dimensions, R 8 to 32: within 1e-5 (%.1e)",
               isa_names[isa], kept_names[kept], heads[h][0], heads[h][1], dims[d], worst);
        }
    double e = borders_error(isa, small_if_scalar(isa, (struct shape){16, 3, 1, 64}), 1800, 100);
    ok(e < 1e-5, "%s, %s: 1,800 positions in chunks of 100: within 1e-5 (%.1e)", isa_names[isa],
       kept_names[kept], e);
}

static bool same(const float *a, const float *b, size_t n)
{
    return memcmp(a, b, n * sizeof *a) == 0;
}

static void how_a_prompt_is_cut_changes_no_bit(enum isa isa, struct shape s, uint32_t len)
{
    s = small_if_scalar(isa, s);
    static const uint32_t chunks[] = {1, 7, 16, 100, 512};
    size_t n = (size_t)len * s.heads * s.dim;
    float *whole = run_alone(isa, 2, s, 3, len, len);
    for (size_t i = 0; i < ARRAY_LEN(chunks); i++) {
        float *cut = run_alone(isa, 2, s, 3, len, chunks[i]);
        ok(same(whole, cut, n),
           "%s: %u heads over %u, d %u: chunks of %u give the bits of the whole", isa_names[isa],
           s.heads, s.kv_heads, s.dim, chunks[i]);
        mem_free(cut);
    }
    float *one = run_alone(isa, 1, s, 3, len, 64);
    ok(same(whole, one, n), "%s: one thread gives the bits of two", isa_names[isa]);
    mem_free(one);
    for (uint32_t r = 8; r <= 32; r *= 2) {
        struct shape other = s;
        other.rows = r;
        float *out = run_alone(isa, 2, other, 3, len, 50);
        ok(same(whole, out, n), "%s: R = %u gives the bits of R = %u", isa_names[isa], r, s.rows);
        mem_free(out);
    }
    mem_free(whole);
}

/* Sixteen streams of different lengths: prompts first, then all decode together for a while. */
static void a_batch_of_sixteen_changes_no_bit(enum isa isa)
{
    struct shape s = small_if_scalar(isa, (struct shape){16, 9, 3, 64});
    enum { STEPS = 20 };
    uint32_t streams[MAX_SEQS], from[MAX_SEQS], to[MAX_SEQS];
    float *out[MAX_SEQS], *nothing[MAX_SEQS] = {0};
    size_t width = (size_t)s.heads * s.dim;
    struct world *w = open_world(isa, 2, s, MAX_SEQS, 800);
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        streams[i] = 100 + i;
        from[i] = 0;
        to[i] = 5 + i * i * 3;
        out[i] = mem_alloc(800 * width * sizeof(float));
    }
    step(w, MAX_SEQS, streams, from, to, nothing);
    for (int k = 0; k < STEPS; k++) {
        for (uint32_t i = 0; i < MAX_SEQS; i++)
            from[i] = to[i]++;
        step(w, MAX_SEQS, streams, from, to, out);
    }
    int equal = 0;
    for (uint32_t i = 0; i < MAX_SEQS; i++) {
        float *alone = run_alone(isa, 1, s, streams[i], to[i], 64);
        equal +=
            same(alone + (to[i] - STEPS) * width, out[i] + (to[i] - STEPS) * width, STEPS * width);
        mem_free(alone);
        mem_free(out[i]);
    }
    is_int(equal, MAX_SEQS, "each of sixteen streams in a batch has the bits it has alone");
    close_world(w);
}

static void a_spoilt_row_spoils_no_other(enum isa isa)
{
    struct shape s = {8, 6, 2, 32};
    enum { LEN = 100, BAD = 70 };
    struct world *w = open_world(isa, 2, s, 1, LEN);
    size_t width = (size_t)(s.heads + 2 * s.kv_heads) * s.dim;
    size_t out_width = (size_t)s.heads * s.dim;
    float *qkv = mem_alloc(LEN * width * 4), *out = mem_alloc(LEN * out_width * 4);
    for (uint32_t p = 0; p < LEN; p++)
        make_row(qkv + p * width, &s, 1, p);
    for (size_t i = 0; i < width; i++)
        qkv[BAD * width + i] = NAN;
    struct batch_seq q = {.n_rows = LEN, .blocks = {w->blocks[0]}};
    cpu_append(&w->be.base, &(struct append_args){.kv = &w->kv,
                                                  .layer = LAYER,
                                                  .heads = s.heads,
                                                  .seqs = &q,
                                                  .n_seqs = 1,
                                                  .rope_cos = w->t.cos,
                                                  .rope_sin = w->t.sin,
                                                  .qkv = qkv});
    cpu_attend(&w->be.base, &(struct attend_args){.kv = &w->kv,
                                                  .layer = LAYER,
                                                  .heads = s.heads,
                                                  .seqs = &q,
                                                  .n_seqs = 1,
                                                  .scale = 0.2f,
                                                  .qkv = qkv,
                                                  .out = out});
    int clean = 1, spoilt = 1;
    for (uint32_t p = 0; p < LEN; p++)
        for (size_t i = 0; i < out_width; i++) {
            bool nan = isnan(out[p * out_width + i]);
            clean &= p >= BAD || !nan;
            spoilt &= p < BAD || nan;
        }
    ok(clean && spoilt, "%s: a NaN at position 70 reaches rows from 70 on and no row before",
       isa_names[isa]);
    mem_free(qkv);
    mem_free(out);
    close_world(w);
}

/* Numbers of every size in K and V: what is read back is what kernels/dtype.h rounds to. */
static void every_instruction_set_rounds_alike(enum isa isa)
{
    enum { DIM = 128, ROWS = 32 };
    struct shape s = {ROWS, 1, 1, DIM};
    struct world *w = open_world(isa, 1, s, 1, ROWS);
    float *qkv = mem_alloc((size_t)ROWS * 3 * DIM * sizeof *qkv), k[DIM], v[DIM];
    int wrong = 0;
    for (size_t i = 0; i < (size_t)ROWS * 3 * DIM;
         i++) /* 2^-13 .. 2^13: subnormals and saturation */
        qkv[i] = ldexpf(noise(5, (uint32_t)i, 1), (int)(i * 7 % 26) - 13);
    qkv[2 * DIM] = 464.0f; /* the middle between 448 and what would be next */
    qkv[2 * DIM + 1] = -INFINITY;
    qkv[2 * DIM + 2] = 0x1.8p-9f; /* to even */
    qkv[2 * DIM + 3] = 0x1p-10f;
    for (size_t i = 0; i < (size_t)DIM / 2 * ROWS; i++)
        w->t.cos[i] = 1, w->t.sin[i] = 0;
    struct batch_seq q = {.n_rows = ROWS, .blocks = {w->blocks[0]}};
    cpu_append(&w->be.base, &(struct append_args){.kv = &w->kv,
                                                  .layer = LAYER,
                                                  .heads = 1,
                                                  .seqs = &q,
                                                  .n_seqs = 1,
                                                  .rope_cos = w->t.cos,
                                                  .rope_sin = w->t.sin,
                                                  .qkv = qkv});
    for (uint32_t r = 0; r < ROWS; r++) {
        cpu_read(&w->be.base, &(struct read_args){&w->kv, LAYER, 0, w->blocks[0], r, 1, k, v});
        for (uint32_t i = 0; i < DIM; i++) {
            wrong += k[i] != rounded(qkv[(size_t)r * 3 * DIM + DIM + i]);
            wrong += v[i] != rounded(qkv[(size_t)r * 3 * DIM + 2 * DIM + i]);
        }
    }
    ok(wrong == 0, "%s, %s: append rounds as kernels/dtype.h does (%d do not)", isa_names[isa],
       kept_names[kept], wrong);
    mem_free(qkv);
    close_world(w);
}

int main(void)
{
    for (int i = ISA_SCALAR; i <= ISA_AVX512; i++) {
        enum isa isa = (enum isa)i;
        if (!isa_runs(isa)) {
            ok(1, "%s # SKIP not on this machine", isa_names[i]);
            continue;
        }
        kept = KV_BF16;
        every_shape_agrees_with_float64(isa);
        how_a_prompt_is_cut_changes_no_bit(isa, (struct shape){16, 9, 3, 64}, 600);
        how_a_prompt_is_cut_changes_no_bit(isa, (struct shape){32, 5, 5, 80}, 330);
        if (!TAP_SANITIZED) {
            how_a_prompt_is_cut_changes_no_bit(isa, (struct shape){8, 8, 1, 128}, 530);
            how_a_prompt_is_cut_changes_no_bit(isa, (struct shape){16, 10, 2, 64}, 270);
        }
        if (!TAP_SANITIZED || isa == ISA_SCALAR)
            a_batch_of_sixteen_changes_no_bit(isa);
        a_spoilt_row_spoils_no_other(isa);
        kept = KV_E4M3;
        every_shape_agrees_with_float64(isa);
        if (!TAP_SANITIZED) { /* slow there, and no other memory than above */
            how_a_prompt_is_cut_changes_no_bit(isa, (struct shape){16, 9, 3, 64}, 600);
            how_a_prompt_is_cut_changes_no_bit(isa, (struct shape){32, 5, 5, 80}, 330);
            a_batch_of_sixteen_changes_no_bit(isa);
        }
        a_spoilt_row_spoils_no_other(isa);
        every_instruction_set_rounds_alike(isa);
    }
    return tap_done();
}
