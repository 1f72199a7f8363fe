/* Making and unmaking sequences (sequence.h): one allocation each, at submission, so that nothing
 * allocates between two tokens. */
#include "engine/sequence.h"

#include <string.h>

static size_t message_bytes(const struct msg_submit *m)
{
    return sizeof *m + ((size_t)m->n_prompt + m->n_stop + 2 * (size_t)m->n_bias) * 4;
}

struct sequence *sequence_create(const struct msg_submit *m, uint64_t order, uint64_t now_us)
{
    CHECK(m->head.bytes >= message_bytes(m) && m->n_prompt > 0 &&
          (m->n_filled == 0 || (m->n_filled < m->n_prompt && m->prompt_logprobs < 0)));
    size_t max_rows = (size_t)m->n_prompt + m->max_tokens;
    size_t numbers = max_rows + m->n_stop + 2 * (size_t)m->n_bias;
    struct sequence *s = mem_try_alloc(sizeof *s + numbers * 4);
    if (s == NULL)
        return NULL;
    uint32_t *own = (uint32_t *)(s + 1);
    const uint32_t *theirs = (const uint32_t *)(m + 1);
    *s = (struct sequence){
        .id = m->id,
        .leader = m->leader == m->id ? 0 : m->leader,
        .order = order,
        .tenant = m->tenant,
        .priority = m->priority,
        .tokens = own,
        .n_prompt = m->n_prompt,
        .n_tokens = m->n_prompt,
        .max_tokens = m->max_tokens,
        .min_tokens = m->min_tokens,
        .n_scored = 1, /* nothing predicts the first token */
        .params = m->params,
        .logprobs = m->logprobs,
        .prompt_logprobs = m->prompt_logprobs,
        .n_stop = m->n_stop,
        .n_bias = m->n_bias,
        .n_filled = m->n_filled,
        .is_private = m->n_filled > 0, /* what is made up is no tokens' */
        .salt = {m->salt[0], m->salt[1]},
        .sparse = m->sparse,
        .submitted_us = now_us,
    };
    memcpy(own, theirs, (size_t)m->n_prompt * 4);
    memcpy(own + max_rows, theirs + m->n_prompt, ((size_t)m->n_stop + 2 * (size_t)m->n_bias) * 4);
    s->stop_ids = own + max_rows;
    s->bias_ids = s->stop_ids + m->n_stop;
    s->bias = (const float *)(s->bias_ids + m->n_bias);
    return s;
}

void sequence_destroy(struct sequence *s, struct attention *at)
{
    CHECK(s->kv.own == NULL);
    if (s->in != NULL)
        attention_release(at, s->in);
    if (s->keeps != NULL)
        attention_seq_destroy(at, s->keeps);
    mem_free(s);
}
