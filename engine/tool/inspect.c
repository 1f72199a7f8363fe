/* `spind inspect`: where the bytes are. Of a server that is not running, what its flags would give each
 * part (the same plan as `spind serve` makes, without allocating it); of one that runs, what its /metrics
 * say of blocks, tables, digests and hot sets. */
#include "engine/engine.h"
#include "engine/tool/tool.h"
#include "kernels/log.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PAGE_MAX_BYTES = 4 << 20, WAIT_S = 10 };

static void print_line(void *arg, const char *text)
{
    (void)arg;
    printf("%s\n", text);
}

int inspect_plan(const struct engine_config *cfg)
{
    log_set_level(LOG_WARN);
    if (engine_inspect(cfg, print_line, NULL) == OK)
        return 0;
    fprintf(stderr, "spind inspect: %s\n", err_text());
    return 1;
}

/* ---- of a running one ---- */

struct address {
    char host[256], port[8], path[256];
};

static status parse_url(const char *url, struct address *a)
{
    static const char scheme[] = "http://";
    if (strncmp(url, scheme, sizeof scheme - 1) != 0)
        return err(ERR_ARG, "%.200s: must be http://HOST[:PORT][/metrics]", url);
    const char *host = url + sizeof scheme - 1;
    size_t n = strcspn(host, ":/");
    const char *rest = host + n;
    size_t n_port = *rest == ':' ? strcspn(rest + 1, "/") : 0;
    const char *path = *rest == ':' ? rest + 1 + n_port : rest;
    if (n == 0 || n >= sizeof a->host || n_port >= sizeof a->port || strlen(path) >= sizeof a->path)
        return err(ERR_ARG, "%.200s: must be http://HOST[:PORT][/metrics]", url);
    snprintf(a->host, sizeof a->host, "%.*s", (int)n, host);
    snprintf(a->port, sizeof a->port, "%.*s", n_port > 0 ? (int)n_port : 2,
             n_port > 0 ? rest + 1 : "80");
    snprintf(a->path, sizeof a->path, "%s", path[0] == '\0' || path[1] == '\0' ? "/metrics" : path);
    return OK;
}

static status connect_to(const struct address *a, int *out)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    const struct timeval wait = {.tv_sec = WAIT_S};
    struct addrinfo *list, *at;
    int rc = getaddrinfo(a->host, a->port, &hints, &list), fd = -1;
    if (rc != 0)
        return err(ERR_IO, "%s: %s", a->host, gai_strerror(rc));
    for (at = list; at != NULL && fd < 0; at = at->ai_next) {
        fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
        if (fd < 0)
            continue;
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait);
        if (connect(fd, at->ai_addr, at->ai_addrlen) != 0) {
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(list);
    *out = fd;
    return fd >= 0 ? OK : err(ERR_IO, "%s:%s: %s", a->host, a->port, strerror(errno));
}

/* HTTP/1.0, so that the body ends with the connection. */
static status fetch(const struct address *a, char *page, size_t room)
{
    char request[640];
    size_t n = 0;
    int fd = -1, len = snprintf(request, sizeof request,
                                "GET %s HTTP/1.0\r\nHost: %s:%s\r\nConnection: close\r\n\r\n",
                                a->path, a->host, a->port);
    TRY(connect_to(a, &fd));
    ssize_t got = send(fd, request, (size_t)len, MSG_NOSIGNAL) == len ? 1 : -1;
    while (got > 0 && n + 1 < room) {
        got = recv(fd, page + n, room - 1 - n, 0);
        n += got > 0 ? (size_t)got : 0;
    }
    page[n] = '\0';
    status st = got < 0 ? err(ERR_IO, "%s:%s: %s", a->host, a->port, strerror(errno)) : OK;
    close(fd);
    if (st == OK && (strncmp(page, "HTTP/1.", 7) != 0 || strncmp(page + 8, " 200", 4) != 0))
        return err(ERR_PROTO, "%s:%s%s: %.*s", a->host, a->port, a->path,
                   (int)strcspn(page, "\r\n"), page);
    return st;
}

/* Labels that every series has are left out: engine and model_name. */
static void print_sample(const char *line, size_t len)
{
    size_t name = strcspn(line, "{ "), at = name, n = 0;
    char labels[256] = "";
    while (at < len && line[at] != '}' && line[at] != ' ') { /* after { or , */
        size_t label = strcspn(++at + line, ",}");
        bool common =
            strncmp(line + at, "engine=", 7) == 0 || strncmp(line + at, "model_name=", 11) == 0;
        if (!common && n + label + 2 < sizeof labels)
            n += (size_t)snprintf(labels + n, sizeof labels - n, "%s%.*s", n > 0 ? ", " : "",
                                  (int)label, line + at);
        at += label;
    }
    size_t value = at < len && line[at] == '}' ? at + 2 : at + 1;
    if (value < len)
        printf("%-42.*s %-32s %.*s\n", (int)name, line, labels, (int)(len - value), line + value);
}

static bool is_of_interest(const char *line)
{
    static const char *const prefixes[] = {"spind_kv_",      "spind_hot_",      "spind_segments_",
                                           "spind_planned_", "spind_unscored_", "spind_truncated_"};
    for (size_t i = 0; i < ARRAY_LEN(prefixes); i++)
        if (strncmp(line, prefixes[i], strlen(prefixes[i])) == 0)
            return true;
    return false;
}

int inspect_url(const char *url)
{
    struct address a;
    char *page = mem_alloc(PAGE_MAX_BYTES);
    status st = parse_url(url, &a);
    if (st == OK)
        st = fetch(&a, page, PAGE_MAX_BYTES);
    for (const char *line = page, *end; st == OK && *line != '\0'; line = end) {
        size_t len = strcspn(line, "\n");
        end = line + len + (line[len] == '\n');
        if (is_of_interest(line))
            print_sample(line, len);
    }
    mem_free(page);
    if (st == OK)
        return 0;
    fprintf(stderr, "spind inspect: %s\n", err_text());
    return st == ERR_ARG ? 2 : 1;
}
