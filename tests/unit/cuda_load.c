/* kernels/cuda_load.c, on machines with and without a GPU: who asks for the CUDA backend and cannot have
 * it is told what to do next. */
#include "kernels/cuda_api.h"
#include "tests/tap.h"

#include <unistd.h>

/* dense-cuda.so computes with the CPU backend of whoever loads it: it has to be linked. */
__attribute__((used)) static status (*const computes)(
    struct backend **, const struct cpu_options *) = cpu_backend_open;

static const char *folder(void)
{
    const char *set = getenv("SPIND_BUILD");
    return set != NULL ? set : "build";
}

static status open_named(const char *name, struct backend **be, int device)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder(), name);
    setenv("SPIND_CUDA_LIBRARY", path, 1);
    return spind_cuda_open(be, device);
}

static void is_refused(const char *name, const char *why, const char *next)
{
    struct backend *be = NULL;
    status st = open_named(name, &be, 0);
    if (!ok(st == ERR_DEVICE && be == NULL && strstr(err_text(), why) != NULL &&
                strstr(err_text(), next) != NULL,
            "%s: \"%s\", and what to do: \"%s\"", name, why, next))
        printf("#   got %s: %s\n", status_name(st), err_text());
}

static void a_library_is_loaded(void)
{
    struct backend *be = NULL;
    ok(open_named("tests/plugin/dense-cuda.so", &be, 0) == OK && be != NULL &&
           strcmp(be->ops->name, "cuda") == 0,
       "a library of this ABI opens its device");
    if (be == NULL)
        return;
    float *p = be->ops->alloc(be, 64);
    ok(p != NULL && p[0] == 0 && be->ops->sync(be) == OK && be->ops->memory(be) > 0,
       "and its table can be called");
    be->ops->free(be, p, 64);
    be->ops->close(be);
}

/* What a library says is in the text of this thread, not in a copy of its own. */
static void its_errors_are_ours(void)
{
    struct backend *be = NULL;
    err(OK, "nothing");
    ok(open_named("tests/plugin/dense-cuda.so", &be, 7) == ERR_DEVICE && be == NULL &&
           strstr(err_text(), "no device 7") != NULL,
       "an error of the library is in err_text()");
}

static void beside_the_executable(void)
{
    struct backend *be = NULL;
    unsetenv("SPIND_CUDA_LIBRARY");
    ok(spind_cuda_open(&be, 0) == ERR_DEVICE &&
           strstr(err_text(), "/tests/unit/libspind_cuda.so") != NULL,
       "without SPIND_CUDA_LIBRARY it is looked for beside the executable");
    setenv("SPIND_CUDA_LIBRARY", "libc.so.6", 1);
    ok(spind_cuda_open(&be, 0) == ERR_DEVICE && strstr(err_text(), "./libc.so.6") != NULL,
       "a name without a slash is one in this folder, not in the system's");
}

/* RTLD_NOW: that it can be loaded means that nothing is missing in it. */
static void the_real_one(void)
{
    struct backend *be = NULL;
    char path[512];
    snprintf(path, sizeof path, "%s/libspind_cuda.so", folder());
    if (access(path, F_OK) != 0) {
        tap_skip("the library that was built loads", "built with CUDA=1 only");
        return;
    }
    status st = open_named("libspind_cuda.so", &be, 0);
    if (!ok(st == OK || strncmp(err_text(), "cuda: ", 6) == 0,
            "the library that was built loads, and opens a device or says what it misses"))
        printf("#   got %s\n", err_text());
    if (st != OK)
        printf("# %s\n", err_text());
    else
        be->ops->close(be);
}

int main(void)
{
    is_refused("tests/plugin/there-is-none.so", "there is no", "make CUDA=1");
    is_refused("flags", "CUDA backend: ", "flags");
    is_refused("tests/plugin/fault-symbol-cuda.so", "no symbol spind_cuda_api",
               "not a CUDA backend");
    char ours[32];
    snprintf(ours, sizeof ours, "ABI 99, this spind has %d", CUDA_ABI);
    is_refused("tests/plugin/fault-abi-cuda.so", ours, "make CUDA=1");
    is_refused("tests/plugin/fault-size-cuda.so", "a table of 8 bytes", "make CUDA=1");
    a_library_is_loaded();
    its_errors_are_ours();
    beside_the_executable();
    the_real_one();
    return tap_done();
}
