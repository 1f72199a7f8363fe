/* Line plots as SVG, without anything else: enough to see a curve in a README. */
#ifndef ENGINE_TOOL_PLOT_H
#define ENGINE_TOOL_PLOT_H

#include "kernels/base.h"

enum { PLOT_MAX_SERIES = 12, PLOT_MAX_POINTS = 64 };

struct plot_series {
    char name[48];
    double x[PLOT_MAX_POINTS], y[PLOT_MAX_POINTS]; /* points that are not finite, or <= 0 on a log
                                                      axis, are left out */
    uint32_t n;
};

struct plot {
    const char *title, *x_label, *y_label;
    bool log_x, log_y;
    double line_at; /* a horizontal dashed line (a bar to clear); 0: none */
    struct plot_series series[PLOT_MAX_SERIES];
    uint32_t n_series;
};

/* The series of that name, made if it is new; NULL: there are too many. */
struct plot_series *plot_series(struct plot *p, const char *name);
void plot_point(struct plot_series *s, double x, double y); /* NULL or full: ignored */
status plot_save(const struct plot *p, const char *file);   /* NULL: nothing. ERR_IO */

#endif
