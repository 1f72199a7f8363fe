/* Row codes for AVX2. */
#if defined(__AVX2__)
#include "kernels/cpu/codes_vec.h"

const struct codes_kernels codes_avx2 = {seal, query, masses, estimate};
#endif
