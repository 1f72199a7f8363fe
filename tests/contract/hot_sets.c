/* Hot sets of sequences that run: when their statistics are looked at and by whom learnt, how long their epochs are,
 * and that they have the room that there is. What rows select is made up (tests/trace_rig.h). */
#include "cache/residency.h"
#include "tests/contract/sched_world.h"
#include "tests/trace_rig.h"

/* What the rows of one sequence select. */
struct history {
    struct sequence *q;
    struct replay_lane lane;
};

static struct history history_of(struct sequence *q, uint32_t n_pages, uint32_t n_pick,
                                 uint32_t n_steps, uint64_t from)
{
    const struct trace_shape s = {n_pages, n_pick, n_steps, 1.0, 0.7, 0.8, 0.97, 0.3, from};
    return (struct history){q, rig_trace(&s)};
}

/* A row of the sequence attends what its history has, if it is SPILLED. Returns the misses. */
static uint32_t attend(struct world *w, struct history *h, uint32_t i)
{
    enum { MOST = 256 };
    uint32_t slots[MOST], n = h->lane.first[i + 1] - h->lane.first[i];
    struct hot_fetch fetches[MOST];
    struct kv_seq *seqs[] = {&h->q->kv};
    CHECK(n <= MOST && i < h->lane.n_steps);
    if (h->q->kv.residence != KV_SPILLED)
        return 0;
    n = hot_touch(h->q->kv.hot, 0, h->lane.pages + h->lane.first[i], n, slots, fetches);
    kv_step(w->kv, seqs, 1);
    return n;
}

static uint32_t n_learnt(const struct history *h, uint32_t n)
{
    uint32_t learnt = 0;
    for (uint32_t i = 0; i < n; i++)
        learnt += h[i].q->kv.residence == KV_SPILLED && hot_set_curve(h[i].q->kv.hot)->n > 0;
    return learnt;
}

/* A curve of 256 lanes takes 0.2 ms of the host: of all hot sets at once, while the device had nothing to do, that
 * was 6 ms in every 32nd step of five sequences. */
static void curves_are_learnt_one_by_one(void)
{
    enum { SEQS = 6, STEPS = 200 };
    const struct size z = {800, 4000, 8, 256, false, {0}, 0};
    struct history h[SEQS];
    struct world w;
    uint32_t learnt = 0, most = 0, spilled = 0;
    world_open_sized(&w, &z);
    for (uint32_t i = 0; i < SEQS; i++)
        h[i] = history_of(submit_sparse(&w, 2200, 1000, i, "wave", 0.05f), 256, 12, STEPS, i + 1);
    for (uint32_t i = 0; i < STEPS; i++) {
        CHECK(step(&w));
        uint32_t now = n_learnt(h, SEQS);
        most = now > learnt + most ? now - learnt : most;
        learnt = now;
        for (uint32_t k = 0; k < SEQS; k++)
            (void)attend(&w, &h[k], i);
    }
    for (uint32_t i = 0; i < SEQS; i++)
        spilled += h[i].q->kv.residence == KV_SPILLED;
    ok(spilled >= 3 && learnt == spilled, "%u hot sets of %u know their curves", learnt, spilled);
    is_int(most, 1, "no step had to learn more than one");
    for (uint32_t i = 0; i < SEQS; i++)
        rig_trace_free(&h[i].lane);
    world_close(&w);
}

/* One is RESIDENT; the other has room for ten selections, more than what 62 steps use: all that ages tell apart if
 * an age is a step. */
static void what_is_nobodys_is_not_left_idle(void)
{
    enum { ROWS = 12100, STEPS = 900 };
    const struct size z = {2050, 4000, 2, 4096, false, {0}, 0};
    struct world w;
    world_open_sized(&w, &z);
    w.s.loose = true;
    struct sequence *a = submit_sparse(&w, ROWS, STEPS + 100, 1, "wave", 0.02f);
    struct sequence *b = submit_sparse(&w, ROWS, STEPS + 100, 2, "wave", 0.02f);
    while (a->n_tokens == ROWS || b->n_tokens == ROWS)
        CHECK(step(&w));
    struct sequence *q = a->kv.residence == KV_SPILLED ? a : b;
    CHECK(q->kv.residence == KV_SPILLED);
    uint32_t named = attention_min_slots(q->in, kv_geometry(w.kv), q->n_computed);
    struct history h = history_of(q, 1408, named - 2, STEPS, 7);
    uint32_t misses = 0, paces = 0;
    for (uint32_t i = 0; i < STEPS && q->kv.residence == KV_SPILLED; i++) {
        CHECK(step(&w));
        uint32_t n = attend(&w, &h, i);
        misses += i >= STEPS / 2 ? n : 0;
        paces |= 1u << q->kv.hot->epoch_steps;
    }
    int64_t idle = (int64_t)kv_available(w.kv) - (int64_t)residence_reserved(&w.s);
    ok(q->kv.residence == KV_SPILLED && q->kv.n_slots >= 9 * named && idle <= q->kv.n_slots / 64,
       "%u slots for %u pages, and %lld blocks lie idle", q->kv.n_slots, named, (long long)idle);
    is_int(q->kv.hot->epoch_steps, RESIDENCE_MAX_EPOCH, "its epochs are long by now");
    printf("# paces %x, %.2f %% missed\n", paces, 100.0 * misses / (STEPS / 2) / (named - 2));
    rig_trace_free(&h.lane);
    world_close(&w);
}

int main(void)
{
    curves_are_learnt_one_by_one();
    what_is_nobodys_is_not_left_idle();
    return tap_done();
}
