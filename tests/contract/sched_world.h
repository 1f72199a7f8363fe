/* A world for the scheduler: sequences come, run and go, and the cache moves their blocks.
 *
 * The model is replaced by "every planned row was computed": its block gets a mark made of sequence and
 * position, and marks are looked up wherever the tables say that the rows are. Tokens are a hash of
 * what came before, so a preempted sequence that did not keep its tokens would be seen. Every step is
 * checked against what holds of all of them. */
#ifndef TESTS_CONTRACT_SCHED_WORLD_H
#define TESTS_CONTRACT_SCHED_WORLD_H

#include "engine/residence.h"
#include "engine/sched.h"
#include "kernels/core/hot_run.h"
#include "tests/tap.h"

static uint64_t rng_state;

static uint32_t rnd(uint32_t n)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((rng_state >> 33) % n);
}

/* ---- a backend with memory and nothing else ---- */

static void *fake_alloc(struct backend *be, size_t bytes)
{
    (void)be;
    return mem_try_alloc(bytes);
}

static void fake_free(struct backend *be, void *p, size_t bytes)
{
    (void)be, (void)bytes;
    mem_free(p);
}

static void fake_copy(struct backend *be, void *dst, const void *src, size_t bytes)
{
    (void)be;
    memcpy(dst, src, bytes);
}

static size_t fake_digest_bytes(const struct kv_geometry *geo, const struct digest_desc *d)
{
    (void)geo, (void)d;
    return 64;
}

/* Rows stay in order, so the inverse is a copy. */
static void *block_at(const struct kv_memory *kv, block_id b)
{
    char *base = (b & BLOCK_IN_DRAM) != 0 ? kv->dram[LANE_SPARSE] : kv->hbm[LANE_SPARSE];
    return base + (size_t)(b & ~BLOCK_IN_DRAM) * kv->geo->block_bytes[LANE_SPARSE];
}

static void fake_seal(struct backend *be, const struct seal_args *a)
{
    (void)be;
    for (uint32_t i = 0; i < SEGMENT_ROWS / a->kv->geo->block_rows; i++)
        if (a->from[i] != a->to[i])
            memcpy(block_at(a->kv, a->to[i]), block_at(a->kv, a->from[i]),
                   a->kv->geo->block_bytes[LANE_SPARSE]);
}

static void fake_unpermute(struct backend *be, const struct unpermute_args *a)
{
    (void)be;
    for (uint32_t i = 0; i * a->kv->geo->block_rows < a->n_rows; i++)
        memcpy(block_at(a->kv, a->to[i]), block_at(a->kv, a->from[i]),
               a->kv->geo->block_bytes[LANE_SPARSE]);
}

static size_t fake_known_bytes(const struct kv_geometry *g, uint32_t heads)
{
    (void)g, (void)heads;
    return 0;
}

static void fake_hot(struct backend *be, const struct hot_args *a)
{
    (void)be;
    hot_run(a);
}

static const struct backend_ops fake_ops = {.name = "fake",
                                            .hot = fake_hot,
                                            .alloc = fake_alloc,
                                            .free = fake_free,
                                            .copy = fake_copy,
                                            .digest_bytes = fake_digest_bytes,
                                            .known_bytes = fake_known_bytes,
                                            .seal = fake_seal,
                                            .unpermute = fake_unpermute};
static struct backend fake = {.ops = &fake_ops};

static struct backend *be = &fake; /* of the worlds that are opened */

/* ---- the world ---- */

enum { R = 8 };

struct world {
    struct lane_place lanes[2];
    struct kv *kv;
    struct attention *at;
    struct sched s;
    uint64_t next_id, steps, order;
    uint32_t submitted, finished, refused, too_large, preempted_max;
    uint32_t blocks, dram;
    bool rows_bounded, answers_advance, slots_suffice, borders_kept, marks_right, passed_too_often;
    bool answers_waited; /* in the last step: chunks of prompts had it for themselves */
    uint32_t tenant;     /* whose submissions are, */
    int32_t priority;    /* and their priority */
    uint32_t probes;     /* marks that are looked up for a sequence and step */
    /* Told of rows computed and of tokens drawn; NULL: nobody is. */
    void (*computed)(const struct sequence *q, uint32_t from, uint32_t rows, bool token);
};

struct size {
    uint32_t hbm, dram; /* blocks */
    uint32_t max_seqs, max_rows;
    bool caching;
    uint32_t ring[2];    /* blocks of STREAM lanes, by tier; 0: there are none */
    uint64_t leaf_bytes; /* bound of the leaf pool; 0: none */
};

static void world_open_sized(struct world *w, const struct size *z)
{
    *w = (struct world){.blocks = z->hbm,
                        .dram = z->dram,
                        .probes = 16,
                        .rows_bounded = true,
                        .answers_advance = true,
                        .slots_suffice = true,
                        .borders_kept = true,
                        .marks_right = true};
    static const uint8_t classes[] = {LANE_SPARSE, LANE_STREAM};
    uint32_t heads = z->ring[KV_HBM] > 0 ? 2 : 1;
    struct kv_geometry geo = kv_geometry_make(R, 1, heads, 2);
    kv_geometry_classify(&geo, classes, w->lanes, 16, 64);
    const struct kv_config kc = {.geo = geo,
                                 .blocks = {[LANE_SPARSE] = {z->hbm, z->dram},
                                            [LANE_STREAM] = {z->ring[KV_HBM], z->ring[KV_DRAM]}},
                                 .n_records = (z->hbm + z->dram) * R / SEGMENT_ROWS + 1,
                                 .record_lane_bytes = 64,
                                 .leaf_bytes = z->leaf_bytes,
                                 .prefix_caching = z->caching,
                                 .secret = {1, 2}};
    CHECK(kv_create(&w->kv, be, &kc) == OK);
    CHECK(attention_create(&w->at, be, kv_memory(w->kv), heads, 1, z->max_rows, 1 << 16) == OK);
    sched_init(&w->s, w->kv, w->at, z->max_seqs, z->max_rows, z->caching);
}

static void world_close(struct world *w)
{
    sched_fini(&w->s);
    attention_destroy(w->at);
    kv_destroy(w->kv);
}

struct submission {
    struct msg_submit m;
    uint32_t tokens[1 << 19];
};

static struct sequence *submit(struct world *w, uint32_t n_prompt, uint32_t max_tokens,
                               uint32_t family, uint64_t leader)
{
    static struct submission sub;
    sub.m = (struct msg_submit){.head = {.kind = MSG_SUBMIT, .bytes = sizeof sub},
                                .id = ++w->next_id,
                                .leader = leader,
                                .tenant = w->tenant,
                                .priority = w->priority,
                                .n_prompt = n_prompt,
                                .max_tokens = max_tokens,
                                .logprobs = -1,
                                .prompt_logprobs = -1};
    for (uint32_t i = 0; i < n_prompt; i++)
        sub.tokens[i] = family * 1000 + (i < 24 ? i : i * (uint32_t)w->next_id);
    struct sequence *q = sequence_create(&sub.m, ++w->order, 1);
    sched_submit(&w->s, q);
    w->submitted++;
    return q;
}

/* As submit, of one that attends by plan. */
static inline struct sequence *submit_sparse(struct world *w, uint32_t n_prompt,
                                             uint32_t max_tokens, uint32_t family,
                                             const char *plugin, float budget)
{
    uint32_t i;
    CHECK(sparse_find(plugin, &i) == OK);
    const struct sparse_choice c = sparse_choice_make(i, budget);
    struct sequence *q = submit(w, n_prompt, max_tokens, family, 0);
    q->sparse = c;
    q->in = attention_instance(w->at, &c);
    CHECK(q->in != NULL);
    return q;
}

static uint32_t next_token(const struct sequence *q)
{
    uint32_t h = 2166136261u;
    for (uint32_t i = 0; i < q->n_tokens; i++)
        h = (h ^ q->tokens[i]) * 16777619u;
    return h;
}

static void on_admitted(void *arg, struct sequence *q)
{
    (void)arg;
    CHECK(q->state == SEQUENCE_RUNNING);
}

/* Whole in HBM; or in DRAM, with slots and tail in HBM. */
static bool can_never_fit(const struct world *w, const struct sequence *q)
{
    uint32_t rows = q->n_prompt + q->max_tokens, blocks = (rows + R - 1) / R;
    uint32_t tail = (SEGMENT_ROWS + TAIL_ROWS) / R;
    bool dram = q->in != NULL && blocks <= w->dram &&
                attention_min_slots(q->in, kv_geometry(w->kv), rows) + tail <= w->blocks;
    return blocks > w->blocks && !dram;
}

static void on_refused(void *arg, struct sequence *q, status why)
{
    struct world *w = arg;
    w->refused++;
    w->too_large += why == ERR_FULL && can_never_fit(w, q);
    sched_remove(&w->s, q);
    sequence_destroy(q, w->at);
}

/* ---- marks: what a row's K and V would be ---- */

static uint64_t mark_of(const struct sequence *q, uint32_t pos)
{
    uint64_t h = 1469598103934665603u; /* rows of equal prefixes are equal: they are shared */
    for (uint32_t i = 0; i <= pos; i += pos - i < 8 ? 1 : (pos - i) / 2)
        h = (h ^ q->tokens[i]) * 1099511628211u;
    return h ^ pos;
}

static uint64_t *mark_at(const struct world *w, const struct sequence *q, uint32_t pos)
{
    const struct kv_memory *kv = kv_memory(w->kv);
    char *block = block_at(kv, q->kv.table[LANE_SPARSE][pos / R]);
    return (uint64_t *)(void *)(block + (size_t)(pos % R) * 8);
}

static void check_marks(struct world *w, const struct sequence *q)
{
    for (uint32_t i = 0; i < w->probes && q->n_computed > 0; i++) {
        uint32_t pos = rnd(q->n_computed);
        if (*mark_at(w, q, pos) != mark_of(q, pos))
            w->marks_right = false;
    }
}

static void check_sparse(struct world *w, const struct sequence *q)
{
    uint32_t end = q->n_computed + q->n_scheduled;
    if (q->in == NULL)
        return;
    if (q->kv.n_segments != kv_segments_due(q->n_computed) ||
        kv_segments_due(end - 1) != q->kv.n_segments ||
        (q->n_computed < q->n_prompt && end > q->n_prompt))
        w->borders_kept = false;
    if (q->kv.residence == KV_SPILLED && sched_attends_by_plan(q) &&
        (q->n_scheduled != 1 ||
         q->kv.n_slots < attention_min_slots(q->in, kv_geometry(w->kv), end)))
        w->slots_suffice = false;
}

static void check_plan(struct world *w)
{
    const struct sched *s = &w->s;
    uint32_t rows = 0;
    bool waits = false;
    for (uint32_t i = 0; i < s->n_plan; i++) {
        const struct sequence *q = s->plan[i];
        rows += q->n_scheduled;
        if (q->n_scheduled == 0 || q->n_scheduled > sequence_left(q) ||
            q->kv.n_blocks * R < q->n_computed + q->n_scheduled)
            w->rows_bounded = false;
        check_sparse(w, q);
        check_marks(w, q);
    }
    if (rows != s->plan_rows || rows > s->max_rows || s->n_running > s->max_seqs)
        w->rows_bounded = false;
    for (uint32_t i = 0; i < s->n_running; i++) {
        const struct sequence *q = s->running[i];
        waits |= sequence_decodes(q) && q->n_scheduled != 1;
        if (q->n_preempted > w->preempted_max)
            w->preempted_max = q->n_preempted;
        /* Those that are due wait for each other, which passes nobody; a step is not cut in the middle. */
        if (q->passed_rows > q->n_prompt + (SCHED_MAX_BYPASS + 16) * (uint64_t)s->max_rows)
            w->passed_too_often = true;
    }
    /* Every running answer is in the plan; or none of them, in one step, for chunks of prompts. */
    if (waits && (s->whole == 0 || s->plan_decodes > 0 || w->answers_waited))
        w->answers_advance = false;
    w->answers_waited = waits;
}

static void computed(struct world *w, struct sequence *q, uint32_t rows, bool token)
{
    sched_charge(&w->s, q, q->n_computed, rows, token);
    if (w->computed != NULL)
        w->computed(q, q->n_computed, rows, token);
}

/* Plans and "computes" one step; false: nothing to do. */
static bool step(struct world *w)
{
    struct sched *s = &w->s;
    if (!sched_plan(s, 1, on_admitted, on_refused, w))
        return false;
    w->steps++;
    residence_learn(s);
    check_plan(w);
    for (uint32_t i = 0; i < s->n_plan; i++) {
        struct sequence *q = s->plan[i];
        for (uint32_t pos = q->n_computed; pos < q->n_computed + q->n_scheduled; pos++)
            *mark_at(w, q, pos) = mark_of(q, pos);
        computed(w, q, q->n_scheduled, false);
        q->n_computed += q->n_scheduled;
        q->n_scheduled = 0;
        if (q->n_computed < q->n_tokens)
            continue;
        q->is_proven = true;
        if (!q->is_private)
            kv_seq_share(w->kv, &q->kv, q->tokens, q->in == NULL ? q->n_computed : q->n_prompt);
        q->tokens[q->n_tokens] = next_token(q);
        q->n_tokens++;
        computed(w, q, 0, true);
        if (sequence_n_output(q) == q->max_tokens) {
            w->finished++;
            sched_remove(s, q);
            sequence_destroy(q, w->at);
        }
    }
    return true;
}

static inline bool all_blocks_home(const struct world *w)
{
    struct kv_counts c;
    kv_counts(w->kv, &c);
    return c.active == 0 && c.free[0] + c.cached[0] == c.total[0] &&
           c.free[1] + c.cached[1] == c.total[1];
}

static inline void cancel_any(struct world *w)
{
    struct sequence *q = sched_find(&w->s, 1 + rnd((uint32_t)w->next_id + 1));
    if (q == NULL)
        return;
    sched_remove(&w->s, q);
    sequence_destroy(q, w->at);
    w->finished++;
}

#endif
