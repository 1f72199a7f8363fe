/* What the files of api/ share. Loop thread only. */
#ifndef API_INTERNAL_H
#define API_INTERNAL_H

#include "api/api.h"
#include "api/request.h"
#include "api/writer.h"

struct calls;   /* generations in flight: api/call.c */
struct metrics; /* api/metrics.c */
struct auth;    /* api/auth.c */

struct api {
    struct api_config cfg;          /* strings borrowed from the caller for the process's life */
    const struct engine_info *info; /* NULL while loading */
    struct mailbox *mail;           /* NULL while loading */
    struct request_rules rules;     /* valid when info is */
    struct token_scratch *scratch;  /* for work on the loop thread */
    struct auth *auth;
    struct calls *calls;
    struct metrics *metrics;
    struct server_stats server;
    struct msg_step engine;   /* the last MSG_STEP */
    uint64_t engine_heard_us; /* when it came */
    uint64_t start_unix_s;    /* "created" of the model cards */
    bool draining, engine_dead;
    char engine_error[256];
};

/* api/call.c: from a parsed request to the last byte of its answer. */
status calls_create(struct calls **out, struct api *a);
void calls_destroy(struct calls *c);
/* Takes r. Admits (queue bounds: 503 server_overloaded with Retry-After), submits every sequence to
 * the engine, and answers when events come. The exchange's user pointer becomes the call. */
void call_start(struct api *a, struct exchange *x, struct request *r);
void call_gone(struct api *a, struct exchange *x); /* the client left: cancels all its sequences */
void calls_event(struct api *a, const struct msg_head *m); /* MSG_TOKEN, MSG_PROMPT, MSG_DONE */
void calls_flush(struct api *a); /* after a batch of events: writes what streams have gathered */
void calls_tick(struct api *a, uint64_t now_us); /* queue timeouts, pings, delayed heads */
uint32_t calls_active(const struct calls *c);    /* calls not yet answered to the last byte */
uint32_t calls_queued(const struct calls *c);    /* sequences submitted and not yet scheduled */
void calls_abort_all(struct api *a, const char *code, const char *message);

/* api/metrics.c: vLLM's names (reference/api.md 3.1) with model_name and engine labels. */
enum metric_phase {
    METRIC_TTFT,
    METRIC_ITL,
    METRIC_TPOT,
    METRIC_E2E,
    METRIC_QUEUE,
    METRIC_INFERENCE,
    METRIC_PREFILL,
    METRIC_DECODE
};
status metrics_create(struct metrics **out, const char *model_name, const struct engine_info *info);
void metrics_destroy(struct metrics *m);
void metrics_time(struct metrics *m, enum metric_phase phase, double seconds);
void metrics_finished(struct metrics *m, const char *reason, uint32_t prompt_tokens,
                      uint32_t output_tokens, uint32_t max_tokens, uint32_t n, uint32_t preempted);
void metrics_http(struct metrics *m, const char *handler, const char *method, int status,
                  double seconds);
void metrics_rejected(struct metrics *m, const char *reason);
void metrics_step(struct metrics *m, const struct msg_step *s);
void metrics_render(struct metrics *m, const struct api *a, struct writer *out);

/* api/auth.c */
status auth_create(struct auth **out, const char *const *keys, uint32_t n);
void auth_destroy(struct auth *au);
bool auth_open(const struct auth *au); /* no keys configured */
/* Authorization: Bearer, X-Api-Key or api-key; false: 401. Constant time in the key. Headers that
 * disagree are refused. */
bool auth_check(const struct auth *au, const struct exchange *x);

#endif
