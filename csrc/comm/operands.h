// What the steps of a schedule are in the memory of one rank's call: GEMMs, copies and sums, with their addresses. The
// CPU handler and the CUDA one carry out the same ones, each with an arena of its own kind.
#ifndef TE_JAX_COMM_OPERANDS_H_
#define TE_JAX_COMM_OPERANDS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/comm/schedule.h"
#include "csrc/core/args.h"

namespace te_jax::comm {

struct CollectiveGemm {
  Problem problem;
  // The product of one rank without the collective: m is M (all rows) for a reduce-scatter and block_rows for an
  // all-gather, lhs the rank's operand, out its result. The bias is added once, to the final sums.
  GemmArgs gemm;
  // Rows are [batch, rows], and a block is a part of the second: `batch` runs of block_rows / batch rows.
  int64_t batch = 1;
  void* kept = nullptr;             // all-gather with problem.keep: [M, K]
  float* kept_scale_inv = nullptr;  // FP8 then: [ranks], or of blocks [k blocks, M]
  uint64_t timeout_ns = 120'000'000'000;
};

// The memory of a rank's group that is not its call's operands and results.
class Arena {
 public:
  virtual ~Arena() = default;
  virtual char* Slot(int owner, int source, int parity) = 0;        // a block
  virtual float* SlotScale(int owner, int source, int parity) = 0;  // scale_inv of what is in the slot
  virtual char* Staging(int owner) = 0;                             // a block
  virtual char* Partial() = 0;                                      // a block in float32
};

// Why there is nothing for this call; nothing if there is. In 1x128 blocks (of lhs) a run of rows has its scales in one
// piece of memory only if it is all rows; those of a piece are copied together first, those of a batch are not.
std::optional<std::string> WhyNot(const CollectiveGemm& call);

// The dtype of partial results on their way.
DType TravellingDType(const GemmArgs& gemm);

// Bytes of a block on its way, which slots have to hold: in blocks with its scales behind it.
size_t SlotBytes(const CollectiveGemm& call);

// The GEMMs of a kMultiply step: one for each run of rows that is in one piece in every operand. Those that write the
// result have the call's `amax`, if it has one: their maximum is the call's.
std::vector<GemmArgs> ProductsOf(const CollectiveGemm& call, int rank, const Step& step, Arena& arena);

struct Transfer {
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
  size_t rows = 1, to_pitch = 0, from_pitch = 0;  // so often, a pitch apart
};

// What comes before the GEMM of a kMultiply step: a copy that makes one piece of its rows' scales.
std::optional<Transfer> ScalesOf(const CollectiveGemm& call, const Step& step, Arena& arena);

// The copies of a kPush or kKeep step, scales included.
std::vector<Transfer> TransfersOf(const CollectiveGemm& call, int rank, const Step& step, Arena& arena);

// The sum of a kReduce step. `amax` as above.
SumPartialsArgs SumOf(const CollectiveGemm& call, int rank, const Step& step, Arena& arena);

// Where what a kAwait step waits for will be. One piece.
Transfer ArrivalOf(const CollectiveGemm& call, const Step& step, Arena& arena);

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_OPERANDS_H_
