/* What the files of the CUDA backend share. Compiled by nvcc as CUDA C++17, written as C.
 *
 * The engine thread alone calls operations. An operation prepares on the host, then queues commands
 * (cuda_do); what changes from step to step goes to the device through cuda_stage(). Activations are
 * float. */
#ifndef KERNELS_CUDA_CUDA_H
#define KERNELS_CUDA_CUDA_H

#include "kernels/backend.h"
#include "kernels/core/hot_set.h"
#include "kernels/log.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

struct cuda_backend {
    struct backend base; /* first */
    int device, sms;
    bool eager;    /* no graphs */
    bool overlaps; /* sm_90: a kernel can be launched before the one before it ends */
    bool gone;     /* it did not answer in time: nobody waits for it or gives it work any more */
    uint32_t patience_s;
    void (*log)(enum log_level level, const char *fmt, ...); /* the daemon's; NULL: nobody's */
    cudaStream_t stream;
    uint64_t n_steps; /* ended or submitted: the number of the one that is being queued */
    status error;     /* sticks until sync; its text is in `text` */
    char text[256], description[160];
    struct cuda_step *step;         /* step.cu */
    struct cuda_linear *linear;     /* linear.cu */
    struct cuda_attend *attend;     /* attend.cu */
    struct cuda_sampler *sampler;   /* sample.cu */
    struct cuda_tier *tier;         /* tier.cu */
    struct cuda_hot *hot;           /* hot.cu */
    struct cuda_resolver *resolver; /* resolve.cu */
    struct cuda_prefill *prefill;   /* prefill.cu */
    struct cuda_seal *seal;         /* seal.cu */
    struct cuda_score *score;       /* score.cu */
    struct cuda_select *select;     /* select.cu */
    struct cuda_layers *layers;     /* layers.cu */
};

/* ---- backend.cu ---- */

/* True if e is success; else notes it as the backend's first error ("what: cudaErrorName"). */
bool cuda_ok(struct cuda_backend *b, cudaError_t e, const char *what);
/* After a launch: its error. */
static inline bool cuda_launched(struct cuda_backend *b, const char *what)
{
    return cuda_ok(b, cudaGetLastError(), what);
}
/* Waits until the event, or for NULL all that the stream was given, is over, for patience_s at most: the device is gone
 * then, which is an error like any other, but stays. False after an error. All waiting is done here. */
bool cuda_ended(struct cuda_backend *b, cudaEvent_t event, const char *what);
/* Device scratch of one file: grows, keeps nothing, freed with cudaFree. *p may be in use by what is
 * queued: runs that and waits for it before it frees. false after an error. */
bool cuda_reserve(struct cuda_backend *b, void **p, size_t *have, size_t need);

/* ---- step.cu: what a step queues ----
 *
 * A command is a function that launches kernels (or calls a library) on b->stream, and its parameters by
 * value. A step's commands are gathered and run together; a step whose commands equal those of an earlier
 * one, byte for byte, runs as one CUDA graph. So:
 *   - parameters hold device addresses and shapes, and are cleared before they are filled (padding!);
 *   - what is new in every step (positions, lengths, tables, lists, counts) is staged, and kernels read it
 *     from device memory;
 *   - a grid that depends on such things is rounded up with cuda_bucket(), and blocks beyond the count
 *     (read from device memory) return at once;
 *   - a command never synchronises and never allocates: scratch is reserved before cuda_do. */
typedef void cuda_run(struct cuda_backend *b, const void *params);
void cuda_queue(struct cuda_backend *b, cuda_run *run, const char *name, const void *params,
                size_t bytes);
#define cuda_do(b, run, params, bytes) cuda_queue(b, run, #run, params, bytes)
/* Parameters of what was queued last, to be read or changed until the next is queued, if it is `run` and has not run;
 * NULL: it is not. */
void *cuda_queued(const struct cuda_backend *b, cuda_run *run);
/* Takes that back. */
void cuda_unqueue(struct cuda_backend *b);

/* n rounded up by at most a quarter, such that few values occur: 1 2 3 4 5 6 7 8 10 12 14 16 20 ... */
static inline size_t cuda_bucket(size_t n)
{
    size_t unit = 1;
    while (n > 8 * unit)
        unit *= 2;
    return (n + unit - 1) / unit * unit;
}

/* Copies a host array to the device before the step's commands run; the result is aligned to 256, lives
 * until the step has run, and is the same address in every step that stages arrays of the same sizes (by
 * cuda_bucket) in the same order. NULL after an error. */
void *cuda_stage(struct cuda_backend *b, const void *host, size_t bytes);
/* The same for what commands find through other staged arrays only, never in their parameters: its address may
 * be another in every step, and shifts no other. */
void *cuda_stage_apart(struct cuda_backend *b, const void *host, size_t bytes);
/* The n rows of a step come now: what was queued before runs on its own (seals, copies), so that it makes no
 * difference to the list of the step, nor to where arrays are staged. */
void cuda_begin_rows(struct cuda_backend *b, uint32_t n);
/* The same for an array that several operations of a step read, found again by its host address; of the
 * longest n that is asked for first. Staged apart. Block tables, lists of records. NULL stays NULL. */
const uint32_t *cuda_table(struct cuda_backend *b, const uint32_t *host, size_t n);

/* A plan_row, as kernels read it. */
struct cuda_row {
    uint32_t row, pos, n_segments, budget, estimate;
    float top_p, miss_threshold;
    uint32_t spilled;        /* hot is valid */
    const uint32_t *records; /* [n_segments] */
    const block_id *blocks;  /* [pos / R + 1] SPARSE */
    struct hot_set hot;      /* by value; its arrays are device memory */
};
/* [n] staged once a step. bucket: n as cuda_bucket has it; rows beyond n have n_segments 0 and row ~0.
 * *segments: the most n_segments of these rows, rounded up by cuda_bucket; NULL: not wanted. NULL after an
 * error. */
const struct cuda_row *cuda_rows(struct cuda_backend *b, const struct kv_geometry *g,
                                 const struct plan_row *rows, uint32_t n, uint32_t *bucket,
                                 uint32_t *segments);

/* As lane_place, of 4-byte numbers. */
struct cuda_lane {
    uint32_t class_, index;
};
/* Of all layers, [layers][kv_heads] in device memory that stays; NULL after an error. */
const struct cuda_lane *cuda_lanes(struct cuda_backend *b, const struct kv_geometry *g);

status cuda_step_open(struct cuda_backend *b);
void cuda_step_close(struct cuda_backend *b);
/* Runs what was queued; cuda_step_end also waits for everything and begins a new step. */
void cuda_flush(struct cuda_backend *b);
void cuda_step_end(struct cuda_backend *b);
/* The operations; the wait without results and errors. */
void cuda_submit(struct backend *be);
/* *ended: the number of the step; false: none was submitted. */
bool cuda_step_wait(struct cuda_backend *b, uint64_t *ended);
void cuda_step_counts(struct backend *be, struct step_counts *out);

/* ---- operations ---- */

/* linear.cu */
status cuda_linear_open(struct cuda_backend *b);
void cuda_linear_close(struct cuda_backend *b);
status cuda_weight_create(struct backend *be, const struct weight_desc *d, struct weight **out);
void cuda_weight_destroy(struct backend *be, struct weight *w);
size_t cuda_weight_bytes(const struct weight *w);
void cuda_embed(struct backend *be, const struct embed_args *a);
void cuda_linear(struct backend *be, const struct linear_args *a);

/* layers.cu */
status cuda_layers_open(struct cuda_backend *b);
void cuda_layers_close(struct cuda_backend *b);
bool cuda_layers(struct backend *be, const struct layers_args *a);

/* append.cu, attend.cu, prefill.cu, known.cu */
status cuda_attend_open(struct cuda_backend *b);
void cuda_attend_close(struct cuda_backend *b);
status cuda_prefill_open(struct cuda_backend *b);
void cuda_prefill_close(struct cuda_backend *b);
void cuda_append(struct backend *be, const struct append_args *a);
void cuda_attend(struct backend *be, const struct attend_args *a);
size_t cuda_known_bytes(const struct kv_geometry *geo, uint32_t heads);
void cuda_known(struct backend *be, const struct known_args *a);

/* seal.cu, unpermute.cu, score.cu, select.cu, resolve.cu: each keeps its scratch, if any, behind a pointer
 * of struct cuda_backend, with an open and a close as above. */
size_t cuda_digest_bytes(const struct kv_geometry *geo, const struct digest_desc *d);
status cuda_seal_open(struct cuda_backend *b);
void cuda_seal_close(struct cuda_backend *b);
void cuda_seal(struct backend *be, const struct seal_args *a);
void cuda_unpermute(struct backend *be, const struct unpermute_args *a);
status cuda_score_open(struct cuda_backend *b);
void cuda_score_close(struct cuda_backend *b);
void cuda_score(struct backend *be, const struct score_args *a);
status cuda_select_open(struct cuda_backend *b);
void cuda_select_close(struct cuda_backend *b);
void cuda_select(struct backend *be, const struct select_args *a);
void cuda_resolve(struct backend *be, const struct resolve_args *a);
status cuda_resolve_open(struct cuda_backend *b);
void cuda_resolve_close(struct cuda_backend *b);
/* Makes a plan that did not fit its hot set an error: for sync, once the stream is done. */
void cuda_resolve_settle(struct cuda_backend *b);

/* hot.cu */
void cuda_hot_op(struct backend *be, const struct hot_args *a);
status cuda_hot_open(struct cuda_backend *b);
void cuda_hot_close(struct cuda_backend *b);
/* Hands out what was read: once the stream is done. */
void cuda_hot_settle(struct cuda_backend *b, uint64_t step);

/* tier.cu: the host's memory that the device reads */
void *cuda_alloc_host(struct backend *be, size_t bytes);
void cuda_free_host(struct backend *be, void *p, size_t bytes);
void cuda_host_progress(struct backend *be, const void *p, struct host_progress *out);
/* Now, on the stream, between any memories. */
void cuda_tier_copy(struct cuda_backend *b, void *dst, const void *src, size_t bytes);
status cuda_tier_open(struct cuda_backend *b);
void cuda_tier_close(struct cuda_backend *b);

/* sample.cu */
status cuda_sample_open(struct cuda_backend *b);
void cuda_sample_close(struct cuda_backend *b);
void cuda_sample(struct backend *be, const struct sample_args *a);
/* Where the tokens that the last sample drew are, by row: device memory, in strides of *stride bytes. */
const uint32_t *cuda_drawn(const struct cuda_backend *b, uint32_t *stride);
/* Hands out what the oldest cuda_sample of the steps up to this one queued, once the stream has come so far.
 * good: the results count. false: there was none. */
bool cuda_sample_settle(struct cuda_backend *b, uint64_t step, bool good);

#endif
