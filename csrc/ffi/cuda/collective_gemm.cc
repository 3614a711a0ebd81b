// te_jax_collective_gemm on CUDA. Not for command buffers: in a CUDA graph the copies of a schedule wait for its GEMMs
// (docs/design/0006).
#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "csrc/comm/cuda/channel.h"
#include "csrc/ffi/attrs.h"
#include "csrc/ffi/collective_gemm.h"
#include "csrc/ffi/cuda/handlers.h"

namespace te_jax {
namespace {

namespace ffi = xla::ffi;

constexpr char kOp[] = "te_jax collective_gemm: ";

// What a call site of a program knows: shared by all devices of this process that run it.
struct CallSite {
  static ffi::TypeId id;

  std::mutex mutex;
  std::condition_variable changed;
  std::map<int32_t, std::map<int, int>> devices;           // group -> rank -> device
  std::map<int, std::shared_ptr<comm::Channel>> channels;  // device -> its end of its group's channel, once prepared
};

ffi::TypeId CallSite::id = {};

ffi::Error Cuda(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(kOp) + what + ": " + cudaGetErrorString(error));
}

ffi::Error ToFfi(const comm::ChannelError& error) {
  using Kind = comm::ChannelError;
  const auto code = [&] {
    switch (error.kind) {
      case Kind::kLate: return ffi::ErrorCode::kDeadlineExceeded;
      case Kind::kDiffers: return ffi::ErrorCode::kFailedPrecondition;
      case Kind::kUnsupported: return ffi::ErrorCode::kUnimplemented;
      case Kind::kRefused: return ffi::ErrorCode::kAborted;
      case Kind::kFailed: break;
    }
    return ffi::ErrorCode::kInternal;
  }();
  return ffi::Error(code, kOp + error.message);
}

// "devices 0 2": all ranks of the group, which have to come here. In one process a group is known by its devices, so
// that meshes that have the same groups share their memory.
ffi::ErrorOr<std::string> DevicesOf(CallSite& site, int32_t group, int rank, int ranks, int device,
                                    std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(site.mutex);
  auto& devices = site.devices[group];
  devices[rank] = device;
  site.changed.notify_all();
  const auto all = [&] { return devices.size() == static_cast<size_t>(ranks); };
  if (!site.changed.wait_for(lock, timeout, all)) {
    std::string missing;
    for (int each = 0; each < ranks; ++each) {
      if (devices.count(each) == 0) missing += " " + std::to_string(each);
    }
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kDeadlineExceeded,
                                      std::string(kOp) + "rank " + std::to_string(rank) + " waited " +
                                          std::to_string(timeout.count()) + " ms for the first call of ranks" + missing));
  }
  std::string name = "devices";
  for (const auto& [each, its_device] : devices) name += " " + std::to_string(its_device);
  return name;
}

// What the first call of this call site on this device finds out, and does together with all other ranks.
ffi::ErrorOr<std::shared_ptr<comm::Channel>> FirstCall(CallSite& site, const CollectiveGemmCall& decoded,
                                                       std::string_view group_name, int device, cudaStream_t stream) {
  const comm::CollectiveGemm& call = decoded.call;
  int32_t place[2] = {};
  auto copied = Cuda("place", cudaMemcpyAsync(place, decoded.place, sizeof(place), cudaMemcpyDeviceToHost, stream));
  if (copied.success()) copied = Cuda("place", cudaStreamSynchronize(stream));
  if (copied.failure()) return ffi::Unexpected(std::move(copied));
  const auto [rank, group] = std::pair<int, int32_t>(place[0], place[1]);
  const int ranks = call.problem.ranks;
  if (rank < 0 || rank >= ranks) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(std::string(kOp) + "place[0], the rank: expected 0 to " +
                                                       std::to_string(ranks - 1) + ", got " + std::to_string(rank)));
  }
  comm::Channels& channels = comm::Channels::OfProcess();
  std::string name = std::string(group_name) + ", group " + std::to_string(group);
  if (!channels.several_processes()) {
    const auto timeout = std::chrono::milliseconds(call.timeout_ns / 1'000'000);
    auto devices = DevicesOf(site, group, rank, ranks, device, timeout);
    if (devices.has_error()) return ffi::Unexpected(devices.error());
    name = *devices;
  }
  const auto channel = channels.Of(name, rank, ranks, device);
  if (const auto error = channel->Prepare(call, stream)) return ffi::Unexpected(ToFfi(*error));
  return channel;
}

ffi::ErrorOr<std::unique_ptr<CallSite>> MakeCallSite(CollectiveGemmSpec) { return std::make_unique<CallSite>(); }

ffi::Error HandleCollectiveGemm(cudaStream_t stream, CallSite* site, ffi::RemainingArgs args, ffi::RemainingRets rets,
                                CollectiveGemmSpec spec) {
  const auto decoded = DecodeCollectiveGemm(args, rets, spec);
  if (decoded.has_error()) return decoded.error();
  int device = 0;
  if (auto error = Cuda("cudaGetDevice", cudaGetDevice(&device)); error.failure()) return error;
  std::shared_ptr<comm::Channel> channel;
  {
    const std::lock_guard<std::mutex> lock(site->mutex);
    if (const auto found = site->channels.find(device); found != site->channels.end()) channel = found->second;
  }
  if (channel == nullptr) {
    auto first = FirstCall(*site, *decoded, spec.group, device, stream);
    if (first.has_error()) return first.error();
    channel = *first;
    const std::lock_guard<std::mutex> lock(site->mutex);
    site->channels[device] = channel;
  }
  if (const auto error = channel->Run(decoded->call, stream)) return ToFfi(*error);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace te_jax

extern "C" XLA_FFI_TypeId* te_jax_cuda_call_site_id() { return &te_jax::CallSite::id; }

extern "C" const XLA_FFI_TypeInfo* te_jax_cuda_call_site_info() {
  static const XLA_FFI_TypeInfo info = xla::ffi::MakeTypeInfo<te_jax::CallSite>();
  return &info;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(te_jax_cuda_collective_gemm_instantiate, te_jax::MakeCallSite,
                              xla::ffi::Ffi::BindInstantiate().Attr<te_jax::CollectiveGemmSpec>(te_jax::kSpec));
XLA_FFI_DEFINE_HANDLER_SYMBOL(te_jax_cuda_collective_gemm, te_jax::HandleCollectiveGemm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::State<te_jax::CallSite>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<te_jax::CollectiveGemmSpec>(te_jax::kSpec));
