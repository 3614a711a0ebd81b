// One rank's memory on its GPU for the collective matmuls of a group: an arena that its peers write into, a copy stream
// and what a call needs beside the memory of its operands. Outside of XLA's pool.
#ifndef TE_JAX_COMM_CUDA_DEVICE_RANK_H_
#define TE_JAX_COMM_CUDA_DEVICE_RANK_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/comm/arena_layout.h"
#include "csrc/comm/operands.h"
#include "csrc/kernels/channel.h"

namespace te_jax::comm {

// Makes `device` current until the end of the scope.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

class DeviceRank : public Arena {
 public:
  DeviceRank(int device, int rank, int ranks) : device_(device), rank_(rank), arenas_(static_cast<size_t>(ranks)) {}
  ~DeviceRank() override;
  DeviceRank(const DeviceRank&) = delete;
  DeviceRank& operator=(const DeviceRank&) = delete;

  // An arena for slots of that size, in place of the one there was, which no peer may still use; the rest if it isn't
  // there. Nothing if it worked.
  std::optional<std::string> Allocate(size_t slot_bytes);
  // Where this rank finds a peer's arena, which is of the same size. Null: no more.
  void SetPeer(int rank, void* arena) { arenas_[static_cast<size_t>(rank)] = static_cast<char*>(arena); }

  int device() const { return device_; }
  int rank() const { return rank_; }
  int ranks() const { return static_cast<int>(arenas_.size()); }
  size_t slot_bytes() const { return slot_bytes_; }
  size_t arena_bytes() const { return own() == nullptr ? 0 : layout().Bytes(); }
  void* arena() const { return own(); }

  char* Slot(int owner, int source, int parity) override { return At(owner, layout().Slot(owner, source, parity)); }
  float* SlotScale(int owner, int source, int parity) override {
    return reinterpret_cast<float*>(At(owner, layout().SlotScale(owner, source, parity)));
  }
  char* Staging(int owner) override { return At(rank_, layout().Staging(rank_, owner)); }
  char* Partial() override { return At(rank_, layout().Partial()); }
  uint32_t* Flag(int owner, int source, int chunk) const {
    return reinterpret_cast<uint32_t*>(At(owner, layout().Flag(source, chunk)));
  }
  float* scratch() const { return reinterpret_cast<float*>(At(rank_, layout().Scratch())); }
  void* workspace() const { return workspace_; }

  // " waited for ...": the wait that ended without its flag, if one has. No later call makes sense then.
  std::optional<std::string> Failure() const;
  kernels::AwaitRecord* record() const { return record_; }  // the same address on the host and on the device
  cudaStream_t copy_stream() const { return copy_stream_; }
  cudaEvent_t event(int i) const { return events_[static_cast<size_t>(i)]; }
  // A call records an event for each piece that is pushed, one where its copies end and one where it ends.
  static constexpr int kCopiesEnd = kMaxRanks * kMaxChunks, kCallEnd = kCopiesEnd + 1, kEvents = kCopiesEnd + 2;

  uint32_t NextEpoch() { return ++epoch_; }

 private:
  ArenaLayout layout() const { return ArenaLayout(ranks(), slot_bytes_); }
  char* own() const { return arenas_[static_cast<size_t>(rank_)]; }
  char* At(int owner, size_t offset) const { return arenas_[static_cast<size_t>(owner)] + offset; }
  std::optional<std::string> AllocateOnce();

  const int device_, rank_;
  size_t slot_bytes_ = 0;
  uint32_t epoch_ = 0;
  std::vector<char*> arenas_;  // by rank
  void* workspace_ = nullptr;
  kernels::AwaitRecord* record_ = nullptr;
  cudaStream_t copy_stream_ = nullptr;
  std::vector<cudaEvent_t> events_;
};

// Has `device` reach the memory of `peer`, in this process; why it can't.
std::optional<std::string> EnableAccess(int device, int peer);

// Writes a value of its own into every peer's flag page (TryWrites), and looks for those of all peers in its own and
// clears them (CheckWrites), all ranks having done the first: attributes alone have been wrong.
std::optional<std::string> TryWrites(const DeviceRank& self);
std::optional<std::string> CheckWrites(const DeviceRank& self);

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_CUDA_DEVICE_RANK_H_
