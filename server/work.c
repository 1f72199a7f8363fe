/* Helper threads (work.h): a large body is parsed here, and a slow answer made, while the loop goes
 * on. libuv's pool does the work; this file bounds its queue and frees the job on the loop, whatever
 * became of the request. */
#include "server/work.h"

/* exchange_work names no server, so there is one loop per process. Loop thread only; `work` runs
 * elsewhere and touches nothing here. */
static struct {
    uv_loop_t *loop;
    uint32_t pending;
} pool;

struct job {
    uv_work_t req;
    void (*work)(void *arg);
    void (*done)(void *arg);
    void *arg;
};

void work_init(uv_loop_t *loop)
{
    pool.loop = loop;
}

static void on_work(uv_work_t *req)
{
    struct job *j = req->data;
    j->work(j->arg);
}

static void on_done(uv_work_t *req, int rc)
{
    struct job *j = req->data;
    (void)rc; /* nothing is ever cancelled: the job must free its argument */
    pool.pending--;
    j->done(j->arg);
    mem_free(j);
}

status exchange_work(void (*work)(void *arg), void (*done)(void *arg), void *arg)
{
    if (pool.pending >= WORK_QUEUE_MAX)
        return err(ERR_FULL, "%u jobs are waiting for a helper thread", pool.pending);
    struct job *j = mem_alloc(sizeof *j);
    *j = (struct job){.work = work, .done = done, .arg = arg};
    j->req.data = j;
    int rc = uv_queue_work(pool.loop, &j->req, on_work, on_done);
    if (rc != 0) {
        mem_free(j);
        return err(ERR_FULL, "no helper thread: %s", uv_strerror(rc));
    }
    pool.pending++;
    return OK;
}
