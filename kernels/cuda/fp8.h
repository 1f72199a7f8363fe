/* Numbers of e4m3 on the device: rounded as kernels/dtype.h does, and read as bf16, which has all of them. The
 * hardware converts from sm_89 on; before, cuda_fp8.h does it with whole numbers. */
#ifndef KERNELS_CUDA_FP8_H
#define KERNELS_CUDA_FP8_H

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <stdint.h>

__device__ static inline uint8_t fp8_round(float x)
{
    return (uint8_t)__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

__device__ static inline uint32_t fp8_round4(float4 x)
{
    uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(x.x, x.y), __NV_SATFINITE, __NV_E4M3);
    uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(x.z, x.w), __NV_SATFINITE, __NV_E4M3);
    return low | high << 16;
}

/* Two numbers, in the lower half, to two of bf16. */
__device__ static inline uint32_t fp8_widen2(uint32_t two)
{
    __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3);
    __nv_bfloat162 wide = __float22bfloat162_rn(__half22float2(__half2(raw)));
    return *(const uint32_t *)&wide;
}

__device__ static inline uint2 fp8_widen4(uint32_t four)
{
    return make_uint2(fp8_widen2(four & 0xffffu), fp8_widen2(four >> 16));
}

__device__ static inline uint4 fp8_widen8(uint2 eight)
{
    uint2 low = fp8_widen4(eight.x), high = fp8_widen4(eight.y);
    return make_uint4(low.x, low.y, high.x, high.y);
}

#endif
