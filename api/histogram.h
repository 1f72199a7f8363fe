/* Histograms of metrics, and how pages for Prometheus write numbers: as Python prints floats, because
 * vLLM's are and dashboards filter on le="1.0". Loop thread. */
#ifndef API_HISTOGRAM_H
#define API_HISTOGRAM_H

#include "api/writer.h"

enum { HISTOGRAM_BOUNDS = 32 };

struct histogram {
    double bounds[HISTOGRAM_BOUNDS]; /* [n], rising */
    uint64_t counts[HISTOGRAM_BOUNDS + 1];
    uint32_t n;
    double sum;
};

/* bounds NULL: 1, 2, 5, 10 ... up to `most`. */
void histogram_init(struct histogram *h, const double *bounds, size_t n, double most);
void histogram_add(struct histogram *h, double v);
/* Its series; labels: without braces, not empty. */
void histogram_write(struct writer *w, const char *name, const char *labels,
                     const struct histogram *h);

void histogram_write_head(struct writer *w, const char *name, const char *type, const char *help);
void histogram_write_number(struct writer *w, double v);

#endif
