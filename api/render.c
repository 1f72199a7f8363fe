/* Answers as JSON (render.h). Key order is that of reference/api.md, byte for byte. */
#include "api/render.h"

#include <stdio.h>
#include <string.h>

static bool is_chat(const struct render *v)
{
    return v->r->kind == REQUEST_CHAT;
}

/* A literal's length is known to the compiler. */
#define LIT(w, s) write_bytes((w), "" s, sizeof(s) - 1)

void render_init(struct render *v, const struct request *r, const struct tokenizer *tok,
                 const char *suffix, uint64_t created, const char *fingerprint)
{
    bool chat = r->kind == REQUEST_CHAT;
    *v = (struct render){.r = r, .tok = tok, .fingerprint = fingerprint, .created = created};
    v->usage = r->stream && r->include_usage;
    v->usage_each = v->usage && r->continuous_usage;
    snprintf(v->id, sizeof v->id, "%s-%s", chat ? "chatcmpl" : "cmpl", suffix);
    writer_init(&v->head);
    writer_init(&v->key);
    LIT(&v->head, "data: ");
    v->json_at = v->head.len;
    LIT(&v->head, "{\"id\":");
    write_string(&v->head, v->id, strlen(v->id));
    LIT(&v->head, ",\"object\":");
    write_text(&v->head, !chat       ? "\"text_completion\""
                         : r->stream ? "\"chat.completion.chunk\""
                                     : "\"chat.completion\"");
    LIT(&v->head, ",\"created\":");
    write_u64(&v->head, created);
    LIT(&v->head, ",\"model\":");
    write_string(&v->head, r->model, strlen(r->model));
    LIT(&v->head, ",\"choices\":[");
}

void render_fini(struct render *v)
{
    writer_fini(&v->head);
    writer_fini(&v->key);
}

/* --- log-probabilities -------------------------------------------------------------------------- */

/* A token as text: whole characters, broken ones as U+FFFD. */
static void write_token_text(struct render *v, struct writer *w, uint32_t id)
{
    if (v->r->token_ids_as_text) {
        write_format(w, "token_id:%u", id);
        return;
    }
    struct text_view b = render_token_bytes(v->tok, id);
    struct utf8_stream u = {0};
    char out[3 * (128 + 3)];
    for (size_t at = 0, n; at < b.len; at += n) {
        n = b.len - at < 128 ? b.len - at : 128;
        write_bytes(w, out, utf8_stream_push(&u, b.p + at, n, out));
    }
    write_bytes(w, out, utf8_stream_flush(&u, out));
}

static void write_token_string(struct render *v, struct writer *w, uint32_t id)
{
    writer_reset(&v->key);
    write_token_text(v, &v->key, id);
    write_string(w, v->key.p, v->key.len);
}

static const struct sample_top *tops_of(const struct text_tokens *l, const struct text_token *t)
{
    return l->tops == NULL ? NULL : l->tops + t->top_at;
}

/* The number to print for a token: the same float where it is also among its own alternatives, since
 * clients compare the two for equality. */
static float logprob_of(const struct text_token *t, const struct sample_top *top)
{
    for (uint32_t i = 0; i < t->n_top; i++)
        if (top[i].token == t->id)
            return top[i].logprob;
    return t->logprob;
}

/* The completions form: an object from text to number. Alternatives come best first, so of two with
 * equal text the first is the larger. */
static void write_top_object(struct render *v, struct writer *w, const struct text_tokens *l,
                             const struct text_token *t)
{
    size_t key_at[SAMPLE_MAX_LOGPROBS + 2] = {0};
    const struct sample_top *top = tops_of(l, t);
    uint32_t n = t->n_top < SAMPLE_MAX_LOGPROBS ? t->n_top : SAMPLE_MAX_LOGPROBS, n_keys = 0;
    writer_reset(&v->key);
    LIT(w, "{");
    for (uint32_t i = 0; i <= n; i++) { /* the last one is the token itself */
        size_t from = v->key.len;
        write_token_text(v, &v->key, i < n ? top[i].token : t->id);
        size_t len = v->key.len - from;
        bool known = false;
        for (uint32_t k = 0; k < n_keys && !known; k++)
            known = key_at[k + 1] - key_at[k] == len &&
                    memcmp(v->key.p + key_at[k], v->key.p + from, len) == 0;
        if (known) {
            v->key.len = from;
            continue;
        }
        key_at[++n_keys] = v->key.len;
        if (n_keys > 1)
            LIT(w, ",");
        write_string(w, v->key.p + from, len);
        LIT(w, ":");
        write_logprob(w, i < n ? top[i].logprob : logprob_of(t, top));
    }
    LIT(w, "}");
}

static void write_completion_logprobs(struct render *v, struct writer *w, const struct text_out *o)
{
    const struct text_tokens *l = &o->tokens;
    size_t n = o->n_ready_tokens;
    LIT(w, "{\"text_offset\":[");
    for (size_t i = 0; i < n; i++) {
        write_bytes(w, ",", i > 0);
        write_u64(w, l->v[i].offset);
    }
    LIT(w, "],\"token_logprobs\":[");
    for (size_t i = 0; i < n; i++) {
        write_bytes(w, ",", i > 0);
        if (l->v[i].scored)
            write_logprob(w, logprob_of(&l->v[i], tops_of(l, &l->v[i])));
        else
            LIT(w, "null");
    }
    LIT(w, "],\"tokens\":[");
    for (size_t i = 0; i < n; i++) {
        write_bytes(w, ",", i > 0);
        write_token_string(v, w, l->v[i].id);
    }
    LIT(w, "],\"top_logprobs\":[");
    for (size_t i = 0; i < n; i++) {
        write_bytes(w, ",", i > 0);
        if (l->v[i].scored)
            write_top_object(v, w, l, &l->v[i]);
        else
            LIT(w, "null");
    }
    LIT(w, "]}");
}

/* {"token":..,"logprob":..,"bytes":[..]  -- without the closing brace */
static void write_chat_entry(struct render *v, struct writer *w, uint32_t id, float logprob)
{
    struct text_view b = render_token_bytes(v->tok, id);
    LIT(w, "{\"token\":");
    write_token_string(v, w, id);
    LIT(w, ",\"logprob\":");
    write_logprob(w, logprob);
    LIT(w, ",\"bytes\":[");
    for (size_t i = 0; i < b.len; i++) {
        write_bytes(w, ",", i > 0);
        write_u64(w, (unsigned char)b.p[i]);
    }
    LIT(w, "]");
}

static void write_chat_logprobs(struct render *v, struct writer *w, const struct text_out *o)
{
    const struct text_tokens *l = &o->tokens;
    LIT(w, "{\"content\":[");
    for (size_t i = 0; i < o->n_ready_tokens; i++) {
        const struct text_token *t = &l->v[i];
        const struct sample_top *top = tops_of(l, t);
        write_bytes(w, ",", i > 0);
        write_chat_entry(v, w, t->id, logprob_of(t, top));
        LIT(w, ",\"top_logprobs\":[");
        for (uint32_t k = 0; k < t->n_top; k++) {
            write_bytes(w, ",", k > 0);
            write_chat_entry(v, w, top[k].token, top[k].logprob);
            LIT(w, "}");
        }
        LIT(w, "]}");
    }
    LIT(w, "],\"refusal\":null}");
}

static void write_logprobs(struct render *v, struct writer *w, const struct text_out *o)
{
    if (!v->r->logprobs)
        LIT(w, "null");
    else if (is_chat(v))
        write_chat_logprobs(v, w, o);
    else
        write_completion_logprobs(v, w, o);
}

/* "id":{"logprob":..,"rank":..,"decoded_token":".."} */
static void write_score(struct render *v, struct writer *w, uint32_t id, float logprob,
                        uint32_t rank)
{
    write_format(w, "\"%u\":{\"logprob\":", id);
    write_logprob(w, logprob);
    write_format(w, ",\"rank\":%u,\"decoded_token\":", rank);
    write_token_string(v, w, id);
    LIT(w, "}");
}

static void write_prompt_logprobs(struct render *v, struct writer *w, const struct text_tokens *l)
{
    LIT(w, ",\"prompt_logprobs\":[null");
    for (size_t i = 0; i < l->n; i++) {
        const struct text_token *t = &l->v[i];
        const struct sample_top *top = tops_of(l, t);
        uint32_t n = (uint32_t)v->r->prompt_logprobs;
        n = t->n_top < n ? t->n_top : n;
        LIT(w, ",{");
        write_score(v, w, t->id, logprob_of(t, top), t->rank);
        for (uint32_t k = 0; k < n; k++) {
            if (top[k].token == t->id)
                continue;
            LIT(w, ",");
            write_score(v, w, top[k].token, top[k].logprob, k + 1);
        }
        LIT(w, "}");
    }
    LIT(w, "]");
}

/* --- parts that events and whole answers share -------------------------------------------------- */

static void write_ready_text(struct writer *w, const struct text_out *o)
{
    LIT(w, "\"");
    if (o->ready > 0)
        write_string_body(w, o->text, o->ready);
    LIT(w, "\"");
}

static void write_ids(struct writer *w, const char *key, const uint32_t *ids, size_t n)
{
    write_format(w, ",\"%s\":[", key);
    for (size_t i = 0; i < n; i++) {
        write_bytes(w, ",", i > 0);
        write_u64(w, ids[i]);
    }
    LIT(w, "]");
}

static void write_token_ids(struct writer *w, const struct text_out *o)
{
    LIT(w, ",\"token_ids\":[");
    bool first = true;
    for (size_t i = 0; i < o->n_ready_tokens; i++) {
        if (o->tokens.v[i].prompt)
            continue;
        write_bytes(w, ",", !first);
        write_u64(w, o->tokens.v[i].id);
        first = false;
    }
    LIT(w, "]");
}

static void write_usage(struct writer *w, const struct usage *u)
{
    LIT(w, "{\"prompt_tokens\":");
    write_u64(w, u->prompt);
    LIT(w, ",\"completion_tokens\":");
    write_u64(w, u->completion);
    LIT(w, ",\"total_tokens\":");
    write_u64(w, u->prompt + u->completion);
    if (u->cached > 0) {
        LIT(w, ",\"prompt_tokens_details\":{\"cached_tokens\":");
        write_u64(w, u->cached);
        LIT(w, "}");
    }
    LIT(w, "}");
}

/* From "logprobs" to the end of the choice's object, without the brace. */
static void write_choice_rest(struct render *v, struct writer *w, const struct render_choice *c)
{
    LIT(w, ",\"logprobs\":");
    write_logprobs(v, w, c->out);
    if (c->finish.kind == FINISH_NONE) {
        LIT(w, ",\"finish_reason\":null");
    } else {
        LIT(w, ",\"finish_reason\":");
        write_text(w, c->finish.kind == FINISH_STOP ? "\"stop\"" : "\"length\"");
        LIT(w, ",\"stop_reason\":");
        if (c->finish.stop_text.p != NULL)
            write_string(w, c->finish.stop_text.p, c->finish.stop_text.len);
        else if (c->finish.kind == FINISH_STOP && c->finish.stop_id != TOKEN_NONE)
            write_u64(w, c->finish.stop_id);
        else
            LIT(w, "null");
    }
    if (v->r->return_token_ids)
        write_token_ids(w, c->out);
    if (!is_chat(v) && v->r->return_token_ids && c->prompt != NULL)
        write_ids(w, "prompt_token_ids", c->prompt->ids, c->prompt->n_ids);
    if (!is_chat(v) && c->scores != NULL)
        write_prompt_logprobs(v, w, c->scores);
}

/* --- events ------------------------------------------------------------------------------------- */

static void event_begin(struct render *v, struct writer *w, uint32_t index)
{
    write_bytes(w, v->head.p, v->head.len);
    LIT(w, "{\"index\":");
    write_u64(w, index);
}

static void event_end(struct render *v, struct writer *w, const struct usage *u)
{
    if (v->usage_each) {
        LIT(w, ",\"usage\":");
        write_usage(w, u);
        LIT(w, "}\n\n");
    } else if (v->usage) {
        LIT(w, ",\"usage\":null}\n\n");
    } else {
        LIT(w, "}\n\n");
    }
}

void render_role(struct render *v, struct writer *w, const struct render_choice *c,
                 const struct usage *u)
{
    event_begin(v, w, c->index);
    LIT(w, ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
           "\"finish_reason\":null}]");
    if (v->r->return_token_ids && c->prompt != NULL)
        write_ids(w, "prompt_token_ids", c->prompt->ids, c->prompt->n_ids);
    event_end(v, w, u);
}

void render_chunk(struct render *v, struct writer *w, const struct render_choice *c,
                  const struct usage *u)
{
    const struct text_out *o = c->out;
    event_begin(v, w, c->index);
    if (!is_chat(v)) {
        LIT(w, ",\"text\":");
        write_ready_text(w, o);
    } else if (o->ready > 0 || c->finish.kind == FINISH_NONE) {
        LIT(w, ",\"delta\":{\"content\":");
        write_ready_text(w, o);
        LIT(w, "}");
    } else {
        LIT(w, ",\"delta\":{}");
    }
    write_choice_rest(v, w, c);
    LIT(w, "}]");
    event_end(v, w, u);
}

void render_last(struct render *v, struct writer *w, const struct usage *u)
{
    if (v->usage) {
        write_bytes(w, v->head.p, v->head.len);
        LIT(w, "],\"usage\":");
        write_usage(w, u);
        LIT(w, "}\n\n");
    }
    LIT(w, "data: [DONE]\n\n");
}

void render_error_event(struct writer *w, const struct api_error *e)
{
    char body[4096];
    LIT(w, "data: ");
    write_bytes(w, body, error_render(e, body, sizeof body));
    LIT(w, "\n\n");
}

/* --- whole answers ------------------------------------------------------------------------------ */

void render_answer_begin(struct render *v, struct writer *w)
{
    write_bytes(w, v->head.p + v->json_at, v->head.len - v->json_at);
}

void render_answer_choice(struct render *v, struct writer *w, const struct render_choice *c)
{
    write_bytes(w, ",", c->index > 0);
    LIT(w, "{\"index\":");
    write_u64(w, c->index);
    if (is_chat(v))
        LIT(w, ",\"message\":{\"role\":\"assistant\",\"content\":");
    else
        LIT(w, ",\"text\":");
    write_ready_text(w, c->out);
    if (is_chat(v))
        LIT(w, ",\"refusal\":null}");
    write_choice_rest(v, w, c);
    LIT(w, "}");
}

void render_answer_end(struct render *v, struct writer *w, const struct render_choice *first,
                       const struct usage *u)
{
    LIT(w, "],\"usage\":");
    write_usage(w, u);
    LIT(w, ",\"system_fingerprint\":");
    write_string(w, v->fingerprint, strlen(v->fingerprint));
    if (is_chat(v)) {
        LIT(w, ",\"service_tier\":null");
        if (first->scores != NULL)
            write_prompt_logprobs(v, w, first->scores);
        if (v->r->return_token_ids && first->prompt != NULL)
            write_ids(w, "prompt_token_ids", first->prompt->ids, first->prompt->n_ids);
    }
    LIT(w, "}");
}
