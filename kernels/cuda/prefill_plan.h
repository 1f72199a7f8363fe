/* Plans of cuDNN's for attention of prompts, made by a thread of their own: prefill.cu asks. */
#ifndef KERNELS_CUDA_PREFILL_PLAN_H
#define KERNELS_CUDA_PREFILL_PLAN_H

#include "kernels/cuda/cudnn.h"

enum {
    PLAN_MOST_ROWS = 8192, /* of one call of cuDNN */
    PLAN_POSITIONS = 1 << 20,
    PLAN_WORKSPACE_BYTES = 1 << 20, /* what a plan may want, and gets */
    PLAN_TILE_ROWS = 128,           /* of its kernel */
};
#define PLAN_ANYWHERE 0xffffffffu

/* What a plan is made for. Compared as bytes. */
struct plan_key {
    uint32_t heads, kv_heads, dim, rows;
    uint32_t all_heads; /* of q's rows */
    uint32_t
        first; /* position of the first row, for exactly so many rows; or PLAN_ANYWHERE: at most so
                           many, lengths in device memory */
};

struct prefill_plans; /* the engine thread's, but for what the thread inside makes */

/* The thread begins to open the library, then to make plans for heads as `like` has them. */
struct prefill_plans *prefill_plans_create(int device, const struct plan_key *like);
void prefill_plans_destroy(struct prefill_plans *p); /* NULL is allowed */
/* How far the thread is: grows only. */
struct prefill_progress {
    struct cudnn *cudnn; /* as this thread may use it; NULL: not open yet, or ... */
    const char *why;     /* ... not to be had */
    uint32_t n_made;
    bool ready; /* all that is made ahead is there: so many, in so many seconds */
    uint32_t n_ahead;
    double seconds;
    const char *
        trouble; /* why prefill_plans_get said NULL first; NULL: it did not, or all is well again */
};
void prefill_plans_look(const struct prefill_plans *p, struct prefill_progress *to);
/* Waits until the plan is made, but no longer than `patience`: when it took longer, nobody waits any more, until a plan
 * was made faster, and plans are found among the first n, as a step found them. NULL: not there, no room for more, or cuDNN has none. */
struct cudnn_plan *prefill_plans_get(struct prefill_plans *p, const struct plan_key *k, uint32_t n,
                                     double patience_s);
/* Among the first n. NULL: not there. wish: for another time; of exact plans some are granted. */
struct cudnn_plan *prefill_plans_find(struct prefill_plans *p, const struct plan_key *k, uint32_t n,
                                      bool wish);
/* At most a sixteenth more, in tiles of cuDNN's kernel. */
uint32_t prefill_plan_rows(uint32_t n);

#endif
