// The FP8 cast against the definition: the nearest value of the format, ties to the even code, found by search.
#include "csrc/core/fp8.h"

#include <cmath>
#include <limits>

#include "csrc/cpu/rows.h"
#include "csrc/tests/check.h"

namespace te_jax {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The code of the format's value nearest to a finite x, ties to even; `last` is the largest finite code.
uint8_t Nearest(double x, DType format, uint8_t last) {
  const double magnitude = std::fmin(std::fabs(x), Decode(last, format));  // saturating
  uint8_t best = 0;
  for (int code = 1; code <= last; ++code) {
    const double here = std::fabs(static_cast<double>(Decode(static_cast<uint8_t>(code), format)) - magnitude);
    const double there = std::fabs(static_cast<double>(Decode(best, format)) - magnitude);
    if (here < there || (here == there && code % 2 == 0)) best = static_cast<uint8_t>(code);
  }
  return static_cast<uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

template <typename Format>
void CheckAll(DType format, uint8_t last) {
  for (int code = 0; code < 256; ++code) {
    const float value = Decode(static_cast<uint8_t>(code), format);
    const uint8_t want = std::isfinite(value) ? static_cast<uint8_t>(code) : kNaNCode;
    EXPECT_EQ(Encode<Format>(value, 1.0f), want);
  }
  for (int code = 0; code < last; ++code) {  // ties, and their neighbours
    const float next = Decode(static_cast<uint8_t>(code + 1), format);
    const float tie = 0.5f * (Decode(static_cast<uint8_t>(code), format) + next);
    for (float x : {std::nextafter(tie, 0.0f), tie, std::nextafter(tie, kInf), -tie}) {
      EXPECT_EQ(Encode<Format>(x, 1.0f), Nearest(x, format, last));
    }
  }
  for (uint64_t bits = 0; bits < 0x100000000ull; bits += 1299709) {  // a prime: every exponent, both signs
    const float x = FloatOf(static_cast<uint32_t>(bits));
    EXPECT_EQ(Encode<Format>(x, 1.0f), std::isfinite(x) ? Nearest(x, format, last) : kNaNCode);
  }
}

TEST(ValuesOfCodes) {
  EXPECT_EQ(Decode(0x7e, DType::kE4M3), 448.0f);
  EXPECT_EQ(Decode(0x01, DType::kE4M3), 0x1p-9f);
  EXPECT_EQ(Decode(0x08, DType::kE4M3), 0x1p-6f);
  EXPECT_EQ(Decode(0xb8, DType::kE4M3), -1.0f);
  EXPECT(std::isnan(Decode(0x7f, DType::kE4M3)) && std::isnan(Decode(0xff, DType::kE4M3)));
  EXPECT_EQ(Decode(0x7b, DType::kE5M2), 57344.0f);
  EXPECT_EQ(Decode(0x01, DType::kE5M2), 0x1p-16f);
  EXPECT_EQ(Decode(0x04, DType::kE5M2), 0x1p-14f);
  EXPECT_EQ(Decode(0xfc, DType::kE5M2), -kInf);
  EXPECT(std::isnan(Decode(0x7d, DType::kE5M2)) && std::isnan(Decode(0xff, DType::kE5M2)));
}

TEST(EncodeE4M3) { CheckAll<E4M3>(DType::kE4M3, 0x7e); }
TEST(EncodeE5M2) { CheckAll<E5M2>(DType::kE5M2, 0x7b); }

TEST(Saturation) {
  EXPECT_EQ(Encode<E4M3>(1e30f, 1.0f), 0x7e);
  EXPECT_EQ(Encode<E4M3>(-465.0f, 1.0f), 0xfe);
  EXPECT_EQ(Encode<E4M3>(1e30f, 1e30f), 0x7e);  // the product overflows, x is finite
  EXPECT_EQ(Encode<E5M2>(-1e30f, 1e30f), 0xfb);
}

TEST(NotANumber) {
  for (float x : {kInf, -kInf, NAN}) {
    EXPECT_EQ(Encode<E4M3>(x, 1.0f), kNaNCode);
    EXPECT_EQ(Encode<E5M2>(x, 1.0f), kNaNCode);
  }
  EXPECT_EQ(Encode<E4M3>(1.0f, NAN), kNaNCode);
  EXPECT_EQ(Encode<E4M3>(0.0f, NAN), kNaNCode);
}

TEST(SubnormalInputsCount) { EXPECT_EQ(Encode<E4M3>(0x1p-130f, 0x1p126f), Nearest(0x1p-4, DType::kE4M3, 0x7e)); }

TEST(BFloat16) {
  EXPECT_EQ(cpu::ToBF16(1.0f), 0x3f80);
  EXPECT_EQ(cpu::ToBF16(1.0f + 0x1p-8f), 0x3f80);             // tie, to even
  EXPECT_EQ(cpu::ToBF16(1.0f + 0x1p-7f + 0x1p-8f), 0x3f82);   // tie, to even
  EXPECT_EQ(cpu::ToBF16(3.4e38f), 0x7f80);                    // rounds to infinity
  EXPECT(std::isnan(cpu::FromBF16(cpu::ToBF16(FloatOf(0x7f800001u)))));
}

TEST(Float16) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float value = cpu::FromF16(static_cast<uint16_t>(code));
    const bool nan = (code & 0x7fff) > 0x7c00;
    EXPECT_EQ(std::isnan(value), nan);
    if (!nan) EXPECT_EQ(cpu::ToF16(value), static_cast<uint16_t>(code));
  }
  EXPECT_EQ(cpu::FromF16(0x0001), 0x1p-24f);
  EXPECT_EQ(cpu::FromF16(0x7bff), 65504.0f);
  EXPECT_EQ(cpu::ToF16(65519.0f), 0x7bff);
  EXPECT_EQ(cpu::ToF16(65520.0f), 0x7c00);
  EXPECT_EQ(cpu::ToF16(0x1p-25f), 0x0000);          // tie, to even
  EXPECT_EQ(cpu::ToF16(0x1.8p-24f), 0x0002);        // tie, to even
  EXPECT_EQ(cpu::ToF16(-1.0f - 0x1p-11f), 0xbc00);  // tie, to even
}

}  // namespace
}  // namespace te_jax

TEST_MAIN
