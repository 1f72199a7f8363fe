/* How fast the CUDA backend attends and appends: decode against what HBM can bring, prefill in TFLOP/s.
 *
 * A shape of 8 KV heads of 128 with groups of 4 (Llama-3.1-8B). Calls go through the layers in turn, so
 * that no KV is found in L2, and many are queued between two syncs. */
#include "kernels/cuda_api.h"
#include "tests/cuda/kbench.h"
#include "tests/tap.h"

#include <math.h>

enum { KV_HEADS = 8, GROUP = 4, DIM = 128, HEADS = KV_HEADS * GROUP, LAYERS = 4, ROWS = 16 };
enum { WIDTH = (HEADS + 2 * KV_HEADS) * DIM, CHUNK = 256 << 20 };

/* Bytes that appending a row must move: q and k are rewritten, k and v go to pages as bf16. */
enum { APPENDED = WIDTH * 4 + (HEADS + KV_HEADS) * DIM * 4 + 2 * KV_HEADS * DIM * 2 };

static struct backend *gpu;

/* Random numbers of at most 1, as bf16 (two in a word) or as floats. */
static void *random_memory(size_t bytes, bool halves)
{
    uint32_t *host = mem_alloc(CHUNK), x = 12345;
    for (size_t i = 0; i < CHUNK / 4; i++) {
        x = x * 1664525 + 1013904223;
        float f = (float)x / 2147483648.0f - 1.0f;
        memcpy(&host[i], &f, 4);
        if (halves)
            host[i] = (host[i] & 0xffff0000u) | host[i] >> 16;
    }
    uint8_t *p = gpu->ops->alloc(gpu, bytes);
    CHECK(p != NULL);
    for (size_t at = 0; at < bytes; at += CHUNK)
        gpu->ops->copy(gpu, p + at, at == 0 ? (void *)host : p,
                       bytes - at < CHUNK ? bytes - at : CHUNK);
    CHECK(gpu->ops->sync(gpu) == OK);
    mem_free(host);
    return p;
}

struct job {
    struct kv_geometry geo;
    struct kv_memory kv;
    uint32_t n_seqs, n_rows, len; /* rows of each, and positions */
    struct batch_seq *seqs;
    float *qkv, *out, *cos;
};

static void open_job(struct job *j, uint32_t n_seqs, uint32_t n_rows, uint32_t len)
{
    uint32_t blocks = (len + ROWS - 1) / ROWS, all = 1;
    while (all < blocks * n_seqs)
        all *= 2;
    *j = (struct job){.n_seqs = n_seqs, .n_rows = n_rows, .len = len};
    j->geo = (struct kv_geometry){.block_rows = ROWS,
                                  .layers = LAYERS,
                                  .kv_heads = KV_HEADS,
                                  .head_dim = DIM,
                                  .page_bytes = (size_t)ROWS * DIM * 4,
                                  .n_lanes = {LAYERS * KV_HEADS}};
    j->geo.block_bytes[0] = LAYERS * KV_HEADS * j->geo.page_bytes;
    j->kv.geo = &j->geo;
    j->kv.hbm[0] = random_memory(all * j->geo.block_bytes[0], true);
    j->qkv = random_memory((size_t)n_seqs * n_rows * WIDTH * 4, false);
    j->out = random_memory((size_t)n_seqs * n_rows * HEADS * DIM * 4, false);
    j->cos = random_memory((size_t)len * DIM * 2, false);
    j->seqs = mem_alloc(n_seqs * sizeof *j->seqs);
    for (uint32_t s = 0; s < n_seqs; s++) {
        block_id *t = mem_alloc(blocks * sizeof *t);
        for (uint32_t i = 0; i < blocks; i++)
            t[i] = (s * blocks + i) * 2654435761u % all;
        j->seqs[s] = (struct batch_seq){
            .first_row = s * n_rows, .n_rows = n_rows, .first_pos = len - n_rows, .blocks = {t}};
    }
}

static void close_job(struct job *j)
{
    void *all[] = {j->kv.hbm[0], j->qkv, j->out, j->cos};
    for (size_t i = 0; i < ARRAY_LEN(all); i++)
        gpu->ops->free(gpu, all[i], 0);
    for (uint32_t s = 0; s < j->n_seqs; s++)
        mem_free(j->seqs[s].blocks[0]);
    mem_free(j->seqs);
}

static void run(struct job *j, bool append, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (append)
            gpu->ops->append(gpu, &(struct append_args){.kv = &j->kv,
                                                        .layer = i % LAYERS,
                                                        .heads = HEADS,
                                                        .seqs = j->seqs,
                                                        .n_seqs = j->n_seqs,
                                                        .rope_cos = j->cos,
                                                        .rope_sin = j->cos,
                                                        .qkv = j->qkv});
        else
            gpu->ops->attend(gpu, &(struct attend_args){.kv = &j->kv,
                                                        .layer = i % LAYERS,
                                                        .heads = HEADS,
                                                        .seqs = j->seqs,
                                                        .n_seqs = j->n_seqs,
                                                        .scale = 1 / sqrtf(DIM),
                                                        .qkv = j->qkv,
                                                        .out = j->out});
    CHECK(gpu->ops->sync(gpu) == OK);
}

/* Microseconds of a call: the median of 5 times n. */
static double time_us(struct job *j, bool append, uint32_t n)
{
    double t[5];
    run(j, append, n);
    for (int i = 0; i < 5; i++) {
        uint64_t from = clock_us();
        run(j, append, n);
        t[i] = (double)(clock_us() - from) / n;
        for (int k = i; k > 0 && t[k] < t[k - 1]; k--) {
            double x = t[k];
            t[k] = t[k - 1];
            t[k - 1] = x;
        }
    }
    return t[2];
}

static void decode(uint32_t n_seqs, uint32_t len)
{
    struct job j;
    open_job(&j, n_seqs, 1, len);
    double us = time_us(&j, false, n_seqs * len > 200000 ? 20 : 100);
    double bytes = (double)n_seqs * len * KV_HEADS * DIM * 4;
    char shape[32];
    snprintf(shape, sizeof shape, "B%u/%u", n_seqs, len);
    kbench_bytes("attend-decode", shape, us, bytes, KBENCH_HBM_GBS);
    us = time_us(&j, true, 100);
    kbench_bytes("append-decode", shape, us, (double)n_seqs * APPENDED, KBENCH_HBM_GBS);
    close_job(&j);
}

static void prefill(uint32_t n_rows, uint32_t len)
{
    struct job j;
    open_job(&j, 1, n_rows, len);
    double us = time_us(&j, false, 8),
           pairs = (double)n_rows * (len - n_rows) + (double)n_rows * (n_rows + 1) / 2;
    char shape[48];
    snprintf(shape, sizeof shape, "%u-behind-%u", n_rows, len - n_rows);
    kbench_flops("attend-prefill", shape, us, 4.0 * DIM * HEADS * pairs, KBENCH_CUDNN_TFLOPS);
    us = time_us(&j, true, 20);
    kbench_bytes("append-prefill", shape, us, (double)n_rows * APPENDED, KBENCH_HBM_GBS);
    close_job(&j);
}

int main(void)
{
    if (spind_cuda_open(&gpu, 0) != OK)
        tap_skip_all(err_text());
    printf("# %s\n", gpu->ops->describe(gpu));
    decode(1, 1000);
    decode(1, 4000);
    decode(1, 8192);
    decode(1, 32768);
    decode(1, 131072);
    decode(8, 2048);
    decode(8, 32768);
    decode(8, 131072);
    prefill(2048, 2048);
    prefill(8192, 8192);
    prefill(2048, 32768);
    prefill(256, 32768);
    prefill(64, 131072);
    gpu->ops->close(gpu);
    return 0;
}
