#include "csrc/comm/cuda/device_rank.h"

#include <cstring>

#include "csrc/gemm/gemm.h"

namespace te_jax::comm {
namespace {

std::string Text(const char* what, int device, cudaError_t error) {
  return std::string(what) + " on device " + std::to_string(device) + ": " + cudaGetErrorString(error);
}

uint32_t ProbeOf(int rank) { return 0x5eed0000u + static_cast<uint32_t>(rank); }

}  // namespace

std::optional<std::string> DeviceRank::AllocateOnce() {
  const auto failed = [&](const char* what, cudaError_t error) -> std::optional<std::string> {
    if (error == cudaSuccess) return std::nullopt;
    cudaGetLastError();
    return Text(what, device_, error);
  };
  if (auto why = failed("cudaMalloc of the workspace", cudaMalloc(&workspace_, gemm::kWorkspaceBytes))) return why;
  // Portable and mapped: one address for the host and for every device.
  void* record = nullptr;
  const unsigned flags = cudaHostAllocMapped | cudaHostAllocPortable;
  if (auto why = failed("cudaHostAlloc", cudaHostAlloc(&record, sizeof(kernels::AwaitRecord), flags))) return why;
  std::memset(record, 0, sizeof(kernels::AwaitRecord));
  record_ = static_cast<kernels::AwaitRecord*>(record);
  int least = 0, greatest = 0;
  if (auto why = failed("cudaDeviceGetStreamPriorityRange", cudaDeviceGetStreamPriorityRange(&least, &greatest))) {
    return why;
  }
  if (auto why = failed("cudaStreamCreate",
                        cudaStreamCreateWithPriority(&copy_stream_, cudaStreamNonBlocking, greatest))) {
    return why;
  }
  for (int i = 0; i < kEvents; ++i) {
    cudaEvent_t event = nullptr;
    if (auto why = failed("cudaEventCreate", cudaEventCreateWithFlags(&event, cudaEventDisableTiming))) return why;
    events_.push_back(event);
  }
  return std::nullopt;
}

std::optional<std::string> DeviceRank::Allocate(size_t slot_bytes) {
  const OnDevice on(device_);
  if (events_.empty()) {
    if (auto why = AllocateOnce()) return why;
  }
  cudaFree(own());
  SetPeer(rank_, nullptr);
  slot_bytes_ = slot_bytes;
  const size_t bytes = layout().Bytes();
  void* arena = nullptr;
  auto error = cudaMalloc(&arena, bytes);
  if (error == cudaSuccess) {
    SetPeer(rank_, arena);
    error = cudaMemset(arena, 0, layout().FlagBytes());
  }
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) return std::nullopt;
  cudaGetLastError();
  return Text("the arena", device_, error) + " (" + std::to_string(bytes >> 20) + " MiB)";
}

DeviceRank::~DeviceRank() {
  const OnDevice on(device_);
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
  if (copy_stream_ != nullptr) cudaStreamDestroy(copy_stream_);
  cudaFreeHost(record_);
  cudaFree(workspace_);
  cudaFree(own());
}

std::optional<std::string> DeviceRank::Failure() const {
  const volatile kernels::AwaitRecord* record = record_;
  if (record == nullptr || record->failed == 0) return std::nullopt;
  return " waited in vain for chunk " + std::to_string(record->chunk) + " of rank " + std::to_string(record->source) +
         " in call " + std::to_string(record->epoch) + ", its last was call " + std::to_string(record->seen);
}

std::optional<std::string> EnableAccess(int device, int peer) {
  if (device == peer) return std::nullopt;
  const OnDevice on(device);
  int possible = 0;
  if (const auto error = cudaDeviceCanAccessPeer(&possible, device, peer); error != cudaSuccess) {
    return Text("cudaDeviceCanAccessPeer", device, error);
  }
  if (possible == 0) {
    return "device " + std::to_string(device) + " can't access the memory of device " + std::to_string(peer);
  }
  const auto error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {  // jax enables it, too
    cudaGetLastError();
    return std::nullopt;
  }
  if (error != cudaSuccess) return Text("cudaDeviceEnablePeerAccess", device, error);
  return std::nullopt;
}

std::optional<std::string> TryWrites(const DeviceRank& self) {
  const OnDevice on(self.device());
  cudaError_t error = cudaSuccess;
  for (int peer = 0; peer < self.ranks() && error == cudaSuccess; ++peer) {
    if (peer == self.rank()) continue;
    error = kernels::LaunchPost(self.Flag(peer, self.rank(), 0), ProbeOf(self.rank()), self.copy_stream());
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(self.copy_stream());
  if (error == cudaSuccess) return std::nullopt;
  return Text("a write into a peer's memory", self.device(), error);
}

std::optional<std::string> CheckWrites(const DeviceRank& self) {
  const OnDevice on(self.device());
  for (int peer = 0; peer < self.ranks(); ++peer) {
    if (peer == self.rank()) continue;
    uint32_t* flag = self.Flag(self.rank(), peer, 0);
    uint32_t seen = 0;
    auto error = cudaMemcpy(&seen, flag, sizeof(seen), cudaMemcpyDeviceToHost);
    if (error == cudaSuccess) error = cudaMemset(flag, 0, sizeof(seen));
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    if (error != cudaSuccess) return Text("reading a peer's write", self.device(), error);
    if (seen == ProbeOf(peer)) continue;
    return "rank " + std::to_string(self.rank()) + " doesn't see what rank " + std::to_string(peer) +
           " writes into its memory: expected " + std::to_string(ProbeOf(peer)) + ", got " + std::to_string(seen);
  }
  return std::nullopt;
}

}  // namespace te_jax::comm
