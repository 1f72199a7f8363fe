/* A client's connection to an OpenAI server: one POST at a time, its answer as events (libuv, llhttp).
 *
 * The connection is kept between requests where the server keeps it; one that the server closed while
 * nobody asked is opened again without a word. Times are taken once per read, before anything is
 * looked at. Everything runs on the loop's thread. */
#ifndef API_LOAD_WIRE_H
#define API_LOAD_WIRE_H

#include "kernels/base.h"

#include <uv.h>

enum wire_end {
    WIRE_DONE,      /* the whole answer came, [DONE] included */
    WIRE_CONNECT,   /* no connection */
    WIRE_STATUS,    /* another status than 200: `http` says which, text is the body's beginning */
    WIRE_CUT,       /* the answer ended, or its connection did, before [DONE] */
    WIRE_MALFORMED, /* no HTTP, or no event stream */
    WIRE_TIMEOUT,   /* nothing came for timeout_s */
};

struct wire_result {
    enum wire_end end;
    int http;         /* status; 0: none came */
    const char *text; /* why, for people; "" with WIRE_DONE. Valid during the call */
};

/* event: the payload of one event, [DONE] excepted; borrowed. done: once per wire_post, after which the
 * wire is free for another. Both may not close the wire; done may post. */
struct wire_handler {
    void (*event)(void *arg, const char *payload, size_t len, uint64_t now_us);
    void (*done)(void *arg, const struct wire_result *r, uint64_t now_us);
    void *arg;
};

/* Where: an address that answered, and the head of every request. Shared by wires; constant. */
struct wire_target {
    struct sockaddr_storage address;
    char host[256]; /* of the Host line */
    char path[512]; /* "/v1/completions" */
    char key[512];  /* of the Authorization line; "": none */
    uint32_t timeout_s;
};

/* url: http://HOST[:PORT][/PREFIX], where a prefix of nothing is /v1. Connects once to see which address
 * answers. ERR_ARG: the URL; ERR_IO: nobody answers there. */
status wire_resolve(struct wire_target *t, const char *url, const char *endpoint, const char *key);

struct wire;
struct wire *wire_create(uv_loop_t *loop, const struct wire_target *t,
                         const struct wire_handler *h);
/* body is borrowed until done. */
void wire_post(struct wire *w, const char *body, size_t len);
void wire_destroy(
    struct wire *w); /* an open request is forgotten; memory goes with the loop's turn */

#endif
