#include "csrc/comm/cuda/run.h"

#include <cuda.h>

#include <map>
#include <string>

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
  Runner(const CollectiveGemm& call, DeviceRank& self, cudaStream_t stream)
      : call_(call), self_(self), stream_(stream) {}

  gemm::Status Run(const std::vector<Step>& steps, uint32_t epoch) {
    epoch_ = epoch;
    for (const Step& step : steps) {
      if (step.after >= 0 && step.lane == Lane::kCopy) events_.emplace(step.after, static_cast<int>(events_.size()));
    }
    // A call may be on another stream than the one before it, which has the same slots.
    Cuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_, self_.event(DeviceRank::kCallEnd), 0));
    ClearAmax();
    for (size_t i = 0; i < steps.size() && ok(); ++i) {
      if (steps[i].lane == Lane::kCopy && steps[i].after >= 0) {
        Cuda("cudaStreamWaitEvent", cudaStreamWaitEvent(self_.copy_stream(), EventAfter(steps[i].after), 0));
      }
      Queue(steps[i]);
      if (events_.count(static_cast<int>(i)) != 0) {
        Cuda("cudaEventRecord", cudaEventRecord(EventAfter(static_cast<int>(i)), stream_));
      }
    }
    Cuda("cudaEventRecord", cudaEventRecord(self_.event(DeviceRank::kCallEnd), stream_));
    return status_;
  }

  gemm::Status Warm(const std::vector<Step>& steps) {
    ClearAmax();
    for (const Step& step : steps) {
      if (!ok()) break;
      if (step.action == Action::kMultiply) Multiply(step);
      if (step.action == Action::kReduce) Reduce(step);
    }
    // On a word that nobody else has, and which is there already.
    auto* word = reinterpret_cast<uint32_t*>(self_.scratch() + 1);
    Cuda("post", kernels::LaunchPost(word, 1, stream_));
    kernels::AwaitArgs args;
    args.flag = word;
    args.epoch = 1;
    args.timeout_ns = call_.timeout_ns;
    args.record = self_.record();
    Cuda("await", kernels::LaunchAwait(args, stream_));
    if (const WriteValue write = StreamWriteValue()) {
      const CUresult result = write(self_.copy_stream(), reinterpret_cast<CUdeviceptr>(word), 1, 0);
      if (result != CUDA_SUCCESS) Cuda("cuStreamWriteValue32", cudaErrorUnknown);
    }
    return status_;
  }

 private:
  bool ok() const { return status_.code == gemm::Status::kOk; }
  cudaEvent_t EventAfter(int step) const { return self_.event(events_.at(step)); }

  void Cuda(const char* what, cudaError_t error) {
    if (error == cudaSuccess || !ok()) return;
    status_ = {gemm::Status::kInternal, std::string(what) + ": " + cudaGetErrorString(error)};
  }

  void ClearAmax() {
    if (call_.gemm.amax == nullptr) return;
    Cuda("cudaMemsetAsync", cudaMemsetAsync(call_.gemm.amax, 0, sizeof(float), stream_));
  }

  void Queue(const Step& step) {
    switch (step.action) {
      case Action::kStart: break;
      case Action::kMultiply: return Multiply(step);
      case Action::kPush: return Copy(step, self_.copy_stream());
      case Action::kPost: return Post(step);
      case Action::kAwait: return Await(step);
      case Action::kReduce: return Reduce(step);
      case Action::kKeep: return Copy(step, stream_);
      case Action::kFinish:
        if (step.after < 0) break;
        Cuda("cudaEventRecord", cudaEventRecord(self_.event(DeviceRank::kCopiesEnd), self_.copy_stream()));
        Cuda("cudaStreamWaitEvent", cudaStreamWaitEvent(stream_, self_.event(DeviceRank::kCopiesEnd), 0));
        break;
    }
  }

  void Multiply(const Step& step) {
    if (const auto scales = ScalesOf(call_, step, self_)) Copy(*scales, stream_);
    for (GemmArgs& args : ProductsOf(call_, self_.rank(), step, self_)) {
      float* const amax = args.amax;  // of all products; a GEMM replaces what is there
      if (amax != nullptr) args.amax = self_.scratch();
      const gemm::Status status = gemm::Launch(args, self_.workspace(), stream_);
      if (ok()) status_ = status;
      if (amax != nullptr) Cuda("maximum", kernels::LaunchMaximum(self_.scratch(), amax, stream_));
    }
  }

  void Copy(const Step& step, cudaStream_t stream) {
    for (const Transfer& copy : TransfersOf(call_, self_.rank(), step, self_)) Copy(copy, stream);
  }

  void Copy(const Transfer& copy, cudaStream_t stream) {
    if (copy.rows == 1) {
      Cuda("cudaMemcpyAsync", cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToDevice, stream));
    } else {
      Cuda("cudaMemcpy2DAsync", cudaMemcpy2DAsync(copy.to, copy.to_pitch, copy.from, copy.from_pitch, copy.bytes,
                                                  copy.rows, cudaMemcpyDeviceToDevice, stream));
    }
  }

  // Kernels on the copy stream would wait for a GEMM that fills every multiprocessor; a write of the stream doesn't.
  void Post(const Step& step) {
    uint32_t* flag = self_.Flag(step.peer, self_.rank(), step.chunk);
    const WriteValue write = StreamWriteValue();
    if (step.lane == Lane::kCompute || write == nullptr) {
      return Cuda("post", kernels::LaunchPost(flag, epoch_, step.lane == Lane::kCopy ? self_.copy_stream() : stream_));
    }
    const CUresult result = write(self_.copy_stream(), reinterpret_cast<CUdeviceptr>(flag), epoch_, 0);
    if (result != CUDA_SUCCESS) Cuda("cuStreamWriteValue32", cudaErrorUnknown);
  }

  void Await(const Step& step) {
    const bool gathers = call_.problem.collective == Collective::kAllGatherMatmul;
    const Transfer arrival = ArrivalOf(call_, step, self_);
    kernels::AwaitArgs args;
    args.flag = self_.Flag(self_.rank(), step.peer, step.chunk);
    args.epoch = epoch_;
    args.timeout_ns = call_.timeout_ns;
    args.source = step.peer;
    args.chunk = step.chunk;
    args.record = self_.record();
    args.data = arrival.to;
    args.bytes = arrival.bytes;
    args.nan = NanOf(gathers ? call_.gemm.lhs_dtype : TravellingDType(call_.gemm));
    Cuda("await", kernels::LaunchAwait(args, stream_));
  }

  void Reduce(const Step& step) {
    Cuda("sum of partial results",
         kernels::LaunchSumPartials(SumOf(call_, self_.rank(), step, self_), stream_));
  }

  const CollectiveGemm& call_;
  DeviceRank& self_;
  const cudaStream_t stream_;
  uint32_t epoch_ = 0;
  std::map<int, int> events_;  // step that a copy waits for -> its event
  gemm::Status status_;
};

}  // namespace

gemm::Status RunOnStreams(const CollectiveGemm& call, DeviceRank& self, cudaStream_t stream) {
  if (auto why = WhyNot(call)) return {gemm::Status::kUnsupported, *why};
  if (auto why = self.Failure()) return {gemm::Status::kInternal, "rank " + std::to_string(self.rank()) + *why};
  if (SlotBytes(call) > self.slot_bytes()) {
    return {gemm::Status::kInternal, "slots of " + std::to_string(self.slot_bytes()) + " bytes, " +
                                         std::to_string(SlotBytes(call)) + " are needed"};
  }
  const uint32_t epoch = self.NextEpoch();
  return Runner(call, self, stream).Run(MakeSchedule(call.problem, self.rank(), epoch), epoch);
}

gemm::Status Warm(const CollectiveGemm& call, DeviceRank& self, cudaStream_t stream) {
  if (auto why = WhyNot(call)) return {gemm::Status::kUnsupported, *why};
  return Runner(call, self, stream).Warm(MakeSchedule(call.problem, self.rank(), /*epoch=*/0));
}

}  // namespace te_jax::comm
