/* The thread pool: a generation counter starts an operation, a countdown ends it.
 *
 * A step of a small model is a few hundred operations of 5 to 100 us, so a waiting thread first
 * spins about 20 us: between operations nobody enters the kernel. When no step runs, all workers
 * sleep on a futex and cost nothing. Whoever changes a word wakes only when somebody sleeps on it;
 * word and sleeper count are both sequentially consistent, so either the sleeper sees the new word
 * (the futex re-checks it) or the waker sees the sleeper.
 *
 * Spinning is worse than useless when the awaited thread is queued behind us on the same CPU, which
 * happens to unpinned workers as soon as other threads are busy (measured: every operation 40 us
 * longer). So each worker notes where it runs, and one that shares its CPU sleeps at once: the kernel
 * then finds the other a free place.
 *
 * The engine thread is worker 0 and alone calls pool_run. Nothing here is locked. */
#include "kernels/cpu/pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SPIN_US = 20, LINE = 64, MAX_THREADS = 256 };

/* A word that threads wait on, alone on its cache line with the number of its sleepers. */
struct signal_word {
    _Alignas(LINE) atomic_uint value;
    atomic_uint sleepers;
};

struct worker {
    struct pool *pool;
    pthread_t thread;
    uint32_t index;
    int cpu; /* -1: not bound */
};

struct pool {
    struct signal_word start;   /* generation of operations */
    struct signal_word left;    /* workers still inside fn */
    struct signal_word barrier; /* generation of barriers */
    _Alignas(LINE) atomic_uint arrived;
    _Alignas(LINE) atomic_uint next;
    _Alignas(LINE) void (*fn)(void *arg, uint32_t worker);
    void *arg;
    atomic_bool stopping;
    uint32_t n_threads, n_started; /* started: worker threads that exist, without the caller */
    uint32_t n_spins;              /* looks at a word in SPIN_US */
    bool pinned;
    bool has_caller; /* caller, caller_cpus: the thread that is worker 0 now */
    pthread_t caller;
    cpu_set_t caller_cpus;                         /* its affinity before pinning */
    _Alignas(LINE) atomic_int cpu_of[MAX_THREADS]; /* where each worker last ran; rarely written */
    struct worker workers[MAX_THREADS];
};

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* Notes the CPU of a worker; true if another one was last seen there. */
static bool shares_cpu(struct pool *p, uint32_t worker)
{
    if (p->pinned)
        return false;
    int cpu = sched_getcpu();
    if (atomic_load_explicit(&p->cpu_of[worker], memory_order_relaxed) != cpu)
        atomic_store_explicit(&p->cpu_of[worker], cpu, memory_order_relaxed);
    for (uint32_t i = 0; i < p->n_threads; i++)
        if (i != worker && atomic_load_explicit(&p->cpu_of[i], memory_order_relaxed) == cpu)
            return true;
    return false;
}

static void wait_while(struct pool *p, uint32_t worker, struct signal_word *w, uint32_t value)
{
    uint32_t n_spins = shares_cpu(p, worker) ? 0 : p->n_spins;
    for (uint32_t i = 0; i < n_spins; i++) {
        if (atomic_load_explicit(&w->value, memory_order_acquire) != value)
            return;
        relax();
    }
    atomic_fetch_add(&w->sleepers, 1);
    while (atomic_load(&w->value) == value)
        syscall(SYS_futex, &w->value, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
    atomic_fetch_sub(&w->sleepers, 1);
    (void)shares_cpu(p, worker); /* we may have woken elsewhere */
}

static void wake_sleepers(struct signal_word *w)
{
    if (atomic_load(&w->sleepers) != 0)
        syscall(SYS_futex, &w->value, FUTEX_WAKE_PRIVATE, MAX_THREADS, NULL, NULL, 0);
}

/* How many looks last SPIN_US: `pause` takes 40 to 140 cycles, depending on the CPU. The fastest of
 * several tries, because a try may be interrupted. */
static uint32_t measure_spins(void)
{
    enum { TRIES = 5, LOOKS = 256 };
    atomic_uint word = 0;
    uint64_t best_ns = UINT64_MAX;
    for (int t = 0; t < TRIES; t++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (int i = 0; i < LOOKS; i++) {
            (void)atomic_load_explicit(&word, memory_order_acquire);
            relax();
        }
        clock_gettime(CLOCK_MONOTONIC, &b);
        uint64_t ns = (uint64_t)(b.tv_sec - a.tv_sec) * 1000000000u + (uint64_t)b.tv_nsec -
                      (uint64_t)a.tv_nsec;
        if (ns < best_ns)
            best_ns = ns;
    }
    return (uint32_t)((uint64_t)SPIN_US * 1000 * LOOKS / (best_ns + 1)) + 1;
}

/* CPUs that a cgroup directory's quota allows; n when it sets none. Rounded down: a thread more than
 * the quota is throttled in the middle of an operation, and everyone waits for it. */
static uint32_t quota_of(const char *dir, uint32_t n)
{
    char path[512];
    double quota = 0, period = 0;
    snprintf(path, sizeof path, "%s/cpu.max", dir);
    FILE *f = fopen(path, "re");
    if (f != NULL) {
        if (fscanf(f, "%lf %lf", &quota, &period) != 2) /* "max 100000": none */
            quota = 0;
        fclose(f);
    } else { /* cgroup v1 */
        static const char *const names[] = {"cpu.cfs_quota_us", "cpu.cfs_period_us"};
        double *const values[] = {&quota, &period};
        for (int i = 0; i < 2; i++) {
            snprintf(path, sizeof path, "%s/%s", dir, names[i]);
            if ((f = fopen(path, "re")) == NULL)
                return n;
            if (fscanf(f, "%lf", values[i]) != 1)
                quota = 0;
            fclose(f);
        }
    }
    if (quota <= 0 || period <= 0 || quota / period >= n)
        return n;
    return quota < 2 * period ? 1 : (uint32_t)(quota / period);
}

/* The smallest quota from our own cgroup up to the root. */
static uint32_t cgroup_cpus(uint32_t n)
{
    char line[300], dir[400];
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (f == NULL)
        return n;
    while (fgets(line, sizeof line, f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL;
        if (path == NULL)
            continue;
        *path++ = '\0';
        bool v2 = list[1] == '\0', v1 = strstr(list + 1, "cpu") == list + 1;
        if (!v2 && !v1)
            continue;
        snprintf(dir, sizeof dir, "/sys/fs/cgroup%s%s", v2 ? "" : "/cpu", path);
        char *root = dir + strlen(v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu");
        for (char *end = dir + strlen(dir); end != NULL && end >= root; end = strrchr(root, '/')) {
            *end = '\0';
            n = quota_of(dir, n);
        }
    }
    fclose(f);
    return n;
}

static void bind_to(pthread_t t, int cpu)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    (void)pthread_setaffinity_np(t, sizeof one, &one); /* refused: it just runs unbound */
}

/* Worker 0 is whoever runs operations: the thread that loads the model at first, then the engine
 * thread. A thread that takes over is bound; the one before has ended or does not come back. */
static void adopt_caller(struct pool *p)
{
    pthread_t self = pthread_self();
    if (!p->pinned || (p->has_caller && pthread_equal(p->caller, self)))
        return;
    p->caller = self;
    p->has_caller = pthread_getaffinity_np(self, sizeof p->caller_cpus, &p->caller_cpus) == 0;
    bind_to(self, p->workers[0].cpu);
}

static void release_caller(struct pool *p)
{
    if (p->has_caller && pthread_equal(p->caller, pthread_self()))
        (void)pthread_setaffinity_np(p->caller, sizeof p->caller_cpus, &p->caller_cpus);
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct pool *p = w->pool;
    if (w->cpu >= 0)
        bind_to(pthread_self(), w->cpu);
    for (uint32_t seen = 0;; seen++) {
        wait_while(p, w->index, &p->start, seen);
        if (atomic_load(&p->stopping))
            return NULL;
        p->fn(p->arg, w->index);
        if (atomic_fetch_sub(&p->left.value, 1) == 1)
            wake_sleepers(&p->left);
    }
}

static status start_workers(struct pool *p)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to the loop thread */
    int failed = 0;
    for (uint32_t i = 1; i < p->n_threads && !failed; i++) {
        failed = pthread_create(&p->workers[i].thread, NULL, worker_main, &p->workers[i]);
        if (!failed)
            p->n_started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed ? err(ERR_DEVICE, "cannot start worker threads: %s", strerror(failed)) : OK;
}

status pool_create(struct pool **out, uint32_t n_threads, bool pin)
{
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0 || CPU_COUNT(&cpus) == 0)
        CPU_SET(0, &cpus);
    uint32_t usable = cgroup_cpus((uint32_t)CPU_COUNT(&cpus));
    if (n_threads == 0 || n_threads > usable)
        n_threads = usable;
    if (n_threads > MAX_THREADS)
        n_threads = MAX_THREADS;

    struct pool *p = NULL;
    if (posix_memalign((void **)&p, LINE, sizeof *p) != 0)
        return err(ERR_MEMORY, "no memory for a thread pool");
    memset(p, 0, sizeof *p);
    p->n_threads = n_threads;
    p->n_spins = measure_spins();
    p->pinned = pin;
    int cpu = -1;
    for (uint32_t i = 0; i < n_threads; i++) {
        do
            cpu++;
        while (pin && !CPU_ISSET(cpu, &cpus));
        atomic_init(&p->cpu_of[i], -1 - (int)i);
        p->workers[i] = (struct worker){.pool = p, .index = i, .cpu = pin ? cpu : -1};
    }
    if (start_workers(p) != OK) {
        pool_destroy(p);
        return ERR_DEVICE;
    }
    *out = p;
    return OK;
}

void pool_destroy(struct pool *p)
{
    if (p == NULL)
        return;
    atomic_store(&p->stopping, true);
    atomic_fetch_add(&p->start.value, 1);
    wake_sleepers(&p->start);
    for (uint32_t i = 1; i <= p->n_started; i++)
        pthread_join(p->workers[i].thread, NULL);
    release_caller(p);
    free(p);
}

uint32_t pool_threads(const struct pool *p)
{
    return p->n_threads;
}

void pool_run(struct pool *p, void (*fn)(void *arg, uint32_t worker), void *arg)
{
    adopt_caller(p);
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    if (p->n_threads == 1) {
        fn(arg, 0);
        return;
    }
    p->fn = fn;
    p->arg = arg;
    atomic_store_explicit(&p->left.value, p->n_threads - 1, memory_order_relaxed);
    atomic_fetch_add(&p->start.value, 1);
    wake_sleepers(&p->start);
    fn(arg, 0);
    for (uint32_t n; (n = atomic_load_explicit(&p->left.value, memory_order_acquire)) != 0;)
        wait_while(p, 0, &p->left, n);
}

uint32_t pool_next(struct pool *p, uint32_t n_items)
{
    uint32_t i = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed);
    return i < n_items ? i : n_items;
}

void pool_barrier(struct pool *p, uint32_t worker)
{
    if (p->n_threads == 1)
        return;
    uint32_t generation = atomic_load_explicit(&p->barrier.value, memory_order_relaxed);
    if (atomic_fetch_add(&p->arrived, 1) + 1 < p->n_threads) {
        wait_while(p, worker, &p->barrier, generation);
        return;
    }
    atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
    atomic_fetch_add(&p->barrier.value, 1);
    wake_sleepers(&p->barrier);
}

void pool_rewind(struct pool *p)
{
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
}
