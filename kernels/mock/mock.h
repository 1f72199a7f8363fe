/* What the files of the mock backend share. */
#ifndef KERNELS_MOCK_MOCK_H
#define KERNELS_MOCK_MOCK_H

#include "kernels/backend.h"

#include <stdio.h>

/* Submitted; number 0: not a step. */
struct mock_step {
    uint64_t ends_us;
    uint32_t number;
    status error;
};

struct mock {
    struct backend base; /* first: a struct backend * is one of these */
    struct mock_options o;
    uint32_t n_steps;              /* submitted, copies at load not counted */
    uint32_t n_rows;               /* of the step being prepared */
    uint32_t n_drawn;              /* rows of the last sample */
    uint32_t n_sampled;            /* rows since open, for nan_every */
    uint64_t step_began_us;        /* clock at the first operation since the last submit; 0: none */
    struct mock_step submitted[2]; /* [n_submitted] oldest first */
    uint32_t n_submitted;
    uint64_t busy_until_us;
    uint32_t probe;           /* moves the canaries that attend looks up */
    status error;             /* sticks until submit */
    FILE *trace;              /* NULL: none */
    struct mock_pick *pick;   /* select.c: scratch; NULL: not yet */
    struct mock_asked *asked; /* pages.c: what resolve was asked for; NULL: nothing yet */
};

static inline struct mock *mock_of(struct backend *be)
{
    return (struct mock *)(void *)be;
}

static inline void mock_touch(struct backend *be)
{
    struct mock *m = mock_of(be);
    if (m->step_began_us == 0)
        m->step_began_us = clock_us();
}

/* pages.c */
void mock_append(struct backend *be, const struct append_args *a);
void mock_attend(struct backend *be, const struct attend_args *a);
size_t mock_digest_bytes(const struct kv_geometry *geo, const struct digest_desc *d);
void mock_seal(struct backend *be, const struct seal_args *a);
void mock_unpermute(struct backend *be, const struct unpermute_args *a);
void mock_resolve(struct backend *be, const struct resolve_args *a);
void mock_hot(struct backend *be, const struct hot_args *a);
void mock_pages_close(struct mock *m);
/* Whether the record is of this segment and lane; else the step fails. */
void mock_check_record(struct mock *m, const struct kv_memory *kv, uint32_t record,
                       uint32_t segment, uint32_t lane);

/* select.c */
size_t mock_known_bytes(const struct kv_geometry *geo, uint32_t heads);
void mock_known(struct backend *be, const struct known_args *a);
void mock_score(struct backend *be, const struct score_args *a);
void mock_select(struct backend *be, const struct select_args *a);
void mock_select_close(struct mock *m);

#endif
