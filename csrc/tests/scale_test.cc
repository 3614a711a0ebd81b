#include "csrc/core/scale.h"

#include <cmath>
#include <limits>

#include "csrc/tests/check.h"

namespace te_jax {
namespace {

TEST(FromAmax) {
  EXPECT_EQ(ScaleFromAmax(7.0f, 448.0f, 0, false), 64.0f);
  EXPECT_EQ(ScaleFromAmax(7.0f, 448.0f, 2, false), 16.0f);
  EXPECT_EQ(ScaleFromAmax(7.0f, 448.0f, -1, false), 128.0f);
  EXPECT_EQ(ScaleFromAmax(3.0f, 448.0f, 0, false), 448.0f / 3.0f);
}

TEST(PowerOfTwo) {
  EXPECT_EQ(ScaleFromAmax(7.0f, 448.0f, 0, true), 64.0f);
  EXPECT_EQ(ScaleFromAmax(7.1f, 448.0f, 0, true), 32.0f);
  EXPECT_EQ(ScaleFromAmax(3.0f, 57344.0f, 0, true), 16384.0f);
}

TEST(NoAmax) {
  for (float amax : {0.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_EQ(ScaleFromAmax(amax, 448.0f, 0, false), 1.0f);
    EXPECT_EQ(ScaleFromAmax(amax, 448.0f, 3, true), 1.0f);
  }
}

TEST(Capped) {
  EXPECT_EQ(kMaxScale, std::ldexp(1.0f, 126));
  for (float amax : {1e-37f, 1e-45f}) {  // the quotient is finite; infinite
    for (bool power_of_two : {false, true}) EXPECT_EQ(ScaleFromAmax(amax, 448.0f, 0, power_of_two), kMaxScale);
  }
  EXPECT(std::isnormal(1.0f / kMaxScale));
}

}  // namespace
}  // namespace te_jax

TEST_MAIN
