/* Sealing in AVX2. */
#if defined(__AVX2__)
#include "kernels/cpu/seal_vec.h"

const struct seal_kernels seal_avx2 = {.lane = lane};
#endif
