/* What the files of the CPU backend share. Every operation has a portable C version, the reference,
 * and versions per instruction set in files compiled with their own flags; the table of kernels is
 * chosen once, when the backend opens. */
#ifndef KERNELS_CPU_CPU_H
#define KERNELS_CPU_CPU_H

#include "kernels/backend.h"
#include "kernels/cpu/pool.h"

enum isa { ISA_SCALAR, ISA_AVX2, ISA_AVX512 };

struct cpu_backend {
    struct backend base; /* first: a struct backend * is one of these */
    struct pool *pool;
    enum isa isa;
    status error; /* sticks until sync */
    char description[160];
    const struct linear_kernels *linear;     /* linear.c */
    const struct attend_kernels *attend;     /* attend.c */
    struct sample_scratch *sample;           /* sample.c, per worker */
    void *scratch;                           /* linear.c: packed activations */
    void *attend_scratch;                    /* attend.c: partial results */
    struct resolve_scratch *resolve_scratch; /* resolve.c, per worker */
    const struct seal_kernels *seal;         /* seal.c */
    const struct score_kernels *score;       /* score.c */
    const struct select_kernels *select;     /* select.c */
    const struct codes_kernels *codes;       /* codes.c */
    const struct known_kernels *known;       /* known.c */
    struct seal_scratch *seal_scratch;       /* of these, per worker */
    struct score_scratch *score_scratch;
    struct select_scratch *select_scratch;
    struct known_scratch *known_scratch;
    struct plan_queue *plan_queue; /* plan.c */
};

/* linear.c (weights, embed, linear) */
status cpu_linear_open(struct cpu_backend *b);
void cpu_linear_close(struct cpu_backend *b);
status cpu_weight_create(struct backend *be, const struct weight_desc *d, struct weight **out);
void cpu_weight_destroy(struct backend *be, struct weight *w);
size_t cpu_weight_bytes(const struct weight *w);
void cpu_embed(struct backend *be, const struct embed_args *a);
void cpu_linear(struct backend *be, const struct linear_args *a);

/* attend.c (append, attend) */
status cpu_attend_open(struct cpu_backend *b);
void cpu_attend_close(struct cpu_backend *b);
void cpu_append(struct backend *be, const struct append_args *a);
void cpu_attend(struct backend *be, const struct attend_args *a);
void cpu_read(struct backend *be, const struct read_args *a);

/* resolve.c (resolve, hot) */
status cpu_resolve_open(struct cpu_backend *b);
void cpu_resolve_close(struct cpu_backend *b);
void cpu_resolve(struct backend *be, const struct resolve_args *a);
void cpu_hot(struct backend *be, const struct hot_args *a);

/* seal.c (digest_bytes, seal, unpermute), codes.c, score.c, select.c, known.c */
status cpu_seal_open(struct cpu_backend *b);
void cpu_seal_close(struct cpu_backend *b);
size_t cpu_digest_bytes(const struct kv_geometry *geo, const struct digest_desc *d);
void cpu_seal(struct backend *be, const struct seal_args *a);
void cpu_unpermute(struct backend *be, const struct unpermute_args *a);
void cpu_codes_open(struct cpu_backend *b);
status cpu_score_open(struct cpu_backend *b);
void cpu_score_close(struct cpu_backend *b);
status cpu_select_open(struct cpu_backend *b);
void cpu_select_close(struct cpu_backend *b);
status cpu_known_open(struct cpu_backend *b);
void cpu_known_close(struct cpu_backend *b);
size_t cpu_known_bytes(const struct kv_geometry *geo, uint32_t heads);

/* plan.c: score and known are kept until select, or until an operation flushes them */
status cpu_plan_open(struct cpu_backend *b);
void cpu_plan_close(struct cpu_backend *b);
void cpu_plan_flush(struct cpu_backend *b);
void cpu_score(struct backend *be, const struct score_args *a);
void cpu_known(struct backend *be, const struct known_args *a);
void cpu_select(struct backend *be, const struct select_args *a);

/* sample.c */
status cpu_sample_open(struct cpu_backend *b);
void cpu_sample_close(struct cpu_backend *b);
void cpu_sample(struct backend *be, const struct sample_args *a);

#endif
