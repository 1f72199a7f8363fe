/* model_load: from a checked plan to weights in the backend's form.
 *
 * Matrices that read the same input are stacked: q, k and v; gate and up. GGUF stores the rows of q
 * and k of a llama interleaved, pairs (2i, 2i+1) rotating together, while everything here rotates
 * halves, pairs (i, i + head_dim/2): whole rows change places while packing, which is exact for every
 * stored format. Called once, by the engine thread. */
#include "engine/model/internal.h"
#include "engine/text/chat.h"
#include "kernels/log.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const size_t MAX_ROPE_BYTES = (size_t)4 << 30; /* 8M positions of a head of 128 */

struct loader {
    struct model *m;
    struct gguf *g;
    const struct plan *plan;
    struct log_progress progress;
    size_t done_bytes;
    uint32_t *halves; /* [heads * head_dim]: row of the file for each row here; a prefix serves k */
};

static struct weight_part part_of(const struct gguf_tensor *t, char *name, size_t room,
                                  uint32_t rows, const uint32_t *row_from)
{
    snprintf(name, room, "%.*s", (int)t->name.len, t->name.p);
    return (struct weight_part){
        .name = name, .type = t->type, .rows = rows, .data = t->data, .row_from = row_from};
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
    if (st == ERR_FORMAT)
        return gguf_refuse(l->g, s->t[0]->data, "%s", err_text());
    if (st != OK)
        return err(st, "%s: %s: %s", gguf_path(l->g), names[0], err_text());
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
    struct model_layer *to = &l->m->layers[i];
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

static status decode_vector(const struct loader *l, const struct gguf_tensor *t, float *dst)
{
    dtype_decode(t->type, t->data, (size_t)t->ne[0], dst);
    for (size_t i = 0; i < t->ne[0]; i++)
        if (!isfinite(dst[i]))
            return gguf_refuse(l->g, t->data, "tensor %.*s: number %zu is not finite",
                               (int)t->name.len, t->name.p, i);
    return OK;
}

static status load_norms(struct loader *l)
{
    struct model *m = l->m;
    const struct plan *p = l->plan;
    size_t hidden = p->shape.hidden, bytes = model_norms_bytes(&p->shape);
    float *host = mem_alloc(bytes);
    status st = decode_vector(l, p->final_norm, host + 2 * (size_t)p->shape.layers * hidden);
    for (uint32_t i = 0; st == OK && i < p->shape.layers; i++) {
        st = decode_vector(l, p->layers[i].attn_norm, host + 2 * (size_t)i * hidden);
        if (st == OK)
            st = decode_vector(l, p->layers[i].ffn_norm, host + (2 * (size_t)i + 1) * hidden);
    }
    if (st == OK && (m->norms = m->be->ops->alloc(m->be, bytes)) == NULL)
        st = ERR_MEMORY;
    if (st == OK) {
        m->be->ops->copy(m->be, m->norms, host, bytes);
        st = m->be->ops->sync(m->be); /* host goes */
    }
    mem_free(host);
    if (st != OK)
        return st;
    for (uint32_t i = 0; i < p->shape.layers; i++) {
        m->layers[i].attn_norm = m->norms + 2 * (size_t)i * hidden;
        m->layers[i].ffn_norm = m->norms + (2 * (size_t)i + 1) * hidden;
    }
    m->final_norm = m->norms + 2 * (size_t)p->shape.layers * hidden;
    m->info.n_params += (2 * (uint64_t)p->shape.layers + 1) * hidden;
    l->done_bytes += bytes;
    return OK;
}

/* Frequencies in double, kept in f32; angles, too, in f32: what Hugging Face computes. */
static status make_frequencies(const struct loader *l, float *freq, uint32_t half)
{
    const struct plan *p = l->plan;
    float factors[256]; /* MAX_HEAD_DIM / 2 */
    CHECK(half <= ARRAY_LEN(factors));
    for (uint32_t i = 0; i < half; i++) {
        double inv = pow((double)p->shape.rope_base, -(double)i / half);
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
            gguf_path(l->g), s->max_positions, bytes >> 20);
    if ((m->rope = m->be->ops->alloc(m->be, bytes)) == NULL)
        return ERR_MEMORY;
    return fill_rope(m, freq);
}

static status load_all(struct loader *l)
{
    struct model *m = l->m;
    TRY(load_norms(l));
    TRY(load_rope(l));
    TRY(pack_vocab(l));
    for (uint32_t i = 0; i < m->info.shape.layers; i++)
        TRY(pack_layer(l, i));
    TRY(gguf_whole(l->g));
    return m->be->ops->sync(m->be);
}

static void describe(struct model *m, const struct gguf *g)
{
    struct text_view name;
    const char *slash = strrchr(gguf_path(g), '/'), *base = slash ? slash + 1 : gguf_path(g);
    snprintf(m->info.architecture, sizeof m->info.architecture, "llama");
    if (gguf_find(g, "general.name") == NULL || gguf_string(g, "general.name", &name) != OK ||
        name.len == 0)
        name = (struct text_view){base, strlen(base)};
    gguf_text_copy(m->info.name, sizeof m->info.name, name);
}

/* Takes the vocabulary over, whatever comes of it. */
static status load_model(struct model **out, struct backend *be, struct gguf *g,
                         const struct plan *p, const struct dictionary *v)
{
    struct model *m = mem_alloc(sizeof *m);
    struct loader l = {.m = m, .g = g, .plan = p, .halves = make_halves(&p->shape)};
    m->be = be;
    m->info.shape = p->shape;
    m->attn_scale = m->info.attn_scale = p->attn_scale;
    m->tokenizer = v->tokenizer;
    m->chat = v->chat;
    memcpy(m->info.end_ids, v->end_ids, sizeof m->info.end_ids);
    m->info.n_end_ids = v->n_end_ids;
    m->layers = mem_alloc(p->shape.layers * sizeof *m->layers);
    char what[160];
    describe(m, g);
    snprintf(what, sizeof what, "loading %s", m->info.name);
    log_progress_start(&l.progress, what, gguf_file_bytes(g));
    status st = load_all(&l);
    mem_free(l.halves);
    if (st != OK) {
        model_destroy(m);
        return st;
    }
    log_progress_done(&l.progress);
    *out = m;
    return OK;
}

static status limit_positions(struct plan *p, const struct gguf *g, uint32_t wanted)
{
    if (wanted > p->shape.max_positions)
        return err(ERR_ARG, "%s has %u positions; a context of %u was asked for", gguf_path(g),
                   p->shape.max_positions, wanted);
    if (wanted != 0)
        p->shape.max_positions = wanted;
    return OK;
}

status model_load(struct model **out, struct backend *be, const char *path, uint32_t max_positions)
{
    struct gguf *g;
    struct plan plan;
    struct dictionary words;
    TRY(gguf_open(&g, path));
    status st = llama_plan(&plan, g);
    if (st != OK)
        goto close;
    st = limit_positions(&plan, g, max_positions);
    if (st == OK)
        st = dictionary_read(&words, g);
    if (st == OK)
        st = load_model(out, be, g, &plan, &words);
    plan_fini(&plan);
close:
    gguf_close(g);
    return st;
}
