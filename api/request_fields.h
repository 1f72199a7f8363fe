/* Reading the fields of a request body, shared by the files request*.c: one table says which fields
 * there are, where, of what type and in what range; what needs more than that has a reader. */
#ifndef API_REQUEST_FIELDS_H
#define API_REQUEST_FIELDS_H

#include "api/json.h"
#include "api/request.h"

/* Bodies that the table knows; a set of them says where a field is valid. */
enum body_kind { BODY_COMPLETION = 1, BODY_CHAT = 2, BODY_TOKENIZE = 4, BODY_DETOKENIZE = 8 };

struct given_int {
    bool given;
    int64_t v;
};
struct given_number {
    bool given;
    double v;
};
struct given_bool {
    bool given, v;
};

/* A body on its way to a struct request. One call of request_parse_as, one thread. */
struct request_draft {
    const struct request_rules *rules;
    struct token_scratch *scratch;
    struct api_error *e;
    struct request *r;
    enum body_kind kind;
    struct json_doc doc;

    /* As sent; given: there and not null. */
    struct given_bool stream, echo, logprobs_flag, include_stop, ignore_eos, skip_special,
        add_special, return_ids, ids_as_text, generation_prompt, continue_final, token_strs,
        with_pieces, ignored_flag;
    struct given_int max_tokens, max_completion_tokens, n, best_of, seed, top_k, min_tokens,
        logprobs, top_logprobs, prompt_logprobs;
    struct given_number temperature, top_p, min_p, repetition, presence, frequency;
    struct json_value prompt, tokens, messages, tools, tool_choice;
    bool stream_options;
};

/* Reads every member of the body by the table. */
status request_fields_read(struct request_draft *d);
/* Fills d->e with a 400 and returns ERR_PROTO. code: "invalid_value", "invalid_type", ... */
status request_fields_bad(struct request_draft *d, const char *code, const char *param,
                          const char *fmt, ...) PRINTF_LIKE(4, 5);
status request_fields_type(struct request_draft *d, const char *param, const char *wanted);
status request_fields_full(struct request_draft *d); /* 413: the arena is used up */
/* At most 32 bytes of p[len] for a message, cut between characters. */
struct quoted {
    char text[40];
};
struct quoted request_fields_quote(const char *p, size_t len);
bool request_fields_empty(const struct json_value *v); /* [], {} or "" */
const char *request_fields_name(size_t i);             /* i-th of the table; NULL: past the end */

/* Readers (request_sampling.c, request_sparse.c, request_chat.c); v is not null. */
status request_sampling_model(struct request_draft *d, const struct json_value *v);
status request_sampling_stream_options(struct request_draft *d, const struct json_value *v);
status request_sampling_stop(struct request_draft *d, const struct json_value *v);
status request_sampling_stop_ids(struct request_draft *d, const struct json_value *v);
status request_sampling_bias(struct request_draft *d, const struct json_value *v);
status request_sampling_salt(struct request_draft *d, const struct json_value *v);
status request_sampling_id(struct request_draft *d, const struct json_value *v);
status request_sampling_priority(struct request_draft *d, const struct json_value *v);
status request_sampling_format(struct request_draft *d, const struct json_value *v);
status request_chat_kwargs(struct request_draft *d, const struct json_value *v);
status request_chat_modalities(struct request_draft *d, const struct json_value *v);
status request_chat_function_call(struct request_draft *d, const struct json_value *v);

status request_sparse_read(struct request_draft *d, const struct json_value *v);

/* After all fields are read: contradictions, defaults, and the values of struct request. */
status request_sampling_settle(struct request_draft *d);
/* Tokenised prompts from d->prompt or d->tokens, or from d->messages. */
status request_prompt_read(struct request_draft *d);
status request_chat_read(struct request_draft *d);
/* A copy of ids[n] becomes prompt i. */
status request_prompt_keep(struct request_draft *d, uint32_t i, const uint32_t *ids, size_t n);

/* request_parse for any body; of /tokenize and /detokenize the result is prompts[0] alone. */
status request_parse_as(struct request **out, enum body_kind kind,
                        const struct request_rules *rules, struct token_scratch *scratch,
                        struct text_view body, uint64_t seed, struct api_error *e);

#endif
