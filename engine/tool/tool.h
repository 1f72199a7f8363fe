/* The verbs that measure (DESIGN 3): what server/main.c calls for `spind eval` and `spind calibrate`.
 * They run a model of their own on the calling thread, with progress on the log and results on
 * stdout, and return an exit status: 0; 1: it failed, and stderr says why; 2: the words were wrong. */
#ifndef ENGINE_TOOL_TOOL_H
#define ENGINE_TOOL_TOOL_H

#include "kernels/base.h"

/* argv: what follows the verb. model: the default model's path, or NULL if it is not there. */
int eval_verb(int argc, char **argv, const char *model);
int calibrate_verb(int argc, char **argv, const char *model);
/* What `spind calibrate` does, without a word on stdout: a razor policy into out. period 0: the verb's. */
status calibrate_policy(const char *model, const char *isa, uint32_t threads, uint32_t period,
                        const char *out);
/* decode, prefill; `serve` is api/load's. */
int bench_verb(int argc, char **argv, const char *model);
int locality_verb(int argc, char **argv); /* needs no model */

struct engine_config;
/* `spind inspect`: what these flags would give each part; what a running server says at
 * http://HOST[:PORT][/metrics]. */
int inspect_plan(const struct engine_config *cfg);
int inspect_url(const char *url);

#endif
