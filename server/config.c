/* Collects values in the order default, file, environment, flags: a later source replaces what an
 * earlier one said, and one source may add to its own list. */
#include "server/config.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "kernels/log.h"

enum { FILE_MAX = 1 << 20, TEXT_CHUNK = 16 << 10, TEXT_MAX = 4 << 20 };

/* `text` for option i, from `source`; `where` names it for the message ("--port", "PORT", ...). */
static status assign(struct config *cfg, int i, enum config_source source, const char *text,
                     const char *where)
{
    const struct option *o = &options_table[i];
    if (cfg->from[i] != source)
        options_clear(o, cfg);
    cfg->from[i] = source;
    if (options_set(o, cfg, text) == OK)
        return OK;
    char why[256];
    snprintf(why, sizeof why, "%s", err_text());
    if (o->flags & OPTION_SECRET)
        return err(ERR_ARG, "%s: %s", where, why);
    return err(ERR_ARG, "%s: %.64s: %s", where, text, why);
}

static status set_defaults(struct config *cfg)
{
    for (uint32_t i = 0; i < options_count; i++)
        if (options_table[i].preset != NULL)
            TRY(assign(cfg, (int)i, CONFIG_DEFAULT, options_table[i].preset,
                       options_table[i].name));
    return OK;
}

/* ---- file ---- */

static char *read_whole(const char *path, size_t *len)
{
    FILE *f = fopen(path, "rbe");
    if (f == NULL) {
        (void)err(ERR_IO, "%s: %s", path, strerror(errno));
        return NULL;
    }
    char *text = mem_alloc(FILE_MAX + 2);
    *len = fread(text, 1, FILE_MAX + 1, f);
    bool bad = ferror(f) != 0;
    fclose(f);
    if (!bad && *len <= FILE_MAX)
        return text;
    mem_free(text);
    (void)err(ERR_IO, "%s: %s", path, bad ? "cannot be read" : "larger than 1 MiB");
    return NULL;
}

static status unknown_key(const char *path, const char *key)
{
    const char *near = options_nearest(key, strlen(key));
    return err(ERR_ARG, "%s: unknown key \"%.64s\"%s%s%s", path, key,
               near == NULL ? "" : ", did you mean \"", near == NULL ? "" : near,
               near == NULL ? "; --help lists all" : "\"?");
}

static status take_value(struct config *cfg, int i, const cJSON *v, const char *where)
{
    char number[32];
    if (cJSON_IsString(v))
        return assign(cfg, i, CONFIG_FILE, v->valuestring, where);
    if (cJSON_IsBool(v) && options_table[i].type == OPTION_FLAG)
        return assign(cfg, i, CONFIG_FILE, cJSON_IsTrue(v) ? "true" : "false", where);
    if (cJSON_IsNumber(v) && v->valuedouble == v->valuedouble) {
        snprintf(number, sizeof number, "%.15g", v->valuedouble);
        return assign(cfg, i, CONFIG_FILE, number, where);
    }
    return err(ERR_ARG, "%s: must be a string, a number, true, false or null", where);
}

static status take_key(struct config *cfg, const char *path, const cJSON *v)
{
    char where[512];
    const char *key = v->string;
    /* Notes: JSON has no comments, so "//key" explains the key and "//" anything. */
    bool note = strncmp(key, "//", 2) == 0;
    int i = options_find(note ? key + 2 : key, strlen(key) - (note ? 2 : 0));
    if (i < 0 && !(note && key[2] == '\0'))
        return unknown_key(path, note ? key + 2 : key);
    if (note)
        return cJSON_IsString(v) ? OK : err(ERR_ARG, "%s: \"%s\" must be a string", path, key);
    snprintf(where, sizeof where, "%s: \"%s\"", path, key);
    if (options_table[i].flags & OPTION_FLAG_ONLY)
        return err(ERR_ARG, "%s can only be given as a flag", where);
    for (const cJSON *w = v->prev; w != NULL && w->next != NULL; w = w->prev)
        if (options_find(w->string, strlen(w->string)) == i)
            return err(ERR_ARG, "%s is there twice", where);
    if (cJSON_IsNull(v))
        return OK;
    if (!cJSON_IsArray(v))
        return take_value(cfg, i, v, where);
    if (options_table[i].type != OPTION_LIST)
        return err(ERR_ARG, "%s takes one value, not a list", where);
    for (const cJSON *item = v->child; item != NULL; item = item->next)
        TRY(take_value(cfg, i, item, where));
    return OK;
}

static status load_file(struct config *cfg, const char *path)
{
    size_t len;
    char *text = read_whole(path, &len);
    if (text == NULL)
        return ERR_IO;
    const char *end = text;
    status st = OK;
    cJSON *root = cJSON_ParseWithLengthOpts(text, len + 1, &end, true);
    if (root == NULL || !cJSON_IsObject(root)) {
        unsigned line = 1;
        for (const char *p = text; p < end; p++)
            line += *p == '\n';
        st = root == NULL ? err(ERR_ARG, "%s: line %u: not JSON", path, line)
                          : err(ERR_ARG, "%s: must be a JSON object", path);
    } else {
        for (const cJSON *v = root->child; v != NULL && st == OK; v = v->next)
            st = take_key(cfg, path, v);
    }
    cJSON_Delete(root);
    mem_free(text);
    return st;
}

/* ---- environment ---- */

static status load_env(struct config *cfg, config_env env)
{
    for (uint32_t i = 0; i < options_count; i++) {
        for (const char *p = options_table[i].env; p != NULL && *p != '\0';) {
            char name[64];
            size_t n = strcspn(p, ", ");
            snprintf(name, sizeof name, "%.*s", (int)n, p);
            p += n + strspn(p + n, ", ");
            const char *text = env(name);
            if (text == NULL || *text == '\0')
                continue;
            /* conda sets HOST to a platform's name: nobody means to listen on that. */
            bool odd = strcmp(name, "HOST") == 0 && strcmp(text, "localhost") != 0 &&
                       !http_text_is_ip((struct text_view){text, strlen(text)});
            if (odd) {
                log_line(LOG_WARN, "HOST=%.64s in the environment is not an address: ignored",
                         text);
                continue;
            }
            TRY(assign(cfg, (int)i, CONFIG_ENV, text, name));
            break;
        }
    }
    return OK;
}

/* ---- flags ---- */

struct args {
    char **v;
    int n, at;
};

static status unknown_flag(const char *arg)
{
    size_t dashes = strspn(arg, "-"), len = strcspn(arg + dashes, "=");
    const char *near = options_nearest(arg + dashes, len);
    if (near == NULL)
        return err(ERR_ARG, "unknown option %.80s; --help lists all", arg);
    return err(ERR_ARG, "unknown option %.*s, did you mean --%s?", (int)(len + dashes), arg, near);
}

static bool is_flag(const char *arg)
{
    return arg[0] == '-' && arg[1] != '\0' && !(arg[1] >= '0' && arg[1] <= '9');
}

/* Everything up to the next flag belongs to a list, as with vLLM. */
static status take_list(struct config *cfg, int i, struct args *a, const char *name)
{
    TRY(assign(cfg, i, CONFIG_ARG, a->v[a->at++], name));
    bool more = (options_table[i].flags & OPTION_ONE) == 0;
    while (more && a->at < a->n && !is_flag(a->v[a->at]))
        TRY(assign(cfg, i, CONFIG_ARG, a->v[a->at++], name));
    return OK;
}

static status ignore_flag(const char *name, size_t len, int ignored, bool has_value, struct args *a)
{
    log_line(LOG_WARN, "--%.*s has no effect here", (int)len, name);
    if (options_ignored[ignored].takes_value && !has_value && a->at < a->n && !is_flag(a->v[a->at]))
        a->at++;
    return OK;
}

/* Switches stand alone or say =true, =false; their --no- twins stand alone. */
static status take_switch(struct config *cfg, int i, bool negated, const char *value,
                          const char *shown)
{
    if (negated && value != NULL)
        return err(ERR_ARG, "%s takes no value", shown);
    if (value == NULL)
        value = negated ? "false" : "true";
    return assign(cfg, i, CONFIG_ARG, value, shown);
}

/* --help, --help=GROUP, --print-config: not options, but wishes. */
static bool take_wish(struct config *cfg, const char *name, size_t len, const char *value)
{
    if (options_same_name(name, len, "help") || options_same_name(name, len, "h")) {
        cfg->action = CONFIG_HELP;
        cfg->help_group = value;
        return true;
    }
    if (!options_same_name(name, len, "print-config"))
        return false;
    cfg->action = CONFIG_PRINT;
    return true;
}

static status take_flag(struct config *cfg, struct args *a)
{
    const char *arg = a->v[a->at++], *name = arg + strspn(arg, "-");
    size_t dashes = (size_t)(name - arg), len = strcspn(name, "=");
    const char *value = name[len] == '=' ? name + len + 1 : NULL;
    char shown[96];
    snprintf(shown, sizeof shown, "%.*s", (int)(dashes + len), arg);
    if (dashes > 2 || len == 0)
        return unknown_flag(arg);
    if (take_wish(cfg, name, len, value))
        return OK;
    int i = options_find(name, len), ignored = options_find_ignored(name, len);
    bool negated = i < 0 && ignored < 0 && len > 3 && options_same_name(name, 3, "no-");
    if (negated) {
        i = options_find(name + 3, len - 3);
        ignored = options_find_ignored(name + 3, len - 3);
    }
    if (ignored >= 0)
        return ignore_flag(name, len, ignored, negated || value != NULL, a);
    if (i < 0 || (negated && options_table[i].type != OPTION_FLAG))
        return unknown_flag(arg);
    if (options_table[i].type == OPTION_FLAG)
        return take_switch(cfg, i, negated, value, shown);
    if (value != NULL)
        return assign(cfg, i, CONFIG_ARG, value, shown);
    if (a->at >= a->n || is_flag(a->v[a->at]))
        return err(ERR_ARG, "%s needs a value", shown);
    if (options_table[i].type == OPTION_LIST)
        return take_list(cfg, i, a, shown);
    return assign(cfg, i, CONFIG_ARG, a->v[a->at++], shown);
}

static status load_args(struct config *cfg, int argc, char **argv)
{
    struct args a = {argv, argc, 0};
    int model = options_find("model", 5);
    bool given = false;
    while (a.at < a.n) {
        if (is_flag(a.v[a.at])) {
            TRY(take_flag(cfg, &a));
            continue;
        }
        if (given)
            return err(ERR_ARG, "%.80s: only one model can be served", a.v[a.at]);
        given = true;
        TRY(assign(cfg, model, CONFIG_ARG, a.v[a.at++], "MODEL"));
    }
    return OK;
}

/* The file is read before the flags are, so its name must be found first. */
static const char *find_config_file(int argc, char **argv)
{
    const char *path = NULL;
    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], "--config=", 9) == 0)
            path = argv[i] + 9;
        else if (strcmp(argv[i], "--config") == 0 && i + 1 < argc)
            path = argv[i + 1];
    }
    return path;
}

/* ---- what follows from the values ---- */

static status load_keys(struct config *cfg)
{
    int i = options_find("api-key", 7);
    size_t len;
    if (cfg->api_key_file == NULL)
        return OK;
    char *text = read_whole(cfg->api_key_file, &len), *rest = NULL;
    if (text == NULL)
        return ERR_IO;
    status st = OK;
    for (char *line = strtok_r(text, "\r\n", &rest); line != NULL && st == OK;
         line = strtok_r(NULL, "\r\n", &rest)) {
        line += strspn(line, " \t");
        line[strcspn(line, " \t")] = '\0';
        if (*line != '\0' && *line != '#')
            st = options_set(&options_table[i], cfg, line);
    }
    explicit_bzero(text, len);
    mem_free(text);
    if (st == OK && cfg->api_keys.n == 0)
        return err(ERR_ARG, "%s: no key in it", cfg->api_key_file);
    return st;
}

static double number_of(const cJSON *o, const char *name, double otherwise)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);
    return cJSON_IsNumber(v) ? v->valuedouble : otherwise;
}

static status load_generation(struct config *cfg)
{
    cfg->api.default_temperature = cfg->api.default_top_p = (double)NAN;
    cfg->api.default_top_k = 0;
    if (cfg->generation_override == NULL)
        return OK;
    cJSON *o = cJSON_Parse(cfg->generation_override);
    if (!cJSON_IsObject(o)) {
        cJSON_Delete(o);
        return err(ERR_ARG, "--override-generation-config: must be a JSON object");
    }
    double t = number_of(o, "temperature", (double)NAN), p = number_of(o, "top_p", (double)NAN),
           k = number_of(o, "top_k", 0);
    cJSON_Delete(o);
    if (t < 0 || t > 2 || p <= 0 || p > 1 || k < -1 || k > 1e9)
        return err(ERR_ARG, "--override-generation-config: temperature 0 to 2, top_p over 0 to 1, "
                            "top_k -1 or more");
    cfg->api.default_temperature = t;
    cfg->api.default_top_p = p;
    cfg->api.default_top_k = k < 0 ? 0 : (int32_t)k;
    return OK;
}

/* As users know it: the file's name without folder and ending. The mock has a name of its own. */
static void name_model(struct config *cfg)
{
    const char *path = cfg->engine.model, *slash;
    cfg->api.served_names = cfg->served_names.v;
    cfg->api.n_names = cfg->served_names.n;
    if (cfg->served_names.n > 0 || path == NULL || strcmp(cfg->device, "mock") == 0)
        return;
    slash = strrchr(path, '/');
    path = slash != NULL ? slash + 1 : path;
    size_t len = strlen(path);
    if (len > 5 && (strcmp(path + len - 5, ".gguf") == 0 || strcmp(path + len - 5, ".json") == 0))
        len -= 5;
    cfg->default_name = arena_strdup(&cfg->memory, path, len);
    if (cfg->default_name == NULL || len == 0)
        return;
    cfg->api.served_names = &cfg->default_name;
    cfg->api.n_names = 1;
}

static status choose_sparse(struct config *cfg)
{
    const struct catalog_wish w = {.plugin = cfg->sparse,
                                   .options = cfg->sparse_options.v,
                                   .n_options = cfg->sparse_options.n,
                                   .files = cfg->plugins.v,
                                   .n_files = cfg->plugins.n,
                                   .offers = cfg->sparse_offers.v,
                                   .n_offers = cfg->sparse_offers.n,
                                   .budget = cfg->sparse_budget,
                                   .top_p = cfg->sparse_top_p,
                                   .miss_threshold = cfg->miss_threshold,
                                   .interval = cfg->sparse_interval,
                                   .min_rows = cfg->sparse_min_rows};
    return catalog_choose(&w, &cfg->engine.sparse, &cfg->engine.sparse_offered);
}

static status choose_heads(struct config *cfg)
{
    struct head_policy_config *h = &cfg->engine.heads;
    bool reads = strcmp(cfg->head_policy, "duo") == 0 || strcmp(cfg->head_policy, "razor") == 0;
    h->name = cfg->head_policy;
    h->sparsity = (float)cfg->head_policy_sparsity;
    if (strcmp(cfg->head_policy, "duo") != 0 && h->sparsity >= 0)
        return err(ERR_ARG, "--head-policy-sparsity: --head-policy duo alone has one");
    if (reads && h->file == NULL)
        return err(ERR_ARG, "--head-policy %s needs --head-policy-file", h->name);
    if (!reads && h->file != NULL)
        return err(ERR_ARG, "--head-policy-file: --head-policy %s reads no file", h->name);
    if (h->sinks % 16 != 0 || h->recent % 16 != 0)
        return err(ERR_ARG, "--head-policy-%s: %u: must be a multiple of 16",
                   h->sinks % 16 != 0 ? "sinks" : "recent",
                   h->sinks % 16 != 0 ? h->sinks : h->recent);
    return OK;
}

static status finish(struct config *cfg)
{
    TRY(load_keys(cfg));
    if (cfg->api_keys.n > 0 && cfg->api.tenants_file != NULL)
        return err(ERR_ARG, "--tenants and --api-key (or --api-key-file, or SPIND_API_KEY) exclude "
                            "each other: the digests of all keys go into the tenants file");
    TRY(load_generation(cfg));
    TRY(choose_sparse(cfg));
    TRY(choose_heads(cfg));
    if (cfg->seed == 0 && getrandom(&cfg->seed, sizeof cfg->seed, 0) != sizeof cfg->seed)
        return err(ERR_IO, "no randomness: %s", strerror(errno));
    cfg->engine.device = cfg->device;
    cfg->engine.dummy = strcmp(cfg->load_format, "dummy") == 0;
    cfg->engine.cpu.isa = cfg->cpu_isa;
    cfg->engine.block_rows = cfg->block_rows;
    TRY(kv_type_find(cfg->kv_cache_dtype, &cfg->engine.kv_type));
    cfg->engine.seed = cfg->seed;
    cfg->api.keys = cfg->api_keys.v;
    cfg->api.n_keys = cfg->api_keys.n;
    name_model(cfg);
    cfg->api.reject_overflow = strcmp(cfg->overflow, "reject") == 0;
    cfg->api.disable_metrics = strcmp(cfg->metrics_listen, "off") == 0;
    cfg->api.queue_timeout_s = (uint32_t)((cfg->queue_timeout_us + 999999) / 1000000);
    if (!http_text_is_ip((struct text_view){cfg->host, strlen(cfg->host)}))
        TRY(options_set(&options_table[options_find("allowed-hosts", 13)], cfg, cfg->host));
    cfg->net.host = cfg->host;
    cfg->net.port = (uint16_t)cfg->port;
    cfg->net.cap_loopback = cfg->net.max_per_address != 0;
    if (cfg->net.max_per_address == 0)
        cfg->net.max_per_address = 128;
    return OK;
}

status config_load(struct config *cfg, int argc, char **argv, config_env env)
{
    memset(cfg, 0, sizeof *cfg);
    arena_init(&cfg->memory, TEXT_CHUNK, TEXT_MAX);
    const char *path = find_config_file(argc, argv);
    TRY(set_defaults(cfg));
    if (path != NULL)
        TRY(load_file(cfg, path));
    TRY(load_env(cfg, env));
    TRY(load_args(cfg, argc, argv));
    return cfg->action == CONFIG_RUN ? finish(cfg) : OK;
}

void config_fini(struct config *cfg)
{
    mem_free(cfg->served_names.v);
    mem_free(cfg->api_keys.v);
    mem_free(cfg->origins.v);
    mem_free(cfg->hosts.v);
    mem_free(cfg->sparse_options.v);
    mem_free(cfg->sparse_offers.v);
    mem_free(cfg->plugins.v);
    arena_fini(&cfg->memory);
}

bool config_is_loopback(const struct config *cfg)
{
    return http_text_is_loopback((struct text_view){cfg->host, strlen(cfg->host)});
}

bool config_has_keys(const struct config *cfg)
{
    return cfg->api_keys.n > 0 || cfg->api.tenants_file != NULL;
}

bool config_is_open(const struct config *cfg)
{
    return !config_has_keys(cfg) && !cfg->insecure_no_auth && !config_is_loopback(cfg);
}

status config_check_open(const struct config *cfg)
{
    if (!config_is_open(cfg))
        return OK;
    return err(
        ERR_ARG,
        "--host %s is reachable from other machines and no API key is set: pass --tenants FILE "
        "or --api-key-file FILE (or --api-key), or --insecure-no-auth if that is meant",
        cfg->host);
}
