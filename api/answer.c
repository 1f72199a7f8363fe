/* From the API to the client: stream events, whole answers, errors.
 *
 * A stream gets one event per choice and batch of engine events, which is one per token while the
 * client keeps up. If it does not, events are gathered: fewer and longer ones, up to GATHER_BYTES;
 * beyond that they are written all the same, so that the server's hard limit cuts the connection. */
#include "api/call.h"

#include <string.h>

static void stream_write(struct call *call, const struct writer *w)
{
    if (w->len == 0 || call->cut)
        return;
    if (exchange_stream_write(call->x, w->p, w->len) != OK)
        call->cut = true; /* api_gone will come */
    call->written_us = calls_now(call->all);
}

static void begin_stream(struct call *call)
{
    if (call->head_sent)
        return;
    call->head_sent = true;
    exchange_stream_begin(call->x, NULL);
}

void answer_ping(struct call *call)
{
    struct writer *w = &call->all->out;
    writer_reset(w);
    write_text(w, ": ping\n\n");
    stream_write(call, w);
}

void answer_head(struct call *call)
{
    begin_stream(call);
    answer_ping(call); /* some proxies pass the head on only with the first byte of the body */
}

static struct render_choice view_of(const struct choice *ch)
{
    const struct call *call = ch->call;
    const struct request *r = call->r;
    struct render_choice v = {.index = ch->index, .out = &ch->out, .finish = ch->finish};
    if (!ch->begun)
        v.prompt = &r->prompts[ch->prompt];
    if (r->prompt_logprobs >= 0) /* the first choice of a prompt scores it for all */
        v.scores = &call->choices[(size_t)ch->prompt * r->n].scores;
    return v;
}

static bool gathers(const struct choice *ch)
{
    return exchange_stream_unsent(ch->call->x) > SOFT_UNSENT && ch->out.ready < GATHER_BYTES &&
           ch->n_tokens - ch->n_told < GATHER_TOKENS;
}

/* Everything of this choice that may leave. The first event of a chat choice comes with its first
 * token, not at admission: clients take it for the time to first token. */
void answer_event(struct choice *ch)
{
    struct call *call = ch->call;
    bool finished = ch->finish.kind != FINISH_NONE;
    if (call->cut || (!finished && (ch->n_tokens == 0 || ch->ending)))
        return;
    if (!finished && gathers(ch)) {
        choice_mark(ch);
        return;
    }
    begin_stream(call);
    struct writer *w = &call->all->out;
    struct render_choice v = view_of(ch);
    struct usage u = {.prompt = call->n_prompt_tokens, .completion = call->n_told};
    writer_reset(w);
    if (!ch->begun && call->r->kind == REQUEST_CHAT) {
        render_role(&call->render, w, &v, &u);
        ch->begun = true;
    }
    if (ch->out.ready > 0 || finished) {
        call->n_told += ch->n_tokens - ch->n_told;
        ch->n_told = ch->n_tokens;
        u.completion = call->n_told;
        render_chunk(&call->render, w, &v, &u);
        text_out_take(&ch->out);
        ch->begun = true;
    }
    call->n_ended += finished;
    stream_write(call, w);
}

static struct usage final_usage(const struct call *call)
{
    struct usage u = {.prompt = call->n_prompt_tokens};
    for (uint32_t i = 0; i < call->n_choices; i++)
        u.completion += call->choices[i].n_tokens;
    if (call->all->api->cfg.prompt_tokens_details)
        u.cached = call->n_cached;
    return u;
}

static void end_stream(struct call *call)
{
    struct writer *w = &call->all->out;
    struct usage u = final_usage(call);
    writer_reset(w);
    render_last(&call->render, w, &u);
    stream_write(call, w);
    if (call->cut || call->x == NULL)
        return;
    exchange_stream_end(call_detach(call, 200), true);
}

static void reply_whole(struct call *call)
{
    struct writer *w = &call->all->out;
    struct usage u = final_usage(call);
    writer_reset(w);
    render_answer_begin(&call->render, w);
    for (uint32_t i = 0; i < call->n_choices; i++) {
        struct render_choice v = view_of(&call->choices[i]);
        render_answer_choice(&call->render, w, &v);
    }
    struct render_choice first = view_of(&call->choices[0]);
    render_answer_end(&call->render, w, &first, &u);
    struct reply reply = {
        .status = 200, .content_type = "application/json", .body = w->p, .len = w->len};
    exchange_reply(call_detach(call, 200), &reply);
}

void answer_end(struct call *call)
{
    if (call->r->stream)
        end_stream(call);
    else
        reply_whole(call);
}

/* After the head a broken stream must not look whole: an error event, no [DONE], no last chunk. */
void answer_error(struct call *call, const struct api_error *e)
{
    if (!call->head_sent) {
        error_reply(call_detach(call, e->status), e, false);
        return;
    }
    struct writer *w = &call->all->out;
    writer_reset(w);
    render_error_event(w, e);
    stream_write(call, w);
    if (call->cut || call->x == NULL)
        return;
    exchange_stream_end(call_detach(call, e->status), false);
}
