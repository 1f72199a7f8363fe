/* See user.h. The order of draws is that of shared/peer/vllm_longctx.py: all arrivals, then every
 * user's document, then a turn's tokens when the turn begins. */
#include "api/load/user.h"

#include "api/load/event.h"
#include "api/writer.h"

#include <stdio.h>
#include <string.h>

/* Words that most vocabularies have as one token with the space before it. */
static const char *const words[] = {
    " the", " of",    " and",  " to",   " in",    " is",    " that", " for",  " it",   " as",
    " was", " with",  " be",   " by",   " on",    " not",   " he",   " his",  " but",  " at",
    " are", " this",  " have", " from", " which", " or",    " had",  " they", " you",  " an",
    " we",  " their", " been", " has",  " would", " there", " what", " will", " if",   " can",
    " all", " her",   " she",  " who",  " one",   " so",    " up",   " them", " some", " when",
    " him", " out",   " into", " time", " could", " now",   " than", " only", " its",  " then",
    " two", " more",  " may",  " about"};

enum {
    AGAIN_US = 1000000,    /* who insists is no more patient than this, whatever it is told */
    SEEDS_APART = 7777777, /* of prompts that come at the same times */
};

struct user {
    struct crowd *crowd;
    struct wire *wire;
    uv_timer_t timer;
    uint64_t at_us; /* arrival, from the start of the run */
    uint32_t turn;  /* next or being asked */
    bool ended;
    bool asking;
    struct writer said; /* the prompt so far, as it goes into the body: ids with commas, or text */
    struct writer body;
    struct answer answer;
    uint32_t n_prompt;   /* tokens asked with, as far as we know */
    struct writer heard; /* the answer, as it goes into said */
};

/* ---- prompts ---- */

static uint32_t draw(struct crowd *c)
{
    const struct load_spec *s = c->spec;
    return s->first_id + random_below(&c->random, s->last_id - s->first_id);
}

static void say(struct user *u, struct writer *to, uint32_t id)
{
    if (u->crowd->spec->text)
        write_text(to, words[id % ARRAY_LEN(words)]);
    else
        write_format(to, "%s%u", to->len > 0 ? "," : "", id);
}

static void say_new(struct user *u, struct writer *to, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        say(u, to, draw(u->crowd));
    u->n_prompt += n;
}

/* The document and what all share, before the first turn. */
static void say_beginning(struct user *u)
{
    const struct load_spec *s = u->crowd->spec;
    for (uint32_t i = 0; i < s->shared; i++)
        say(u, &u->said, u->crowd->shared[i]);
    u->n_prompt = s->shared;
    say_new(u, &u->said, s->document);
}

/* The members of {...}, without the brackets. */
static void write_extra(struct writer *w, const char *extra)
{
    if (extra == NULL)
        return;
    const char *from = strchr(extra, '{'), *to = strrchr(extra, '}');
    write_text(w, ",");
    write_bytes(w, from + 1, (size_t)(to - from - 1));
}

/* In a chat a turn is a message and `said` is a list of them; else `said` is one prompt. */
static void write_prompt(struct user *u, struct writer *w)
{
    const struct load_spec *s = u->crowd->spec;
    const char *open = s->chat ? "\"messages\":[" : s->text ? "\"prompt\":\"" : "\"prompt\":[";
    write_text(w, open);
    write_bytes(w, u->said.p, u->said.len);
    write_text(w, s->text && !s->chat ? "\"" : "]");
}

static void write_body(struct user *u)
{
    const struct load_spec *s = u->crowd->spec;
    struct writer *w = &u->body;
    writer_reset(w);
    write_text(w, "{");
    if (s->model != NULL) {
        write_text(w, "\"model\":");
        write_string(w, s->model, strlen(s->model));
        write_text(w, ",");
    }
    write_prompt(u, w);
    write_format(w,
                 ",\"max_tokens\":%u,\"ignore_eos\":true,\"temperature\":%g,\"stream\":true,"
                 "\"stream_options\":{\"include_usage\":true}",
                 s->out, s->temperature);
    if (s->keeps && !s->text) /* else it would only make the events longer */
        write_text(w, ",\"return_token_ids\":true");
    write_extra(w, s->extra);
    write_text(w, "}");
    CHECK(!w->failed);
}

/* Adds the turn's own tokens to what was said. */
static void extend_prompt(struct user *u)
{
    const struct load_spec *s = u->crowd->spec;
    if (!s->keeps && u->turn > 0) {
        writer_reset(&u->said);
        say_beginning(u);
    }
    if (!s->chat) {
        say_new(u, &u->said, s->in);
        return;
    }
    /* The document is text in front of the first message. */
    struct writer content;
    writer_init(&content);
    if (u->turn == 0 || !s->keeps) {
        write_bytes(&content, u->said.p, u->said.len);
        writer_reset(&u->said);
    }
    say_new(u, &content, s->in);
    write_format(&u->said, "%s{\"role\":\"user\",\"content\":\"", u->said.len > 0 ? "," : "");
    write_bytes(&u->said, content.p, content.len);
    write_text(&u->said, "\"}");
    writer_fini(&content);
}

/* The answer becomes part of what was said. Where the server gave no ids, so many others stand in. */
static void keep_answer(struct user *u)
{
    const struct load_spec *s = u->crowd->spec;
    if (!s->keeps)
        return;
    if (s->chat)
        write_text(&u->said, ",{\"role\":\"assistant\",\"content\":\"");
    else if (!s->text && u->heard.len > 0)
        write_text(&u->said, ",");
    write_bytes(&u->said, u->heard.p, u->heard.len);
    if (s->chat)
        write_text(&u->said, "\"}");
    u->n_prompt += u->answer.n_tokens;
    if (!s->text && u->heard.len == 0) {
        u->n_prompt -= u->answer.n_tokens;
        say_new(u, &u->said, u->answer.n_tokens);
        u->answer.stand_ins = true;
    }
}

/* ---- turns ---- */

static void on_timer(uv_timer_t *t);

static void sleep_us(struct user *u, uint64_t us)
{
    uv_update_time(u->crowd->loop);
    uv_timer_start(&u->timer, on_timer, (us + 500) / 1000, 0);
}

static void end(struct user *u)
{
    struct crowd *c = u->crowd;
    if (u->ended)
        return;
    u->ended = true;
    c->n_left--;
    wire_destroy(u->wire);
    uv_close((uv_handle_t *)&u->timer, NULL);
    if (c->n_left == 0 && c->beside != NULL)
        user_crowd_stop(c->beside);
}

static void ask(struct user *u)
{
    writer_reset(&u->heard);
    if (u->crowd->spec->turns > 1)
        extend_prompt(u);
    write_body(u);
    u->answer = (struct answer){.turn = u->turn, .n_asked = u->crowd->spec->out};
    u->asking = true;
    u->crowd->n_asking++;
    u->answer.sent_us = clock_us();
    wire_post(u->wire, u->body.p, u->body.len);
}

/* The pause is over, or the user arrives. */
static void on_timer(uv_timer_t *t)
{
    struct user *u = t->data;
    if (u->turn < u->crowd->spec->turns || u->crowd->spec->insists)
        ask(u);
    else
        end(u);
}

/* Does this event bring a token? The first chunk of a chat and the last of any answer may not. */
static bool brings_token(const struct user *u, const struct event *e)
{
    if (!e->has_choice)
        return false;
    return e->n_ids > 0 || e->text.len > 0 || (!u->crowd->spec->chat && !e->finished);
}

static void keep_words(struct user *u, const struct event *e)
{
    if (!u->crowd->spec->keeps)
        return;
    if (u->crowd->spec->text) {
        write_bytes(&u->heard, e->text.p, e->text.len);
        return;
    }
    uint32_t few[64], *ids = e->n_ids <= 64 ? few : mem_alloc((size_t)e->n_ids * sizeof *ids);
    event_ids(e, ids);
    for (uint32_t i = 0; i < e->n_ids; i++)
        write_format(&u->heard, "%s%u", u->heard.len > 0 ? "," : "", ids[i]);
    if (ids != few)
        mem_free(ids);
}

static void on_event(void *arg, const char *payload, size_t len, uint64_t now_us)
{
    struct user *u = arg;
    struct answer *a = &u->answer;
    struct event e;
    if (!event_read(&e, payload, len)) {
        a->bad_event = true;
        return;
    }
    if (e.is_error && a->error[0] == '\0')
        snprintf(a->error, sizeof a->error, "%.*s", (int)e.error.len, e.error.p);
    if (e.has_usage) {
        a->has_usage = true;
        a->n_prompt = e.prompt_tokens;
        a->n_cached = e.cached_tokens;
        a->n_usage = e.completion_tokens;
    }
    a->finished = a->finished || e.finished;
    if (!brings_token(u, &e))
        return;
    uint32_t n = e.n_ids > 0 ? e.n_ids : 1;
    tally_event(u->crowd->tally, a, n, now_us);
    keep_words(u, &e);
}

static void on_done(void *arg, const struct wire_result *r, uint64_t now_us)
{
    struct user *u = arg;
    const struct load_spec *s = u->crowd->spec;
    u->asking = false;
    u->crowd->n_asking--;
    if (!u->answer.has_usage)
        u->answer.n_prompt = u->n_prompt;
    bool good = tally_answer(u->crowd->tally, &u->answer, r, now_us);
    if (good)
        keep_answer(u);
    if (u->answer.stand_ins)
        tally_stand_ins(u->crowd->tally);
    /* Without the answer there is nothing to go on from. */
    u->turn = good || !s->keeps ? u->turn + 1 : s->turns;
    sleep_us(u, good || !s->insists ? (uint64_t)(s->pause * 1e6) : AGAIN_US);
}

/* ---- all of them ---- */

static void user_init(struct crowd *c, struct user *u, uint64_t at_us)
{
    const struct wire_handler h = {on_event, on_done, u};
    u->crowd = c;
    u->at_us = at_us;
    writer_init(&u->said);
    writer_init(&u->body);
    writer_init(&u->heard);
    u->wire = wire_create(c->loop, c->target, &h);
    CHECK(uv_timer_init(c->loop, &u->timer) == 0);
    u->timer.data = u;
}

void user_crowd_init(struct crowd *c)
{
    const struct load_spec *s = c->spec;
    double at = 0;
    random_init(&c->random, s->seed);
    c->users = mem_alloc(s->users * sizeof *c->users);
    c->shared = mem_alloc((s->shared + 1) * sizeof *c->shared);
    c->n_left = s->users;
    for (uint32_t i = 0; i < s->users; i++) {
        user_init(c, &c->users[i], (uint64_t)(at * 1e6));
        at += s->rate > 0 ? random_exponential(&c->random, s->rate) : s->stagger;
    }
    if (c->prompts > 0)
        random_init(&c->random, s->seed + SEEDS_APART * c->prompts);
    for (uint32_t i = 0; i < s->shared; i++)
        c->shared[i] = draw(c);
    for (uint32_t i = 0; i < s->users; i++)
        say_beginning(&c->users[i]);
    /* What is asked once is composed before the clock runs: users arrive in this order. */
    for (uint32_t i = 0; i < s->users && s->turns == 1; i++)
        extend_prompt(&c->users[i]);
}

void user_crowd_start(struct crowd *c, uint64_t after_us)
{
    for (uint32_t i = 0; i < c->spec->users; i++)
        sleep_us(&c->users[i], after_us + c->users[i].at_us);
}

void user_crowd_stop(struct crowd *c)
{
    for (uint32_t i = 0; i < c->spec->users; i++) {
        struct user *u = &c->users[i];
        if (u->asking)
            tally_unfinished(c->tally, &u->answer);
        end(u);
    }
    c->n_asking = 0;
}

void user_crowd_fini(struct crowd *c)
{
    for (uint32_t i = 0; i < c->spec->users; i++) {
        writer_fini(&c->users[i].said);
        writer_fini(&c->users[i].body);
        writer_fini(&c->users[i].heard);
    }
    mem_free(c->users);
    mem_free(c->shared);
}
