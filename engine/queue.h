/* Who waits, in order, and everybody by id. Engine thread only; the scheduler's (sched.h), which decides who
 * leaves it. A sequence is in the table from submission to its end, and in the queue while it is WAITING or
 * PAUSED. Both are links in the sequences themselves: nothing is allocated behind queue_init. */
#ifndef ENGINE_QUEUE_H
#define ENGINE_QUEUE_H

#include "engine/sequence.h"

struct queue {
    struct sequence *first, *last; /* in order of submission */
    uint32_t n_waiting;            /* in the queue, paused ones included */
    struct sequence **buckets;     /* id table */
    uint32_t n_buckets;
    uint32_t n_sequences; /* in the table */
};

void queue_init(struct queue *u);
void queue_fini(struct queue *u); /* of nobody's sequences: all have been forgotten */

/* The table. */
void queue_note(struct queue *u, struct sequence *q);
void queue_forget(struct queue *u, struct sequence *q);
struct sequence *queue_find(const struct queue *u, uint64_t id); /* NULL: unknown */

/* The queue. */
void queue_insert(struct queue *u, struct sequence *q);
void queue_take(struct queue *u, struct sequence *q);

#endif
