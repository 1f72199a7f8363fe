/* Any bytes as the daemon's flags (a word a line), or as its configuration file: a configuration whose numbers are within
 * their limits and that is printed without its secrets, or a refusal that says why. The first byte chooses; the file lies
 * in memory under a name, because a file is what is read. */
#include "server/config.h"
#include "kernels/log.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_WORDS = 24 };

static const char secret[] = "sk-fuzz-never-shown";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static char *no_env(const char *name)
{
    (void)name;
    return NULL;
}

static void check_good(const struct config *cfg)
{
    char text[1536], value[512];
    config_describe(cfg, text, sizeof text);
    CHECK(strstr(text, secret) == NULL);
    for (uint32_t i = 0; i < options_count; i++) {
        options_text(&options_table[i], cfg, value, sizeof value);
        CHECK((options_table[i].flags & OPTION_SECRET) == 0 || strstr(value, secret) == NULL);
    }
    CHECK(cfg->port <= UINT16_MAX && cfg->api.max_n >= 1);
    CHECK(cfg->net.max_connections >= 1 && cfg->sparse_budget > 0);
    CHECK(cfg->limits.header_us > 0 && cfg->api_keys.n >= 1);
}

static void load(int argc, char **argv)
{
    struct config cfg;
    memset(&cfg, 0, sizeof cfg);
    if (config_load(&cfg, argc, argv, no_env) == OK) {
        if (cfg.action == CONFIG_RUN)
            check_good(&cfg);
    } else {
        CHECK(err_text()[0] != '\0' && strstr(err_text(), secret) == NULL);
    }
    config_fini(&cfg);
}

/* Words that name a file are left out: what is there is no business of a fuzzer. */
static bool names_a_file(const char *word)
{
    return strstr(word, "config") != NULL || strstr(word, "file") != NULL ||
           strstr(word, "tenants") != NULL || strcmp(word, "-c") == 0;
}

static void load_words(char *text)
{
    char *argv[MOST_WORDS + 2] = {(char *)"--api-key", (char *)secret}, *rest = NULL;
    int n = 2;
    for (char *w = strtok_r(text, "\n", &rest); w != NULL && n < MOST_WORDS;
         w = strtok_r(NULL, "\n", &rest))
        if (!names_a_file(w))
            argv[n++] = w;
    load(n, argv);
}

static void load_file(const char *text, size_t len)
{
    static int fd = -1;
    char file[64];
    char *argv[] = {(char *)"--api-key", (char *)secret, (char *)"--config", file, NULL};
    if (fd < 0)
        fd = memfd_create("config", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, text, len, 0) == (ssize_t)len);
    snprintf(file, sizeof file, "/proc/self/fd/%d", fd);
    load(4, argv);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    if (len == 0 || memmem(data, len, secret, sizeof secret - 1) != NULL) /* it learns it from us */
        return 0;
    char *text = mem_alloc(len);
    memcpy(text, data + 1, len - 1);
    text[len - 1] = '\0';
    log_set_level(LOG_ERROR);
    if (data[0] % 2 == 0)
        load_words(text);
    else
        load_file(text, len - 1);
    mem_free(text);
    return 0;
}
