// Memory that GPUs of one process share for collective matmuls: per rank an arena that peers write into, flags, a copy
// stream and what a call needs beside the memory of its operands. Allocated once, outside of XLA's pool.
#ifndef TE_JAX_COMM_CUDA_DEVICE_GROUP_H_
#define TE_JAX_COMM_CUDA_DEVICE_GROUP_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "csrc/comm/schedule.h"
#include "csrc/kernels/channel.h"

namespace te_jax::comm {

// One rank's share. The layout of an arena, from its start: flags [ranks][kMaxChunks], 128 bytes each; slots
// [parity][ranks] of slot_bytes, each after a head of 256 bytes in which the sender's scale travels; staging
// [ranks] of slot_bytes; the own partial result.
class DeviceRank {
 public:
  static constexpr size_t kHead = 256;

  DeviceRank(int device, int ranks, size_t slot_bytes) : device_(device), ranks_(ranks), slot_bytes_(slot_bytes) {}
  ~DeviceRank();
  DeviceRank(const DeviceRank&) = delete;
  DeviceRank& operator=(const DeviceRank&) = delete;

  // Nothing if it worked.
  std::optional<std::string> Allocate();

  static size_t ArenaBytes(int ranks, size_t slot_bytes);

  int device() const { return device_; }
  size_t slot_bytes() const { return slot_bytes_; }
  uint32_t* Flag(int source, int chunk) const;
  float* SlotScale(int source, int parity) const;
  char* Slot(int source, int parity) const;
  char* Staging(int owner) const;
  char* Partial() const;
  void* workspace() const { return workspace_; }
  // " waited for ...": the wait that ended without its flag, if one has. No later call makes sense then.
  std::optional<std::string> Failure() const;
  kernels::AwaitRecord* record() const { return record_; }  // the same address on the host and on the device
  cudaStream_t copy_stream() const { return copy_stream_; }
  cudaEvent_t event(int i) const { return events_[static_cast<size_t>(i)]; }

  uint32_t NextEpoch() { return ++epoch_; }

 private:
  char* SlotHead(int source, int parity) const;

  const int device_, ranks_;
  const size_t slot_bytes_;
  uint32_t epoch_ = 0;
  char* arena_ = nullptr;
  void* workspace_ = nullptr;
  kernels::AwaitRecord* record_ = nullptr;
  cudaStream_t copy_stream_ = nullptr;
  std::vector<cudaEvent_t> events_;
};

class DeviceGroup {
 public:
  // A group of these devices, in the order of ranks, whose slots hold `slot_bytes`; or why there can't be one. Peer
  // access is tried by writing into every peer's memory and reading it there.
  static std::variant<std::unique_ptr<DeviceGroup>, std::string> Create(const std::vector<int>& devices,
                                                                        size_t slot_bytes);

  int ranks() const { return static_cast<int>(members_.size()); }
  DeviceRank& rank(int rank) const { return *members_[static_cast<size_t>(rank)]; }

 private:
  std::vector<std::unique_ptr<DeviceRank>> members_;
};

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_CUDA_DEVICE_GROUP_H_
