// amax and the FP8 cast, with the results of the host kernels (csrc/core/fp8.h) to the last bit: every operation is IEEE
// and rounds to nearest even, none is contracted or approximated.
#ifndef TE_JAX_KERNELS_FP8_CUH_
#define TE_JAX_KERNELS_FP8_CUH_

#include <cuda_fp8.h>

#include <cstdint>

#include "csrc/core/args.h"

namespace te_jax::kernels {

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kNaNBits = 0x7fc00000u;

// Ordered like |value| as an unsigned integer, with NaN above infinity, so that an integer maximum is a maximum that
// keeps NaN and does not depend on the order.
__device__ inline uint32_t MagnitudeBits(float value) { return __float_as_uint(value) & 0x7fffffffu; }

__device__ inline float AmaxFromBits(uint32_t bits) { return __uint_as_float(bits > kInfinityBits ? kNaNBits : bits); }

// The value to cast: y * scale, NaN for a y that is not finite (a saturating cast would turn inf into a healthy maximum).
__device__ inline float Scaled(float y, float scale) {
  return MagnitudeBits(y) < kInfinityBits ? __fmul_rn(y, scale) : __uint_as_float(kNaNBits);
}

// Four values to four bytes, the first one lowest. Saturates; NaN gives 0x7f, a NaN in both formats.
__device__ inline uint32_t CastFour(float a, float b, float c, float d, bool e5m2) {
  const __nv_fp8_interpretation_t format = e5m2 ? __NV_E5M2 : __NV_E4M3;
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, format);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, format);
  return low | high << 16;
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_FP8_CUH_
