/* Kernels of attention are compiled for padded head sizes of 64, 128 and 256, each for heads of just that
 * size and for smaller ones, over pages of bf16 and of fp8. This picks. */
#ifndef KERNELS_CUDA_ATTEND_SHAPE_H
#define KERNELS_CUDA_ATTEND_SHAPE_H

#include <stdint.h>

/* How rows come out of pages. */
enum {
    ROWS_WHOLE = 1, /* head_dim is DP */
    ROWS_FP8 = 2,
};

template <int DP_, int ROWS_> struct attend_shape {
    static constexpr int DP = DP_;
    static constexpr int ROWS = ROWS_;
};

/* Calls f(attend_shape<..>) with the shape of heads of `dim`. */
template <int FP8, typename F> static inline void attend_by_dim(uint32_t dim, F f)
{
    if (dim == 64)
        f(attend_shape<64, FP8 | ROWS_WHOLE>());
    else if (dim == 128)
        f(attend_shape<128, FP8 | ROWS_WHOLE>());
    else if (dim == 256)
        f(attend_shape<256, FP8 | ROWS_WHOLE>());
    else if (dim < 64)
        f(attend_shape<64, FP8>());
    else if (dim < 128)
        f(attend_shape<128, FP8>());
    else
        f(attend_shape<256, FP8>());
}

template <typename F> static inline void attend_by_shape(uint32_t dim, bool fp8, F f)
{
    if (fp8)
        attend_by_dim<ROWS_FP8>(dim, f);
    else
        attend_by_dim<0>(dim, f);
}

template <typename F> static inline void attend_each_shape(F f)
{
    static const uint32_t dims[] = {64, 128, 256, 2, 66, 130};
    for (uint32_t dim : dims) {
        attend_by_shape(dim, false, f);
        attend_by_shape(dim, true, f);
    }
}

#endif
