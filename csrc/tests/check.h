// The smallest test framework that will do: TEST(Name) { EXPECT(...); EXPECT_EQ(a, b); } and one main per binary.
#ifndef TE_JAX_TESTS_CHECK_H_
#define TE_JAX_TESTS_CHECK_H_

#include <cstdio>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace te_jax::testing {

inline std::vector<std::pair<std::string, std::function<void()>>>& Tests() {
  static std::vector<std::pair<std::string, std::function<void()>>> tests;
  return tests;
}

inline int& Failures() {
  static int failures = 0;
  return failures;
}

inline bool Register(const char* name, std::function<void()> body) {
  Tests().emplace_back(name, std::move(body));
  return true;
}

inline int RunAll() {
  for (const auto& [name, body] : Tests()) {
    const int before = Failures();
    body();
    std::printf("%s %s\n", Failures() == before ? "ok  " : "FAIL", name.c_str());
  }
  std::printf("%zu tests, %d failures\n", Tests().size(), Failures());
  return Failures() == 0 && !Tests().empty() ? 0 : 1;
}

}  // namespace te_jax::testing

#define TEST(name)                                                                      \
  static void name();                                                                   \
  static const bool name##_registered = te_jax::testing::Register(#name, &name);        \
  static void name()

#define EXPECT(condition)                                                               \
  do {                                                                                  \
    if (!(condition)) {                                                                 \
      std::printf("%s:%d: expected %s\n", __FILE__, __LINE__, #condition);              \
      ++te_jax::testing::Failures();                                                    \
    }                                                                                   \
  } while (false)

#define EXPECT_EQ(got, want)                                                            \
  do {                                                                                  \
    const auto got_value = (got);                                                       \
    const decltype(got_value) want_value = (want);                                      \
    if (!(got_value == want_value)) {                                                   \
      std::cout << __FILE__ << ":" << __LINE__ << ": " << #got << ": expected " << +want_value << ", got " \
                << +got_value << "\n";                                                  \
      ++te_jax::testing::Failures();                                                    \
    }                                                                                   \
  } while (false)

#define EXPECT_CONTAINS(text, part)                                                     \
  do {                                                                                  \
    const std::string text_value = (text);                                              \
    if (text_value.find(part) == std::string::npos) {                                   \
      std::cout << __FILE__ << ":" << __LINE__ << ": expected \"" << (part) << "\" in \"" << text_value << "\"\n"; \
      ++te_jax::testing::Failures();                                                    \
    }                                                                                   \
  } while (false)

#define TEST_MAIN \
  int main() { return te_jax::testing::RunAll(); }

#endif  // TE_JAX_TESTS_CHECK_H_
