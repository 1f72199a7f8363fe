/* Row codes for AVX-512. */
#if defined(__AVX512F__)
#include "kernels/cpu/codes_vec.h"

const struct codes_kernels codes_avx512 = {seal, query, masses, estimate};
#endif
