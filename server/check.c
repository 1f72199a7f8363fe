/* The verb `check-config`: what `serve` reads before it takes memory or a port is read and checked: flags,
 * environment, configuration file, key or tenants file, plug-ins, the model's header, and what they say of each other. What
 * depends on the machine at that moment is not: free memory, the device, whether the port is free; a server that
 * runs may have them all.
 *
 * For an operator before a restart, and for ExecStartPre (docs/ops/spind.service). */
#include "api/tenants.h"
#include "server/serve.h"

#include <stdio.h>
#include <string.h>

/* What would be loaded, kept until everything is known to be right: stdout has the whole story or nothing. */
static void keep_line(void *arg, const char *text)
{
    snprintf(arg, 256, "%s", text);
}

/* NULL: no file of tenants is named. */
static status read_tenants(const struct config *cfg, struct tenants **out)
{
    *out = NULL;
    return cfg->api.tenants_file != NULL ? tenants_load(out, cfg->api.tenants_file) : OK;
}

static void say_keys(const struct config *cfg, const struct tenants *tenants)
{
    if (tenants != NULL)
        printf("keys:    %u, of %u tenant%s\n", tenants->n_keys, tenants->n,
               tenants->n > 1 ? "s" : "");
    else if (cfg->api_keys.n == 0)
        printf("keys:    none, whoever reaches it may ask\n");
    else
        printf("keys:    %u\n", cfg->api_keys.n);
}

static void say_what_is_used(const struct config *cfg, const struct tenants *tenants,
                             const char *model)
{
    bool v6 = strchr(cfg->host, ':') != NULL;
    printf("address: http://%s%s%s:%u\n", v6 ? "[" : "", cfg->host, v6 ? "]" : "", cfg->port);
    say_keys(cfg, tenants);
    printf("device:  %s\n", cfg->device);
    printf("model:   %s\n", model[0] != '\0' ? model : "made up");
    printf("options that are not the default:\n");
    config_print_changes(cfg, "  ");
    printf("nothing is wrong\n");
}

static int check(const struct config *cfg)
{
    char model[256] = "";
    struct tenants *tenants = NULL;
    if (cfg->action == CONFIG_HELP) {
        config_print_help(cfg);
        return EXIT_OK;
    }
    if (cfg->action == CONFIG_PRINT) {
        fprintf(stderr, "spind check-config: --print-config prints without a check: leave it out, "
                        "or ask 'spind serve' for it\n");
        return EXIT_USAGE;
    }
    if (config_check_open(cfg) == OK && read_tenants(cfg, &tenants) == OK &&
        engine_check(&cfg->engine, keep_line, model) == OK) {
        say_what_is_used(cfg, tenants, model);
        tenants_free(tenants);
        return EXIT_OK;
    }
    tenants_free(tenants);
    fprintf(stderr, "spind check-config: %s\n", err_text());
    bool named = cfg->engine.model != NULL || strcmp(cfg->device, "mock") == 0;
    return named ? EXIT_CONFIG : EXIT_USAGE;
}

int check_run(int argc, char **argv, const struct outside *out)
{
    struct config *cfg = mem_alloc(sizeof *cfg);
    int rc = EXIT_USAGE;
    if (config_load(cfg, argc, argv, out->env) == OK)
        rc = check(cfg);
    else
        fprintf(stderr, "spind check-config: %s\n", err_text());
    config_fini(cfg);
    mem_free(cfg);
    return rc;
}
