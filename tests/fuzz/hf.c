/* Any bytes as a config.json: a plan whose numbers are within their limits, or a refusal that names the
 * file. Nothing is loaded. */
#include "engine/model/internal.h"
#include "kernels/log.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static void check_plan(const struct plan *p, const struct dictionary *d)
{
    const struct model_shape *s = &p->shape;
    CHECK(s->layers >= 1 && s->layers <= MAX_LAYERS && s->hidden >= 1 && s->hidden <= MAX_HIDDEN);
    CHECK(s->head_dim >= 2 && s->head_dim % 2 == 0 && s->head_dim <= MAX_HEAD_DIM);
    CHECK(s->kv_heads >= 1 && s->heads <= MAX_HEADS && s->heads % s->kv_heads == 0);
    CHECK(s->vocab == tokenizer_vocab(d->tokenizer) && s->max_positions <= MAX_POSITIONS);
    CHECK(s->norm_eps > 0 && s->rope_base > 1 && p->rope_divisor > 0);
    for (uint32_t i = 0; i < d->n_end_ids; i++)
        CHECK(d->end_ids[i] < s->vocab);
    for (uint32_t i = 0; i < s->layers; i++)
        CHECK(p->layers[i].q->ne[0] == s->hidden && p->layers[i].down->ne[1] == s->hidden);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    struct plan plan;
    struct dictionary words;
    char *text = mem_alloc(len + 1); /* exactly so long: reading beyond it is seen */
    if (len > 0)
        memcpy(text, data, len);
    log_set_level(LOG_ERROR);
    if (hf_plan_text(&plan, &words, text, len, "fuzz.json") == OK) {
        check_plan(&plan, &words);
        plan_fini(&plan);
        tokenizer_destroy(words.tokenizer);
    } else {
        CHECK(strncmp(err_text(), "fuzz.json: ", 11) == 0);
    }
    mem_free(text);
    return 0;
}
