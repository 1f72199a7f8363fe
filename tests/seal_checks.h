/* What a sealed segment must say, whoever sealed it: every row once, and digests that are, by definition and
 * in float64, those of the rows as they lie. A number that is not one (NaN) is off by more than anything. */
#ifndef TESTS_SEAL_CHECKS_H
#define TESTS_SEAL_CHECKS_H

#include "tests/digest_rig.h"

static inline const uint16_t *positions(const struct rig *r, uint32_t segment, uint32_t lane)
{
    return (const uint16_t *)(const void *)rig_record(r, segment, lane);
}

typedef float row_function(uint32_t lane, uint32_t row, uint32_t c);

/* key: what made K. */
static inline bool rows_are_a_permutation(const struct rig *r, row_function *key)
{
    bool good = true;
    for (uint32_t lane = 0; lane < r->s.layers * r->s.kv_heads; lane++)
        for (uint32_t seg = 0; seg < r->s.segments; seg++) {
            const uint16_t *p = positions(r, seg, lane);
            uint8_t seen[SEGMENT_ROWS] = {0};
            for (uint32_t i = 0; i < SEGMENT_ROWS; i++) {
                good &= p[i] < SEGMENT_ROWS && !seen[p[i] % SEGMENT_ROWS];
                seen[p[i] % SEGMENT_ROWS] = 1;
                good &= seg > 0 || i >= rig_sink_rows(r) || p[i] == i;
                uint32_t at = seg * SEGMENT_ROWS + i, was = seg * SEGMENT_ROWS + p[i];
                for (uint32_t c = 0; c < r->s.dim; c++) {
                    good &=
                        *rig_at(r, r->blocks, lane, at, c, false) == f32_to_bf16(key(lane, was, c));
                    good &= *rig_at(r, r->blocks, lane, at, c, true) ==
                            f32_to_bf16(rig_value(lane, was, c));
                }
            }
        }
    return good;
}

/* Squared distances of rows to the mean of their partition, summed. */
static inline double spread(const struct rig *r, uint32_t lane)
{
    double sum = 0, *k = rig_keys(r, r->blocks, lane, false);
    uint32_t dim = r->s.dim;
    for (uint32_t seg = 0; seg < r->s.segments; seg++)
        for (uint32_t p = 0; p < r->desc.parts; p++) {
            uint32_t first, n = digest_rows(rig_record(r, seg, lane), &r->desc, p, &first);
            for (uint32_t c = 0; c < dim && n > 0; c++) {
                const double *x = k + ((size_t)seg * SEGMENT_ROWS + first) * dim + c;
                double mean = 0, squares = 0;
                for (uint32_t i = 0; i < n; i++) {
                    mean += x[(size_t)i * dim] / n;
                    squares += x[(size_t)i * dim] * x[(size_t)i * dim];
                }
                sum += squares - n * mean * mean;
            }
        }
    mem_free(k);
    return sum;
}

static inline double off_by(const struct digest_vectors *v, uint32_t dim, uint32_t p,
                            const double *want)
{
    double worst = 0;
    for (uint32_t c = 0; c < dim; c++) {
        double step = v->step[c] > 0 ? (double)v->step[c] : 1e-9;
        double d = fabs((double)digest_vector_get(v, dim, p, c) - want[c]) / step;
        worst = d <= worst ? worst : d;
    }
    return worst;
}

/* Greatest distances, in steps of what stores a number. */
struct worst {
    double vectors, coarse, values;
};

/* Mean of a partition without its farthest rows; where[k + 1] = the k-th farthest row. */
static inline void centroid_of(const double *x, uint32_t n, uint32_t dim, uint32_t outliers,
                               double *mean, const double **where)
{
    double best[3] = {-1, -1, -1};
    uint32_t far[3] = {0};
    memset(mean, 0, dim * sizeof *mean);
    for (uint32_t i = 0; i < n * dim; i++)
        mean[i % dim] += x[i] / n;
    for (uint32_t i = 0; i < n && outliers > 0; i++) {
        double d = 0;
        for (uint32_t c = 0; c < dim; c++)
            d += (x[i * dim + c] - mean[c]) * (x[i * dim + c] - mean[c]);
        uint32_t at = outliers;
        for (; at > 0 && d > best[at - 1]; at--) {
            best[at] = best[at - 1];
            far[at] = far[at - 1];
        }
        best[at] = d;
        far[at] = i;
    }
    for (uint32_t c = 0; c < dim; c++) {
        mean[c] *= n;
        for (uint32_t o = 0; o < outliers; o++)
            mean[c] -= x[far[o] * dim + c];
        mean[c] /= n - outliers;
    }
    for (uint32_t o = 0; o < outliers; o++)
        where[o + 1] = x + (size_t)far[o] * dim;
    where[0] = mean;
}

static inline void check_values(const struct rig *r, const struct digest_layout *l,
                                const uint8_t *record, uint32_t p, const double *y, uint32_t n,
                                struct worst *w)
{
    double mean[SEGMENT_ROWS] = {0}, top = 0;
    for (uint32_t i = 0; i < n * r->s.dim; i++)
        mean[i % r->s.dim] += y[i] / n;
    for (uint32_t c = 0; c < r->s.dim; c++)
        top = fabs(mean[c]) > top ? fabs(mean[c]) : top;
    for (uint32_t c = 0; c < r->s.dim; c++) {
        double got = (double)digest_value_scale(record, l, p) * digest_value(record, l, p)[c];
        double d = fabs(got - mean[c]) / (top / 127);
        w->values = d <= w->values ? w->values : d;
    }
}

/* The digests of one lane and segment. */
static inline void check_lane(const struct rig *r, uint32_t seg, uint32_t lane, struct worst *w)
{
    struct digest_layout l = digest_layout_of(r->s.dim, &r->desc);
    const uint8_t *record = rig_record(r, seg, lane);
    uint32_t dim = r->s.dim;
    double *k = rig_keys(r, r->blocks, lane, false), *v = rig_keys(r, r->blocks, lane, true);
    double *means = mem_alloc((size_t)r->desc.parts * dim * sizeof *means);
    uint8_t *has = mem_alloc(r->desc.parts);
    for (uint32_t p = 0; p < r->desc.parts; p++) {
        uint32_t first, n = digest_rows(record, &r->desc, p, &first);
        size_t at = ((size_t)seg * SEGMENT_ROWS + first) * dim;
        const double *want[3];
        has[p] = n > 0 && (seg > 0 || first + n > rig_sink_rows(r));
        if (!has[p])
            continue;
        centroid_of(k + at, n, dim, r->desc.outliers, means + (size_t)p * dim, want);
        for (uint32_t o = 0; o <= r->desc.outliers; o++) {
            struct digest_vectors vectors = digest_vectors_of(record, &l, o);
            double d = off_by(&vectors, dim, p, want[o]);
            w->vectors = d <= w->vectors ? w->vectors : d;
        }
        check_values(r, &l, record, p, v + at, n, w);
    }
    for (uint32_t g = 0; l.coarse != 0 && g < r->desc.parts / DIGEST_COARSE; g++) {
        struct digest_vectors vectors = digest_vectors_at(record + l.coarse, dim);
        double mean[SEGMENT_ROWS] = {0};
        uint32_t n = 0;
        for (uint32_t p = g * DIGEST_COARSE; p < (g + 1) * DIGEST_COARSE; p++) {
            for (uint32_t c = 0; c < dim && has[p]; c++)
                mean[c] += means[(size_t)p * dim + c];
            n += has[p];
        }
        for (uint32_t c = 0; c < dim && n > 0; c++)
            mean[c] /= n;
        double d = n > 0 ? off_by(&vectors, dim, g, mean) : 0;
        w->coarse = d <= w->coarse ? w->coarse : d;
    }
    mem_free(means);
    mem_free(has);
    mem_free(k);
    mem_free(v);
}

#endif
