/* Who waits, a line for each tenant, and everybody by id. Engine thread only; the scheduler's (sched.h), which
 * decides who leaves it. A sequence is in the table from submission to its end, and in its tenant's line while it
 * is WAITING or PAUSED: by priority, then by order of submission, which it keeps when it comes back. Lines and table
 * are links in the sequences themselves: nothing is allocated behind queue_init. */
#ifndef ENGINE_QUEUE_H
#define ENGINE_QUEUE_H

#include "engine/sequence.h"

struct line {
    struct sequence *first, *last; /* by sequence_goes_before */
    struct sequence *next; /* whom admission looks at next; NULL: nobody. Valid while admitting */
};

struct queue {
    struct line *lines;        /* [MAX_TENANTS] */
    uint32_t n_waiting;        /* in all lines, paused ones included */
    struct sequence **buckets; /* id table */
    uint32_t n_buckets;
    uint32_t n_sequences; /* in the table */
};

void queue_init(struct queue *u);
void queue_fini(struct queue *u); /* of nobody's sequences: all have been forgotten */

/* The table. */
void queue_note(struct queue *u, struct sequence *q);
void queue_forget(struct queue *u, struct sequence *q);
struct sequence *queue_find(const struct queue *u, uint64_t id); /* NULL: unknown */

/* Its tenant's line. */
void queue_insert(struct queue *u, struct sequence *q);
void queue_take(struct queue *u, struct sequence *q);

#endif
