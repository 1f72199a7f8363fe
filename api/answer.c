/* From the API to the client: stream events, whole answers, errors.
 *
 * A stream gets one event per choice and batch of engine events, which is one per token while the
 * client keeps up. If it does not, nothing is written: text and tokens stay where they are until it
 * has read, and then leave in longer events. No event is much longer than EVENT_BYTES, so a client
 * that reads is never near the server's hard limit, whatever it asked for.
 *
 * A whole answer is written when its last choice has ended. A short one has a Content-Length; of a
 * long one the first WHOLE_BYTES leave as chunks, and the rest follows as the client takes it.
 * Either way what was not written yet exists as tokens only, which admission has bounded, and one
 * flush writes FLUSH_BYTES at most, so that nobody's answer holds up the loop. */
#include "api/call.h"

#include <string.h>

static void stream_write(struct call *call, const struct writer *w)
{
    if (w->len == 0 || call->cut)
        return;
    call->all->flushed += w->len;
    if (exchange_stream_write(call->x, w->p, w->len) != OK)
        call->cut = true; /* api_gone will come */
    call->written_us = calls_now(call->all);
}

static bool client_is_behind(const struct call *call)
{
    return exchange_stream_unsent(call->x) > SOFT_UNSENT;
}

/* May more be written now? If not, ch comes again: when its client has read, or at once. */
static bool may_go_on(struct choice *ch)
{
    struct calls *c = ch->call->all;
    bool behind = client_is_behind(ch->call);
    if (!behind && c->flushed < FLUSH_BYTES)
        return true;
    c->unfinished = c->unfinished || !behind;
    choice_mark(ch);
    return false;
}

static void begin_stream(struct call *call)
{
    if (call->head_sent)
        return;
    call->head_sent = true;
    exchange_stream_begin(call->x, NULL);
}

static void comment(struct call *call)
{
    struct writer *w = &call->all->out;
    writer_reset(w);
    write_text(w, ": ping\n\n");
    stream_write(call, w);
}

void answer_ping(struct call *call)
{
    if (exchange_stream_unsent(call->x) == 0) /* else something is on its way */
        comment(call);
}

void answer_head(struct call *call)
{
    begin_stream(call);
    comment(call); /* some proxies pass the head on only with the first byte of the body */
}

static struct render_choice view_of(const struct choice *ch, size_t most)
{
    const struct call *call = ch->call;
    const struct request *r = call->r;
    struct render_choice v = {
        .index = ch->index, .part = text_out_part(&ch->out, most), .finish = ch->finish};
    if (!ch->begun)
        v.prompt = &r->prompts[ch->prompt];
    if (r->prompt_logprobs >= 0) /* the first choice of a prompt scores it for all */
        v.scores = &call->choices[(size_t)ch->prompt * r->n].scores;
    return v;
}

/* The next event of this choice. The first event of a chat choice comes with its first token, not at
 * admission: clients take it for the time to first token. */
static void write_event(struct choice *ch)
{
    static const struct finish not_yet = {.kind = FINISH_NONE};
    struct call *call = ch->call;
    struct writer *w = &call->all->out;
    struct render_choice v = view_of(ch, EVENT_BYTES);
    struct usage u = {.prompt = call->n_prompt_tokens, .completion = call->n_told};
    bool last = v.part.len == ch->out.ready - ch->out.told &&
                v.part.n_tokens == ch->out.n_ready_tokens - ch->out.n_told;
    if (!last)
        v.finish = not_yet;
    writer_reset(w);
    if (!ch->begun && call->r->kind == REQUEST_CHAT) {
        render_role(&call->render, w, &v, &u);
        ch->begun = true;
        v.prompt = NULL;
    }
    if (ch->out.ready > 0 || v.finish.kind != FINISH_NONE) {
        call->n_told += ch->n_tokens - ch->n_told;
        ch->n_told = ch->n_tokens;
        u.completion = call->n_told;
        render_chunk(&call->render, w, &v, &u);
        text_out_take_part(&ch->out, &v.part);
        ch->begun = true;
    }
    ch->ended = v.finish.kind != FINISH_NONE;
    call->n_ended += ch->ended;
    if (w->failed)
        call_no_memory(call);
    else
        stream_write(call, w);
}

void answer_event(struct choice *ch)
{
    struct call *call = ch->call;
    bool finished = ch->finish.kind != FINISH_NONE;
    if (call->cut || ch->ended || (!finished && (ch->n_tokens == 0 || ch->ending)))
        return;
    do {
        if (!may_go_on(ch))
            return;
        begin_stream(call);
        write_event(ch);
    } while (call->x != NULL && !call->cut && !ch->ended && ch->out.ready > ch->out.told);
}

static struct usage final_usage(const struct call *call)
{
    struct usage u = {.prompt = call->n_prompt_tokens, .light_misses = call->n_light_misses};
    for (uint32_t i = 0; i < call->n_choices; i++)
        u.completion += call->choices[i].n_tokens;
    if (call->all->api->cfg.prompt_tokens_details)
        u.cached = call->n_cached;
    if (call->planned) {
        u.plugin = sparse_at(call->r->sparse.plugin)->name;
        u.budget = call->r->sparse.budget;
    }
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

/* The next stretch of a whole answer into calls.out; true: it was the last. */
static bool write_whole(struct call *call, size_t most)
{
    struct writer *w = &call->all->out;
    struct usage u = final_usage(call);
    writer_reset(w);
    if (!call->whole_begun)
        render_answer_begin(&call->render, w);
    call->whole_begun = true;
    for (; call->whole_choice < call->n_choices; call->whole_choice++) {
        struct render_choice v = view_of(&call->choices[call->whole_choice], SIZE_MAX);
        if (!render_answer_choice(&call->render, w, &v, &call->whole_at, most))
            return false;
        call->whole_at = (struct render_at){0};
    }
    struct render_choice first = view_of(&call->choices[0], SIZE_MAX);
    return render_answer_end(&call->render, w, &first, &u, &call->whole_at, most) && !w->failed;
}

static void reply_whole(struct call *call)
{
    struct writer *w = &call->all->out;
    bool all = false;
    while (!all) {
        if (!may_go_on(&call->choices[0]))
            return;
        all = write_whole(call, call->head_sent ? EVENT_BYTES : WHOLE_BYTES);
        if (w->failed) {
            call_no_memory(call);
            return;
        }
        if (all && !call->head_sent) {
            struct reply reply = {
                .status = 200, .content_type = "application/json", .body = w->p, .len = w->len};
            call->all->flushed += w->len;
            exchange_reply(call_detach(call, 200), &reply);
            return;
        }
        if (!call->head_sent)
            exchange_chunks_begin(call->x, "application/json");
        call->head_sent = true;
        stream_write(call, w);
        if (call->cut)
            return;
    }
    exchange_stream_end(call_detach(call, 200), true);
}

void answer_end(struct call *call)
{
    if (call->cut)
        return;
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
    if (call->r->stream)
        render_error_event(w, e);
    stream_write(call, w);
    if (call->cut || call->x == NULL)
        return;
    exchange_stream_end(call_detach(call, e->status), false);
}
