// te_jax_collective_gemm on CPU: the devices of one process, a thread each, run the schedule of csrc/comm and its flags.
//
// A rank waits for others, which XLA's threads must not do: there may be fewer of them than devices, and the peer's call
// may be behind ours in their queue. So a call gets a thread of ours, and XLA a future.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/comm/host_meeting.h"
#include "csrc/comm/operands.h"
#include "csrc/cpu/float_env.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ffi/attrs.h"
#include "csrc/ffi/collective_gemm.h"
#include "csrc/ffi/cpu/blas.h"
#include "csrc/ffi/cpu/handlers.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

constexpr char kOp[] = "te_jax collective_gemm";

// Threads that wait for work. There are as many as calls have been in flight at once: work given to a busy thread might
// be what the thread waits for.
class Threads {
 public:
  void Run(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    if (queue_.size() > idle_) std::thread([this] { Loop(); }).detach();
    changed_.notify_one();
  }

 private:
  [[noreturn]] void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      changed_.wait(lock, [this] { return !queue_.empty(); });
      --idle_;
      const std::function<void()> work = std::move(queue_.back());
      queue_.pop_back();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> queue_;
  size_t idle_ = 0;
};

Threads& CallThreads() {
  static Threads* threads = new Threads;  // never destroyed: its threads live until the process ends
  return *threads;
}

// What a call site of a program has: shared by all devices that run it.
struct CallSite {
  static ffi::TypeId id;

  std::shared_ptr<comm::HostMeetings> meetings = std::make_shared<comm::HostMeetings>();
};

ffi::TypeId CallSite::id = {};

// A call's slots are those of its channel, after the sender's scale; the rest is the rank's own.
class HostArena : public comm::Arena {
 public:
  HostArena(const comm::CollectiveGemm& call, int rank, comm::HostChannel& channel)
      : rank_(rank), bytes_(comm::SlotBytes(call)), channel_(channel), staging_(static_cast<size_t>(channel.ranks())) {}
  char* Slot(int owner, int source, int parity) override { return Head(owner, source, parity) + kHead; }
  float* SlotScale(int owner, int source, int parity) override {
    return reinterpret_cast<float*>(Head(owner, source, parity));
  }
  char* Staging(int owner) override {
    auto& staging = staging_[static_cast<size_t>(owner)];
    staging.resize(bytes_);
    return staging.data();
  }
  char* Partial() override {
    partial_.resize(2 * bytes_ + kHead);  // float32, at most twice what travels; room to round up
    return partial_.data();
  }

 private:
  static constexpr size_t kHead = 256;

  char* Head(int owner, int source, int parity) {
    auto& slot = channel_.Slot(owner, source, parity);
    if (source == rank_ && slot.empty()) slot.resize(kHead + bytes_);  // who writes it makes it
    return reinterpret_cast<char*>(slot.data());
  }

  const int rank_;
  const size_t bytes_;
  comm::HostChannel& channel_;
  std::vector<std::vector<char>> staging_;
  std::vector<char> partial_;
};

class HostWorker : public comm::Worker {
 public:
  HostWorker(const comm::CollectiveGemm& call, int rank, comm::HostChannel& channel)
      : call_(call), rank_(rank), arena_(call, rank, channel) {}

  void Multiply(const comm::Step& step) override {
    if (const auto scales = comm::ScalesOf(call_, step, arena_)) Copy(*scales);
    for (GemmArgs& args : comm::ProductsOf(call_, rank_, step, arena_)) {
      float* const amax = args.amax;
      float largest = 0.0f;
      if (amax != nullptr) args.amax = &largest;
      Took(cpu::Gemm(args));
      if (amax != nullptr && !(largest <= *amax)) *amax = largest;  // a NaN stays
    }
  }
  void Copy(const comm::Step& step) override {
    for (const comm::Transfer& copy : comm::TransfersOf(call_, rank_, step, arena_)) Copy(copy);
  }
  void Reduce(const comm::Step& step) override { Took(cpu::SumPartials(comm::SumOf(call_, rank_, step, arena_))); }

  bool had_memory() const { return had_memory_; }

 private:
  static void Copy(const comm::Transfer& copy) {
    for (size_t row = 0; row < copy.rows; ++row) {
      std::copy_n(static_cast<const char*>(copy.from) + row * copy.from_pitch, copy.bytes,
                  static_cast<char*>(copy.to) + row * copy.to_pitch);
    }
  }
  void Took(bool had_memory) { had_memory_ = had_memory_ && had_memory; }

  const comm::CollectiveGemm& call_;
  const int rank_;
  HostArena arena_;
  bool had_memory_ = true;
};

ffi::Error RunCall(const comm::CollectiveGemm& call, int rank, comm::HostChannel& channel) {
  const cpu::KeepSubnormals keep_subnormals;
  if (call.gemm.amax != nullptr) *call.gemm.amax = 0.0f;
  HostWorker worker(call, rank, channel);
  const uint32_t epoch = channel.NextEpoch(rank);
  const auto failure = comm::RunInOrder(comm::MakeSchedule(call.problem, rank, epoch), rank, epoch, channel, worker);
  if (failure.has_value()) {
    const bool own = failure->rank == rank;
    return ffi::Error(own ? ffi::ErrorCode::kDeadlineExceeded : ffi::ErrorCode::kAborted,
                      std::string(kOp) + ", rank " + std::to_string(rank) + ": " + failure->ToString());
  }
  if (worker.had_memory()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(kOp) + ": no memory for scratch");
}

ffi::Future Done(ffi::Error error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(std::move(error));
  return future;
}

ffi::ErrorOr<std::unique_ptr<CallSite>> MakeCallSite(CollectiveGemmSpec) { return std::make_unique<CallSite>(); }

ffi::Future HandleCollectiveGemm(ffi::RunId run, CallSite* site, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                 CollectiveGemmSpec spec) {
  const auto decoded = DecodeCollectiveGemm(args, rets, spec);
  if (decoded.has_error()) return Done(decoded.error());
  const comm::CollectiveGemm& call = decoded->call;
  if (ffi::Error error = CheckBlas("collective_gemm", {call.gemm.m, call.gemm.n, call.gemm.k}); error.failure()) {
    return Done(std::move(error));
  }
  const int32_t rank = decoded->place[0], group = decoded->place[1];
  if (rank < 0 || rank >= call.problem.ranks) {
    return Done(ffi::Error::InvalidArgument(std::string(kOp) + ": place[0], the rank: expected 0 to " +
                                            std::to_string(call.problem.ranks - 1) + ", got " + std::to_string(rank)));
  }
  // Joined here, where a device's calls come in the order of its program.
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::nanoseconds(call.timeout_ns));
  const auto meetings = site->meetings;
  const auto joined = meetings->Join(run.run_id, group, rank, call.problem.ranks, timeout);
  ffi::Promise promise;
  ffi::Future future(promise);
  CallThreads().Run([call, rank, meetings, joined, promise]() mutable {
    ffi::Error error = RunCall(call, rank, *joined.channel);
    meetings->Leave(joined);
    error.success() ? promise.SetAvailable() : promise.SetError(std::move(error));
  });
  return future;
}

}  // namespace
}  // namespace te_jax

extern "C" XLA_FFI_TypeId* te_jax_cpu_call_site_id() { return &te_jax::CallSite::id; }

extern "C" const XLA_FFI_TypeInfo* te_jax_cpu_call_site_info() {
  static const XLA_FFI_TypeInfo info = xla::ffi::MakeTypeInfo<te_jax::CallSite>();
  return &info;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_jax_cpu_collective_gemm_instantiate, te_jax::MakeCallSite,
                              xla::ffi::Ffi::BindInstantiate().Attr<te_jax::CollectiveGemmSpec>(te_jax::kSpec));
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_jax_cpu_collective_gemm, te_jax::HandleCollectiveGemm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::RunId>()
                                  .Ctx<xla::ffi::State<te_jax::CallSite>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<te_jax::CollectiveGemmSpec>(te_jax::kSpec));
