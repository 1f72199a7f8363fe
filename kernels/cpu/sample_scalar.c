/* Passes of sampling in portable C: the reference. */
#include "kernels/cpu/sample.h"

#include <math.h>

static struct sample_peak peak(const float *x, uint32_t n)
{
    struct sample_peak p = {x[0], 0, false};
    for (uint32_t i = 0; i < n; i++) {
        p.nan |= isnan(x[i]);
        if (x[i] > p.max) {
            p.max = x[i];
            p.id = i;
        }
    }
    return p;
}

static double soften(const float *x, uint32_t n, float t, float max, float *y, float *e,
                     double *sums)
{
    double total = 0;
    for (uint32_t at = 0; at < n; at += SAMPLE_BLOCK) {
        uint32_t end = n - at < SAMPLE_BLOCK ? n : at + SAMPLE_BLOCK;
        double sum = 0;
        for (uint32_t i = at; i < end; i++) {
            float scaled = x[i] / t, v = expf(scaled - max);
            if (y != NULL)
                y[i] = scaled;
            if (e != NULL)
                e[i] = v;
            sum += (double)v;
        }
        sums[at / SAMPLE_BLOCK] = sum;
        total += sum;
    }
    return total;
}

static uint32_t count_above(const float *x, uint32_t n, float bound)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        count += x[i] > bound;
    return count;
}

static uint32_t collect(const float *x, uint32_t n, float least, uint32_t *ids)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        if (x[i] >= least)
            ids[count++] = i;
    return count;
}

const struct sample_passes sample_scalar = {peak, soften, count_above, collect};
