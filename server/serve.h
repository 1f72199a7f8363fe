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
/* The same words, read and checked, nothing served: EXIT_OK and what would be used; EXIT_USAGE: the flags, or a
 * file that they name, are wrong; EXIT_CONFIG: they can be read, but not served. */
int check_run(int argc, char **argv, const struct outside *out);

#endif
