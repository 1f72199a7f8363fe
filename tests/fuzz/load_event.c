/* Any bytes as an event of a server under load: whatever is read lies inside them, and as many ids come as
 * were counted. */
#include "api/load/event.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static void inside(const struct event_text *t, const char *p, size_t len)
{
    CHECK(t->len == 0 || (t->p >= p && t->len <= len && t->p + t->len <= p + len));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    const char *p = (const char *)data;
    struct event e;
    if (!event_read(&e, p, len))
        return 0;
    CHECK(len >= 2 && memchr(p, '{', len) != NULL);
    inside(&e.text, p, len);
    inside(&e.reason, p, len);
    inside(&e.error, p, len);
    CHECK(e.n_ids <= len);
    if (e.n_ids > 0) {
        uint32_t *ids = mem_alloc(e.n_ids * sizeof *ids);
        event_ids(&e, ids);
        mem_free(ids);
    }
    return 0;
}
