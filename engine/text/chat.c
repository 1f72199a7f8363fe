/* Renders messages by templates that we know to the letter. A template is a program; until there is
 * an interpreter for it, the only safe way to run one is to recognise it by its SHA-256 and to have
 * written the same thing in C. All templates of this step are of the ChatML family: every message is
 *
 *   <|im_start|>{role}\n{content}<|im_end|>\n
 *
 * and they differ in the system message that they put in front of a conversation without one.
 *
 * The rendered text is one stretch of memory; runs say who wrote which part of it. It is tokenised
 * as one text, because the model was trained on pieces that cross the border between template and
 * message ("\n" of the header and "\n\n" of the content are one piece). Only the search for control
 * tokens looks at the runs. */
#include "engine/text/chat.h"

#include "engine/text/internal.h"
#include "kernels/core/sha256.h"

#include <string.h>

struct chat_template {
    const char *name;
    unsigned char sha256[SHA256_BYTES]; /* of source */
    const char *source;
    const char *default_system; /* NULL: nothing is put in front */
};

#define SMOLLM2_SYSTEM "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

/* The message loop and the end, with the newline as the file spells it. */
#define CHATML_BODY(newline)                                                     \
    "{{'<|im_start|>' + message['role'] + '" newline "' + message['content'] + " \
    "'<|im_end|>' + '" newline "'}}{% endfor %}{% if add_generation_prompt %}"   \
    "{{ '<|im_start|>assistant" newline "' }}{% endif %}"

static const struct chat_template templates[] = {
    {.name = "chatml",
     .sha256 = {0xfc, 0xf7, 0xa0, 0x96, 0xfe, 0x99, 0xa4, 0x8f, 0xd9, 0xad, 0x2b,
                0x25, 0x0b, 0xf9, 0x23, 0x7e, 0x96, 0xe8, 0xf4, 0x8b, 0xff, 0xec,
                0x1c, 0x7e, 0xa4, 0xd3, 0xf2, 0x25, 0x17, 0x6c, 0xd4, 0x0e},
     .source = "{% for message in messages %}" CHATML_BODY("\\n")},
    {.name = "chatml",
     .sha256 = {0x15, 0x32, 0x80, 0xe3, 0xff, 0x55, 0xd1, 0x9d, 0xa1, 0x39, 0x8b,
                0xdb, 0x39, 0x14, 0xee, 0x2a, 0x51, 0xb8, 0x04, 0x29, 0xbf, 0xae,
                0xdd, 0xe1, 0x1d, 0x7d, 0x21, 0x6c, 0x39, 0xdb, 0x80, 0xf3},
     .source = "{% for message in messages %}" CHATML_BODY("\n")},
    {.name = "smollm2",
     .sha256 = {0x87, 0x2b, 0xe4, 0x9d, 0xbb, 0x63, 0x80, 0x44, 0xad, 0x01, 0xb6,
                0x03, 0x88, 0xf4, 0x8d, 0x46, 0x9f, 0xf2, 0x98, 0x0e, 0x5f, 0x0d,
                0xcc, 0xdc, 0x22, 0xec, 0x90, 0x7d, 0xb5, 0x4d, 0x07, 0x88},
     .source = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' "
               "%}{{ '<|im_start|>system\n" SMOLLM2_SYSTEM
               "<|im_end|>\n' }}{% endif %}" CHATML_BODY("\n"),
     .default_system = SMOLLM2_SYSTEM},
};

static void digest(const char *p, size_t len, unsigned char out[SHA256_BYTES])
{
    struct sha256 c;
    sha256_init(&c);
    sha256_add(&c, p, len);
    sha256_done(&c, out);
}

status chat_template_find(const struct chat_template **out, const char *source, size_t len)
{
    unsigned char hash[SHA256_BYTES];
    char hex[2 * SHA256_BYTES + 1];
    static const char digits[] = "0123456789abcdef";
    digest(source, len, hash);
    for (size_t i = 0; i < ARRAY_LEN(templates); i++) {
        if (memcmp(templates[i].sha256, hash, sizeof hash) == 0) {
            *out = &templates[i];
            return OK;
        }
    }
    for (size_t i = 0; i < sizeof hash; i++) {
        hex[2 * i] = digits[hash[i] >> 4];
        hex[2 * i + 1] = digits[hash[i] & 15];
    }
    hex[sizeof hex - 1] = '\0';
    *out = NULL;
    return err(ERR_FORMAT,
               "the chat template (%zu bytes, SHA-256 %s) is none that this version renders: "
               "smollm2 and chatml, to the letter. To serve completions without chat, write a copy "
               "of the model without it: gguf-new-metadata --remove-metadata "
               "tokenizer.chat_template IN OUT (pip install gguf)",
               len, hex);
}

const struct chat_template *chat_template_chatml(void)
{
    return &templates[0];
}

const char *chat_template_name(const struct chat_template *t)
{
    return t->name;
}

const char *chat_template_source(const struct chat_template *t, size_t *len)
{
    *len = strlen(t->source);
    return t->source;
}

/* Written to twice: without memory it only counts. */
struct pen {
    char *text;
    struct chat_run *runs;
    size_t len, n_runs;
    bool from_input; /* of the last run */
};

static void put(struct pen *p, const char *s, size_t len, bool from_input)
{
    if (len == 0)
        return;
    if (p->n_runs == 0 || p->from_input != from_input) {
        if (p->runs != NULL)
            p->runs[p->n_runs] = (struct chat_run){p->text + p->len, 0, from_input};
        p->n_runs++;
        p->from_input = from_input;
    }
    if (p->runs != NULL) {
        memcpy(p->text + p->len, s, len);
        p->runs[p->n_runs - 1].len += len;
    }
    p->len += len;
}

static void put_template(struct pen *p, const char *s)
{
    put(p, s, strlen(s), false);
}

static bool is_role(struct text_view role, const char *name)
{
    return role.len == strlen(name) && memcmp(role.p, name, role.len) == 0;
}

static void write_messages(const struct chat_template *t, const struct chat_args *a, struct pen *p)
{
    for (size_t i = 0; i < a->n_messages; i++) {
        const struct chat_message *m = &a->messages[i];
        /* OpenAI's newer name for the same role; models were trained on the old one. */
        bool system = is_role(m->role, "system") || is_role(m->role, "developer");
        if (i == 0 && !system && t->default_system != NULL) {
            put_template(p, "<|im_start|>system\n");
            put_template(p, t->default_system);
            put_template(p, "<|im_end|>\n");
        }
        put_template(p, "<|im_start|>");
        if (system)
            put_template(p, "system");
        else
            put(p, m->role.p, m->role.len, true);
        put_template(p, "\n");
        put(p, m->content.p, m->content.len, true);
        if (a->continue_final_message && i + 1 == a->n_messages)
            return;
        put_template(p, "<|im_end|>\n");
    }
    if (a->add_generation_prompt)
        put_template(p, "<|im_start|>assistant\n");
}

status chat_render(const struct chat_template *t, const struct chat_args *a, struct arena *mem,
                   struct chat_text *out)
{
    *out = (struct chat_text){0};
    if (a->n_messages == 0)
        return err(ERR_ARG, "a conversation needs at least one message");
    if (a->continue_final_message && a->add_generation_prompt)
        return err(ERR_ARG, "continue_final_message and add_generation_prompt exclude each other");
    struct pen count = {0};
    write_messages(t, a, &count);
    struct pen pen = {.text = ARENA_NEW(mem, char, count.len),
                      .runs = ARENA_NEW(mem, struct chat_run, count.n_runs)};
    if (pen.text == NULL || pen.runs == NULL)
        return err(ERR_FULL, "no room for a rendered conversation of %zu bytes", count.len);
    write_messages(t, a, &pen);
    *out = (struct chat_text){.runs = pen.runs, .n_runs = pen.n_runs, .total_bytes = pen.len};
    return OK;
}

status chat_tokenize(const struct tokenizer *t, struct token_scratch *s,
                     const struct chat_text *text, bool trust_input, uint32_t *out, size_t room,
                     size_t *n)
{
    *n = 0;
    if (text->n_runs == 0)
        return OK;
    struct special_span *spans = token_scratch_spans(s, text->n_runs);
    if (spans == NULL)
        return err(ERR_MEMORY, "no memory for a conversation of %zu runs", text->n_runs);
    size_t n_spans = 0, at = 0;
    const char *start = text->runs[0].p;
    for (size_t i = 0; i < text->n_runs; i++) {
        const struct chat_run *r = &text->runs[i];
        CHECK(r->p == start + at); /* as chat_render writes them */
        if (!r->from_input)
            spans[n_spans++] = (struct special_span){at, at + r->len};
        at += r->len;
    }
    if (trust_input) {
        spans[0] = (struct special_span){0, at};
        n_spans = 1;
    }
    struct id_sink sink = {.ids = out, .room = room};
    status st = tokenize_spans(t, s, (struct text_view){start, at}, spans, n_spans, &sink);
    *n = sink.n;
    return st;
}
