/* min_p, top_k and top_p without sorting a vocabulary.
 *
 * All three keep a set of best tokens, and nearly always a small one. So candidates are collected by
 * a bound on the logit, lowered until they certainly hold everything that can be kept; then a cut
 * is found among them by radix selection over the bits of the logit: three counting passes, whatever
 * the distribution. Candidates stay in order of ids, as the draw wants them.
 *
 * Ties: all tokens equal to the k-th survive top_k; top_p takes tied tokens by smaller id. */
#include "kernels/cpu/sample.h"

#include <math.h>
#include <string.h>

/* top_p is a float, and so is each probability: the sum counts as reached within 2^-20 of it, so
 * that 0.5 + 0.3 reaches 0.8. */
#define TOP_P_SLACK (1.0 - 1.0 / 1048576.0)

enum { BUCKETS = 2048 };

/* Unsigned integers in the order of the floats; -0 and 0 are one. */
static uint32_t key_of(float x)
{
    union {
        float f;
        uint32_t u;
    } v = {.f = x + 0.0f};
    return v.u & 0x80000000u ? ~v.u : v.u | 0x80000000u;
}

/* Kept: keys above `key`, and the first n_tied of those equal. */
struct cut {
    uint32_t key, n_tied;
};

/* The cut at which weights, summed from the largest key down, reach `want`. Weights are e, or 1
 * each when e is NULL. */
static struct cut find_cut(const float *x, const float *e, const uint32_t *ids, uint32_t n,
                           double want)
{
    static const struct {
        uint32_t shift, mask;
    } levels[] = {{21, 0x7ff}, {10, 0x7ff}, {0, 0x3ff}};
    uint32_t prefix = 0, above_shift = 0, count[BUCKETS];
    double above = 0, mass[BUCKETS];
    uint32_t b = 0;
    for (size_t level = 0; level < ARRAY_LEN(levels); level++) {
        uint32_t shift = levels[level].shift, mask = levels[level].mask, last = 0;
        memset(count, 0, sizeof count);
        memset(mass, 0, sizeof mass);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t key = key_of(x[ids[i]]);
            if (level > 0 && key >> above_shift != prefix)
                continue;
            count[key >> shift & mask]++;
            mass[key >> shift & mask] += e != NULL ? (double)e[ids[i]] : 1.0;
        }
        double passed = above;
        for (b = mask + 1; b-- > 0;) { /* rounding may leave the sum short: then the last bucket */
            if (count[b] == 0)
                continue;
            last = b;
            above = passed;
            passed += mass[b];
            if (passed >= want)
                break;
        }
        b = last;
        prefix = level == 0 ? b : prefix << (above_shift - shift) | b;
        above_shift = shift;
    }
    double each = mass[b] / count[b], needed = each > 0 ? ceil((want - above) / each) : 1;
    uint32_t n_tied = needed < 1 ? 1 : needed < count[b] ? (uint32_t)needed : count[b];
    return (struct cut){prefix, e != NULL ? n_tied : count[b]};
}

static uint32_t keep_cut(const float *x, uint32_t *ids, uint32_t n, struct cut c)
{
    uint32_t kept = 0, tied = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t key = key_of(x[ids[i]]);
        if (key > c.key || (key == c.key && tied++ < c.n_tied))
            ids[kept++] = ids[i];
    }
    return kept;
}

static double sum_of(const float *e, const uint32_t *ids, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)e[ids[i]];
    return sum;
}

/* Do candidates down to `depth` below the best hold all that can be kept? */
static bool deep_enough(const struct sample_worker *w, const struct sample_params *p, double depth,
                        uint32_t n, double total)
{
    if (p->min_p > 0 && exp(-depth) < 0.999 * (double)p->min_p)
        return true;
    if (p->top_k > 0)
        return n >= p->top_k;
    return p->min_p == 0 && sum_of(w->e, w->ids, n) >= (double)p->top_p * total;
}

uint32_t sample_filtered(struct sample_worker *w, const struct sample_passes *k,
                         const struct sample_params *p, uint32_t vocab, float max, double total,
                         double uniform)
{
    static const float depths[] = {4, 9, 20};
    uint32_t n = 0, kept = 0;
    bool enough = false;
    for (size_t i = 0; i < ARRAY_LEN(depths) && !enough; i++) {
        n = k->collect(w->x, vocab, max - depths[i], w->ids);
        /* one nat less than collected: the bound is rounded */
        enough = deep_enough(w, p, (double)depths[i] - 1, n, total);
    }
    if (!enough)
        n = k->collect(w->x, vocab, -INFINITY, w->ids);
    for (uint32_t i = 0; i < n; i++) /* relative to the best, whose e is 1 */
        if (w->e[w->ids[i]] >= p->min_p && w->e[w->ids[i]] > 0)
            w->ids[kept++] = w->ids[i];
    n = kept;
    if (p->top_k > 0 && p->top_k < n)
        n = keep_cut(w->x, w->ids, n, find_cut(w->x, NULL, w->ids, n, p->top_k));
    if (p->top_p < 1) {
        /* of what min_p and top_k left: without them of everything, not of the candidates */
        double left = p->top_k > 0 || p->min_p > 0 ? sum_of(w->e, w->ids, n) : total;
        double want = (double)p->top_p * left * TOP_P_SLACK;
        n = keep_cut(w->x, w->ids, n, find_cut(w->x, w->e, w->ids, n, want));
    }
    return sample_pick(w->e, w->ids, n, uniform);
}

uint32_t sample_pick(const float *e, const uint32_t *ids, uint32_t n, double uniform)
{
    double at = uniform * sum_of(e, ids, n), sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += (double)e[ids[i]];
        if (sum > at)
            return ids[i];
    }
    return ids[n - 1]; /* uniform < 1 and the same sum: only rounding comes here */
}
