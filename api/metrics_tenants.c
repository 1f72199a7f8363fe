/* The page's lines per tenant (metrics_tenants.h): one family after the other, as Prometheus wants them. */
#include "api/roster.h"

#include <stdio.h>

static const char *const reasons[TENANT_REASONS] = {"requests",  "input_tokens",  "output_tokens",
                                                    "sequences", "queued_tokens", "server"};
static const double bounds_ttft[] = {.01, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120};

void metrics_tenants_init(struct tenant_counts *c)
{
    *c = (struct tenant_counts){0};
    histogram_init(&c->ttft, bounds_ttft, ARRAY_LEN(bounds_ttft), 0);
}

/* The tenant behind `before`, or the first; NULL: there is none. */
static const struct roster_slot *next_slot(const struct roster *ro,
                                           const struct roster_slot *before)
{
    for (uint32_t i = before != NULL ? before->number + 1 : 1; i < MAX_TENANTS; i++)
        if (ro->slots[i] != NULL && (ro->slots[i]->listed || ro->slots[i]->n_calls > 0))
            return ro->slots[i];
    return NULL;
}

#define EACH_SLOT(s)                                   \
    const struct roster_slot *s = next_slot(ro, NULL); \
    (s) != NULL;                                       \
    (s) = next_slot(ro, s)

static void write_answers(const struct roster *ro, struct writer *w)
{
    static const char name[] = "spind_tenant_requests_total";
    histogram_write_head(w, name, "counter", "Answers to requests with a tenant's key.");
    for (EACH_SLOT(s))
        for (int code = 2; code < TENANT_CODES; code++)
            write_format(w, "%s{tenant=\"%s\",code=\"%dxx\"} %llu.0\n", name, s->rules.name, code,
                         (unsigned long long)s->counts.answers[code]);
}

static void write_rejected(const struct roster *ro, struct writer *w)
{
    static const char name[] = "spind_tenant_rejected_total";
    histogram_write_head(w, name, "counter",
                         "Generations refused by a limit of the tenant, or by the server's own.");
    for (EACH_SLOT(s))
        for (int i = 0; i < TENANT_REASONS; i++)
            write_format(w, "%s{tenant=\"%s\",reason=\"%s\"} %llu.0\n", name, s->rules.name,
                         reasons[i], (unsigned long long)s->counts.rejected[i]);
}

/* Of the engine's word only what it alone knows. */
static void write_kv(const struct roster *ro, struct writer *w)
{
    static const char name[] = "spind_tenant_kv_bytes";
    histogram_write_head(w, name, "gauge",
                         "KV of a tenant's sequences; shared blocks count for each.");
    for (EACH_SLOT(s))
        for (int tier = 0; tier < 2; tier++)
            write_format(w, "%s{tenant=\"%s\",tier=\"%s\"} %llu.0\n", name, s->rules.name,
                         tier == 0 ? "hbm" : "dram", (unsigned long long)s->engine.kv_bytes[tier]);
}

enum number { PROMPT_TOKENS, OUTPUT_TOKENS, RUNNING, WAITING, PREEMPTIONS, NUMBERS };

static double number_of(const struct roster_slot *s, enum number which)
{
    switch (which) {
    case PROMPT_TOKENS: return (double)s->counts.prompt_tokens;
    case OUTPUT_TOKENS: return (double)s->counts.output_tokens;
    case RUNNING: return s->quota.n_running;
    case WAITING: return s->quota.n_queued;
    case PREEMPTIONS: return (double)s->engine.preemptions;
    case NUMBERS: break;
    }
    return 0;
}

static void write_numbers(const struct roster *ro, struct writer *w)
{
    static const struct {
        const char *type, *name, *help;
    } families[NUMBERS] = {
        {"counter", "spind_tenant_prompt_tokens_total", "Prompt tokens processed."},
        {"counter", "spind_tenant_output_tokens_total", "Tokens generated."},
        {"gauge", "spind_tenant_running", "Sequences being computed."},
        {"gauge", "spind_tenant_waiting", "Sequences in the queue."},
        {"counter", "spind_tenant_preemptions_total", "Preemptions."},
    };
    for (int i = 0; i < NUMBERS; i++) {
        histogram_write_head(w, families[i].name, families[i].type, families[i].help);
        for (EACH_SLOT(s))
            write_format(w, "%s{tenant=\"%s\"} %.1f\n", families[i].name, s->rules.name,
                         number_of(s, i));
    }
}

void metrics_tenants_render(const struct roster *ro, struct writer *w)
{
    static const char ttft[] = "spind_tenant_ttft_seconds";
    write_answers(ro, w);
    write_rejected(ro, w);
    write_numbers(ro, w);
    write_kv(ro, w);
    histogram_write_head(w, ttft, "histogram", "Time from arrival to the first token.");
    for (EACH_SLOT(s)) {
        char labels[TENANT_NAME_MAX + 16];
        snprintf(labels, sizeof labels, "tenant=\"%s\"", s->rules.name);
        histogram_write(w, ttft, labels, &s->counts.ttft);
    }
}
