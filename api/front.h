/* What the files at the front of the API share: the routes (small.c), the bodies on their way to
 * becoming requests (job.c), and the glue (api.c). Loop thread only, but for job_work. */
#ifndef API_FRONT_H
#define API_FRONT_H

#include "api/internal.h"
#include "api/request_fields.h"

/* One line per path and method set; the table is `routes` in small.c. */
struct route {
    const char *path;
    bool prefix;       /* the path goes on with a name */
    bool open;         /* no key is asked for */
    bool needs_engine; /* 503 while the model loads, and from the drain on */
    unsigned methods;  /* 1 << enum http_method, ORed */
    const char *allow; /* header line for 405 and OPTIONS */
    /* Answers at once; NULL: a JSON body of kind `body` is to be parsed. */
    void (*answer)(struct api *a, struct exchange *x);
    unsigned body; /* enum body_kind */
};

const struct route *small_find(struct text_view path); /* NULL: no such path */

enum { JOBS_AT_ONCE = 4 };

struct job;

/* State of the front that no other file of api/ reads. */
struct front {
    struct job *jobs;                 /* alive, in no order */
    struct job *queue, **queue_tail;  /* wait for a helper thread, oldest first */
    uint32_t n_running, n_waited_for; /* n_waited_for: jobs whose client still waits */
    size_t job_bytes;                 /* bodies held */
    struct token_scratch *idle[JOBS_AT_ONCE];
    uint32_t n_idle;
    uint64_t random;           /* of SplitMix64: seeds of requests that name none */
    const char *model_name[1]; /* rules.names if none was configured */
    uint64_t now_us;           /* of the last tick */
    uint64_t quiet_us;         /* when there was last nothing to do */
    uint64_t mean_step_us;
    uint64_t logged_us;
    struct msg_step logged; /* state of the engine at the last log line */
};

/* job.c: parses a body, here or on a helper thread, and then starts the call or answers. */
status job_init(struct front *f);
void job_fini(struct front *f);
void job_start(struct api *a, struct exchange *x, const struct route *rt);
bool job_gone(struct api *a, struct exchange *x); /* true: x was waiting for a job */
void job_abort_all(struct api *a, const struct api_error *e);

/* api.c: the two ways of answering, both counted. */
void api_refuse(struct api *a, struct exchange *x, const struct api_error *e, bool close);
void api_answer(struct api *a, struct exchange *x, const struct reply *r);
/* Why no model answers now: 503 in *e; false: it does. */
bool api_unready(const struct api *a, struct api_error *e);
bool api_stalled(const struct api *a);

/* small.c: the answer to /tokenize or /detokenize; any thread. */
void small_render_tokens(const struct request *r, unsigned body, const struct engine_info *info,
                         struct writer *w);

#endif
