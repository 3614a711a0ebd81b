// A place to time a GEMM in: a stream and memory that belong to no one else.
#ifndef TE_JAX_GEMM_BENCH_H_
#define TE_JAX_GEMM_BENCH_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "csrc/core/args.h"
#include "csrc/gemm/plan.h"

namespace te_jax::gemm {

// Operands and results of a GEMM on the current device. All of it goes back to the device when a Bench is destroyed:
// XLA and NCCL allocate what XLA's own pool has left over, and there may be little of that. For the same reason nothing
// is taken if little would be left. An error is kept in error(), never in the runtime, where the next launch would find
// it.
class Bench {
 public:
  // `args` says what is wanted; its pointers aren't read.
  Bench(const GemmDesc& desc, const GemmArgs& args);
  ~Bench();
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  const std::string& error() const { return error_; }  // empty if there was none
  const GemmArgs& args() const { return args_; }       // with pointers into memory of this Bench

  // Queues run i on `stream`; false if it can't be.
  using Launch = std::function<bool(size_t i, void* workspace, cudaStream_t stream)>;

  // The median time in us of launch(i) for each i in `which`, taken in turns and from memory; infinity for one that
  // fails, and for all if error().
  std::vector<float> Times(const std::vector<size_t>& which, int rounds, const Launch& launch);

 private:
  bool Ok(cudaError_t error);
  bool Allocate(size_t bytes);
  void Place(const GemmDesc& desc);
  void Fill(const GemmDesc& desc);
  template <class T>
  void Take(T*& pointer, size_t bytes);

  GemmArgs args_;
  cudaStream_t stream_ = nullptr;
  cudaMemPool_t pool_ = nullptr;
  void* memory_ = nullptr;
  size_t used_ = 0;
  void* workspace_ = nullptr;
  void* flush_ = nullptr;
  std::vector<cudaEvent_t> events_;
  std::string error_;
};

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_BENCH_H_
