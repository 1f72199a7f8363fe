/* From a policy's name to the class of every lane. The formats of its files are in head_policy_duo.c
 * and head_policy_razor.c. Runs once, at start. */
#include "sparse/head_policy_file.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNIT = 16, MAX_ROWS = 1 << 20 };

char *head_policy_text(const char *file, status *st)
{
    FILE *f = fopen(file, "rbe");
    if (f == NULL) {
        *st = err(ERR_IO, "%s: %s", file, strerror(errno));
        return NULL;
    }
    char *text = mem_alloc(POLICY_FILE_MAX + 2);
    size_t n = fread(text, 1, POLICY_FILE_MAX + 1, f);
    *st = ferror(f) != 0        ? err(ERR_IO, "%s: cannot be read", file)
          : n > POLICY_FILE_MAX ? err(ERR_FORMAT, "%s: larger than %d bytes", file, POLICY_FILE_MAX)
          : strlen(text) != n   ? err(ERR_FORMAT, "%s: not a text", file)
                                : OK;
    fclose(f);
    if (*st == OK)
        return text;
    mem_free(text);
    return NULL;
}

status head_policy_rows(const char *file, const cJSON *o, const char *name, uint32_t otherwise,
                        uint32_t *out)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);
    *out = otherwise;
    if (v == NULL || cJSON_IsNull(v))
        return OK;
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= 0) || !(v->valuedouble <= MAX_ROWS) ||
        v->valuedouble != (double)(uint32_t)v->valuedouble)
        return err(ERR_FORMAT, "%s: \"%s\" must be a whole number, 0 to %d", file, name, MAX_ROWS);
    *out = (uint32_t)v->valuedouble;
    return OK;
}

status head_policy_other_shape(const char *file, uint32_t their_layers, uint32_t their_heads,
                               uint32_t layers, uint32_t kv_heads)
{
    return err(ERR_FORMAT,
               "%s: made for a model of %u layers with %u KV heads; this one has %u with %u", file,
               their_layers, their_heads, layers, kv_heads);
}

/* ---- ranks ---- */

struct ranked {
    float score;
    uint32_t lane;
};

static int better_first(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return x->lane < y->lane ? -1 : x->lane > y->lane;
}

void head_policy_best(const float *scores, uint32_t n_lanes, uint32_t n, uint8_t *marks)
{
    struct ranked *r = mem_alloc(n_lanes * sizeof *r + 1);
    for (uint32_t i = 0; i < n_lanes; i++)
        r[i] = (struct ranked){scores[i], i};
    qsort(r, n_lanes, sizeof *r, better_first);
    for (uint32_t i = 0; i < n && i < n_lanes; i++)
        marks[r[i].lane] |= 1;
    mem_free(r);
}

/* ---- the policies ---- */

static bool is(const struct head_policy_config *c, const char *name)
{
    return strcmp(c->name != NULL ? c->name : "none", name) == 0;
}

static status check(const struct head_policy_config *c)
{
    bool duo = is(c, "duo"), razor = is(c, "razor");
    if (!duo && !razor && !is(c, "none") && !is(c, "streaming"))
        return err(ERR_ARG, "unknown head policy \"%.32s\"; there are none, streaming, duo, razor",
                   c->name);
    if ((duo || razor) && c->file == NULL)
        return err(ERR_ARG, "head policy %s needs a file", c->name);
    if (!duo && c->sparsity > 0)
        return err(ERR_ARG, "a sparsity can be chosen for head policy duo alone, not for %s",
                   c->name == NULL ? "none" : c->name);
    if (!(c->sparsity <= 1))
        return err(ERR_ARG, "the sparsity of a head policy must be 0 to 1, got %g",
                   (double)c->sparsity);
    if (c->sinks % UNIT != 0 || c->recent % UNIT != 0)
        return err(ERR_ARG,
                   "sinks and recent rows of a head policy must be multiples of %d, got %u "
                   "and %u",
                   UNIT, c->sinks, c->recent);
    return OK;
}

static uint32_t round_up(uint32_t rows)
{
    return (rows + UNIT - 1) / UNIT * UNIT;
}

status head_policy_make(const struct head_policy_config *c, uint32_t layers, uint32_t kv_heads,
                        uint8_t *classes, uint32_t *sinks, uint32_t *recent)
{
    uint32_t n = layers * kv_heads, own_sinks = POLICY_SINKS, own_recent = POLICY_RECENT;
    TRY(check(c));
    memset(classes, LANE_SPARSE, n);
    if (is(c, "streaming"))
        memset(classes, LANE_STREAM, n);
    else if (is(c, "duo"))
        TRY(head_policy_duo(c, layers, kv_heads, classes, &own_sinks, &own_recent));
    else if (is(c, "razor"))
        TRY(head_policy_razor(c, layers, kv_heads, classes, &own_sinks, &own_recent));
    for (uint32_t i = 0; i < n && i / kv_heads < c->exempt_layers; i++)
        if (classes[i] == LANE_SPARSE)
            classes[i] = LANE_DENSE;
    *sinks = round_up(c->sinks != 0 ? c->sinks : own_sinks);
    *recent = round_up(c->recent != 0 ? c->recent : own_recent);
    *recent = *recent == 0 ? UNIT : *recent; /* a row attends itself at least */
    return OK;
}
