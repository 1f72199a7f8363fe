/* The mass of rows that are attended in any case, in AVX2. */
#if defined(__AVX2__)
#include "kernels/cpu/known_vec.h"

const struct known_kernels known_avx2 = {.lane = lane};
#endif
