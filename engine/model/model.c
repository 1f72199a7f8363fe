/* A model's life: what it is, the mock's, and its end. Loading is load.c, the pass forward.c. */
#include "engine/model/internal.h"
#include "engine/text/chat.h"

#include <string.h>

/* The default model's shape, so that blocks and batches have their real sizes; no weights, which the
 * mock backend never looks at. */
status model_create_mock(struct model **out, struct backend *be, uint32_t max_positions)
{
    struct model *m = mem_alloc(sizeof *m);
    struct dictionary v = {.chat = chat_template_chatml()};
    status st = tokenizer_create_bytes(&v.tokenizer);
    if (st != OK) {
        mem_free(m);
        return st;
    }
    dictionary_find_ends(&v);
    m->be = be;
    m->tokenizer = v.tokenizer;
    m->chat = v.chat;
    m->info = (struct model_info){.architecture = "mock", .name = "mock", .n_end_ids = v.n_end_ids};
    memcpy(m->info.end_ids, v.end_ids, sizeof v.end_ids);
    m->info.shape = (struct model_shape){.layers = 30,
                                         .hidden = 576,
                                         .ff = 1536,
                                         .heads = 9,
                                         .kv_heads = 3,
                                         .head_dim = 64,
                                         .vocab = tokenizer_vocab(v.tokenizer),
                                         .max_positions = max_positions ? max_positions : 8192,
                                         .norm_eps = 1e-5f,
                                         .rope_base = 1e5f};
    m->layers = mem_alloc(m->info.shape.layers * sizeof *m->layers);
    *out = m;
    return OK;
}

static void destroy_weight(struct model *m, struct weight *w)
{
    if (w != NULL)
        m->be->ops->weight_destroy(m->be, w);
}

void model_destroy(struct model *m)
{
    if (m == NULL)
        return;
    const struct model_shape *s = &m->info.shape;
    model_release(m);
    for (uint32_t i = 0; i < s->layers; i++) {
        destroy_weight(m, m->layers[i].qkv);
        destroy_weight(m, m->layers[i].out);
        destroy_weight(m, m->layers[i].gate_up);
        destroy_weight(m, m->layers[i].down);
    }
    if (m->head != m->embedding)
        destroy_weight(m, m->head);
    destroy_weight(m, m->embedding);
    if (m->vectors != NULL)
        m->be->ops->free(m->be, m->vectors, m->vectors_bytes);
    if (m->rope != NULL)
        m->be->ops->free(m->be, m->rope, model_rope_bytes(s));
    tokenizer_destroy(m->tokenizer);
    mem_free(m->layers);
    mem_free(m);
}

const struct model_info *model_info(const struct model *m)
{
    return &m->info;
}

const struct tokenizer *model_tokenizer(const struct model *m)
{
    return m->tokenizer;
}

const struct chat_template *model_chat(const struct model *m)
{
    return m->chat;
}
