/* Sampling, first step: the logits go down to pinned memory at their place in the stream, and the CPU
 * backend draws from them when sync is called. The tokens for given logits are therefore the CPU's to
 * the bit, whatever the request asks for. 200 KB per row of the default model are 4 us of a PCIe bus
 * and a few more of one core; a sampler on the device can come later without another contract. */
#include "kernels/cuda/cuda.h"

#include <string.h>

struct cuda_sampler {
    float *logits; /* pinned, [capacity] */
    size_t capacity;
    struct sample_args pending; /* n_rows 0: nothing is queued */
};

status cuda_sample_open(struct cuda_backend *b)
{
    b->sampler = (struct cuda_sampler *)mem_alloc(sizeof *b->sampler);
    return OK;
}

void cuda_sample_close(struct cuda_backend *b)
{
    if (b->sampler == NULL)
        return;
    if (b->sampler->logits != NULL)
        cudaFreeHost(b->sampler->logits);
    mem_free(b->sampler);
    b->sampler = NULL;
}

static bool reserve(struct cuda_backend *b, size_t need)
{
    struct cuda_sampler *s = b->sampler;
    if (need <= s->capacity)
        return true;
    if (s->logits != NULL)
        cudaFreeHost(s->logits);
    s->logits = NULL;
    s->capacity = 0;
    if (!cuda_ok(b, cudaMallocHost((void **)&s->logits, need * sizeof(float)),
                 "pinned memory for logits"))
        return false;
    s->capacity = need;
    return true;
}

void cuda_sample_settle(struct cuda_backend *b, bool good)
{
    struct cuda_sampler *s = b->sampler;
    if (s->pending.n_rows == 0)
        return;
    if (good) {
        b->host->ops->sample(b->host, &s->pending);
        (void)b->host->ops->sync(b->host); /* the CPU's sampler cannot fail: bad rows say so */
    }
    s->pending.n_rows = 0;
}

void cuda_sample(struct backend *be, const struct sample_args *a)
{
    struct cuda_backend *b = (struct cuda_backend *)be;
    struct cuda_sampler *s = b->sampler;
    size_t rows = 0;
    if (a->n_rows == 0)
        return;
    if (s->pending.n_rows >
        0) /* the engine asks once per step; a second time waits for the first */
        cuda_sample_settle(b, cuda_ok(b, cudaStreamSynchronize(b->stream), "sample") &&
                                  b->error == OK);
    for (uint32_t i = 0; i < a->n_rows; i++)
        rows = a->rows[i].logits_row >= rows ? (size_t)a->rows[i].logits_row + 1 : rows;
    if (!reserve(b, rows * a->vocab))
        return;
    if (!cuda_ok(b,
                 cudaMemcpyAsync(s->logits, a->logits, rows * a->vocab * sizeof(float),
                                 cudaMemcpyDeviceToHost, b->stream),
                 "copying logits"))
        return;
    s->pending = *a;
    s->pending.logits = s->logits;
}
