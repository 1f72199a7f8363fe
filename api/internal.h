/* What the files of api/ share. Loop thread only. */
#ifndef API_INTERNAL_H
#define API_INTERNAL_H

#include "api/api.h"
#include "api/metrics.h"
#include "api/request.h"
#include "api/writer.h"

struct calls; /* generations in flight: api/call.c */
struct auth;  /* api/auth.c */
struct front; /* api/front.h: bodies being parsed, heartbeat, log */

struct api {
    struct api_config cfg;          /* strings borrowed from the caller for the process's life */
    const struct engine_info *info; /* NULL while loading */
    struct mailbox *mail;           /* NULL while loading */
    struct request_rules rules;     /* valid when info is */
    struct token_scratch *scratch;  /* for work on the loop thread */
    struct auth *auth;
    struct calls *calls;
    struct metrics *metrics;
    struct front *front;
    struct server_stats server;
    struct msg_step engine;   /* the last MSG_STEP */
    uint64_t engine_heard_us; /* when it came */
    uint64_t start_unix_s;    /* "created" of the model cards */
    bool draining, engine_dead;
    char engine_error[256];
    uint64_t access_second; /* api/access.c: of access_lines */
    uint32_t access_lines, access_dropped;
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
void calls_abort_all(struct api *a, const char *code, const char *message);

/* api/access.c: an answer has been decided; counts it and writes its line in the log:
 * `POST /v1/completions 200 12.3 ms, 5 prompt tokens, 16 output tokens, id ...`. Probes and scrapes
 * are counted but not logged, and beyond ACCESS_LINES_PER_S lines are only counted: a flood of
 * refusals must not fill a disk. */
enum { ACCESS_LINES_PER_S = 200 };
struct access {
    const char *method, *handler; /* handler: a path of the route table, or "none" */
    int http_status;
    double seconds;
    uint64_t prompt_tokens, output_tokens; /* both 0: nothing was generated */
};
void access_note(struct api *a, const struct exchange *x, const struct access *l);

/* api/auth.c */
status auth_create(struct auth **out, const char *const *keys, uint32_t n);
void auth_destroy(struct auth *au);
bool auth_open(const struct auth *au); /* no keys configured */
/* Authorization: Bearer, X-Api-Key or api-key; false: 401. Constant time in the key. Headers that
 * disagree are refused. */
bool auth_check(const struct auth *au, const struct exchange *x);

#endif
