// A rank's end of the channel of a group of GPUs, of one process or several: what all ranks do together on the host
// before the first call of each call site, and calls one after another.
#ifndef TE_JAX_COMM_CUDA_CHANNEL_H_
#define TE_JAX_COMM_CUDA_CHANNEL_H_

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/comm/cuda/device_rank.h"
#include "csrc/comm/exchange.h"
#include "csrc/comm/operands.h"
#include "csrc/gemm/gemm.h"

namespace te_jax::comm {

struct ChannelError {
  enum Kind { kLate, kDiffers, kUnsupported, kFailed, kRefused };
  Kind kind = kFailed;
  std::string message;
};

class Channel {
 public:
  Channel(Board& board, const std::string& group, int rank, int ranks, int device)
      : self_(device, rank, ranks), group_(group), exchange_(board, group, rank, ranks) {}
  ~Channel();

  // Before the first call of a call site: all ranks come here and leave together, with an arena whose slots are large
  // enough, algorithms chosen and kernels loaded: all of what a rank can't do while another one waits on its GPU. The
  // time limit is the call's. An error is for good.
  std::optional<ChannelError> Prepare(const CollectiveGemm& call, cudaStream_t stream);

  // Queues a call. Refused after an error, and after a wait on the GPU that ended in vain.
  std::optional<ChannelError> Run(const CollectiveGemm& call, cudaStream_t stream);

  const std::string& group() const { return group_; }
  const DeviceRank& self() const { return self_; }

 private:
  using Answer = std::optional<ChannelError>;

  Answer PrepareTogether(const CollectiveGemm& call, cudaStream_t stream);
  Answer Grow(size_t slot_bytes);
  // What all ranks say at this point; an error if one of them says that it has failed, if it isn't there in time.
  Answer Meet(const char* what, const std::optional<std::string>& failure, const std::string& mine = "");
  std::string Address() const;
  std::optional<std::string> Map(int peer, const std::string& address);
  void Unmap();
  Answer Refusal() const;

  DeviceRank self_;
  const std::string group_;
  Exchange exchange_;
  std::mutex mutex_;
  std::optional<ChannelError> error_;
  std::chrono::milliseconds timeout_{0};
  std::vector<std::string> said_;  // by all ranks, at the last meeting
  std::vector<void*> mapped_;      // memory of other processes
};

// Those of this process.
class Channels {
 public:
  static Channels& OfProcess();

  // The board of several processes, before the first channel is made; by default that of this one's threads.
  void SetBoard(std::unique_ptr<Board> board);
  bool several_processes() const;

  std::shared_ptr<Channel> Of(const std::string& group, int rank, int ranks, int device);
  std::vector<std::shared_ptr<Channel>> All() const;

 private:
  mutable std::mutex mutex_;
  std::unique_ptr<Board> board_ = std::make_unique<LocalBoard>();
  bool several_processes_ = false;
  std::map<std::tuple<std::string, int, int>, std::shared_ptr<Channel>> channels_;  // by group, rank and device
};

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_CUDA_CHANNEL_H_
