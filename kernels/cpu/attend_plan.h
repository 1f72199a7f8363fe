/* What an attend call is made of: tasks, and what each of them reads.
 *
 * A task is up to ATTEND_ROWS rows of one sequence with one KV head: a row of decode, a tile of
 * prefill, or one row with its plan. It attends up to three stretches in this order:
 *   FIRST      a planned row: pages of its list; else the sinks of a STREAM lane
 *   TABLE      positions of the block table up to the row itself
 *   ESTIMATES  a planned row: estimated partitions
 * A stretch is cut into splits of ATTEND_SPLIT from its own beginning. Rows of a task share their
 * stretches, but for the causal end: tiles of a STREAM lane end where its window moves. */
#ifndef KERNELS_CPU_ATTEND_PLAN_H
#define KERNELS_CPU_ATTEND_PLAN_H

#include "kernels/cpu/attend.h"
#include "kernels/cpu/cpu.h"

#include <stdatomic.h>

enum stretch_kind { STRETCH_FIRST, STRETCH_TABLE, STRETCH_ESTIMATES, STRETCHES };

struct stretch {
    uint32_t begin, end; /* positions, rows of a list, or entries */
};

struct attend_task {
    uint32_t seq, head, row, n_rows; /* row: of the sequence's rows in this call */
    struct lane_place place;
    const struct attend_plans *plans; /* NULL: not by plan */
    uint32_t plan;                    /* row of plans */
    struct stretch stretch[STRETCHES];
    uint32_t n_splits;
    const float
        *tail;      /* partial results of TABLE's splits, computed by `known`; NULL: they are not */
    size_t partial; /* floats before its first partial result in scratch */
    atomic_uint splits_left; /* when splits are items */
};

struct attend_item {
    uint32_t task, split;
};

/* The tasks of one call and the memory behind it. Belongs to the engine thread, which grows it
 * before the pool starts: sizes follow from the shapes seen so far, so they settle with the first
 * steps. */
struct attend_scratch {
    struct attend_task *tasks;
    struct attend_item *items;
    float *floats; /* [threads][worker_floats], then partial results */
    size_t max_tasks, max_items, max_floats;
    size_t n_tasks, n_items, worker_floats;
    bool by_split; /* an item is a split of a task; else items are tasks */
};

struct attend_call {
    struct cpu_backend *b;
    const struct attend_args *a;
    struct attend_scratch *s;
    uint32_t group, o_stride;
};

static inline size_t attend_partial_floats(const struct attend_call *c, uint32_t n_rows)
{
    return attend_partial_size(c->group, c->o_stride, n_rows);
}

/* Makes tasks and items of the call and room for their results. */
void attend_plan(struct attend_call *c);
void attend_plan_free(struct attend_scratch *s);

/* A split of a task: where it lies in which stretch. */
struct split_place {
    enum stretch_kind kind;
    uint32_t begin, end;
};
struct split_place attend_split_at(const struct attend_task *k, uint32_t split);

/* Pages of a stretch that is not ESTIMATES, and the masks beside them (NULL: none). */
struct attend_table attend_table_of(const struct attend_call *c, const struct attend_task *k,
                                    enum stretch_kind kind, const uint32_t **masks);

/* Entries [begin, end) of a task's estimates; the arrays have room for ATTEND_SPLIT each, logits for
 * that by head of the group. */
void attend_gather_estimates(const struct attend_call *c, const struct attend_task *k,
                             struct split_place at, const int8_t **values, float *factors,
                             float *logits);

/* Of the same entries, with DIGEST_CODES: adds to o what their rows' V are from the mean, each row by
 * its share of the page. m: of the estimate, [group]; work: as logits above. codes.c */
void codes_attend(const struct attend_call *c, const struct attend_task *k, struct split_place at,
                  float *o, const float *m, float *work);

#endif
