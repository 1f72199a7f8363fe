/* The mass of rows that are attended in any case, in AVX-512. */
#if defined(__AVX512F__)
#include "kernels/cpu/known_vec.h"

const struct known_kernels known_avx512 = {.lane = lane};
#endif
