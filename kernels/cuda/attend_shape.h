/* Kernels of attention are compiled for padded head sizes of 64, 128 and 256, each for heads of just that
 * size (WHOLE) and for smaller ones. This picks. */
#ifndef KERNELS_CUDA_ATTEND_SHAPE_H
#define KERNELS_CUDA_ATTEND_SHAPE_H

#include <stdint.h>

template <int DP_, bool WHOLE_> struct attend_shape {
    static constexpr int DP = DP_;
    static constexpr bool WHOLE = WHOLE_;
};

/* Calls f(attend_shape<..>) with the shape of heads of `dim`. */
template <typename F> static inline void attend_by_shape(uint32_t dim, F f)
{
    if (dim == 64)
        f(attend_shape<64, true>());
    else if (dim == 128)
        f(attend_shape<128, true>());
    else if (dim == 256)
        f(attend_shape<256, true>());
    else if (dim < 64)
        f(attend_shape<64, false>());
    else if (dim < 128)
        f(attend_shape<128, false>());
    else
        f(attend_shape<256, false>());
}

template <typename F> static inline void attend_each_shape(F f)
{
    static const uint32_t dims[] = {64, 128, 256, 2, 66, 130};
    for (uint32_t dim : dims)
        attend_by_shape(dim, f);
}

#endif
