/* The fields that shape sampling and the answer, and what they say about each other. */
#include "api/request_fields.h"
#include "kernels/core/sha256.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_MODEL_NAME = 256, MAX_REQUEST_ID = 64, MAX_SALT = 64, BIAS_LIMIT = 100 };

status request_sampling_model(struct request_draft *d, const struct json_value *v)
{
    const struct request_rules *rules = d->rules;
    if (v->type != JSON_STRING)
        return request_fields_type(d, "model", "a string");
    for (uint32_t i = 0; i < rules->n_names; i++)
        if (json_equals(v, rules->names[i])) {
            d->r->model = rules->names[i];
            return OK;
        }
    if (rules->accept_any_model && v->len <= MAX_MODEL_NAME + 2) {
        struct text_view name = json_text(v, &d->r->mem);
        if (name.p == NULL)
            return request_fields_full(d);
        d->r->model = name.len ? name.p : rules->names[0];
        return OK;
    }
    error_set(d->e, 404, "model_not_found", "model", "The model `%s` does not exist.",
              request_fields_quote(v->p + 1, v->len - 2).text);
    return ERR_PROTO;
}

/* A boolean of an object; absent and null leave *out alone. */
static bool read_flag(const cJSON *object, const char *name, bool *out)
{
    const cJSON *flag = cJSON_GetObjectItemCaseSensitive(object, name);
    if (flag == NULL || cJSON_IsNull(flag))
        return true;
    if (!cJSON_IsBool(flag))
        return false;
    *out = cJSON_IsTrue(flag);
    return true;
}

status request_sampling_stream_options(struct request_draft *d, const struct json_value *v)
{
    bool unused = false;
    if (v->type != JSON_OBJECT)
        return request_fields_type(d, "stream_options", "an object");
    cJSON *tree = json_tree(v);
    if (tree == NULL)
        return request_fields_full(d);
    const char *wrong =
        !read_flag(tree, "include_usage", &d->r->include_usage) ? "stream_options.include_usage"
        : !read_flag(tree, "continuous_usage_stats", &d->r->continuous_usage)
            ? "stream_options.continuous_usage_stats"
        : !read_flag(tree, "include_obfuscation", &unused) ? "stream_options.include_obfuscation"
                                                           : NULL;
    cJSON_Delete(tree);
    d->stream_options = true;
    return wrong == NULL ? OK : request_fields_type(d, wrong, "a boolean");
}

/* ---- stops ---- */

static status add_stop(struct request_draft *d, const char *p, size_t len)
{
    struct request *r = d->r;
    if (len == 0)
        return request_fields_bad(d, "invalid_value", "stop",
                                  "stop cannot contain an empty string.");
    if (len > MAX_STOP_BYTES)
        return request_fields_bad(d, "invalid_value", "stop",
                                  "A string of stop may have at most %d bytes, got %zu.",
                                  MAX_STOP_BYTES, len);
    if (r->n_stops == MAX_STOPS)
        return request_fields_bad(d, "invalid_value", "stop", "stop may have at most %d strings.",
                                  MAX_STOPS);
    char *copy = arena_strdup(&r->mem, p, len);
    if (copy == NULL)
        return request_fields_full(d);
    r->stops[r->n_stops++] = (struct text_view){copy, len};
    return OK;
}

status request_sampling_stop(struct request_draft *d, const struct json_value *v)
{
    if (v->type != JSON_STRING && v->type != JSON_ARRAY)
        return request_fields_type(d, "stop", "a string or an array of strings");
    cJSON *tree = json_tree(v);
    if (tree == NULL)
        return request_fields_full(d);
    status st = OK;
    if (cJSON_IsString(tree)) {
        st = add_stop(d, tree->valuestring, strlen(tree->valuestring));
    } else {
        for (const cJSON *s = tree->child; s != NULL && st == OK; s = s->next)
            st = cJSON_IsString(s) ? add_stop(d, s->valuestring, strlen(s->valuestring))
                                   : request_fields_type(d, "stop", "an array of strings");
    }
    cJSON_Delete(tree);
    return st;
}

status request_sampling_stop_ids(struct request_draft *d, const struct json_value *v)
{
    struct request *r = d->r;
    if (v->type != JSON_ARRAY)
        return request_fields_type(d, "stop_token_ids", "an array of integers");
    struct json_walk w = json_enter(v);
    for (enum json_type type; (type = json_peek(&w)) != JSON_ABSENT;) {
        int64_t id;
        if (type != JSON_NUMBER)
            return request_fields_type(d, "stop_token_ids", "an array of integers");
        struct json_value item = json_take_number(&w);
        enum json_verdict verdict = json_int(&item, &id);
        if (verdict == INT_FRACTION)
            return request_fields_type(d, "stop_token_ids", "an array of integers");
        if (verdict != INT_OK || id < 0 || id >= d->rules->info->vocab)
            return request_fields_bad(d, "invalid_value", "stop_token_ids",
                                      "stop_token_ids: %s is not a token id; the model's logits "
                                      "have %u entries, 0 to %u.",
                                      request_fields_quote(item.p, item.len).text,
                                      d->rules->info->vocab, d->rules->info->vocab - 1);
        if (r->n_stop_ids == MAX_STOP_IDS)
            return request_fields_bad(d, "invalid_value", "stop_token_ids",
                                      "stop_token_ids may have at most %d entries.", MAX_STOP_IDS);
        r->stop_ids[r->n_stop_ids++] = (uint32_t)id;
    }
    return OK;
}

/* ---- logit_bias ---- */

/* Decimal, no sign, no leading zero, below the width; else -1. */
static int64_t bias_id(const char *key, uint32_t width)
{
    uint64_t id = 0;
    size_t len = strlen(key);
    if (len == 0 || len > 10 || strspn(key, "0123456789") != len || (len > 1 && key[0] == '0'))
        return -1;
    for (size_t i = 0; i < len; i++)
        id = id * 10 + (uint64_t)(key[i] - '0');
    return id < width ? (int64_t)id : -1;
}

/* Names every bad key at once, as far as a message reaches: a client fixes a table in one go. */
static status read_bias(struct request_draft *d, const cJSON *tree)
{
    enum { LISTED = 600 }; /* bytes of names in the message */
    struct request *r = d->r;
    char names[LISTED + 64] = "", value_of[96] = "";
    size_t at = 0, n_bad = 0;
    for (const cJSON *item = tree->child; item != NULL; item = item->next) {
        int64_t id = bias_id(item->string, d->rules->info->vocab);
        struct quoted key = request_fields_quote(item->string, strlen(item->string));
        if (id < 0) {
            n_bad++;
            if (at < LISTED)
                at += (size_t)snprintf(names + at, sizeof names - at, "%s`%s`", at > 0 ? ", " : "",
                                       key.text);
        } else if (!cJSON_IsNumber(item)) {
            snprintf(value_of, sizeof value_of, " The value of token %s must be a number.",
                     key.text);
        } else if (r->n_bias < MAX_BIAS) {
            r->bias_ids[r->n_bias] = (uint32_t)id;
            r->bias[r->n_bias++] = (float)fmin(fmax(item->valuedouble, -BIAS_LIMIT), BIAS_LIMIT);
        } else {
            return request_fields_bad(d, "invalid_value", "logit_bias",
                                      "logit_bias may have at most %d entries.", MAX_BIAS);
        }
    }
    if (n_bad > 0)
        return request_fields_bad(d, "invalid_value", "logit_bias",
                                  "logit_bias has %zu keys that are not token ids (the logits have "
                                  "%u entries, 0 to %u): %s.%s",
                                  n_bad, d->rules->info->vocab, d->rules->info->vocab - 1, names,
                                  value_of);
    if (value_of[0] != '\0')
        return request_fields_bad(d, "invalid_value", "logit_bias", "logit_bias:%s", value_of);
    return OK;
}

status request_sampling_bias(struct request_draft *d, const struct json_value *v)
{
    if (v->type != JSON_OBJECT)
        return request_fields_type(d, "logit_bias", "an object of token ids and numbers");
    cJSON *tree = json_tree(v);
    if (tree == NULL)
        return request_fields_full(d);
    status st = read_bias(d, tree);
    cJSON_Delete(tree);
    return st;
}

/* ---- strings with an alphabet ---- */

static bool is_clean(struct text_view s, size_t most, const char *more)
{
    for (size_t i = 0; i < s.len; i++) {
        char c = s.p[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
              strchr(more, c) != NULL))
            return false;
    }
    return s.len >= 1 && s.len <= most;
}

status request_sampling_salt(struct request_draft *d, const struct json_value *v)
{
    if (v->type != JSON_STRING)
        return request_fields_type(d, "cache_salt", "a string");
    struct text_view salt = json_text(v, &d->r->mem);
    if (salt.p == NULL)
        return request_fields_full(d);
    if (!is_clean(salt, MAX_SALT, "_-"))
        return request_fields_bad(
            d, "invalid_value", "cache_salt",
            "cache_salt must be 1 to %d characters of A-Z, a-z, 0-9, _ and -.", MAX_SALT);
    unsigned char digest[SHA256_BYTES];
    struct sha256 c;
    sha256_init(&c);
    sha256_add(&c, salt.p, salt.len);
    sha256_done(&c, digest);
    memcpy(d->r->salt, digest, sizeof d->r->salt);
    return OK;
}

/* For the log alone; one that could not stand there is dropped. */
status request_sampling_id(struct request_draft *d, const struct json_value *v)
{
    if (v->type != JSON_STRING)
        return request_fields_type(d, "request_id", "a string");
    if (v->len > MAX_REQUEST_ID + 2)
        return OK;
    struct text_view id = json_text(v, &d->r->mem);
    if (id.p == NULL)
        return request_fields_full(d);
    if (is_clean(id, MAX_REQUEST_ID, "._-"))
        d->r->client_request_id = id.p;
    return OK;
}

/* There is no grammar engine: text alone can be promised. */
status request_sampling_format(struct request_draft *d, const struct json_value *v)
{
    if (v->type != JSON_OBJECT)
        return request_fields_type(d, "response_format", "an object");
    cJSON *tree = json_tree(v);
    if (tree == NULL)
        return request_fields_full(d);
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(tree, "type");
    const char *name = cJSON_IsString(type) ? type->valuestring : "";
    status st = OK;
    if (!cJSON_IsString(type))
        st = request_fields_type(d, "response_format.type", "a string");
    else if (strcmp(name, "json_object") == 0 || strcmp(name, "json_schema") == 0)
        st = request_fields_bad(d, "unsupported_parameter", "response_format",
                                "response_format of type `%s` is not currently supported by this "
                                "server.",
                                name);
    else if (strcmp(name, "text") != 0)
        st = request_fields_bad(d, "invalid_value", "response_format.type",
                                "response_format.type must be `text`, got `%s`.",
                                request_fields_quote(name, strlen(name)).text);
    cJSON_Delete(tree);
    return st;
}

/* ---- what the fields say about each other ---- */

static double number_or(struct given_number n, double otherwise)
{
    return n.given ? n.v : isnan(otherwise) ? 1.0 : otherwise;
}

static void settle_params(struct request_draft *d)
{
    const struct request_rules *rules = d->rules;
    int64_t top_k = d->top_k.given ? d->top_k.v : rules->default_top_k;
    d->r->params = (struct sample_params){
        .temperature = (float)number_or(d->temperature, rules->default_temperature),
        .top_p = (float)number_or(d->top_p, rules->default_top_p),
        .min_p = d->min_p.given ? (float)d->min_p.v : 0,
        .repetition_penalty = d->repetition.given ? (float)d->repetition.v : 1,
        .presence_penalty = d->presence.given ? (float)d->presence.v : 0,
        .frequency_penalty = d->frequency.given ? (float)d->frequency.v : 0,
        .top_k = top_k <= 0 || top_k >= rules->info->vocab ? 0 : (uint32_t)top_k,
    };
    if (d->r->params.top_p <= 0) /* above 0 as a double, not as a float: the best token alone */
        d->r->params.top_p = 1e-30f;
}

/* A vocabulary of ten tokens has ten best ones, whatever was asked. */
static int32_t at_most_vocab(const struct request_draft *d, int64_t tops)
{
    int64_t vocab = d->rules->info->vocab;
    return (int32_t)(tops < vocab ? tops : vocab);
}

static status settle_logprobs(struct request_draft *d)
{
    struct request *r = d->r;
    r->top_logprobs = -1;
    r->prompt_logprobs = d->prompt_logprobs.given ? at_most_vocab(d, d->prompt_logprobs.v) : -1;
    if (d->prompt_logprobs.given && d->stream.v)
        return request_fields_bad(d, NULL, "prompt_logprobs",
                                  "`prompt_logprobs` are not available when `stream=True`.");
    if (d->kind == BODY_COMPLETION) {
        r->logprobs = d->logprobs.given;
        r->top_logprobs = d->logprobs.given ? at_most_vocab(d, d->logprobs.v) : -1;
        return OK;
    }
    if (d->top_logprobs.v > 0 && !d->logprobs_flag.v)
        return request_fields_bad(d, NULL, "top_logprobs",
                                  "when using `top_logprobs`, `logprobs` must be set to true.");
    r->logprobs = d->logprobs_flag.v;
    if (r->logprobs)
        r->top_logprobs = at_most_vocab(d, d->top_logprobs.v);
    return OK;
}

/* What was asked; how much of it a context can give is request_room's. */
/* vLLM's field. Where there are no tenants there is nobody to be ordered among. */
status request_sampling_priority(struct request_draft *d, const struct json_value *v)
{
    const struct request_rules *rules = d->rules;
    int64_t n;
    if (!rules->has_priority && v->type == JSON_NUMBER && json_double(v) == 0)
        return OK;
    if (!rules->has_priority)
        return request_fields_bad(d, "unsupported_parameter", "priority",
                                  "priority is not currently supported by this server.");
    if (v->type != JSON_NUMBER || json_int(v, &n) == INT_FRACTION)
        return request_fields_type(d, "priority", "an integer");
    if (json_int(v, &n) != INT_OK || n < rules->priority_low || n > rules->priority_high)
        return request_fields_bad(d, "invalid_value", "priority",
                                  "priority must be from %d to %d for this tenant, got %s.",
                                  rules->priority_low, rules->priority_high,
                                  request_fields_quote(v->p, v->len).text);
    d->r->priority = (int32_t)n;
    return OK;
}

static status settle_max_tokens(struct request_draft *d)
{
    struct request *r = d->r;
    const struct request_rules *rules = d->rules;
    struct given_int most =
        d->max_completion_tokens.given ? d->max_completion_tokens : d->max_tokens;
    uint32_t otherwise = d->kind == BODY_COMPLETION      ? 16
                         : rules->default_max_tokens > 0 ? rules->default_max_tokens
                                                         : rules->info->max_model_len;
    if (most.given && most.v == 0 && !r->echo)
        return request_fields_bad(d, "invalid_value", "max_tokens",
                                  "max_tokens must be at least 1, got 0. It may be 0 with `echo` "
                                  "in completions.");
    if (rules->max_tokens > 0 && most.given && most.v > rules->max_tokens)
        return request_fields_bad(
            d, "invalid_value",
            d->max_completion_tokens.given ? "max_completion_tokens" : "max_tokens",
            "%s must be at most %u for this tenant, got %lld.",
            d->max_completion_tokens.given ? "max_completion_tokens" : "max_tokens",
            rules->max_tokens, (long long)most.v);
    r->max_tokens_given = most.given;
    r->max_tokens = !most.given ? otherwise : most.v > UINT32_MAX ? UINT32_MAX : (uint32_t)most.v;
    if (rules->max_tokens > 0 && r->max_tokens > rules->max_tokens)
        r->max_tokens = rules->max_tokens;
    if (d->min_tokens.v > r->max_tokens)
        return request_fields_bad(d, "invalid_value", "min_tokens",
                                  "min_tokens must be at most max_tokens (%u), got %lld.",
                                  r->max_tokens, (long long)d->min_tokens.v);
    r->min_tokens = (uint32_t)d->min_tokens.v;
    return OK;
}

status request_sampling_settle(struct request_draft *d)
{
    struct request *r = d->r;
    if (r->model == NULL)
        r->model = d->rules->names[0];
    r->stream = d->stream.v;
    if (d->stream_options && !r->stream)
        return request_fields_bad(d, NULL, "stream_options",
                                  "Stream options can only be defined when `stream=True`.");
    r->n = d->n.given ? (uint32_t)d->n.v : 1;
    if (d->best_of.given && d->best_of.v > 1 && d->best_of.v != r->n)
        return request_fields_bad(d, "unsupported_parameter", "best_of",
                                  "best_of is not currently supported: it may be absent or equal "
                                  "to n (%u).",
                                  r->n);
    r->echo = d->echo.v;
    r->include_stop = d->include_stop.v;
    r->ignore_eos = d->ignore_eos.v;
    r->skip_special = !d->skip_special.given || d->skip_special.v;
    r->return_token_ids = d->return_ids.v;
    r->token_ids_as_text = d->ids_as_text.v;
    settle_params(d);
    TRY(settle_logprobs(d));
    return settle_max_tokens(d);
}
