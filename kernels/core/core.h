/* What this folder's headers are compiled as: C, and CUDA for the host and the device. */
#ifndef KERNELS_CORE_CORE_H
#define KERNELS_CORE_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define CORE_FN static __device__ __host__ inline
#else
#define CORE_FN static inline
#endif

#endif
