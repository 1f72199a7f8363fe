/* One HTTP connection as a state machine without a socket: bytes go in, bytes come out, time passes.
 * net.c drives it from libuv; tests/fuzz/http.c drives it from a byte string.
 *
 * One request is in flight at a time. While the API has it, what the client sends on is kept (up
 * to CONN_PENDING_MAX bytes, then reading stops) and waits its turn. The API is called only from
 * conn_input, conn_eof, conn_lost, conn_tick and conn_resume, which the loop calls; never from
 * inside an exchange_* function, so an answer cannot re-enter the API. Loop thread only. */
#ifndef SERVER_CONN_H
#define SERVER_CONN_H

#include "api/api.h"
#include "server/http_parse.h"
#include "server/http_text.h"
#include "server/rules.h"

enum {
    CONN_PENDING_MAX = 16 * 1024, /* pipelined bytes kept while a request is in flight */
    CONN_DISCARD_MAX = 64 * 1024, /* unread body or pipelined bytes read and dropped */
    CONN_LINGER_US = 1000 * 1000, /* ... for at most so long, so that no reset eats our answer */
    CONN_BODY_GRACE_US = 5000 * 1000, /* before the least rate of a body counts */
    CONN_PUSH_BYTES = 64 * 1024,      /* gathered without a return to the loop: send them now */
};

struct conn_limits {
    uint64_t header_us, body_us, idle_us, stall_us;
    uint64_t body_min_rate;   /* bytes per second after the grace */
    uint32_t max_requests;    /* per connection */
    size_t stream_hard_bytes; /* unsent bytes of a stream: more is a client that does not read */
};

struct conn;

/* What all connections share. */
struct conn_env {
    struct api *api;
    struct rules rules;
    struct conn_limits limits;
    uint64_t now_us;              /* set by the loop before it calls anything here */
    char date[HTTP_DATE_BYTES];   /* likewise, once a second */
    bool draining;                /* every answer closes its connection */
    void (*wake)(struct conn *c); /* c wants attention before the loop sleeps */
    void (*push)(
        struct conn *c); /* send c->out now if the socket takes it; must not call the API */
    void (*random)(uint8_t *p, size_t n);
    uint64_t n_requests; /* counter: heads accepted for routing */
};

enum conn_state {
    CONN_HEAD,    /* between requests, or reading a head */
    CONN_ASKING,  /* inside api_head */
    CONN_BODY,    /* reading a body the API wants */
    CONN_DISCARD, /* answered from the head; reading the rest of a small body */
    CONN_CALL,    /* the API has the whole request */
    CONN_LINGER,  /* last bytes are leaving; input is dropped */
    CONN_CLOSED,  /* the transport may free it */
};

struct exchange {
    void *user;
    struct text_view path, query, origin; /* in parse.text; origin: p NULL unless CORS applies */
    uint64_t arrival_us;
    char id[HTTP_ID_BYTES];
    struct caller caller;
};

struct conn_bytes {
    char *p;
    size_t len, room;
};

struct conn {
    struct exchange x; /* the request in flight */
    struct conn_env *env;
    enum conn_state state;
    bool running;  /* inside run */
    bool with_api; /* the API will answer or must be told that the client is gone */
    bool answered; /* the answer is complete in `out` */
    bool streaming, chunked;
    bool close_after; /* close when `out` has left */
    bool broken;      /* the socket failed, or a stream ran over: to be lost */
    bool peer_done;   /* the client will send no more */
    uint32_t n_requests;
    uint64_t since_us;    /* when this state's clock started */
    uint64_t progress_us; /* when the client last took a byte, or had taken all */
    uint64_t last_used_us;
    size_t discarded;
    struct conn_bytes out;  /* not yet given to the socket */
    size_t in_flight;       /* given to the socket's queue, not yet taken: kept by the transport */
    size_t long_bytes;      /* of a stream's pieces longer than its limit, until all is taken */
    size_t chunk_at;        /* offset in out of the open chunk's size line; SIZE_MAX: none */
    struct conn_bytes pend; /* received, waiting for its turn */
    struct http_parse parse;
};

void conn_init(struct conn *c, struct conn_env *env);
void conn_fini(struct conn *c);

void conn_input(struct conn *c, const char *p, size_t n);
void conn_eof(struct conn *c);  /* the client sends no more: it has left */
void conn_lost(struct conn *c); /* the socket failed: nothing can be sent any more */
void conn_tick(struct conn *c); /* checks deadlines */
/* After wake: closes the open chunk, starts the next pipelined request. */
void conn_resume(struct conn *c);
void conn_close_chunk(struct conn *c);
/* All of out has been taken and it was the last answer: the transport shuts down its side. */
bool conn_wants_shutdown(const struct conn *c);
void conn_shut(struct conn *c); /* it has; from now on the linger clock runs */

size_t conn_read_room(const struct conn *c); /* bytes to read at most; 0: stop reading */
size_t conn_unsent(const struct conn *c);
bool conn_is_idle(const struct conn *c);

/* For exchange.c. */
struct conn *conn_of(struct exchange *x);
bool conn_put(struct conn *c, const char *p, size_t n); /* false: no memory, c is broken */
bool conn_must_close(const struct conn *c);
void conn_answered(struct conn *c, bool close);
void conn_reply(struct conn *c, const struct reply *r);

bool conn_bytes_put(struct conn_bytes *b, const char *p, size_t n);
void conn_bytes_clear(struct conn_bytes *b);

#endif
