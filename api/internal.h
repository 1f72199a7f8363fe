/* What the files of api/ share. Loop thread only. */
#ifndef API_INTERNAL_H
#define API_INTERNAL_H

#include "api/api.h"
#include "api/metrics.h"
#include "api/request.h"
#include "api/roster.h"
#include "api/writer.h"

struct call;  /* one of them */
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
    struct roster *roster; /* NULL: no tenants */
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
void access_note(struct api *a, struct exchange *x, const struct access *l);

/* api/auth.c */
status auth_create(struct auth **out, const char *const *keys, uint32_t n);
/* The keys of t instead of those of `before`, which is gone then; the secret stays. */
struct auth *auth_replace(struct auth *before, const struct tenants *t);
void auth_destroy(struct auth *au);
bool auth_open(const struct auth *au); /* nobody is asked for a key */
/* Authorization: Bearer, X-Api-Key or api-key: 1 + the key's place among those given, 0: no such key, or
 * it has expired. Constant time in the key. Headers that disagree are refused. */
uint32_t auth_find(const struct auth *au, const struct exchange *x, uint64_t unix_s);
/* A client's salt of the prefix cache becomes one that nobody can guess and no other tenant has. */
void auth_salt(const struct auth *au, const char *tenant, uint64_t salt[2]);

/* api/admit.c: what tenants may do; without --tenants everybody may everything. */
/* The key, and whose it is; false: 401. limited: the answer tells what is left of its limits. */
bool admit_caller(struct api *a, struct exchange *x, bool limited);
/* Before the body: is there anything left for a generation? false: *e says what not. */
bool admit_head(struct api *a, struct exchange *x, struct api_error *e);
bool admit_body(struct api *a, struct exchange *x, struct api_error *e); /* counts the request */
/* What this caller's bodies may hold. */
struct request_rules admit_rules(const struct api *a, struct exchange *x);
/* The request is known: false: *e. Else *slot is whose it is; NULL without tenants. */
bool admit_request(struct api *a, struct exchange *x, const struct request *r,
                   struct roster_slot **slot, struct api_error *e);
/* It was admitted and exists: charges it, until admit_settle says what it came to. */
void admit_charge(struct api *a, struct exchange *x, struct call *call);
void admit_settle(struct api *a, struct call *call);
/* It is refused with *e: nothing is charged for what is no fault of the caller's. */
void admit_refused(struct api *a, struct exchange *x, const struct api_error *e);

#endif
