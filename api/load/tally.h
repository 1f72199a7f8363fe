/* What a load measured: every answer's times, every failure's reason.
 *
 * TTFT: from the request (its connection included, its composition not) to the first event with a token.
 * TPOT: from there to the last one, per token but the first. ITL: between two events with tokens of one
 * answer; a server under pressure may put several tokens in an event, and the report says how many.
 * Answers that failed are in no percentile. Percentiles are shared/peer/vllm_longctx.py's: the value at
 * place floor(q n) of n in order. */
#ifndef API_LOAD_TALLY_H
#define API_LOAD_TALLY_H

#include "api/load/spec.h"
#include "api/load/wire.h"
#include "engine/tool/measure.h"

struct answer {
    uint32_t turn, n_asked;
    uint64_t sent_us, first_us, last_us; /* first, last: of events with tokens */
    uint32_t n_events, n_tokens;
    struct measure_sample gaps; /* us between events; gone after tally_answer */
    bool finished, has_usage, bad_event;
    bool stand_ins; /* the next prompt holds other ids instead of this answer's */
    uint32_t n_prompt, n_cached, n_usage; /* n_prompt: what we think, without usage */
    char error[200];                      /* of an error event; "": none */
};

enum { TALLY_MAX_TURNS = 16, TALLY_MAX_ERRORS = 16 };

struct tally_row {
    struct measure_sample ttft, tpot, itl; /* us */
    uint64_t n_good, n_failed, prompt_tokens, cached_tokens, output_tokens, events;
};

struct tally_error {
    char text[300]; /* the first one; others may differ in numbers */
    uint32_t n;
};

struct tally {
    const struct load_spec *spec;
    bool any_length; /* an answer may be shorter than asked */
    uint64_t started_us, ended_us;
    struct tally_row all, turns[TALLY_MAX_TURNS]; /* turns: of workloads that keep what was said */
    struct tally_error errors[TALLY_MAX_ERRORS];  /* [n_errors] */
    uint32_t n_errors, n_other_errors;
    uint64_t n_in_time;   /* answers within the limits of --slo */
    uint64_t tokens_seen; /* of answers that are not over, too: for progress */
    uint32_t n_unfinished, n_stand_ins;
    bool interrupted, no_usage;
};

void tally_event(struct tally *t, struct answer *a, uint32_t n_tokens, uint64_t now_us);
/* The answer is over. true: it is what was asked for. */
bool tally_answer(struct tally *t, struct answer *a, const struct wire_result *r, uint64_t now_us);
void tally_unfinished(struct tally *t, struct answer *a);
void tally_stand_ins(struct tally *t);
void tally_fini(struct tally *t);

/* The report: a table on stdout, and files if they are named. alone, flood: the same load by itself, and those who
 * were beside it in t; both or none. ERR_IO. */
status tally_report(struct tally *t, struct tally *alone, struct tally *flood, const char *url,
                    const char *json, const char *svg);

#endif
