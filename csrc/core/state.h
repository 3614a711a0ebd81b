// FP8 scale state: what one quantizer's leaves say and what one use writes (te_jax/quant/state_leaves.py has the
// formulation and its reasons). One definition for the host kernel and the CUDA one, which differ in how they reduce a row.
//
// Subnormals count as zero, as XLA's CPU threads have it, whatever device this runs on: `Flush` after every product.
#ifndef TE_JAX_CORE_STATE_H_
#define TE_JAX_CORE_STATE_H_

#include <cstdint>
#include <cstring>

#include "csrc/core/scale.h"

namespace te_jax::state {

constexpr int kRungs = 64;
constexpr int kParity = 64;    // slot of `uses`
constexpr int kNoAmax = 65;    // slot of `uses`
constexpr int kUses = kRungs + 2;
constexpr float kW = 0x1p-64f;
constexpr float kTiny = 0x1p-126f;         // the smallest normal number
constexpr float kSmallest = 0x1p-62f;      // kTiny / kW: below it, a value times kW would be subnormal
constexpr uint32_t kNaN = 0x7fc00000u;
constexpr uint32_t kSqrt2Mantissa = 0x3504f3;  // where the upper half of an octave begins

TE_JAX_HOST_DEVICE inline uint32_t Bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
TE_JAX_HOST_DEVICE inline float FromBits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
TE_JAX_HOST_DEVICE inline float Abs(float x) { return FromBits(Bits(x) & 0x7fffffffu); }
TE_JAX_HOST_DEVICE inline bool IsNaN(float x) { return (Bits(x) & 0x7fffffffu) > 0x7f800000u; }
TE_JAX_HOST_DEVICE inline bool IsFinite(float x) { return (Bits(x) & 0x7f800000u) != 0x7f800000u; }
TE_JAX_HOST_DEVICE inline float Finite(float x) { return IsFinite(x) ? x : 0.0f; }
TE_JAX_HOST_DEVICE inline float Flush(float x) { return Abs(x) < kTiny ? 0.0f : x; }
TE_JAX_HOST_DEVICE inline float Sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }

// Maximum and minimum that are NaN if either operand is.
TE_JAX_HOST_DEVICE inline float Max(float a, float b) { return IsNaN(a) || a > b ? a : b; }
TE_JAX_HOST_DEVICE inline float Min(float a, float b) { return IsNaN(a) || a < b ? a : b; }

// Whether x is a bfloat16 number.
TE_JAX_HOST_DEVICE inline bool IsBF16(float x) { return (Bits(x) & 0xffffu) == 0 && !IsNaN(x); }

// u * inverse = mantissa, 1 <= |mantissa| < 2, inverse a power of two. u is finite and not 0.
struct Divisor {
  float inverse, mantissa;
};
TE_JAX_HOST_DEVICE inline Divisor Split(float u) {
  int32_t exponent = static_cast<int32_t>(Bits(u) & 0x7f800000u);
  if (exponent < (1 << 23)) exponent = 1 << 23;
  if (exponent > (253 << 23)) exponent = 253 << 23;
  const float inverse = FromBits((254u << 23) - static_cast<uint32_t>(exponent));
  return {inverse, Flush(u * inverse)};
}

// a / u; exact if u is a power of two.
TE_JAX_HOST_DEVICE inline float Divide(float a, float u) {
  const Divisor divisor = Split(u);
  a = Flush(a * divisor.inverse);
  return divisor.mantissa == 1.0f ? a : Flush(a / divisor.mantissa);
}

// a / u for many a that share a u: off by at most 1 ulp, exact if u is a power of two.
TE_JAX_HOST_DEVICE inline float Over(float a, float u) {
  const Divisor divisor = Split(u);
  return Flush(Flush(a * divisor.inverse) * Flush(1.0f / divisor.mantissa));
}

// The half octave i with 2^(i/2) <= amax < 2^((i+1)/2), plus 2 * 127.
TE_JAX_HOST_DEVICE inline int32_t Rung(float amax) {
  const int32_t bits = static_cast<int32_t>(Bits(amax));
  return 2 * (bits >> 23) + ((bits & 0x7fffff) >= static_cast<int32_t>(kSqrt2Mantissa) ? 1 : 0);
}

// The smallest float in a rung, for rungs of normal numbers; others are clipped to them.
TE_JAX_HOST_DEVICE inline float LowerEdge(int32_t rung) {
  if (rung < 2) rung = 2;
  if (rung > 2 * 254 + 1) rung = 2 * 254 + 1;
  return FromBits((static_cast<uint32_t>(rung >> 1) << 23) + (rung & 1) * kSqrt2Mantissa);
}

// The leaves of one quantizer, reduced.
struct Sums {
  float with_amax;  // sum of the rungs: slots i and i + 32 first, then i and i + 16, and so on
  int populated;    // rungs that are not 0
  bool rounded;     // all of `uses` are bfloat16 numbers
  float highest;    // max(0, history[1:]), NaN if one is
  float lowest;     // min(0, history[1:]), NaN if one is
};

// What all uses of a step agreed on.
struct Uses {
  float u;          // c * k * kW: what leaves are divided by; 1 if unused
  bool used;
  bool has_amax;
  float mean;       // mean amax of the uses that had one
};

TE_JAX_HOST_DEVICE inline Uses CountUses(float with_amax, float no_amax, float newest) {
  Uses uses;
  uses.u = Flush(with_amax + no_amax);
  uses.used = uses.u != 0.0f && IsFinite(uses.u);
  if (!uses.used) uses.u = 1.0f;
  uses.has_amax = uses.used && with_amax != 0.0f;
  uses.mean = Finite(Divide(newest, uses.has_amax ? with_amax : 1.0f));
  return uses;
}

// For the largest amax of several rungs: the rung that slot `slot`, which holds `value`, stands for if it can be, and
// that of the mean if not. The maximum over slots is the rung of the largest amax.
TE_JAX_HOST_DEVICE inline int32_t PossibleRung(int slot, float value, const Uses& uses) {
  const int32_t base = Rung(uses.mean);
  // The alias nearest to the mean.
  const int32_t rung = base + ((slot - base + kRungs / 2) & (kRungs - 1)) - kRungs / 2;
  const float share = Flush(value * Flush(1.0f / uses.u));
  // 1.1: the shares of a tree that was cast to bfloat16 are rounded.
  return share > 0.0f && Flush(share * LowerEdge(rung)) <= Flush(1.1f * uses.mean) ? rung : base;
}

// The newest amax; `highest_rung` is the maximum of PossibleRung, used only if several rungs are populated.
TE_JAX_HOST_DEVICE inline float Newest(const Uses& uses, int populated, int32_t highest_rung) {
  if (!uses.has_amax) return 0.0f;
  return populated > 1 && uses.mean > 0.0f ? LowerEdge(highest_rung + 1) : uses.mean;
}

struct View {
  float scale;   // to quantize with now: 0 is unseeded, NaN is bad
  float parity;  // what this step writes
};

// `newest` as above; history[0] and history[1] (0 where H is 1) are the leaf's; `scale` and `parity` too.
TE_JAX_HOST_DEVICE inline View Read(const Sums& sums, const Uses& uses, float newest, float second, float scale,
                                    float parity, float fp8_max, float power_of_margin, bool most_recent) {
  const float u = uses.u;
  const float tolerance = sums.rounded ? 0x1p-3f : 0x1p-15f;
  const bool mismatch = Abs(Flush(Abs(parity) - Abs(u))) > Flush(Abs(u) * tolerance);
  const bool negative = (u < 0.0f ? sums.highest > 0.0f : sums.lowest < 0.0f) || Flush(scale * u) < 0.0f;
  const bool bad = uses.used && (mismatch || negative);

  const float older_max = uses.used ? Finite(Over(u < 0.0f ? sums.lowest : sums.highest, u)) : 0.0f;
  float amax = Max(newest, older_max);
  if (most_recent) amax = newest > 0.0f ? newest : uses.used ? Finite(Over(second, u)) : 0.0f;

  View view;
  const float previous = uses.used && !bad ? Sign(parity) * Sign(u) : 0.0f;
  view.parity = bad ? 0.0f : previous > 0.0f ? -1.0f : 1.0f;
  if (bad) {
    view.scale = FromBits(kNaN);
  } else if (amax > 0.0f) {
    const float derived = Flush(Flush(fp8_max / amax) * power_of_margin);
    view.scale = derived < kMaxScale ? derived : kMaxScale;
  } else {
    // Kept, unless there was an amax too small for the history.
    view.scale = uses.has_amax || !uses.used ? 0.0f : Finite(Divide(scale, u));
  }
  return view;
}

// The previous history's entry for slot i + 1 of the next one, from the leaf's entries i and i + 1.
TE_JAX_HOST_DEVICE inline float Shifted(int64_t i, float here, float next, const Uses& uses, float newest) {
  if (newest > 0.0f && i == 0) return newest;
  const float leaf = newest > 0.0f ? here : next;
  return uses.used ? Finite(Over(leaf, uses.u)) : 0.0f;
}

TE_JAX_HOST_DEVICE inline float Encode(float value) { return value >= kSmallest ? value * kW : 0.0f; }

// The amax that a use enters into the books: 0 for one that is no amax.
TE_JAX_HOST_DEVICE inline float UsableAmax(float amax) { return IsFinite(amax) && amax >= kTiny ? amax : 0.0f; }

// The scale that a use enters: the one that it quantized with, which an unseeded quantizer derived from its tensor's
// amax. That of a tensor without amax is arbitrary, not worth keeping.
TE_JAX_HOST_DEVICE inline float EncodeScale(const View& view, float amax, float fp8_max, int32_t margin) {
  if (view.scale > 0.0f) return Encode(view.scale);
  if (!(amax > 0.0f)) return 0.0f;
  return IsNaN(view.scale) ? FromBits(kNaN) : Encode(ScaleFromAmax(amax, fp8_max, margin, false));
}

TE_JAX_HOST_DEVICE inline float EncodeUses(int slot, const View& view, float amax) {
  if (slot == kParity) return view.parity * kW;
  const int written = amax > 0.0f ? Rung(amax) & (kRungs - 1) : kNoAmax;
  return slot == written ? kW : 0.0f;
}

}  // namespace te_jax::state

#endif  // TE_JAX_CORE_STATE_H_
