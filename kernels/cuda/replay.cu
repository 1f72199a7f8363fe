/* Gathering commands, and graphs of lists that come again (replay.h).
 *
 * A decode step is some hundreds of launches of a few microseconds each: launched one by one they cost
 * more than they compute. So a list is kept as bytes (function, size, parameters, ...). The first time it
 * runs as it is; when the same bytes come a second time they are captured into a graph; from the third
 * time on they are one launch. Prefill and other lists that hardly come twice pay one comparison.
 *
 * Nobody says which steps are alike: equal bytes are, by the rules for commands. The list of the last run
 * is compared first, which is a memcmp of some tens of KiB; others are found by a hash. The least recently
 * used lists and graphs make room for new ones. */
#include "kernels/cuda/replay.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

namespace
{

enum {
    MIN_COMMANDS = 8, /* a graph of fewer is not worth it */
    MAX_GRAPHS = 192, /* batch sizes times buckets of lengths; some 100 KiB of device memory each */
    MAX_STRANGERS = 64, /* lists seen once */
    PARAMS_ALIGN = 16,
    MAX_MARKS = 8192, /* of a step that is profiled */
    MAX_TOTALS = 64,  /* kinds of commands */
};

/* Before each command's parameters. */
struct alignas(PARAMS_ALIGN) head {
    cuda_run *run;
    const char *name;
    size_t bytes, pad; /* of the parameters, rounded up */
};

struct list {
    uint8_t *bytes;
    size_t used, have;
    uint32_t n;
    size_t last; /* where the last one begins, unless it was taken back */
    bool has_last;
};

/* A list that ran. */
struct memory {
    struct memory *next; /* used before */
    uint8_t *bytes;
    size_t used;
    uint64_t hash;
    cudaGraphExec_t graph; /* NULL: not captured yet */
    size_t graph_bytes;
    bool never; /* something in it cannot be captured */
};

/* A point in the stream: before a command, or (name NULL) behind the last one. */
struct mark {
    const char *name;
    cudaEvent_t event;
};

struct profile {
    struct mark marks[MAX_MARKS];
    uint32_t n, n_totals;
    struct {
        const char *name;
        double ms;
        uint64_t n;
    } totals[MAX_TOTALS];
};

} /* namespace */

struct replay {
    struct list now;
    struct memory *memories; /* most recently used first */
    struct profile *profile; /* NULL: not asked for */
    struct step_counts counts;
    bool has_warned;
};

struct replay *replay_create(void)
{
    struct replay *r = (struct replay *)mem_alloc(sizeof *r);
    if (getenv("SPIND_CUDA_PROFILE") != NULL)
        r->profile = (struct profile *)mem_alloc(sizeof *r->profile);
    return r;
}

/* ---- SPIND_CUDA_PROFILE: what commands take, launched one by one; a table on stderr at the end ---- */

static void profile_mark(struct profile *p, const char *name, cudaStream_t stream)
{
    if (p->n == MAX_MARKS)
        return;
    struct mark *m = &p->marks[p->n++];
    m->name = name;
    if (m->event == NULL)
        cudaEventCreate(&m->event);
    cudaEventRecord(m->event, stream);
}

static void profile_add(struct profile *p, const char *name, float ms)
{
    uint32_t i = 0;
    while (i < p->n_totals && p->totals[i].name != name)
        i++;
    if (i == MAX_TOTALS)
        return;
    p->n_totals += i == p->n_totals;
    p->totals[i].name = name;
    p->totals[i].ms += ms;
    p->totals[i].n++;
}

void replay_settle(struct replay *r)
{
    struct profile *p = r->profile;
    if (p == NULL)
        return;
    for (uint32_t i = 0; i + 1 < p->n; i++) {
        float ms = 0;
        if (p->marks[i].name != NULL &&
            cudaEventElapsedTime(&ms, p->marks[i].event, p->marks[i + 1].event) == cudaSuccess)
            profile_add(p, p->marks[i].name, ms);
    }
    p->n = 0;
}

static void profile_tell(struct profile *p)
{
    for (uint32_t i = 0; i < p->n_totals; i++)
        fprintf(stderr, "cuda profile: %-28s %8llu times %10.3f ms %9.2f us each\n",
                p->totals[i].name, (unsigned long long)p->totals[i].n, p->totals[i].ms,
                1e3 * p->totals[i].ms / (double)p->totals[i].n);
    for (uint32_t i = 0; i < MAX_MARKS && p->marks[i].event != NULL; i++)
        cudaEventDestroy(p->marks[i].event);
    mem_free(p);
}

static void forget(struct replay *r, struct memory *m)
{
    if (m->graph != NULL) {
        cudaGraphExecDestroy(m->graph);
        r->counts.graphs--;
        r->counts.graph_bytes -= m->graph_bytes;
        r->counts.dropped++;
    }
    mem_free(m->bytes);
    mem_free(m);
}

void replay_destroy(struct replay *r)
{
    if (r == NULL)
        return;
    for (struct memory *m = r->memories, *next; m != NULL; m = next) {
        next = m->next;
        forget(r, m);
    }
    if (r->profile != NULL)
        profile_tell(r->profile);
    mem_free(r->now.bytes);
    mem_free(r);
}

void replay_add(struct replay *r, cuda_run *run, const char *name, const void *params, size_t bytes)
{
    struct list *l = &r->now;
    size_t room = (bytes + PARAMS_ALIGN - 1) / PARAMS_ALIGN * PARAMS_ALIGN;
    size_t need = l->used + sizeof(struct head) + room;
    if (need > l->have) {
        size_t have = 2 * need;
        l->bytes = (uint8_t *)mem_grow(l->bytes, l->have, have);
        l->have = have;
    }
    struct head *h = (struct head *)(l->bytes + l->used);
    h->run = run;
    h->name = name;
    h->bytes = room;
    h->pad = 0;
    memset((uint8_t *)(h + 1) + room - (room > 0 ? PARAMS_ALIGN : 0), 0,
           room > 0 ? PARAMS_ALIGN : 0);
    memcpy(h + 1, params, bytes);
    l->last = l->used;
    l->has_last = true;
    l->used = need;
    l->n++;
}

/* Of whole 8-byte words: a list is made of them. */
static uint64_t hash_of(const struct list *l)
{
    uint64_t h = l->used;
    const uint64_t *w = (const uint64_t *)l->bytes;
    for (size_t i = 0; i < l->used / sizeof *w; i++) {
        h = (h ^ w[i]) * 0x9e3779b97f4a7c15ull;
        h ^= h >> 29;
    }
    return h;
}

static bool same(const struct memory *m, const struct list *l)
{
    return m->used == l->used && memcmp(m->bytes, l->bytes, l->used) == 0;
}

/* The memory of an equal list, moved to the front; NULL: there is none. */
static struct memory *recall(struct replay *r, uint64_t *hash)
{
    struct memory **at = &r->memories;
    if (*at != NULL && same(*at, &r->now))
        return *at;
    *hash = hash_of(&r->now);
    while (*at != NULL && !((*at)->hash == *hash && same(*at, &r->now)))
        at = &(*at)->next;
    struct memory *m = *at;
    if (m == NULL)
        return NULL;
    *at = m->next;
    m->next = r->memories;
    r->memories = m;
    return m;
}

/* Drops what was not used for longest; what is queued may still run. */
static void make_room(struct replay *r, struct cuda_backend *b)
{
    uint32_t graphs = 0, strangers = 0;
    bool waited = false;
    for (struct memory **at = &r->memories; *at != NULL;) {
        struct memory *m = *at;
        bool keep = m->graph != NULL ? ++graphs <= MAX_GRAPHS : ++strangers <= MAX_STRANGERS;
        if (keep) {
            at = &m->next;
            continue;
        }
        if (m->graph != NULL && !waited && !(waited = cuda_ended(b, NULL, "dropping a graph")))
            return;
        if (m->graph != NULL && b->log != NULL)
            b->log(LOG_DEBUG, "CUDA graph of list %016llx makes room: %d are kept at most",
                   (unsigned long long)m->hash, (int)MAX_GRAPHS);
        *at = m->next;
        forget(r, m);
    }
}

static struct memory *remember(struct replay *r, uint64_t hash)
{
    struct memory *m = (struct memory *)mem_alloc(sizeof *m);
    m->used = r->now.used;
    m->bytes = (uint8_t *)mem_alloc(m->used);
    memcpy(m->bytes, r->now.bytes, m->used);
    m->hash = hash;
    m->next = r->memories;
    r->memories = m;
    return m;
}

static void run_all(const struct list *l, struct cuda_backend *b, struct profile *p)
{
    for (size_t at = 0; at < l->used && b->error == OK;) {
        const struct head *h = (const struct head *)(l->bytes + at);
        if (p != NULL)
            profile_mark(p, h->name, b->stream);
        h->run(b, h + 1);
        at += sizeof *h + h->bytes;
    }
    if (p != NULL)
        profile_mark(p, NULL, b->stream);
}

/* ---- capturing ---- */

static uint64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* Records the commands. The name of the first that the stream would not record, or NULL. */
static const char *record_all(const struct list *l, struct cuda_backend *b)
{
    for (size_t at = 0; at < l->used;) {
        const struct head *h = (const struct head *)(l->bytes + at);
        cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
        h->run(b, h + 1);
        if (b->error != OK || cudaStreamIsCapturing(b->stream, &state) != cudaSuccess ||
            state != cudaStreamCaptureStatusActive)
            return h->name;
        at += sizeof *h + h->bytes;
    }
    return NULL;
}

/* Steps like this one are launched command by command from now on: somebody must be told, once. */
static void refuse(struct replay *r, struct cuda_backend *b, struct memory *m, const char *name,
                   cudaError_t e)
{
    m->never = true;
    r->counts.refused++;
    if (!r->has_warned && b->log != NULL)
        b->log(LOG_WARN,
               "a step of %u commands cannot become a CUDA graph and is launched command by "
               "command (%s: %s); others are counted only",
               r->now.n, name != NULL ? name : "all of it",
               b->error != OK ? b->text : cudaGetErrorName(e));
    r->has_warned = true;
    (void)cudaGetLastError();
}

static size_t free_memory(void)
{
    size_t free_bytes = 0, total = 0;
    return cudaMemGetInfo(&free_bytes, &total) == cudaSuccess ? free_bytes : 0;
}

/* Captures the list into m's graph. Where that fails nothing has run: the list runs as it is, for good. */
static void capture(struct replay *r, struct memory *m, struct cuda_backend *b)
{
    cudaGraph_t graph = NULL;
    const struct list *l = &r->now;
    uint64_t from = now_us();
    cudaError_t e = cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeRelaxed);
    if (e != cudaSuccess) {
        refuse(r, b, m, NULL, e);
        return;
    }
    const char *refused = record_all(l, b);
    e = cudaStreamEndCapture(b->stream, &graph);
    size_t before = free_memory();
    uint64_t recorded = now_us();
    if (e == cudaSuccess && refused == NULL)
        e = cudaGraphInstantiate(&m->graph, graph, 0);
    if (e != cudaSuccess || refused != NULL) {
        m->graph = NULL;
        refuse(r, b, m, refused, e);
        b->error = OK;
    } else {
        size_t after = free_memory();
        m->graph_bytes = before > after ? before - after : 0;
        r->counts.graphs++;
        r->counts.graph_bytes += m->graph_bytes;
        r->counts.captured++;
        if (b->log != NULL)
            b->log(LOG_DEBUG,
                   "CUDA graph of %u commands (list %016llx): recorded in %llu us, made in %llu; "
                   "%llu are kept, %.1f MiB",
                   l->n, (unsigned long long)m->hash, (unsigned long long)(recorded - from),
                   (unsigned long long)(now_us() - recorded), (unsigned long long)r->counts.graphs,
                   (double)r->counts.graph_bytes / 1048576.0);
    }
    if (graph != NULL)
        cudaGraphDestroy(graph);
}

bool replay_pending(const struct replay *r)
{
    return r->now.n > 0;
}

void *replay_last(struct replay *r, cuda_run *run)
{
    struct list *l = &r->now;
    struct head *h = (struct head *)(l->bytes + l->last);
    return l->n > 0 && l->has_last && h->run == run ? h + 1 : NULL;
}

void replay_take_back(struct replay *r)
{
    struct list *l = &r->now;
    CHECK(l->n > 0 && l->has_last);
    l->used = l->last;
    l->has_last = false;
    l->n--;
}

void replay_counts(const struct replay *r, struct step_counts *out)
{
    *out = r->counts;
}

void replay_run(struct replay *r, struct cuda_backend *b, bool likely)
{
    struct list *l = &r->now;
    uint64_t hash = 0;
    if (l->n == 0)
        return;
    if (b->error != OK) {
        l->used = l->n = 0;
        return;
    }
    if (b->eager || r->profile != NULL || l->n < MIN_COMMANDS) {
        run_all(l, b, r->profile);
        l->used = l->n = 0;
        return;
    }
    struct memory *m = recall(r, &hash);
    bool seen = m != NULL;
    if (!seen) {
        m = remember(r, hash);
        make_room(r, b);
    }
    if (m->graph != NULL)
        r->counts.replayed++;
    else if (!m->never && (seen || likely))
        capture(r, m, b);
    if (m->graph != NULL) {
        cuda_ok(b, cudaGraphLaunch(m->graph, b->stream), "launching a step");
    } else {
        uint64_t from = now_us();
        run_all(l, b, NULL);
        r->counts.listed++;
        if (b->log != NULL)
            b->log(LOG_DEBUG, "%u commands (list %016llx) launched one by one in %llu us", l->n,
                   (unsigned long long)m->hash, (unsigned long long)(now_us() - from));
    }
    l->used = l->n = 0;
}
