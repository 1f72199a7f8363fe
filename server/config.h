/* What the operator wants: flags over environment over file over defaults, from the one table in
 * options.c. Filled once at start, constant after. */
#ifndef SERVER_CONFIG_H
#define SERVER_CONFIG_H

#include "api/api.h"
#include "server/conn.h"
#include "server/net.h"
#include "server/options.h"

enum config_action { CONFIG_RUN, CONFIG_HELP, CONFIG_PRINT };
enum config_source { CONFIG_DEFAULT, CONFIG_FILE, CONFIG_ENV, CONFIG_ARG };

enum { CONFIG_OPTIONS_MAX = 96 };

struct config {
    struct engine_config engine;
    struct api_config api;
    struct net_config net;
    struct conn_limits limits;

    const char *config_file, *host, *api_key_file, *log_level, *metrics_listen;
    const char *overflow, *generation_config, *generation_override, *device, *cpu_isa;
    const char *sparse, *head_policy, *load_format, *kv_cache_dtype;
    double sparse_budget, sparse_top_p, miss_threshold, head_policy_sparsity;
    struct option_list served_names, api_keys, origins, hosts, sparse_options, sparse_offers,
        plugins;
    const char *default_name; /* of the model, if none is configured: its file's */
    uint32_t port, ready_fd, block_rows, sparse_interval, sparse_min_rows;
    uint64_t drain_us, queue_timeout_us, seed;
    bool insecure_no_auth;

    enum config_action action;
    const char *help_group; /* CONFIG_HELP: NULL: all */
    enum config_source from[CONFIG_OPTIONS_MAX];
    struct arena memory; /* every text */
};

typedef char *(*config_env)(const char *name); /* getenv, from main */

/* argv: what follows the verb. Errors name the option, the place it came from and what is allowed;
 * nearest name for a typing error. Warnings go to the log. */
status config_load(struct config *cfg, int argc, char **argv, config_env env);
void config_fini(struct config *cfg);

bool config_has_keys(const struct config *cfg); /* who has none is refused */
/* Reachable from elsewhere, nobody is asked for a key, and nobody said that this is meant. */
bool config_is_open(const struct config *cfg);
status config_check_open(const struct config *cfg); /* ERR_ARG if so, and what to do */
bool config_is_loopback(const struct config *cfg);  /* only this machine can connect */

/* "host=0.0.0.0 port=9000", without secrets; "" if everything is default. */
void config_describe(const struct config *cfg, char *out, size_t room);
/* The same, one to a line behind `indent`. */
void config_print_changes(const struct config *cfg, const char *indent);
void config_print_help(const struct config *cfg);
/* The JSON file that would give this configuration, every key explained by a "//key" before it. */
void config_print(const struct config *cfg);

#endif
