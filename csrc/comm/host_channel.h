// What ranks on one host share: slots that peers write into and flags that say so, in ordinary memory, one page and one
// set of slots per rank. The protocol is that of csrc/comm/schedule.h; flags are released and acquired, never added to.
#ifndef TE_JAX_COMM_HOST_CHANNEL_H_
#define TE_JAX_COMM_HOST_CHANNEL_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "csrc/comm/schedule.h"

namespace te_jax::comm {

// A wait that ended without its flag. The channel is of no use after it: every later call gets the same.
struct Failure {
  int rank = 0, source = 0, chunk = 0;  // who waited for whom
  uint32_t epoch = 0, seen = 0;         // for which value of the flag, and the one it had
  std::chrono::milliseconds waited{0};

  std::string ToString() const;
};

class HostChannel {
 public:
  HostChannel(int ranks, std::chrono::milliseconds timeout);

  int ranks() const { return ranks_; }

  // The number of a rank's next call: 1, 2, ... Wraps around.
  uint32_t NextEpoch(int rank) { return ++pages_[rank].epoch; }

  // Memory of `owner` that `source` writes into. The writer sizes it; the protocol keeps reader and writer apart.
  std::vector<std::byte>& Slot(int owner, int source, int parity) {
    return pages_[owner].slots[static_cast<size_t>(source * 2 + parity)];
  }

  void Post(int from, int to, int chunk, uint32_t epoch);

  // Until the flag has reached `epoch`, the time is over or another rank has failed.
  std::optional<Failure> Await(int rank, int source, int chunk, uint32_t epoch);

  std::optional<Failure> failure() const;

 private:
  struct alignas(128) Flag {
    std::atomic<uint32_t> value{0};
  };
  struct Page {
    explicit Page(int ranks) : flags(static_cast<size_t>(ranks * kMaxChunks)), slots(static_cast<size_t>(ranks * 2)) {}
    uint32_t epoch = 0;
    std::vector<Flag> flags;
    std::vector<std::vector<std::byte>> slots;
  };

  std::atomic<uint32_t>& flag(int owner, int source, int chunk) {
    return pages_[owner].flags[static_cast<size_t>(source * kMaxChunks + chunk)].value;
  }
  Failure Fail(const Failure& failure);

  const int ranks_;
  const std::chrono::milliseconds timeout_;
  std::vector<Page> pages_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;  // of first_
  std::optional<Failure> first_;
};

// What steps do to memory: the products, copies and sums of a call of one rank.
class Worker {
 public:
  virtual ~Worker() = default;
  virtual void Multiply(const Step& step) = 0;
  virtual void Copy(const Step& step) = 0;  // kPush and kKeep
  virtual void Reduce(const Step& step) = 0;
};

// Does one step; returns why it can't be done.
std::optional<Failure> RunStep(const Step& step, int rank, uint32_t epoch, HostChannel& channel, Worker& worker);

// Does all steps of a call, one after another. Refused from the start after a failure.
std::optional<Failure> RunInOrder(const std::vector<Step>& steps, int rank, uint32_t epoch, HostChannel& channel,
                                  Worker& worker);

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_HOST_CHANNEL_H_
