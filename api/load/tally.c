#include "api/load/tally.h"

#include "api/load/event.h"

#include <stdio.h>
#include <string.h>

void tally_event(struct tally *t, struct answer *a, uint32_t n_tokens, uint64_t now_us)
{
    if (a->n_events == 0)
        a->first_us = now_us;
    else
        measure_add(&a->gaps, (double)(now_us - a->last_us));
    a->last_us = now_us;
    a->n_events++;
    a->n_tokens += n_tokens;
    t->tokens_seen += n_tokens;
}

/* The same but for numbers, such as a token id or a count of bytes. */
static bool is_alike(const char *a, const char *b)
{
    static const char *const digits = "0123456789";
    for (;;) {
        size_t n = strspn(a, digits), m = strspn(b, digits);
        a += n, b += m;
        if ((n > 0) != (m > 0) || *a != *b)
            return false;
        if (*a == '\0')
            return true;
        a++, b++;
    }
}

static void count_error(struct tally *t, const char *text)
{
    for (uint32_t i = 0; i < t->n_errors; i++) {
        if (is_alike(t->errors[i].text, text)) {
            t->errors[i].n++;
            return;
        }
    }
    if (t->n_errors == TALLY_MAX_ERRORS) {
        t->n_other_errors++;
        return;
    }
    struct tally_error *e = &t->errors[t->n_errors++];
    snprintf(e->text, sizeof e->text, "%s", text);
    e->n = 1;
}

/* "HTTP 429: Too many requests", from the JSON of an error or from whatever came. */
static void describe_status(char *to, size_t room, const struct wire_result *r)
{
    struct event e;
    size_t n = strcspn(r->text, "\r\n");
    if (event_read(&e, r->text, strlen(r->text)) && e.is_error)
        snprintf(to, room, "HTTP %d: %.*s", r->http, (int)e.error.len, e.error.p);
    else
        snprintf(to, room, "HTTP %d: %.*s", r->http, (int)(n < 120 ? n : 120), r->text);
}

/* Why the answer is not what was asked for; "": it is. */
static void find_fault(const struct tally *t, const struct answer *a, const struct wire_result *r,
                       char *to, size_t room)
{
    static const char *const ends[] = {
        "", "no connection: ", "", "cut short: ", "malformed: ", "timeout: "};
    to[0] = '\0';
    if (a->error[0] != '\0')
        snprintf(to, room, "error event: %s", a->error);
    else if (r->end == WIRE_STATUS)
        describe_status(to, room, r);
    else if (r->end != WIRE_DONE)
        snprintf(to, room, "%s%s", ends[r->end], r->text);
    else if (a->bad_event)
        snprintf(to, room, "malformed: an event is no JSON object");
    else if (!a->finished)
        snprintf(to, room, "cut short: [DONE] without a finish_reason");
    else if (a->n_events == 0)
        snprintf(to, room, "no token in the answer");
    else if (a->n_tokens != a->n_asked && !t->any_length)
        snprintf(to, room, "%u tokens instead of %u", a->n_tokens, a->n_asked);
}

static void count_good(struct tally_row *row, const struct answer *a, double ttft, double tpot)
{
    row->n_good++;
    row->prompt_tokens += a->n_prompt;
    row->cached_tokens += a->n_cached;
    row->output_tokens += a->n_tokens;
    row->events += a->n_events;
    measure_add(&row->ttft, ttft);
    if (a->n_tokens > 1)
        measure_add(&row->tpot, tpot);
    for (uint32_t i = 0; i < a->gaps.n; i++)
        measure_add(&row->itl, a->gaps.v[i]);
}

bool tally_answer(struct tally *t, struct answer *a, const struct wire_result *r, uint64_t now_us)
{
    struct tally_row *turn =
        t->spec->keeps && a->turn < TALLY_MAX_TURNS ? &t->turns[a->turn] : NULL;
    char fault[300];
    (void)now_us;
    if (a->has_usage) { /* knows of tokens that shared an event */
        t->tokens_seen = t->tokens_seen - a->n_tokens + a->n_usage;
        a->n_tokens = a->n_usage;
    } else if (r->end == WIRE_DONE) {
        t->no_usage = true;
    }
    find_fault(t, a, r, fault, sizeof fault);
    if (fault[0] != '\0') {
        count_error(t, fault);
        t->all.n_failed++;
        if (turn != NULL)
            turn->n_failed++;
        measure_fini(&a->gaps);
        return false;
    }
    double ttft = (double)(a->first_us - a->sent_us);
    double tpot = a->n_tokens > 1 ? (double)(a->last_us - a->first_us) / (a->n_tokens - 1) : 0;
    count_good(&t->all, a, ttft, tpot);
    if (turn != NULL)
        count_good(turn, a, ttft, tpot);
    measure_fini(&a->gaps);
    const struct load_spec *s = t->spec;
    t->n_in_time += (s->slo_ttft_us <= 0 || ttft <= s->slo_ttft_us) &&
                    (s->slo_tpot_us <= 0 || tpot <= s->slo_tpot_us);
    return true;
}

void tally_unfinished(struct tally *t, struct answer *a)
{
    measure_fini(&a->gaps);
    t->n_unfinished++;
}

void tally_stand_ins(struct tally *t)
{
    t->n_stand_ins++;
}

static void row_fini(struct tally_row *r)
{
    measure_fini(&r->ttft);
    measure_fini(&r->tpot);
    measure_fini(&r->itl);
}

void tally_fini(struct tally *t)
{
    row_fini(&t->all);
    for (int i = 0; i < TALLY_MAX_TURNS; i++)
        row_fini(&t->turns[i]);
}
