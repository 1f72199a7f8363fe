/* Selection in AVX2. */
#if defined(__AVX2__)
#include "kernels/cpu/select_vec.h"

const struct select_kernels select_avx2 = {.lane = lane};
#endif
