#include "engine/tool/measure.h"

#include <math.h>
#include <stdlib.h>

uint32_t measure_argmax(const float *logits, uint32_t vocab)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

/* log sum exp(logits), given its largest member. */
static double log_sum(const float *logits, uint32_t vocab, uint32_t best)
{
    double sum = 0, max = (double)logits[best];
    for (uint32_t i = 0; i < vocab; i++)
        sum += exp((double)logits[i] - max);
    return max + log(sum);
}

double measure_logprob(const float *logits, uint32_t vocab, uint32_t token)
{
    return (double)logits[token] - log_sum(logits, vocab, measure_argmax(logits, vocab));
}

struct measure_token measure_token(const float *dense, const float *sparse, uint32_t vocab,
                                   uint32_t target)
{
    uint32_t best_dense = measure_argmax(dense, vocab), best = measure_argmax(sparse, vocab);
    double sum_dense = log_sum(dense, vocab, best_dense), sum = log_sum(sparse, vocab, best);
    double kl = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        double p = (double)dense[i] - sum_dense, q = (double)sparse[i] - sum;
        kl += exp(p) * (p - q);
    }
    return (struct measure_token){
        .kl = kl > 0 ? kl : 0, /* rounding alone can leave -1e-16 */
        .nll = sum - (double)sparse[target],
        .nll_dense = sum_dense - (double)dense[target],
        .top1 = best == best_dense,
        .right = best == target,
        .right_dense = best_dense == target,
    };
}

void measure_add(struct measure_sample *s, double x)
{
    if (s->n == s->room) {
        uint32_t room = s->room ? 2 * s->room : 256;
        s->v = mem_grow(s->v, s->room * sizeof *s->v, room * sizeof *s->v);
        s->room = room;
    }
    s->v[s->n++] = x;
    s->sorted = false;
}

void measure_fini(struct measure_sample *s)
{
    mem_free(s->v);
    *s = (struct measure_sample){0};
}

double measure_mean(const struct measure_sample *s)
{
    double sum = 0;
    for (uint32_t i = 0; i < s->n; i++)
        sum += s->v[i];
    return s->n ? sum / s->n : 0;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double measure_percentile(struct measure_sample *s, double percent)
{
    if (s->n == 0)
        return 0;
    if (!s->sorted)
        qsort(s->v, s->n, sizeof *s->v, by_value);
    s->sorted = true;
    double rank = ceil(percent / 100 * s->n);
    uint32_t i = rank < 1 ? 0 : (uint32_t)rank - 1;
    return s->v[i < s->n ? i : s->n - 1];
}

double measure_at_least(const struct measure_sample *s, double x)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n; i++)
        n += s->v[i] >= x;
    return s->n ? (double)n / s->n : 0;
}

void measure_take(struct measure *m, const struct measure_token *t)
{
    measure_add(&m->kl, t->kl);
    m->nll += t->nll;
    m->nll_dense += t->nll_dense;
    m->top1 += t->top1;
    m->n++;
}

double measure_ppl(const struct measure *m)
{
    return m->n ? exp(m->nll / m->n) : 0;
}

double measure_ppl_dense(const struct measure *m)
{
    return m->n ? exp(m->nll_dense / m->n) : 0;
}
