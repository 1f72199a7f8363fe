/* Commands of a step, gathered and run: one by one, or as the CUDA graph that an equal list left. step.cu
 * alone uses this; everybody else queues with cuda_do (cuda.h), where the rules for commands are. */
#ifndef KERNELS_CUDA_REPLAY_H
#define KERNELS_CUDA_REPLAY_H

#include "kernels/cuda/cuda.h"

struct replay;

struct replay *replay_create(void);
/* The stream must be idle. */
void replay_destroy(struct replay *r);
/* Appends a command; its parameters are copied. name: lives on. */
void replay_add(struct replay *r, cuda_run *run, const char *name, const void *params,
                size_t bytes);
/* Was anything appended since the last run? */
bool replay_pending(const struct replay *r);
/* Parameters of what was appended last since then, if that is `run`; NULL: it is not, or was taken back. */
void *replay_last(struct replay *r, cuda_run *run);
void replay_take_back(struct replay *r);
/* Runs what was appended, in order, on b->stream, and forgets it. Errors are noted with b. likely: such a list will
 * come again. */
void replay_run(struct replay *r, struct cuda_backend *b, bool likely);
/* The stream is idle: with SPIND_CUDA_PROFILE, adds up what commands took. */
void replay_settle(struct replay *r);
/* All but the times. */
void replay_counts(const struct replay *r, struct step_counts *out);

#endif
