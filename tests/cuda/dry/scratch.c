/* Two prompts in a step, of which the second finds no memory for its keys and values side by side
 * (kernels/cuda/prefill.cu): the step does not fail for it. On the dry runtime (runtime.c): nothing is computed. */
#include "kernels/cuda_api.h"
#include "tests/model_rig.h"
#include "tests/tap.h"

#include <dlfcn.h>
#include <time.h>
#include <unistd.h>

enum { VOCAB = 300, HEADS = 8, KV_HEADS = 4, DIM = 64, LAYERS = 3, ROWS = 640 };

static void (*leave)(size_t bytes); /* dry_leave */
static char path[] = "/tmp/spind-scratch-XXXXXX";

static void load(void)
{
    char name[512];
    const char *build = getenv("SPIND_BUILD");
    snprintf(name, sizeof name, "%s/tests/cuda/dry/libspind_cuda.so",
             build != NULL ? build : "build");
    setenv("SPIND_CUDA_LIBRARY", name, 1);
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL || (*(void **)&leave = dlsym(library, "dry_leave")) == NULL) {
        printf("Bail out! %s\n", dlerror());
        exit(1);
    }
}

static void describe(void)
{
    int fd = mkstemp(path);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w");
    if (f == NULL)
        rig_must(ERR_IO);
    fprintf(f,
            "{\"architectures\": [\"LlamaForCausalLM\"], \"num_hidden_layers\": %d, "
            "\"vocab_size\": %d, "
            "\"max_position_embeddings\": 262144, \"hidden_size\": %d, \"intermediate_size\": 512, "
            "\"num_attention_heads\": %d, \"num_key_value_heads\": %d}",
            LAYERS, VOCAB, HEADS * DIM, HEADS, KV_HEADS);
    fclose(f);
}

struct prompts {
    struct backend *be;
    struct model *m;
    struct rig r;
};

/* A step with a chunk at the start of a prompt and one at `far` of another. True: cuDNN took both. */
static bool step(struct prompts *p, uint32_t far)
{
    static const uint32_t tokens[ROWS];
    const uint32_t last[] = {ROWS - 1, 2 * ROWS - 1};
    const struct rig_part parts[] = {{.seq = 0, .first_pos = 0, .n = ROWS, .tokens = tokens},
                                     {.seq = 1, .first_pos = far, .n = ROWS, .tokens = tokens}};
    struct step_counts before, after;
    p->be->ops->counts(p->be, &before);
    (void)rig_step(&p->r, parts, 2, last, 2); /* bails out where the step fails */
    p->be->ops->counts(p->be, &after);
    return after.slow == before.slow;
}

/* Until plans are there, and scratch for all but prompts that are long. */
static void open_prompts(struct prompts *p, uint32_t far)
{
    bool bad;
    const char *text = NULL;
    leave((size_t)64 << 30);
    rig_must(spind_cuda_open(&p->be, 0));
    rig_must(model_load_dummy(&p->m, p->be, path, 0));
    rig_must(model_reserve(p->m, 2 * ROWS, 2));
    rig_open(&p->r, p->be, p->m, 16, 2, far + ROWS);
    (void)step(p, 0);
    while (text == NULL || strstr(text, "plans") == NULL) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        rig_must(p->be->ops->sync(p->be));
        text = p->be->ops->news(p->be, &bad);
    }
    CHECK(step(p, 0));
}

/* The first prompt has its scratch, of 16 MiB, when the second one asks for more. */
static void short_memory(uint32_t far, size_t left, bool whole, const char *what)
{
    struct prompts p;
    bool bad = false;
    open_prompts(&p, far);
    leave(left);
    bool taken = step(&p, far), again = step(&p, far);
    ok(taken == whole && again == whole, "%s: the step is served, %s", what,
       whole ? "by cuDNN" : "the second one by our own kernel");
    const char *text = p.be->ops->news(p.be, &bad);
    ok(whole == !(text != NULL && bad && strstr(text, "no memory") != NULL),
       "%s: the log says what is slow", what);
    rig_close(&p.r);
    model_destroy(p.m);
    p.be->ops->close(p.be);
}

int main(void)
{
    load();
    describe();
    short_memory(24000, 64 << 20, true, "memory for both");
    short_memory(24000, 12 << 20, true, "memory for half of its heads at a time");
    short_memory(240000, 40 << 20, false, "no memory for one of its heads");
    unlink(path);
    return tap_done();
}
