/* How far one distribution over the next token is from another, and what that adds up to.
 *
 * Per token: KL(dense || sparse) in nats, whether both put the same token first, and the negative
 * log-likelihood of the true token under both. Sums are float64. */
#ifndef ENGINE_TOOL_MEASURE_H
#define ENGINE_TOOL_MEASURE_H

#include "kernels/base.h"

struct measure_token {
    double kl, nll, nll_dense;
    bool top1;  /* the same token first */
    bool right; /* sparse puts the true token first */
    bool right_dense;
};

/* logits: [vocab], finite. target: the true next token. Ties: the smaller id is first. */
struct measure_token measure_token(const float *dense, const float *sparse, uint32_t vocab,
                                   uint32_t target);
uint32_t measure_argmax(const float *logits, uint32_t vocab);
/* log-softmax of one token. */
double measure_logprob(const float *logits, uint32_t vocab, uint32_t token);

/* A sample of numbers: mean and percentiles. Zeroed: empty. */
struct measure_sample {
    double *v; /* [n], in order of arrival until a percentile is asked for */
    uint32_t n, room;
    bool sorted;
};
void measure_add(struct measure_sample *s, double x);
void measure_fini(struct measure_sample *s);
double measure_mean(const struct measure_sample *s); /* 0 if empty */
/* Nearest rank: the smallest value with at least `percent` of the sample at or below it. */
double measure_percentile(struct measure_sample *s, double percent);
/* Share of the sample that is >= x. */
double measure_at_least(const struct measure_sample *s, double x);

/* Tokens so far. */
struct measure {
    struct measure_sample kl;
    double nll, nll_dense;
    uint32_t n, top1;
};
void measure_take(struct measure *m, const struct measure_token *t);
double measure_ppl(const struct measure *m);
double measure_ppl_dense(const struct measure *m);

#endif
