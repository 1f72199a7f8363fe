/* Every path of the API in one table, and the endpoints that need no generation.
 *
 * The answers are written by hand: shapes are those of vLLM (reference/api.md 1.2), and clients
 * compare them. Health is answered from what the loop knows, never by asking the engine. */
#include "api/front.h"
#include "api/page.h"

#include <stdio.h>
#include <string.h>

static void answer_json(struct api *a, struct exchange *x, struct writer *w)
{
    struct reply r = {
        .status = 200, .content_type = "application/json", .body = w->p, .len = w->len};
    api_answer(a, x, &r);
    writer_fini(w);
}

static void small_alive(struct api *a, struct exchange *x)
{
    api_answer(a, x, &(struct reply){.status = 200, .body = ""});
}

static void small_health(struct api *a, struct exchange *x)
{
    struct api_error e;
    if (!api_unready(a, &e)) {
        small_alive(a, x);
        return;
    }
    api_refuse(a, x, &e, false);
}

static void small_version(struct api *a, struct exchange *x)
{
    struct writer w;
    writer_init(&w);
    write_text(&w, "{\"version\":");
    write_string(&w, a->cfg.version, strlen(a->cfg.version));
    write_text(&w, "}");
    answer_json(a, x, &w);
}

static void small_load(struct api *a, struct exchange *x)
{
    struct writer w;
    writer_init(&w);
    write_format(&w, "{\"server_load\":%u}", api_n_active(a));
    answer_json(a, x, &w);
}

static void small_metrics(struct api *a, struct exchange *x)
{
    struct writer w;
    struct api_error e;
    if (a->cfg.disable_metrics) {
        error_set(&e, 404, NULL, NULL, "Metrics are switched off on this server.");
        api_refuse(a, x, &e, false);
        return;
    }
    writer_init(&w);
    metrics_render(a->metrics, a, &w);
    struct reply r = {
        .status = 200, .content_type = METRICS_CONTENT_TYPE, .body = w.p, .len = w.len};
    api_answer(a, x, &r);
    writer_fini(&w);
}

/* ---- models ---- */

static void write_card(const struct api *a, const char *name, struct writer *w)
{
    write_text(w, "{\"id\":");
    write_string(w, name, strlen(name));
    write_text(w, ",\"object\":\"model\",\"created\":");
    write_u64(w, a->start_unix_s);
    write_text(w, ",\"owned_by\":\"spind\",\"root\":");
    write_string(w, a->info->name, strlen(a->info->name));
    write_format(w,
                 ",\"parent\":null,\"max_model_len\":%u,\"meta\":{\"n_vocab\":%u,\"n_params\":%llu,"
                 "\"size\":%llu}}",
                 a->info->max_model_len, a->info->vocab, (unsigned long long)a->info->n_params,
                 (unsigned long long)a->info->weight_bytes);
}

static void small_models(struct api *a, struct exchange *x)
{
    struct writer w;
    writer_init(&w);
    write_text(&w, "{\"object\":\"list\",\"data\":[");
    for (uint32_t i = 0; i < a->rules.n_names; i++) {
        if (i > 0)
            write_text(&w, ",");
        write_card(a, a->rules.names[i], &w);
    }
    write_text(&w, "]}");
    answer_json(a, x, &w);
}

static void small_model(struct api *a, struct exchange *x)
{
    static const char prefix[] = "/v1/models/";
    struct text_view id = exchange_path(x);
    struct writer w;
    struct api_error e;
    id.p += sizeof prefix - 1;
    id.len -= sizeof prefix - 1;
    for (uint32_t i = 0; i < a->rules.n_names; i++) {
        const char *name = a->rules.names[i];
        if (strlen(name) != id.len || memcmp(name, id.p, id.len) != 0)
            continue;
        writer_init(&w);
        write_card(a, name, &w);
        answer_json(a, x, &w);
        return;
    }
    error_set(&e, 404, "model_not_found", "model", "The model `%s` does not exist.",
              request_fields_quote(id.p, id.len).text);
    api_refuse(a, x, &e, false);
}

/* ---- tokens ---- */

static void write_token(const struct tokenizer *t, uint32_t id, const char *otherwise,
                        struct writer *w)
{
    struct text_view name = {0};
    if (id != TOKEN_NONE)
        name = tokenizer_name(t, id);
    if (name.p == NULL)
        write_text(w, otherwise);
    else
        write_string(w, name.p, name.len);
}

static void small_tokenizer(struct api *a, struct exchange *x)
{
    const struct tokenizer *t = a->info->tokenizer;
    size_t len = 0;
    const char *source = a->info->chat ? chat_template_source(a->info->chat, &len) : NULL;
    struct writer w;
    writer_init(&w);
    write_text(&w, "{\"tokenizer_class\":\"PreTrainedTokenizerFast\",\"bos_token\":");
    write_token(t, tokenizer_bos(t), "null", &w);
    write_text(&w, ",\"eos_token\":"); /* lm-eval wants a string whatever the model */
    write_token(t, tokenizer_eos(t), "\"\"", &w);
    write_text(&w, ",\"pad_token\":");
    write_token(t, tokenizer_pad(t), "null", &w);
    write_text(&w, ",\"unk_token\":");
    write_token(t, tokenizer_unknown(t), "null", &w);
    write_format(&w, ",\"add_bos_token\":%s,\"vocab_size\":%u,\"model_max_length\":%u",
                 tokenizer_adds_bos(t) ? "true" : "false", tokenizer_vocab(t),
                 a->info->max_model_len);
    write_text(&w, ",\"chat_template\":");
    if (source != NULL)
        write_string(&w, source, len);
    else
        write_text(&w, "null");
    write_text(&w, "}");
    answer_json(a, x, &w);
}

static void render_ids(const struct request_prompt *p, const struct engine_info *info, bool names,
                       struct writer *w)
{
    write_format(w, "{\"count\":%u,\"max_model_len\":%u,\"tokens\":[", p->n_ids,
                 info->max_model_len);
    for (uint32_t i = 0; i < p->n_ids; i++) {
        if (i > 0)
            write_bytes(w, ",", 1);
        write_u64(w, p->ids[i]);
    }
    write_text(w, names ? "],\"token_strs\":[" : "],\"token_strs\":null}");
    for (uint32_t i = 0; names && i < p->n_ids; i++) {
        if (i > 0)
            write_bytes(w, ",", 1);
        write_token(info->tokenizer, p->ids[i], "\"\"", w);
    }
    if (names)
        write_text(w, "]}");
}

/* Both names of the text: vLLM's and llama.cpp's. */
static void render_text(const struct request_prompt *p, const struct tokenizer *t, struct writer *w)
{
    static const char *const keys[] = {"{\"prompt\":\"", "\",\"content\":\""};
    struct writer piece;
    writer_init(&piece);
    for (size_t k = 0; k < ARRAY_LEN(keys); k++) {
        struct utf8_stream u = {0};
        write_text(w, keys[k]);
        for (uint32_t i = 0; i <= p->n_ids; i++) {
            struct text_view bytes =
                i < p->n_ids ? tokenizer_bytes(t, p->ids[i]) : (struct text_view){"", 0};
            size_t room = 3 * (bytes.len + 3);
            while (piece.room < room) /* the writer's memory as a plain buffer */
                write_format(&piece, "%*s", (int)room, "");
            size_t n = i < p->n_ids ? utf8_stream_push(&u, bytes.p, bytes.len, piece.p)
                                    : utf8_stream_flush(&u, piece.p);
            write_string_body(w, piece.p, n);
        }
    }
    write_text(w, "\"}");
    writer_fini(&piece);
}

void small_render_tokens(const struct request *r, unsigned body, const struct engine_info *info,
                         struct writer *w)
{
    if (body == BODY_DETOKENIZE)
        render_text(&r->prompts[0], info->tokenizer, w);
    else
        render_ids(&r->prompts[0], info, r->return_token_ids, w);
}

/* ---- the table ---- */

enum {
    GET = 1 << HTTP_M_GET | 1 << HTTP_M_HEAD,
    POST = 1 << HTTP_M_POST,
};

#define ALLOW_GET      "Allow: GET, HEAD, OPTIONS\r\n"
#define ALLOW_POST     "Allow: POST, OPTIONS\r\n"
#define ALLOW_GET_POST "Allow: GET, HEAD, POST, OPTIONS\r\n"

#define OF(p, m, a, f)     .path = (p), .methods = (m), .allow = (a), .answer = (f)
#define SIMPLE(p, f)       OF(p, GET, ALLOW_GET, f)
#define OPEN(p, m, a, f)   OF(p, m, a, f), .open = true
#define OF_MODEL(p, f)     OF(p, GET, ALLOW_GET, f), .needs_engine = true
#define JSON_BODY(p, kind) OF(p, POST, ALLOW_POST, NULL), .needs_engine = true, .body = (kind)

static const struct route routes[] = {
    {JSON_BODY("/v1/chat/completions", BODY_CHAT)},
    {JSON_BODY("/v1/completions", BODY_COMPLETION)},
    {OF_MODEL("/v1/models", small_models)},
    {OF_MODEL("/v1/models/", small_model), .prefix = true},
    {JSON_BODY("/tokenize", BODY_TOKENIZE)},
    {JSON_BODY("/detokenize", BODY_DETOKENIZE)},
    {OF_MODEL("/tokenizer_info", small_tokenizer)},
    {OPEN("/health", GET, ALLOW_GET, small_health)},
    {OPEN("/livez", GET, ALLOW_GET, small_alive)},
    {OPEN("/readyz", GET, ALLOW_GET, small_health)},
    {OPEN("/ping", GET | POST, ALLOW_GET_POST, small_health)},
    {OPEN("/ui", GET, ALLOW_GET, page_answer)},
    {OPEN("/ui/chat.css", GET, ALLOW_GET, page_answer)},
    {OPEN("/ui/chat.js", GET, ALLOW_GET, page_answer)},
    {SIMPLE("/version", small_version)},
    {SIMPLE("/load", small_load)},
    {SIMPLE("/metrics", small_metrics)},
};

const struct route *small_find(struct text_view path)
{
    for (size_t i = 0; i < ARRAY_LEN(routes); i++) {
        size_t len = strlen(routes[i].path);
        bool fits = routes[i].prefix ? path.len > len : path.len == len;
        if (fits && memcmp(path.p, routes[i].path, len) == 0)
            return &routes[i];
    }
    return NULL;
}
