/* See net.h. Writing: what the API gathered during one turn of the loop leaves just before the loop
 * sleeps (uv_prepare), in one uv_try_write per connection. Only if the socket does not take all of
 * it does a uv_write follow, with a request that lives in the link: no allocation either way. */
#include "server/net.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kernels/log.h"

enum { SECOND_US = 1000000, LISTEN_BACKLOG = 1024 };

struct link {
    uv_tcp_t tcp;
    uv_write_t write;
    uv_shutdown_t shutdown;
    struct net *net;
    struct link *next, **at; /* in net->links */
    struct link *next_dirty;
    bool dirty, reading, writing, shut, closing;
    bool turned_away; /* over a cap: gets a 503 and no more */
    size_t reading_room;
    struct conn_bytes flight; /* given to uv_write, must not move */
    size_t flight_left;
    struct sockaddr_storage peer;
    struct conn conn;
};

static struct link *link_of(struct conn *c)
{
    return (struct link *)(void *)((char *)c - offsetof(struct link, conn));
}

static struct net *net_of(struct conn *c)
{
    return link_of(c)->net;
}

static void clock_now(struct net *n)
{
    n->env.now_us = clock_us();
}

static void link_wake(struct conn *c)
{
    struct link *l = link_of(c);
    if (l->dirty || l->closing)
        return;
    l->dirty = true;
    l->next_dirty = l->net->dirty;
    l->net->dirty = l;
}

/* ---- writing ---- */

static void on_written(uv_write_t *w, int rc)
{
    struct link *l = w->data;
    l->writing = false;
    l->flight.len = l->flight_left = l->conn.in_flight = 0;
    conn_bytes_clear(&l->flight);
    clock_now(l->net);
    if (rc < 0)
        l->conn.broken = true;
    else
        l->conn.progress_us = l->net->env.now_us;
    if (l->conn.streaming)
        api_writable(l->net->env.api);
    link_wake(&l->conn);
}

/* The socket is full: the rest goes to libuv's queue, and what comes meanwhile gathers in the other
 * buffer. */
static void write_rest(struct link *l, size_t taken)
{
    struct conn_bytes swap = l->flight;
    l->flight = l->conn.out;
    l->conn.out = swap;
    l->flight_left = l->conn.in_flight = l->flight.len - taken;
    uv_buf_t rest = uv_buf_init(l->flight.p + taken, (unsigned)l->flight_left);
    l->write.data = l;
    if (uv_write(&l->write, (uv_stream_t *)&l->tcp, &rest, 1, on_written) != 0)
        l->conn.broken = true;
    else
        l->writing = true;
}

/* Never calls the API: exchange_stream_write comes here when much has gathered. */
static void link_push(struct conn *c)
{
    struct link *l = link_of(c);
    if (l->writing || l->closing || c->broken)
        return;
    conn_close_chunk(c);
    if (c->out.len == 0)
        return;
    uv_buf_t all = uv_buf_init(c->out.p, (unsigned)c->out.len);
    int rc = uv_try_write((uv_stream_t *)&l->tcp, &all, 1);
    if (rc < 0 && rc != UV_EAGAIN) {
        c->broken = true;
        link_wake(c);
        return;
    }
    size_t taken = rc < 0 ? 0 : (size_t)rc;
    net_of(c)->bytes_out += c->out.len; /* unsent ones are subtracted when reported */
    if (taken > 0)
        c->progress_us = c->env->now_us;
    if (taken == c->out.len)
        conn_bytes_clear(&c->out);
    else
        write_rest(l, taken);
}

/* ---- closing ---- */

static void on_link_closed(uv_handle_t *h)
{
    struct link *l = h->data;
    conn_fini(&l->conn);
    mem_free(l->flight.p);
    mem_free(l);
}

static void link_close(struct link *l, bool reset)
{
    struct net *n = l->net;
    if (l->closing)
        return;
    l->closing = true;
    *l->at = l->next;
    if (l->next != NULL)
        l->next->at = l->at;
    if (l->turned_away)
        n->n_turned_away--;
    else
        n->n_links--;
    /* A reset gives the kernel's buffers back at once; a reader that stalls would hold them. */
    if (reset && !l->shut && uv_tcp_close_reset(&l->tcp, on_link_closed) == 0)
        return;
    uv_close((uv_handle_t *)&l->tcp, on_link_closed);
}

static void on_shutdown(uv_shutdown_t *s, int rc)
{
    struct link *l = s->data;
    (void)rc;
    if (l->closing)
        return;
    clock_now(l->net);
    conn_shut(&l->conn);
}

static void link_shutdown(struct link *l)
{
    if (l->shut || l->writing)
        return;
    l->shut = true;
    l->shutdown.data = l;
    if (uv_shutdown(&l->shutdown, (uv_stream_t *)&l->tcp, on_shutdown) != 0)
        conn_lost(&l->conn);
}

/* ---- reading ---- */

static void on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *buf)
{
    struct link *l = h->data;
    (void)suggested;
    size_t room = conn_read_room(&l->conn);
    if (room > sizeof l->net->read_buf)
        room = sizeof l->net->read_buf;
    *buf = uv_buf_init(l->net->read_buf, (unsigned)room);
}

static void on_read(uv_stream_t *s, ssize_t n, const uv_buf_t *buf)
{
    struct link *l = s->data;
    if (n == 0)
        return;
    clock_now(l->net);
    if (n > 0) {
        l->net->bytes_in += (uint64_t)n;
        conn_input(&l->conn, buf->base, (size_t)n);
    } else if (n == UV_EOF) {
        conn_eof(&l->conn);
    } else if (n != UV_ENOBUFS) {
        conn_lost(&l->conn);
    }
    link_wake(&l->conn);
}

static void set_reading(struct link *l)
{
    bool want = !l->closing && conn_read_room(&l->conn) > 0;
    if (want == l->reading)
        return;
    l->reading = want;
    if (want)
        uv_read_start((uv_stream_t *)&l->tcp, on_alloc, on_read);
    else
        uv_read_stop((uv_stream_t *)&l->tcp);
}

/* While reading is stopped libuv cannot tell that the client left; the kernel can. */
static bool peer_left(struct link *l)
{
    uv_os_fd_t fd;
    if (uv_fileno((uv_handle_t *)&l->tcp, &fd) != 0)
        return true;
    struct pollfd p = {.fd = fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

/* ---- one turn ---- */

static void link_settle(struct link *l)
{
    struct conn *c = &l->conn;
    /* Still marked dirty: what it wakes itself for here is done below. */
    conn_resume(c);
    link_push(c);
    if (conn_wants_shutdown(c))
        link_shutdown(l);
    if (c->broken && c->state != CONN_CLOSED)
        conn_lost(c);
    if (c->state == CONN_CLOSED)
        link_close(l, c->broken);
    set_reading(l);
    l->dirty = false;
}

static void on_flush(uv_prepare_t *p)
{
    struct net *n = p->data;
    clock_now(n);
    while (n->dirty != NULL) {
        struct link *l = n->dirty;
        n->dirty = l->next_dirty;
        link_settle(l);
    }
}

/* ---- accepting ---- */

static bool same_address(const struct sockaddr_storage *a, const struct sockaddr_storage *b)
{
    if (a->ss_family != b->ss_family)
        return false;
    if (a->ss_family == AF_INET)
        return ((const struct sockaddr_in *)(const void *)a)->sin_addr.s_addr ==
               ((const struct sockaddr_in *)(const void *)b)->sin_addr.s_addr;
    /* A /64 is one customer: whoever has an IPv6 address has 2^64 of them. */
    return memcmp(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr,
                  &((const struct sockaddr_in6 *)(const void *)b)->sin6_addr, 8) == 0;
}

static bool is_loopback(const struct sockaddr_storage *a)
{
    char text[64] = "";
    if (a->ss_family == AF_INET)
        uv_ip4_name((const struct sockaddr_in *)(const void *)a, text, sizeof text);
    else
        uv_ip6_name((const struct sockaddr_in6 *)(const void *)a, text, sizeof text);
    return http_text_is_loopback((struct text_view){text, strlen(text)});
}

/* Close to the cap, those who hold a connection without using it go first. */
static void shed_idle(struct net *n)
{
    struct link *oldest_idle = NULL, *oldest_head = NULL;
    uint32_t n_head = 0;
    for (struct link *l = n->links; l != NULL; l = l->next) {
        struct conn *c = &l->conn;
        if (l->turned_away || c->state != CONN_HEAD)
            continue;
        bool fresh = c->n_requests == 0 || c->parse.started;
        n_head += fresh;
        struct link **oldest = fresh ? &oldest_head : &oldest_idle;
        if (*oldest == NULL || c->since_us < (*oldest)->conn.since_us)
            *oldest = l;
    }
    if (oldest_idle != NULL && n->n_links >= n->cfg.max_connections - n->cfg.max_connections / 10)
        conn_lost(&oldest_idle->conn);
    /* A second's patience: a burst of honest connections also starts without a head. */
    if (n_head > n->cfg.max_connections / 4 &&
        n->env.now_us - oldest_head->conn.since_us > SECOND_US)
        conn_lost(&oldest_head->conn);
}

static bool over_caps(struct net *n, const struct link *fresh)
{
    if (n->n_links >= n->cfg.max_connections)
        return true;
    if (!n->cfg.cap_loopback && is_loopback(&fresh->peer))
        return false;
    uint32_t same = 0;
    for (const struct link *l = n->links; l != NULL; l = l->next)
        same += l != fresh && !l->turned_away && same_address(&l->peer, &fresh->peer);
    return same >= n->cfg.max_per_address;
}

static void turn_away(struct link *l)
{
    struct net *n = l->net;
    char body[1024]; /* as api_error_body wants it */
    n->refused++;
    if (n->n_turned_away >= NET_TURNED_AWAY_MAX) {
        l->turned_away = true;
        n->n_turned_away++;
        conn_lost(&l->conn);
        return;
    }
    l->turned_away = true;
    n->n_turned_away++;
    struct reply r = {.status = 503,
                      .content_type = "application/json",
                      .extra = "Retry-After: 1\r\n",
                      .body = body,
                      .close = true};
    r.len = api_error_body(body, sizeof body, 503, "server_overloaded", "Too many connections");
    conn_reply(&l->conn, &r);
    l->conn.state = CONN_LINGER;
}

static void link_list(struct net *n, struct link *l)
{
    l->next = n->links;
    l->at = &n->links;
    if (n->links != NULL)
        n->links->at = &l->next;
    n->links = l;
}

static void on_handle_closed(uv_handle_t *h)
{
    mem_free(h);
}

static void listener_rest(struct net *n, uv_tcp_t *tcp, int rc)
{
    for (uint32_t i = 0; i < n->n_listeners; i++)
        if (n->listeners[i].tcp == tcp && n->listeners[i].spare_fd >= 0) {
            n->listeners[i].tcp = NULL;
            uv_close((uv_handle_t *)tcp, on_handle_closed);
            if (n->complained_us == 0 ||
                n->env.now_us - n->complained_us > 10 * (uint64_t)SECOND_US) {
                n->complained_us = n->env.now_us;
                log_line(LOG_WARN, "accept: %s; trying again every tick", uv_strerror(rc));
            }
        }
}

static void on_connection(uv_stream_t *listener, int rc)
{
    struct net *n = listener->data;
    clock_now(n);
    if (rc < 0) { /* libuv's own remedy, closing what it cannot serve, has not helped */
        n->refused++;
        listener_rest(n, (uv_tcp_t *)listener, rc);
        return;
    }
    struct link *l = mem_alloc(sizeof *l);
    l->net = n;
    CHECK(uv_tcp_init(n->loop, &l->tcp) == 0);
    l->tcp.data = l;
    conn_init(&l->conn, &n->env);
    link_list(n, l);
    if (uv_accept(listener, (uv_stream_t *)&l->tcp) != 0) {
        n->n_links++;
        link_close(l, false);
        return;
    }
    int len = sizeof l->peer, bytes = 64 * 1024;
    uv_tcp_getpeername(&l->tcp, (struct sockaddr *)&l->peer, &len);
    uv_tcp_nodelay(&l->tcp, 1);
    uv_tcp_keepalive(&l->tcp, 1, 60); /* a client that lost its network sends no FIN */
    /* Small, so that back-pressure is felt here and not after megabytes in the kernel. */
    uv_send_buffer_size((uv_handle_t *)&l->tcp, &bytes);
    n->accepted++;
    shed_idle(n);
    if (over_caps(n, l))
        turn_away(l);
    else
        n->n_links++;
    link_wake(&l->conn);
}

/* ---- listening ---- */

static status explain_bind(const struct net_config *cfg, int rc)
{
    if (rc == UV_EADDRINUSE)
        return err(ERR_IO,
                   "port %u on %s is in use: stop what listens there or pass --port N "
                   "(0 picks a free one)",
                   cfg->port, cfg->host);
    if (rc == UV_EACCES)
        return err(ERR_IO,
                   "no permission to listen on port %u: ports below 1024 need privileges; "
                   "pass --port 8000",
                   cfg->port);
    if (rc == UV_EADDRNOTAVAIL)
        return err(ERR_IO,
                   "%s is not an address of this machine: pass --host 127.0.0.1, or 0.0.0.0 "
                   "for all",
                   cfg->host);
    return err(ERR_IO, "cannot listen on %s port %u: %s", cfg->host, cfg->port, uv_strerror(rc));
}

static uv_tcp_t *listener_handle(struct net *n)
{
    uv_tcp_t *t = mem_alloc(sizeof *t);
    CHECK(uv_tcp_init(n->loop, t) == 0);
    t->data = n;
    return t;
}

static void listener_wake(struct net *n, struct listener *ln)
{
    int again = fcntl(ln->spare_fd, F_DUPFD_CLOEXEC, 3);
    if (again < 0)
        return; /* the next tick tries again */
    ln->tcp = listener_handle(n);
    int fd = ln->spare_fd;
    ln->spare_fd = again;
    CHECK(uv_tcp_open(ln->tcp, fd) == 0);
    int rc = uv_listen((uv_stream_t *)ln->tcp, LISTEN_BACKLOG, on_connection);
    if (rc != 0)
        listener_rest(n, ln->tcp, rc);
}

static status listen_on(struct net *n, const struct sockaddr *addr)
{
    struct listener *ln = &n->listeners[n->n_listeners++];
    uv_tcp_t *t = ln->tcp = listener_handle(n);
    uv_os_fd_t fd;
    int rc;
    ln->spare_fd = -1;
    if ((rc = uv_tcp_bind(t, addr, 0)) != 0 ||
        (rc = uv_listen((uv_stream_t *)t, LISTEN_BACKLOG, on_connection)) != 0 ||
        (rc = uv_fileno((uv_handle_t *)t, &fd)) != 0)
        return explain_bind(&n->cfg, rc);
    ln->spare_fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    struct sockaddr_storage got;
    int len = sizeof got;
    uv_tcp_getsockname(t, (struct sockaddr *)&got, &len);
    n->port = ntohs(got.ss_family == AF_INET ? ((struct sockaddr_in *)(void *)&got)->sin_port
                                             : ((struct sockaddr_in6 *)(void *)&got)->sin6_port);
    return OK;
}

static status listen_all(struct net *n)
{
    const char *host = n->cfg.host;
    char port[8];
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICHOST | AI_NUMERICSERV},
                    *list = NULL;
    snprintf(port, sizeof port, "%u", n->cfg.port);
    if (strcmp(host, "localhost") == 0)
        host = "127.0.0.1"; /* every client finds it, whatever its resolver prefers */
    if (!http_text_is_ip((struct text_view){host, strlen(host)}))
        hints.ai_flags &= ~AI_NUMERICHOST; /* the only name this process ever looks up */
    int rc = getaddrinfo(host, port, &hints, &list);
    if (rc != 0)
        return err(ERR_ARG, "--host %s: %s; pass an address of this machine, such as 127.0.0.1",
                   host, gai_strerror(rc));
    status st = OK;
    for (struct addrinfo *a = list; a != NULL && st == OK; a = a->ai_next)
        if (n->n_listeners < NET_LISTENERS_MAX && (n->cfg.port != 0 || n->n_listeners == 0))
            st = listen_on(n, a->ai_addr);
    freeaddrinfo(list);
    return st;
}

status net_open(struct net *n, uv_loop_t *loop, const struct net_config *cfg)
{
    n->cfg = *cfg;
    n->loop = loop;
    n->env.wake = link_wake;
    n->env.push = link_push;
    clock_now(n);
    CHECK(uv_prepare_init(loop, &n->flush) == 0);
    n->flush.data = n;
    uv_prepare_start(&n->flush, on_flush);
    return listen_all(n);
}

void net_address(const struct net *n, char *out, size_t room)
{
    bool v6 = strchr(n->cfg.host, ':') != NULL;
    snprintf(out, room, v6 ? "http://[%s]:%u" : "http://%s:%u", n->cfg.host, n->port);
}

/* ---- time ---- */

static void link_tick(struct link *l)
{
    struct conn *c = &l->conn;
    if (l->writing) {
        size_t left = uv_stream_get_write_queue_size((uv_stream_t *)&l->tcp);
        if (left < l->flight_left)
            c->progress_us = c->env->now_us;
        l->flight_left = c->in_flight = left;
    }
    if (!l->reading && !l->closing && !c->peer_done && peer_left(l))
        conn_lost(c);
    conn_tick(c);
}

void net_tick(struct net *n)
{
    for (uint32_t i = 0; i < n->n_listeners; i++)
        if (n->listeners[i].tcp == NULL && n->listeners[i].spare_fd >= 0)
            listener_wake(n, &n->listeners[i]);
    for (struct link *l = n->links, *next; l != NULL; l = next) {
        next = l->next;
        link_tick(l);
    }
}

void net_stats(const struct net *n, struct server_stats *s)
{
    *s = (struct server_stats){.connections = n->n_links,
                               .accepted = n->accepted,
                               .refused = n->refused,
                               .requests = n->env.n_requests,
                               .bytes_in = n->bytes_in};
    uint64_t in_flight = 0;
    for (const struct link *l = n->links; l != NULL; l = l->next) {
        in_flight += l->conn.in_flight;
        if (l->conn.streaming)
            s->stream_unsent_bytes += conn_unsent(&l->conn);
    }
    s->bytes_out = n->bytes_out - in_flight;
}

uint32_t net_unsent(const struct net *n)
{
    uint32_t owing = 0;
    for (const struct link *l = n->links; l != NULL; l = l->next)
        owing += conn_unsent(&l->conn) > 0;
    return owing;
}

void net_drain(struct net *n)
{
    n->env.draining = true;
    for (struct link *l = n->links; l != NULL; l = l->next)
        if (conn_is_idle(&l->conn) && l->conn.n_requests > 0)
            conn_lost(&l->conn);
}

void net_close(struct net *n)
{
    for (uint32_t i = 0; i < n->n_listeners; i++) {
        if (n->listeners[i].tcp != NULL)
            uv_close((uv_handle_t *)n->listeners[i].tcp, on_handle_closed);
        if (n->listeners[i].spare_fd >= 0)
            close(n->listeners[i].spare_fd);
    }
    n->n_listeners = 0;
    for (struct link *l = n->links, *next; l != NULL; l = next) {
        next = l->next;
        conn_lost(&l->conn);
        link_close(l, false);
    }
    n->dirty = NULL;
    if (n->flush.loop != NULL)
        uv_close((uv_handle_t *)&n->flush, NULL);
}
