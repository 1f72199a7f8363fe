/* Sealing in portable C. */
#include "kernels/cpu/seal_vec.h"

const struct seal_kernels seal_scalar = {.lane = lane};
