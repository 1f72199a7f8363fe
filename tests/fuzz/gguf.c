/* Fuzzing the GGUF reader and everything model_load reads before it packs weights: directory, plan,
 * tokenizer, template. Seeds: tests/fuzz/corpus/gguf, made by tests/unit/gguf --seeds DIR. */
#include "engine/model/internal.h"
#include "kernels/log.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static volatile unsigned sink;

/* Every byte a tensor claims must be there. */
static void touch_tensors(const struct gguf *g)
{
    for (size_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        const unsigned char *p = t->data;
        float decoded[256];
        sink += p[0] + p[t->bytes - 1];
        dtype_decode(t->type, p, dtype_find(t->type)->block, decoded);
    }
}

static void read_model(struct gguf *g)
{
    struct plan plan;
    struct dictionary words;
    if (llama_plan(&plan, g) == OK)
        plan_fini(&plan);
    /* Also where the plan was refused: the vocabulary must not lean on it. */
    if (dictionary_read(&words, g) == OK)
        tokenizer_destroy(words.tokenizer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    /* A copy of exactly this size: reading one byte beyond it is seen. */
    unsigned char *copy = mem_alloc(len);
    struct gguf *g;
    memcpy(copy, data, len);
    log_set_level(LOG_ERROR);
    if (gguf_open_memory(&g, copy, len, "fuzz.gguf") == OK) {
        touch_tensors(g);
        read_model(g);
        gguf_close(g);
    }
    mem_free(copy);
    return 0;
}
