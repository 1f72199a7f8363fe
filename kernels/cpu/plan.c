/* Scores, known mass and selection of a layer as one run of the pool.
 *
 * One row has three lanes, two threads: run after run, each operation waits for its slowest lane, and
 * waking the pool costs microseconds. So score and known are kept until select comes (or anything else
 * that could see what they write, or change what they read), and run with it: items are splits of a lane's tail and stretches of its
 * segments, and who finishes a lane's last one selects for it while others score. Items share no sum, so
 * this changes no bit. */
#include "kernels/cpu/plan.h"

#include <stdatomic.h>
#include <stdlib.h>

struct plan_queue {
    bool has_score, has_known;
    struct score_args score;
    struct known_args known;
    atomic_uint
        *left; /* [lanes] items before the lane's selection; known's alone in the high half */
    size_t max_lanes;
};

enum { KNOWN_ONE = 1 << 16 };

struct plan_call {
    struct cpu_backend *b;
    struct plan_queue *q;
    const struct select_args *select; /* NULL: only what is kept */
    struct score_call score;
    struct known_call known;
    uint32_t n_lanes, slots; /* slots of a lane: items of the largest one, and one more */
    uint32_t known_slots;
};

static uint32_t items_of(const struct plan_call *c, uint32_t lane, uint32_t *known)
{
    *known = c->q->has_known ? known_items(&c->known, lane) : 0;
    return c->q->has_score ? score_items(&c->score, lane) : 0;
}

/* The last item of a lane's tail finishes its mass, the last item of all its selection. A slot without
 * an item does nothing; the one behind all stands for lanes that have none. */
static void run_slot(struct plan_call *c, uint32_t lane, uint32_t slot, uint32_t worker)
{
    uint32_t known, scores = items_of(c, lane, &known), done;
    atomic_uint *left = &c->q->left[lane];
    if (slot < c->known_slots) {
        if (slot >= known)
            return;
        known_item(&c->known, lane, slot, worker);
        done = KNOWN_ONE;
    } else {
        slot -= c->known_slots;
        if (slot != c->slots - c->known_slots - 1) {
            if (slot >= scores)
                return;
            score_item(&c->score, lane, slot, worker);
        }
        done = 1;
    }
    uint32_t before = atomic_fetch_sub_explicit(left, done, memory_order_acq_rel);
    if (done == KNOWN_ONE && before / KNOWN_ONE == 1) {
        known_finish(&c->known, lane, worker);
        before = atomic_fetch_sub_explicit(left, 1, memory_order_acq_rel);
    }
    if (before == 1 && c->select != NULL)
        select_item(c->b, c->select, lane, worker);
}

static void plan_worker(void *arg, uint32_t worker)
{
    struct plan_call *c = arg;
    uint32_t n = c->n_lanes * c->slots;
    for (uint32_t i; (i = pool_next(c->b->pool, n)) < n;)
        run_slot(c, i / c->slots, i % c->slots, worker);
}

/* Counts every lane's items: its scores, the end of its mass, and one for the lane itself. */
static void count_items(struct plan_call *c)
{
    struct plan_queue *q = c->q;
    uint32_t most_known = 0, most_scores = 0;
    if (c->n_lanes > q->max_lanes) {
        free(q->left);
        q->max_lanes = (size_t)c->n_lanes * 2;
        q->left = calloc(q->max_lanes, sizeof *q->left);
        CHECK(q->left != NULL); /* as mem_alloc: no ordinary memory left */
    }
    for (uint32_t i = 0; i < c->n_lanes; i++) {
        uint32_t known, scores = items_of(c, i, &known);
        CHECK(scores < KNOWN_ONE - 2);
        atomic_init(&q->left[i], known * KNOWN_ONE + scores + (known > 0) + 1);
        most_known = known > most_known ? known : most_known;
        most_scores = scores > most_scores ? scores : most_scores;
    }
    c->known_slots = most_known;
    c->slots = most_known + most_scores + 1;
}

/* Lanes of what is run, all of it over the same rows. */
static uint32_t lanes_of(const struct plan_queue *q, const struct select_args *select)
{
    if (select != NULL)
        return select->n_rows * select->kv->geo->kv_heads;
    if (q->has_score)
        return q->score.n_rows * q->score.kv->geo->kv_heads;
    return q->known.n_rows * q->known.kv->geo->kv_heads;
}

/* Runs what is kept, and a selection over the same rows if there is one. */
static void run(struct cpu_backend *b, const struct select_args *select)
{
    struct plan_queue *q = b->plan_queue;
    struct plan_call c = {.b = b, .q = q, .select = select};
    c.n_lanes = lanes_of(q, select);
    if (q->has_score)
        score_prepare(&c.score, b, &q->score);
    if (q->has_known)
        known_prepare(&c.known, b, &q->known);
    if (select != NULL)
        select_prepare(b, select);
    count_items(&c);
    pool_run(b->pool, plan_worker, &c);
    q->has_score = q->has_known = false;
}

/* Whether all that is kept is about these rows of this layer. */
static bool fits(const struct plan_queue *q, const struct kv_memory *kv,
                 const struct plan_row *rows, uint32_t n_rows, uint32_t layer)
{
    const struct score_args *s = &q->score;
    const struct known_args *k = &q->known;
    if (q->has_score &&
        (s->kv != kv || s->rows != rows || s->n_rows != n_rows || s->layer != layer))
        return false;
    return !q->has_known ||
           (k->kv == kv && k->rows == rows && k->n_rows == n_rows && k->layer == layer);
}

void cpu_plan_flush(struct cpu_backend *b)
{
    struct plan_queue *q = b->plan_queue; /* NULL: the backend is closing */
    if (q != NULL && (q->has_score || q->has_known))
        run(b, NULL);
}

void cpu_score(struct backend *be, const struct score_args *a)
{
    struct cpu_backend *b = (struct cpu_backend *)(void *)be;
    struct plan_queue *q = b->plan_queue;
    if (q->has_score || !fits(q, a->kv, a->rows, a->n_rows, a->layer))
        cpu_plan_flush(b);
    q->score = *a;
    q->has_score = true;
}

void cpu_known(struct backend *be, const struct known_args *a)
{
    struct cpu_backend *b = (struct cpu_backend *)(void *)be;
    struct plan_queue *q = b->plan_queue;
    if (q->has_known || !fits(q, a->kv, a->rows, a->n_rows, a->layer))
        cpu_plan_flush(b);
    q->known = *a;
    q->has_known = true;
}

void cpu_select(struct backend *be, const struct select_args *a)
{
    struct cpu_backend *b = (struct cpu_backend *)(void *)be;
    if (!fits(b->plan_queue, a->kv, a->rows, a->n_rows, a->layer))
        cpu_plan_flush(b);
    run(b, a);
}

status cpu_plan_open(struct cpu_backend *b)
{
    b->plan_queue = mem_alloc(sizeof *b->plan_queue);
    return OK;
}

void cpu_plan_close(struct cpu_backend *b)
{
    if (b->plan_queue == NULL)
        return;
    free(b->plan_queue->left);
    mem_free(b->plan_queue);
    b->plan_queue = NULL;
}
