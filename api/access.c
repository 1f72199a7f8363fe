/* The access log and its counters, one door for all answers. The client's words never reach the log:
 * the handler is a path of ours and the request id is clean (server/conn.c saw to it). */
#include "api/internal.h"
#include "kernels/log.h"

#include <stdio.h>
#include <string.h>

static bool is_probe(const char *handler)
{
    static const char *const quiet[] = {"/health", "/metrics", "/ping",
                                        "/livez",  "/readyz",  "/load"};
    for (size_t i = 0; i < ARRAY_LEN(quiet); i++)
        if (strcmp(handler, quiet[i]) == 0)
            return true;
    return false;
}

/* At most ACCESS_LINES_PER_S lines in a second; says how many were left out in the one before. */
static bool may_log(struct api *a)
{
    uint64_t second = clock_us() / 1000000;
    if (second != a->access_second) {
        if (a->access_dropped > 0)
            log_line(LOG_WARN, "%u more requests in that second, not logged", a->access_dropped);
        a->access_second = second;
        a->access_lines = a->access_dropped = 0;
    }
    if (a->access_lines < ACCESS_LINES_PER_S) {
        a->access_lines++;
        return true;
    }
    a->access_dropped++;
    return false;
}

void access_note(struct api *a, struct exchange *x, const struct access *l)
{
    const struct caller *who = exchange_caller(x);
    char whose[2 * CALLER_WORD_BYTES + 16] = "";
    metrics_http(a->metrics, l->handler, l->method, l->http_status, l->seconds);
    if (a->roster != NULL)
        roster_count(a->roster, who->tenant, who->life, l->http_status);
    if (is_probe(l->handler) || !may_log(a))
        return;
    if (who->tenant_name[0] != '\0')
        snprintf(whose, sizeof whose, ", tenant %s, key %s", who->tenant_name, who->key_id);
    if (l->prompt_tokens > 0)
        log_line(LOG_INFO, "%s %s %d %.1f ms, %llu prompt tokens, %llu output tokens%s, id %s",
                 l->method, l->handler, l->http_status, l->seconds * 1e3,
                 (unsigned long long)l->prompt_tokens, (unsigned long long)l->output_tokens, whose,
                 exchange_request_id(x));
    else
        log_line(LOG_INFO, "%s %s %d %.1f ms%s, id %s", l->method, l->handler, l->http_status,
                 l->seconds * 1e3, whose, exchange_request_id(x));
}
