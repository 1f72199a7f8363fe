/* The verb `serve`: from the command line to the exit status. */
#ifndef SERVER_SERVE_H
#define SERVER_SERVE_H

#include "server/config.h"

enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_ENGINE = 70, EXIT_CONFIG = 78 };

/* What a verb may know of the world beside its words. */
struct outside {
    config_env env;
    const char *version;
};

/* argv: what follows the verb. */
int serve_run(int argc, char **argv, const struct outside *out);

#endif
