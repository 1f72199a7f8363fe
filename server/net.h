/* Sockets: listening, accepting within caps, moving bytes between libuv and struct conn.
 * Owns every connection. Loop thread only. */
#ifndef SERVER_NET_H
#define SERVER_NET_H

#include <uv.h>

#include "server/conn.h"

enum { NET_LISTENERS_MAX = 4, NET_TURNED_AWAY_MAX = 32 };

struct link; /* one accepted socket and its struct conn */

struct net_config {
    const char *host; /* address literal, "localhost", or a name to look up once at start */
    uint16_t port;    /* 0: any free one */
    uint32_t max_connections, max_per_address;
    bool cap_loopback; /* max_per_address counts for loopback peers too */
};

/* An error of accept that stays (a full file table, no memory) would keep libuv inside its accept
 * loop for ever. So the handle is closed then and made again by the next tick, over a duplicate of
 * its descriptor: the socket and its backlog live on. */
struct listener {
    uv_tcp_t *tcp; /* NULL: resting until the next tick */
    int spare_fd;
};

struct net {
    struct conn_env env;
    struct net_config cfg;
    uv_loop_t *loop;
    struct listener listeners[NET_LISTENERS_MAX];
    uint32_t n_listeners;
    uint16_t port;      /* the one bound */
    uv_prepare_t flush; /* before each sleep: what was gathered leaves */
    struct link *links; /* all, newest first */
    struct link *dirty; /* want attention before the loop sleeps */
    uint32_t n_links, n_turned_away;
    uint64_t accepted, refused, bytes_in, bytes_out;
    uint64_t complained_us;   /* when a failing accept was last logged */
    char read_buf[64 * 1024]; /* shared: libuv reads and we parse before it reads again */
};

/* env: api, rules, limits and random are set by the caller before; wake and push are set here. */
status net_open(struct net *n, uv_loop_t *loop, const struct net_config *cfg);
void net_address(const struct net *n, char *out, size_t room); /* "http://127.0.0.1:8000" */

void net_tick(struct net *n); /* deadlines; about every 100 ms, env.now_us set */
void net_stats(const struct net *n, struct server_stats *s);
uint32_t net_unsent(const struct net *n); /* connections that still owe bytes to their client */
void net_drain(struct net *n);            /* closes idle connections; answers close theirs */
void net_close(struct net *n);            /* closes everything; run the loop until it is empty */

#endif
