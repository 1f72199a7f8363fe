/* How fast are the linear layers and the head of SmolLM2-135M's shapes, without anything between?
 *
 * Prints tokens per second for calls of M tokens: of the best whole step, and of a step made of the
 * best time of each operation (other processes share the cores; all 30 layers are walked, so weights
 * come from where they would in a step), with the share of what two vector ports a core allow if
 * they did nothing but vpdpbusd: 16 per tile of 16 x 32 and token. Then the time of each operation:
 * qkv, o, gate and up, down, head. Usage: linear [isa] [threads] [seconds] [any
 * fourth word: do not pin] */
#include "kernels/backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LAYERS = 30, HIDDEN = 576, QKV = 960, FF = 1536, VOCAB = 49152, MAX_M = 512 };

struct layer {
    struct weight *qkv, *o, *gate_up, *down;
};

static struct backend *be;
static struct layer layers[LAYERS];
static struct weight *head;
static float *x, *qkv, *ff, *logits, *gain;

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* Any values will do: speed does not depend on them. */
static struct weight *make(enum dtype t, uint32_t rows, uint32_t cols, uint32_t parts)
{
    size_t bytes = rows * dtype_row_bytes(t, cols);
    uint8_t *data = mem_alloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(i * 0x9e3779b1u >> 24);
    size_t step = dtype_find((uint32_t)t)->bytes;
    for (size_t i = 0; i < bytes; i += step) { /* small finite scales */
        data[i + 1] = 0x1c;
        if (t == DTYPE_Q4_1)
            data[i + 3] = 0x9c;
    }
    struct weight_desc d = {.cols = cols, .n_parts = parts};
    for (uint32_t i = 0; i < parts; i++)
        d.parts[i] = (struct weight_part){
            .name = "bench", .type = t, .rows = rows / parts, .data = data + i * (bytes / parts)};
    struct weight *w = NULL;
    if (be->ops->weight_create(be, &d, &w) != OK) {
        fprintf(stderr, "%s\n", err_text());
        exit(1);
    }
    mem_free(data);
    return w;
}

enum op { OP_QKV, OP_O, OP_GATE_UP, OP_DOWN, OP_HEAD, OPS };

/* Runs an operation; keeps the shortest time of its kind. */
static void linear(enum op op, const struct weight *w, const float *in, uint32_t n, float *out,
                   double *best)
{
    static const enum linear_out modes[OPS] = {LINEAR_STORE, LINEAR_ADD, LINEAR_SWIGLU, LINEAR_ADD,
                                               LINEAR_STORE};
    bool norm = op == OP_QKV || op == OP_GATE_UP || op == OP_HEAD;
    struct linear_args a = {.w = w,
                            .in = in,
                            .n_rows = n,
                            .norm_gain = norm ? gain : NULL,
                            .norm_eps = 1e-5f,
                            .mode = modes[op],
                            .out = out};
    double start = now_us();
    be->ops->linear(be, &a);
    double us = now_us() - start;
    best[op] = us < best[op] ? us : best[op];
}

static void step(uint32_t m, bool with_head, double *best)
{
    for (int i = 0; i < LAYERS; i++) {
        linear(OP_QKV, layers[i].qkv, x, m, qkv, best);
        linear(OP_O, layers[i].o, qkv, m, x, best);
        linear(OP_GATE_UP, layers[i].gate_up, x, m, ff, best);
        linear(OP_DOWN, layers[i].down, ff, m, x, best);
    }
    if (with_head)
        linear(OP_HEAD, head, x, m, logits, best);
}

static void measure(uint32_t m, bool with_head, double seconds, double peak)
{
    double best_us = 1e30, best[OPS], stop = now_us() + seconds * 1e6;
    for (int i = 0; i < OPS; i++)
        best[i] = 1e30;
    for (int i = 0; i < 8 || now_us() < stop; i++) {
        for (uint32_t k = 0; k < m * HIDDEN; k++)
            x[k] = (float)(k % 13) - 6;
        double start = now_us();
        step(m, with_head, best);
        double us = now_us() - start;
        best_us = us < best_us ? us : best_us;
    }
    double weights = (double)LAYERS * HIDDEN * (QKV + HIDDEN + 3 * FF) +
                     (with_head ? (double)HIDDEN * VOCAB : 0);
    double sum = LAYERS * (best[OP_QKV] + best[OP_O] + best[OP_GATE_UP] + best[OP_DOWN]) +
                 (with_head ? best[OP_HEAD] : 0);
    printf("M %4u %s  %6.0f tok/s  best operations %6.0f tok/s, %4.1f %% of the ceiling; us: ", m,
           with_head ? "with head" : "no head  ", m * 1e6 / best_us, m * 1e6 / sum,
           100 * m * 1e6 / sum * weights * 2 / 64 / peak);
    for (int i = 0; i < (with_head ? OPS : OP_HEAD); i++)
        printf(" %.1f", best[i]);
    printf("\n");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    struct cpu_options o = {.isa = argc > 1 ? argv[1] : "auto",
                            .n_threads = argc > 2 ? (uint32_t)atoi(argv[2]) : 0,
                            .pin = argc <= 4};
    if (cpu_backend_open(&be, &o) != OK) {
        fprintf(stderr, "%s\n", err_text());
        return 1;
    }
    printf("%s\n", be->ops->describe(be));
    x = be->ops->alloc(be, (size_t)MAX_M * HIDDEN * sizeof *x);
    qkv = be->ops->alloc(be, (size_t)MAX_M * QKV * sizeof *qkv);
    ff = be->ops->alloc(be, (size_t)MAX_M * FF * sizeof *ff);
    logits = be->ops->alloc(be, (size_t)32 * VOCAB * sizeof *logits);
    gain = mem_alloc(HIDDEN * sizeof *gain);
    for (int i = 0; i < HIDDEN; i++)
        gain[i] = 1;
    double start = now_us();
    for (int i = 0; i < LAYERS; i++)
        layers[i] = (struct layer){.qkv = make(DTYPE_Q4_1, QKV, HIDDEN, 3),
                                   .o = make(DTYPE_Q4_1, HIDDEN, HIDDEN, 1),
                                   .gate_up = make(DTYPE_Q4_1, 2 * FF, HIDDEN, 2),
                                   .down = make(DTYPE_Q4_1, HIDDEN, FF, 1)};
    head = make(DTYPE_Q8_0, VOCAB, HIDDEN, 1);
    printf("made and packed in %.2f s\n", (now_us() - start) * 1e-6);
    /* Two vpdpbusd a cycle, 2.9 GHz: measured on the machine this was written on. */
    double peak = 5.8e9 * (o.n_threads == 1 ? 1 : 2);
    static const uint32_t ms[] = {1, 2, 4, 8, 16, 32};
    double seconds = argc > 3 ? atof(argv[3]) : 1;
    for (size_t i = 0; i < ARRAY_LEN(ms); i++)
        measure(ms[i], true, seconds, peak);
    measure(96, false, seconds, peak);
    measure(MAX_M, false, seconds, peak);
    be->ops->close(be);
    return 0;
}
