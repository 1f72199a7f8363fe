/* The mass of rows that are attended in any case, in portable C. */
#include "kernels/cpu/known_vec.h"

const struct known_kernels known_scalar = {.lane = lane};
