/* Counting into buckets, and the lines that tell of them (histogram.h). */
#include "api/histogram.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

void histogram_add(struct histogram *h, double v)
{
    uint32_t lo = 0, hi = h->n; /* first bound >= v */
    while (lo < hi) {
        uint32_t mid = (lo + hi) / 2;
        if (v <= h->bounds[mid])
            hi = mid;
        else
            lo = mid + 1;
    }
    h->counts[lo]++;
    h->sum += v;
}

void histogram_init(struct histogram *h, const double *bounds, size_t n, double most)
{
    static const double steps[] = {1, 2, 5};
    *h = (struct histogram){0};
    CHECK(n <= HISTOGRAM_BOUNDS);
    for (size_t i = 0; i < n; i++)
        h->bounds[h->n++] = bounds[i];
    if (bounds != NULL)
        return;
    for (double scale = 1;; scale *= 10)
        for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
            if (steps[i] * scale > most || h->n == HISTOGRAM_BOUNDS)
                return;
            h->bounds[h->n++] = steps[i] * scale;
        }
}

/* As Python's repr(float) for what occurs here: "1.0", "0.001", shortest that reads back equal. */
void histogram_write_number(struct writer *w, double v)
{
    char text[40];
    if (isinf(v)) {
        write_text(w, v > 0 ? "+Inf" : "-Inf");
        return;
    }
    if (v == floor(v) && fabs(v) < 1e15) {
        snprintf(text, sizeof text, "%.1f", v);
    } else {
        for (int digits = 15; digits <= 17; digits++) {
            snprintf(text, sizeof text, "%.*g", digits, v);
            if (strtod(text, NULL) == v)
                break;
        }
    }
    write_text(w, text);
}

void histogram_write_head(struct writer *w, const char *name, const char *type, const char *help)
{
    write_format(w, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

void histogram_write(struct writer *w, const char *name, const char *labels,
                     const struct histogram *h)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i <= h->n; i++) {
        sum += h->counts[i];
        write_format(w, "%s_bucket{%s,le=\"", name, labels);
        histogram_write_number(w, i < h->n ? h->bounds[i] : INFINITY);
        write_text(w, "\"} ");
        histogram_write_number(w, (double)sum);
        write_bytes(w, "\n", 1);
    }
    write_format(w, "%s_count{%s} ", name, labels);
    histogram_write_number(w, (double)sum);
    write_format(w, "\n%s_sum{%s} ", name, labels);
    histogram_write_number(w, h->sum);
    write_bytes(w, "\n", 1);
}
