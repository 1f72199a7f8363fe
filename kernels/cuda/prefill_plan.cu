/* Plans of cuDNN's, made where nobody waits for them.
 *
 * A plan serves one number of rows. The first takes a second, for the library loads its parts and compiles the
 * kernel; the first of the other kind (exact) half of one; any other 0.04 s. So a thread makes ahead, in this
 * order, what prompts will want: a plan for each number of rows as prefill_plan_rows rounds it, wherever these
 * rows are; then exact ones for a prompt's whole chunks of PLAN_MOST_ROWS. What else is wanted it makes in
 * between: a plan that the engine waits for; an exact one of a prompt's last chunk, which serves the next
 * prompt of that length. Plans stay, for graphs know their addresses: so of the latter there are a share of all,
 * and a daemon that sees prompts of every length still has room for the former.
 *
 * The engine thread writes a wish and sets `wished`; the thread clears that, makes the plan and counts
 * `n_made` up: entries before it never change. Each of the two has the library opened for itself. */
#include "kernels/cuda/prefill_plan.h"

#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <time.h>

namespace
{

enum {
    MAX_PLANS = 256,
    MAX_GRANTED = 128,         /* exact ones that were wished for */
    FEWEST_ROWS = 1,           /* made ahead: fewer than 520 for sequences in DRAM */
    AHEAD_POSITIONS = 1 << 17, /* exact plans are made ahead up to here */
    POLL_NS = 100000,
};

struct entry {
    struct plan_key key;
    struct cudnn_plan *plan; /* NULL: cuDNN has none */
    double seconds;          /* that making it took */
};

enum opening { OPENING, OPEN, NOWHERE };

} /* namespace */

struct prefill_plans {
    pthread_t thread;
    int device;
    struct plan_key like;
    sem_t work; /* a wish, or the end */
    /* Written by the thread before `state` or `n_made` says so. */
    struct cudnn *maker, *runner; /* the library for the thread, and for who asks */
    const char *why;
    struct entry made[MAX_PLANS];
    uint32_t n_ahead, n_granted;
    double seconds;
    /* Who asks. */
    bool late;          /* the last one waited for took too long, and none was quick since */
    uint32_t n_in_time; /* what was made by then */
    const char *trouble;
    /* Both threads', atomic. */
    int state;       /* enum opening */
    uint32_t n_made; /* of made[] */
    int wished;      /* wish is valid, and the thread's */
    int ready, ends;
    struct plan_key wish;
};

namespace
{

double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct cudnn_plan *make_plan(struct cudnn *cudnn, const struct plan_key *k)
{
    struct cudnn_shape s = {};
    s.batch = 1;
    s.heads = k->heads;
    s.kv_heads = k->kv_heads;
    s.dim = k->dim;
    s.rows = k->rows;
    s.exact = k->first != PLAN_ANYWHERE;
    s.positions = s.exact ? k->first + k->rows : (uint32_t)PLAN_POSITIONS;
    s.q_row = (size_t)k->all_heads * k->dim;
    s.q_head = k->dim;
    s.q_batch = s.q_row * k->rows;
    s.kv_row = (size_t)k->kv_heads * k->dim;
    s.kv_head = k->dim;
    s.kv_batch = s.kv_row * s.positions;
    struct cudnn_plan *p = cudnn_plan_create(cudnn, &s);
    if (p == NULL || cudnn_workspace(p) <= PLAN_WORKSPACE_BYTES)
        return p;
    cudnn_plan_destroy(p);
    return NULL;
}

/* ---- the thread ---- */

/* Among the first n that are made. */
struct entry *look_up(struct prefill_plans *p, const struct plan_key *k, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (memcmp(&p->made[i].key, k, sizeof *k) == 0)
            return &p->made[i];
    return NULL;
}

/* False: it is there, or there is no room. */
bool make(struct prefill_plans *p, const struct plan_key *k)
{
    const double begin = now();
    uint32_t n = p->n_made;
    if (n == MAX_PLANS || look_up(p, k, n) != NULL)
        return false;
    p->made[n].key = *k;
    p->made[n].plan = make_plan(p->maker, k);
    p->made[n].seconds = now() - begin;
    __atomic_store_n(&p->n_made, n + 1, __ATOMIC_RELEASE);
    return true;
}

void grant(struct prefill_plans *p)
{
    if (!__atomic_load_n(&p->wished, __ATOMIC_ACQUIRE))
        return;
    struct plan_key k = p->wish;
    bool exact = k.first != PLAN_ANYWHERE;
    if (!exact || p->n_granted < MAX_GRANTED) /* each layer of a step wishes for the same */
        p->n_granted += make(p, &k) && exact;
    __atomic_store_n(&p->wished, 0, __ATOMIC_RELEASE);
}

bool ends(const struct prefill_plans *p)
{
    return __atomic_load_n(&p->ends, __ATOMIC_ACQUIRE);
}

void make_ahead(struct prefill_plans *p)
{
    struct plan_key k = p->like;
    const double begin = now();
    k.first = PLAN_ANYWHERE;
    k.rows = PLAN_MOST_ROWS; /* the likeliest */
    (void)make(p, &k);
    for (uint32_t n = FEWEST_ROWS; n <= PLAN_MOST_ROWS && !ends(p); n = k.rows + 1) {
        grant(p);
        k.rows = prefill_plan_rows(n);
        (void)make(p, &k);
    }
    k.rows = PLAN_MOST_ROWS;
    for (k.first = 0; k.first < AHEAD_POSITIONS && !ends(p); k.first += PLAN_MOST_ROWS) {
        grant(p);
        (void)make(p, &k);
    }
    p->n_ahead = p->n_made;
    p->seconds = now() - begin;
    __atomic_store_n(&p->ready, 1, __ATOMIC_RELEASE);
}

void *run(void *arg)
{
    struct prefill_plans *p = (struct prefill_plans *)arg;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaSetDevice(p->device);
    (void)cudaThreadExchangeStreamCaptureMode(&mode); /* the engine thread may be capturing */
    p->maker = cudnn_open(&p->why);
    p->runner = p->maker != NULL ? cudnn_open(&p->why) : NULL;
    __atomic_store_n(&p->state, p->runner != NULL ? OPEN : NOWHERE, __ATOMIC_RELEASE);
    if (p->runner == NULL)
        return NULL;
    make_ahead(p);
    while (!ends(p)) {
        sem_wait(&p->work);
        grant(p);
    }
    return NULL;
}

/* ---- who asks ---- */

void wait_a_little(void)
{
    const struct timespec t = {0, POLL_NS};
    nanosleep(&t, NULL);
}

/* False: it still has another one. */
bool tell_wish(struct prefill_plans *p, const struct plan_key *k)
{
    if (__atomic_load_n(&p->wished, __ATOMIC_ACQUIRE))
        return false;
    p->wish = *k;
    __atomic_store_n(&p->wished, 1, __ATOMIC_RELEASE);
    sem_post(&p->work);
    return true;
}

/* The plan; or NULL, and why is told. */
struct cudnn_plan *plan_of(struct prefill_plans *p, const struct entry *e)
{
    if (e != NULL && e->plan != NULL)
        return e->plan;
    if (p->trouble == NULL)
        p->trouble = e != NULL ? "cuDNN has no kernel for a shape of theirs"
                     : p->late ? "a plan was not made in time; until one is, nobody waits"
                               : "there is no room for more plans";
    return NULL;
}

/* Waits again: of the n plans that a step found, the last was made since the late one and was quick. All of a step's
 * layers see the same. */
void forgive(struct prefill_plans *p, uint32_t n, double patience_s)
{
    if (!p->late || n <= p->n_in_time || p->made[n - 1].seconds > patience_s)
        return;
    p->late = false;
    p->trouble = NULL;
}

} /* namespace */

uint32_t prefill_plan_rows(uint32_t n)
{
    uint32_t unit = PLAN_TILE_ROWS;
    while (n > 16 * unit)
        unit *= 2;
    return (n + unit - 1) / unit * unit;
}

void prefill_plans_look(const struct prefill_plans *p, struct prefill_progress *to)
{
    const int state = __atomic_load_n(&p->state, __ATOMIC_ACQUIRE);
    memset(to, 0, sizeof *to);
    to->ready = __atomic_load_n(&p->ready, __ATOMIC_ACQUIRE);
    to->n_made = __atomic_load_n(&p->n_made, __ATOMIC_ACQUIRE);
    to->cudnn = state == OPEN ? p->runner : NULL;
    to->why = state == NOWHERE ? p->why : NULL;
    to->n_ahead = to->ready ? p->n_ahead : 0;
    to->seconds = to->ready ? p->seconds : 0;
    to->trouble = p->trouble;
}

struct cudnn_plan *prefill_plans_find(struct prefill_plans *p, const struct plan_key *k, uint32_t n,
                                      bool wish)
{
    const uint32_t made = __atomic_load_n(&p->n_made, __ATOMIC_ACQUIRE);
    const struct entry *e = look_up(p, k, n < made ? n : made);
    if (e == NULL && wish)
        (void)tell_wish(p, k);
    return e != NULL ? e->plan : NULL;
}

struct cudnn_plan *prefill_plans_get(struct prefill_plans *p, const struct plan_key *k, uint32_t n,
                                     double patience_s)
{
    const double begin = now();
    bool told = false;
    for (;;) {
        const uint32_t made = __atomic_load_n(&p->n_made, __ATOMIC_ACQUIRE);
        forgive(p, n < made ? n : made, patience_s);
        /* Late: what a step found before it was late, it finds again. */
        const uint32_t in_time = n > p->n_in_time ? n : p->n_in_time;
        const uint32_t most = p->late && in_time < made ? in_time : made;
        const struct entry *e = look_up(p, k, most);
        if (e != NULL || made == MAX_PLANS)
            return plan_of(p, e);
        told = told || tell_wish(p, k);
        if (p->late)
            return plan_of(p, NULL);
        if (now() - begin > patience_s) {
            p->late = true;
            p->n_in_time = made;
            continue;
        }
        wait_a_little();
    }
}

struct prefill_plans *prefill_plans_create(int device, const struct plan_key *like)
{
    struct prefill_plans *p = (struct prefill_plans *)mem_alloc(sizeof *p);
    p->device = device;
    p->like = *like;
    sem_init(&p->work, 0, 0);
    if (pthread_create(&p->thread, NULL, run, p) == 0)
        return p;
    sem_destroy(&p->work);
    mem_free(p);
    return NULL;
}

void prefill_plans_destroy(struct prefill_plans *p)
{
    if (p == NULL)
        return;
    __atomic_store_n(&p->ends, 1, __ATOMIC_RELEASE);
    sem_post(&p->work);
    pthread_join(p->thread, NULL);
    for (uint32_t i = 0; i < p->n_made; i++)
        cudnn_plan_destroy(p->made[i].plan);
    cudnn_close(p->runner);
    cudnn_close(p->maker);
    sem_destroy(&p->work);
    mem_free(p);
}
