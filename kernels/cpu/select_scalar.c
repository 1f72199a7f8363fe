/* Selection in portable C. */
#include "kernels/cpu/select_vec.h"

const struct select_kernels select_scalar = {.lane = lane};
