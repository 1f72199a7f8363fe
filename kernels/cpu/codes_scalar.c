/* Row codes in portable C. */
#include "kernels/cpu/codes_vec.h"

const struct codes_kernels codes_scalar = {seal, query, masses, estimate};
