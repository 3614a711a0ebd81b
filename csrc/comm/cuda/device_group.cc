#include "csrc/comm/cuda/device_group.h"

#include <cstring>

#include "csrc/gemm/gemm.h"

namespace te_jax::comm {
namespace {

constexpr size_t kFlagStride = 128;
// A call records an event for each piece that is pushed, one where it starts and one where its copies end.
constexpr size_t kEvents = kMaxRanks * kMaxChunks + 2;

size_t AlignUp(size_t bytes) { return (bytes + 255) / 256 * 256; }
size_t FlagBytes(int ranks) { return static_cast<size_t>(ranks) * kMaxChunks * kFlagStride; }

std::string Text(const char* what, int device, cudaError_t error) {
  return std::string(what) + " on device " + std::to_string(device) + ": " + cudaGetErrorString(error);
}

// Makes `device` current until the end of the scope.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~OnDevice() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

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

// Writes into the peer's flag page from `from`'s stream and reads it back there: attributes alone have been wrong.
std::optional<std::string> TryWrite(const DeviceRank& from, const DeviceRank& to, uint32_t value) {
  uint32_t seen = 0;
  {
    const OnDevice on(from.device());
    auto error = kernels::LaunchPost(to.Flag(0, 0), value, from.copy_stream());
    if (error == cudaSuccess) error = cudaStreamSynchronize(from.copy_stream());
    if (error != cudaSuccess) return Text("a write into a peer's memory", from.device(), error);
  }
  const OnDevice on(to.device());
  const auto error = cudaMemcpy(&seen, to.Flag(0, 0), sizeof(seen), cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) return Text("cudaMemcpy", to.device(), error);
  if (seen == value) return std::nullopt;
  return "device " + std::to_string(to.device()) + " doesn't see what device " + std::to_string(from.device()) +
         " writes into its memory: expected " + std::to_string(value) + ", got " + std::to_string(seen);
}

}  // namespace

size_t DeviceRank::ArenaBytes(int ranks, size_t slot_bytes) {
  const size_t slot = AlignUp(slot_bytes), t = static_cast<size_t>(ranks);
  return FlagBytes(ranks) + 2 * t * (kHead + slot) + t * slot + 2 * slot;  // a partial result is in float32
}

std::optional<std::string> DeviceRank::Allocate() {
  const OnDevice on(device_);
  const auto failed = [&](const char* what, cudaError_t error) -> std::optional<std::string> {
    if (error == cudaSuccess) return std::nullopt;
    cudaGetLastError();
    return Text(what, device_, error);
  };
  const size_t bytes = ArenaBytes(ranks_, slot_bytes_);
  if (auto why = failed("cudaMalloc of the arena", cudaMalloc(reinterpret_cast<void**>(&arena_), bytes))) {
    return *why + " (" + std::to_string(bytes >> 20) + " MiB)";
  }
  if (auto why = failed("cudaMemset", cudaMemset(arena_, 0, FlagBytes(ranks_)))) return why;
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
  for (size_t i = 0; i < kEvents; ++i) {
    cudaEvent_t event = nullptr;
    if (auto why = failed("cudaEventCreate", cudaEventCreateWithFlags(&event, cudaEventDisableTiming))) return why;
    events_.push_back(event);
  }
  return failed("cudaDeviceSynchronize", cudaDeviceSynchronize());
}

DeviceRank::~DeviceRank() {
  const OnDevice on(device_);
  for (cudaEvent_t event : events_) cudaEventDestroy(event);
  if (copy_stream_ != nullptr) cudaStreamDestroy(copy_stream_);
  cudaFreeHost(record_);
  cudaFree(workspace_);
  cudaFree(arena_);
}

std::optional<std::string> DeviceRank::Failure() const {
  const volatile kernels::AwaitRecord* record = record_;
  if (record->failed == 0) return std::nullopt;
  return " waited in vain for chunk " + std::to_string(record->chunk) + " of rank " + std::to_string(record->source) +
         " in call " + std::to_string(record->epoch) + ", its last was call " + std::to_string(record->seen);
}

uint32_t* DeviceRank::Flag(int source, int chunk) const {
  return reinterpret_cast<uint32_t*>(arena_ + static_cast<size_t>(source * kMaxChunks + chunk) * kFlagStride);
}

char* DeviceRank::SlotHead(int source, int parity) const {
  return arena_ + FlagBytes(ranks_) + static_cast<size_t>(parity * ranks_ + source) * (kHead + AlignUp(slot_bytes_));
}

float* DeviceRank::SlotScale(int source, int parity) const {
  return reinterpret_cast<float*>(SlotHead(source, parity));
}

char* DeviceRank::Slot(int source, int parity) const { return SlotHead(source, parity) + kHead; }

char* DeviceRank::Staging(int owner) const {
  return SlotHead(0, 2) + static_cast<size_t>(owner) * AlignUp(slot_bytes_);
}

char* DeviceRank::Partial() const { return Staging(ranks_); }

std::variant<std::unique_ptr<DeviceGroup>, std::string> DeviceGroup::Create(const std::vector<int>& devices,
                                                                            size_t slot_bytes) {
  auto group = std::make_unique<DeviceGroup>();
  const int ranks = static_cast<int>(devices.size());
  for (const int device : devices) {
    group->members_.push_back(std::make_unique<DeviceRank>(device, ranks, slot_bytes));
  }
  for (int i = 0; i < ranks; ++i) {
    for (int j = 0; j < ranks; ++j) {
      if (i == j) continue;
      if (auto why = EnableAccess(devices[i], devices[j])) return *why;
    }
  }
  for (const auto& member : group->members_) {
    if (auto why = member->Allocate()) return *why;
  }
  for (int i = 0; i < ranks; ++i) {
    for (int j = 0; j < ranks; ++j) {
      if (i == j) continue;
      if (auto why = TryWrite(group->rank(i), group->rank(j), 0x5eed0000u + static_cast<uint32_t>(i))) return *why;
      const OnDevice on(devices[j]);
      auto error = cudaMemset(group->rank(j).Flag(0, 0), 0, sizeof(uint32_t));
      if (error == cudaSuccess) error = cudaDeviceSynchronize();
      if (error != cudaSuccess) return Text("cudaMemset", devices[j], error);
    }
  }
  return group;
}

}  // namespace te_jax::comm
