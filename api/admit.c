/* Where tenants meet their limits (quota.h), in the order of a request's life: its key, its head, its body,
 * its tokens, its end. Nothing is computed for a request before it passes, and what it was charged is put
 * right when it is over. Without --tenants there is no roster, and everything passes.
 *
 * 429 is the tenant's own limit; the server's are 503 (submit.c). */
#include "api/call.h"
#include "kernels/core/splitmix.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

enum { LONGEST_WAIT_MS = 120000 }; /* SDKs ignore longer ones */

static struct roster_slot *slot_of(const struct api *a, struct exchange *x)
{
    const struct caller *who = exchange_caller(x);
    return a->roster == NULL ? NULL : roster_find(a->roster, who->tenant, who->life);
}

static void tell_limits(struct roster_slot *s, struct exchange *x)
{
    struct caller *who = exchange_caller(x);
    _Static_assert(sizeof who->lines == QUOTA_HEADER_BYTES, "the lines fit");
    quota_headers(&s->quota, clock_us(), who->lines);
}

bool admit_caller(struct api *a, struct exchange *x, bool limited)
{
    struct caller *who = exchange_caller(x);
    const char *key;
    if (auth_open(a->auth))
        return true;
    uint32_t place = auth_find(a->auth, x, (uint64_t)time(NULL));
    if (place == 0 || a->roster == NULL)
        return place > 0;
    struct roster_slot *s = roster_of_key(a->roster, place - 1, &key);
    who->tenant = s->number;
    who->life = s->life;
    snprintf(who->tenant_name, sizeof who->tenant_name, "%s", s->rules.name);
    snprintf(who->key_id, sizeof who->key_id, "%s", key);
    if (limited)
        tell_limits(s, x);
    return true;
}

/* ---- refusals ---- */

/* Its tenant was removed between its head and now. */
static bool refuse_gone(struct api_error *e)
{
    error_set(e, 401, NULL, NULL, "The API key is missing or wrong.");
    return false;
}

/* Asking again would not help. */
static void set_never(const struct roster_slot *s, const struct quota_refusal *why,
                      const struct request *r, struct api_error *e)
{
    bool sequences = why->which == QUOTA_SEQUENCES;
    const char *prompt = r != NULL && r->kind == REQUEST_CHAT ? "messages" : "prompt";
    error_set(e, 400, "invalid_value", sequences && r != NULL && r->n_prompts == 1 ? "n" : prompt,
              "Tenant '%s' is limited to %llu %s%s; this request needs %llu, so it can never pass.",
              s->rules.name, (unsigned long long)why->limit, quota_name(why->which),
              sequences ? "" : " per minute", (unsigned long long)why->requested);
}

static void set_wait(struct api *a, const struct roster_slot *s, const struct quota_refusal *why,
                     struct api_error *e)
{
    uint64_t ms = (why->wait_us + 999) / 1000;
    if (ms == 0) /* when others end: it waits as whoever finds the server full */
        ms = (uint64_t)submit_retry_after(a->calls) * 1000;
    else /* equal answers would come back together; and who comes earlier than this is refused again */
        ms = ms * (100 + splitmix_next(&a->calls->random) % 41) / 100;
    ms = ms < 1 ? 1 : ms > LONGEST_WAIT_MS ? LONGEST_WAIT_MS : ms;
    error_set(e, 429, NULL, NULL,
              "Rate limit reached for tenant '%s' on %s: limit %llu%s, used %llu, requested %llu. "
              "Retry in %llu s.",
              s->rules.name, quota_name(why->which), (unsigned long long)why->limit,
              (int)why->which < QUOTA_BUCKETS ? " per minute" : "", (unsigned long long)why->used,
              (unsigned long long)why->requested, (unsigned long long)(ms + 999) / 1000);
    e->retry_after_ms = (uint32_t)ms;
}

/* May s have this? If not, *e; r: NULL if it is not known yet. */
static bool passes(struct api *a, struct roster_slot *s, const struct quota_need *need,
                   const struct request *r, struct api_error *e)
{
    struct quota_refusal why;
    uint32_t slots = a->info != NULL ? a->info->max_num_seqs : 0;
    if (quota_admits(&s->quota, need, slots, clock_us(), &why))
        return true;
    s->counts.rejected[why.which]++;
    if (why.never)
        set_never(s, &why, r, e);
    else
        set_wait(a, s, &why, e);
    return false;
}

void admit_refused(struct api *a, struct exchange *x, const struct api_error *e)
{
    struct caller *who = exchange_caller(x);
    struct roster_slot *s = slot_of(a, x);
    if (s == NULL || !who->counted)
        return;
    if (e->status == 503)
        s->counts.rejected[TENANT_REASONS - 1]++;
    if (e->status == 503 || e->status == 429)
        quota_give_back(&s->quota, QUOTA_REQUESTS, 1, clock_us());
    who->counted = false;
    tell_limits(s, x);
}

/* ---- head and body ---- */

/* Before there is a call: call_start counts its own refusals. */
static bool rejected(struct api *a, const struct api_error *e)
{
    metrics_rejected(a->metrics, e->code);
    return false;
}

bool admit_head(struct api *a, struct exchange *x, struct api_error *e)
{
    /* The least that any generation is: what it is exactly is known after its body. */
    const struct quota_need least = {.amount = {1, 1, 1}, .sequences = 1};
    struct roster_slot *s = slot_of(a, x);
    if (s == NULL)
        return true;
    return passes(a, s, &least, NULL, e) || rejected(a, e);
}

bool admit_body(struct api *a, struct exchange *x, struct api_error *e)
{
    const struct quota_need one = {.amount = {[QUOTA_REQUESTS] = 1}};
    struct roster_slot *s = slot_of(a, x);
    if (a->roster == NULL)
        return true;
    if (s == NULL)
        return refuse_gone(e);
    if (!passes(a, s, &one, NULL, e)) /* others were faster while the body came */
        return rejected(a, e);
    quota_take(&s->quota, QUOTA_REQUESTS, 1, clock_us());
    exchange_caller(x)->counted = true;
    tell_limits(s, x);
    return true;
}

struct request_rules admit_rules(const struct api *a, struct exchange *x)
{
    struct request_rules rules = a->rules;
    const struct roster_slot *s = slot_of(a, x);
    if (s == NULL)
        return rules;
    rules.has_priority = true;
    rules.priority_low = s->rules.priority_low;
    rules.priority_high = s->rules.priority_high;
    rules.max_tokens = s->rules.max_tokens;
    return rules;
}

/* ---- tokens ---- */

/* At most a full minute's worth: it must be able to pass one day. */
static uint64_t estimate_output(const struct api *a, const struct roster_slot *s,
                                const struct request *r)
{
    uint64_t sum = 0, most = s->quota.limits.per_minute[QUOTA_OUTPUT];
    for (uint32_t p = 0; p < r->n_prompts; p++)
        sum += r->n * quota_estimate(&s->quota, request_room(r, &a->rules, p));
    return most > 0 && sum > most ? most : sum;
}

bool admit_request(struct api *a, struct exchange *x, const struct request *r,
                   struct roster_slot **slot, struct api_error *e)
{
    struct roster_slot *s = *slot = slot_of(a, x);
    struct quota_need need = {.sequences = r->n_prompts * r->n};
    if (a->roster == NULL)
        return true;
    if (s == NULL)
        return refuse_gone(e);
    for (uint32_t p = 0; p < r->n_prompts; p++) {
        need.amount[QUOTA_INPUT] += r->prompts[p].n_ids;
        need.queued_tokens += (uint64_t)r->prompts[p].n_ids * r->n;
    }
    need.amount[QUOTA_OUTPUT] = estimate_output(a, s, r);
    return passes(a, s, &need, r, e);
}

void admit_charge(struct api *a, struct exchange *x, struct call *call)
{
    struct roster_slot *s = call->slot;
    uint64_t now = clock_us();
    if (s == NULL)
        return;
    call->charged_output = estimate_output(a, s, call->r);
    quota_take(&s->quota, QUOTA_INPUT, call->n_prompt_tokens, now);
    quota_take(&s->quota, QUOTA_OUTPUT, call->charged_output, now);
    s->n_calls++;
    tell_limits(s, x);
}

void admit_settle(struct api *a, struct call *call)
{
    struct roster_slot *s = call->slot;
    uint64_t now = calls_now(a->calls);
    if (s == NULL)
        return;
    quota_settle(&s->quota, call->charged_output, call->n_generated, now);
    if (!call->scheduled) /* the engine never began */
        quota_give_back(&s->quota, QUOTA_INPUT, call->n_prompt_tokens, now);
    if (!call->scheduled &&
        !call->left) /* and that was our doing: who asks and leaves, has asked */
        quota_give_back(&s->quota, QUOTA_REQUESTS, 1, now);
    s->n_calls--;
}
