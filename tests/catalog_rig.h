/* A backend for those who only ask what it could do: a catalog looks at which operations there are and
 * how large digests come out, and calls nothing else. */
#ifndef TESTS_CATALOG_RIG_H
#define TESTS_CATALOG_RIG_H

#include "engine/catalog.h"

/* As the CPU's, roughly. */
static size_t rig_digest_bytes(const struct kv_geometry *geo, const struct digest_desc *d)
{
    size_t kinds = d->kind == DIGEST_BOUNDS ? 4 : 1 + d->outliers + (d->values ? 1 : 0);
    return digest_offset(d) + d->parts * kinds * geo->head_dim;
}

static size_t rig_known_bytes(const struct kv_geometry *geo, uint32_t heads)
{
    return (size_t)geo->head_dim * heads;
}

#define RIG_NEVER(op)                                                   \
    static void rig_##op(struct backend *be, const struct op##_args *a) \
    {                                                                   \
        (void)be, (void)a;                                              \
        CHECK(!"called");                                               \
    }
RIG_NEVER(seal)
RIG_NEVER(unpermute)
RIG_NEVER(score)
RIG_NEVER(known)
RIG_NEVER(select)
RIG_NEVER(resolve)
#undef RIG_NEVER

static const struct backend_ops rig_ops = {.name = "cpu",
                                           .digest_bytes = rig_digest_bytes,
                                           .seal = rig_seal,
                                           .unpermute = rig_unpermute,
                                           .score = rig_score,
                                           .known_bytes = rig_known_bytes,
                                           .known = rig_known,
                                           .select = rig_select,
                                           .resolve = rig_resolve};
static const struct backend rig_plans = {&rig_ops};

#endif
