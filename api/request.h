/* A validated generation request: what /v1/completions and /v1/chat/completions mean, in one struct.
 *
 * request_parse reads the body, checks every field (reference/api.md 2.3 to 2.8) and tokenises the
 * prompts. It touches no connection and no engine, so it may run on a helper thread; everything it
 * makes lives in the request's arena. */
#ifndef API_REQUEST_H
#define API_REQUEST_H

#include "api/error.h"
#include "engine/engine.h"
#include "engine/text/chat.h"

enum request_kind { REQUEST_COMPLETION, REQUEST_CHAT };

enum { MAX_STOPS = 16, MAX_STOP_BYTES = 256, MAX_BIAS = 300, MAX_STOP_IDS = 64, MAX_PROMPTS = 256 };

struct request_prompt {
    const uint32_t *ids; /* [n_ids] */
    uint32_t n_ids;
    const char *text; /* as the client sent it, for echo; NULL: ids were sent, decode them */
    size_t text_len;
    const char *echo_prefix; /* chat with echo: text of the last message; else NULL */
    size_t echo_prefix_len;
};

struct request {
    struct arena mem;
    enum request_kind kind;
    const char *model;              /* alias to answer with */
    struct request_prompt *prompts; /* [n_prompts] */
    uint32_t n_prompts, n;          /* n: choices per prompt; choice = prompt * n + i */
    bool stream, include_usage, continuous_usage;
    bool echo, include_stop, skip_special, return_token_ids, token_ids_as_text;
    bool logprobs;           /* asked at all */
    int32_t top_logprobs;    /* -1: none asked; number of alternatives */
    int32_t prompt_logprobs; /* the extension's: -1 none */
    struct text_view stops[MAX_STOPS];
    uint32_t n_stops, stop_ids[MAX_STOP_IDS], n_stop_ids; /* the client's, without end tokens */
    uint32_t bias_ids[MAX_BIAS];
    float bias[MAX_BIAS];
    uint32_t n_bias;
    bool ignore_eos;
    struct sample_params params;     /* choice is filled in per sequence; seed is always set */
    uint32_t max_tokens, min_tokens; /* max_tokens: as wanted; clamped per prompt by request_room */
    bool max_tokens_given;
    int32_t priority; /* the smaller goes first, inside its tenant */
    uint64_t salt[2];
    struct sparse_choice sparse; /* for prompts of at least sparse_min_context tokens; else dense */
    uint32_t sparse_min_context;
    const char *client_request_id;
};

/* What the parser must know; constant while the server runs. */
struct request_rules {
    const struct engine_info *info;
    const char *const *names; /* [n_names] served aliases, the first is the default */
    uint32_t n_names, max_n, max_logprobs, default_max_tokens;
    bool accept_any_model, strict_fields, reject_overflow, trust_chat_input;
    double default_temperature, default_top_p; /* NAN: 1 */
    int32_t default_top_k;                     /* 0: off */
    /* Of the caller's tenant. */
    bool has_priority; /* else a request's may only be 0 */
    int32_t priority_low, priority_high;
    uint32_t max_tokens; /* what may be asked for; 0: anything */
};

/* body[len] is NUL-terminated. On failure *e is filled, nothing is left allocated and the result is
 * not OK. ERR_FULL is the answer to arena exhaustion (413). seed: used where the client gives none. */
status request_parse(struct request **out, enum request_kind kind,
                     const struct request_rules *rules, struct token_scratch *scratch,
                     const char *body, size_t len, uint64_t seed, struct api_error *e);
void request_free(struct request *r);
/* Output tokens that prompt p may get: max_tokens clamped to the context; where none was asked and all
 * is attended, to what of it HBM holds (max_dense_len). */
uint32_t request_room(const struct request *r, const struct request_rules *rules, uint32_t p);

#endif
