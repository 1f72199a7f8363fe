#include "engine/tool/robust.h"

#include <string.h>

const uint32_t robust_k[ROBUST_KS] = {16, 64, 256};
const double robust_delta[ROBUST_DELTAS] = {0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1};

static const double LEAST_MASS = 0.01; /* less and there is nothing to retrieve */

static void swap(uint32_t *a, uint32_t *b)
{
    uint32_t x = *a;
    *a = *b;
    *b = x;
}

static bool before(const float *score, uint32_t a, uint32_t b)
{
    return score[a] != score[b] ? score[a] > score[b] : a < b;
}

/* Hoare's selection: afterwards the k best are v[0..k-1], in any order. */
static void best_first(const float *score, uint32_t *v, uint32_t n, uint32_t k)
{
    uint32_t lo = 0, hi = n; /* [lo, hi) holds the border */
    while (hi - lo > 1 && k > lo && k < hi) {
        /* Never the last, so that both sides get something. */
        uint32_t pivot = v[lo + (hi - 1 - lo) / 2], i = lo, j = hi - 1;
        for (;; i++, j--) {
            while (before(score, v[i], pivot))
                i++;
            while (before(score, pivot, v[j]))
                j--;
            if (i >= j)
                break;
            swap(&v[i], &v[j]);
        }
        if (k <= j + 1)
            hi = j + 1;
        else
            lo = j + 1;
    }
}

void robust_add(struct robust *r, const struct robust_query *q)
{
    double all = 0, covered = 0;
    uint32_t *order = mem_alloc((q->n + 1) * sizeof *order);
    for (uint32_t i = 0; i < q->n; i++) {
        order[i] = i;
        all += (double)q->mass[i];
        covered += q->got[i] ? (double)q->mass[i] : 0;
    }
    /* From the largest K down: the best K of all are among the best of the K before. */
    uint32_t within = q->n;
    for (int i = ROBUST_KS - 1; i >= 0; i--) {
        uint32_t k = robust_k[i], hits = 0;
        if (k > q->n)
            continue;
        best_first(q->score, order, within, k);
        within = k;
        for (uint32_t j = 0; j < k; j++)
            hits += q->got[order[j]] != 0;
        measure_add(&r->recall[i], (double)hits / k);
    }
    if (all >= LEAST_MASS)
        measure_add(&r->mass, covered / all);
    else
        r->dropped++;
    mem_free(order);
}

void robust_fini(struct robust *r)
{
    for (int i = 0; i < ROBUST_KS; i++)
        measure_fini(&r->recall[i]);
    measure_fini(&r->mass);
}
