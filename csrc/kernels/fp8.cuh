// amax and the FP8 cast, with the results of the host kernels (csrc/core/fp8.h) to the last bit: every operation is
// IEEE and rounds to nearest even, none is contracted or approximated.
#ifndef TE_JAX_KERNELS_FP8_CUH_
#define TE_JAX_KERNELS_FP8_CUH_

#include <cuda_fp8.h>

#include <cfloat>
#include <cstdint>

#include "csrc/core/args.h"

namespace te_jax::kernels {

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kNaNBits = 0x7fc00000u;

// max(amax, |value|), NaN if either is: one instruction.
__device__ inline float MaxMagnitude(float amax, float value) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(amax), "f"(fabsf(value)));
  return result;
}

// The bits of a magnitude are ordered like it as unsigned integers, NaN above infinity: an integer maximum over threads
// and blocks keeps NaN and does not depend on the order.
__device__ inline float AmaxFromBits(uint32_t bits) { return __uint_as_float(bits > kInfinityBits ? kNaNBits : bits); }

// What to cast: y * scale, but NaN for a y that is not finite, since a saturating cast would turn inf into a healthy
// maximum. `magnitude` is the largest |y|, so that the usual case costs one comparison for all.
template <int N>
__device__ inline void ScaleForCast(const float (&y)[N], float magnitude, float scale, float (&scaled)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) scaled[i] = __fmul_rn(y[i], scale);
  if (magnitude <= FLT_MAX) return;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (!(fabsf(y[i]) <= FLT_MAX)) scaled[i] = __uint_as_float(kNaNBits);
  }
}

// Four values to four bytes, the first one lowest. Saturates; NaN gives 0x7f, a NaN in both formats.
__device__ inline uint32_t CastFour(const float* values, bool e5m2) {
  const __nv_fp8_interpretation_t format = e5m2 ? __NV_E5M2 : __NV_E4M3;
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(values[0], values[1]), __NV_SATFINITE, format);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(values[2], values[3]), __NV_SATFINITE, format);
  return low | high << 16;
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_FP8_CUH_
