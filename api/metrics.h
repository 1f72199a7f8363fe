/* /metrics: vLLM's names (reference/api.md 3.1) with the labels engine="0" and model_name, and our
 * own under spind_. Every series exists from the start, at zero. Loop thread only. */
#ifndef API_METRICS_H
#define API_METRICS_H

#include "api/writer.h"
#include "engine/engine.h"

struct api;
struct metrics;

enum metric_phase {
    METRIC_TTFT,
    METRIC_ITL,
    METRIC_TPOT, /* mean time per output token of one choice */
    METRIC_E2E,
    METRIC_QUEUE,
    METRIC_INFERENCE,
    METRIC_PREFILL,
    METRIC_DECODE,
    METRIC_PHASES
};

/* info: NULL while the model loads; token histograms then have bounds up to a million. */
status metrics_create(struct metrics **out, const char *model_name, const struct engine_info *info);
void metrics_destroy(struct metrics *m);

void metrics_time(struct metrics *m, enum metric_phase phase, double seconds);
/* Tokens that reached the API: prompts once per sequence, at its first token. */
void metrics_tokens(struct metrics *m, uint64_t prompt, uint64_t generated);

/* One choice got its last byte of text, or was given up. reason: "stop", "length", "abort",
 * "error". */
struct metric_choice {
    const char *reason;
    uint32_t prompt_tokens, output_tokens, max_tokens;
};
void metrics_choice(struct metrics *m, const struct metric_choice *c);
/* All n choices of one prompt are finished; max_output: tokens of the longest. */
void metrics_prompt(struct metrics *m, uint32_t n, uint32_t max_output);
/* The engine's last word on a sequence: times of its phases, cache hits, preemptions. */
void metrics_done(struct metrics *m, const struct msg_done *d);
void metrics_corrupted(struct metrics *m); /* a sequence ended by non-finite logits */

/* handler: a path of the route table, or "none". */
void metrics_http(struct metrics *m, const char *handler, const char *method, int status,
                  double seconds);
/* reason: the error code of the refusal. */
void metrics_rejected(struct metrics *m, const char *reason);
void metrics_step(struct metrics *m, const struct msg_step *s);
/* The whole page; Content-Type: METRICS_CONTENT_TYPE. */
void metrics_render(struct metrics *m, const struct api *a, struct writer *out);

#define METRICS_CONTENT_TYPE "text/plain; version=0.0.4; charset=utf-8"

#endif
