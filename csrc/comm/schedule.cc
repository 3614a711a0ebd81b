#include "csrc/comm/schedule.h"

#include <algorithm>

namespace te_jax::comm {
namespace {

// Collects the steps of one rank and remembers what the last one of the copy lane was.
class Builder {
 public:
  Builder(const Problem& problem, int rank, uint32_t epoch)
      : problem_(problem), rank_(rank), parity_(static_cast<int>(epoch & 1)),
        pieces_(Pieces(problem.block_rows, problem.chunks, problem.granularity)) {}

  std::vector<Step> Build() {
    Add(Step(Action::kStart));
    if (problem_.collective == Collective::kMatmulReduceScatter) {
      ReduceScatter();
    } else {
      AllGather();
    }
    Step finish(Action::kFinish);
    finish.after = last_copy_;
    Add(finish);
    return std::move(steps_);
  }

 private:
  int peer(int distance) const { return (rank_ + distance + problem_.ranks) % problem_.ranks; }
  Area Own(Place place, int block, Rows rows) const { return {place, rank_, block, rows, 0}; }
  Area Slot(int owner, int source, Rows rows) const { return {Place::kSlot, owner, source, rows, parity_}; }
  Rows Whole() const { return {0, problem_.block_rows}; }

  int Add(const Step& step) {
    steps_.push_back(step);
    const int index = static_cast<int>(steps_.size()) - 1;
    if (step.lane == Lane::kCopy) last_copy_ = index;
    return index;
  }

  int Multiply(const Area& from, const Area& to, std::optional<Area> with = std::nullopt) {
    Step step(Action::kMultiply);
    step.from = from, step.to = to, step.with = with;
    return Add(step);
  }

  void Push(const Area& from, const Area& to, int after) {
    Step step(Action::kPush, Lane::kCopy);
    step.from = from, step.to = to, step.peer = to.owner, step.after = after;
    Add(step);
  }

  void Post(int peer, int chunk, Lane lane) {
    Step step(Action::kPost, lane);
    step.peer = peer, step.chunk = chunk;
    Add(step);
  }

  void Await(int peer, int chunk) {
    Step step(Action::kAwait);
    step.from = Slot(rank_, peer, pieces_[chunk]), step.peer = peer, step.chunk = chunk;
    Add(step);
  }

  int chunks() const { return static_cast<int>(pieces_.size()); }

  void ReduceScatter() {
    for (int distance = 1; distance < problem_.ranks; ++distance) {
      const int owner = peer(distance);
      for (int c = 0; c < chunks(); ++c) {
        const Area x = Own(Place::kOperand, owner, pieces_[c]), slot = Slot(owner, rank_, pieces_[c]);
        if (problem_.direct) {
          Multiply(x, slot);
          Post(owner, c, Lane::kCompute);
        } else {
          const Area staged = Own(Place::kStaging, owner, pieces_[c]);
          Push(staged, slot, Multiply(x, staged));
          Post(owner, c, Lane::kCopy);
        }
      }
    }
    if (problem_.ranks == 2 && !problem_.sum) {
      AddPartialOfPeer();
    } else {
      SumPartials();
    }
  }

  // The GEMM takes what the peer sent as its C: one rounding, and no kernel that adds.
  void AddPartialOfPeer() {
    for (int c = 0; c < chunks(); ++c) {
      Await(peer(1), c);
      Multiply(Own(Place::kOperand, rank_, pieces_[c]), Own(Place::kResult, rank_, pieces_[c]),
               Slot(rank_, peer(1), pieces_[c]));
    }
  }

  void SumPartials() {
    Multiply(Own(Place::kOperand, rank_, Whole()), Own(Place::kPartial, rank_, Whole()));
    for (int c = 0; c < chunks(); ++c) {
      // The rank before this one has it as its first peer.
      for (int distance = 1; distance < problem_.ranks; ++distance) Await(peer(-distance), c);
      Step reduce(Action::kReduce);
      reduce.from = Own(Place::kPartial, rank_, pieces_[c]);
      reduce.to = Own(Place::kResult, rank_, pieces_[c]);
      reduce.with = Slot(rank_, peer(-1), pieces_[c]);
      reduce.chunk = c;
      Add(reduce);
    }
  }

  void AllGather() {
    for (int distance = 1; distance < problem_.ranks; ++distance) {
      for (int c = 0; c < chunks(); ++c) {
        Push(Own(Place::kOperand, rank_, pieces_[c]), Slot(peer(distance), rank_, pieces_[c]), /*after=*/0);
        Post(peer(distance), c, Lane::kCopy);
      }
    }
    Multiply(Own(Place::kOperand, rank_, Whole()), Own(Place::kResult, rank_, Whole()));
    for (int distance = 1; distance < problem_.ranks; ++distance) {
      const int source = peer(-distance);
      for (int c = 0; c < chunks(); ++c) {
        Await(source, c);
        Multiply(Slot(rank_, source, pieces_[c]), Own(Place::kResult, source, pieces_[c]));
      }
    }
    if (!problem_.keep) return;
    for (int distance = 0; distance < problem_.ranks; ++distance) {
      const int source = peer(-distance);
      Step keep(Action::kKeep);
      keep.from = distance == 0 ? Own(Place::kOperand, rank_, Whole()) : Slot(rank_, source, Whole());
      keep.to = Own(Place::kKept, source, Whole());
      Add(keep);
    }
  }

  const Problem& problem_;
  const int rank_, parity_;
  const std::vector<Rows> pieces_;
  std::vector<Step> steps_;
  int last_copy_ = -1;
};

}  // namespace

std::optional<std::string> WhyNot(const Problem& problem) {
  const auto outside = [](const char* what, int64_t got, int64_t low, int64_t high) {
    return std::string(what) + ": expected " + std::to_string(low) + " to " + std::to_string(high) + ", got " +
           std::to_string(got);
  };
  if (problem.ranks < 2 || problem.ranks > kMaxRanks) return outside("ranks", problem.ranks, 2, kMaxRanks);
  if (problem.chunks < 1 || problem.chunks > kMaxChunks) return outside("chunks", problem.chunks, 1, kMaxChunks);
  // A call in which nothing is sent would not keep the ranks within two calls of each other.
  if (problem.block_rows < 1) return outside("rows of a rank's block", problem.block_rows, 1, INT64_MAX);
  if (problem.granularity < 1) return outside("granularity", problem.granularity, 1, INT64_MAX);
  return std::nullopt;
}

std::vector<Rows> Pieces(int64_t rows, int chunks, int64_t granularity) {
  const int64_t even = (rows + chunks - 1) / chunks;
  const int64_t piece = (even + granularity - 1) / granularity * granularity;
  std::vector<Rows> pieces;
  for (int64_t begin = 0; begin < rows; begin += piece) pieces.push_back({begin, std::min(begin + piece, rows)});
  return pieces;
}

std::vector<Step> MakeSchedule(const Problem& problem, int rank, uint32_t epoch) {
  return Builder(problem, rank, epoch).Build();
}

Accesses AccessesOf(const Problem& problem, int rank, const Step& step) {
  Accesses found;
  const Rows whole{0, problem.block_rows};
  switch (step.action) {
    case Action::kStart:  // what comes before the call writes its operand and may do as it likes with old results
    case Action::kFinish:
      for (int block = 0; block < problem.ranks; ++block) {
        found.writes.push_back({Place::kOperand, rank, block, whole, 0});
        found.writes.push_back({Place::kResult, rank, block, whole, 0});
        found.writes.push_back({Place::kKept, rank, block, whole, 0});
      }
      break;
    case Action::kMultiply:
    case Action::kPush:
    case Action::kKeep:
      found.reads.push_back(step.from);
      if (step.with) found.reads.push_back(*step.with);
      found.writes.push_back(step.to);
      break;
    case Action::kReduce:
      found.reads.push_back(step.from);
      for (int source = 0; source < problem.ranks; ++source) {
        if (source != rank) found.reads.push_back({Place::kSlot, rank, source, step.with->rows, step.with->parity});
      }
      found.writes.push_back(step.to);
      break;
    case Action::kPost:
    case Action::kAwait:
      break;
  }
  return found;
}

}  // namespace te_jax::comm
