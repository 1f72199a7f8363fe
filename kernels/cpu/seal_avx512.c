/* Sealing in AVX-512. */
#if defined(__AVX512F__)
#include "kernels/cpu/seal_vec.h"

const struct seal_kernels seal_avx512 = {.lane = lane};
#endif
