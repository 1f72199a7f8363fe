/* Contexts without prefill (model_fill): for `spind bench decode`, where a prompt's K and V matter by
 * their number alone. */
#include "engine/model/internal.h"

enum {
    SHIFT = 61,      /* rows between two layers' parts of the noise: no layer is another's copy */
    CHUNK_ROWS = 64, /* made at a time */
};

static size_t row_numbers(const struct model *m)
{
    const struct model_shape *s = &m->info.shape;
    return (size_t)(s->heads + 2 * s->kv_heads) * s->head_dim;
}

/* Rows of q, k and v, uniform: q and k of variance 1. v is small: next to embeddings and weights that are
 * made up as well, what attention adds would otherwise be more noise than token, and layers above select by it. So
 * who is fed the same token selects much the same again, and hit rates can be swept by how many there are. */
static void make_rows(const struct model *m, float *to, uint32_t n_rows, uint32_t *state)
{
    const struct model_shape *s = &m->info.shape;
    const size_t width = row_numbers(m), v = width - (size_t)s->kv_heads * s->head_dim;
    for (size_t i = 0; i < n_rows * width; i++) {
        *state = *state * 1664525u + 1013904223u;
        float x = ((float)(*state >> 8) * 0x1p-23f - 1.0f) * 1.7320508f;
        to[i] = i % width < v ? x : x * 0x1p-6f;
    }
}

static status make_noise(struct model *m)
{
    const struct backend_ops *ops = m->be->ops;
    uint32_t state = 20261121, rows = m->max_rows + m->info.shape.layers * SHIFT;
    rows = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS * CHUNK_ROWS;
    size_t numbers = CHUNK_ROWS * row_numbers(m), bytes = numbers * sizeof(float);
    CHECK(ops->act_bytes == sizeof(float));
    m->noise_bytes = rows / CHUNK_ROWS * bytes;
    m->noise = ops->alloc(m->be, m->noise_bytes);
    if (m->noise == NULL)
        return err(ERR_MEMORY, "no memory for %u made-up rows", rows);
    float *chunk = mem_alloc(bytes);
    for (uint32_t i = 0; i < rows / CHUNK_ROWS; i++) {
        make_rows(m, chunk, CHUNK_ROWS, &state);
        ops->copy(m->be, (char *)m->noise + i * bytes, chunk, bytes);
    }
    mem_free(chunk); /* copy has read it when it returns */
    return OK;
}

void model_fill_release(struct model *m)
{
    if (m->noise != NULL)
        m->be->ops->free(m->be, m->noise, m->noise_bytes);
    m->noise = NULL;
}

/* append turns q and k in place, so the noise is another one next time, of the same spread. */
status model_fill(struct model *m, const struct batch *b)
{
    const struct model_shape *s = &m->info.shape;
    const size_t table = (size_t)s->max_positions * (s->head_dim / 2);
    CHECK(b->n_rows > 0 && b->n_rows <= m->max_rows);
    if (m->noise == NULL)
        TRY(make_noise(m));
    for (uint32_t i = 0; i < s->layers; i++) {
        const struct append_args a = {.kv = b->kv,
                                      .layer = i,
                                      .heads = s->heads,
                                      .seqs = b->seqs,
                                      .n_seqs = b->n_seqs,
                                      .rope_cos = m->rope,
                                      .rope_sin = m->rope ? m->rope + table : NULL,
                                      .qkv =
                                          (float *)m->noise + (size_t)i * SHIFT * row_numbers(m)};
        m->be->ops->append(m->be, &a);
    }
    return OK;
}
