/* Sampling and scoring on the device: the cases that the CPU backend has to pass (tests/sample_cases.h). */
#include "kernels/cuda_api.h"
#include "tests/sample_cases.h"

enum { LOGITS = 24 * 49152 };

struct device {
    struct backend *be;
    float *logits;
};

static void run_cuda(const struct sampler *s, struct sample_row *r, uint32_t n, const float *logits,
                     uint32_t vocab)
{
    const struct device *d = s->with;
    uint32_t rows = 1;
    for (uint32_t i = 0; i < n; i++)
        rows = r[i].logits_row >= rows ? r[i].logits_row + 1 : rows;
    CHECK((size_t)rows * vocab <= LOGITS);
    d->be->ops->copy(d->be, d->logits, logits, (size_t)rows * vocab * sizeof *logits);
    d->be->ops->sample(
        d->be, &(struct sample_args){.logits = d->logits, .vocab = vocab, .n_rows = n, .rows = r});
    CHECK(d->be->ops->sync(d->be) == OK);
}

int main(void)
{
    struct device d;
    if (spind_cuda_open(&d.be, 0) != OK) {
        ok(0, "no device: %s", err_text());
        return tap_done();
    }
    d.logits = d.be->ops->alloc(d.be, LOGITS * sizeof *d.logits);
    CHECK(d.logits != NULL);
    const struct sampler s = {"CUDA", &d, run_cuda};
    sample_cases(&s, &s);
    d.be->ops->free(d.be, d.logits, LOGITS * sizeof *d.logits);
    d.be->ops->close(d.be);
    return tap_done();
}
