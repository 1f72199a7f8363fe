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

#include <stdlib.h>
#include <string.h>

namespace
{

enum {
    MIN_COMMANDS = 8, /* a graph of fewer is not worth it */
    MAX_GRAPHS = 192, /* batch sizes times buckets of lengths; some 100 KiB of device memory each */
    MAX_STRANGERS = 64, /* lists seen once */
    PARAMS_ALIGN = 16,
};

/* Before each command's parameters. */
struct alignas(PARAMS_ALIGN) head {
    cuda_run *run;
    size_t bytes; /* of the parameters, rounded up */
};

struct list {
    uint8_t *bytes;
    size_t used, have;
    uint32_t n;
};

/* A list that ran. */
struct memory {
    struct memory *next; /* used before */
    uint8_t *bytes;
    size_t used;
    uint64_t hash;
    cudaGraphExec_t graph; /* NULL: not captured yet */
    bool never;            /* something in it cannot be captured */
};

} /* namespace */

struct replay {
    struct list now;
    struct memory *memories; /* most recently used first */
};

struct replay *replay_create(void)
{
    return (struct replay *)mem_alloc(sizeof(struct replay));
}

static void forget(struct memory *m)
{
    if (m->graph != NULL)
        cudaGraphExecDestroy(m->graph);
    mem_free(m->bytes);
    mem_free(m);
}

void replay_destroy(struct replay *r)
{
    if (r == NULL)
        return;
    for (struct memory *m = r->memories, *next; m != NULL; m = next) {
        next = m->next;
        forget(m);
    }
    mem_free(r->now.bytes);
    mem_free(r);
}

void replay_add(struct replay *r, cuda_run *run, const void *params, size_t bytes)
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
    h->bytes = room;
    memset((uint8_t *)(h + 1) + room - (room > 0 ? PARAMS_ALIGN : 0), 0,
           room > 0 ? PARAMS_ALIGN : 0);
    memcpy(h + 1, params, bytes);
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
        if (m->graph != NULL && !waited)
            waited = cuda_ok(b, cudaStreamSynchronize(b->stream), "dropping a graph");
        *at = m->next;
        forget(m);
    }
}

static void remember(struct replay *r, struct cuda_backend *b, uint64_t hash)
{
    struct memory *m = (struct memory *)mem_alloc(sizeof *m);
    m->used = r->now.used;
    m->bytes = (uint8_t *)mem_alloc(m->used);
    memcpy(m->bytes, r->now.bytes, m->used);
    m->hash = hash;
    m->next = r->memories;
    r->memories = m;
    make_room(r, b);
}

static void run_all(const struct list *l, struct cuda_backend *b)
{
    for (size_t at = 0; at < l->used && b->error == OK;) {
        const struct head *h = (const struct head *)(l->bytes + at);
        h->run(b, h + 1);
        at += sizeof *h + h->bytes;
    }
}

/* Captures the list into m's graph. Where that fails nothing has run: the list runs as it is, for good. */
static void capture(struct memory *m, const struct list *l, struct cuda_backend *b)
{
    cudaGraph_t graph = NULL;
    status before = b->error;
    if (!cuda_ok(b, cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeRelaxed), "capture"))
        return;
    run_all(l, b);
    cudaError_t e = cudaStreamEndCapture(b->stream, &graph);
    if (e == cudaSuccess && b->error == before)
        e = cudaGraphInstantiate(&m->graph, graph, 0);
    m->never = e != cudaSuccess || b->error != before;
    if (m->never) {
        (void)cudaGetLastError();
        m->graph = NULL;
        b->error = before;
    }
    if (graph != NULL)
        cudaGraphDestroy(graph);
}

void replay_run(struct replay *r, struct cuda_backend *b)
{
    struct list *l = &r->now;
    uint64_t hash = 0;
    if (l->n == 0)
        return;
    if (b->error != OK) {
        l->used = l->n = 0;
        return;
    }
    struct memory *m = b->eager || l->n < MIN_COMMANDS ? NULL : recall(r, &hash);
    if (m != NULL && m->graph == NULL && !m->never)
        capture(m, l, b);
    if (m != NULL && m->graph != NULL)
        cuda_ok(b, cudaGraphLaunch(m->graph, b->stream), "launching a step");
    else
        run_all(l, b);
    if (m == NULL && l->n >= MIN_COMMANDS && !b->eager)
        remember(r, b, hash);
    l->used = l->n = 0;
}
