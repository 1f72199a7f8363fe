/* The names of what pages may keep (kernels/backend.h): vLLM's, of its --kv-cache-dtype. */
#include "kernels/backend.h"

#include <string.h>

static const struct {
    const char *name;
    enum kv_type type;
} names[] = {{"auto", KV_BF16},
             {"bfloat16", KV_BF16},
             {"bf16", KV_BF16},
             {"fp8_e4m3", KV_E4M3},
             {"fp8", KV_E4M3}};

status kv_type_find(const char *name, enum kv_type *out)
{
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        if (strcmp(names[i].name, name) == 0) {
            *out = names[i].type;
            return OK;
        }
    return err(ERR_ARG, "--kv-cache-dtype %.32s: there are auto, bf16, fp8 and fp8_e4m3", name);
}

const char *kv_type_name(enum kv_type type)
{
    return type == KV_E4M3 ? "fp8_e4m3" : "bfloat16";
}
