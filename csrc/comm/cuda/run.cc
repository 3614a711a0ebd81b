#include "csrc/comm/cuda/run.h"

#include <cuda.h>

#include <algorithm>
#include <map>
#include <string>

#include "csrc/core/dtype.h"
#include "csrc/core/fp8.h"
#include "csrc/kernels/channel.h"

namespace te_jax::comm {
namespace {

// Four bytes of NaNs.
uint32_t NanOf(DType dtype) {
  return IsFP8(dtype) ? 0x7f7f7f7fu : 0x7fff7fffu;  // also NaN in float32
}

// The driver's call, without linking to the driver.
using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
WriteValue StreamWriteValue() {
  static const WriteValue function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion("cuStreamWriteValue32", &found, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      found = nullptr;
    }
    return reinterpret_cast<WriteValue>(found);
  }();
  return function;
}

class Runner {
 public:
  Runner(const CollectiveGemm& call, DeviceGroup& group, int rank, cudaStream_t stream)
      : call_(call), group_(group), self_(group.rank(rank)), rank_(rank), stream_(stream) {}

  gemm::Status Run(const std::vector<Step>& steps, uint32_t epoch) {
    epoch_ = epoch;
    for (const Step& step : steps) {
      if (step.after >= 0 && step.lane == Lane::kCopy) events_.emplace(step.after, static_cast<int>(events_.size()));
    }
    for (size_t i = 0; i < steps.size() && status_.code == gemm::Status::kOk; ++i) {
      if (steps[i].lane == Lane::kCopy && steps[i].after >= 0) {
        Cuda("cudaStreamWaitEvent", cudaStreamWaitEvent(self_.copy_stream(), EventAfter(steps[i].after), 0));
      }
      Queue(steps[i]);
      if (events_.count(static_cast<int>(i)) != 0) {
        Cuda("cudaEventRecord", cudaEventRecord(EventAfter(static_cast<int>(i)), stream_));
      }
    }
    return status_;
  }

  gemm::Status Warm(const std::vector<Step>& steps) {
    for (const Step& step : steps) {
      if (step.action == Action::kMultiply && status_.code == gemm::Status::kOk) Multiply(step);
    }
    return status_;
  }

 private:
  bool gathers() const { return call_.problem.collective == Collective::kAllGatherMatmul; }
  cudaEvent_t EventAfter(int step) const { return self_.event(events_.at(step)); }
  size_t lhs_row_bytes() const { return static_cast<size_t>(call_.gemm.k * SizeOf(call_.gemm.lhs_dtype)); }
  size_t out_row_bytes() const { return static_cast<size_t>(call_.gemm.n * SizeOf(call_.gemm.out_dtype)); }
  // What travels: operands (gather) or partial results (scatter).
  size_t slot_row_bytes() const { return gathers() ? lhs_row_bytes() : out_row_bytes(); }

  void Cuda(const char* what, cudaError_t error) {
    if (error == cudaSuccess || status_.code != gemm::Status::kOk) return;
    status_ = {gemm::Status::kInternal, std::string(what) + ": " + cudaGetErrorString(error)};
  }

  char* At(const Area& area) const {
    const auto row = static_cast<size_t>(area.rows.begin), rows = static_cast<size_t>(call_.problem.block_rows);
    const auto block = static_cast<size_t>(area.block);
    const auto in_blocks = [&](const void* base, size_t bytes) {
      return static_cast<char*>(const_cast<void*>(base)) + (block * rows + row) * bytes;
    };
    switch (area.place) {
      case Place::kOperand:
        return gathers() ? static_cast<char*>(const_cast<void*>(call_.gemm.lhs)) + row * lhs_row_bytes()
                         : in_blocks(call_.gemm.lhs, lhs_row_bytes());
      case Place::kStaging: return self_.Staging(area.block) + row * out_row_bytes();
      case Place::kSlot: return group_.rank(area.owner).Slot(area.block, area.parity) + row * slot_row_bytes();
      case Place::kPartial: return self_.Partial() + row * static_cast<size_t>(call_.gemm.n) * sizeof(float);
      case Place::kResult:
        return gathers() ? in_blocks(call_.gemm.out, out_row_bytes())
                         : static_cast<char*>(call_.gemm.out) + row * out_row_bytes();
      case Place::kKept: return in_blocks(call_.kept, lhs_row_bytes());
    }
    return nullptr;
  }

  void Queue(const Step& step) {
    switch (step.action) {
      case Action::kStart: break;
      case Action::kMultiply: return Multiply(step);
      case Action::kPush: return Push(step);
      case Action::kPost: return Post(step);
      case Action::kAwait: return Await(step);
      case Action::kReduce: return Reduce(step);
      case Action::kKeep:
        return Copy(At(step.to), At(step.from), BytesBetween(step.from, lhs_row_bytes()), stream_);
      case Action::kFinish:
        if (step.after < 0) break;
        Cuda("cudaEventRecord", cudaEventRecord(self_.event(kJoin), self_.copy_stream()));
        Cuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_, self_.event(kJoin), 0));
        break;
    }
  }

  static size_t BytesBetween(const Area& area, size_t row_bytes) {
    return static_cast<size_t>(area.rows.end - area.rows.begin) * row_bytes;
  }

  void Multiply(const Step& step) {
    GemmArgs args = call_.gemm;
    args.m = step.from.rows.end - step.from.rows.begin;
    args.lhs = At(step.from);
    args.out = At(step.to);
    if (step.to.place != Place::kResult) args.bias = nullptr;
    if (step.to.place == Place::kPartial) args.out_dtype = args.c_dtype = DType::kF32;
    if (step.with.has_value()) {
      args.c = At(*step.with);
      args.c_dtype = args.out_dtype;
      args.beta = 1.0f;
    }
    if (step.from.place == Place::kSlot && IsFP8(args.lhs_dtype)) {
      args.lhs_scale_inv = self_.SlotScale(step.from.block, step.from.parity);
    }
    const gemm::Status status = gemm::Launch(args, self_.workspace(), stream_);
    if (status_.code == gemm::Status::kOk) status_ = status;
  }

  void Copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    Cuda("cudaMemcpyAsync", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  }

  void Push(const Step& step) {
    if (gathers() && step.from.rows.begin == 0 && IsFP8(call_.gemm.lhs_dtype)) {
      float* scale = group_.rank(step.to.owner).SlotScale(rank_, step.to.parity);
      Copy(scale, call_.gemm.lhs_scale_inv, sizeof(float), self_.copy_stream());
    }
    Copy(At(step.to), At(step.from), BytesBetween(step.from, slot_row_bytes()), self_.copy_stream());
  }

  // Kernels on the copy stream would wait for a GEMM that fills every multiprocessor; a write of the stream doesn't.
  void Post(const Step& step) {
    uint32_t* flag = group_.rank(step.peer).Flag(rank_, step.chunk);
    const WriteValue write = StreamWriteValue();
    if (step.lane == Lane::kCompute || write == nullptr) {
      return Cuda("post", kernels::LaunchPost(flag, epoch_, step.lane == Lane::kCopy ? self_.copy_stream() : stream_));
    }
    const CUresult result = write(self_.copy_stream(), reinterpret_cast<CUdeviceptr>(flag), epoch_, 0);
    if (result != CUDA_SUCCESS) Cuda("cuStreamWriteValue32", cudaErrorUnknown);
  }

  void Await(const Step& step) {
    kernels::AwaitArgs args;
    args.flag = self_.Flag(step.peer, step.chunk);
    args.epoch = epoch_;
    args.timeout_ns = call_.timeout_ns;
    args.source = step.peer;
    args.chunk = step.chunk;
    args.record = self_.record();
    args.data = At(step.from);
    args.bytes = BytesBetween(step.from, slot_row_bytes());
    args.nan = NanOf(gathers() ? call_.gemm.lhs_dtype : call_.gemm.out_dtype);
    Cuda("await", kernels::LaunchAwait(args, stream_));
  }

  void Reduce(const Step& step) {
    kernels::SumPartialsArgs args;
    args.rows = step.to.rows.end - step.to.rows.begin;
    args.cols = call_.gemm.n;
    args.ranks = call_.problem.ranks;
    args.own = rank_;
    args.partial = reinterpret_cast<const float*>(At(step.from));
    for (int source = 0; source < args.ranks; ++source) {
      Area slot = *step.with;
      slot.block = source;
      args.slots[source] = At(slot);
    }
    args.bias = call_.gemm.bias;
    args.dtype = call_.gemm.out_dtype;
    args.bias_dtype = call_.gemm.bias_dtype;
    args.out = At(step.to);
    Cuda("sum of partial results", kernels::LaunchSumPartials(args, stream_));
  }

  static constexpr int kJoin = kMaxRanks * kMaxChunks + 1;

  const CollectiveGemm& call_;
  DeviceGroup& group_;
  DeviceRank& self_;
  const int rank_;
  const cudaStream_t stream_;
  uint32_t epoch_ = 0;
  std::map<int, int> events_;  // step that a copy waits for -> its event
  gemm::Status status_;
};

}  // namespace

gemm::Status RunOnStreams(const CollectiveGemm& call, DeviceGroup& group, int rank, cudaStream_t stream) {
  if (auto why = WhyNot(call.problem)) return {gemm::Status::kUnsupported, *why};
  if (auto why = group.rank(rank).Failure()) return {gemm::Status::kInternal, "rank " + std::to_string(rank) + *why};
  const uint32_t epoch = group.rank(rank).NextEpoch();
  return Runner(call, group, rank, stream).Run(MakeSchedule(call.problem, rank, epoch), epoch);
}

gemm::Status Warm(const CollectiveGemm& call, DeviceGroup& group, int rank, cudaStream_t stream) {
  if (auto why = WhyNot(call.problem)) return {gemm::Status::kUnsupported, *why};
  return Runner(call, group, rank, stream).Warm(MakeSchedule(call.problem, rank, /*epoch=*/0));
}

}  // namespace te_jax::comm
