/* The extension "sparse": {"plugin": "wave", "budget": 0.05, "estimate": 0.25, ...}: how this request's
 * decoding attends. What is absent is the server's; with another plug-in than the server's, its
 * options are that plug-in's presets and nothing is estimated for being absent. What the plug-ins are
 * and what their options may be is in the engine's catalog; everything is checked here, so that the
 * engine never has to refuse. */
#include "api/request_fields.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_PARAM = 48 };

struct param {
    char text[MAX_PARAM]; /* "sparse.budget" */
};

static struct param param_of(const char *name)
{
    struct param p;
    snprintf(p.text, sizeof p.text, "sparse.%s", request_fields_quote(name, strlen(name)).text);
    return p;
}

static status wrong_type(struct request_draft *d, const char *name, const char *wanted)
{
    return request_fields_type(d, param_of(name).text, wanted);
}

/* What err_text() says of a value begins with the name. */
static status wrong_value(struct request_draft *d, const char *name)
{
    return request_fields_bad(d, "invalid_value", param_of(name).text, "sparse.%s.", err_text());
}

static bool is_absent(const cJSON *v)
{
    return v == NULL || cJSON_IsNull(v);
}

static status read_plugin(struct request_draft *d, const cJSON *v)
{
    struct sparse_choice *c = &d->r->sparse;
    uint32_t plugin;
    if (is_absent(v))
        return OK;
    if (!cJSON_IsString(v))
        return wrong_type(d, "plugin", "a string");
    if (sparse_find(v->valuestring, &plugin) != OK)
        return request_fields_bad(d, "invalid_value", "sparse.plugin", "sparse.plugin: %s.",
                                  err_text());
    if (plugin == c->plugin)
        return OK;
    struct sparse_choice other = sparse_choice_make(plugin, c->budget);
    other.min_rows = c->min_rows;
    other.interval = c->interval;
    other.top_p = c->top_p;
    *c = other;
    return OK;
}

/* The plug-in in force, named or the server's, attends everything, and the request wants it sparse. */
static status without_plugin(struct request_draft *d, bool named, const char *name)
{
    char known[256] = "";
    size_t at = 0;
    for (uint32_t i = 0; i < sparse_count() && at < sizeof known; i++)
        at += (size_t)snprintf(known + at, sizeof known - at, "%s%s", i == 0 ? "" : ", ",
                               sparse_at(i)->name);
    return request_fields_bad(
        d, "invalid_value", param_of(name).text,
        "sparse.%s has no effect with plug-in %s%s; sparse.plugin may be one of %s.", name,
        sparse_at(d->r->sparse.plugin)->name, named ? "" : ", the server's", known);
}

static status read_min_context(struct request_draft *d, const cJSON *v)
{
    if (!cJSON_IsNumber(v) || v->valuedouble != floor(v->valuedouble))
        return wrong_type(d, "min_context", "an integer");
    if (v->valuedouble < 0 || v->valuedouble > INT32_MAX)
        return request_fields_bad(d, "invalid_value", "sparse.min_context",
                                  "sparse.min_context must be a whole number, 0 to %d, got %.9g.",
                                  INT32_MAX, v->valuedouble);
    d->r->sparse_min_context = (uint32_t)v->valuedouble;
    return OK;
}

static status read_common(struct request_draft *d, const cJSON *v)
{
    if (strcmp(v->string, "plugin") == 0)
        return OK; /* read before */
    if (strcmp(v->string, "min_context") == 0)
        return read_min_context(d, v);
    bool whole = strcmp(v->string, "interval") == 0 || strcmp(v->string, "min_rows") == 0;
    if (!cJSON_IsNumber(v) || (whole && v->valuedouble != floor(v->valuedouble)))
        return wrong_type(d, v->string, whole ? "an integer" : "a number");
    if (sparse_choice_set_number(&d->r->sparse, v->string, v->valuedouble) != OK)
        return wrong_value(d, v->string);
    return OK;
}

static status read_option(struct request_draft *d, const struct sparse_option *o, const cJSON *v)
{
    struct sparse_choice *c = &d->r->sparse;
    switch (o->type) {
    case SPARSE_BOOL:
        if (!cJSON_IsBool(v))
            return wrong_type(d, o->name, "a boolean");
        return sparse_choice_set_number(c, o->name, cJSON_IsTrue(v));
    case SPARSE_CHOICE:
        if (!cJSON_IsString(v))
            return wrong_type(d, o->name, "a string");
        return sparse_choice_set(c, o->name, v->valuestring) == OK ? OK : wrong_value(d, o->name);
    case SPARSE_COUNT:
        if (!cJSON_IsNumber(v) || v->valuedouble != floor(v->valuedouble))
            return wrong_type(d, o->name, "an integer");
        break;
    case SPARSE_NUMBER:
        if (!cJSON_IsNumber(v))
            return wrong_type(d, o->name, "a number");
        break;
    }
    if (sparse_choice_set_number(c, o->name, v->valuedouble) != OK)
        return wrong_value(d, o->name);
    return OK;
}

static status read_member(struct request_draft *d, bool plugin_given, const cJSON *v)
{
    const struct sparse_plugin *p = sparse_at(d->r->sparse.plugin);
    if (is_absent(v))
        return OK;
    if (p->score == NULL)
        return without_plugin(d, plugin_given,
                              request_fields_quote(v->string, strlen(v->string)).text);
    if (sparse_is_common(v->string))
        return read_common(d, v);
    for (uint32_t i = 0; i < p->n_options; i++)
        if (strcmp(p->options[i].name, v->string) == 0)
            return read_option(d, &p->options[i], v);
    (void)sparse_choice_set(&d->r->sparse, v->string, ""); /* says which there are */
    return request_fields_bad(d, "unknown_parameter", param_of(v->string).text,
                              "sparse: %s, and with every plug-in budget, min_rows, interval, "
                              "top_p, miss_threshold and min_context.",
                              err_text());
}

static status read_members(struct request_draft *d, const cJSON *tree)
{
    const cJSON *plugin = cJSON_GetObjectItemCaseSensitive(tree, "plugin");
    TRY(read_plugin(d, plugin));
    for (const cJSON *v = tree->child; v != NULL; v = v->next)
        if (v != plugin)
            TRY(read_member(d, !is_absent(plugin), v));
    if (catalog_check(d->rules->info->catalog, &d->r->sparse) != OK)
        return request_fields_bad(d, "invalid_value", "sparse", "sparse: %s.", err_text());
    return OK;
}

status request_sparse_read(struct request_draft *d, const struct json_value *v)
{
    if (v->type != JSON_OBJECT)
        return request_fields_type(d, "sparse", "an object");
    if (d->rules->info->catalog == NULL)
        return request_fields_bad(d, "unsupported_parameter", "sparse",
                                  "sparse is not currently supported by this server.");
    cJSON *tree = json_tree(v);
    if (tree == NULL)
        return request_fields_full(d);
    status st = read_members(d, tree);
    cJSON_Delete(tree);
    return st;
}
