// Collective matmuls: what each rank does, in which order. Pure functions without a thread, a stream or an address, so
// that every schedule can be checked for 2 to 8 ranks on any machine (csrc/tests/happens_before.h); the CPU handler and
// the CUDA one carry out the same steps.
//
// Blocks are rows of tokens: with t ranks, block b has the rows that rank b owns. A rank multiplies other ranks' blocks
// first and its own last (reduce-scatter), or its own first (all-gather), so that what travels does so under a GEMM.
#ifndef TE_JAX_COMM_SCHEDULE_H_
#define TE_JAX_COMM_SCHEDULE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace te_jax::comm {

constexpr int kMaxRanks = 16;
constexpr int kMaxChunks = 16;

enum class Collective : uint8_t {
  kMatmulReduceScatter,  // x [M, K/t] w [K/t, N] -> sum over ranks, each keeping its block [M/t, N]
  kAllGatherMatmul,      // x [M/t, K] of all ranks, w [K, N/t] -> [M, N/t]
};

struct Problem {
  Collective collective = Collective::kMatmulReduceScatter;
  int ranks = 2;
  int64_t block_rows = 0;     // M / t, at least 1
  int chunks = 1;             // a block that travels is cut into so many pieces at most
  int64_t granularity = 128;  // rows; all pieces but the last are a multiple of it: the height of a GEMM's tile
  bool direct = false;        // reduce-scatter: a GEMM writes into the owner's slot itself; all-gather: not used
  bool keep = false;          // all-gather: the gathered operand is a result too (the backward pass needs it)
  bool sum = false;           // reduce-scatter: two ranks' results are added by a kernel, as those of more ranks are
};

// Why there is no schedule for this; nothing if there is one.
std::optional<std::string> WhyNot(const Problem& problem);

struct Rows {
  int64_t begin = 0, end = 0;  // within a block
};

// The pieces of a block, none of them empty. At most `chunks`, fewer where rows are few.
std::vector<Rows> Pieces(int64_t rows, int chunks, int64_t granularity);

enum class Place : uint8_t {
  kOperand,  // x of this call. Block: of the result (reduce-scatter) or the rank's own (all-gather)
  kStaging,  // partial results on their way. Block: whose they are
  kSlot,     // of the owner's arena, twice (parity). Block: who sent it
  kPartial,  // own partial result in float32, where a kernel adds the others to it. Block: the owner
  kResult,   // Block: the owner (reduce-scatter) or whose rows they are (all-gather)
  kKept,     // gathered operand. Block: who sent it
};

struct Area {
  Place place = Place::kOperand;
  int owner = 0;  // the rank in whose memory it is
  int block = 0;
  Rows rows;
  int parity = 0;  // of slots
};

enum class Action : uint8_t {
  kStart,     // everything earlier in the program is done: the operand is there
  kMultiply,  // to = from w (+ with): `with` is a partial result of the peer's; bias if it is the last sum
  kPush,      // to = from, in a peer's memory
  kPost,      // tells `peer` that `chunk` has arrived: its flag (this rank, chunk) becomes the epoch
  kAwait,     // until the own flag (peer, chunk) has reached the epoch: `from` has arrived
  kReduce,    // to = from + all peers' slots (`with` is one of them), in the order of ranks, in float32, + bias
  kKeep,      // to = from, in own memory
  kFinish,    // both lanes are done
};

enum class Lane : uint8_t { kCompute, kCopy };  // steps of a lane run one after another

struct Step {
  explicit Step(Action what, Lane where = Lane::kCompute) : action(what), lane(where) {}

  Action action;
  Lane lane;
  Area from, to;
  std::optional<Area> with;
  int peer = -1;
  int chunk = 0;
  int after = -1;  // the step of the other lane, by index, that must be done before this one
};

// Steps of `rank` in its call number `epoch` of a group's channel, in the order in which they are given to their lanes.
// Run in exactly that order, one at a time, they don't deadlock either.
//
// Slots have two parities. That is enough: a rank starts call e + 2 when it has finished e + 1, for which it needed
// something of every peer, which that peer sent when it had finished e.
std::vector<Step> MakeSchedule(const Problem& problem, int rank, uint32_t epoch);

// What a step reads and writes of the memory that several steps, lanes or ranks share.
struct Accesses {
  std::vector<Area> reads, writes;
};
Accesses AccessesOf(const Problem& problem, int rank, const Step& step);

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_SCHEDULE_H_
