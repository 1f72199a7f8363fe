/* Shared objects that --plugin must refuse, one fault each: compiled once per fault, with BAD_<FAULT>
 * defined (the Makefile's list). */
#include "sparse/plugin.h"

static status describe(const struct kv_geometry *geo, const double *values,
                       struct sparse_traits *out)
{
    (void)geo, (void)values, (void)out;
    return OK;
}

#ifndef BAD_SCORE
static void score(const struct sparse_rows *r, const struct sparse_traits *t, const double *values,
                  float *scores, uint32_t stride)
{
    (void)r, (void)t, (void)values, (void)scores, (void)stride;
}
#endif

static const struct sparse_option options[] = {
#ifdef BAD_COMMON
    {.name = "budget", .help = "a field that every choice has", .type = SPARSE_BOOL},
#endif
#ifdef BAD_PRESET
    {.name = "width", .help = "a preset out of range", .type = SPARSE_COUNT, .preset = 9, .max = 8},
#endif
    {.name = "x", .help = "an option", .type = SPARSE_BOOL},
#ifdef BAD_TWICE
    {.name = "x", .help = "and once more", .type = SPARSE_BOOL},
#endif
};

#ifdef BAD_SYMBOL
#define spind_sparse_plugin some_other_name
#endif
#ifdef BAD_ABI
#define ABI 7
#else
#define ABI SPARSE_ABI
#endif
#if defined BAD_TAKEN
#define NAME "quest"
#elif defined BAD_NAME
#define NAME "My Plug-in"
#else
#define NAME "bad"
#endif

const struct sparse_plugin spind_sparse_plugin = {
    .abi = ABI,
    .name = NAME,
    .help = "refused",
    .options = options,
#ifdef BAD_COUNT
    .n_options = 99,
#else
    .n_options = ARRAY_LEN(options),
#endif
    .describe = describe,
#ifndef BAD_SCORE
    .score = score,
#endif
};
