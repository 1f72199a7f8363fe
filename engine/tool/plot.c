/* One picture of 720 x 440 units. Axes are linear or by decades; ticks are 1, 2 and 5 times a power
 * of ten. Colours are Okabe and Ito's, which the colour-blind can tell apart. */
#include "engine/tool/plot.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { WIDTH = 720, HEIGHT = 440, LEFT = 84, RIGHT = 190, TOP = 40, BOTTOM = 55, TICKS = 40 };

static const char *const colour[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                     "#e69f00", "#56b4e9", "#000000", "#999999"};

struct axis {
    double lo, hi; /* of the value, or of its log10 */
    bool log;
    double from, to; /* on the page */
};

struct plot_series *plot_series(struct plot *p, const char *name)
{
    for (uint32_t i = 0; i < p->n_series; i++)
        if (strcmp(p->series[i].name, name) == 0)
            return &p->series[i];
    if (p->n_series == PLOT_MAX_SERIES)
        return NULL;
    struct plot_series *s = &p->series[p->n_series++];
    snprintf(s->name, sizeof s->name, "%s", name);
    s->n = 0;
    return s;
}

void plot_point(struct plot_series *s, double x, double y)
{
    if (s == NULL || s->n == PLOT_MAX_POINTS)
        return;
    s->x[s->n] = x;
    s->y[s->n++] = y;
}

static bool shown(const struct plot *p, double x, double y)
{
    return isfinite(x) && isfinite(y) && (!p->log_x || x > 0) && (!p->log_y || y > 0);
}

static void widen(struct axis *a, double v)
{
    v = a->log ? log10(v) : v;
    a->lo = v < a->lo ? v : a->lo;
    a->hi = v > a->hi ? v : a->hi;
}

/* A little air at both ends; an axis of one value gets a unit. */
static void settle(struct axis *a)
{
    if (!(a->lo <= a->hi))
        a->lo = 0, a->hi = 1;
    double span = a->hi - a->lo > 0 ? a->hi - a->lo : 1;
    bool from_zero = !a->log && a->lo >= 0 && a->lo < 0.3 * a->hi;
    a->lo = from_zero ? 0 : a->lo - 0.05 * span;
    a->hi += 0.05 * span;
}

static double place(const struct axis *a, double v)
{
    v = a->log ? log10(v) : v;
    return a->from + (v - a->lo) / (a->hi - a->lo) * (a->to - a->from);
}

/* Values to mark, ascending. */
static int ticks(const struct axis *a, double out[TICKS])
{
    static const double of_ten[] = {1, 2, 5};
    int n = 0;
    if (a->log) {
        for (int e = (int)floor(a->lo); e <= (int)ceil(a->hi); e++)
            for (int i = 0; i < 3; i++) {
                double v = of_ten[i] * pow(10, e);
                if (log10(v) >= a->lo && log10(v) <= a->hi && n < TICKS)
                    out[n++] = v;
            }
        return n;
    }
    double step = pow(10, floor(log10((a->hi - a->lo) / 2)));
    for (int i = 2; (a->hi - a->lo) / step > 8; i = i == 2 ? 5 : 2)
        step *= i == 2 ? 2 : 2.5;
    for (double v = ceil(a->lo / step) * step; v <= a->hi && n < TICKS; v += step)
        out[n++] = fabs(v) < step / 1e6 ? 0 : v;
    return n;
}

static void text(FILE *f, double x, double y, const char *anchor, const char *s)
{
    fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor);
    for (; *s; s++) {
        if (*s == '<' || *s == '&')
            fputs(*s == '<' ? "&lt;" : "&amp;", f);
        else
            fputc(*s, f);
    }
    fputs("</text>\n", f);
}

static void grid(FILE *f, const struct plot *p, const struct axis *x, const struct axis *y)
{
    double at[TICKS];
    char label[32];
    int n = ticks(x, at);
    for (int i = 0; i < n; i++) {
        double px = place(x, at[i]);
        fprintf(f, "<path class=\"g\" d=\"M%.1f %dV%d\"/>\n", px, TOP, HEIGHT - BOTTOM);
        snprintf(label, sizeof label, "%g", at[i]);
        text(f, px, HEIGHT - BOTTOM + 18, "middle", label);
    }
    n = ticks(y, at);
    for (int i = 0; i < n; i++) {
        double py = place(y, at[i]);
        fprintf(f, "<path class=\"g\" d=\"M%d %.1fH%d\"/>\n", LEFT, py, WIDTH - RIGHT);
        snprintf(label, sizeof label, "%g", at[i]);
        text(f, LEFT - 8, py + 4, "end", label);
    }
    text(f, (LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 14, "middle", p->x_label);
    fprintf(f, "<g transform=\"translate(16 %d) rotate(-90)\">", (TOP + HEIGHT - BOTTOM) / 2);
    text(f, 0, 0, "middle", p->y_label);
    fputs("</g>\n", f);
    text(f, LEFT, 22, "start", p->title);
}

static void line(FILE *f, const struct plot *p, uint32_t i, const struct axis *x,
                 const struct axis *y)
{
    const struct plot_series *s = &p->series[i];
    const char *c = colour[i % ARRAY_LEN(colour)], *dash = i < ARRAY_LEN(colour) ? "" : "5 3";
    fprintf(f,
            "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\" "
            "stroke-dasharray=\"%s\" points=\"",
            c, dash);
    for (uint32_t j = 0; j < s->n; j++)
        if (shown(p, s->x[j], s->y[j]))
            fprintf(f, "%.1f,%.1f ", place(x, s->x[j]), place(y, s->y[j]));
    fputs("\"/>\n", f);
    for (uint32_t j = 0; j < s->n; j++)
        if (shown(p, s->x[j], s->y[j]))
            fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", place(x, s->x[j]),
                    place(y, s->y[j]), c);
    double ly = TOP + 12 + 18.0 * i;
    fprintf(f, "<path stroke=\"%s\" stroke-width=\"3\" d=\"M%d %.1fh18\"/>\n", c,
            WIDTH - RIGHT + 14, ly - 4);
    text(f, WIDTH - RIGHT + 38, ly, "start", s->name);
}

static void draw(FILE *f, const struct plot *p)
{
    struct axis x = {HUGE_VAL, -HUGE_VAL, p->log_x, LEFT, WIDTH - RIGHT};
    struct axis y = {HUGE_VAL, -HUGE_VAL, p->log_y, HEIGHT - BOTTOM, TOP};
    for (uint32_t i = 0; i < p->n_series; i++)
        for (uint32_t j = 0; j < p->series[i].n; j++)
            if (shown(p, p->series[i].x[j], p->series[i].y[j])) {
                widen(&x, p->series[i].x[j]);
                widen(&y, p->series[i].y[j]);
            }
    if (p->line_at > 0)
        widen(&y, p->line_at);
    settle(&x);
    settle(&y);
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" "
            "font-family=\"sans-serif\" "
            "font-size=\"12\">\n<style>.g{stroke:#ddd;fill:none}</style>\n"
            "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
            WIDTH, HEIGHT);
    grid(f, p, &x, &y);
    if (p->line_at > 0)
        fprintf(f, "<path stroke=\"#888\" stroke-dasharray=\"6 4\" d=\"M%d %.1fH%d\"/>\n", LEFT,
                place(&y, p->line_at), WIDTH - RIGHT);
    for (uint32_t i = 0; i < p->n_series; i++)
        line(f, p, i, &x, &y);
    fputs("</svg>\n", f);
}

status plot_save(const struct plot *p, const char *file)
{
    if (file == NULL)
        return OK;
    FILE *f = fopen(file, "w");
    if (f == NULL)
        return err(ERR_IO, "%s: %s", file, strerror(errno));
    draw(f, p);
    return fclose(f) == 0 ? OK : err(ERR_IO, "%s: %s", file, strerror(errno));
}
