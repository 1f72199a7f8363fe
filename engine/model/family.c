/* The architectures that are served: all are llamas with small differences (reference/models.md 1.7,
 * 2.3, 2.4). Mistral's GGUF files call themselves llama. */
#include "engine/model/internal.h"

#include <string.h>

static const struct family families[] = {
    {.name = "llama",
     .hf_class = "LlamaForCausalLM",
     .hf_alias = {"MistralForCausalLM", "mistral"}},
    {.name = "qwen2", .hf_class = "Qwen2ForCausalLM", .halves = true, .qkv_bias = true},
    {.name = "qwen3", .hf_class = "Qwen3ForCausalLM", .halves = true, .qk_norm = true},
};

const struct family *family_find(struct text_view name)
{
    for (size_t i = 0; i < ARRAY_LEN(families); i++)
        if (strlen(families[i].name) == name.len && !memcmp(families[i].name, name.p, name.len))
            return &families[i];
    return NULL;
}

static bool same(const char *known, const char *name)
{
    return known != NULL && strcmp(known, name) == 0;
}

const struct family *family_of_class(const char *hf_class)
{
    for (size_t i = 0; i < ARRAY_LEN(families); i++)
        if (same(families[i].hf_class, hf_class) || same(families[i].hf_alias[0], hf_class))
            return &families[i];
    return NULL;
}

const struct family *family_of_type(const char *model_type)
{
    for (size_t i = 0; i < ARRAY_LEN(families); i++)
        if (same(families[i].name, model_type) || same(families[i].hf_alias[1], model_type))
            return &families[i];
    return NULL;
}
