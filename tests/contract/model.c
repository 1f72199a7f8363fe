/* The forward pass against an oracle: the same tiny random models, decoded to numbers and computed in
 * float64, straight from the file's tensors: interleaved RoPE on rows as stored, so that undoing the
 * permutation is tested too. What the design rounds is rounded here too (K and V to bf16), but a number
 * near the middle between two bf16 falls to the other side after an error of 4e-5 (15-bit activations)
 * in one case of a hundred, and that is what most of the distances printed below consist of.
 * Every weight type, every instruction set this machine has. */
#include "engine/model/internal.h"
#include "engine/text/chat.h"
#include "kernels/log.h"
#include "tests/gguf_writer.h"
#include "tests/model_rig.h"
#include "tests/tap.h"

#include <unistd.h>

enum { TOKENS = 41, MAX_WIDTH = 512 };

static const double FAR =
    3e-3; /* a wrong pair of rows, angle or head is 40 times further and more */

static char model_path[] = "/tmp/spind-model-XXXXXX";

/* y = W x, or y += W x. */
static void multiply(const struct gguf_tensor *t, const double *x, double *y, bool add)
{
    float row[MAX_WIDTH];
    size_t bytes = dtype_row_bytes(t->type, (size_t)t->ne[0]);
    for (size_t r = 0; r < t->ne[1]; r++) {
        double sum = 0;
        dtype_decode(t->type, (const char *)t->data + r * bytes, (size_t)t->ne[0], row);
        for (size_t i = 0; i < t->ne[0]; i++)
            sum += (double)row[i] * x[i];
        y[r] = add ? y[r] + sum : sum;
    }
}

static void normalise(const struct gguf_tensor *gain, const double *x, double eps, double *y)
{
    const float *g = gain->data;
    double sum = 0;
    size_t n = (size_t)gain->ne[0];
    for (size_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] / sqrt(sum / (double)n + eps) * (double)g[i];
}

/* Which numbers of a head turn together is the family's. */
static void rotate(const struct plan *p, double *head, uint32_t pos)
{
    uint32_t dim = p->shape.head_dim;
    for (uint32_t i = 0; i < dim / 2; i++) {
        uint32_t x = p->family->halves ? i : 2 * i, y = p->family->halves ? i + dim / 2 : 2 * i + 1;
        double freq = pow((double)p->shape.rope_base, -2.0 * i / dim) / (double)p->rope_divisor;
        if (p->rope_freqs != NULL)
            freq /= (double)((const float *)p->rope_freqs->data)[i];
        double a = head[x], b = head[y], c = cos(pos * freq), s = sin(pos * freq);
        head[x] = a * c - b * s;
        head[y] = a * s + b * c;
    }
}

static double stored(double v)
{
    return (double)bf16_to_f32(f32_to_bf16((float)v));
}

struct oracle {
    const struct plan *p;
    double x[TOKENS][MAX_WIDTH];
    double k[TOKENS][MAX_WIDTH], v[TOKENS][MAX_WIDTH]; /* of the layer at hand */
};

static void attend_one(const struct oracle *o, const double *q, uint32_t pos, uint32_t head,
                       double *out)
{
    const struct model_shape *s = &o->p->shape;
    uint32_t dim = s->head_dim, at = head / (s->heads / s->kv_heads) * dim;
    double score[TOKENS], max = -INFINITY, sum = 0;
    for (uint32_t j = 0; j <= pos; j++) {
        score[j] = 0;
        for (uint32_t i = 0; i < dim; i++)
            score[j] += q[i] * o->k[j][at + i];
        score[j] *= (double)o->p->attn_scale;
        max = score[j] > max ? score[j] : max;
    }
    memset(out, 0, dim * sizeof *out);
    for (uint32_t j = 0; j <= pos; j++) {
        double w = exp(score[j] - max);
        sum += w;
        for (uint32_t i = 0; i < dim; i++)
            out[i] += w * o->v[j][at + i];
    }
    for (uint32_t i = 0; i < dim; i++)
        out[i] /= sum;
}

/* What a family does to n heads of q, k or v. */
static void prepare(const struct plan *p, double *heads, uint32_t n, const struct gguf_tensor *bias,
                    const struct gguf_tensor *gain)
{
    uint32_t dim = p->shape.head_dim;
    for (uint32_t i = 0; bias != NULL && i < n * dim; i++)
        heads[i] += (double)((const float *)bias->data)[i];
    for (uint32_t h = 0; gain != NULL && h < n; h++)
        normalise(gain, heads + (size_t)h * dim, (double)p->shape.norm_eps,
                  heads + (size_t)h * dim);
}

static void layer_of(struct oracle *o, const struct plan_layer *l)
{
    const struct model_shape *s = &o->p->shape;
    double h[MAX_WIDTH], q[MAX_WIDTH], att[MAX_WIDTH], gate[MAX_WIDTH], up[MAX_WIDTH];
    for (uint32_t pos = 0; pos < TOKENS; pos++) {
        double *x = o->x[pos];
        normalise(l->attn_norm, x, (double)s->norm_eps, h);
        multiply(l->q, h, q, false);
        multiply(l->k, h, o->k[pos], false);
        multiply(l->v, h, o->v[pos], false);
        prepare(o->p, q, s->heads, l->bias[0], l->q_norm);
        prepare(o->p, o->k[pos], s->kv_heads, l->bias[1], l->k_norm);
        prepare(o->p, o->v[pos], s->kv_heads, l->bias[2], NULL);
        for (uint32_t i = 0; i < s->kv_heads; i++)
            rotate(o->p, o->k[pos] + (size_t)i * s->head_dim, pos);
        for (uint32_t i = 0; i < s->kv_heads * s->head_dim; i++) {
            o->k[pos][i] = stored(o->k[pos][i]);
            o->v[pos][i] = stored(o->v[pos][i]);
        }
        for (uint32_t i = 0; i < s->heads; i++) {
            rotate(o->p, q + (size_t)i * s->head_dim, pos);
            attend_one(o, q + (size_t)i * s->head_dim, pos, i, att + (size_t)i * s->head_dim);
        }
        multiply(l->out, att, x, true);
        normalise(l->ffn_norm, x, (double)s->norm_eps, h);
        multiply(l->gate, h, gate, false);
        multiply(l->up, h, up, false);
        for (uint32_t i = 0; i < s->ff; i++)
            gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
        multiply(l->down, gate, x, true);
    }
}

/* out: [TOKENS][vocab] */
static void oracle_run(const struct plan *p, const uint32_t *tokens, double *out)
{
    const struct model_shape *s = &p->shape;
    struct oracle *o = mem_alloc(sizeof *o);
    size_t bytes = dtype_row_bytes(p->embedding->type, s->hidden);
    o->p = p;
    for (uint32_t pos = 0; pos < TOKENS; pos++) {
        float row[MAX_WIDTH];
        dtype_decode(p->embedding->type, (const char *)p->embedding->data + tokens[pos] * bytes,
                     s->hidden, row);
        for (uint32_t i = 0; i < s->hidden; i++)
            o->x[pos][i] = (double)row[i];
    }
    for (uint32_t i = 0; i < s->layers; i++)
        layer_of(o, &p->layers[i]);
    for (uint32_t pos = 0; pos < TOKENS; pos++) {
        double h[MAX_WIDTH];
        normalise(p->final_norm, o->x[pos], (double)s->norm_eps, h);
        multiply(p->head ? p->head : p->embedding, h, out + (size_t)pos * s->vocab, false);
    }
    mem_free(o);
}

/* Root of the mean squared difference, in deviations of the oracle's logits. */
static double distance(const float *got, const double *want, size_t n)
{
    double diff = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        diff += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += want[i] * want[i];
    }
    return sqrt(diff / size);
}

static void save(struct gguf_writer *w)
{
    struct bytes f = gw_finish(w);
    bytes_save(&f, model_path);
    bytes_free(&f);
}

static double compare(struct backend *be)
{
    struct gguf *g;
    struct plan p;
    struct model *m;
    struct rig r;
    uint32_t tokens[TOKENS];
    uint64_t rng = 7;
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = (uint32_t)(tiny_random(&rng) % TINY_VOCAB);
    rig_must(gguf_open(&g, model_path));
    rig_must(llama_plan(&p, g));
    rig_must(model_load(&m, be, model_path, 64));
    rig_must(model_reserve(m, TOKENS, TOKENS));
    size_t n = (size_t)TOKENS * p.shape.vocab;
    double *want = mem_alloc(n * sizeof *want);
    oracle_run(&p, tokens, want);
    rig_open(&r, be, m, 8, 1, TOKENS);
    struct rig_part part = {.n = TOKENS, .tokens = tokens};
    double d = distance(rig_step(&r, &part, 1, NULL, 0), want, n);
    rig_close(&r);
    model_destroy(m);
    plan_fini(&p);
    gguf_close(g);
    mem_free(want);
    return d;
}

static void every_type_of_weight_computes_what_it_says(struct backend *be, const char *isa)
{
    static const enum dtype types[] = {
#define X(name, text, id, block, bytes) name,
        DTYPE_LIST(X)
#undef X
    };
    for (size_t i = 0; i < ARRAY_LEN(types); i++) {
        struct gguf_writer w = {0};
        tiny_model(&w, &(struct tiny_spec){.type = types[i], .embed_type = types[i], .seed = i});
        save(&w);
        double d = compare(be);
        ok(d < FAR, "%s, %s: the logits are those of float64 (%.1e apart)", isa,
           dtype_find(types[i])->name, d);
    }
}

static void shapes_of_all_kinds_are_served(struct backend *be, const char *isa)
{
    static const char *const names[] = {
        "a head of its own and frequency divisors are used",
        "widths that no vector divides are served",
        "more layers, and as many KV heads as heads, are served",
        "three heads on one KV head are served",
        "a single head of 512 is served",
        "64 heads of 2 are served",
        "qwen2: biases of q, k and v",
        "qwen3: norms of heads, which are wider than their share",
        "qwen3: heads of 6 numbers, frequency divisors",
    };
    static const struct tiny_spec specs[] = {
        {.type = DTYPE_Q4_1, .embed_type = DTYPE_Q8_0, .untied = true, .rope_freqs = true},
        {.type = DTYPE_F32, .hidden = 20, .ff = 7, .heads = 2, .kv_heads = 1, .layers = 1},
        {.type = DTYPE_F16, .hidden = 36, .ff = 50, .heads = 3, .kv_heads = 3, .layers = 3},
        {.type = DTYPE_Q4_0, .hidden = 96, .ff = 160, .heads = 3, .kv_heads = 1},
        {.type = DTYPE_Q8_0, .hidden = 512, .ff = 32, .heads = 1, .kv_heads = 1},
        {.type = DTYPE_Q5_1, .hidden = 128, .ff = 96, .heads = 64, .kv_heads = 32},
        {.type = DTYPE_Q8_0, .embed_type = DTYPE_F16, .arch = "qwen2", .untied = true},
        {.type = DTYPE_BF16, .embed_type = DTYPE_BF16, .arch = "qwen3", .head_dim = 128},
        {.type = DTYPE_F32, .arch = "qwen3", .head_dim = 6, .hidden = 40, .rope_freqs = true},
    };
    for (size_t i = 0; i < ARRAY_LEN(specs); i++) {
        struct gguf_writer w = {0};
        gw_string(&w, tiny_key(&specs[i], "rope.scaling.type"), i % 2 ? "linear" : "none");
        gw_f32(&w, tiny_key(&specs[i], "rope.scaling.factor"), 4.0f);
        tiny_model(&w, &specs[i]);
        save(&w);
        double d = compare(be);
        ok(d < FAR, "%s: %s (%.1e apart)", isa, names[i], d);
    }
}

static void what_was_loaded_is_told(struct backend *be)
{
    struct model *m;
    struct gguf_writer w = {0};
    size_t len;
    tiny_model(&w, &(struct tiny_spec){.type = DTYPE_Q4_1, .templated = true});
    save(&w);
    rig_must(model_load(&m, be, model_path, 0));
    const struct model_info *info = model_info(m);
    ok(strcmp(info->name, "Tiny") == 0 && strcmp(info->architecture, "llama") == 0,
       "name and architecture");
    is_int(info->shape.max_positions, 256, "0 asks for the model's own context");
    ok(info->n_end_ids == 2 && info->end_ids[0] == 2 && info->end_ids[1] == 0,
       "texts end with eos and with control tokens known to end one");
    ok(tokenizer_vocab(model_tokenizer(m)) == TINY_VOCAB, "the tokenizer has the file's tokens");
    ok(model_chat(m) != NULL && chat_template_source(model_chat(m), &len) != NULL &&
           len == strlen(tiny_template),
       "the chat template is found");
    is_int(info->n_params,
           2 * (256 * (256 + 128 + 128 + 256 + 3 * 256) + 512) + 256 + 256 * TINY_VOCAB,
           "every number counts once");
    model_destroy(m);
    ok(model_load(&m, be, model_path, 257) == ERR_ARG && strstr(err_text(), "has 256 positions"),
       "a longer context than the model's is refused");
}

static void poison_is_refused(struct backend *be)
{
    struct model *m;
    struct gguf_writer w = {.leave_out = "blk.1.ffn_up.weight"};
    const uint64_t ne[] = {256, 256}, norm = 256;
    unsigned char *data = mem_alloc(256 * 8 * 20);
    tiny_f16(data + 100 * 20 * 8, INFINITY);
    tiny_model(&w, &(struct tiny_spec){.type = DTYPE_Q4_1});
    w.leave_out = NULL;
    gw_tensor(&w, "blk.1.ffn_up.weight", DTYPE_Q4_1, 2, ne, data, 256 * 8 * 20);
    save(&w);
    ok(model_load(&m, be, model_path, 0) == ERR_FORMAT && strstr(err_text(), model_path) &&
           strstr(err_text(), "offset ") && strstr(err_text(), "blk.1.ffn_up.weight") &&
           strstr(err_text(), "finite"),
       "a scale that is not finite is refused with its tensor");
    float *nan = mem_alloc(256 * sizeof *nan);
    nan[3] = NAN;
    w.leave_out = "output_norm.weight";
    tiny_model(&w, &(struct tiny_spec){.type = DTYPE_Q4_1});
    w.leave_out = NULL;
    gw_tensor(&w, "output_norm.weight", DTYPE_F32, 1, &norm, nan, 256 * sizeof *nan);
    save(&w);
    ok(model_load(&m, be, model_path, 0) == ERR_FORMAT &&
           strstr(err_text(), "number 3 is not finite"),
       "a gain that is not finite is refused with its place");
    mem_free(data);
    mem_free(nan);
}

static void a_prompt_needs_no_logits(struct backend *be)
{
    struct model *m;
    struct rig r;
    struct gguf_writer w = {0};
    const uint32_t tokens[4] = {5, 6, 7, 8}, last = 3, none = 0;
    float want[TINY_VOCAB];
    tiny_model(&w, &(struct tiny_spec){.type = DTYPE_Q4_1});
    save(&w);
    rig_must(model_load(&m, be, model_path, 0));
    rig_must(model_reserve(m, 8, 8));
    rig_open(&r, be, m, 8, 1, 16);
    struct rig_part all = {.n = 4, .tokens = tokens}, head = {.n = 3, .tokens = tokens};
    struct rig_part tail = {.first_pos = 3, .n = 1, .tokens = tokens + 3};
    memcpy(want, rig_step(&r, &all, 1, &last, 1), sizeof want);
    rig_step(&r, &head, 1, &none, 0);
    ok(memcmp(want, rig_step(&r, &tail, 1, NULL, 0), sizeof want) == 0,
       "rows without logits still leave their K and V");
    rig_must(model_reserve(m, 16, 2));
    ok(memcmp(want, rig_step(&r, &tail, 1, NULL, 0), sizeof want) == 0,
       "memory can be reserved again");
    rig_close(&r);
    model_destroy(m);
}

/* What attend was asked for last, which is the last layer. */
static struct batch_seq seen[4];
static void (*real_attend)(struct backend *be, const struct attend_args *a);

static void seeing_attend(struct backend *be, const struct attend_args *a)
{
    CHECK(a->n_seqs <= ARRAY_LEN(seen));
    memcpy(seen, a->seqs, a->n_seqs * sizeof *seen);
    real_attend(be, a);
}

/* Nobody may read those pages before append has written them, whatever rows are left (batch_seq.n_before). */
static void the_last_layer_says_what_its_step_appended(struct backend *be)
{
    struct model *m;
    struct rig r;
    struct gguf_writer w = {0};
    struct backend_ops ops = *be->ops;
    const struct backend_ops *real = be->ops;
    const uint32_t tokens[10] = {5, 6, 7, 8}, wanted[] = {9, 10, 14, 16};
    tiny_model(&w, &(struct tiny_spec){.type = DTYPE_Q4_1});
    save(&w);
    rig_must(model_load(&m, be, model_path, 0));
    rig_must(model_reserve(m, 32, 8));
    rig_open(&r, be, m, 8, 4, 32);
    const struct rig_part before[] = {{.seq = 0, .n = 6, .tokens = tokens},
                                      {.seq = 1, .n = 9, .tokens = tokens}};
    const struct rig_part parts[] = {{.seq = 0, .first_pos = 6, .n = 10, .tokens = tokens},
                                     {.seq = 1, .first_pos = 9, .n = 1, .tokens = tokens},
                                     {.seq = 2, .n = 6, .tokens = tokens}};
    rig_step(&r, before, 2, wanted, 0);
    real_attend = ops.attend;
    ops.attend = seeing_attend;
    be->ops = &ops;
    rig_step(&r, parts, 3, wanted, ARRAY_LEN(wanted));
    be->ops = real;
    bool right = true;
    static const uint32_t want[][3] = {{15, 1, 9}, {9, 1, 0}, {3, 3, 3}};
    for (uint32_t i = 0; i < ARRAY_LEN(want); i++)
        right = right && seen[i].first_pos == want[i][0] && seen[i].n_rows == want[i][1] &&
                seen[i].n_before == want[i][2];
    ok(right, "the last layer attends the rows of logits, and says how many before them are new");
    rig_close(&r);
    model_destroy(m);
}

static void a_mock_has_shape_and_words_but_no_weights(void)
{
    struct backend *be;
    struct model *m;
    struct rig r;
    const uint32_t tokens[20] = {1, 2, 3};
    rig_must(mock_backend_open(&be, &(struct mock_options){.n_tokens = 3}));
    rig_must(model_create_mock(&m, be, 64));
    rig_must(model_reserve(m, 32, 32));
    const struct model_info *info = model_info(m);
    ok(info->shape.layers == 30 && info->shape.max_positions == 64,
       "the mock has the default's shape");
    ok(info->shape.vocab == tokenizer_vocab(model_tokenizer(m)) && model_chat(m) != NULL,
       "a tokenizer and a chat template");
    ok(info->n_end_ids == 2, "and tokens that end a text");
    rig_open(&r, be, m, 16, 2, 64);
    struct rig_part parts[2] = {{.seq = 0, .n = 20, .tokens = tokens},
                                {.seq = 1, .n = 3, .tokens = tokens}};
    ok(rig_step(&r, parts, 2, NULL, 0) != NULL, "a batch runs, and finds its blocks");
    rig_close(&r);
    model_destroy(m);
    be->ops->close(be);
}

static void a_context_beyond_reason_is_refused(struct backend *be)
{
    struct model *m;
    struct gguf_writer w = {0};
    tiny_model(&w, &(struct tiny_spec){.heads = 1, .kv_heads = 1, .positions = 1 << 24});
    save(&w);
    ok(model_load(&m, be, model_path, 0) == ERR_MEMORY && strstr(err_text(), "--max-model-len"),
       "16 million positions are not allocated because a file says so");
    ok(model_load(&m, be, model_path, 1000) == OK, "a part of them is served");
    model_destroy(m);
}

int main(void)
{
    static const char *const isas[] = {"scalar", "avx2", "avx512"};
    int fd = mkstemp(model_path);
    if (fd < 0)
        return 1;
    close(fd);
    log_set_level(LOG_ERROR);
    for (size_t i = 0; i < ARRAY_LEN(isas); i++) {
        struct backend *be;
        const struct cpu_options o = {.isa = isas[i], .n_threads = 2};
        if (cpu_backend_open(&be, &o) != OK) {
            printf("# this machine has no %s\n", isas[i]);
            continue;
        }
        every_type_of_weight_computes_what_it_says(be, isas[i]);
        shapes_of_all_kinds_are_served(be, isas[i]);
        if (i == 0) {
            what_was_loaded_is_told(be);
            poison_is_refused(be);
            a_prompt_needs_no_logits(be);
            the_last_layer_says_what_its_step_appended(be);
            a_context_beyond_reason_is_refused(be);
            a_mock_has_shape_and_words_but_no_weights();
        }
        be->ops->close(be);
    }
    unlink(model_path);
    return tap_done();
}
