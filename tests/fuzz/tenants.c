/* Any bytes as a tenants file. What is taken keeps the bounds that the rest of the API relies on, and what
 * is refused says of which file. */
#include "api/tenants.h"

#include <string.h>

static void check_taken(const struct tenants *t)
{
    CHECK(t->n > 0 && t->n <= TENANTS_MAX && t->n_keys <= TENANT_KEYS_MAX);
    for (uint32_t i = 0; i < t->n; i++) {
        const struct tenant *one = &t->v[i];
        CHECK(tenants_is_name(one->name) && (float)one->weight > 0 && one->weight <= 1000);
        CHECK(one->priority_low <= one->priority_high);
        /* Sums of two sequences' worth must not run over. */
        CHECK(one->limits.max_running <= UINT32_MAX / 4 &&
              one->limits.max_queued <= UINT32_MAX / 4);
    }
    for (uint32_t i = 0; i < t->n_keys; i++) {
        CHECK(t->keys[i].tenant < t->n && t->keys[i].id[0] != '\0');
        CHECK(i == 0 || memcmp(t->keys[i - 1].sha256, t->keys[i].sha256, SHA256_BYTES) < 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = mem_alloc(size + 1);
    struct tenants *t = NULL;
    memcpy(text, data, size);
    if (tenants_parse(&t, "f", text, size) == OK) {
        check_taken(t);
        tenants_free(t);
    } else {
        CHECK(strncmp(err_text(), "f: ", 3) == 0);
    }
    mem_free(text);
    return 0;
}
