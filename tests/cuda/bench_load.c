/* How fast a GGUF file becomes weights on the device: files of three layers of Llama-3.1-8B's shape, from the
 * page cache. Bytes of the file, and of the bf16 they become, by second; PCIe brings 55 GB/s of the
 * latter. usage: bench_load [FOLDER] */
#include "kernels/cuda_api.h"
#include "kernels/log.h"
#include "tests/gguf_writer.h"
#include "tests/model_rig.h"

#include <unistd.h>

static size_t save(const char *path, enum dtype type)
{
    struct gguf_writer w = {0};
    tiny_model(&w, &(struct tiny_spec){.layers = 3,
                                       .hidden = 4096,
                                       .ff = 14336,
                                       .heads = 32,
                                       .kv_heads = 8,
                                       .type = type,
                                       .embed_type = type});
    struct bytes f = gw_finish(&w);
    size_t len = f.len;
    bytes_save(&f, path);
    bytes_free(&f);
    return len;
}

static void measure(struct backend *be, const char *path, enum dtype type)
{
    size_t len = save(path, type);
    for (int i = 0; i < 3; i++) {
        struct model *m;
        uint64_t start = clock_us();
        rig_must(model_load(&m, be, path, 256));
        double s = (double)(clock_us() - start) / 1e6;
        printf("load %-5s %.2f GB in %.3f s: %.1f GB/s of the file, %.1f GB/s of bf16\n",
               dtype_find(type)->name, (double)len / 1e9, s, (double)len / 1e9 / s,
               (double)model_info(m)->weight_bytes / 1e9 / s);
        model_destroy(m);
    }
    unlink(path);
}

int main(int argc, char **argv)
{
    static const enum dtype types[] = {DTYPE_Q4_1, DTYPE_Q8_0, DTYPE_BF16};
    struct backend *be;
    char path[256];
    log_set_level(LOG_ERROR);
    snprintf(path, sizeof path, "%s/spind-bench-load.gguf", argc > 1 ? argv[1] : "/tmp");
    rig_must(spind_cuda_open(&be, 0));
    printf("# %s\n", be->ops->describe(be));
    for (size_t i = 0; i < ARRAY_LEN(types); i++)
        measure(be, path, types[i]);
    be->ops->close(be);
    return 0;
}
