/* Finds and loads libspind_cuda.so (kernels/cuda_api.h). Everything that can be missing on the way has
 * an error of its own: who asks for a GPU and does not get one must know what to do next. */
#include "kernels/cuda_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATH_BYTES = 4096 };

static const char LIBRARY[] = "libspind_cuda.so", SYMBOL[] = "spind_cuda_api";

/* dlopen looks a name without a slash up in the system's folders: never wanted. */
static status find_library(char path[PATH_BYTES])
{
    const char *set = getenv("SPIND_CUDA_LIBRARY");
    if (set != NULL && set[0] != '\0') {
        int n = snprintf(path, PATH_BYTES, "%s%s", strchr(set, '/') == NULL ? "./" : "", set);
        if (n >= PATH_BYTES)
            return err(ERR_DEVICE, "SPIND_CUDA_LIBRARY: a name too long for a file");
    } else {
        ssize_t n = readlink("/proc/self/exe", path, PATH_BYTES - sizeof LIBRARY - 1);
        char *slash = n > 0 ? memrchr(path, '/', (size_t)n) : NULL;
        if (slash == NULL)
            return err(ERR_DEVICE, "no CUDA backend: /proc/self/exe does not say where this "
                                   "program lies; name the library in SPIND_CUDA_LIBRARY");
        memcpy(slash + 1, LIBRARY, sizeof LIBRARY);
    }
    if (access(path, F_OK) != 0)
        return err(ERR_DEVICE,
                   "no CUDA backend: there is no %.512s; 'make CUDA=1' builds it, and "
                   "SPIND_CUDA_LIBRARY names one that lies elsewhere",
                   path);
    return OK;
}

/* NULL: err() has said why. */
static const struct cuda_api *load(const char *path)
{
    void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (object == NULL) {
        const char *why = dlerror();
        bool lacks_cuda = strstr(why, "libcublas") != NULL || strstr(why, "libcudart") != NULL;
        err(ERR_DEVICE, "CUDA backend: %.600s%s", why,
            lacks_cuda ? "; install CUDA 13's runtime libraries, or name their folder in "
                         "LD_LIBRARY_PATH"
                       : "");
        return NULL;
    }
    const struct cuda_api *api = dlsym(object, SYMBOL);
    status st = OK;
    if (api == NULL)
        st = err(ERR_DEVICE, "%.512s: no symbol %s: not a CUDA backend of spind", path, SYMBOL);
    else if (api->abi != CUDA_ABI) /* nothing else may be read */
        st = err(ERR_DEVICE,
                 "%.512s: made for CUDA backend ABI %u, this spind has %d: build both from the "
                 "same source ('make CUDA=1')",
                 path, api->abi, CUDA_ABI);
    else if (api->ops_bytes != sizeof(struct backend_ops))
        st = err(ERR_DEVICE,
                 "%.512s: made for a table of %u bytes, this spind has %zu: build both from the "
                 "same source ('make CUDA=1')",
                 path, api->ops_bytes, sizeof(struct backend_ops));
    if (st != OK) {
        dlclose(object);
        return NULL;
    }
    return api;
}

status cuda_load(struct backend **out, const struct cuda_options *o)
{
    char path[PATH_BYTES];
    TRY(find_library(path));
    const struct cuda_api *api = load(path);
    struct cuda_options with = *o;
    with.log = log_line;
    return api != NULL ? api->open(out, &with) : ERR_DEVICE;
}
