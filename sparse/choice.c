/* What a server or a request chose: values of options from text and from numbers, their ranges, and the
 * ids under which the prefix cache keeps what came of it. */
#include "sparse/plugin.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_INTERVAL = 1024,  /* steps; beyond it a selection has nothing to do with the text */
    MAX_BUDGET = 1 << 30, /* rows */
    MAX_OUTLIERS = 2      /* of a partition: digest_desc */
};

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

struct allowed {
    char text[160];
};

/* "a number, 0 to 1" */
static struct allowed allowed(const struct sparse_option *o)
{
    struct allowed a;
    switch (o->type) {
    case SPARSE_BOOL: snprintf(a.text, sizeof a.text, "on or off"); break;
    case SPARSE_COUNT:
        snprintf(a.text, sizeof a.text, "a whole number, %g to %g", o->min, o->max);
        break;
    case SPARSE_NUMBER:
        snprintf(a.text, sizeof a.text, "a number, %g to %g", o->min, o->max);
        break;
    case SPARSE_CHOICE: snprintf(a.text, sizeof a.text, "one of %s", o->choices); break;
    }
    return a;
}

bool sparse_is_common(const char *name)
{
    static const char *const common[] = {"plugin", "budget",         "min_rows",   "interval",
                                         "top_p",  "miss_threshold", "min_context"};
    for (size_t i = 0; i < ARRAY_LEN(common); i++)
        if (strcmp(common[i], name) == 0)
            return true;
    return false;
}

static uint32_t n_choices(const struct sparse_option *o)
{
    uint32_t n = 1;
    for (const char *p = o->choices; *p != '\0'; p++)
        n += *p == '|';
    return n;
}

/* Index of text among "a|b|c"; n_choices: not there. */
static uint32_t choice_index(const struct sparse_option *o, const char *text)
{
    uint32_t i = 0;
    size_t len = strlen(text);
    for (const char *p = o->choices;; i++) {
        size_t n = strcspn(p, "|");
        if (n == len && memcmp(p, text, n) == 0)
            return i;
        if (p[n] == '\0')
            return n_choices(o);
        p += n + 1;
    }
}

bool sparse_option_takes(const struct sparse_option *o, double v)
{
    switch (o->type) {
    case SPARSE_BOOL: return v == 0 || v == 1;
    case SPARSE_COUNT: return v >= o->min && v <= o->max && v == floor(v);
    case SPARSE_NUMBER: return v >= o->min && v <= o->max;
    case SPARSE_CHOICE: return v >= 0 && v < n_choices(o) && v == floor(v);
    }
    return false;
}

struct sparse_choice sparse_choice_make(uint32_t plugin, float budget)
{
    const struct sparse_plugin *p = sparse_at(plugin);
    struct sparse_choice c = {.plugin = plugin, .interval = 1, .budget = budget, .top_p = 1};
    for (uint32_t i = 0; i < p->n_options; i++)
        c.values[i] = p->options[i].preset;
    return c;
}

static status find_option(const struct sparse_choice *c, const char *name, uint32_t *out)
{
    const struct sparse_plugin *p = sparse_at(c->plugin);
    char known[SPARSE_MAX_OPTIONS * 18 + 1] = "none";
    size_t at = 0;
    for (*out = 0; *out < p->n_options; (*out)++)
        if (strcmp(p->options[*out].name, name) == 0)
            return OK;
    for (uint32_t i = 0; i < p->n_options; i++)
        at += (size_t)snprintf(known + at, sizeof known - at, "%s%s", i == 0 ? "" : ", ",
                               p->options[i].name);
    return err(ERR_ARG, "unknown option \"%.32s\" of plug-in %s, which has %s", name, p->name,
               known);
}

static status refuse(const struct sparse_option *o, const char *got)
{
    return err(ERR_ARG, "%s must be %s, got %.32s", o->name, allowed(o).text, got);
}

static status check_common(const struct sparse_choice *c)
{
    if (!(c->budget > 0) || !(c->budget <= (float)MAX_BUDGET))
        return err(ERR_ARG,
                   "budget must be a share of the context, above 0 to 1, or more than 1: "
                   "a number of rows, at most %d; got %g",
                   MAX_BUDGET, (double)c->budget);
    if (c->min_rows > MAX_BUDGET)
        return err(ERR_ARG, "min_rows must be a whole number, 0 to %d, got %u", MAX_BUDGET,
                   c->min_rows);
    if (c->interval < 1 || c->interval > MAX_INTERVAL)
        return err(ERR_ARG, "interval must be a whole number, 1 to %d, got %u", MAX_INTERVAL,
                   c->interval);
    if (!(c->top_p > 0) || !(c->top_p <= 1))
        return err(ERR_ARG, "top_p must be a number above 0, at most 1, got %g", (double)c->top_p);
    if (!(c->miss_threshold >= 0) || !(c->miss_threshold <= 1))
        return err(ERR_ARG, "miss_threshold must be a number, 0 to 1, got %g",
                   (double)c->miss_threshold);
    return OK;
}

/* A field that every choice has; *known: is `name` one? c stays as it was unless OK. */
static status set_common(struct sparse_choice *c, const char *name, double v, bool *known)
{
    struct sparse_choice to = *c;
    bool whole = v >= 0 && v <= MAX_BUDGET && v == floor(v);
    *known = true;
    if (strcmp(name, "budget") == 0)
        to.budget = (float)v;
    else if (strcmp(name, "min_rows") == 0)
        to.min_rows = whole ? (uint32_t)v : UINT32_MAX;
    else if (strcmp(name, "top_p") == 0)
        to.top_p = (float)v;
    else if (strcmp(name, "miss_threshold") == 0)
        to.miss_threshold = (float)v;
    else if (strcmp(name, "interval") == 0)
        to.interval = whole && v <= MAX_INTERVAL ? (uint32_t)v : 0;
    else
        *known = false;
    if (*known && to.interval == 0)
        return err(ERR_ARG, "interval must be a whole number, 1 to %d, got %.9g", MAX_INTERVAL, v);
    if (*known && to.min_rows == UINT32_MAX)
        return err(ERR_ARG, "min_rows must be a whole number, 0 to %d, got %.9g", MAX_BUDGET, v);
    if (*known)
        TRY(check_common(&to));
    *c = to;
    return OK;
}

status sparse_choice_set(struct sparse_choice *c, const char *name, const char *value)
{
    static const char *const switches[] = {"off", "on", "false", "true", "0", "1"};
    uint32_t i, k = 0;
    TRY(find_option(c, name, &i));
    const struct sparse_option *o = &sparse_at(c->plugin)->options[i];
    char *end;
    double v = 0;
    if (o->type == SPARSE_BOOL) {
        while (k < ARRAY_LEN(switches) && strcmp(switches[k], value) != 0)
            k++;
        v = k < ARRAY_LEN(switches) ? (double)(k % 2) : -1;
    } else if (o->type == SPARSE_CHOICE) {
        v = choice_index(o, value);
    } else {
        /* strtod would read " 1", "nan", "inf" and "0x1" */
        bool plain = value[0] != '\0' && strspn(value, "0123456789.-+e") == strlen(value);
        v = strtod(value, &end);
        if (!plain || *end != '\0')
            return refuse(o, value);
    }
    if (!sparse_option_takes(o, v))
        return refuse(o, value);
    c->values[i] = v;
    return OK;
}

status sparse_choice_set_number(struct sparse_choice *c, const char *name, double value)
{
    char got[40];
    uint32_t i;
    bool common;
    TRY(set_common(c, name, value, &common));
    if (common)
        return OK;
    TRY(find_option(c, name, &i));
    const struct sparse_option *o = &sparse_at(c->plugin)->options[i];
    snprintf(got, sizeof got, "%.9g", value);
    if (o->type == SPARSE_CHOICE || !sparse_option_takes(o, value))
        return refuse(o, got);
    c->values[i] = value;
    return OK;
}

/* ---- checks ---- */

static status check_values(const struct sparse_choice *c)
{
    const struct sparse_plugin *p = sparse_at(c->plugin);
    char got[40];
    for (uint32_t i = 0; i < p->n_options; i++) {
        const struct sparse_option *o = &p->options[i];
        bool left_out = c->values[i] == o->preset; /* which may lie outside: SPARSE_PRESET_AUTO */
        snprintf(got, sizeof got, "%.9g", c->values[i]);
        if (!left_out && !sparse_option_takes(o, c->values[i]))
            return refuse(o, got);
    }
    return OK;
}

/* Mean values of partitions, as attention reads them: a plug-in's own digests have none. */
static bool has_values(const struct sparse_traits *t)
{
    return t->digest.kind != DIGEST_NONE && t->digest.values;
}

/* The combinations that seal, score and select are made for; a backend aborts on others. */
static status check_digest(const struct sparse_plugin *p, const struct kv_geometry *geo,
                           const struct sparse_traits *t)
{
    const struct digest_desc *d = &t->digest;
    uint32_t pages = SEGMENT_ROWS / geo->block_rows;
    bool free = d->order == ORDER_KMEANS, codes = d->kind == DIGEST_CODES;
    if ((uint32_t)d->order > ORDER_KMEANS || (uint32_t)d->kind > DIGEST_CODES)
        return err(ERR_ARG, "plug-in %s: describe() gave an unknown order or kind of digest",
                   p->name);
    if (!free && SEGMENT_ROWS % t->parts != 0)
        return err(ERR_ARG,
                   "plug-in %s: describe() gave %u partitions, which %d rows cannot be cut "
                   "into evenly",
                   p->name, t->parts, SEGMENT_ROWS);
    uint32_t most = free || codes ? 0 : min_u32(SEGMENT_ROWS / t->parts - 1, MAX_OUTLIERS);
    if (d->outliers > most)
        return err(ERR_ARG, "plug-in %s: describe() gave %u outliers; here it may be at most %u",
                   p->name, d->outliers, most);
    if ((d->order == ORDER_BISECT || codes) && (free || t->parts != pages))
        return err(ERR_ARG,
                   "plug-in %s: describe() gave %u partitions%s; clusters by bisection and codes "
                   "are of whole pages, %u",
                   p->name, t->parts, free ? " by k-means" : "", pages);
    return OK;
}

/* What describe said, of a third party too: everything that the host sizes memory from. */
static status check_traits(const struct sparse_plugin *p, const struct kv_geometry *geo,
                           const struct sparse_traits *t)
{
    uint32_t pages = SEGMENT_ROWS / geo->block_rows;
    bool own = t->digest.kind == DIGEST_NONE;
    if ((uint32_t)t->map > MAP_TOKEN || (uint32_t)t->reduce > REDUCE_NATIVE || p->score == NULL)
        return err(ERR_ARG, "plug-in %s: describe() gave an unknown map or reduction", p->name);
    if (t->parts == 0 || t->parts > SEGMENT_ROWS || t->digest.parts != t->parts ||
        (t->map == MAP_PAGE && t->parts != pages) ||
        (t->map == MAP_TOKEN && t->parts != SEGMENT_ROWS))
        return err(ERR_ARG,
                   "plug-in %s: describe() gave %u partitions of a segment (digest: %u); a "
                   "PAGE map has %u, a TOKEN map %d",
                   p->name, t->parts, t->digest.parts, pages, SEGMENT_ROWS);
    TRY(check_digest(p, geo, t));
    if (t->sinks != t->digest.sinks || t->sinks >= SEGMENT_ROWS || t->sinks % geo->block_rows != 0)
        return err(ERR_ARG,
                   "plug-in %s: describe() gave %u sinks (digest: %u); they must be whole "
                   "pages of %u rows, and less than a segment of %d",
                   p->name, t->sinks, t->digest.sinks, geo->block_rows, SEGMENT_ROWS);
    if (t->permutes != (t->digest.order != ORDER_KEEP) || (own && t->permutes))
        return err(ERR_ARG, "plug-in %s: only the orders of a built-in digest permute rows",
                   p->name);
    if (t->known_mass && t->reduce != REDUCE_MAX_PROB && t->reduce != REDUCE_SUM_PROB)
        return err(ERR_ARG, "plug-in %s: only probabilities can be shares of a known mass",
                   p->name);
    if (!(t->estimate >= 0) || t->estimate > 1 || (t->estimate > 0 && !has_values(t)))
        return err(ERR_ARG,
                   "plug-in %s: describe() gave estimate %g; above 0 it needs built-in "
                   "digests with values",
                   p->name, (double)t->estimate);
    return OK;
}

status sparse_choice_check(const struct sparse_choice *c, const struct kv_geometry *geo,
                           struct sparse_traits *out)
{
    if (c->plugin >= sparse_count())
        return err(ERR_ARG, "there is no plug-in number %u", c->plugin);
    const struct sparse_plugin *p = sparse_at(c->plugin);
    TRY(check_values(c));
    TRY(p->describe(geo, c->values, out));
    if (out->attends_all)
        return OK;
    TRY(check_common(c));
    TRY(check_traits(p, geo, out));
    if (c->miss_threshold > 0 && !has_values(out))
        return err(ERR_ARG,
                   "miss_threshold must be 0 with plug-in %s, got %g: it keeps nothing "
                   "from which a page could be estimated",
                   p->name, (double)c->miss_threshold);
    return OK;
}

bool sparse_choice_equal(const struct sparse_choice *a, const struct sparse_choice *b)
{
    if (a->plugin != b->plugin || a->interval != b->interval || a->budget != b->budget ||
        a->min_rows != b->min_rows || a->top_p != b->top_p ||
        a->miss_threshold != b->miss_threshold)
        return false;
    for (uint32_t i = 0; i < sparse_at(a->plugin)->n_options; i++)
        if (a->values[i] != b->values[i])
            return false;
    return true;
}

size_t sparse_digest_bytes(const struct sparse_traits *t, const struct kv_geometry *geo,
                           size_t (*of)(const struct kv_geometry *geo, const struct digest_desc *d))
{
    if (t->attends_all)
        return 0;
    bool own = t->digest.kind == DIGEST_NONE && t->digest.order == ORDER_KEEP;
    return own ? t->digest_bytes : of(geo, &t->digest);
}

/* ---- ids ---- */

static uint64_t mix(uint64_t h, uint64_t x)
{
    h = (h ^ x) * 0x9e3779b97f4a7c15u; /* one multiplication and a fold per number */
    return h ^ (h >> 29);
}

/* A built-in digest is known by its description: plug-ins that describe the same share it. One of a
 * plug-in's own is known by the plug-in and all its values. */
static uint64_t digest_id(const struct sparse_choice *c, const struct sparse_traits *t)
{
    const struct digest_desc *d = &t->digest;
    uint64_t h = 0x5350494e44u;
    if (d->kind != DIGEST_NONE || d->order != ORDER_KEEP) {
        const uint32_t says[] = {d->order, d->kind, d->parts, d->outliers, d->sinks, d->values};
        for (size_t i = 0; i < ARRAY_LEN(says); i++)
            h = mix(h, says[i]);
    } else {
        const struct sparse_plugin *p = sparse_at(c->plugin);
        for (const char *s = p->name; *s != '\0'; s++)
            h = mix(h, (uint8_t)*s);
        for (uint32_t i = 0; i < p->n_options; i++) {
            uint64_t bits;
            memcpy(&bits, &c->values[i], sizeof bits);
            h = mix(h, bits);
        }
        h = mix(h, t->digest_bytes);
    }
    return h | 1; /* never 0 */
}

uint64_t sparse_digest_id(const struct sparse_choice *c, const struct sparse_traits *t)
{
    bool none = t->digest.kind == DIGEST_NONE && t->digest.order == ORDER_KEEP;
    return t->attends_all || (none && t->digest_bytes == 0) ? 0 : digest_id(c, t);
}

/* Permuted segments are shared with their records, so what names one names the other. */
uint64_t sparse_layout_id(const struct sparse_choice *c, const struct sparse_traits *t)
{
    return t->permutes ? sparse_digest_id(c, t) : 0;
}
