/* The table of fields: the one place that says what a body may hold.
 *
 * Every field that any OpenAI client or vLLM knows is here (reference/api.md 2.3 to 2.7): read,
 * accepted without effect, or refused by name, because a known field that is silently ignored is
 * worse than an error. Unknown keys are ignored, or refused under --strict-fields. null equals
 * absent everywhere. The table is sorted by name; a name may stand twice with different rules for
 * different bodies. */
#include "api/request_fields.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum field_kind {
    FIELD_BOOL,
    FIELD_INT,
    FIELD_NUMBER,
    FIELD_KEEP,
    FIELD_READ,
    FIELD_IGNORE,
    FIELD_REFUSE
};

enum harmless { /* values of a refused field that ask for nothing; null always is one */
                HARMLESS_NULL,
                HARMLESS_EMPTY,
                HARMLESS_FALSE,
                HARMLESS_ZERO,
                HARMLESS_ONE
};

enum { HIGH_N = -100, HIGH_LOGPROBS = -101 }; /* highest value: from the rules */

struct field {
    const char *name;
    unsigned where; /* set of enum body_kind */
    enum field_kind kind;
    size_t at; /* in struct request_draft */
    int64_t low, high;
    double from, to;
    bool open; /* `from` itself is outside */
    enum harmless harmless;
    status (*read)(struct request_draft *d, const struct json_value *v);
};

#define AT(m)                offsetof(struct request_draft, m)
#define OF(n, w, k)          .name = (n), .where = (w), .kind = (k)
#define BOOL(n, w, m)        OF(n, w, FIELD_BOOL), .at = AT(m)
#define INT(n, w, m, lo, hi) OF(n, w, FIELD_INT), .at = AT(m), .low = (lo), .high = (hi)
#define NUM(n, w, m, lo, hi) OF(n, w, FIELD_NUMBER), .at = AT(m), .from = (lo), .to = (hi)
#define KEEP(n, w, m)        OF(n, w, FIELD_KEEP), .at = AT(m)
#define READ(n, w, f)        OF(n, w, FIELD_READ), .read = (f)
#define IGNORE(n, w)         OF(n, w, FIELD_IGNORE)
#define REFUSE(n, w, h)      OF(n, w, FIELD_REFUSE), .harmless = (h)

#define C   BODY_COMPLETION
#define H   BODY_CHAT
#define CH  (BODY_COMPLETION | BODY_CHAT)
#define T   BODY_TOKENIZE
#define HT  (BODY_CHAT | BODY_TOKENIZE)
#define ALL (BODY_COMPLETION | BODY_CHAT | BODY_TOKENIZE | BODY_DETOKENIZE)

/* A penalty so near to zero that logits divided by it leave float32 cannot be honoured. */
#define LEAST_REPETITION 1e-6

/* clang-format off */
static const struct field fields[] = {
    {BOOL("add_generation_prompt", HT, generation_prompt)},
    {BOOL("add_special", T, add_special)},
    {BOOL("add_special_tokens", CH | T, add_special)},
    {REFUSE("allowed_token_ids", CH, HARMLESS_EMPTY)},
    {REFUSE("audio", H, HARMLESS_NULL)},
    {REFUSE("bad_words", CH, HARMLESS_EMPTY)},
    {INT("best_of", C, best_of, 0, INT64_MAX)},
    {READ("cache_salt", CH, request_sampling_salt)},
    {REFUSE("chat_template", HT, HARMLESS_NULL)},
    {READ("chat_template_kwargs", HT, request_chat_kwargs)},
    {KEEP("content", T, prompt)},
    {BOOL("continue_final_message", HT, continue_final)},
    {REFUSE("documents", CH, HARMLESS_EMPTY)},
    {REFUSE("early_stopping", CH, HARMLESS_FALSE)},
    {BOOL("echo", CH, echo)},
    {NUM("frequency_penalty", CH, frequency, -2, 2)},
    {READ("function_call", H, request_chat_function_call)},
    {REFUSE("functions", H, HARMLESS_EMPTY)},
    {REFUSE("guided_choice", CH, HARMLESS_NULL)},
    {REFUSE("guided_decoding_backend", CH, HARMLESS_NULL)},
    {REFUSE("guided_grammar", CH, HARMLESS_NULL)},
    {REFUSE("guided_json", CH, HARMLESS_NULL)},
    {REFUSE("guided_regex", CH, HARMLESS_NULL)},
    {REFUSE("guided_whitespace_pattern", CH, HARMLESS_NULL)},
    {BOOL("ignore_eos", CH, ignore_eos)},
    {IGNORE("include_reasoning", H)},
    {BOOL("include_stop_str_in_output", CH, include_stop)},
    {REFUSE("kv_transfer_params", CH, HARMLESS_NULL)},
    {REFUSE("length_penalty", CH, HARMLESS_ONE)},
    {READ("logit_bias", CH, request_sampling_bias)},
    {REFUSE("logprob_token_ids", CH, HARMLESS_EMPTY)},
    {INT("logprobs", C, logprobs, 0, HIGH_LOGPROBS)},
    {BOOL("logprobs", H, logprobs_flag)},
    {INT("max_completion_tokens", H, max_completion_tokens, 1, INT64_MAX)},
    {INT("max_tokens", C, max_tokens, 0, INT64_MAX)}, /* 0 needs echo: request_sampling_settle */
    {INT("max_tokens", H, max_tokens, 1, INT64_MAX)},
    {KEEP("messages", HT, messages)},
    {IGNORE("metadata", CH)},
    {NUM("min_p", CH, min_p, 0, 1)},
    {INT("min_tokens", CH, min_tokens, 0, INT64_MAX)},
    {REFUSE("mm_processor_kwargs", CH, HARMLESS_EMPTY)},
    {READ("modalities", H, request_chat_modalities)},
    {READ("model", ALL, request_sampling_model)},
    {INT("n", CH, n, 1, HIGH_N)},
    {BOOL("parallel_tool_calls", H, ignored_flag)},
    {REFUSE("prediction", H, HARMLESS_NULL)},
    {NUM("presence_penalty", CH, presence, -2, 2)},
    {READ("priority", CH, request_sampling_priority)},
    {KEEP("prompt", C | T, prompt)},
    {IGNORE("prompt_cache_key", CH)},
    {IGNORE("prompt_cache_retention", CH)},
    {REFUSE("prompt_embeds", CH, HARMLESS_NULL)},
    {INT("prompt_logprobs", CH, prompt_logprobs, 0, HIGH_LOGPROBS)},
    {IGNORE("reasoning_effort", H)},
    {REFUSE("repetition_detection", CH, HARMLESS_NULL)},
    {NUM("repetition_penalty", CH, repetition, LEAST_REPETITION, 1e6)},
    {READ("request_id", CH, request_sampling_id)},
    {READ("response_format", CH, request_sampling_format)},
    {BOOL("return_token_ids", CH, return_ids)},
    {BOOL("return_token_strs", T, token_strs)},
    {BOOL("return_tokens_as_token_ids", CH, ids_as_text)},
    {IGNORE("safety_identifier", CH)},
    {INT("seed", CH, seed, INT64_MIN, INT64_MAX)},
    {IGNORE("service_tier", CH)},
    {BOOL("skip_special_tokens", CH, skip_special)},
    {BOOL("spaces_between_special_tokens", CH, ignored_flag)},
    {READ("sparse", CH, request_sparse_read)},
    {READ("stop", CH, request_sampling_stop)},
    {READ("stop_token_ids", CH, request_sampling_stop_ids)},
    {IGNORE("store", CH)},
    {BOOL("stream", CH, stream)},
    {READ("stream_options", CH, request_sampling_stream_options)},
    {REFUSE("structured_outputs", CH, HARMLESS_NULL)},
    {REFUSE("suffix", C, HARMLESS_EMPTY)},
    {NUM("temperature", CH, temperature, 0, 2)},
    {IGNORE("thinking", H)},
    {REFUSE("thinking_token_budget", CH, HARMLESS_NULL)},
    {KEEP("tokens", BODY_DETOKENIZE, tokens)},
    {KEEP("tool_choice", H, tool_choice)},
    {KEEP("tools", HT, tools)},
    {INT("top_k", CH, top_k, -1, INT64_MAX)},
    {INT("top_logprobs", H, top_logprobs, 0, HIGH_LOGPROBS)},
    {NUM("top_p", CH, top_p, 0, 1), .open = true},
    {REFUSE("truncate_prompt_tokens", CH, HARMLESS_NULL)},
    {REFUSE("truncation_side", CH, HARMLESS_NULL)},
    {REFUSE("use_beam_search", CH, HARMLESS_FALSE)},
    {IGNORE("user", CH)},
    {IGNORE("verbosity", CH)},
    {REFUSE("vllm_xargs", CH, HARMLESS_EMPTY)},
    {REFUSE("web_search_options", H, HARMLESS_NULL)},
    {BOOL("with_pieces", T, with_pieces)},
};
/* clang-format on */

const char *request_fields_name(size_t i)
{
    return i < ARRAY_LEN(fields) ? fields[i].name : NULL;
}

status request_fields_bad(struct request_draft *d, const char *code, const char *param,
                          const char *fmt, ...)
{
    char text[sizeof d->e->message];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    error_set(d->e, 400, code, param, "%s", text);
    return ERR_PROTO;
}

status request_fields_type(struct request_draft *d, const char *param, const char *wanted)
{
    return request_fields_bad(d, "invalid_type", param, "`%s` must be %s.", param, wanted);
}

status request_fields_full(struct request_draft *d)
{
    error_set(d->e, 413, NULL, NULL, "The request needs more memory than one request may have.");
    return ERR_FULL;
}

struct quoted request_fields_quote(const char *p, size_t len)
{
    struct quoted q;
    size_t n = len;
    if (len > 32)
        for (n = 32; n > 0 && ((unsigned char)p[n] & 0xc0) == 0x80;)
            n--;
    snprintf(q.text, sizeof q.text, "%.*s%s", (int)n, p, n < len ? "..." : "");
    return q;
}

bool request_fields_empty(const struct json_value *v)
{
    if (v->type == JSON_STRING)
        return v->len == 2;
    if (v->type != JSON_ARRAY && v->type != JSON_OBJECT)
        return false;
    return strspn(v->p + 1, " \t\r\n") == v->len - 2;
}

/* ---- the simple kinds ---- */

static status read_bool(struct request_draft *d, const struct field *f, const struct json_value *v)
{
    struct given_bool *out = (struct given_bool *)((char *)d + f->at);
    if (v->type != JSON_TRUE && v->type != JSON_FALSE)
        return request_fields_type(d, f->name, "a boolean");
    *out = (struct given_bool){true, v->type == JSON_TRUE};
    return OK;
}

static int64_t highest(const struct request_draft *d, const struct field *f)
{
    switch (f->high) {
    case HIGH_N: return d->rules->max_n;
    case HIGH_LOGPROBS: return d->rules->max_logprobs;
    default: return f->high;
    }
}

/* The words after "Rule:" are what vLLM's validator says; clients look for them. */
static status read_int(struct request_draft *d, const struct field *f, const struct json_value *v)
{
    struct given_int *out = (struct given_int *)((char *)d + f->at);
    if (v->type != JSON_NUMBER)
        return request_fields_type(d, f->name, "an integer");
    struct quoted got = request_fields_quote(v->p, v->len);
    long long low = f->low, high = highest(d, f);
    enum json_verdict verdict = json_int(v, &out->v);
    if (verdict == INT_FRACTION)
        return request_fields_type(d, f->name, "an integer");
    if (verdict == INT_BELOW || (verdict == INT_OK && out->v < low)) {
        if (f->high == HIGH_LOGPROBS)
            return request_fields_bad(d, "invalid_value", f->name,
                                      "`%s` must be a positive value or -1. This server does not "
                                      "offer -1: the range is 0 to %lld, got %s.",
                                      f->name, high, got.text);
        return request_fields_bad(
            d, "invalid_value", f->name,
            "%s must be at least %lld, got %s. Rule: greater_than_equal %lld.", f->name, low,
            got.text, low);
    }
    if (verdict == INT_ABOVE || out->v > high)
        return request_fields_bad(d, "invalid_value", f->name,
                                  "%s must be at most %lld, got %s. Rule: less_than_equal %lld.",
                                  f->name, high, got.text, high);
    out->given = true;
    return OK;
}

static status read_number(struct request_draft *d, const struct field *f,
                          const struct json_value *v)
{
    struct given_number *out = (struct given_number *)((char *)d + f->at);
    if (v->type != JSON_NUMBER)
        return request_fields_type(d, f->name, "a number");
    out->v = json_double(v);
    if (out->v < f->from || out->v > f->to || (f->open && out->v <= f->from))
        return request_fields_bad(d, "invalid_value", f->name,
                                  "%s must be %s %g and at most %g, got %s.", f->name,
                                  f->open ? "greater than" : "at least", f->from, f->to,
                                  request_fields_quote(v->p, v->len).text);
    out->given = true;
    return OK;
}

static bool is_harmless(enum harmless h, const struct json_value *v)
{
    switch (h) {
    case HARMLESS_NULL: return false;
    case HARMLESS_EMPTY: return request_fields_empty(v);
    case HARMLESS_FALSE: return v->type == JSON_FALSE;
    case HARMLESS_ZERO: return v->type == JSON_NUMBER && json_double(v) == 0;
    case HARMLESS_ONE: return v->type == JSON_NUMBER && json_double(v) == 1;
    }
    return false;
}

static status read_field(struct request_draft *d, const struct field *f, const struct json_value *v)
{
    switch (f->kind) {
    case FIELD_BOOL: return read_bool(d, f, v);
    case FIELD_INT: return read_int(d, f, v);
    case FIELD_NUMBER: return read_number(d, f, v);
    case FIELD_READ: return f->read(d, v);
    case FIELD_KEEP: memcpy((char *)d + f->at, v, sizeof *v); return OK;
    case FIELD_IGNORE: return OK;
    case FIELD_REFUSE: break;
    }
    if (is_harmless(f->harmless, v))
        return OK;
    return request_fields_bad(d, "unsupported_parameter", f->name,
                              "%s is not currently supported by this server.", f->name);
}

/* ---- the members of a body ---- */

static int compare_name(struct text_view key, const char *name)
{
    size_t len = strlen(name);
    int c = memcmp(key.p, name, key.len < len ? key.len : len);
    return c != 0 ? c : (key.len > len) - (key.len < len);
}

static const struct field *find_field(struct text_view key, enum body_kind kind)
{
    size_t low = 0, high = ARRAY_LEN(fields);
    while (low < high) { /* the first field whose name is not before the key */
        size_t middle = (low + high) / 2;
        if (compare_name(key, fields[middle].name) > 0)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < ARRAY_LEN(fields) && compare_name(key, fields[low].name) == 0; low++)
        if (fields[low].where & kind)
            return &fields[low];
    return NULL;
}

status request_fields_read(struct request_draft *d)
{
    for (size_t i = 0; i < d->doc.n_members; i++) {
        const struct json_member *m = &d->doc.members[i];
        const struct field *f = find_field(m->key, d->kind);
        if (f != NULL && m->value.type != JSON_NULL)
            TRY(read_field(d, f, &m->value));
        if (f == NULL && d->rules->strict_fields) {
            struct quoted key = request_fields_quote(m->key.p, m->key.len);
            return request_fields_bad(d, "unknown_parameter", key.text, "Unknown parameter: `%s`.",
                                      key.text);
        }
    }
    return OK;
}
