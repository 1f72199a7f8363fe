/* Chat templates: messages -> the text the model was trained on.
 *
 * In this step only templates whose exact text is known are served (chosen by SHA-256); each is a
 * small renderer in chat.c. What came from a message is marked, so that text of users which looks
 * like a control token is tokenised as plain text unless the server was told to be compatible. */
#ifndef ENGINE_TEXT_CHAT_H
#define ENGINE_TEXT_CHAT_H

#include "engine/text/tokenizer.h"

struct chat_template;

/* ERR_FORMAT: not a template we know; the text says what to do. */
status chat_template_find(const struct chat_template **out, const char *source, size_t len);
/* The mock model's: ChatML. */
const struct chat_template *chat_template_chatml(void);
const char *chat_template_name(const struct chat_template *t);
const char *chat_template_source(const struct chat_template *t, size_t *len);

struct chat_message {
    struct text_view role, content;
};

/* Runs of the rendered text; from_input: came out of a message. */
struct chat_run {
    const char *p;
    size_t len;
    bool from_input;
};

struct chat_text {
    struct chat_run *runs; /* in the arena; neighbours differ in from_input */
    size_t n_runs, total_bytes;
};

struct chat_args {
    const struct chat_message *messages;
    size_t n_messages; /* >= 1 */
    bool add_generation_prompt;
    bool continue_final_message; /* cut after the last message's content */
};

/* ERR_ARG: the template refuses the messages (its own words in err_text); ERR_FULL: arena. */
status chat_render(const struct chat_template *t, const struct chat_args *a, struct arena *mem,
                   struct chat_text *out);
/* Tokenises the runs. trust_input: control tokens in messages are recognised too (as vLLM does). */
status chat_tokenize(const struct tokenizer *t, struct token_scratch *s,
                     const struct chat_text *text, bool trust_input, uint32_t *out, size_t room,
                     size_t *n);

#endif
