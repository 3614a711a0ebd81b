#include "csrc/gemm/gemm.h"

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "csrc/gemm/candidates.h"
#include "csrc/gemm/cublaslt.h"
#include "csrc/gemm/operation.h"
#include "csrc/gemm/own_kernels.h"
#include "csrc/gemm/plan.h"
#include "csrc/gemm/timing.h"

namespace te_jax::gemm {
namespace {

constexpr int kCandidates = 16;
// A choice takes less than a second. What may take longer is in algorithm_table.h.
constexpr std::chrono::milliseconds kPatience{20000};

std::atomic<bool> timed{true};
std::atomic<uint64_t> generation{0};  // counts loaded choices: what was prepared before may have another algorithm

struct Prepared {
  Problem problem;
  AlgorithmBlob algorithm{};
};

// "NVIDIA H200, 132 multiprocessors": what the time of an algorithm depends on.
std::string TypeOf(int device) {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return "unknown";
  return std::string(properties.name) + ", " + std::to_string(properties.multiProcessorCount) + " multiprocessors";
}

// The algorithm for `problem`. `*final` is whether to keep it.
AlgorithmBlob ChooseAlgorithm(Calls& calls, cublasLtHandle_t handle, int device, const Problem& problem,
                              const GemmArgs& args, cudaStream_t stream, bool* final) {
  *final = true;
  const auto operation = MakeOperation(calls, problem.plan, args);
  if (!calls.ok()) return {};
  const auto candidates =
      Candidates(calls, handle, problem, operation.get(), timed.load() ? kCandidates : 1);
  if (!calls.ok()) return {};
  if (!timed.load()) return candidates.front();

  const auto make = [&](const Choice* loaded) {
    if (loaded != nullptr && CanRun(calls, handle, problem, operation.get(), loaded->algorithm)) return *loaded;
    return ChooseByTiming(calls, handle, problem, args, candidates, stream);
  };
  const auto choice = Algorithms().Get({TypeOf(device), ToString(problem.desc)}, kPatience, make);
  *final = choice.has_value();
  return choice.has_value() ? choice->algorithm : candidates.front();
}

struct Key {
  int device;
  bool timed;
  uint64_t generation;
  GemmDesc desc;
  bool operator==(const Key& other) const {
    return device == other.device && timed == other.timed && generation == other.generation && desc == other.desc;
  }
};
struct KeyHash {
  size_t operator()(const Key& key) const {
    return (HashOf(key.desc) * 31 + 2 * static_cast<size_t>(key.device) + key.timed) * 31 + key.generation;
  }
};

// What was prepared, by device and description. Nothing is removed, so what Find returns stays good.
class Cache {
 public:
  const Prepared* Find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : found->second.get();
  }
  // Keeps the one that is there already.
  const Prepared* Add(const Key& key, std::unique_ptr<const Prepared> prepared) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return entries_.emplace(key, std::move(prepared)).first->second.get();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<Key, std::unique_ptr<const Prepared>, KeyHash> entries_;
};

Cache& Preparations() {
  static auto* cache = new Cache;  // never destroyed: threads may outlive statics
  return *cache;
}

// The operation of `prepared` with the pointers of this call: one for each thread, since calls on several threads set
// different pointers.
cublasLtMatmulDesc_t OperationOf(Calls& calls, const Prepared* prepared, const GemmArgs& args) {
  thread_local std::unordered_map<const Prepared*, Owned<cublasLtMatmulDesc_t>> operations;
  if (const auto found = operations.find(prepared); found != operations.end()) {
    SetPointers(calls, found->second.get(), prepared->problem.plan, args);
    return found->second.get();
  }
  auto made = MakeOperation(calls, prepared->problem.plan, args);
  return calls.ok() ? operations.emplace(prepared, std::move(made)).first->second.get() : nullptr;
}

// Copies scales that need it (ScalePadding) to the end of the workspace, and makes the arguments point there.
cudaError_t PadScales(const ScalePadding& padding, GemmArgs* args, void* workspace, cudaStream_t stream) {
  if (padding.bytes() == 0) return cudaSuccess;
  const float*& scales = args->lhs_scaling == Scaling::kBlock128x128 ? args->lhs_scale_inv : args->rhs_scale_inv;
  void* padded = static_cast<char*>(workspace) + kWorkspaceBytes - padding.bytes();
  const float* given = std::exchange(scales, static_cast<const float*>(padded));
  return cudaMemcpy2DAsync(padded, padding.pitch, given, padding.width, padding.width, padding.rows,
                           cudaMemcpyDeviceToDevice, stream);
}

// Queues the GEMM with what was prepared for its description. `keeps`: `prepared` stays, and so may its operation.
void Queue(Calls& calls, cublasLtHandle_t handle, const Prepared& prepared, bool keeps, GemmArgs args, void* workspace,
           cudaStream_t stream) {
  const Problem& problem = prepared.problem;
  if (const OwnKernel* own = OwnKernelOf(prepared.algorithm, problem.desc)) {
    calls.Ok(own->name, own->launch(args, stream));
    return;
  }
  if (args.amax != nullptr) {  // the epilogue takes a maximum with what is there
    calls.Ok("cudaMemsetAsync", cudaMemsetAsync(args.amax, 0, sizeof(float), stream));
  }
  calls.Ok("cudaMemcpy2DAsync", PadScales(ScalePadding(problem.desc), &args, workspace, stream));
  if (!calls.ok()) return;
  Owned<cublasLtMatmulDesc_t> made = keeps ? Owned<cublasLtMatmulDesc_t>(nullptr, calls.lt.desc_destroy)
                                           : MakeOperation(calls, problem.plan, args);
  cublasLtMatmulDesc_t operation = keeps ? OperationOf(calls, &prepared, args) : made.get();
  if (calls.ok()) Multiply(calls, handle, operation, problem, args, prepared.algorithm, workspace, stream);
}

}  // namespace

AlgorithmTable& Algorithms() {
  static auto* table = new AlgorithmTable;
  return *table;
}

bool LoadAlgorithm(const AlgorithmKey& key, const Choice& choice) {
  const bool loaded = Algorithms().Load(key, choice);
  generation += loaded;
  return loaded;
}

void SetTimed(bool enabled) { timed = enabled; }

Status Launch(const GemmArgs& args, void* workspace, cudaStream_t stream) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return {Status::kInternal, std::string("cudaGetDevice: ") + cudaGetErrorString(error)};
  }
  const Key key{device, timed.load(), generation.load(), DescOf(args)};
  const Prepared* prepared = Preparations().Find(key);
  std::optional<GemmPlan> plan;
  if (prepared == nullptr) {
    auto planned = MakePlan(key.desc);
    if (const auto* reason = std::get_if<std::string>(&planned)) return {Status::kUnsupported, *reason};
    plan = std::get<GemmPlan>(planned);
  }
  std::string load_error;
  cublasLtHandle_t handle = HandleOfDevice(device, &load_error);
  if (handle == nullptr) return {Status::kInternal, load_error};

  Calls calls;
  const auto result = [&] {
    return calls.ok() ? Status{}
                      : Status{calls.status().code, calls.status().message + " (" + ToString(key.desc) + ")"};
  };
  if (prepared == nullptr) {
    auto made = std::make_unique<Prepared>(Prepared{Problem(calls, key.desc, *plan)});
    if (!calls.ok()) return result();
    bool final = false;
    made->algorithm = ChooseAlgorithm(calls, handle, device, made->problem, args, stream, &final);
    if (!calls.ok()) return result();
    if (!final) {  // another thread is still choosing: this once with the heuristic's first
      Queue(calls, handle, *made, /*keeps=*/false, args, workspace, stream);
      return result();
    }
    prepared = Preparations().Add(key, std::move(made));
  }
  Queue(calls, handle, *prepared, /*keeps=*/true, args, workspace, stream);
  return result();
}

}  // namespace te_jax::gemm
