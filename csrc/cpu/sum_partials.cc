#include "csrc/cpu/kernels.h"
#include "csrc/cpu/quantized.h"
#include "csrc/cpu/rows.h"

namespace te_jax::cpu {

bool SumPartials(const SumPartialsArgs& args) {
  const int64_t n = args.cols;
  const Scratch<float> sum(n), other(n), bias(args.bias != nullptr ? n : 0);
  if (!sum || !other || !bias) return false;
  if (args.bias != nullptr) LoadRow(args.bias, args.bias_dtype, 0, n, bias.get());
  uint32_t amax_bits = args.amax == nullptr ? 0 : BitsOf(*args.amax);
  for (int64_t row = 0; row < args.rows; ++row) {
    float* y = sum.get();
    for (int rank = 0; rank < args.ranks; ++rank) {
      const bool own = rank == args.own;
      float* to = rank == 0 ? y : other.get();
      LoadRow(own ? args.partial : args.slots[rank], own ? DType::kF32 : args.slot_dtype, row * n, n, to);
      if (rank == 0) continue;
      for (int64_t i = 0; i < n; ++i) y[i] += to[i];
    }
    if (args.bias != nullptr) {
      for (int64_t i = 0; i < n; ++i) y[i] += bias.get()[i];
    }
    if (args.amax != nullptr) amax_bits = AmaxBits(y, n, amax_bits);
    if (IsFP8(args.out_dtype)) {
      EncodeRow(y, n, *args.out_scale, args.out_dtype, static_cast<uint8_t*>(args.out) + row * n);
    } else {
      StoreRow(y, n, args.out_dtype, args.out, row * n);
    }
  }
  if (args.amax != nullptr) *args.amax = FloatOf(amax_bits);
  return true;
}

}  // namespace te_jax::cpu
