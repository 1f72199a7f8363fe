/* The API as the server sees it: where requests, time and engine events go in. Loop thread only. */
#ifndef API_API_H
#define API_API_H

#include "api/exchange.h"
#include "engine/engine.h"

struct api;

struct api_config {
    const char *const *keys; /* [n_keys] accepted API keys; none: no check. Copied as digests */
    uint32_t n_keys;
    const char *tenants_file;        /* then no keys; NULL: one tenant, which may everything */
    const char *const *served_names; /* [n_names]; none: the model's file name */
    uint32_t n_names;
    bool accept_any_model, strict_fields;
    bool prompt_tokens_details; /* usage.prompt_tokens_details when > 0 */
    bool force_include_usage;
    bool reject_overflow;  /* --max-tokens-overflow reject */
    bool trust_chat_input; /* control tokens in chat messages are recognised */
    bool disable_metrics;
    uint32_t max_n, max_logprobs; /* 8, 20 */
    uint32_t default_max_tokens;  /* chat without max_tokens; 0: to the end of the context */
    uint32_t max_queued_requests; /* 256 */
    uint64_t max_queued_tokens;   /* 1 Mi */
    uint32_t queue_timeout_s;     /* 30: waited so long without being scheduled: 503 */
    uint64_t max_body_bytes;      /* 0: max(4 MiB, 20 bytes * max_model_len) */
    const char *version;
    /* Fields the generation_config gave as defaults; NAN: not given. */
    double default_temperature, default_top_p;
    int32_t default_top_k;
};

/* Answers before the engine is there: /health 503 "Loading model", /v1/... 503. */
status api_create(struct api **out, const struct api_config *cfg);
/* The engine is ready: from now on requests are served. info and mailbox must outlive the api. */
void api_engine_ready(struct api *a, const struct engine_info *info, struct mailbox *mail);
void api_destroy(struct api *a);

uint64_t api_max_body(const struct api *a);
/* Called with the headers: authentication first, then routing, size, media type. declared_len: from
 * Content-Length, or UINT64_MAX if chunked, 0 if there is no body. */
enum head_verdict api_head(struct api *a, struct exchange *x, uint64_t declared_len);
void api_body(struct api *a, struct exchange *x);
void api_gone(struct api *a, struct exchange *x);
/* The server refuses what it can see itself (bad framing, limits): a reply in the API's error shape.
 * Fills buf with the JSON body and returns its length. */
size_t api_error_body(char *buf, size_t room, int http_status, const char *code,
                      const char *message);

void api_events(struct api *a);                /* the mailbox has events */
void api_writable(struct api *a);              /* a client has read what a stream had written */
void api_tick(struct api *a, uint64_t now_us); /* about every 100 ms */

/* Reads the tenants file again: all of it counts from now on, or nothing has changed and the log says why. */
void api_reload(struct api *a);

/* The engine has said that it ended (MSG_FAILED); every request was answered with an error. */
bool api_engine_dead(const struct api *a);
/* Drain: new requests get 503 shutting_down. */
void api_drain(struct api *a);
uint32_t api_n_active(const struct api *a); /* requests not yet answered to the last byte */
/* Ends every stream with an error event, every other request with 503. */
void api_abort_all(struct api *a, const char *code, const char *message);

/* Numbers the server measures, for /metrics. */
struct server_stats {
    uint32_t connections;
    uint64_t accepted, refused, requests, bytes_in, bytes_out, stream_unsent_bytes;
    uint64_t loop_lag_us; /* worst of the last interval */
};
void api_set_server_stats(struct api *a, const struct server_stats *s);

#endif
