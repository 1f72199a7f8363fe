/* What does the server cost? Streams completions from a daemon over loopback and counts.
 *
 * One thread, non-blocking sockets, no parsing beyond what is needed: tokens are those of the usage
 * event, latency is the time between the end of an engine step (as the mock backend's --mock-trace
 * wrote it) and the arrival of the bytes that it caused. An arrival belongs to the latest step that
 * ended before it, so latencies above the step time would be folded: keep the step long.
 *
 * usage: http PORT STREAMS TOKENS [TRACE]     prints one line of JSON */
#include "kernels/base.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_STREAMS = 1024, READ_BYTES = 65536, MAX_ARRIVALS = 1 << 20 };

struct stream {
    int fd;
    uint64_t tokens, events, bytes;
    char tail[256]; /* the end of what came, to find the usage event and [DONE] */
    size_t n_tail;
    bool done;
};

static struct stream streams[MAX_STREAMS];
static uint64_t *arrivals; /* [n_arrivals] times at which bytes came */
static size_t n_arrivals;

static void die(const char *what)
{
    fprintf(stderr, "http: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int open_stream(uint16_t port, uint64_t tokens, uint32_t index)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) != 0)
        die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    char body[256], head[512];
    int n = snprintf(
        body, sizeof body,
        "{\"prompt\":\"stream %u\",\"max_tokens\":%llu,\"ignore_eos\":true,\"stream\":true,"
        "\"stream_options\":{\"include_usage\":true}}",
        index, (unsigned long long)tokens);
    int m = snprintf(head, sizeof head,
                     "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%u\r\n"
                     "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
                     port, n, body);
    if (write(fd, head, (size_t)m) != m)
        die("write");
    return fd;
}

static uint64_t count(const char *p, size_t len, const char *what)
{
    uint64_t n = 0;
    size_t w = strlen(what);
    const char *end = p + len;
    while ((p = memmem(p, (size_t)(end - p), what, w)) != NULL) {
        n++;
        p += w;
    }
    return n;
}

static void keep_tail(struct stream *s, const char *p, size_t len)
{
    if (len > sizeof s->tail) {
        p += len - sizeof s->tail;
        len = sizeof s->tail;
    }
    size_t keep = s->n_tail + len > sizeof s->tail ? sizeof s->tail - len : s->n_tail;
    memmove(s->tail, s->tail + s->n_tail - keep, keep);
    memcpy(s->tail + keep, p, len);
    s->n_tail = keep + len;
}

static void finish(struct stream *s)
{
    static const char key[] = "\"completion_tokens\":";
    const char *at = memmem(s->tail, s->n_tail, key, sizeof key - 1);
    if (at == NULL) {
        fprintf(stderr, "http: a stream ended without usage: %.*s\n", (int)s->n_tail, s->tail);
        exit(1);
    }
    s->tokens = strtoull(at + sizeof key - 1, NULL, 10);
    s->done = true;
    close(s->fd);
}

/* false: nothing more to read now. */
static bool receive(struct stream *s, char *buf)
{
    ssize_t n = recv(s->fd, buf, READ_BYTES, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (n <= 0)
        die("a stream broke");
    if (n_arrivals < MAX_ARRIVALS)
        arrivals[n_arrivals++] = clock_us();
    if (s->bytes == 0 && memcmp(buf, "HTTP/1.1 200", 12) != 0) {
        fprintf(stderr, "http: refused: %.*s\n", (int)n, buf);
        exit(1);
    }
    s->bytes += (uint64_t)n;
    s->events += count(buf, (size_t)n, "data: {");
    keep_tail(s, buf, (size_t)n);
    if (memmem(s->tail, s->n_tail, "data: [DONE]", 12) != NULL)
        finish(s);
    return false; /* level-triggered: epoll says if there is more */
}

static void run(uint32_t n)
{
    static char buf[READ_BYTES];
    struct epoll_event ready[64];
    int ep = epoll_create1(0);
    for (uint32_t i = 0; i < n; i++) {
        struct epoll_event e = {.events = EPOLLIN, .data.u32 = i};
        if (epoll_ctl(ep, EPOLL_CTL_ADD, streams[i].fd, &e) != 0)
            die("epoll_ctl");
    }
    for (uint32_t left = n; left > 0;) {
        int k = epoll_wait(ep, ready, 64, 30000);
        if (k <= 0)
            die("nothing came for 30 s");
        for (int i = 0; i < k; i++) {
            struct stream *s = &streams[ready[i].data.u32];
            receive(s, buf);
            left -= s->done;
        }
    }
    close(ep);
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Arrival minus the end of the latest step before it, in microseconds, sorted. */
static size_t latencies(const char *trace, uint64_t *out)
{
    FILE *f = fopen(trace, "rb");
    if (f == NULL)
        die(trace);
    static uint64_t steps[MAX_ARRIVALS];
    size_t n_steps = fread(steps, sizeof *steps, MAX_ARRIVALS, f), n = 0, k = 0;
    fclose(f);
    for (size_t i = 0; i < n_arrivals; i++) {
        while (k < n_steps && steps[k] <= arrivals[i])
            k++;
        if (k > 0)
            out[n++] = arrivals[i] - steps[k - 1];
    }
    qsort(out, n, sizeof *out, compare);
    return n;
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr, "usage: http PORT STREAMS TOKENS [TRACE]\n");
        return 2;
    }
    uint32_t n = (uint32_t)atoi(argv[2]);
    CHECK(n > 0 && n <= MAX_STREAMS);
    arrivals = mem_alloc(MAX_ARRIVALS * sizeof *arrivals);
    uint64_t start = clock_us(), tokens = 0, events = 0, bytes = 0;
    for (uint32_t i = 0; i < n; i++)
        streams[i].fd = open_stream((uint16_t)atoi(argv[1]), strtoull(argv[3], NULL, 10), i);
    run(n);
    double seconds = (double)(clock_us() - start) / 1e6;
    for (uint32_t i = 0; i < n; i++) {
        tokens += streams[i].tokens;
        events += streams[i].events;
        bytes += streams[i].bytes;
    }
    printf("{\"streams\": %u, \"tokens\": %llu, \"seconds\": %.3f, \"tokens_per_s\": %.0f, "
           "\"tokens_per_event\": %.2f, \"mb_per_s\": %.1f",
           n, (unsigned long long)tokens, seconds, (double)tokens / seconds,
           (double)tokens / (double)events, (double)bytes / seconds / 1e6);
    if (argc > 4) {
        uint64_t *lat = mem_alloc(MAX_ARRIVALS * sizeof *lat);
        size_t m = latencies(argv[4], lat);
        if (m > 0)
            printf(", \"latency_ms\": {\"p50\": %.3f, \"p90\": %.3f, \"p99\": %.3f, \"max\": %.3f}",
                   (double)lat[m / 2] / 1e3, (double)lat[m * 9 / 10] / 1e3,
                   (double)lat[m * 99 / 100] / 1e3, (double)lat[m - 1] / 1e3);
        mem_free(lat);
    }
    printf("}\n");
    mem_free(arrivals);
    return 0;
}
