/* Selection in AVX-512. */
#if defined(__AVX512F__)
#include "kernels/cpu/select_vec.h"

const struct select_kernels select_avx512 = {.lane = lane};
#endif
