/* The prompts of /v1/completions and the text or tokens of /tokenize and /detokenize: a string,
 * strings, token ids or lists of token ids. Ids are read in place, whatever their number. */
#include "api/request_fields.h"

#include <cjson/cJSON.h>
#include <string.h>

#define NO_PROMPT "Either prompt or prompt_embeds must be provided and non-empty."

static const char *param_of(const struct request_draft *d)
{
    return d->kind == BODY_DETOKENIZE ? "tokens" : "prompt";
}

static status empty_prompt(struct request_draft *d)
{
    return request_fields_bad(d, "invalid_value", param_of(d), NO_PROMPT);
}

static status bad_prompt(struct request_draft *d)
{
    return request_fields_bad(d, "invalid_type", param_of(d),
                              "`%s` must be a string, an array of strings, an array of token ids "
                              "or an array of such arrays, all of one kind.",
                              param_of(d));
}

status request_prompt_keep(struct request_draft *d, uint32_t i, const uint32_t *ids, size_t n)
{
    uint32_t *copy = ARENA_NEW(&d->r->mem, uint32_t, n);
    if (copy == NULL)
        return request_fields_full(d);
    if (n > 0)
        memcpy(copy, ids, n * sizeof *ids);
    d->r->prompts[i].ids = copy;
    d->r->prompts[i].n_ids = (uint32_t)n; /* a body of less than 4 GiB */
    return OK;
}

static status make_prompts(struct request_draft *d, size_t n)
{
    if (n == 0)
        return empty_prompt(d);
    if (n > MAX_PROMPTS)
        return request_fields_bad(d, "invalid_value", "prompt",
                                  "prompt may hold at most %d prompts, got %zu.", MAX_PROMPTS, n);
    d->r->prompts = ARENA_NEW(&d->r->mem, struct request_prompt, n);
    d->r->n_prompts = (uint32_t)n;
    return d->r->prompts == NULL ? request_fields_full(d) : OK;
}

/* ---- text ---- */

/* Control tokens in a plain prompt are meant: clients that template themselves write them. */
static status add_text(struct request_draft *d, uint32_t i, struct text_view text)
{
    bool bos = !d->add_special.given || d->add_special.v;
    unsigned flags = TOKENIZE_SPECIAL | (bos ? TOKENIZE_BOS : 0);
    size_t n = 0;
    if (text.len == 0 && d->kind == BODY_COMPLETION)
        return empty_prompt(d);
    uint32_t *ids = mem_try_alloc((text.len + 1) * sizeof *ids);
    if (ids == NULL)
        return request_fields_full(d);
    d->r->prompts[i].text = text.p;
    d->r->prompts[i].text_len = text.len;
    status st = tokenize(d->rules->info->tokenizer, d->scratch, text.p, text.len, flags, ids,
                         text.len + 1, &n);
    if (st != OK)
        st = request_fields_full(d);
    else if (n == 0 && d->kind == BODY_COMPLETION)
        st = empty_prompt(d);
    else
        st = request_prompt_keep(d, i, ids, n);
    mem_free(ids);
    return st;
}

static status read_text(struct request_draft *d)
{
    struct text_view text = json_text(&d->prompt, &d->r->mem);
    if (text.p == NULL)
        return request_fields_full(d);
    TRY(make_prompts(d, 1));
    return add_text(d, 0, text);
}

static status read_texts_of(struct request_draft *d, const cJSON *tree)
{
    size_t n = 0;
    for (const cJSON *s = tree->child; s != NULL; s = s->next, n++)
        if (!cJSON_IsString(s))
            return bad_prompt(d);
    TRY(make_prompts(d, n));
    uint32_t i = 0;
    for (const cJSON *s = tree->child; s != NULL; s = s->next) {
        size_t len = strlen(s->valuestring);
        char *copy = arena_strdup(&d->r->mem, s->valuestring, len);
        if (copy == NULL)
            return request_fields_full(d);
        TRY(add_text(d, i++, (struct text_view){copy, len}));
    }
    return OK;
}

static status read_texts(struct request_draft *d)
{
    cJSON *tree = json_tree(&d->prompt);
    if (tree == NULL)
        return request_fields_full(d);
    status st = read_texts_of(d, tree);
    cJSON_Delete(tree);
    return st;
}

/* ---- token ids ---- */

/* An id must have a row in the embedding and a text to echo. */
static uint32_t n_known_ids(const struct engine_info *info)
{
    uint32_t n = tokenizer_vocab(info->tokenizer);
    return n < info->vocab ? n : info->vocab;
}

static status add_ids(struct request_draft *d, uint32_t i, const struct json_value *list)
{
    size_t n = json_count_list(list), at = 0;
    uint32_t known = n_known_ids(d->rules->info);
    struct json_walk w = json_enter(list);
    uint32_t *ids = ARENA_NEW(&d->r->mem, uint32_t, n);
    if (ids == NULL)
        return request_fields_full(d);
    for (enum json_type type; (type = json_peek(&w)) != JSON_ABSENT;) {
        int64_t id = 0;
        if (type != JSON_NUMBER)
            return bad_prompt(d);
        struct json_value item = json_take_number(&w);
        enum json_verdict verdict = json_int(&item, &id);
        if (verdict == INT_FRACTION)
            return bad_prompt(d);
        if (verdict != INT_OK || id < 0 || id >= known)
            return request_fields_bad(d, "invalid_value", param_of(d),
                                      "Token id %s at index %zu is out of vocabulary: ids are 0 to "
                                      "%u.",
                                      request_fields_quote(item.p, item.len).text, at, known - 1);
        CHECK(at < n);
        ids[at++] = (uint32_t)id;
    }
    d->r->prompts[i].ids = ids;
    d->r->prompts[i].n_ids = (uint32_t)at;
    return at == 0 && d->kind == BODY_COMPLETION ? empty_prompt(d) : OK;
}

static status read_ids(struct request_draft *d, const struct json_value *list)
{
    TRY(make_prompts(d, 1));
    return add_ids(d, 0, list);
}

static status read_id_lists(struct request_draft *d)
{
    struct json_value list;
    size_t n = 0;
    struct json_walk w = json_enter(&d->prompt);
    for (enum json_type type; (type = json_peek(&w)) != JSON_ABSENT; n++)
        if (type != JSON_ARRAY || !json_take_list(&w, &list))
            return bad_prompt(d);
    TRY(make_prompts(d, n));
    w = json_enter(&d->prompt);
    for (uint32_t i = 0; json_peek(&w) != JSON_ABSENT; i++) {
        CHECK(json_take_list(&w, &list));
        TRY(add_ids(d, i, &list));
    }
    return OK;
}

/* ---- which of them ---- */

static status read_tokens(struct request_draft *d)
{
    if (d->tokens.type == JSON_ABSENT)
        return request_fields_bad(d, "missing_required_parameter", "tokens",
                                  "`tokens` is required.");
    if (d->tokens.type != JSON_ARRAY)
        return request_fields_type(d, "tokens", "an array of token ids");
    return read_ids(d, &d->tokens);
}

status request_prompt_read(struct request_draft *d)
{
    const struct json_value *v = &d->prompt;
    if (d->kind == BODY_DETOKENIZE)
        return read_tokens(d);
    if (v->type == JSON_ABSENT)
        return request_fields_bad(d, "missing_required_parameter", "prompt", NO_PROMPT);
    if (v->type == JSON_STRING)
        return read_text(d);
    if (d->kind == BODY_TOKENIZE)
        return request_fields_type(d, "prompt", "a string");
    if (v->type != JSON_ARRAY)
        return bad_prompt(d);
    struct json_walk w = json_enter(v);
    switch (json_peek(&w)) {
    case JSON_ABSENT: return empty_prompt(d);
    case JSON_STRING: return read_texts(d);
    case JSON_NUMBER: return read_ids(d, v);
    case JSON_ARRAY: return read_id_lists(d);
    default: return bad_prompt(d);
    }
}
