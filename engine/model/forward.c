/* One pass over a batch, written over the backend's operations (reference/models.md 2.6).
 *
 * The residual stream x stays in the backend; every linear layer normalises its input rows itself and
 * adds to x itself, so there is no other traffic between layers. Rows that want no logits end with the
 * last layer's append, or its attention where they attend by plan: nobody reads what comes after. */
#include "engine/attention.h"
#include "engine/model/internal.h"

struct buffer {
    void **p;
    size_t bytes;
};

enum { N_BUFFERS = 6 };

static void list_buffers(struct model *m, uint32_t rows, uint32_t logits,
                         struct buffer out[N_BUFFERS])
{
    const struct model_shape *s = &m->info.shape;
    size_t act = m->be->ops->act_bytes, q = (size_t)s->heads * s->head_dim;
    size_t kv = (size_t)s->kv_heads * s->head_dim;
    out[0] = (struct buffer){&m->x, act * rows * s->hidden};
    out[1] = (struct buffer){&m->qkv, act * rows * (q + 2 * kv)};
    out[2] = (struct buffer){&m->att, act * rows * q};
    out[3] = (struct buffer){&m->ff, act * rows * s->ff};
    out[4] = (struct buffer){&m->last, act * logits * s->hidden};
    out[5] = (struct buffer){&m->logits, act * logits * s->vocab};
}

void model_release(struct model *m)
{
    struct buffer b[N_BUFFERS];
    list_buffers(m, m->max_rows, m->max_logits, b);
    for (int i = 0; i < N_BUFFERS; i++) {
        if (*b[i].p != NULL)
            m->be->ops->free(m->be, *b[i].p, b[i].bytes);
        *b[i].p = NULL;
    }
    model_fill_release(m);
    mem_free(m->last_seqs);
    m->last_seqs = NULL;
    m->max_rows = m->max_logits = 0;
}

size_t model_reserve_bytes(struct model *m, uint32_t max_rows, uint32_t max_logits)
{
    struct buffer b[N_BUFFERS];
    size_t n = 0;
    list_buffers(m, max_rows, max_logits, b);
    for (int i = 0; i < N_BUFFERS; i++)
        n += b[i].bytes;
    return n;
}

status model_reserve(struct model *m, uint32_t max_rows, uint32_t max_logits)
{
    struct buffer b[N_BUFFERS];
    CHECK(max_rows > 0 && max_logits > 0 && max_logits <= max_rows);
    model_release(m);
    m->max_rows = max_rows;
    m->max_logits = max_logits;
    list_buffers(m, max_rows, max_logits, b);
    m->last_seqs = mem_alloc(max_logits * sizeof *m->last_seqs);
    for (int i = 0; i < N_BUFFERS; i++) {
        if ((*b[i].p = m->be->ops->alloc(m->be, b[i].bytes)) == NULL) {
            model_release(m);
            return err(ERR_MEMORY, "activations for steps of %u tokens: %s", max_rows, err_text());
        }
    }
    return OK;
}

static void linear(struct model *m, const struct linear_args *a)
{
    m->be->ops->linear(m->be, a);
}

/* x += Wdown (silu(Wgate norm(x)) * (Wup norm(x))) */
static void feed_forward(struct model *m, const struct layer_weights *l, void *x, uint32_t n_rows)
{
    const struct linear_args up = {.w = l->gate_up,
                                   .in = x,
                                   .n_rows = n_rows,
                                   .norm_gain = l->ffn_norm,
                                   .norm_eps = m->info.shape.norm_eps,
                                   .mode = LINEAR_SWIGLU,
                                   .out = m->ff,
                                   .to_linear = true};
    const struct linear_args down = {.w = l->down,
                                     .in = m->ff,
                                     .n_rows = n_rows,
                                     .mode = LINEAR_ADD,
                                     .out = x,
                                     .from_linear = true};
    linear(m, &up);
    linear(m, &down);
}

/* Rows to compute: spare ones belong to no sequence, so append and attend know nothing of them. */
static uint32_t rows_of(const struct batch *b)
{
    return b->n_rows + b->n_spare;
}

/* layer: whose weights; kv_layer: which of the memory's that is. to_attend: all rows go on from attention into a
 * product. */
static void project_and_append(struct model *m, const struct batch *b, uint32_t layer,
                               uint32_t kv_layer, bool to_attend)
{
    const struct model_shape *s = &m->info.shape;
    const struct layer_weights *l = &m->layers[layer];
    const struct linear_args qkv = {.w = l->qkv,
                                    .in = m->x,
                                    .n_rows = rows_of(b),
                                    .norm_gain = l->attn_norm,
                                    .norm_eps = s->norm_eps,
                                    .mode = LINEAR_STORE,
                                    .out = m->qkv};
    linear(m, &qkv);
    const size_t table = (size_t)s->max_positions * (s->head_dim / 2);
    const struct append_args append = {.kv = b->kv,
                                       .layer = kv_layer,
                                       .heads = s->heads,
                                       .seqs = b->seqs,
                                       .n_seqs = b->n_seqs,
                                       .rope_cos = m->rope,
                                       .rope_sin = m->rope ? m->rope + table : NULL,
                                       .qkv = m->qkv,
                                       .bias = l->qkv_bias,
                                       .q_norm = l->q_norm,
                                       .k_norm = l->k_norm,
                                       .norm_eps = s->norm_eps,
                                       .to_attend = to_attend};
    m->be->ops->append(m->be, &append);
}

static void attend(struct model *m, const struct batch *b, uint32_t kv_layer)
{
    if (b->attention != NULL) {
        attention_layer(b->attention, kv_layer, b->seqs, b->n_seqs, m->qkv, m->att);
        return;
    }
    const struct attend_args a = {.kv = b->kv,
                                  .layer = kv_layer,
                                  .heads = m->info.shape.heads,
                                  .seqs = b->seqs,
                                  .n_seqs = b->n_seqs,
                                  .scale = m->attn_scale,
                                  .qkv = m->qkv,
                                  .out = m->att};
    m->be->ops->attend(m->be, &a);
}

/* Of a batch only the rows from a sequence's first that wants logits to its last: 8,191 of a prompt's last 8,192
 * are nobody's. Nothing attends by plan. */
static struct batch cut_to_logits(struct model *m, const struct batch *b)
{
    struct batch out = *b;
    uint32_t next = 0, n_rows = 0;
    out.seqs = m->last_seqs;
    out.n_seqs = 0;
    for (uint32_t i = 0; i < b->n_seqs; i++) {
        struct batch_seq q = b->seqs[i];
        const uint32_t end = q.first_row + q.n_rows, first = next;
        while (next < b->n_logits && b->logit_rows[next] < end)
            next++;
        if (next == first)
            continue;
        const uint32_t skip = b->logit_rows[first] - q.first_row;
        q.first_row += skip;
        q.first_pos += skip;
        q.n_before = skip;
        q.n_rows = b->logit_rows[next - 1] - q.first_row + 1;
        m->last_seqs[out.n_seqs++] = q;
        n_rows += q.n_rows;
    }
    CHECK(next == b->n_logits);
    return n_rows == b->n_rows ? *b : out; /* all decode: the list of the other layers */
}

/* The last layer after its append, for the rows that want logits only. */
static void finish_logit_rows(struct model *m, const struct batch *b)
{
    const struct layer_weights *l = &m->layers[m->info.shape.layers - 1];
    size_t row = (size_t)m->be->ops->act_bytes * m->info.shape.hidden;
    const uint32_t n_logits = b->n_logits + b->n_spare;
    /* In runs: a step of decodes alone is one copy, not one for each. */
    for (uint32_t i = 0, n; i < n_logits; i += n) {
        for (n = 1; i + n < n_logits && b->logit_rows[i + n] == b->logit_rows[i] + n; n++)
            ;
        m->be->ops->copy(m->be, (char *)m->last + i * row,
                         (const char *)m->x + b->logit_rows[i] * row, n * row);
    }
    const struct linear_args out = {.w = l->out,
                                    .in = m->att,
                                    .rows = b->logit_rows,
                                    .n_rows = n_logits,
                                    .mode = LINEAR_ADD,
                                    .out = m->last};
    linear(m, &out);
    feed_forward(m, l, m->last, n_logits);
}

static void project_logits(struct model *m, const struct batch *b)
{
    const struct linear_args head = {.w = m->head,
                                     .in = m->last,
                                     .n_rows = b->n_logits + b->n_spare,
                                     .norm_gain = m->final_norm,
                                     .norm_eps = m->info.shape.norm_eps,
                                     .mode = LINEAR_STORE,
                                     .out = m->logits};
    linear(m, &head);
}

/* A step that does nothing but decode some rows may be one operation of the backend. Rows of nobody's get what
 * was there: their logits are nobody's. */
static bool run_at_once(struct model *m, const struct batch *b)
{
    const struct model_shape *s = &m->info.shape;
    bool plans = b->attention != NULL && attention_rows(b->attention) > 0;
    if (m->be->ops->layers == NULL || plans || b->n_logits != b->n_rows || b->n_seqs != b->n_rows)
        return false;
    for (uint32_t i = 0; i < b->n_logits; i++)
        if (b->logit_rows[i] != i)
            return false;
    const size_t table = (size_t)s->max_positions * (s->head_dim / 2);
    const struct layers_args a = {.layers = m->layers,
                                  .embedding = m->embedding,
                                  .kv = b->kv,
                                  .n_layers = s->layers,
                                  .heads = s->heads,
                                  .tokens = b->tokens,
                                  .seqs = b->seqs,
                                  .n_seqs = b->n_seqs,
                                  .rope_cos = m->rope,
                                  .rope_sin = m->rope ? m->rope + table : NULL,
                                  .norm_eps = s->norm_eps,
                                  .scale = m->attn_scale,
                                  .out = m->last};
    return m->be->ops->layers(m->be, &a);
}

static void embed(struct model *m, const struct batch *b)
{
    const struct embed_args a = {
        .table = m->embedding, .tokens = b->tokens, .n_rows = rows_of(b), .out = m->x};
    m->be->ops->embed(m->be, &a);
}

static void run_layer(struct model *m, const struct batch *b, uint32_t layer, uint32_t kv_layer)
{
    const struct linear_args out = {.w = m->layers[layer].out,
                                    .in = m->att,
                                    .n_rows = rows_of(b),
                                    .mode = LINEAR_ADD,
                                    .out = m->x,
                                    .from_attend = true};
    project_and_append(m, b, layer, kv_layer, true);
    attend(m, b, kv_layer);
    linear(m, &out);
    feed_forward(m, &m->layers[layer], m->x, rows_of(b));
}

/* And the logits, if any are wanted. */
static void run_last_layer(struct model *m, const struct batch *b, uint32_t kv_layer)
{
    const uint32_t last = m->info.shape.layers - 1;
    project_and_append(m, b, last, kv_layer, false);
    /* A row that attends by plan leaves its selection to later rows. */
    bool plans = b->attention != NULL && attention_rows(b->attention) > 0;
    if (plans) {
        attend(m, b, kv_layer);
    } else if (b->n_logits > 0) {
        const struct batch few = cut_to_logits(m, b);
        attend(m, &few, kv_layer);
    }
    if (b->n_logits > 0) {
        finish_logit_rows(m, b);
        project_logits(m, b);
    }
}

const void *model_forward(struct model *m, const struct batch *b)
{
    CHECK(b->n_rows > 0 && rows_of(b) <= m->max_rows);
    CHECK(b->n_logits + b->n_spare <= m->max_logits);
    const uint32_t last = m->info.shape.layers - 1;
    if (run_at_once(m, b)) {
        project_logits(m, b);
        return m->logits;
    }
    embed(m, b);
    for (uint32_t i = 0; i < last; i++)
        run_layer(m, b, i, i);
    run_last_layer(m, b, last);
    return m->logits;
}

const void *model_layer(struct model *m, const struct batch *b, uint32_t layer, uint32_t kv_layer)
{
    CHECK(b->n_rows > 0 && rows_of(b) <= m->max_rows && layer < m->info.shape.layers);
    if (layer == 0)
        embed(m, b);
    if (layer + 1 < m->info.shape.layers)
        run_layer(m, b, layer, kv_layer);
    else
        run_last_layer(m, b, kv_layer);
    return m->logits;
}

void *model_rows(const struct model *m, size_t *row_bytes)
{
    *row_bytes = (size_t)m->be->ops->act_bytes * m->info.shape.hidden;
    return m->x;
}
