/* Bodies on their way to becoming requests.
 *
 * A small body is parsed and tokenised where it arrived, on the loop. A large one would hold up every
 * stream, so it is copied and goes to a helper thread; a few at once, the others wait in order, and
 * all together hold a bounded number of bytes. The client may leave meanwhile: the job then has no
 * exchange and its result is thrown away. A job is freed in job_done, on the loop, and nowhere else. */
#include "api/front.h"
#include "kernels/core/splitmix.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

enum {
    JOB_INLINE_BYTES = 64 << 10,
    JOB_MAX_BYTES = 256 << 20, /* of all bodies held */
};

struct job {
    struct job *next, *prev, *next_queued;
    struct api *api;
    struct exchange *x; /* NULL: the client has left */
    const struct route *route;
    struct request_rules rules;
    uint64_t seed;
    struct token_scratch *scratch;
    struct request *r; /* the result: a request, or for text endpoints an answer, or an error */
    struct writer out;
    struct api_error e;
    status st;
    size_t len;
    char body[]; /* [len + 1] */
};

status job_init(struct front *f)
{
    f->queue_tail = &f->queue;
    if (getrandom(&f->random, sizeof f->random, 0) != (ssize_t)sizeof f->random)
        return err(ERR_IO, "no randomness from the system: %s", strerror(errno));
    return OK;
}

static bool is_text(const struct route *rt)
{
    return rt->body == BODY_TOKENIZE || rt->body == BODY_DETOKENIZE;
}

/* Helper thread. */
static void job_work(void *arg)
{
    struct job *j = arg;
    j->st = request_parse_as(&j->r, j->route->body, &j->rules, j->scratch,
                             (struct text_view){j->body, j->len}, j->seed, &j->e);
    if (j->st != OK || !is_text(j->route))
        return;
    writer_init(&j->out);
    small_render_tokens(j->r, j->route->body, j->rules.info, &j->out);
}

static void answer_text(struct api *a, struct exchange *x, const struct writer *w)
{
    struct api_error e;
    if (w->failed) {
        error_set(&e, 503, "server_overloaded", NULL, "No memory for this answer now.");
        e.retry_after_s = 1;
        api_refuse(a, x, &e, false);
        return;
    }
    struct reply reply = {
        .status = 200, .content_type = "application/json", .body = w->p, .len = w->len};
    api_answer(a, x, &reply);
}

static void unlink_job(struct api *a, struct job *j)
{
    struct front *f = a->front;
    if (j->prev != NULL)
        j->prev->next = j->next;
    else
        f->jobs = j->next;
    if (j->next != NULL)
        j->next->prev = j->prev;
    f->job_bytes -= j->len;
}

static void free_job(struct job *j)
{
    request_free(j->r);
    if (j->out.p != NULL)
        writer_fini(&j->out);
    mem_free(j);
}

/* The exchange is no longer the job's. */
static struct exchange *take_exchange(struct api *a, struct job *j)
{
    struct exchange *x = j->x;
    j->x = NULL;
    a->front->n_waited_for--;
    exchange_set_user(x, NULL);
    return x;
}

static void start_queued(struct api *a);

static void job_done(void *arg)
{
    struct job *j = arg;
    struct api *a = j->api;
    struct front *f = a->front;
    f->idle[f->n_idle++] = j->scratch;
    f->n_running--;
    unlink_job(a, j);
    if (j->x != NULL) {
        struct exchange *x = take_exchange(a, j);
        if (j->st != OK) {
            api_refuse(a, x, &j->e, false);
        } else if (is_text(j->route)) {
            answer_text(a, x, &j->out);
        } else {
            struct request *r = j->r;
            j->r = NULL; /* call_start takes it */
            call_start(a, x, r);
        }
    }
    free_job(j);
    start_queued(a);
}

static void refuse_busy(struct api *a, struct exchange *x)
{
    struct api_error e;
    error_set(&e, 503, NULL, NULL, "The server is busy reading other requests.");
    e.retry_after_s = 1;
    metrics_rejected(a->metrics, e.code);
    api_refuse(a, x, &e, false);
}

/* Starts as many as may run. Those whose client has left are dropped before they cost anything. */
static void start_queued(struct api *a)
{
    struct front *f = a->front;
    while (f->queue != NULL && f->n_running < JOBS_AT_ONCE) {
        struct job *j = f->queue;
        f->queue = j->next_queued;
        if (f->queue == NULL)
            f->queue_tail = &f->queue;
        j->scratch = f->n_idle > 0 ? f->idle[--f->n_idle] : token_scratch_create();
        if (j->x != NULL && exchange_work(job_work, job_done, j) == OK) {
            f->n_running++;
            continue;
        }
        f->idle[f->n_idle++] = j->scratch;
        unlink_job(a, j);
        if (j->x != NULL)
            refuse_busy(a, take_exchange(a, j));
        free_job(j);
    }
}

static void enqueue(struct api *a, struct exchange *x, const struct route *rt,
                    struct text_view body)
{
    struct front *f = a->front;
    struct job *j = NULL;
    if (body.len <= JOB_MAX_BYTES - f->job_bytes)
        j = mem_try_alloc(sizeof *j + body.len + 1);
    if (j == NULL) {
        refuse_busy(a, x);
        return;
    }
    j->api = a;
    j->x = x;
    j->route = rt;
    j->rules = admit_rules(a, x);
    j->seed = splitmix_next(&f->random);
    j->len = body.len;
    memcpy(j->body, body.p, body.len);
    j->next = f->jobs;
    if (f->jobs != NULL)
        f->jobs->prev = j;
    f->jobs = j;
    f->job_bytes += j->len;
    f->n_waited_for++;
    *f->queue_tail = j;
    f->queue_tail = &j->next_queued;
    exchange_set_user(x, j);
    start_queued(a);
}

static void run_here(struct api *a, struct exchange *x, const struct route *rt,
                     struct text_view body)
{
    struct request *r = NULL;
    struct api_error e;
    struct writer w;
    const struct request_rules rules = admit_rules(a, x);
    status st = request_parse_as(&r, rt->body, &rules, a->scratch, body,
                                 splitmix_next(&a->front->random), &e);
    if (st != OK) {
        api_refuse(a, x, &e, false);
    } else if (!is_text(rt)) {
        call_start(a, x, r);
    } else {
        writer_init(&w);
        small_render_tokens(r, rt->body, a->info, &w);
        answer_text(a, x, &w);
        writer_fini(&w);
        request_free(r);
    }
}

void job_start(struct api *a, struct exchange *x, const struct route *rt)
{
    struct text_view body = exchange_body(x);
    if (body.len <= JOB_INLINE_BYTES)
        run_here(a, x, rt, body);
    else
        enqueue(a, x, rt, body);
}

bool job_gone(struct api *a, struct exchange *x)
{
    for (struct job *j = a->front->jobs; j != NULL; j = j->next) {
        if (j->x != x)
            continue;
        j->x = NULL;
        a->front->n_waited_for--;
        return true;
    }
    return false;
}

void job_abort_all(struct api *a, const struct api_error *e)
{
    for (struct job *j = a->front->jobs; j != NULL; j = j->next)
        if (j->x != NULL)
            api_refuse(a, take_exchange(a, j), e, true);
}

/* The server has closed every connection and waited for its helper threads. */
void job_fini(struct front *f)
{
    CHECK(f->jobs == NULL && f->n_running == 0);
    while (f->n_idle > 0)
        token_scratch_destroy(f->idle[--f->n_idle]);
}
