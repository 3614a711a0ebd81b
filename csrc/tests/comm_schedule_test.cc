#include "csrc/comm/schedule.h"

#include <random>

#include "csrc/tests/check.h"
#include "csrc/tests/happens_before.h"

namespace te_jax::comm {
namespace {

std::vector<Call> Schedules(const std::vector<Problem>& problems) {
  std::vector<Call> calls;
  for (size_t epoch = 0; epoch < problems.size(); ++epoch) {
    calls.emplace_back();
    for (int rank = 0; rank < problems[epoch].ranks; ++rank) {
      calls.back().push_back(MakeSchedule(problems[epoch], rank, static_cast<uint32_t>(epoch + 1)));
    }
  }
  return calls;
}

Problem Of(Collective collective, int ranks, int64_t rows, int chunks, bool direct = false, bool keep = false) {
  Problem problem{collective, ranks, rows, chunks};
  problem.direct = direct, problem.keep = keep;
  return problem;
}

void ExpectNone(const std::string& problem) {
  EXPECT(problem.empty());
  if (!problem.empty()) std::printf("%s\n", problem.c_str());
}

constexpr Collective kScatter = Collective::kMatmulReduceScatter, kGather = Collective::kAllGatherMatmul;

TEST(PiecesCoverABlock) {
  for (int64_t rows : {1, 7, 127, 128, 129, 1000, 4096}) {
    for (int chunks = 1; chunks <= kMaxChunks; ++chunks) {
      const std::vector<Rows> pieces = Pieces(rows, chunks, 128);
      EXPECT(!pieces.empty() && static_cast<int>(pieces.size()) <= chunks);
      int64_t next = 0;
      for (const Rows& piece : pieces) {
        EXPECT_EQ(piece.begin, next);
        EXPECT(piece.end > piece.begin && piece.begin % 128 == 0);
        next = piece.end;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

TEST(RefusesWhatItCantDo) {
  EXPECT(!WhyNot(Of(kScatter, 2, 1, 1)).has_value());
  EXPECT_CONTAINS(WhyNot(Of(kScatter, 1, 128, 1)).value_or(""), "ranks: expected 2 to 16, got 1");
  EXPECT_CONTAINS(WhyNot(Of(kGather, 17, 128, 1)).value_or(""), "ranks: expected 2 to 16, got 17");
  EXPECT_CONTAINS(WhyNot(Of(kGather, 2, 0, 1)).value_or(""), "rows of a rank's block");
  EXPECT_CONTAINS(WhyNot(Of(kGather, 2, 128, 0)).value_or(""), "chunks: expected 1 to 16, got 0");
}

// Every result row is written once, by products of every rank's operand.
TEST(EveryRowIsMultipliedOnce) {
  for (int ranks = 2; ranks <= 8; ++ranks) {
    for (const Problem& problem : {Of(kScatter, ranks, 300, 3), Of(kScatter, ranks, 300, 3, true),
                                   Of(kGather, ranks, 300, 3), Of(kGather, ranks, 300, 2, false, true)}) {
      for (int rank = 0; rank < ranks; ++rank) {
        std::vector<int64_t> multiplied(ranks);
        for (const Step& step : MakeSchedule(problem, rank, 1)) {
          if (step.action != Action::kMultiply) continue;
          multiplied[step.from.block] += step.from.rows.end - step.from.rows.begin;
        }
        for (int block = 0; block < ranks; ++block) EXPECT_EQ(multiplied[block], int64_t{300});
      }
    }
  }
}

TEST(NoScheduleRacesOrDeadlocks) {
  for (int ranks = 2; ranks <= 8; ++ranks) {
    for (int chunks : {1, 2, 4}) {
      const std::vector<std::vector<Problem>> programs = {
          std::vector<Problem>(5, Of(kScatter, ranks, 512, chunks)),
          std::vector<Problem>(5, Of(kScatter, ranks, 512, chunks, true)),
          std::vector<Problem>(5, Of(kGather, ranks, 512, chunks, false, true)),
          {Of(kScatter, ranks, 512, chunks), Of(kGather, ranks, 100, 1), Of(kScatter, ranks, 700, 2, true),
           Of(kScatter, ranks, 1, chunks), Of(kGather, ranks, 512, chunks, false, true), Of(kScatter, ranks, 64, 1)},
      };
      for (const auto& problems : programs) {
        const std::vector<Call> calls = Schedules(problems);
        ExpectNone(HappensBefore(problems, calls).Problems());
        ExpectNone(HappensBefore(problems, calls, /*in_order=*/true).Problems());
      }
    }
  }
}

TEST(RandomProgramsDontRace) {
  std::mt19937 random(1);
  const auto upto = [&](int n) { return static_cast<int>(random() % n); };
  for (int trial = 0; trial < 60; ++trial) {
    const int ranks = 2 + upto(7);
    std::vector<Problem> problems;
    for (int i = 0; i < 6; ++i) {
      problems.push_back(Of(upto(2) ? kScatter : kGather, ranks, 1 + upto(2000), 1 + upto(6), upto(2), upto(2)));
    }
    ExpectNone(HappensBefore(problems, Schedules(problems)).Problems());
  }
}

// What the check above must not miss: each of these changes lets two steps touch the same memory at once, or hang.
std::string AfterMutation(const Problem& problem, void (*mutate)(int rank, uint32_t epoch, std::vector<Step>&)) {
  const std::vector<Problem> problems(5, problem);
  std::vector<Call> calls = Schedules(problems);
  for (size_t call = 0; call < calls.size(); ++call) {
    for (size_t rank = 0; rank < calls[call].size(); ++rank) {
      mutate(static_cast<int>(rank), static_cast<uint32_t>(call), calls[call][rank]);
    }
  }
  return HappensBefore(problems, calls).Problems();
}

void PostEarly(int, uint32_t, std::vector<Step>& steps) {  // the flag before the data
  for (size_t i = 0; i + 1 < steps.size(); ++i) {
    const bool writes = steps[i].action == Action::kPush || steps[i].action == Action::kMultiply;
    if (writes && steps[i + 1].action == Action::kPost) {
      for (Step& step : steps) {
        if (step.after == static_cast<int>(i)) step.after = static_cast<int>(i) + 1;
      }
      if (steps[i].lane == steps[i + 1].lane) std::swap(steps[i], steps[i + 1]);
    }
  }
}
void OneParity(int, uint32_t, std::vector<Step>& steps) {  // a slot used again a call too early
  for (Step& step : steps) {
    step.from.parity = step.to.parity = 0;
    if (step.with) step.with->parity = 0;
  }
}
void NoJoin(int, uint32_t, std::vector<Step>& steps) { steps.back().after = -1; }
void NoFork(int, uint32_t, std::vector<Step>& steps) {  // the copy lane doesn't wait for what it copies
  for (Step& step : steps) {
    if (step.action == Action::kPush) step.after = -1;
  }
}
void NoAwait(int, uint32_t, std::vector<Step>& steps) {
  for (Step& step : steps) {
    if (step.action == Action::kAwait) step.action = Action::kPost, step.chunk = kMaxChunks;
  }
}
void OneRankForgetsAPost(int rank, uint32_t, std::vector<Step>& steps) {
  for (Step& step : steps) {
    if (rank == 1 && step.action == Action::kPost) step.chunk = kMaxChunks;
  }
}

TEST(BrokenSchedulesAreFound) {
  for (int ranks : {2, 3, 8}) {
    for (const Problem& problem :
         {Of(kScatter, ranks, 512, 2), Of(kScatter, ranks, 512, 2, true), Of(kGather, ranks, 512, 2)}) {
      for (auto mutate : {PostEarly, OneParity, NoAwait, OneRankForgetsAPost}) {
        EXPECT(!AfterMutation(problem, mutate).empty());
      }
      if (problem.direct) continue;  // no copy lane to wait for
      EXPECT(!AfterMutation(problem, NoJoin).empty());
      EXPECT(!AfterMutation(problem, NoFork).empty());
    }
  }
}

}  // namespace
}  // namespace te_jax::comm

TEST_MAIN
