#include "csrc/comm/host_channel.h"

#include <thread>

namespace te_jax::comm {

std::string Failure::ToString() const {
  return "rank " + std::to_string(rank) + " waited " + std::to_string(waited.count()) + " ms for chunk " +
         std::to_string(chunk) + " of rank " + std::to_string(source) + " in call " + std::to_string(epoch) +
         ", its last was call " + std::to_string(seen);
}

HostChannel::HostChannel(int ranks, std::chrono::milliseconds timeout) : ranks_(ranks), timeout_(timeout) {
  pages_.reserve(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) pages_.emplace_back(ranks);
}

void HostChannel::Post(int from, int to, int chunk, uint32_t epoch) {
  flag(to, from, chunk).store(epoch, std::memory_order_release);
}

std::optional<Failure> HostChannel::Await(int rank, int source, int chunk, uint32_t epoch) {
  const auto start = std::chrono::steady_clock::now();
  std::atomic<uint32_t>& arrived = flag(rank, source, chunk);
  for (int spins = 0;; ++spins) {
    const uint32_t seen = arrived.load(std::memory_order_acquire);
    // A peer may be a call ahead. The difference is right across the wrap around, too.
    if (static_cast<int32_t>(seen - epoch) >= 0) return std::nullopt;
    if (failed_.load(std::memory_order_acquire)) return failure();
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
    if (waited >= timeout_) return Fail({rank, source, chunk, epoch, seen, waited});
    if (spins < 64) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

std::optional<Failure> HostChannel::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return first_;
}

Failure HostChannel::Fail(const Failure& failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!first_) first_ = failure;
  failed_.store(true, std::memory_order_release);
  return *first_;
}

std::optional<Failure> RunStep(const Step& step, int rank, uint32_t epoch, HostChannel& channel, Worker& worker) {
  switch (step.action) {
    case Action::kStart:
    case Action::kFinish:
      break;
    case Action::kMultiply:
      worker.Multiply(step);
      break;
    case Action::kPush:
    case Action::kKeep:
      worker.Copy(step);
      break;
    case Action::kReduce:
      worker.Reduce(step);
      break;
    case Action::kPost:
      channel.Post(rank, step.peer, step.chunk, epoch);
      break;
    case Action::kAwait:
      return channel.Await(rank, step.peer, step.chunk, epoch);
  }
  return std::nullopt;
}

std::optional<Failure> RunInOrder(const std::vector<Step>& steps, int rank, uint32_t epoch, HostChannel& channel,
                                  Worker& worker) {
  if (auto failure = channel.failure()) return failure;
  for (const Step& step : steps) {
    if (auto failure = RunStep(step, rank, epoch, channel, worker)) return failure;
  }
  return std::nullopt;
}

}  // namespace te_jax::comm
