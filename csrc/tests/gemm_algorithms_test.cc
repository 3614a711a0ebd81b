#include <atomic>
#include <limits>
#include <thread>

#include "csrc/gemm/algorithm_table.h"
#include "csrc/tests/check.h"

namespace te_jax::gemm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{5000};
const AlgorithmKey kKey{"H200", "m=16"};

Choice Made(uint64_t word, Choice::Source source = Choice::kTimed) {
  Choice choice;
  choice.algorithm[0] = word;
  choice.source = source;
  return choice;
}

TEST(HexRoundTrips) {
  AlgorithmBlob blob{};
  blob[0] = 0x0123456789abcdefu;
  blob[7] = 0xfedcba9876543210u;
  EXPECT_EQ(ToHex(blob).size(), size_t{128});
  EXPECT(ToHex(blob).substr(0, 16) == "0123456789abcdef");
  EXPECT(FromHex(ToHex(blob)) == blob);
  EXPECT(!FromHex("").has_value());
  EXPECT(!FromHex(std::string(127, '0')).has_value());
  EXPECT(!FromHex(std::string(127, '0') + "g").has_value());
}

TEST(OwnKernelsAreTheirOwnAlgorithms) {
  const AlgorithmBlob own = BlobOf(OwnAlgorithm{3, 2});
  EXPECT_EQ(OwnOf(own)->kernel, 3u);
  EXPECT_EQ(OwnOf(own)->version, 2u);
  EXPECT(own != BlobOf(OwnAlgorithm{3, 1}));
  EXPECT(FromHex(ToHex(own)) == own);
  AlgorithmBlob theirs{};  // cuBLASLt's start with a small number
  EXPECT(!OwnOf(theirs).has_value());
  theirs = own;
  theirs[7] = 1;
  EXPECT(!OwnOf(theirs).has_value());
}

TEST(IsMadeOnce) {
  AlgorithmTable table;
  std::atomic<int> made{0};
  std::vector<std::thread> threads;
  std::atomic<int> same{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const auto choice = table.Get(kKey, kPatience, [&](const Choice* loaded) {
        EXPECT(loaded == nullptr);
        std::this_thread::sleep_for(milliseconds(20));
        return Made(static_cast<uint64_t>(++made));
      });
      same += choice.has_value() && choice->algorithm[0] == 1;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(made.load(), 1);
  EXPECT_EQ(same.load(), 8);
}

TEST(OtherKeysDoNotWait) {
  AlgorithmTable table;
  const auto outer = table.Get(kKey, kPatience, [&](const Choice*) {
    const auto inner = table.Get({"H200", "m=32"}, kPatience, [](const Choice*) { return Made(2); });
    EXPECT(inner.has_value());
    return Made(1);
  });
  EXPECT(outer.has_value());
  EXPECT_EQ(table.All().size(), size_t{2});
}

TEST(PatienceEnds) {
  AlgorithmTable table;
  std::optional<Choice> impatient = Made(0);
  (void)table.Get(kKey, kPatience, [&](const Choice*) {
    std::thread other([&] { impatient = table.Get(kKey, milliseconds(10), [](const Choice*) { return Made(2); }); });
    other.join();
    return Made(1);
  });
  EXPECT(!impatient.has_value());
  const auto later = table.Get(kKey, kPatience, [](const Choice*) { return Made(3); });
  EXPECT_EQ(later->algorithm[0], uint64_t{1});
}

TEST(LoadedIsLookedAtOnce) {
  AlgorithmTable table;
  EXPECT(table.Load(kKey, Made(7)));
  EXPECT(!table.Load(kKey, Made(7)));
  EXPECT_EQ(table.All().size(), size_t{1});
  EXPECT(table.All()[0].second.source == Choice::kLoaded);
  int looks = 0;
  for (int i = 0; i < 2; ++i) {
    const auto choice = table.Get(kKey, kPatience, [&](const Choice* loaded) {
      ++looks;
      EXPECT(loaded != nullptr && loaded->algorithm[0] == 7);
      return *loaded;
    });
    EXPECT_EQ(choice->algorithm[0], uint64_t{7});
  }
  EXPECT_EQ(looks, 1);
}

TEST(LoadedReplacesWhatWasChosen) {
  AlgorithmTable table;
  (void)table.Get(kKey, kPatience, [&](const Choice*) {
    EXPECT(!table.Load(kKey, Made(7)));  // this one is being made
    return Made(1);
  });
  EXPECT(!table.Load(kKey, Made(1)));
  EXPECT(table.Load(kKey, Made(7)));
  const auto choice = table.Get(kKey, kPatience, [](const Choice* loaded) { return *loaded; });
  EXPECT_EQ(choice->algorithm[0], uint64_t{7});
}

TEST(Medians) {
  EXPECT_EQ(Median({3.0f, 1.0f, 2.0f}), 2.0f);
  EXPECT_EQ(Median({4.0f, 1.0f, 2.0f, 3.0f}), 2.0f);
  EXPECT_EQ(Median({}), std::numeric_limits<float>::infinity());
}

TEST(TheFirstIsPreferred) {
  EXPECT_EQ(Fastest({}), size_t{0});
  EXPECT_EQ(Fastest({10.0f, 9.95f}), size_t{0});
  EXPECT_EQ(Fastest({10.0f, 9.95f, 9.8f, 9.85f}), size_t{2});
  const float never = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Fastest({never, 9.0f}), size_t{1});
}

TEST(FinalistsIncludeTheFirst) {
  EXPECT(Finalists({9.0f, 1.0f, 3.0f, 2.0f}, 2) == (std::vector<size_t>{0, 1, 3}));
  EXPECT(Finalists({1.0f, 3.0f, 2.0f}, 2) == (std::vector<size_t>{0, 2}));
  EXPECT(Finalists({1.0f}, 4) == (std::vector<size_t>{0}));
  EXPECT(Finalists({}, 4).empty());
}

}  // namespace
}  // namespace te_jax::gemm

TEST_MAIN
