/* `layers`: what shapes the one kernel for all layers (layers_kernel.h) is for, its memory and its launch. */
#include "kernels/cuda/launch.h"
#include "kernels/cuda/layers_kernel.h"
#include "kernels/cuda/linear.h"

#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_BYTES = 32 << 20, /* of a layer: beyond, products take longer than what is between them */
    FEW_BYTES = 10 << 20, /* up to here two layers are sent to L2 ahead */
    MAX_COLS = 8192,      /* of an input */
    MAX_SHARED = 200 << 10,
    MOST_TURNS = 1 << 10, /* launches, then their number begins anew: a test sees it */
};

static uint32_t steps_of(const struct weight *w)
{
    return w->pitch / layers::STEP;
}

static uint32_t units_of(uint32_t outputs)
{
    return (outputs + LAYERS_UNIT - 1) / LAYERS_UNIT;
}

static uint32_t grid_of(const struct cuda_backend *b, const struct layers_args *a)
{
    return std::min((uint32_t)b->sms, units_of(a->layers[0].gate_up->rows / 2));
}

static size_t shared_bytes(const struct layers_args *a)
{
    const struct layer_weights *l = &a->layers[0];
    uint32_t steps = std::max(steps_of(l->qkv), std::max(steps_of(l->out), steps_of(l->down)));
    return sizeof(struct layers::shared) +
           (size_t)LAYERS_ROWS * layers::staged_stride(steps) * sizeof(__nv_bfloat16);
}

/* Why the kernel is not for such layers; NULL: it is. All are alike, so one is looked at. */
static const char *refusal(const struct cuda_backend *b, const struct layers_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    const struct layer_weights *l = &a->layers[0];
    const uint32_t hidden = l->qkv->cols, ff = l->down->cols, grid = grid_of(b, a);
    const size_t bytes = l->qkv->bytes + l->out->bytes + l->gate_up->bytes + l->down->bytes;
    if (b->layers->turn == NULL)
        return "not on this device";
    if (bytes > MAX_BYTES)
        return "a layer is large";
    if (a->n_layers > LAYERS_MAX)
        return "there are many";
    if (g->type != KV_BF16)
        return "pages are not bf16";
    if ((g->head_dim != 64 && g->head_dim != 128) || a->heads / g->kv_heads > 8)
        return "of its heads";
    if (hidden % 4 != 0 || ff % 4 != 0 || std::max(hidden, ff) > MAX_COLS ||
        units_of(hidden) > grid * LAYERS_KEEPS || shared_bytes(a) > MAX_SHARED)
        return "of its width";
    return a->n_seqs * g->kv_heads <= grid ? NULL : "rows have more KV heads than there are CTAs";
}

/* Tells why not, once for each reason in turn. */
static bool shapes_fit(struct cuda_backend *b, const struct layers_args *a)
{
    const char *why = refusal(b, a);
    if (why != NULL && b->layers->told != why && b->log != NULL)
        b->log(LOG_DEBUG, "layers go kernel by kernel, not all by one: %s", why);
    if (why != NULL)
        b->layers->told = why;
    return why == NULL;
}

static bool rows_fit(const struct layers_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    if (a->n_seqs == 0 || a->n_seqs > LAYERS_ROWS || g->n_lanes[LANE_STREAM] > 0)
        return false;
    for (uint32_t i = 0; i < a->n_seqs; i++)
        if (a->seqs[i].planned || a->seqs[i].n_rows != 1 || a->seqs[i].first_row != i)
            return false;
    return true;
}

/* Words of a layer's mail; each kind begins at a line. */
static struct layers_mail mail_of(const struct layers_call *c)
{
    struct layers_mail m;
    size_t at = 0, n = c->n_rows;
    const auto take = [&at](size_t words) {
        size_t first = at;
        at += (words + 15) / 16 * 16;
        return first;
    };
    m.qkv = take(n * (c->heads + 2 * c->kv_heads) * c->dim);
    m.att = take(n * c->splits * c->heads * c->dim);
    m.mass = take(n * c->heads * c->splits);
    m.mid = take(n * c->hidden);
    m.ff = take(n * c->ff / 2);
    m.x = take(n * c->hidden);
    m.words = at;
    return m;
}

static void fill_phases(struct layers_call *c, const struct layer_weights *l, uint32_t grid)
{
    const struct weight *w[LAYERS_PHASES] = {l->qkv, l->out, l->gate_up, l->down};
    const size_t mail[LAYERS_PHASES] = {c->at.qkv, c->at.mid, c->at.ff, c->at.x};
    for (uint32_t i = 0; i < LAYERS_PHASES; i++) {
        struct layers_phase *p = &c->phases[i];
        p->rows = i == LAYERS_GATE_UP ? w[i]->rows / 2 : w[i]->rows;
        p->steps = steps_of(w[i]);
        p->units = units_of(p->rows) / grid;
        p->more = units_of(p->rows) % grid;
        p->skip = grid * LAYERS_UNIT * w[i]->pitch;
        p->up = p->rows * w[i]->pitch;
        p->mail = (uint32_t)mail[i];
    }
}

static void fill_shape(struct layers_call *c, const struct cuda_backend *b,
                       const struct layers_args *a)
{
    const struct kv_geometry *g = a->kv->geo;
    const struct layer_weights *l = &a->layers[0];
    size_t bytes = l->qkv->bytes + l->out->bytes + l->gate_up->bytes + l->down->bytes;
    c->n_layers = a->n_layers;
    c->n_rows = a->n_seqs;
    c->hidden = l->qkv->cols;
    c->ff = l->down->cols;
    c->heads = a->heads;
    c->kv_heads = g->kv_heads;
    c->group = a->heads / g->kv_heads;
    c->dim = g->head_dim;
    c->hidden_steps = steps_of(l->qkv);
    c->att_steps = steps_of(l->out);
    c->ff_steps = steps_of(l->down);
    c->splits = std::min((uint32_t)LAYERS_SPLITS, grid_of(b, a) / (a->n_seqs * g->kv_heads));
    c->ahead = bytes <= FEW_BYTES ? 2 : 1;
    c->page_shift = (uint32_t)__builtin_ctz(g->block_rows);
    for (int i = 0; i < LANE_CLASSES; i++) {
        c->hbm[i] = (uint8_t *)a->kv->hbm[i];
        c->dram[i] = (const uint8_t *)a->kv->dram[i];
        c->block_bytes[i] = g->block_bytes[i];
    }
    c->page_bytes = g->page_bytes;
    c->cos = a->rope_cos;
    c->sin = a->rope_sin;
    c->eps = a->norm_eps;
    c->over_hidden = 1.0f / (float)c->hidden;
    c->scale = a->scale * 1.44269504089f;
    c->at = mail_of(c);
    fill_phases(c, l, grid_of(b, a));
}

static bool reserve(struct cuda_backend *b, struct layers_call *c)
{
    struct cuda_layers *l = b->layers;
    size_t had = l->mail_bytes;
    if (!cuda_reserve(b, &l->mail, &l->mail_bytes, c->at.words * c->n_layers * sizeof *c->mail))
        return false;
    /* No command of this step has new memory; turns in it begin below all that come. */
    if (l->mail_bytes != had &&
        !cuda_ok(b, cudaMemsetAsync(l->mail, 0, l->mail_bytes, b->stream), "layers"))
        return false;
    /* Words of a launch 2^32 ago could not be told from new ones. */
    if (++l->n_turns == MOST_TURNS) {
        l->n_turns = 1;
        if (!cuda_ok(b, cudaMemsetAsync(l->mail, 0, l->mail_bytes, b->stream), "layers") ||
            !cuda_ok(b, cudaMemsetAsync(l->turn, 0, sizeof *l->turn, b->stream), "layers"))
            return false;
    }
    c->mail = (uint64_t *)l->mail;
    c->turn = l->turn;
    return true;
}

static const struct layers_layer *stage_layers(struct cuda_backend *b, const struct layers_args *a)
{
    struct layers_layer *list = (struct layers_layer *)mem_alloc(a->n_layers * sizeof *list);
    for (uint32_t i = 0; i < a->n_layers; i++) {
        const struct layer_weights *from = &a->layers[i];
        list[i].w[LAYERS_QKV] = from->qkv->values;
        list[i].w[LAYERS_OUT] = from->out->values;
        list[i].w[LAYERS_GATE_UP] = from->gate_up->values;
        list[i].w[LAYERS_DOWN] = from->down->values;
        list[i].attn_norm = from->attn_norm;
        list[i].ffn_norm = from->ffn_norm;
        list[i].bias = from->qkv_bias;
        list[i].q_norm = from->q_norm;
        list[i].k_norm = from->k_norm;
    }
    const void *device = cuda_stage(b, list, a->n_layers * sizeof *list);
    mem_free(list);
    return (const struct layers_layer *)device;
}

static const struct layers_row *stage_rows(struct cuda_backend *b, const struct layers_args *a)
{
    struct layers_row rows[LAYERS_ROWS];
    const uint32_t block_rows = a->kv->geo->block_rows;
    memset(rows, 0, sizeof rows);
    for (uint32_t i = 0; i < a->n_seqs; i++) {
        const struct batch_seq *q = &a->seqs[i];
        rows[i].pos = q->first_pos;
        rows[i].token = a->tokens[i];
        CHECK(a->tokens[i] < a->embedding->rows || a->tokens[i] >= EMBED_DRAWN);
        for (int c = 0; c < LANE_CLASSES; c++) {
            rows[i].tables[c] = cuda_table(b, q->blocks[c], q->first_pos / block_rows + 1);
            if (q->blocks[c] != NULL && rows[i].tables[c] == NULL)
                return NULL;
        }
    }
    return (const struct layers_row *)cuda_stage(b, rows, a->n_seqs * sizeof *rows);
}

/* As a command. */
struct layers_launch {
    struct layers_call call;
    uint32_t grid;
    size_t shared;
};

typedef void layers_kernel(const struct layers_call);

static layers_kernel *kernel_of(uint32_t dim, uint32_t n_rows)
{
    if (n_rows == 1)
        return dim == 64 ? layers::layers_kernel<64, 1> : layers::layers_kernel<128, 1>;
    if (n_rows == 2)
        return dim == 64 ? layers::layers_kernel<64, 2> : layers::layers_kernel<128, 2>;
    return dim == 64 ? layers::layers_kernel<64, LAYERS_ROWS>
                     : layers::layers_kernel<128, LAYERS_ROWS>;
}

static void run_layers(struct cuda_backend *b, const void *params)
{
    const struct layers_launch *l = (const struct layers_launch *)params;
    struct cuda_launch how;
    cuda_launch_early(b, &how, dim3(l->grid), layers::THREADS, l->shared);
    cuda_launch_together(&how); /* CTAs wait for each other */
    cuda_ok(b, cudaLaunchKernelEx(&how.config, kernel_of(l->call.dim, l->call.n_rows), l->call),
            "layers");
}

bool cuda_layers(struct backend *be, const struct layers_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    if (!rows_fit(a) || !shapes_fit(b, a))
        return false;
    cuda_begin_rows(b, a->n_seqs);
    struct layers_launch l;
    memset(&l, 0, sizeof l);
    struct layers_call *c = &l.call;
    fill_shape(c, b, a);
    c->embedding = a->embedding->values;
    c->drawn = cuda_drawn(b, &c->drawn_stride);
    c->out = (float *)a->out;
    c->lost = b->layers->lost_device;
    c->lanes = cuda_lanes(b, a->kv->geo);
    c->layers = stage_layers(b, a);
    c->rows = stage_rows(b, a);
    if (c->lanes == NULL || c->layers == NULL || c->rows == NULL || !reserve(b, c))
        return true; /* b knows the error */
    l.grid = grid_of(b, a);
    l.shared = shared_bytes(a);
    cuda_do(b, run_layers, &l, sizeof l);
    return true;
}

void cuda_layers_settle(struct cuda_backend *b)
{
    volatile uint32_t *lost = b->layers->lost;
    if (lost == NULL || *lost == 0)
        return;
    *lost = 0;
    if (b->error == OK) {
        b->error = ERR_DEVICE;
        snprintf(
            b->text, sizeof b->text,
            "cuda: layers: multiprocessors waited for each other in vain: SPIND_CUDA_NO_LAYERS=1 "
            "does without the kernel");
    }
}

status cuda_layers_open(struct cuda_backend *b)
{
    struct cuda_layers *l = (struct cuda_layers *)mem_alloc(sizeof *l);
    int most = 0;
    b->layers = l;
    if (!cuda_ok(b,
                 cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, b->device),
                 "shared memory"))
        return err(b->error, "%s", b->text);
    if (most < MAX_SHARED || getenv("SPIND_CUDA_NO_LAYERS") != NULL)
        return OK; /* layers say false */
    bool good = true;
    for (uint32_t i = 0; good && i < 2 * LAYERS_ROWS; i++)
        good =
            cuda_ok(b,
                    cudaFuncSetAttribute(kernel_of(i % 2 ? 128 : 64, i / 2 + 1),
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_SHARED),
                    "layers");
    good = good &&
           cuda_ok(b, cudaHostAlloc((void **)&l->lost, 64, cudaHostAllocMapped), "layers") &&
           cuda_ok(b, cudaHostGetDevicePointer((void **)&l->lost_device, l->lost, 0), "layers");
    if (good)
        *l->lost = 0;
    if (!good || !cuda_ok(b, cudaMalloc((void **)&l->turn, sizeof *l->turn), "layers") ||
        !cuda_ok(b, cudaMemsetAsync(l->turn, 0, sizeof *l->turn, b->stream), "layers"))
        return err(b->error, "%s", b->text);
    return OK;
}

void cuda_layers_close(struct cuda_backend *b)
{
    if (b->layers == NULL)
        return;
    cudaFree(b->layers->mail);
    cudaFree(b->layers->turn);
    cudaFreeHost(b->layers->lost);
    mem_free(b->layers);
    b->layers = NULL;
}
