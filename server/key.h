/* The verb `key`: a new API key, shown once, and its line for the tenants file. */
#ifndef SERVER_KEY_H
#define SERVER_KEY_H

#include "server/serve.h"

int key_run(int argc, char **argv, const struct outside *out); /* argv: [TENANT] */

#endif
