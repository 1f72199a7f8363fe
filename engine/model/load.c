/* model_load: from a checked plan to weights in the backend's form.
 *
 * Matrices that read the same input are stacked: q, k and v; gate and up. GGUF stores the rows of q
 * and k of a llama interleaved, pairs (2i, 2i+1) rotating together, while everything here rotates
 * halves, pairs (i, i + head_dim/2): whole rows change places while packing, which is exact for every
 * stored format. Tensors without data (model_load_dummy) are made up by the backend, where they will
 * lie; of vectors, norms are 1 and biases made up here. Called once, by the engine thread. */
#include "engine/memory_plan.h"
#include "engine/model/internal.h"
#include "engine/text/chat.h"
#include "kernels/core/dummy.h"
#include "kernels/log.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const size_t MAX_ROPE_BYTES = (size_t)4 << 30; /* 8M positions of a head of 128 */

struct loader {
    struct model *m;
    struct gguf *g; /* NULL: a plan without data */
    const char *path;
    const struct plan *plan;
    struct log_progress progress;
    size_t done_bytes;
    uint32_t *halves; /* [heads * head_dim]: row of the file for each row here; a prefix serves k.
                         NULL: the same */
};

/* Every tensor has numbers of its own, whatever is loaded before it (FNV-1a of its name). */
static uint64_t seed_of(const struct gguf_tensor *t)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < t->name.len; i++)
        h = (h ^ (unsigned char)t->name.p[i]) * 0x100000001b3u;
    return h;
}

static struct weight_part part_of(const struct gguf_tensor *t, char *name, size_t room,
                                  uint32_t rows, const uint32_t *row_from)
{
    snprintf(name, room, "%.*s", (int)t->name.len, t->name.p);
    return (struct weight_part){.name = name,
                                .type = t->type,
                                .rows = rows,
                                .data = t->data,
                                .row_from = row_from,
                                .seed = seed_of(t)};
}

/* Up to three tensors, all with the same input, into one weight. */
struct stack {
    const struct gguf_tensor *t[3];
    const uint32_t *row_from[3];
    uint32_t n, rows; /* rows 0: all that the tensors have */
    bool embedding;
};

static status pack(struct loader *l, const struct stack *s, struct weight **out)
{
    char names[3][64];
    struct weight_desc d = {
        .cols = (uint32_t)s->t[0]->ne[0], .n_parts = s->n, .embedding = s->embedding};
    for (uint32_t i = 0; i < s->n; i++) {
        const struct gguf_tensor *t = s->t[i];
        d.parts[i] = part_of(t, names[i], sizeof names[i], s->rows ? s->rows : (uint32_t)t->ne[1],
                             s->row_from[i]);
        l->done_bytes += t->bytes;
        l->m->info.n_params += t->ne[0] * d.parts[i].rows;
    }
    status st = l->m->be->ops->weight_create(l->m->be, &d, out);
    if (st == ERR_FORMAT && l->g != NULL)
        return gguf_refuse(l->g, s->t[0]->data, "%s", err_text());
    if (st != OK)
        return err(st, "%s: %s", l->path, err_text()); /* which tensor it was is in it */
    l->m->info.weight_bytes += l->m->be->ops->weight_bytes(*out);
    log_progress_step(&l->progress, l->done_bytes);
    return OK;
}

/* Row of the file for each row here: h*hd + s*hd/2 + i comes from h*hd + 2i + s. */
static uint32_t *make_halves(const struct model_shape *s)
{
    uint32_t rows = s->heads * s->head_dim, half = s->head_dim / 2;
    uint32_t *from = mem_alloc(rows * sizeof *from);
    for (uint32_t r = 0; r < rows; r++) {
        uint32_t in_head = r % s->head_dim;
        from[r] = r - in_head + 2 * (in_head % half) + in_head / half;
    }
    return from;
}

static status pack_layer(struct loader *l, uint32_t i)
{
    const struct plan_layer *p = &l->plan->layers[i];
    struct layer_weights *to = &l->m->layers[i];
    const struct stack qkv = {.t = {p->q, p->k, p->v}, .row_from = {l->halves, l->halves}, .n = 3};
    const struct stack out = {.t = {p->out}, .n = 1};
    const struct stack gate_up = {.t = {p->gate, p->up}, .n = 2};
    const struct stack down = {.t = {p->down}, .n = 1};
    TRY(pack(l, &qkv, &to->qkv));
    TRY(pack(l, &out, &to->out));
    TRY(pack(l, &gate_up, &to->gate_up));
    return pack(l, &down, &to->down);
}

static status pack_vocab(struct loader *l)
{
    const struct plan *p = l->plan;
    struct model *m = l->m;
    const struct stack embedding = {
        .t = {p->embedding}, .n = 1, .rows = p->shape.vocab, .embedding = true};
    TRY(pack(l, &embedding, &m->embedding));
    m->head = m->embedding;
    if (p->head == NULL)
        return OK;
    const struct stack head = {.t = {p->head}, .n = 1, .rows = p->shape.vocab};
    m->head = NULL; /* so that a failure leaves nothing to destroy twice */
    return pack(l, &head, &m->head);
}

static bool ends_with(struct text_view v, const char *end)
{
    size_t n = strlen(end);
    return v.len >= n && memcmp(v.p + v.len - n, end, n) == 0;
}

static void make_vector(const struct gguf_tensor *t, float scale, float *dst)
{
    bool bias = ends_with(t->name, ".bias");
    for (size_t i = 0; i < t->ne[0]; i++)
        dst[i] = bias ? dummy_value(dummy_word(seed_of(t), i / 4), i % 4, scale) : 1.0f;
}

static status decode_vector(const struct loader *l, const struct gguf_tensor *t, float *dst)
{
    if (t->data == NULL) {
        make_vector(t, dummy_scale(l->plan->shape.hidden), dst);
        return OK;
    }
    dtype_decode(t->type, t->data, (size_t)t->ne[0], dst);
    for (size_t i = 0; i < t->ne[0]; i++)
        if (!isfinite(dst[i]))
            return gguf_refuse(l->g, t->data, "tensor %.*s: number %zu is not finite",
                               (int)t->name.len, t->name.p, i);
    return OK;
}

/* All vectors go to the device in one piece, each from a multiple of VECTOR_ALIGN numbers on. */
enum { VECTOR_ALIGN = 64 };

struct vectors {
    struct loader *l;
    float *host; /* NULL: only counting */
    size_t at, n_params;
};

/* n tensors, one after the other, as one vector; none where t[0] is NULL. */
static status put_vector(struct vectors *v, const struct gguf_tensor *const *t, uint32_t n,
                         const float **out)
{
    size_t first = v->at;
    if (t[0] == NULL)
        return OK;
    for (uint32_t i = 0; i < n; v->at += (size_t)t[i++]->ne[0]) {
        if (v->host != NULL)
            TRY(decode_vector(v->l, t[i], v->host + v->at));
        v->n_params += t[i]->ne[0];
    }
    v->at = (v->at + VECTOR_ALIGN - 1) / VECTOR_ALIGN * VECTOR_ALIGN;
    if (v->host != NULL)
        *out = v->l->m->vectors + first;
    return OK;
}

static status put_all(struct vectors *v)
{
    struct model *m = v->l->m;
    const struct plan *p = v->l->plan;
    for (uint32_t i = 0; i < p->shape.layers; i++) {
        const struct plan_layer *from = &p->layers[i];
        struct layer_weights *to = &m->layers[i];
        TRY(put_vector(v, &from->attn_norm, 1, &to->attn_norm));
        TRY(put_vector(v, &from->ffn_norm, 1, &to->ffn_norm));
        TRY(put_vector(v, from->bias, 3, &to->qkv_bias));
        TRY(put_vector(v, &from->q_norm, 1, &to->q_norm));
        TRY(put_vector(v, &from->k_norm, 1, &to->k_norm));
    }
    return put_vector(v, &p->final_norm, 1, &m->final_norm);
}

static status load_vectors(struct loader *l)
{
    struct model *m = l->m;
    struct vectors v = {.l = l};
    TRY(put_all(&v));
    size_t bytes = m->vectors_bytes = v.at * sizeof(float);
    if ((m->vectors = m->be->ops->alloc(m->be, bytes)) == NULL)
        return ERR_MEMORY;
    v = (struct vectors){.l = l, .host = mem_alloc(bytes)};
    status st = put_all(&v);
    if (st == OK) {
        m->be->ops->copy(m->be, m->vectors, v.host, bytes);
        st = m->be->ops->sync(m->be); /* host goes */
    }
    mem_free(v.host);
    m->info.n_params += v.n_params;
    l->done_bytes += bytes;
    return st;
}

/* Long waves are stretched by the factor, short ones stay, between them it goes over. */
static double stretch(const struct rope_llama3 *r, double freq)
{
    double wave = 2 * M_PI / freq;
    if (wave < r->original / r->high)
        return freq;
    if (wave > r->original / r->low)
        return freq / r->factor;
    double s = (r->original / wave - r->low) / (r->high - r->low);
    return (1 - s) * freq / r->factor + s * freq;
}

/* Frequencies in double, kept in f32; angles, too, in f32: what Hugging Face computes. */
static status make_frequencies(const struct loader *l, float *freq, uint32_t half)
{
    const struct plan *p = l->plan;
    float factors[256]; /* MAX_HEAD_DIM / 2 */
    CHECK(half <= ARRAY_LEN(factors));
    for (uint32_t i = 0; i < half; i++) {
        double inv = pow((double)p->shape.rope_base, -(double)i / half);
        if (p->llama3.factor > 0)
            inv = stretch(&p->llama3, inv);
        freq[i] = (float)(inv / (double)p->rope_divisor);
    }
    if (p->rope_freqs == NULL)
        return OK;
    TRY(decode_vector(l, p->rope_freqs, factors));
    for (uint32_t i = 0; i < half; i++) {
        if (!(factors[i] > 0))
            return gguf_refuse(l->g, p->rope_freqs->data,
                               "tensor rope_freqs.weight: number %u is %g, not "
                               "above 0",
                               i, (double)factors[i]);
        freq[i] /= factors[i];
    }
    return OK;
}

/* Filled in stretches, so that there is one table and not two. */
static status fill_rope(struct model *m, const float *freq)
{
    enum { STRETCH = 1024 };
    const struct model_shape *s = &m->info.shape;
    const size_t half = s->head_dim / 2, sines = s->max_positions * half;
    float *cosine = mem_alloc(STRETCH * half * 2 * sizeof *cosine), *sine = cosine + STRETCH * half;
    status st = OK;
    for (size_t from = 0; st == OK && from < s->max_positions; from += STRETCH) {
        size_t n = s->max_positions - from < STRETCH ? s->max_positions - from : STRETCH;
        size_t bytes = n * half * sizeof *cosine;
        float *to = m->rope + from * half;
        for (size_t pos = 0; pos < n; pos++)
            for (size_t i = 0; i < half; i++)
                sincosf((float)(from + pos) * freq[i], &sine[pos * half + i],
                        &cosine[pos * half + i]);
        m->be->ops->copy(m->be, to, cosine, bytes);
        m->be->ops->copy(m->be, to + sines, sine, bytes);
        st = m->be->ops->sync(m->be); /* the stretch is used again */
    }
    mem_free(cosine);
    return st;
}

static status load_rope(struct loader *l)
{
    struct model *m = l->m;
    const struct model_shape *s = &m->info.shape;
    float freq[256]; /* MAX_HEAD_DIM / 2 */
    size_t bytes = model_rope_bytes(s);
    TRY(make_frequencies(l, freq, s->head_dim / 2));
    /* A file that claims millions of positions must not take the machine's memory for it. */
    if (bytes > MAX_ROPE_BYTES)
        return err(
            ERR_MEMORY,
            "%s: the RoPE tables of %u positions would take %zu MiB; ask for a smaller context "
            "(--max-model-len)",
            l->path, s->max_positions, bytes >> 20);
    if ((m->rope = m->be->ops->alloc(m->be, bytes)) == NULL)
        return ERR_MEMORY;
    return fill_rope(m, freq);
}

static status load_all(struct loader *l)
{
    struct model *m = l->m;
    TRY(load_vectors(l));
    TRY(load_rope(l));
    TRY(pack_vocab(l));
    for (uint32_t i = 0; i < m->info.shape.layers; i++)
        TRY(pack_layer(l, i));
    if (l->g != NULL)
        TRY(gguf_whole(l->g));
    return m->be->ops->sync(m->be);
}

static void describe(const struct loader *l, struct model_info *info)
{
    struct text_view name;
    const char *slash = strrchr(l->path, '/'), *base = slash ? slash + 1 : l->path;
    snprintf(info->architecture, sizeof info->architecture, "%s", l->plan->family->name);
    if (l->g == NULL || gguf_find(l->g, "general.name") == NULL ||
        gguf_string(l->g, "general.name", &name) != OK || name.len == 0) {
        name = (struct text_view){base, strlen(base)};
        if (l->g == NULL && ends_with(name, ".json") && name.len > 5)
            name.len -= 5;
    }
    gguf_text_copy(info->name, sizeof info->name, name);
}

/* Bytes to be read, or made up. */
static size_t total_bytes(const struct loader *l)
{
    const struct plan *p = l->plan;
    if (l->g != NULL)
        return gguf_file_bytes(l->g);
    size_t sum = p->embedding->bytes + (p->head != NULL ? p->head->bytes : 0);
    for (uint32_t i = 0; i < p->shape.layers; i++) {
        const struct plan_layer *y = &p->layers[i];
        sum += y->q->bytes + y->k->bytes + y->v->bytes + y->out->bytes + y->gate->bytes +
               y->up->bytes + y->down->bytes;
    }
    return sum;
}

/* A description can ask for anything: say so before memory is taken bit by bit. */
static status check_room(const struct loader *l)
{
    const struct backend *be = l->m->be;
    uint64_t need = total_bytes(l);
    uint64_t free = be->ops->memory != NULL ? be->ops->memory(l->m->be) : memory_available();
    bool stores = strcmp(be->ops->name, "mock") != 0;
    if (l->g != NULL || !stores || free == 0 || need <= free)
        return OK;
    return err(ERR_MEMORY, "%s: its weights take %.1f GiB in bf16, device %s has %.1f GiB free",
               l->path, (double)need / 1073741824.0, be->ops->name, (double)free / 1073741824.0);
}

/* Takes the vocabulary over, whatever comes of it. */
static status load_model(struct model **out, struct backend *be, const char *path, struct gguf *g,
                         const struct plan *p, const struct dictionary *v)
{
    struct model *m = mem_alloc(sizeof *m);
    struct loader l = {.m = m, .g = g, .path = path, .plan = p};
    if (g != NULL && !p->family->halves)
        l.halves = make_halves(&p->shape);
    m->be = be;
    m->info.shape = p->shape;
    m->attn_scale = m->info.attn_scale = p->attn_scale;
    m->tokenizer = v->tokenizer;
    m->chat = v->chat;
    memcpy(m->info.end_ids, v->end_ids, sizeof m->info.end_ids);
    m->info.n_end_ids = v->n_end_ids;
    m->layers = mem_alloc(p->shape.layers * sizeof *m->layers);
    char what[160];
    describe(&l, &m->info);
    status st = check_room(&l);
    if (st == OK) {
        snprintf(what, sizeof what, "%s %s", g != NULL ? "loading" : "making up", m->info.name);
        log_progress_start(&l.progress, what, total_bytes(&l));
        st = load_all(&l);
    }
    mem_free(l.halves);
    if (st != OK) {
        model_destroy(m);
        return st;
    }
    log_progress_done(&l.progress);
    *out = m;
    return OK;
}

static status limit_positions(struct plan *p, const char *path, uint32_t wanted)
{
    if (wanted > p->shape.max_positions)
        return err(ERR_ARG, "%s has %u positions; a context of %u was asked for", path,
                   p->shape.max_positions, wanted);
    if (wanted != 0)
        p->shape.max_positions = wanted;
    return OK;
}

/* A GGUF's header: its plan and its vocabulary. The caller closes all three. */
static status read_gguf(struct gguf **out, struct plan *p, struct dictionary *v, const char *path,
                        uint32_t max_positions)
{
    struct gguf *g;
    if (hf_is_config(path)) {
        (void)err(ERR_ARG,
                  "%s: describes a model but holds no weights: name a GGUF file, or let weights "
                  "be made up for measurements (--load-format dummy)",
                  path);
        return ERR_ARG;
    }
    TRY(gguf_open(&g, path));
    status st = llama_plan(p, g);
    if (st != OK)
        goto close;
    st = limit_positions(p, path, max_positions);
    if (st == OK)
        st = dictionary_read(v, g);
    if (st == OK) {
        *out = g;
        return OK;
    }
    plan_fini(p);
close:
    gguf_close(g);
    return st;
}

/* Likewise a description's. */
static status read_hf(struct plan *p, struct dictionary *v, const char *path,
                      uint32_t max_positions)
{
    TRY(hf_plan(p, v, path));
    if (max_positions > MAX_POSITIONS) {
        tokenizer_destroy(v->tokenizer);
        plan_fini(p);
        (void)err(ERR_ARG, "%s: a context of %u was asked for, at most %d can be", path,
                  max_positions, (int)MAX_POSITIONS);
        return ERR_ARG;
    }
    if (max_positions != 0) /* what was never trained has no length of its own */
        p->shape.max_positions = max_positions;
    return OK;
}

status model_load(struct model **out, struct backend *be, const char *path, uint32_t max_positions)
{
    struct gguf *g = NULL;
    struct plan plan;
    struct dictionary words;
    TRY(read_gguf(&g, &plan, &words, path, max_positions));
    status st = load_model(out, be, path, g, &plan, &words);
    plan_fini(&plan);
    gguf_close(g);
    return st;
}

status model_load_dummy(struct model **out, struct backend *be, const char *path,
                        uint32_t max_positions)
{
    struct plan plan;
    struct dictionary words;
    TRY(read_hf(&plan, &words, path, max_positions));
    status st = load_model(out, be, path, NULL, &plan, &words);
    plan_fini(&plan);
    return st;
}

status model_check(struct model_info *out, const char *path, bool dummy, uint32_t max_positions)
{
    struct gguf *g = NULL;
    struct plan plan;
    struct dictionary words;
    TRY(dummy ? read_hf(&plan, &words, path, max_positions)
              : read_gguf(&g, &plan, &words, path, max_positions));
    const struct loader l = {.g = g, .path = path, .plan = &plan};
    *out = (struct model_info){.shape = plan.shape,
                               .attn_scale = plan.attn_scale,
                               .weight_bytes = total_bytes(&l),
                               .n_end_ids = words.n_end_ids};
    memcpy(out->end_ids, words.end_ids, sizeof out->end_ids);
    describe(&l, out);
    tokenizer_destroy(words.tokenizer);
    plan_fini(&plan);
    if (g != NULL)
        gguf_close(g);
    return OK;
}
