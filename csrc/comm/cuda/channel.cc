#include "csrc/comm/cuda/channel.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <sstream>
#include <variant>

#include "csrc/comm/cuda/run.h"
#include "csrc/core/dtype.h"

namespace te_jax::comm {
namespace {

// The machine since it was started; containers on it have the same.
std::string HostId() {
  std::string id = "unknown";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

// Not the process's number, which two containers may share.
const std::string& ProcessId() {
  static const std::string id = [] {
    std::random_device random;
    return std::to_string(random()) + "-" + std::to_string(random());
  }();
  return id;
}

std::string ToHex(const void* bytes, size_t count) {
  std::string text(2 * count, '0');
  for (size_t i = 0; i < count; ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    const auto byte = static_cast<const uint8_t*>(bytes)[i];
    text[2 * i] = kDigits[byte >> 4];
    text[2 * i + 1] = kDigits[byte & 15];
  }
  return text;
}

bool FromHex(const std::string& text, void* bytes, size_t count) {
  if (text.size() != 2 * count) return false;
  for (size_t i = 0; i < count; ++i) {
    unsigned value = 0;
    if (std::sscanf(text.c_str() + 2 * i, "%2x", &value) != 1) return false;
    static_cast<uint8_t*>(bytes)[i] = static_cast<uint8_t>(value);
  }
  return true;
}

std::optional<std::string> WhyFailed(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return std::nullopt;
  cudaGetLastError();
  return std::string(what) + ": " + cudaGetErrorString(error);
}

std::string Describe(const CollectiveGemm& call) {
  const Problem& problem = call.problem;
  const bool gathers = problem.collective == Collective::kAllGatherMatmul;
  std::ostringstream text;
  text << (gathers ? "all_gather_matmul" : "matmul_reduce_scatter") << ", blocks of " << problem.block_rows
       << " rows, k=" << call.gemm.k << ", n=" << call.gemm.n << ", " << NameOf(call.gemm.lhs_dtype) << " to "
       << NameOf(call.gemm.out_dtype) << ", " << problem.chunks << (problem.direct ? " pieces, direct" : " pieces");
  return text.str();
}

ChannelError Late(std::string message) { return {ChannelError::kLate, std::move(message)}; }

}  // namespace

Channel::~Channel() { Unmap(); }

std::optional<ChannelError> Channel::Prepare(const CollectiveGemm& call, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (auto refused = Refusal()) return refused;
  timeout_ = std::chrono::milliseconds(call.timeout_ns / 1'000'000);
  error_ = PrepareTogether(call, stream);
  return error_;
}

std::optional<ChannelError> Channel::Run(const CollectiveGemm& call, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (auto refused = Refusal()) return refused;
  const gemm::Status status = RunOnStreams(call, self_, stream);
  if (status.code == gemm::Status::kOk) return std::nullopt;
  const auto kind = status.code == gemm::Status::kUnsupported ? ChannelError::kUnsupported : ChannelError::kFailed;
  error_ = ChannelError{kind, status.message};  // this rank's peers are a call ahead now
  return error_;
}

Channel::Answer Channel::Refusal() const {
  const std::string who = "rank " + std::to_string(self_.rank()) + " of " + group_;
  if (auto why = self_.Failure()) {
    return ChannelError{ChannelError::kRefused, who + *why + ": no call of the group is possible any more"};
  }
  if (!error_.has_value()) return std::nullopt;
  return ChannelError{ChannelError::kRefused, who + " has failed before: " + error_->message};
}

Channel::Answer Channel::PrepareTogether(const CollectiveGemm& call, cudaStream_t stream) {
  // Nobody is in a call when all have come.
  auto failure = WhyFailed("cudaStreamSynchronize", cudaStreamSynchronize(stream));
  const std::string mine = Describe(call);
  if (auto error = Meet("first call", failure, mine)) return error;
  for (int peer = 0; peer < self_.ranks(); ++peer) {
    if (said_[static_cast<size_t>(peer)] == mine) continue;
    return ChannelError{ChannelError::kDiffers, "rank " + std::to_string(self_.rank()) + " of " + group_ + " has " +
                                                    mine + "; rank " + std::to_string(peer) + " has " +
                                                    said_[static_cast<size_t>(peer)]};
  }
  if (SlotBytes(call) > self_.slot_bytes()) {
    if (auto error = Grow(SlotBytes(call))) return error;
  }
  const gemm::Status warm = Warm(call, self_, stream);
  if (warm.code == gemm::Status::kUnsupported) return ChannelError{ChannelError::kUnsupported, warm.message};
  failure.reset();
  if (warm.code != gemm::Status::kOk) failure = warm.message;
  for (const cudaStream_t each : {stream, self_.copy_stream()}) {
    if (!failure) failure = WhyFailed("cudaStreamSynchronize", cudaStreamSynchronize(each));
  }
  return Meet("ready", failure);
}

Channel::Answer Channel::Grow(size_t slot_bytes) {
  Unmap();
  if (auto error = Meet("unmapped", std::nullopt)) return error;
  auto failure = self_.Allocate(slot_bytes);
  if (auto error = Meet("allocated", failure, failure ? "" : Address())) return error;
  const std::vector<std::string> addresses = said_;
  for (int peer = 0; peer < self_.ranks() && !failure; ++peer) {
    if (peer != self_.rank()) failure = Map(peer, addresses[static_cast<size_t>(peer)]);
  }
  if (!failure) failure = TryWrites(self_);
  if (auto error = Meet("written", failure)) return error;
  return Meet("read", CheckWrites(self_));
}

Channel::Answer Channel::Meet(const char* what, const std::optional<std::string>& failure, const std::string& mine) {
  auto answer = exchange_.All(what, failure.has_value() ? "!" + *failure : "+" + mine, timeout_);
  if (auto* late = std::get_if<std::string>(&answer)) return Late(*late);
  said_ = std::get<std::vector<std::string>>(std::move(answer));
  for (int rank = 0; rank < self_.ranks(); ++rank) {
    std::string& said = said_[static_cast<size_t>(rank)];
    const bool failed = said.empty() || said[0] == '!';
    said.erase(0, 1);
    if (!failed) continue;
    return ChannelError{ChannelError::kFailed, "rank " + std::to_string(rank) + " of " + group_ + ": " + said};
  }
  return std::nullopt;
}

std::string Channel::Address() const {
  cudaIpcMemHandle_t handle{};
  const auto why = WhyFailed("cudaIpcGetMemHandle", cudaIpcGetMemHandle(&handle, self_.arena()));
  std::ostringstream text;
  text << HostId() << " " << ProcessId() << " " << self_.device() << " " << reinterpret_cast<uintptr_t>(self_.arena())
       << " " << (why ? "none" : ToHex(&handle, sizeof(handle)));
  return text.str();
}

std::optional<std::string> Channel::Map(int peer, const std::string& address) {
  std::string host, process, handle_text;
  int device = 0;
  uintptr_t arena = 0;
  std::istringstream(address) >> host >> process >> device >> arena >> handle_text;
  const std::string whose = " of rank " + std::to_string(peer);
  if (host != HostId()) return "the memory" + whose + " is on another host";
  const OnDevice on(self_.device());
  if (process == ProcessId()) {
    if (auto why = EnableAccess(self_.device(), device)) return why;
    self_.SetPeer(peer, reinterpret_cast<void*>(arena));
    return std::nullopt;
  }
  cudaIpcMemHandle_t handle{};
  if (!FromHex(handle_text, &handle, sizeof(handle))) return "the memory" + whose + " can't be shared between processes";
  void* mapped = nullptr;
  const auto error = cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess);
  if (auto why = WhyFailed("cudaIpcOpenMemHandle", error)) return *why + ", of the memory" + whose;
  mapped_.push_back(mapped);
  self_.SetPeer(peer, mapped);
  return std::nullopt;
}

void Channel::Unmap() {
  const OnDevice on(self_.device());
  for (void* mapped : mapped_) cudaIpcCloseMemHandle(mapped);
  mapped_.clear();
  for (int peer = 0; peer < self_.ranks(); ++peer) {
    if (peer != self_.rank()) self_.SetPeer(peer, nullptr);
  }
}

Channels& Channels::OfProcess() {
  static auto* channels = new Channels;  // never destroyed: the driver may be gone by then, and frees the memory itself
  return *channels;
}

void Channels::SetBoard(std::unique_ptr<Board> board) {
  const std::lock_guard<std::mutex> lock(mutex_);
  board_ = std::move(board);
  several_processes_ = true;
}

bool Channels::several_processes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return several_processes_;
}

std::shared_ptr<Channel> Channels::Of(const std::string& group, int rank, int ranks, int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& channel = channels_[{group, rank, device}];
  if (channel == nullptr) channel = std::make_shared<Channel>(*board_, group, rank, ranks, device);
  return channel;
}

std::vector<std::shared_ptr<Channel>> Channels::All() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Channel>> all;
  for (const auto& [key, channel] : channels_) all.push_back(channel);
  return all;
}

}  // namespace te_jax::comm
