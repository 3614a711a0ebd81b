// The scale of a tensor from its amax: one definition for the host kernels and the CUDA ones.
#ifndef TE_JAX_CORE_SCALE_H_
#define TE_JAX_CORE_SCALE_H_

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define TE_JAX_HOST_DEVICE __host__ __device__
#else
#define TE_JAX_HOST_DEVICE
#endif

namespace te_jax {

// Above this a scale is infinite for a tiny amax, or its inverse subnormal, which CPUs and GPUs round differently.
constexpr float kMaxScale = 8.507059173023462e+37f;  // 2^126

// (fp8_max / amax) * 2^-margin, floored to a power of two if asked, never above 2^126. An amax of 0, inf or NaN
// gives 1.
TE_JAX_HOST_DEVICE inline float ScaleFromAmax(float amax, float fp8_max, int32_t margin, bool power_of_two) {
  if (!(amax > 0.0f) || !(amax <= 3.4028234663852886e+38f)) return 1.0f;
  float scale = ldexpf(fp8_max / amax, -margin);
  if (!(scale < kMaxScale)) return kMaxScale;
  if (power_of_two) {
    int exponent;
    frexpf(scale, &exponent);
    scale = ldexpf(1.0f, exponent - 1);
  }
  return scale;
}

}  // namespace te_jax

#endif  // TE_JAX_CORE_SCALE_H_
