/* Lists and a table of sequences (queue.h). */
#include "engine/queue.h"

void queue_init(struct queue *u)
{
    *u = (struct queue){.n_buckets = 1024};
    u->buckets = mem_alloc(u->n_buckets * sizeof *u->buckets);
    u->lines = mem_alloc(MAX_TENANTS * sizeof *u->lines);
}

void queue_fini(struct queue *u)
{
    CHECK(u->n_sequences == 0);
    mem_free(u->buckets);
    mem_free(u->lines);
}

/* ---- the id table ---- */

static struct sequence **bucket_of(const struct queue *u, uint64_t id)
{
    return &u->buckets[(id * 0x9e3779b97f4a7c15u >> 32) & (u->n_buckets - 1)];
}

void queue_note(struct queue *u, struct sequence *q)
{
    struct sequence **at = bucket_of(u, q->id);
    q->next_in_bucket = *at;
    *at = q;
    u->n_sequences++;
}

void queue_forget(struct queue *u, struct sequence *q)
{
    struct sequence **at = bucket_of(u, q->id);
    while (*at != q) {
        CHECK(*at != NULL);
        at = &(*at)->next_in_bucket;
    }
    *at = q->next_in_bucket;
    u->n_sequences--;
}

struct sequence *queue_find(const struct queue *u, uint64_t id)
{
    struct sequence *q = *bucket_of(u, id);
    while (q != NULL && q->id != id)
        q = q->next_in_bucket;
    return q;
}

/* ---- lines ---- */

void queue_insert(struct queue *u, struct sequence *q)
{
    /* New ones go to the end, a preempted one near the head: search from the end it is closer to. */
    struct line *l = &u->lines[q->tenant];
    struct sequence *before = l->last;
    if (l->first != NULL && sequence_goes_before(q, l->first))
        before = NULL;
    while (before != NULL && sequence_goes_before(q, before))
        before = before->prev;
    q->prev = before;
    q->next = before != NULL ? before->next : l->first;
    *(before != NULL ? &before->next : &l->first) = q;
    *(q->next != NULL ? &q->next->prev : &l->last) = q;
    u->n_waiting++;
}

void queue_take(struct queue *u, struct sequence *q)
{
    struct line *l = &u->lines[q->tenant];
    *(q->prev != NULL ? &q->prev->next : &l->first) = q->next;
    *(q->next != NULL ? &q->next->prev : &l->last) = q->prev;
    q->next = q->prev = NULL;
    u->n_waiting--;
}
