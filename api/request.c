/* From a body to a validated, tokenised request. The order: the guard over the bytes, every field by
 * the table, what the fields say about each other, the prompts, and last the lengths, because only
 * tokens can be compared with a context. Nothing here knows a connection or the engine. */
#include "api/request.h"
#include "api/request_fields.h"

#include <stdio.h>
#include <string.h>

/* Ids take 4 bytes of at least 1 byte of text each, messages some ten times their least spelling. */
enum { ARENA_CHUNK = 16 << 10, ARENA_FLOOR = 4 << 20, ARENA_PER_BYTE = 16 };

/* Output tokens as the client wrote them. */
static unsigned long long wanted(const struct request_draft *d)
{
    const struct given_int *most =
        d->max_completion_tokens.given ? &d->max_completion_tokens : &d->max_tokens;
    return (unsigned long long)most->v;
}

/* One text with every sentence that clients and routers look for (reference/api.md 2.8). */
static status context_error(struct request_draft *d, const char *culprit, uint32_t n_prompt)
{
    const struct request *r = d->r;
    uint32_t n_ctx = d->rules->info->max_model_len;
    unsigned long long asked = r->max_tokens_given    ? wanted(d)
                               : d->kind == BODY_CHAT ? 0
                                                      : r->max_tokens;
    const char *param = d->kind == BODY_CHAT ? "messages" : "prompt";
    status st = request_fields_bad(
        d, "context_length_exceeded", param,
        "%s This model's maximum context length is %u tokens. However, you requested %llu output "
        "tokens and your prompt contains %u input tokens, for a total of %llu tokens. Please "
        "reduce the length of the input prompt or the number of requested output tokens.",
        culprit, n_ctx, asked, n_prompt, asked + n_prompt);
    d->e->n_prompt_tokens = n_prompt;
    d->e->n_ctx = n_ctx;
    return st;
}

static status check_length(struct request_draft *d, uint32_t n_prompt)
{
    const struct request *r = d->r;
    uint32_t n_ctx = d->rules->info->max_model_len;
    char culprit[160];
    if (n_prompt >= n_ctx) {
        snprintf(culprit, sizeof culprit,
                 "The input (%u tokens) is longer than the model's context length (%u tokens).",
                 n_prompt, n_ctx);
        return context_error(d, culprit, n_prompt);
    }
    uint32_t room = n_ctx - n_prompt;
    bool over = r->max_tokens > n_ctx || (d->rules->reject_overflow && r->max_tokens > room);
    if (!r->max_tokens_given || !over)
        return OK;
    const char *name = d->max_completion_tokens.given ? "max_completion_tokens" : "max_tokens";
    snprintf(culprit, sizeof culprit, "%s is too large: %llu.", name, wanted(d));
    status st = context_error(d, culprit, n_prompt);
    snprintf(d->e->param, sizeof d->e->param, "%s", name);
    return st;
}

static status read_generation(struct request_draft *d)
{
    TRY(request_sampling_settle(d));
    TRY(d->kind == BODY_CHAT ? request_chat_read(d) : request_prompt_read(d));
    for (uint32_t i = 0; i < d->r->n_prompts; i++)
        TRY(check_length(d, d->r->prompts[i].n_ids));
    return OK;
}

static status read_tokens(struct request_draft *d)
{
    if (d->with_pieces.v)
        return request_fields_bad(d, "unsupported_parameter", "with_pieces",
                                  "with_pieces is not currently supported by this server; "
                                  "`return_token_strs` is.");
    d->r->return_token_ids = d->token_strs.v;
    return d->messages.type != JSON_ABSENT ? request_chat_read(d) : request_prompt_read(d);
}

static status read_body(struct request_draft *d, struct text_view body)
{
    static const char *const id_keys[] = {"prompt", "tokens", NULL};
    status st = json_open(&d->doc, body.p, body.len, id_keys);
    if (st == ERR_MEMORY)
        return request_fields_full(d);
    if (st != OK)
        return request_fields_bad(d, NULL, NULL, "The body cannot be read as JSON: %s.",
                                  err_text());
    st = request_fields_read(d);
    if (st == OK)
        st = d->kind == BODY_COMPLETION || d->kind == BODY_CHAT ? read_generation(d)
                                                                : read_tokens(d);
    json_close(&d->doc);
    return st;
}

status request_parse_as(struct request **out, enum body_kind kind,
                        const struct request_rules *rules, struct token_scratch *scratch,
                        struct text_view body, uint64_t seed, struct api_error *e)
{
    struct request *r = mem_try_alloc(sizeof *r);
    struct request_draft d = {.rules = rules, .scratch = scratch, .e = e, .r = r, .kind = kind};
    if (r == NULL)
        return request_fields_full(&d);
    arena_init(&r->mem, ARENA_CHUNK, ARENA_FLOOR + body.len * ARENA_PER_BYTE);
    if (rules->info->catalog != NULL) {
        r->sparse = rules->info->catalog->preset;
        r->sparse_min_context = rules->info->catalog->min_context;
    }
    r->kind = kind == BODY_CHAT ? REQUEST_CHAT : REQUEST_COMPLETION;
    status st = read_body(&d, body);
    if (st != OK) {
        request_free(r);
        return st;
    }
    r->params.seed = d.seed.given && d.seed.v != -1 ? (uint64_t)d.seed.v : seed; /* -1: random */
    *out = r;
    return OK;
}

status request_parse(struct request **out, enum request_kind kind,
                     const struct request_rules *rules, struct token_scratch *scratch,
                     const char *body, size_t len, uint64_t seed, struct api_error *e)
{
    return request_parse_as(out, kind == REQUEST_CHAT ? BODY_CHAT : BODY_COMPLETION, rules, scratch,
                            (struct text_view){body, len}, seed, e);
}

void request_free(struct request *r)
{
    if (r == NULL)
        return;
    arena_fini(&r->mem);
    mem_free(r);
}

uint32_t request_room(const struct request *r, const struct request_rules *rules, uint32_t p)
{
    uint32_t n = r->prompts[p].n_ids, room = rules->info->max_model_len - n;
    uint32_t most = rules->info->max_dense_len;
    bool dense = r->sparse.plugin == 0 || n < r->sparse_min_context;
    /* What nobody asked for is no reason to refuse: the engine says so where the prompt alone is. */
    if (!r->max_tokens_given && dense && most > 0 && n + (uint64_t)room > most)
        room = n < most ? most - n : 1;
    return r->max_tokens < room ? r->max_tokens : room;
}
