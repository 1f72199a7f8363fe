/* The CUDA backend as the rest of the daemon sees it: a library of its own, loaded when it is wanted.
 *
 * The daemon never links CUDA. libspind_cuda.so lies beside the executable, or where
 * SPIND_CUDA_LIBRARY says, and exports one symbol, a struct cuda_api, the way a plug-in does
 * (sparse/plugin.h). What it takes from the executable are the functions of kernels/base.h (the
 * Makefile exports them), so that the text of its errors is in the daemon's own err_text(). */
#ifndef KERNELS_CUDA_API_H
#define KERNELS_CUDA_API_H

#include "kernels/backend.h"
#include "kernels/log.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Counted up when struct backend_ops or a struct that crosses changes its meaning. */
enum { CUDA_ABI = 8 };
/* Longer than any step takes: a chunk of 8,192 rows behind 1M tokens of the 8B shape is 8 s by cuDNN; 90 s by our own
 * kernel where K and V are in DRAM. */
enum { CUDA_PATIENCE_S = 300 };

struct cuda_options {
    int device; /* counted from 0 among those that CUDA_VISIBLE_DEVICES leaves */
    bool eager; /* every command is launched by itself, no CUDA graphs: for finding faults */
    uint32_t patience_s; /* a device that does not answer for so long is gone; 0: CUDA_PATIENCE_S */
    void (*log)(enum log_level level, const char *fmt, ...); /* cuda_load sets it */
};

struct cuda_api {
    uint32_t abi;       /* CUDA_ABI of the header the library was compiled with; first, always */
    uint32_t ops_bytes; /* sizeof(struct backend_ops) there */
    /* ERR_DEVICE: no driver, no such device, or one that the library has no code for. */
    status (*open)(struct backend **out, const struct cuda_options *o);
};

/* Loads the library and opens a device. ERR_DEVICE: the text says what is missing and what to do next.
 * The library is never unloaded. */
status cuda_load(struct backend **out, const struct cuda_options *o);
static inline status spind_cuda_open(struct backend **out, int device)
{
    struct cuda_options o = {device, false, 0, NULL};
    return cuda_load(out, &o);
}

#ifdef __cplusplus
}
#endif
#endif
