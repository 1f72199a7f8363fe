/* The CUDA backend as the rest of the daemon sees it: a library of its own, loaded when it is wanted.
 *
 * The daemon never links CUDA. libspind_cuda.so lies beside the executable (or where
 * SPIND_CUDA_LIBRARY says) and exports one symbol, a struct cuda_api, the way a plug-in does
 * (sparse/plugin.h); of the daemon it needs `err` alone, so that what it says is in the daemon's own
 * err_text(). */
#ifndef KERNELS_CUDA_API_H
#define KERNELS_CUDA_API_H

#include "kernels/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Counted up when struct backend_ops or any struct that crosses changes its meaning. */
#define CUDA_ABI 1u
#define CUDA_SYMBOL "spind_cuda_api"

struct cuda_api {
    uint32_t abi;     /* CUDA_ABI of the header the library was compiled with */
    uint32_t n_bytes; /* sizeof(struct backend_ops) there */
    /* host: a CPU backend, owned from success on; draws the tokens. ERR_DEVICE: no driver, no such
     * device, or one the library has no code for. */
    status (*open)(struct backend **out, int device, struct backend *host);
};

/* Loads the library (once) and opens a device; the text of an error says what to do next. A CPU
 * backend with default options is opened for sampling. */
status spind_cuda_open(struct backend **out, int device);

#ifdef __cplusplus
}
#endif
#endif
