/* The fields of /v1/chat/completions: messages and what goes with them. Messages become the text of
 * the model's template, and that becomes ids; tools, functions and other modalities are refused by
 * name, because a model that never sees them would answer as if it had. */
#include "api/request_fields.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

enum { MAX_ROLE_BYTES = 64, MAX_KWARG_BYTES = 256 };

/* ---- what is accepted without effect, or not ---- */

/* Variables for the template. No template that we serve reads any, so those of a harmless kind are
 * accepted as a template would that does not use them. */
status request_chat_kwargs(struct request_draft *d, const struct json_value *v)
{
    if (v->type != JSON_OBJECT)
        return request_fields_type(d, "chat_template_kwargs", "an object");
    cJSON *tree = json_tree(v);
    if (tree == NULL)
        return request_fields_full(d);
    bool good = true;
    for (const cJSON *item = tree->child; item != NULL && good; item = item->next)
        good = cJSON_IsBool(item) || cJSON_IsNumber(item) || cJSON_IsNull(item) ||
               (cJSON_IsString(item) && strlen(item->valuestring) <= MAX_KWARG_BYTES);
    cJSON_Delete(tree);
    return good ? OK
                : request_fields_type(d, "chat_template_kwargs",
                                      "an object of booleans, numbers and short strings");
}

status request_chat_modalities(struct request_draft *d, const struct json_value *v)
{
    if (v->type != JSON_ARRAY)
        return request_fields_type(d, "modalities", "an array of strings");
    cJSON *tree = json_tree(v);
    if (tree == NULL)
        return request_fields_full(d);
    bool text_only = true;
    for (const cJSON *m = tree->child; m != NULL; m = m->next)
        text_only = text_only && cJSON_IsString(m) && strcmp(m->valuestring, "text") == 0;
    cJSON_Delete(tree);
    if (text_only)
        return OK;
    return request_fields_bad(d, "unsupported_parameter", "modalities",
                              "modalities other than `text` are not currently supported by this "
                              "server.");
}

status request_chat_function_call(struct request_draft *d, const struct json_value *v)
{
    if (json_equals(v, "none") || json_equals(v, "auto"))
        return OK; /* functions are refused: there is nothing to call */
    return request_fields_bad(d, "unsupported_parameter", "function_call",
                              "function_call is not currently supported by this server.");
}

/* There is no parser of tool calls and no grammar: tools may only be there to be left out. */
static status check_tools(struct request_draft *d)
{
    const struct json_value *tools = &d->tools, *choice = &d->tool_choice;
    if (tools->type != JSON_ABSENT && tools->type != JSON_ARRAY)
        return request_fields_type(d, "tools", "an array");
    if (choice->type != JSON_ABSENT && choice->type != JSON_STRING && choice->type != JSON_OBJECT)
        return request_fields_type(d, "tool_choice", "a string or an object");
    bool none = json_equals(choice, "none");
    bool some = tools->type == JSON_ARRAY && !request_fields_empty(tools); /* agents send [] */
    if (!some && choice->type != JSON_ABSENT && !none && !json_equals(choice, "auto"))
        return request_fields_bad(d, "invalid_value", "tool_choice",
                                  "`tool_choice` can only be set when `tools` are set.");
    if (!some || none)
        return OK;
    bool forced = choice->type != JSON_ABSENT && !json_equals(choice, "auto");
    const char *param = forced ? "tool_choice" : "tools";
    return request_fields_bad(d, "unsupported_parameter", param,
                              "%s is not currently supported by this server; `tool_choice` may be "
                              "`none`.",
                              param);
}

/* ---- messages ---- */

static status bad_message(struct request_draft *d, const char *code, size_t i, const char *field,
                          const char *what)
{
    char param[48];
    snprintf(param, sizeof param, "messages[%zu]%s", i, field);
    return request_fields_bad(d, code, param, "`%s` %s.", param, what);
}

static status bad_part(struct request_draft *d, size_t i, size_t part, const cJSON *type)
{
    char param[64];
    snprintf(param, sizeof param, "messages[%zu].content[%zu]", i, part);
    if (!cJSON_IsString(type))
        return request_fields_bad(d, "invalid_value", param,
                                  "`%s` must be an object with `type` and `text`.", param);
    struct quoted name = request_fields_quote(type->valuestring, strlen(type->valuestring));
    return request_fields_bad(d, "unsupported_parameter", param,
                              "`%s`: a content part of type `%s` is not supported; parts must be "
                              "text.",
                              param, name.text);
}

/* The text of a part, or NULL. */
static const char *part_text(const cJSON *part)
{
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(part, "type");
    if (cJSON_IsString(part))
        return part->valuestring;
    if (!cJSON_IsObject(part) || !cJSON_IsString(type))
        return NULL;
    const char *key =
        strcmp(type->valuestring, "refusal") == 0 ? "refusal"
        : strcmp(type->valuestring, "text") == 0 || strcmp(type->valuestring, "input_text") == 0
            ? "text"
            : NULL;
    const cJSON *text = key ? cJSON_GetObjectItemCaseSensitive(part, key) : NULL;
    return text != NULL && cJSON_IsString(text) ? text->valuestring : NULL;
}

/* Parts joined by newlines, as vLLM does for templates that want a string. */
static status join_parts(struct request_draft *d, size_t i, const cJSON *content,
                         struct text_view *out)
{
    size_t total = 0, n = 0, at = 0;
    for (const cJSON *part = content->child; part != NULL; part = part->next, n++) {
        const char *text = part_text(part);
        if (text == NULL)
            return bad_part(d, i, n, cJSON_GetObjectItemCaseSensitive(part, "type"));
        total += strlen(text) + 1;
    }
    char *joined = arena_alloc(&d->r->mem, total + 1, 1, 1);
    if (joined == NULL)
        return request_fields_full(d);
    for (const cJSON *part = content->child; part != NULL; part = part->next) {
        const char *text = part_text(part);
        size_t len = strlen(text);
        memcpy(joined + at, text, len + 1);
        at += len;
        if (part->next != NULL)
            joined[at++] = '\n';
    }
    *out = (struct text_view){joined, at};
    return OK;
}

static status read_content(struct request_draft *d, size_t i, const cJSON *message, bool optional,
                           struct text_view *out)
{
    const cJSON *content = cJSON_GetObjectItemCaseSensitive(message, "content");
    if (cJSON_IsString(content)) {
        *out = (struct text_view){content->valuestring, strlen(content->valuestring)};
        return OK;
    }
    if (cJSON_IsArray(content))
        return join_parts(d, i, content, out);
    if (content != NULL && !cJSON_IsNull(content))
        return bad_message(d, "invalid_type", i, ".content",
                           "must be a string or an array of text parts");
    *out = (struct text_view){"", 0};
    return optional ? OK
                    : bad_message(d, "missing_required_parameter", i, ".content", "is required");
}

static status read_message(struct request_draft *d, size_t i, const cJSON *message,
                           struct chat_message *out)
{
    if (!cJSON_IsObject(message))
        return bad_message(d, "invalid_type", i, "", "must be an object");
    const cJSON *role = cJSON_GetObjectItemCaseSensitive(message, "role");
    const cJSON *name = cJSON_GetObjectItemCaseSensitive(message, "name");
    if (role == NULL || cJSON_IsNull(role))
        return bad_message(d, "missing_required_parameter", i, ".role", "is required");
    size_t len = cJSON_IsString(role) ? strlen(role->valuestring) : 0;
    if (len == 0 || len > MAX_ROLE_BYTES)
        return bad_message(d, "invalid_value", i, ".role", "must be a string of 1 to 64 bytes");
    if (name != NULL && !cJSON_IsNull(name) && !cJSON_IsString(name))
        return bad_message(d, "invalid_type", i, ".name", "must be a string");
    out->role = (struct text_view){role->valuestring, len};
    if (strcmp(role->valuestring, "developer") == 0) /* newer than the templates */
        out->role = (struct text_view){"system", 6};
    bool assistant = strcmp(role->valuestring, "assistant") == 0;
    return read_content(d, i, message, assistant, &out->content);
}

/* ---- template and tokens ---- */

static status keep_tokens(struct request_draft *d, const struct chat_text *text)
{
    const struct tokenizer *t = d->rules->info->tokenizer;
    size_t room = text->total_bytes + text->n_runs + 1, n = 0, bos = 0;
    uint32_t *ids = mem_try_alloc((room + 1) * sizeof *ids);
    if (ids == NULL)
        return request_fields_full(d);
    if (d->add_special.v && tokenizer_adds_bos(t))
        ids[bos++] = tokenizer_bos(t);
    status st = chat_tokenize(t, d->scratch, text, d->rules->trust_chat_input, ids + bos, room, &n);
    st = st != OK ? request_fields_full(d) : request_prompt_keep(d, 0, ids, bos + n);
    mem_free(ids);
    return st;
}

/* echo puts the last message in front of the answer if the answer goes on in its role. */
static status keep_echo(struct request_draft *d, const struct chat_args *a)
{
    const struct chat_message *last = &a->messages[a->n_messages - 1];
    bool same_role = !a->add_generation_prompt ||
                     (last->role.len == 9 && memcmp(last->role.p, "assistant", 9) == 0);
    if (!d->echo.v || !same_role)
        return OK;
    d->r->prompts[0].echo_prefix = arena_strdup(&d->r->mem, last->content.p, last->content.len);
    d->r->prompts[0].echo_prefix_len = last->content.len;
    return d->r->prompts[0].echo_prefix == NULL ? request_fields_full(d) : OK;
}

static status render(struct request_draft *d, const struct chat_args *a)
{
    struct chat_text text;
    d->r->prompts = ARENA_NEW(&d->r->mem, struct request_prompt, 1);
    d->r->n_prompts = 1;
    if (d->r->prompts == NULL)
        return request_fields_full(d);
    status st = chat_render(d->rules->info->chat, a, &d->r->mem, &text);
    if (st == ERR_FULL)
        return request_fields_full(d);
    if (st != OK)
        return request_fields_bad(d, "invalid_value", "messages", "%s", err_text());
    TRY(keep_echo(d, a));
    return keep_tokens(d, &text);
}

static status read_messages(struct request_draft *d, const cJSON *tree)
{
    struct chat_args a = {.add_generation_prompt = d->generation_prompt.given
                                                       ? d->generation_prompt.v
                                                       : !d->continue_final.v,
                          .continue_final_message = d->continue_final.v};
    for (const cJSON *m = tree->child; m != NULL; m = m->next)
        a.n_messages++;
    struct chat_message *messages = ARENA_NEW(&d->r->mem, struct chat_message, a.n_messages);
    if (messages == NULL)
        return request_fields_full(d);
    a.messages = messages;
    size_t i = 0;
    for (const cJSON *m = tree->child; m != NULL; m = m->next, i++)
        TRY(read_message(d, i, m, &messages[i]));
    return render(d, &a);
}

status request_chat_read(struct request_draft *d)
{
    const struct json_value *v = &d->messages;
    if (d->rules->info->chat == NULL)
        return request_fields_bad(d, "unsupported_parameter", "messages",
                                  "The model has no chat template, so it cannot chat; use "
                                  "/v1/completions.");
    TRY(check_tools(d));
    if (d->generation_prompt.v && d->continue_final.v)
        return request_fields_bad(d, NULL, "continue_final_message",
                                  "Cannot set both `continue_final_message` and "
                                  "`add_generation_prompt` to True.");
    if (v->type == JSON_ABSENT)
        return request_fields_bad(d, "missing_required_parameter", "messages",
                                  "`messages` is required.");
    if (v->type != JSON_ARRAY)
        return request_fields_type(d, "messages", "an array");
    if (request_fields_empty(v))
        return request_fields_bad(d, "invalid_value", "messages",
                                  "messages must have at least 1 message.");
    cJSON *tree = json_tree(v);
    if (tree == NULL)
        return request_fields_full(d);
    status st = read_messages(d, tree);
    cJSON_Delete(tree);
    return st;
}
