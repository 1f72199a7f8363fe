/* A call: one generation request and its answer in the making. A choice: one sequence of it.
 *
 *   call.c    lives of calls: start, events by id, ends, timeouts
 *   submit.c  towards the engine: admission, ids, MSG_SUBMIT and MSG_CANCEL
 *   answer.c  towards the client: stream events, whole answers, errors
 *
 * Two ends of life meet here. The client's: `x` is NULL once the answer is out or the client has
 * left, and is never touched again. The engine's: a choice is CHOICE_DONE when its MSG_DONE came (or
 * it was never submitted). A call is freed when both are over. Loop thread only. */
#ifndef API_CALL_H
#define API_CALL_H

#include "api/internal.h"
#include "api/render.h"

enum {
    HEAD_DELAY_US = 5000000,  /* a stream without a token gets its head now (api.md D19) */
    PING_US = 15000000,       /* then a comment after so much silence: proxies give up at 60 s */
    SOFT_UNSENT = 64 * 1024,  /* above it what there is to tell waits until the client has read */
    EVENT_BYTES = 16 * 1024,  /* about the longest event, and stretch of a whole answer */
    WHOLE_BYTES = 256 * 1024, /* a whole answer up to here has a length; a longer one has chunks */
    FLUSH_BYTES = 256 * 1024, /* written by one flush, some ms of work; then sockets come first */
    SCRATCH_BYTES = 1 << 20,  /* calls.out keeps no more */
};

enum choice_state {
    CHOICE_WAITING,   /* its MSG_SUBMIT is not posted yet */
    CHOICE_SUBMITTED, /* posted; in the engine's queue */
    CHOICE_RUNNING,   /* the engine has scheduled it */
    CHOICE_DONE,
};

struct choice {
    struct call *call;
    uint64_t id; /* of its sequence; 0: not submitted, or done */
    enum choice_state state;
    uint32_t index, prompt;     /* index = prompt * n + i */
    uint32_t max_tokens;        /* clamped to the context */
    uint32_t n_tokens;          /* sampled, as far as they count for the answer */
    uint32_t n_told;            /* of these: in an event that was written */
    bool wants_scores;          /* MSG_PROMPT will come for its prompt tokens but the first */
    bool echo_scores;           /* they go in front of its log-probabilities */
    bool ending;                /* its last token is here; MSG_DONE comes in the same step */
    bool cancelled, cancel_due; /* cancel_due: wanted, but the mailbox was full */
    bool dirty;                 /* in calls.dirty */
    bool counted;               /* its end is in the metrics */
    bool begun;                 /* its first event is written */
    bool ended;                 /* stream: its last event is */
    struct finish finish;
    uint64_t first_us, last_us; /* of its tokens, loop's clock */
    struct text_out out;
    struct text_tokens scores; /* of the prompt; empty unless prompt_logprobs was asked */
    struct choice *next_dirty;
};

struct call {
    struct calls *all;
    struct call *prev, *next; /* in calls.first */
    struct call *next_waiting, *next_dead;
    struct exchange *x; /* NULL: answered, or the client left */
    struct request *r;
    struct roster_slot *slot; /* whose it is; NULL: there are no tenants */
    uint64_t salt[2];         /* of the prefix cache: the tenant's and the client's */
    struct render render;
    struct text_stops stops;
    uint32_t stop_ids[MAX_STOP_IDS + 8]; /* the client's, then the model's */
    uint32_t n_stop_ids;
    uint64_t arrival_us, submitted_us, written_us;
    uint32_t n_choices, n_finished, n_done;
    uint32_t n_dirty;     /* choices in calls.dirty */
    uint32_t n_ended;     /* stream: choices whose last event is written */
    uint32_t n_submitted; /* choices are submitted in order of index */
    bool scheduled;       /* one of its sequences has left the engine's queue */
    bool planned;         /* a token of it attended by plan: usage tells what was chosen */
    bool head_sent;       /* the status line is out: a stream, or an answer in chunks */
    bool left;            /* its client did not wait for the answer */
    bool cut;             /* the server is cutting the connection: write no more */
    bool waiting;         /* in calls.waiting */
    bool dead;            /* in calls.dead */
    bool whole_begun;     /* a whole answer is being written; how far: */
    uint32_t whole_choice;
    struct render_at whole_at;
    uint64_t answer_bytes;                      /* its share of calls.answer_bytes */
    uint64_t charged_output, n_generated;       /* tokens: taken for it, made by the engine */
    uint64_t n_light_misses;                    /* of tokens received, sum over choices */
    uint64_t n_prompt_tokens, n_told, n_cached; /* n_told, n_cached: sums over choices, prompts */
    struct choice choices[];
};

/* Where an id leads. id = generation << SLOT_BITS | slot, so ids never come back. */
enum { SLOT_BITS = 20, MAX_SLOTS = 1 << SLOT_BITS };

struct call_slot {
    struct choice *choice; /* NULL: free */
    uint64_t generation;
    uint32_t next_free; /* slot + 1; 0: none */
};

struct calls {
    struct api *api;
    struct call *first;
    struct call *waiting, *waiting_last; /* calls with choices to submit, oldest first */
    struct call *dead;                   /* to be freed by the next flush */
    struct choice *dirty, **dirty_end;   /* choices with something to tell, in order of events */
    struct call_slot *slots;             /* [n_slots] */
    uint32_t n_slots, free_slot;         /* free_slot: slot + 1; 0: none */
    uint32_t n_active, n_queued, n_running, n_cancel_due;
    uint64_t answer_bytes;                    /* that the calls may come to hold: submit.c */
    size_t flushed;                           /* bytes written by this flush */
    bool unfinished;                          /* more can be written at once: flush again */
    uint64_t queued_tokens;                   /* prompt tokens of queued sequences */
    uint64_t now_us;                          /* of this batch of events; 0: not read yet */
    uint64_t oldest_us;                       /* wait of the oldest queued call at the last tick */
    uint64_t prompt_tokens, generated_tokens; /* of this batch, for the metrics */
    uint64_t random;                          /* for jitter */
    char fingerprint[64];
    struct writer out; /* scratch */
};

static inline uint64_t calls_now(struct calls *c)
{
    if (c->now_us == 0)
        c->now_us = clock_us(); /* once per batch: tokens of one step came together */
    return c->now_us;
}

/* The one door of choice.state; keeps the counters of queued and running sequences. */
void choice_move(struct choice *ch, enum choice_state to);
void choice_mark(struct choice *ch);    /* it has something to tell the client */
void call_no_memory(struct call *call); /* gives it up: 503 */
/* Gives the call up: error to the client, cancel to the engine. reason: for the metrics. */
void call_fail(struct call *call, const struct api_error *e, const char *reason);
/* Takes the exchange out of the call, for its last use. */
struct exchange *call_detach(struct call *call, int http_status);
void call_settle(struct call *call); /* frees it soon, if both ends are over */

/* submit.c. False: *e says why not (503 full; 400 can never fit). */
bool submit_admit(struct calls *c, const struct request *r, struct api_error *e);
/* Bytes of tokens and their alternatives that answering r holds at most. */
uint64_t submit_answer_bytes(const struct calls *c, const struct request *r);
void submit_enqueue(struct call *call);
/* Posts what the mailbox takes: submissions in order, then due cancels. */
void submit_pending(struct calls *c);
void submit_cancel(struct choice *ch);
struct choice *submit_find(struct calls *c, uint64_t id); /* NULL: not ours any more */
void submit_forget(struct choice *ch);                    /* MSG_DONE came: the id is free */
uint32_t submit_retry_after(struct calls *c);             /* seconds, 1..120, jittered */

/* answer.c */
void answer_event(struct choice *ch); /* stream: what is ready of this choice, if anything */
void answer_head(struct call *call);  /* stream: the status line and a comment */
void answer_ping(struct call *call);
/* Every choice is finished. Comes again by calls_flush if not all could be written. */
void answer_end(struct call *call);
void answer_error(struct call *call, const struct api_error *e);

#endif
