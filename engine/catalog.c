/* From the operator's words to a choice, and from a choice to whether this process can do it. */
#include "engine/catalog.h"

#include <stdio.h>
#include <string.h>

enum { DENSE = 0 }; /* the registry begins with it */

/* `flag` before what sparse/ has to say. */
static status explain(const char *flag)
{
    char why[512];
    snprintf(why, sizeof why, "%s", err_text());
    return err(ERR_ARG, "%s: %s", flag, why);
}

static status set_option(struct sparse_choice *c, const char *text)
{
    char name[32];
    size_t n = strcspn(text, "=");
    if (text[n] != '=' || n == 0 || n >= sizeof name)
        return err(ERR_ARG, "--sparse-option: %.64s: must be name=value", text);
    snprintf(name, sizeof name, "%.*s", (int)n, text);
    if (sparse_is_common(name))
        return err(ERR_ARG,
                   "--sparse-option: %s is no option of a plug-in; it has a flag of its "
                   "own",
                   name);
    return sparse_choice_set(c, name, text + n + 1) == OK ? OK : explain("--sparse-option");
}

static status read_offers(const struct catalog_wish *w, uint32_t *offered)
{
    *offered = CATALOG_AUTO;
    for (uint32_t i = 0; i < w->n_offers; i++) {
        uint32_t plugin;
        if (strcmp(w->offers[i], "all") == 0) {
            *offered = CATALOG_ALL;
            continue;
        }
        if (sparse_find(w->offers[i], &plugin) != OK)
            return explain("--sparse-offer");
        *offered |= 1u << plugin;
    }
    return OK;
}

status catalog_choose(const struct catalog_wish *w, struct sparse_choice *out, uint32_t *offered)
{
    const struct {
        const char *flag, *name;
        double value;
    } common[] = {{"--sparse-budget", "budget", w->budget},
                  {"--sparse-min-rows", "min_rows", w->min_rows},
                  {"--sparse-interval", "interval", w->interval},
                  {"--sparse-top-p", "top_p", w->top_p},
                  {"--miss-threshold", "miss_threshold", w->miss_threshold}};
    uint32_t plugin;
    for (uint32_t i = 0; i < w->n_files; i++)
        if (sparse_load(w->files[i]) != OK)
            return explain("--plugin");
    if (sparse_find(w->plugin, &plugin) != OK)
        return explain("--sparse");
    *out = sparse_choice_make(plugin, 1);
    for (size_t i = 0; i < ARRAY_LEN(common); i++)
        if (sparse_choice_set_number(out, common[i].name, common[i].value) != OK)
            return explain(common[i].flag);
    for (uint32_t i = 0; i < w->n_options; i++)
        TRY(set_option(out, w->options[i]));
    return read_offers(w, offered);
}

struct sparse_choice catalog_dense(void)
{
    return sparse_choice_make(DENSE, 1);
}

status catalog_check(const struct catalog *c, const struct sparse_choice *choice)
{
    struct sparse_traits t;
    TRY(sparse_choice_check(choice, &c->geo, &t));
    const char *name = sparse_at(choice->plugin)->name;
    if (!t.attends_all && c->digest_bytes == NULL)
        return err(ERR_ARG, "plug-in %s cannot run on device %s: only dense can", name, c->device);
    if (t.on_host && !c->host_memory)
        return err(ERR_ARG, "plug-in %s computes on the host, and cannot on device %s", name,
                   c->device);
    size_t bytes = sparse_digest_bytes(&t, &c->geo, c->digest_bytes);
    if (bytes > c->record_lane_bytes)
        return err(ERR_ARG,
                   "the digests of plug-in %s with these options take %zu bytes per lane and "
                   "segment; the server was started for at most %zu (--sparse-offer)",
                   name, bytes, c->record_lane_bytes);
    return OK;
}

/* 0 for what attends everything, or does not fit the model. */
static size_t digest_bytes(const struct catalog *c, const struct sparse_choice *choice)
{
    struct sparse_traits t;
    bool fits = c->digest_bytes != NULL && sparse_choice_check(choice, &c->geo, &t) == OK;
    return fits ? sparse_digest_bytes(&t, &c->geo, c->digest_bytes) : 0;
}

status catalog_make(struct catalog *c, const struct backend *be, const struct kv_geometry *geo,
                    const struct sparse_choice *preset, uint32_t min_context, uint32_t offered)
{
    *c = (struct catalog){.preset = *preset,
                          .min_context = min_context,
                          .geo = *geo,
                          .device = be->ops->name,
                          .host_memory = be->ops->memory == NULL,
                          .digest_bytes = backend_plans(be->ops) ? be->ops->digest_bytes : NULL};
    c->geo.lanes = NULL;
    if (offered == CATALOG_AUTO && (c->host_memory || preset->plugin == DENSE))
        offered = CATALOG_ALL;
    c->record_lane_bytes = digest_bytes(c, preset);
    for (uint32_t i = 0; i < sparse_count(); i++) {
        struct sparse_choice made = sparse_choice_make(i, 1);
        size_t bytes = (offered >> i & 1) != 0 ? digest_bytes(c, &made) : 0;
        c->record_lane_bytes = bytes > c->record_lane_bytes ? bytes : c->record_lane_bytes;
    }
    c->record_lane_bytes = (c->record_lane_bytes + 63) / 64 * 64;
    return catalog_check(c, preset);
}

/* Of the plug-ins that are served with what a request gets by naming them, or of those whose digests have no room. */
static void list_names(const struct catalog *c, bool served, char *text, size_t room)
{
    size_t n = 0;
    text[0] = '\0';
    for (uint32_t i = 0; i < sparse_count() && n < room; i++) {
        struct sparse_choice made = i == c->preset.plugin ? c->preset : sparse_choice_make(i, 1);
        size_t bytes = digest_bytes(c, &made);
        if (served ? catalog_check(c, &made) != OK : bytes <= c->record_lane_bytes)
            continue;
        n += (size_t)snprintf(text + n, room - n, "%s%s", n > 0 ? ", " : "", sparse_at(i)->name);
        if (!served && n < room)
            n += (size_t)snprintf(text + n, room - n, " (%zu bytes)", bytes);
    }
}

void catalog_tell(const struct catalog *c, void (*line)(void *arg, const char *text), void *arg)
{
    char names[256], text[512];
    if (c->record_lane_bytes == 0)
        return;
    list_names(c, true, names, sizeof names);
    int n = snprintf(text, sizeof text,
                     "digests have %zu bytes per segment and lane; requests may name %s",
                     c->record_lane_bytes, names);
    list_names(c, false, names, sizeof names);
    if (names[0] != '\0')
        snprintf(text + n, sizeof text - (size_t)n, "; no room for %s: --sparse-offer", names);
    line(arg, text);
}
