/* Steps that come again become CUDA graphs: each must give what the same step gives when its commands run
 * one by one, whatever was staged anew, and whatever came in between. */
#include "kernels/cuda_api.h"
#include "tests/tap.h"

enum { VOCAB = 300, WIDTH = 256, MAX_ROWS = 24, LAYERS = 6 };

struct side {
    struct backend *be;
    struct weight *table, *layer;
    float *x, *y;
};

static uint64_t rng_state = 88172645463325252u;

static uint32_t rng(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return (uint32_t)(rng_state >> 32);
}

static struct weight *make_weight(struct backend *be, const float *data, uint32_t rows,
                                  bool embedding)
{
    struct weight *w;
    struct weight_desc d = {.cols = WIDTH, .n_parts = 1, .embedding = embedding};
    d.parts[0] = (struct weight_part){.name = "w", .type = DTYPE_F32, .rows = rows, .data = data};
    CHECK(be->ops->weight_create(be, &d, &w) == OK);
    return w;
}

static struct side open_side(const float *table, const float *layer, bool eager)
{
    struct side s;
    CHECK(cuda_load(&s.be, &(struct cuda_options){.eager = eager}) == OK);
    s.table = make_weight(s.be, table, VOCAB, true);
    s.layer = make_weight(s.be, layer, WIDTH, false);
    s.x = s.be->ops->alloc(s.be, MAX_ROWS * WIDTH * sizeof(float));
    s.y = s.be->ops->alloc(s.be, MAX_ROWS * WIDTH * sizeof(float));
    CHECK(s.x != NULL && s.y != NULL);
    return s;
}

static void close_side(struct side *s)
{
    const struct backend_ops *ops = s->be->ops;
    ops->weight_destroy(s->be, s->table);
    ops->weight_destroy(s->be, s->layer);
    ops->free(s->be, s->x, MAX_ROWS * WIDTH * sizeof(float));
    ops->free(s->be, s->y, MAX_ROWS * WIDTH * sizeof(float));
    ops->close(s->be);
}

/* A step with a list that changes: rows in another order, in the last layer. */
static void step(struct side *s, const uint32_t *tokens, const uint32_t *order, uint32_t n,
                 float *out)
{
    const struct backend_ops *ops = s->be->ops;
    ops->embed(s->be,
               &(struct embed_args){.table = s->table, .tokens = tokens, .n_rows = n, .out = s->x});
    for (int i = 0; i < LAYERS; i++) {
        struct linear_args a = {.w = s->layer, .in = s->x, .n_rows = n, .out = s->y};
        ops->linear(s->be, &a);
        ops->copy(s->be, s->x, s->y, n * WIDTH * sizeof(float));
    }
    struct linear_args last = {.w = s->layer, .in = s->x, .rows = order, .n_rows = n, .out = s->y};
    ops->linear(s->be, &last);
    ops->copy(s->be, out, s->y, n * WIDTH * sizeof(float));
    CHECK(ops->sync(s->be) == OK);
}

int main(void)
{
    static float table[VOCAB * WIDTH], layer[WIDTH * WIDTH];
    static float a[MAX_ROWS * WIDTH], b[MAX_ROWS * WIDTH];
    struct backend *probe;
    if (spind_cuda_open(&probe, 0) != OK) {
        ok(0, "no device: %s", err_text());
        return tap_done();
    }
    probe->ops->close(probe);
    for (size_t i = 0; i < ARRAY_LEN(table); i++)
        table[i] = (float)(rng() % 2001) / 1000 - 1;
    for (size_t i = 0; i < ARRAY_LEN(layer); i++)
        layer[i] = ((float)(rng() % 2001) / 1000 - 1) / 8;
    struct side graphs = open_side(table, layer, false);
    struct side eager = open_side(table, layer, true);
    static const uint32_t sizes[] = {1, 1, 1, 1, 5, 1, 5, 5, 17, 5, 17, 17, 1, 24, 24, 24, 1, 5};
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        uint32_t n = sizes[i], tokens[MAX_ROWS], order[MAX_ROWS];
        for (uint32_t j = 0; j < n; j++) {
            tokens[j] = rng() % VOCAB;
            order[j] = (j * 7 + (uint32_t)i) % n;
        }
        memset(a, 0xff, sizeof a);
        memset(b, 0xfe, sizeof b);
        step(&graphs, tokens, order, n, a);
        step(&eager, tokens, order, n, b);
        ok(memcmp(a, b, n * WIDTH * sizeof(float)) == 0, "step %zu of %u rows", i, n);
    }
    close_side(&graphs);
    close_side(&eager);
    return tap_done();
}
