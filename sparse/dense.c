/* Attends everything: what every other plug-in is compared with, and what short contexts get. */
#include "sparse/builtin.h"

static status describe(const struct kv_geometry *geo, const double *values,
                       struct sparse_traits *out)
{
    (void)geo, (void)values;
    *out = (struct sparse_traits){.attends_all = true};
    return OK;
}

const struct sparse_plugin dense_plugin = {
    .abi = SPARSE_ABI,
    .name = "dense",
    .help = "attends every row",
    .describe = describe,
};
