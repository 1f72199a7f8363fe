/* Answers as JSON (render.h). Key order is that of reference/api.md, byte for byte. */
#include "api/render.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
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
    w->failed = w->failed || v->key.failed;
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
static void write_top_object(struct render *v, struct writer *w, const struct text_token *t,
                             const struct sample_top *top)
{
    size_t key_at[SAMPLE_MAX_LOGPROBS + 2] = {0};
    uint32_t n = t->n_top < SAMPLE_MAX_LOGPROBS ? t->n_top : SAMPLE_MAX_LOGPROBS, n_keys = 0;
    CHECK(n == 0 || top != NULL);
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
    w->failed = w->failed || v->key.failed;
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

static void write_chat_token(struct render *v, struct writer *w, const struct text_token *t,
                             const struct sample_top *top)
{
    write_chat_entry(v, w, t->id, logprob_of(t, top));
    LIT(w, ",\"top_logprobs\":[");
    for (uint32_t k = 0; k < t->n_top; k++) {
        write_bytes(w, ",", k > 0);
        write_chat_entry(v, w, top[k].token, top[k].logprob);
        LIT(w, "}");
    }
    LIT(w, "]}");
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

static void write_scores(struct render *v, struct writer *w, const struct text_token *t,
                         const struct sample_top *top)
{
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

/* --- the parts of a choice ---------------------------------------------------------------------- */

/* What stands in a choice's object, one after another: key, items, end. Long ones are many items, so
 * that a long answer can be written in stretches. */
enum key {
    KEY_TEXT, /* its items are bytes */
    KEY_NO_LOGPROBS,
    KEY_OFFSETS,
    KEY_LOGPROBS,
    KEY_TOKENS,
    KEY_TOPS,
    KEY_CONTENT,
    KEY_REASON,
    KEY_IDS,
    KEY_PROMPT_IDS,
    KEY_SCORES,
    KEY_USAGE, /* of the whole answer, and what stands behind it */
};

static const enum key event_keys[] = {KEY_NO_LOGPROBS, KEY_OFFSETS, KEY_LOGPROBS, KEY_TOKENS,
                                      KEY_TOPS,        KEY_CONTENT, KEY_REASON,   KEY_IDS,
                                      KEY_PROMPT_IDS,  KEY_SCORES};
static const enum key choice_keys[] = {KEY_TEXT,   KEY_NO_LOGPROBS, KEY_OFFSETS, KEY_LOGPROBS,
                                       KEY_TOKENS, KEY_TOPS,        KEY_CONTENT, KEY_REASON,
                                       KEY_IDS,    KEY_PROMPT_IDS,  KEY_SCORES};
/* Of the whole answer: chat has the prompt's here, completions have them in each choice. */
static const enum key answer_keys[] = {KEY_USAGE, KEY_SCORES, KEY_PROMPT_IDS};

struct walk {
    const enum key *keys;
    size_t n_keys;
    bool of_answer;        /* keys of the answer, not of a choice */
    const struct usage *u; /* of_answer */
};

static bool has_key(const struct render *v, const struct render_choice *c, const struct walk *k,
                    enum key key)
{
    bool prompt = is_chat(v) == k->of_answer;
    switch (key) {
    case KEY_NO_LOGPROBS: return !v->r->logprobs;
    case KEY_OFFSETS:
    case KEY_LOGPROBS:
    case KEY_TOKENS:
    case KEY_TOPS: return v->r->logprobs && !is_chat(v);
    case KEY_CONTENT: return v->r->logprobs && is_chat(v);
    case KEY_IDS: return v->r->return_token_ids;
    case KEY_PROMPT_IDS: return prompt && v->r->return_token_ids && c->prompt != NULL;
    case KEY_SCORES: return prompt && c->scores != NULL;
    default: return true;
    }
}

static size_t n_items(const struct render_choice *c, enum key key)
{
    switch (key) {
    case KEY_TEXT: return c->part.len;
    case KEY_NO_LOGPROBS:
    case KEY_REASON:
    case KEY_USAGE: return 0;
    case KEY_PROMPT_IDS: return c->prompt->n_ids;
    case KEY_SCORES: return c->scores->n;
    default: return c->part.n_tokens;
    }
}

static void write_reason(struct writer *w, const struct finish *f)
{
    if (f->kind == FINISH_NONE) {
        LIT(w, ",\"finish_reason\":null");
        return;
    }
    LIT(w, ",\"finish_reason\":");
    write_text(w, f->kind == FINISH_STOP ? "\"stop\"" : "\"length\"");
    LIT(w, ",\"stop_reason\":");
    if (f->stop_text.p != NULL)
        write_string(w, f->stop_text.p, f->stop_text.len);
    else if (f->kind == FINISH_STOP && f->stop_id != TOKEN_NONE)
        write_u64(w, f->stop_id);
    else
        LIT(w, "null");
}

/* The shortest number that reads back as this one: 0.05 stays 0.05, and rows stay whole. */
static void write_budget(struct writer *w, float v)
{
    char text[32];
    if (v > 1 && v == floorf(v)) {
        write_u64(w, (uint64_t)v);
        return;
    }
    for (int digits = 1; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)v);
        if (strtof(text, NULL) == v)
            break;
    }
    write_text(w, text);
}

/* Nothing degrades silently (DESIGN 9): what was chosen, whenever it was used. */
static void write_sparse(struct writer *w, const struct usage *u)
{
    LIT(w, ",\"sparse_details\":{\"plugin\":");
    write_string(w, u->plugin, strlen(u->plugin));
    LIT(w, ",\"budget\":");
    write_budget(w, u->budget);
    if (u->light_misses > 0) {
        LIT(w, ",\"estimated_pages\":");
        write_u64(w, u->light_misses);
    }
    LIT(w, "}");
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
    if (u->plugin != NULL)
        write_sparse(w, u);
    LIT(w, "}");
}

static void write_answer_usage(struct render *v, struct writer *w, const struct usage *u)
{
    LIT(w, "],\"usage\":");
    write_usage(w, u);
    LIT(w, ",\"system_fingerprint\":");
    write_string(w, v->fingerprint, strlen(v->fingerprint));
    if (is_chat(v))
        LIT(w, ",\"service_tier\":null");
}

static void key_begin(struct render *v, struct writer *w, const struct render_choice *c,
                      const struct walk *k, enum key key)
{
    switch (key) {
    case KEY_TEXT:
        write_bytes(w, ",", c->index > 0);
        LIT(w, "{\"index\":");
        write_u64(w, c->index);
        write_text(w, is_chat(v) ? ",\"message\":{\"role\":\"assistant\",\"content\":\""
                                 : ",\"text\":\"");
        break;
    case KEY_NO_LOGPROBS: LIT(w, ",\"logprobs\":null"); break;
    case KEY_OFFSETS: LIT(w, ",\"logprobs\":{\"text_offset\":["); break;
    case KEY_LOGPROBS: LIT(w, ",\"token_logprobs\":["); break;
    case KEY_TOKENS: LIT(w, ",\"tokens\":["); break;
    case KEY_TOPS: LIT(w, ",\"top_logprobs\":["); break;
    case KEY_CONTENT: LIT(w, ",\"logprobs\":{\"content\":["); break;
    case KEY_REASON: write_reason(w, &c->finish); break;
    case KEY_IDS: LIT(w, ",\"token_ids\":["); break;
    case KEY_PROMPT_IDS: LIT(w, ",\"prompt_token_ids\":["); break;
    case KEY_SCORES: LIT(w, ",\"prompt_logprobs\":[null"); break;
    case KEY_USAGE: write_answer_usage(v, w, k->u); break;
    }
}

static void key_end(struct render *v, struct writer *w, enum key key)
{
    switch (key) {
    case KEY_TEXT: write_text(w, is_chat(v) ? "\",\"refusal\":null}" : "\""); break;
    case KEY_NO_LOGPROBS:
    case KEY_REASON:
    case KEY_USAGE: break;
    case KEY_TOPS: LIT(w, "]}"); break;
    case KEY_CONTENT: LIT(w, "],\"refusal\":null}"); break;
    default: LIT(w, "]");
    }
}

static void token_item(struct render *v, struct writer *w, const struct text_part *p, enum key key,
                       size_t i)
{
    const struct text_token *t = &p->tokens[i];
    const struct sample_top *top = p->tops == NULL ? NULL : p->tops + t->top_at;
    if (key == KEY_IDS && t->prompt)
        return;
    write_bytes(w, ",", i > 0 && !(key == KEY_IDS && t[-1].prompt));
    if (key == KEY_OFFSETS)
        write_u64(w, t->offset);
    else if (key == KEY_TOKENS)
        write_token_string(v, w, t->id);
    else if (key == KEY_CONTENT)
        write_chat_token(v, w, t, top);
    else if (key == KEY_IDS)
        write_u64(w, t->id);
    else if (!t->scored)
        LIT(w, "null");
    else if (key == KEY_LOGPROBS)
        write_logprob(w, logprob_of(t, top));
    else
        write_top_object(v, w, t, top);
}

/* Writes item i, or some from it on, and returns the next. */
static size_t write_item(struct render *v, struct writer *w, const struct render_choice *c,
                         enum key key, size_t i)
{
    enum { STRETCH = 4096 };
    if (key == KEY_TEXT) {
        size_t n = c->part.len - i < STRETCH ? c->part.len - i : STRETCH;
        write_string_body(w, c->part.text + i, n);
        return i + n;
    }
    if (key == KEY_PROMPT_IDS) {
        write_bytes(w, ",", i > 0);
        write_u64(w, c->prompt->ids[i]);
    } else if (key == KEY_SCORES) {
        const struct text_tokens *l = c->scores;
        write_scores(v, w, &l->v[i], l->tops == NULL ? NULL : l->tops + l->v[i].top_at);
    } else {
        token_item(v, w, &c->part, key, i);
    }
    return i + 1;
}

/* Goes on at *at until w holds `most` bytes or a little more; true: all is written. */
static bool write_keys(struct render *v, struct writer *w, const struct render_choice *c,
                       const struct walk *k, struct render_at *at, size_t most)
{
    for (; at->key < k->n_keys; at->key++, at->item = 0) {
        enum key key = k->keys[at->key];
        if (!has_key(v, c, k, key))
            continue;
        if (w->failed || w->len >= most)
            return false;
        if (at->item == 0)
            key_begin(v, w, c, k, key);
        for (size_t n = n_items(c, key); at->item < n;) {
            if (w->failed || (at->item > 0 && w->len >= most))
                return false;
            at->item = write_item(v, w, c, key, at->item);
        }
        key_end(v, w, key);
    }
    return true;
}

static void write_ready_text(struct writer *w, const struct text_part *p)
{
    LIT(w, "\"");
    if (p->len > 0)
        write_string_body(w, p->text, p->len);
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
    const struct walk keys = {.keys = event_keys, .n_keys = ARRAY_LEN(event_keys)};
    struct render_at at = {0};
    event_begin(v, w, c->index);
    if (!is_chat(v)) {
        LIT(w, ",\"text\":");
        write_ready_text(w, &c->part);
    } else if (c->part.len > 0 || c->finish.kind == FINISH_NONE) {
        LIT(w, ",\"delta\":{\"content\":");
        write_ready_text(w, &c->part);
        LIT(w, "}");
    } else {
        LIT(w, ",\"delta\":{}");
    }
    write_keys(v, w, c, &keys, &at, SIZE_MAX);
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

bool render_answer_choice(struct render *v, struct writer *w, const struct render_choice *c,
                          struct render_at *at, size_t most)
{
    const struct walk keys = {.keys = choice_keys, .n_keys = ARRAY_LEN(choice_keys)};
    if (!write_keys(v, w, c, &keys, at, most))
        return false;
    LIT(w, "}");
    return true;
}

bool render_answer_end(struct render *v, struct writer *w, const struct render_choice *first,
                       const struct usage *u, struct render_at *at, size_t most)
{
    const struct walk keys = {
        .keys = answer_keys, .n_keys = ARRAY_LEN(answer_keys), .of_answer = true, .u = u};
    if (!write_keys(v, w, first, &keys, at, most))
        return false;
    LIT(w, "}");
    return true;
}
