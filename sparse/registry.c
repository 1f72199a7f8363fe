/* Which plug-ins there are: a line for each that is compiled in, then what --plugin loaded. Written
 * before any thread starts, constant after. A shared object is never unloaded. */
#include "sparse/builtin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static const struct sparse_plugin *plugins[SPARSE_MAX_PLUGINS] = {
    &dense_plugin,
    &oracle_plugin,
    &quest_plugin,
    &wave_plugin,
};
static uint32_t n_plugins = 4;

enum { NAME_MAX_BYTES = 15 };

uint32_t sparse_count(void)
{
    return n_plugins;
}

const struct sparse_plugin *sparse_at(uint32_t i)
{
    CHECK(i < n_plugins);
    return plugins[i];
}

static bool find(const char *name, uint32_t *out)
{
    for (*out = 0; *out < n_plugins; (*out)++)
        if (strcmp(plugins[*out]->name, name) == 0)
            return true;
    return false;
}

status sparse_find(const char *name, uint32_t *out)
{
    char known[SPARSE_MAX_PLUGINS * (NAME_MAX_BYTES + 2) + 1];
    size_t at = 0;
    if (find(name, out))
        return OK;
    for (uint32_t i = 0; i < n_plugins; i++)
        at += (size_t)snprintf(known + at, sizeof known - at, "%s%s", i == 0 ? "" : ", ",
                               plugins[i]->name);
    return err(ERR_ARG, "unknown plug-in \"%.32s\"; there are %s", name, known);
}

/* ---- shared objects ---- */

static bool is_name(const char *s)
{
    size_t len = s == NULL ? 0 : strlen(s);
    return len >= 1 && len <= NAME_MAX_BYTES && s[0] >= 'a' && s[0] <= 'z' &&
           strspn(s, "abcdefghijklmnopqrstuvwxyz0123456789_") == len;
}

static status check_option(const char *file, const struct sparse_plugin *p, uint32_t i)
{
    const struct sparse_option *o = &p->options[i];
    if (!is_name(o->name))
        return err(ERR_ARG,
                   "%s: option %u has no name of the form [a-z][a-z0-9_]*, at most %u "
                   "characters",
                   file, i, NAME_MAX_BYTES);
    if (sparse_is_common(o->name))
        return err(ERR_ARG, "%s: option %s is the name of a field that every plug-in has", file,
                   o->name);
    for (uint32_t j = 0; j < i; j++)
        if (strcmp(p->options[j].name, o->name) == 0)
            return err(ERR_ARG, "%s: option %s is there twice", file, o->name);
    if (o->help == NULL || (uint32_t)o->type > SPARSE_CHOICE ||
        (o->type == SPARSE_CHOICE && (o->choices == NULL || o->choices[0] == '\0')))
        return err(ERR_ARG, "%s: option %s lacks its help, a known type or its choices", file,
                   o->name);
    if (o->preset != SPARSE_PRESET_AUTO && !sparse_option_takes(o, o->preset))
        return err(ERR_ARG, "%s: option %s: its preset, %g, is out of its range", file, o->name,
                   o->preset);
    return OK;
}

static status check_plugin(const char *file, const struct sparse_plugin *p)
{
    uint32_t taken;
    if (p == NULL)
        return err(ERR_ARG, "%s: no symbol spind_sparse_plugin: not a plug-in of spind", file);
    if (p->abi != SPARSE_ABI) /* nothing else may be read */
        return err(ERR_ARG, "%s: made for plug-in ABI %u; this spind has %d", file, p->abi,
                   SPARSE_ABI);
    if (!is_name(p->name))
        return err(ERR_ARG,
                   "%s: its name must be of the form [a-z][a-z0-9_]*, at most %u characters", file,
                   NAME_MAX_BYTES);
    if (find(p->name, &taken))
        return err(ERR_ARG, "%s: there is a plug-in %s already", file, p->name);
    if (p->describe == NULL || p->score == NULL || p->help == NULL)
        return err(ERR_ARG, "%s: plug-in %s lacks %s", file, p->name,
                   p->describe == NULL ? "describe"
                   : p->score == NULL  ? "score"
                                       : "help");
    if (p->n_options > SPARSE_MAX_OPTIONS || (p->n_options > 0 && p->options == NULL))
        return err(ERR_ARG, "%s: plug-in %s has %u options; at most %d are possible", file, p->name,
                   p->n_options, SPARSE_MAX_OPTIONS);
    for (uint32_t i = 0; i < p->n_options; i++)
        TRY(check_option(file, p, i));
    return OK;
}

status sparse_load(const char *file)
{
    char path[4096];
    if (n_plugins == SPARSE_MAX_PLUGINS)
        return err(ERR_ARG, "%s: there are %d plug-ins, and no more are possible", file,
                   SPARSE_MAX_PLUGINS);
    /* dlopen looks a name without a slash up in the system's folders. */
    int n = snprintf(path, sizeof path, "%s%s", strchr(file, '/') == NULL ? "./" : "", file);
    if (n < 0 || (size_t)n >= sizeof path)
        return err(ERR_ARG, "%.64s...: a name too long for a file", file);
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (object == NULL)
        return err(ERR_ARG, "%s", dlerror());
    const struct sparse_plugin *p = dlsym(object, "spind_sparse_plugin");
    status st = check_plugin(file, p);
    if (st != OK) {
        dlclose(object);
        return st;
    }
    plugins[n_plugins++] = p;
    return OK;
}
