// Schedules of collective matmuls run by threads: a rank is two of them, one per lane, as it is two streams on a GPU.
// Under ThreadSanitizer (make cpp-sanitize) a race in the protocol is an error even if no value is wrong.
#include "csrc/comm/host_channel.h"

#include <cmath>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <thread>

#include "csrc/tests/check.h"

namespace te_jax::comm {
namespace {

using std::chrono::milliseconds;
using Mutation = std::function<void(int rank, std::vector<Step>&)>;

constexpr Collective kScatter = Collective::kMatmulReduceScatter, kGather = Collective::kAllGatherMatmul;

// Small whole numbers, so that sums in any order are exact: `rank`'s share of row `row` of block `block`.
float Share(uint32_t epoch, int rank, int block, int64_t row) {
  return static_cast<float>((static_cast<int64_t>(epoch) * 7 + rank * 131 + block * 17 + row) % 1021);
}

// A product has one column: what a rank's operand says. In a gather the "product" adds 0.5 to what was gathered.
class Rank : public Worker {
 public:
  Rank(const Problem& problem, int rank, HostChannel& channel) : problem_(problem), rank_(rank), channel_(channel) {}

  void Begin(uint32_t epoch, unsigned delay_seed) {
    epoch_ = epoch;
    delay_seed_ = delay_seed;
    const auto rows = static_cast<size_t>(problem_.block_rows);
    operand_.assign(problem_.ranks, std::vector<float>(rows));
    for (int block = 0; block < problem_.ranks; ++block) {
      for (int64_t row = 0; row < problem_.block_rows; ++row) {
        operand_[block][static_cast<size_t>(row)] = Share(epoch, rank_, block, row);
      }
    }
    staging_.resize(problem_.ranks, std::vector<float>(rows));
    result_.assign(problem_.ranks, std::vector<float>(rows, NAN));
    partial_.assign(rows, NAN);
  }

  void Multiply(const Step& step) override {
    Delay(1);
    for (int64_t row = step.from.rows.begin; row < step.from.rows.end; ++row) {
      float sum = At(step.from)[row] + (problem_.collective == kGather ? 0.5f : 0.0f);
      if (step.with) sum += At(*step.with)[row];
      At(step.to)[row] = sum;
    }
  }

  void Copy(const Step& step) override {
    Delay(2);
    for (int64_t row = step.from.rows.begin; row < step.from.rows.end; ++row) At(step.to)[row] = At(step.from)[row];
  }

  void Reduce(const Step& step) override {
    Delay(3);
    for (int64_t row = step.to.rows.begin; row < step.to.rows.end; ++row) {
      float sum = 0;
      for (int source = 0; source < problem_.ranks; ++source) {
        Area slot = *step.with;
        slot.block = source;
        sum += source == rank_ ? At(step.from)[row] : At(slot)[row];
      }
      At(step.to)[row] = sum;
    }
  }

  // How many elements of the result are wrong.
  int Wrong() const {
    int wrong = 0;
    for (int block = 0; block < problem_.ranks; ++block) {
      if (problem_.collective == kScatter && block != rank_) continue;
      for (int64_t row = 0; row < problem_.block_rows; ++row) {
        float want = 0;
        if (problem_.collective == kGather) {
          want = Share(epoch_, block, block, row) + 0.5f;
        } else {
          for (int rank = 0; rank < problem_.ranks; ++rank) want += Share(epoch_, rank, block, row);
        }
        wrong += result_[block][static_cast<size_t>(row)] != want;
      }
    }
    return wrong;
  }

  void Delay(unsigned what) {
    if (delay_seed_ == 0) return;
    std::minstd_rand random(delay_seed_ * 31 + what + static_cast<unsigned>(rank_) * 7 + epoch_);
    random.discard(3);
    if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  }

 private:
  float* At(const Area& area) {
    switch (area.place) {
      case Place::kOperand: return operand_[area.block].data();
      case Place::kStaging: return staging_[area.block].data();
      case Place::kPartial: return partial_.data();
      case Place::kResult: return result_[area.block].data();
      case Place::kKept: return kept_.data();
      case Place::kSlot: return reinterpret_cast<float*>(channel_.Slot(area.owner, area.block, area.parity).data());
    }
    return nullptr;
  }

  const Problem problem_;
  const int rank_;
  HostChannel& channel_;
  uint32_t epoch_ = 0;
  unsigned delay_seed_ = 0;
  std::vector<std::vector<float>> operand_, staging_, result_;
  std::vector<float> partial_, kept_;
};

// A lane that lives through many calls, as a stream does: a queue of steps, done in order by a thread.
class LaneThread {
 public:
  LaneThread() : thread_([this] { Loop(); }) {}
  ~LaneThread() {
    Give([this] { stop_ = true; });
    thread_.join();
  }
  void Give(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_one();
  }

 private:
  void Loop() {
    while (!stop_) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.erase(queue_.begin());
      }
      work();
    }
  }
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> queue_;
  std::thread thread_;
};

// A call of one rank: all of its steps are given to the two lanes at once, as a handler gives them to streams. A step
// waits for `after` of the other lane. Returns when the call has finished.
std::optional<Failure> RunInLanes(const std::vector<Step>& steps, int rank, uint32_t epoch, HostChannel& channel,
                                  Rank& worker, LaneThread& compute, LaneThread& copy) {
  struct Call {
    explicit Call(const std::vector<Step>& all) : steps(all), done(all.size()) {}
    const std::vector<Step> steps;
    std::vector<std::atomic<bool>> done;
    std::promise<std::optional<Failure>> finished;
    std::optional<Failure> failure;  // of the compute lane: only it awaits
  };
  const auto call = std::make_shared<Call>(steps);
  auto finished = call->finished.get_future();
  for (size_t i = 0; i < steps.size(); ++i) {
    LaneThread& lane = steps[i].lane == Lane::kCopy ? copy : compute;
    lane.Give([call, i, rank, epoch, &channel, &worker] {
      const Step& step = call->steps[i];
      const bool computes = step.lane == Lane::kCompute;
      while (step.after >= 0 && !call->done[static_cast<size_t>(step.after)].load(std::memory_order_acquire)) {
        std::this_thread::yield();
      }
      if (!computes) {
        RunStep(step, rank, epoch, channel, worker);
      } else if (!call->failure) {
        call->failure = RunStep(step, rank, epoch, channel, worker);
      }
      call->done[i].store(true, std::memory_order_release);
      if (step.action == Action::kFinish) call->finished.set_value(call->failure);
    });
  }
  return finished.get();
}

struct Stress {
  int wrong = 0;
  std::optional<Failure> failure;
};

// All calls on `ranks` x 2 threads, back to back, with delays. `skip`: a rank that stops taking part after two calls.
Stress RunAll(const std::vector<Problem>& problems, bool delays, const Mutation& mutate = nullptr, int skip = -1,
              milliseconds timeout = milliseconds(20000)) {
  const int ranks = problems[0].ranks;
  HostChannel channel(ranks, timeout);
  int64_t rows = 0;
  for (const Problem& problem : problems) rows = std::max(rows, problem.block_rows);
  for (int i = 0; i < ranks * ranks * 2; ++i) {
    channel.Slot(i / (ranks * 2), i / 2 % ranks, i % 2).resize(static_cast<size_t>(rows) * sizeof(float));
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::vector<std::unique_ptr<Rank>> workers;  // kept: a broken schedule may still copy from an earlier call's
      LaneThread compute, copy;
      for (size_t call = 0; call < problems.size(); ++call) {
        if (rank == skip && call == 2) return;
        const uint32_t epoch = channel.NextEpoch(rank);
        workers.push_back(std::make_unique<Rank>(problems[call], rank, channel));
        Rank& worker = *workers.back();
        worker.Begin(epoch, delays ? static_cast<unsigned>(call + 1) : 0);
        std::vector<Step> steps = MakeSchedule(problems[call], rank, epoch);
        if (mutate) mutate(rank, steps);
        if (RunInLanes(steps, rank, epoch, channel, worker, compute, copy)) return;
        wrong += worker.Wrong();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return {wrong, channel.failure()};
}

Problem Of(Collective collective, int ranks, int64_t rows, int chunks, bool direct = false) {
  Problem problem{collective, ranks, rows, chunks, /*granularity=*/8};
  problem.direct = direct;
  return problem;
}

TEST(ThousandsOfCallsWithRandomShapes) {
  std::mt19937 random(3);
  const auto upto = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int ranks : {2, 3, 4, 8}) {
    std::vector<Problem> problems;
    for (int i = 0; i < 10000 / (ranks * ranks); ++i) {
      problems.push_back(Of(upto(2) ? kScatter : kGather, ranks, 1 + upto(64), 1 + upto(4), upto(2)));
    }
    const Stress got = RunAll(problems, /*delays=*/false);
    EXPECT_EQ(got.wrong, 0);
    EXPECT(!got.failure);
  }
}

TEST(DelaysChangeNothing) {
  for (int ranks : {2, 4}) {
    for (const Problem& problem :
         {Of(kScatter, ranks, 48, 3), Of(kScatter, ranks, 48, 3, true), Of(kGather, ranks, 48, 2)}) {
      const Stress got = RunAll(std::vector<Problem>(60, problem), /*delays=*/true);
      EXPECT_EQ(got.wrong, 0);
      EXPECT(!got.failure);
    }
  }
}

TEST(APeerThatIsGoneIsAnErrorOnEveryRank) {
  for (int ranks : {2, 3, 8}) {
    for (Collective collective : {kScatter, kGather}) {
      const auto start = std::chrono::steady_clock::now();
      const Stress got =
          RunAll(std::vector<Problem>(6, Of(collective, ranks, 32, 2)), false, nullptr, /*skip=*/1, milliseconds(200));
      EXPECT(std::chrono::steady_clock::now() - start < milliseconds(5000));
      EXPECT(got.failure.has_value());
      if (!got.failure) continue;
      EXPECT_EQ(got.failure->source, 1);
      EXPECT_EQ(got.failure->epoch, 3u);
      EXPECT_EQ(got.failure->seen, 2u);
      EXPECT_CONTAINS(got.failure->ToString(), "of rank 1 in call 3, its last was call 2");
    }
  }
}

TEST(ACallAfterAFailureIsRefused) {
  const Problem problem = Of(kScatter, 2, 16, 1);
  HostChannel channel(2, milliseconds(20));
  Rank worker(problem, 0, channel);
  for (int parity : {0, 1}) channel.Slot(1, 0, parity).resize(16 * sizeof(float));
  worker.Begin(1, 0);
  EXPECT(RunInOrder(MakeSchedule(problem, 0, 1), 0, 1, channel, worker).has_value());
  const auto again = RunInOrder({}, 0, 2, channel, worker);  // without a step that would wait
  EXPECT(again.has_value());
  if (again) EXPECT_EQ(again->epoch, 1u);
}

TEST(EpochsWrapAround) {
  HostChannel channel(2, milliseconds(20));
  channel.Post(1, 0, 0, 0xffffffffu);
  EXPECT(!channel.Await(0, 1, 0, 0xffffffffu).has_value());
  EXPECT(!channel.Await(0, 1, 0, 0xfffffffeu).has_value());  // a peer is a call ahead
  channel.Post(1, 0, 0, 1);
  EXPECT(!channel.Await(0, 1, 0, 0).has_value());
  EXPECT(channel.Await(0, 1, 0, 2).has_value());
}

#if !defined(__SANITIZE_THREAD__)  // races on purpose
void PostEarly(int, std::vector<Step>& steps) {
  for (size_t i = 0; i + 1 < steps.size(); ++i) {
    if (steps[i].action == Action::kPush && steps[i + 1].action == Action::kPost) std::swap(steps[i], steps[i + 1]);
  }
}
void NoAwait(int, std::vector<Step>& steps) {
  for (Step& step : steps) {
    if (step.action == Action::kAwait) step = Step(Action::kStart);
  }
}
void NoFork(int, std::vector<Step>& steps) {
  for (Step& step : steps) {
    if (step.action == Action::kPush) step.after = -1;
  }
}

// Broken protocols that the happens-before check finds are found by running them, too.
TEST(StressFindsBrokenProtocols) {
  for (auto mutate : {PostEarly, NoAwait, NoFork}) {
    const Stress got = RunAll(std::vector<Problem>(100, Of(kScatter, 2, 48, 3)), /*delays=*/true, mutate);
    EXPECT(got.wrong > 0);
  }
}
#endif

}  // namespace
}  // namespace te_jax::comm

TEST_MAIN
