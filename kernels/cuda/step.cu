/* What a step queues: commands, and the arrays they read (cuda.h).
 *
 * A step's small arrays go through pinned memory with a twin on the device, in areas. A place is rounded up
 * to a bucket of sizes, so the same operations get the same addresses although arrays grow by an entry
 * now and then. What commands find through other arrays only (block tables, lists of records) has an area of its
 * own: how many there are, and how long they are, moves no address that a command knows. Nor does what is queued
 * before a step's rows come: that runs first, from a third area. Chunks of an area double until a step fits into
 * one; the memory begins anew with every step. The host has two sides in turn: a step is prepared while the one
 * before it may still be copied.
 *
 * Block tables and lists of records are found again by their host address: append, attend, score and
 * select of all layers read one copy. */
#include "kernels/cuda/replay.h"

#include <stdlib.h>
#include <string.h>

namespace
{

enum {
    STAGE_ALIGN = 256,
    STAGE_FIRST = 4 << 20,
    TABLE_SLOTS_FIRST = 256,
    GEOMETRIES = 4, /* whose lanes are kept: the cache's, one layer's (engine/layer_major.h) */
    STEPS = 4,      /* whose events are kept: two in flight, and the one in front of them */
};

enum { AREA_BEFORE, AREA_ROWS, AREA_APART, AREAS };

struct chunk {
    struct chunk *next;           /* older and smaller */
    uint8_t *host[2], *twin;      /* hosts: of this step and of the one that may still be read */
    size_t bytes, used, uploaded; /* used: of one that is full */
};

struct area {
    struct chunk *head;
    size_t used; /* of head */
};

/* Something staged in this step, by host address; open addressing. */
struct staged {
    const void *host;
    size_t n;
    void *device;
    uint32_t bucket, segments; /* of rows */
};

/* Lanes in device memory. */
struct lanes {
    struct cuda_lane *list;
    const struct kv_geometry *geo; /* NULL: nobody's */
    struct kv_geometry seen;       /* *geo: another may come to lie at the same address */
};

} /* namespace */

struct cuda_step {
    struct area areas[AREAS];
    bool has_rows;  /* cuda_begin_rows was called in this step */
    bool likely;    /* it has as many rows as steps of answers have */
    bool has_begun; /* something of this step was launched */
    uint32_t turn;  /* which host side this step writes */
    struct {
        cudaEvent_t begun, done;
        uint64_t number;       /* of the step that was submitted */
    } marks[STEPS];            /* by the step's number */
    uint32_t n_submitted;      /* the oldest: n_submitted steps back */
    uint32_t busy_us, idle_us; /* of the last step waited for */
    struct replay *replay;
    struct staged *staged;
    uint32_t n_slots, n_staged; /* slots: a power of two */
    struct lanes lanes[GEOMETRIES];
    uint32_t next_lanes; /* which make room for new ones */
};

/* ---- staging ---- */

static void chunk_destroy(struct chunk *c)
{
    cudaFreeHost(c->host[0]);
    cudaFreeHost(c->host[1]);
    if (c->twin != NULL)
        cudaFree(c->twin);
    mem_free(c);
}

static void chunks_destroy(struct chunk *c)
{
    for (struct chunk *next; c != NULL; c = next) {
        next = c->next;
        chunk_destroy(c);
    }
}

static bool add_chunk(struct cuda_backend *b, struct area *s, size_t need)
{
    size_t bytes = s->head != NULL ? 2 * s->head->bytes : (size_t)STAGE_FIRST;
    while (bytes < need)
        bytes *= 2;
    struct chunk *c = (struct chunk *)mem_alloc(sizeof *c);
    c->bytes = bytes;
    if (!cuda_ok(b, cudaMallocHost((void **)&c->host[0], bytes), "pinned memory for staging") ||
        !cuda_ok(b, cudaMallocHost((void **)&c->host[1], bytes), "pinned memory for staging") ||
        !cuda_ok(b, cudaMalloc((void **)&c->twin, bytes), "device memory for staging")) {
        chunk_destroy(c);
        return false;
    }
    if (s->head != NULL)
        s->head->used = s->used;
    c->next = s->head;
    s->head = c;
    s->used = 0;
    return true;
}

static void *stage(struct cuda_backend *b, struct area *a, const void *host, size_t bytes)
{
    size_t room = cuda_bucket((bytes + !bytes + STAGE_ALIGN - 1) / STAGE_ALIGN) * STAGE_ALIGN;
    if ((a->head == NULL || room > a->head->bytes - a->used) && !add_chunk(b, a, room))
        return NULL;
    memcpy(a->head->host[b->step->turn] + a->used, host, bytes);
    a->used += room;
    return a->head->twin + (a->used - room);
}

void *cuda_stage(struct cuda_backend *b, const void *host, size_t bytes)
{
    struct cuda_step *s = b->step;
    return stage(b, &s->areas[s->has_rows ? AREA_ROWS : AREA_BEFORE], host, bytes);
}

void *cuda_stage_apart(struct cuda_backend *b, const void *host, size_t bytes)
{
    return stage(b, &b->step->areas[AREA_APART], host, bytes);
}

/* ---- what is staged once ---- */

static uint32_t slot_of(const struct cuda_step *s, const void *host)
{
    uint64_t h = (uint64_t)(uintptr_t)host * 0x9e3779b97f4a7c15ull;
    uint32_t at = (uint32_t)(h >> 32) & (s->n_slots - 1);
    while (s->staged[at].host != NULL && s->staged[at].host != host)
        at = (at + 1) & (s->n_slots - 1);
    return at;
}

static void grow_staged(struct cuda_step *s)
{
    struct staged *old = s->staged;
    uint32_t n_old = s->n_slots;
    s->n_slots = n_old > 0 ? 2 * n_old : (uint32_t)TABLE_SLOTS_FIRST;
    s->staged = (struct staged *)mem_alloc(s->n_slots * sizeof *s->staged);
    for (uint32_t i = 0; i < n_old; i++)
        if (old[i].host != NULL)
            s->staged[slot_of(s, old[i].host)] = old[i];
    mem_free(old);
}

/* The entry for the address: n 0 where it is new. */
static struct staged *find_staged(struct cuda_step *s, const void *host)
{
    if (2 * s->n_staged >= s->n_slots)
        grow_staged(s);
    struct staged *e = &s->staged[slot_of(s, host)];
    s->n_staged += e->host == NULL;
    e->host = host;
    return e;
}

const uint32_t *cuda_table(struct cuda_backend *b, const uint32_t *host, size_t n)
{
    if (host == NULL || n == 0)
        return NULL;
    struct staged *e = find_staged(b->step, host);
    if (e->n < n) {
        e->device = cuda_stage_apart(b, host, n * sizeof *host);
        e->n = e->device != NULL ? n : 0;
    }
    return (const uint32_t *)e->device;
}

/* ---- rows ---- */

static bool stage_row(struct cuda_backend *b, const struct kv_geometry *g,
                      const struct plan_row *from, struct cuda_row *to)
{
    to->row = from->row;
    to->pos = from->pos;
    to->n_segments = from->n_segments;
    to->budget = from->budget;
    to->estimate = from->estimate;
    to->top_p = from->top_p;
    to->miss_threshold = from->miss_threshold;
    to->spilled = from->hot != NULL;
    if (from->hot != NULL)
        to->hot = *from->hot;
    to->records = cuda_table(b, from->records, from->n_segments);
    to->blocks = cuda_table(b, from->blocks, from->pos / g->block_rows + 1);
    return to->blocks != NULL && (from->n_segments == 0 || to->records != NULL);
}

const struct cuda_row *cuda_rows(struct cuda_backend *b, const struct kv_geometry *g,
                                 const struct plan_row *rows, uint32_t n, uint32_t *bucket,
                                 uint32_t *segments)
{
    struct staged known = *find_staged(b->step, rows);
    if (known.n != n) {
        known.n = n;
        known.bucket = (uint32_t)cuda_bucket(n);
        known.segments = 0;
        struct cuda_row *list =
            (struct cuda_row *)calloc(known.bucket, sizeof *list); /* zeros: also between members */
        bool good = list != NULL;
        for (uint32_t i = 0; good && i < n; i++) {
            good = stage_row(b, g, &rows[i], &list[i]);
            known.segments =
                rows[i].n_segments > known.segments ? rows[i].n_segments : known.segments;
        }
        for (uint32_t i = n; good && i < known.bucket; i++)
            list[i].row = ~0u;
        known.segments = (uint32_t)cuda_bucket(known.segments);
        known.device = good ? cuda_stage(b, list, known.bucket * sizeof *list) : NULL;
        free(list);
        if (known.device == NULL) {
            cuda_ok(b, cudaErrorMemoryAllocation, "rows that attend by plan");
            return NULL;
        }
        *find_staged(b->step, rows) = known;
    }
    *bucket = known.bucket;
    if (segments != NULL)
        *segments = known.segments;
    return (const struct cuda_row *)known.device;
}

static bool are_of(const struct lanes *l, const struct kv_geometry *g)
{
    bool known = l->geo == g || (l->geo != NULL && g->lanes == NULL); /* NULL: all alike */
    return known && memcmp(&l->seen, g, sizeof *g) == 0;
}

static bool lanes_drop(struct cuda_backend *b, struct lanes *l)
{
    if (l->list != NULL) {
        cuda_flush(b);
        if (!cuda_ended(b, NULL, "lanes"))
            return false;
        cudaFree(l->list);
    }
    memset(l, 0, sizeof *l);
    return true;
}

static bool lanes_make(struct cuda_backend *b, struct lanes *l, const struct kv_geometry *g)
{
    size_t n = (size_t)g->layers * g->kv_heads;
    struct cuda_lane *list = (struct cuda_lane *)mem_alloc(n * sizeof *list);
    for (size_t i = 0; i < n; i++) {
        struct lane_place place =
            kv_lane(g, (uint32_t)(i / g->kv_heads), (uint32_t)(i % g->kv_heads));
        list[i].class_ = place.class_;
        list[i].index = place.index;
    }
    bool good =
        cuda_ok(b, cudaMalloc((void **)&l->list, n * sizeof *list), "lanes") &&
        cuda_ok(b, cudaMemcpy(l->list, list, n * sizeof *list, cudaMemcpyHostToDevice), "lanes");
    mem_free(list);
    if (good) {
        l->geo = g;
        l->seen = *g;
    }
    return good;
}

const struct cuda_lane *cuda_lanes(struct cuda_backend *b, const struct kv_geometry *g)
{
    struct cuda_step *s = b->step;
    for (int i = 0; i < GEOMETRIES; i++)
        if (are_of(&s->lanes[i], g))
            return s->lanes[i].list;
    struct lanes *l = &s->lanes[s->next_lanes++ % GEOMETRIES];
    return lanes_drop(b, l) && lanes_make(b, l, g) ? l->list : NULL;
}

/* ---- commands ---- */

void cuda_queue(struct cuda_backend *b, cuda_run *run, const char *name, const void *params,
                size_t bytes)
{
    if (b->error == OK)
        replay_add(b->step->replay, run, name, params, bytes);
}

void *cuda_queued(const struct cuda_backend *b, cuda_run *run)
{
    return replay_last(b->step->replay, run);
}

void cuda_unqueue(struct cuda_backend *b)
{
    replay_take_back(b->step->replay);
}

/* Brings what was staged since the last time to the device. */
static void upload(struct cuda_backend *b, const struct area *a)
{
    struct cuda_step *s = b->step;
    for (struct chunk *c = a->head; c != NULL; c = c->next) {
        size_t end = c == a->head ? a->used : c->used;
        if (end > c->uploaded)
            cuda_ok(b,
                    cudaMemcpyAsync(c->twin + c->uploaded, c->host[s->turn] + c->uploaded,
                                    end - c->uploaded, cudaMemcpyHostToDevice, b->stream),
                    "staging");
        c->uploaded = end;
    }
}

void cuda_flush(struct cuda_backend *b)
{
    struct cuda_step *s = b->step;
    if (b->gone) {
        replay_run(s->replay, b, false); /* which drops it */
        return;
    }
    cuda_ok(b, cudaSetDevice(b->device), "cudaSetDevice"); /* the thread's, once a step */
    if (!s->has_begun)
        cuda_ok(b, cudaEventRecord(s->marks[b->n_steps % STEPS].begun, b->stream), "a step");
    s->has_begun = true;
    for (int i = 0; i < AREAS; i++)
        upload(b, &s->areas[i]);
    replay_run(s->replay, b, s->likely);
}

/* Few rows, and as many as a bucket has: answers, and such a step comes again. */
void cuda_begin_rows(struct cuda_backend *b, uint32_t n)
{
    if (replay_pending(b->step->replay))
        cuda_flush(b);
    b->step->has_rows = true;
    b->step->likely = n <= b->base.ops->step_seqs && n == cuda_bucket(n);
}

/* What is queued from here on is another step's. Chunks that proved too small go; that waits for them. */
static void begin_anew(struct cuda_backend *b)
{
    struct cuda_step *s = b->step;
    b->n_steps++;
    s->has_rows = s->has_begun = s->likely = false;
    s->n_staged = 0;
    s->turn ^= 1;
    if (s->n_slots > 0)
        memset(s->staged, 0, s->n_slots * sizeof *s->staged);
    for (struct area *a = s->areas; a < s->areas + AREAS; a++) {
        a->used = 0;
        if (a->head == NULL)
            continue;
        if (a->head->next != NULL) /* the step submitted reads them */
            (void)cuda_ended(b, NULL, "staging");
        if (!b->gone) {
            chunks_destroy(a->head->next);
            a->head->next = NULL;
        }
        a->head->uploaded = 0;
    }
}

void cuda_step_end(struct cuda_backend *b)
{
    struct cuda_step *s = b->step;
    cuda_flush(b);
    (void)cuda_ended(b, NULL, "a step");
    replay_settle(s->replay);
    s->n_submitted = 0;
    begin_anew(b);
}

void cuda_submit(struct backend *be)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    struct cuda_step *s = b->step;
    CHECK(s->n_submitted < 2);
    cuda_flush(b);
    if (!b->gone)
        cuda_ok(b, cudaEventRecord(s->marks[b->n_steps % STEPS].done, b->stream), "a step's end");
    s->marks[b->n_steps % STEPS].number = b->n_steps;
    s->n_submitted++;
    begin_anew(b);
}

/* How long the device was at the step that has ended, and how long it had nothing to do before it. */
static void take_times(struct cuda_step *s, uint64_t step)
{
    const auto *now = &s->marks[step % STEPS], *last = &s->marks[(step - 1) % STEPS];
    float busy = 0, idle = 0;
    bool known = cudaEventElapsedTime(&busy, now->begun, now->done) == cudaSuccess;
    s->busy_us = known ? (uint32_t)(busy * 1e3f) : 0;
    known = last->number + 1 == step && step > 1 &&
            cudaEventElapsedTime(&idle, last->done, now->begun) == cudaSuccess;
    s->idle_us = known && idle > 0 ? (uint32_t)(idle * 1e3f) : 0;
    (void)cudaGetLastError();
}

bool cuda_step_wait(struct cuda_backend *b, uint64_t *ended)
{
    struct cuda_step *s = b->step;
    if (s->n_submitted == 0)
        return false;
    *ended = b->n_steps - s->n_submitted;
    if (cuda_ended(b, s->marks[*ended % STEPS].done, "a step"))
        take_times(s, *ended);
    if (--s->n_submitted == 0)
        replay_settle(s->replay);
    return true;
}

void cuda_step_counts(struct backend *be, struct step_counts *out)
{
    const struct cuda_step *s = ((struct cuda_backend *)be)->step;
    replay_counts(s->replay, out);
    out->busy_us = s->busy_us;
    out->idle_us = s->idle_us;
}

status cuda_step_open(struct cuda_backend *b)
{
    struct cuda_step *s = (struct cuda_step *)mem_alloc(sizeof *s);
    b->step = s;
    s->replay = replay_create();
    for (int i = 0; i < STEPS; i++)
        if (!cuda_ok(b, cudaEventCreate(&s->marks[i].begun), "events") ||
            !cuda_ok(b, cudaEventCreate(&s->marks[i].done), "events"))
            return err(b->error, "%s", b->text);
    return OK;
}

void cuda_step_close(struct cuda_backend *b)
{
    struct cuda_step *s = b->step;
    if (s == NULL)
        return;
    for (int i = 0; i < AREAS; i++)
        chunks_destroy(s->areas[i].head);
    replay_destroy(s->replay);
    for (int i = 0; i < STEPS; i++) {
        if (s->marks[i].begun != NULL)
            cudaEventDestroy(s->marks[i].begun);
        if (s->marks[i].done != NULL)
            cudaEventDestroy(s->marks[i].done);
    }
    mem_free(s->staged);
    for (int i = 0; i < GEOMETRIES; i++)
        cudaFree(s->lanes[i].list);
    mem_free(s);
    b->step = NULL;
}
