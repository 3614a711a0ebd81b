// Checks schedules of collective matmuls without running them: what each rank's lanes do is a graph (order within a
// lane, waits of one lane for the other, flags), and of two steps that touch the same memory, one of them writing, one
// must come after the other in it. Holds for every speed of every lane, which no run can show.
#ifndef TE_JAX_TESTS_HAPPENS_BEFORE_H_
#define TE_JAX_TESTS_HAPPENS_BEFORE_H_

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/comm/schedule.h"

namespace te_jax::comm {

using Call = std::vector<std::vector<Step>>;  // rank -> steps

class HappensBefore {
 public:
  // `in_order`: as if a rank had one lane, which runs its steps as they are listed.
  HappensBefore(const std::vector<Problem>& problems, const std::vector<Call>& calls, bool in_order = false)
      : problems_(problems), calls_(calls), in_order_(in_order) {
    for (size_t call = 0; call < calls.size(); ++call) {
      for (size_t rank = 0; rank < calls[call].size(); ++rank) AddCall(call, static_cast<int>(rank));
    }
    ConnectFlags();
    Close();
  }

  // "" or what can't be: a wait for something that itself waits, or memory that two steps may touch at once.
  std::string Problems() const {
    if (deadlock_) return "deadlock";
    std::map<std::tuple<Place, int, int, int>, std::vector<Touch>> touches;
    for (size_t node = 0; node < nodes_.size(); ++node) {
      const Node& n = nodes_[node];
      const Accesses found = AccessesOf(problems_[n.call], n.rank, StepOf(n));
      for (const Area& area : found.reads) touches[KeyOf(area)].push_back({node, area.rows, false});
      for (const Area& area : found.writes) touches[KeyOf(area)].push_back({node, area.rows, true});
    }
    for (const auto& [key, all] : touches) {
      for (size_t i = 0; i < all.size(); ++i) {
        for (size_t j = i + 1; j < all.size(); ++j) {
          if (Conflict(all[i], all[j])) return Describe(all[i].node, all[j].node);
        }
      }
    }
    return "";
  }

  size_t size() const { return nodes_.size(); }

 private:
  struct Node {
    size_t call;
    int rank;
    size_t step;
  };
  struct Touch {
    size_t node;
    Rows rows;
    bool writes;
  };

  static std::tuple<Place, int, int, int> KeyOf(const Area& area) {
    return {area.place, area.owner, area.block, area.place == Place::kSlot ? area.parity : 0};
  }

  const Step& StepOf(const Node& node) const { return calls_[node.call][node.rank][node.step]; }

  void AddCall(size_t call, int rank) {
    const std::vector<Step>& steps = calls_[call][rank];
    const size_t first = nodes_.size();
    for (size_t i = 0; i < steps.size(); ++i) {
      const size_t node = nodes_.size();
      nodes_.push_back({call, rank, i});
      edges_.emplace_back();
      const int lane = in_order_ ? 0 : static_cast<int>(steps[i].lane);
      if (auto last = last_.find({rank, lane}); last != last_.end()) edges_[last->second].push_back(node);
      last_[{rank, lane}] = node;
      if (steps[i].after >= 0) edges_[first + static_cast<size_t>(steps[i].after)].push_back(node);
      if (steps[i].action == Action::kPost) posts_[{call, rank, steps[i].peer, steps[i].chunk}] = node;
    }
  }

  void ConnectFlags() {
    for (size_t node = 0; node < nodes_.size(); ++node) {
      const Step& step = StepOf(nodes_[node]);
      if (step.action != Action::kAwait) continue;
      const auto post = posts_.find({nodes_[node].call, step.peer, nodes_[node].rank, step.chunk});
      if (post == posts_.end()) {
        deadlock_ = true;
      } else {
        edges_[post->second].push_back(node);
      }
    }
  }

  // before_[n]: the set of nodes that n comes after.
  void Close() {
    const size_t words = (nodes_.size() + 63) / 64;
    before_.assign(nodes_.size(), std::vector<uint64_t>(words));
    std::vector<int> waiting(nodes_.size());
    for (const auto& targets : edges_) {
      for (const size_t target : targets) ++waiting[target];
    }
    std::vector<size_t> ready;
    for (size_t node = 0; node < nodes_.size(); ++node) {
      if (waiting[node] == 0) ready.push_back(node);
    }
    size_t done = 0;
    for (; done < ready.size(); ++done) {
      const size_t node = ready[done];
      for (const size_t target : edges_[node]) {
        for (size_t w = 0; w < words; ++w) before_[target][w] |= before_[node][w];
        before_[target][node / 64] |= uint64_t{1} << (node % 64);
        if (--waiting[target] == 0) ready.push_back(target);
      }
    }
    if (done != nodes_.size()) deadlock_ = true;
  }

  bool Before(size_t a, size_t b) const { return before_[b][a / 64] >> (a % 64) & 1; }

  bool Conflict(const Touch& a, const Touch& b) const {
    const bool overlap = a.rows.begin < b.rows.end && b.rows.begin < a.rows.end;
    return a.node != b.node && overlap && (a.writes || b.writes) && !Before(a.node, b.node) && !Before(b.node, a.node);
  }

  std::string Describe(size_t a, size_t b) const {
    const auto text = [this](size_t node) {
      const Node& n = nodes_[node];
      return "call " + std::to_string(n.call) + " rank " + std::to_string(n.rank) + " step " + std::to_string(n.step);
    };
    return "at once: " + text(a) + ", " + text(b);
  }

  const std::vector<Problem>& problems_;
  const std::vector<Call>& calls_;
  const bool in_order_;
  bool deadlock_ = false;
  std::vector<Node> nodes_;
  std::vector<std::vector<size_t>> edges_;
  std::vector<std::vector<uint64_t>> before_;
  std::map<std::pair<int, int>, size_t> last_;                    // (rank, lane) -> node
  std::map<std::tuple<size_t, int, int, int>, size_t> posts_;  // (call, sender, receiver, chunk) -> node
};

}  // namespace te_jax::comm

#endif  // TE_JAX_TESTS_HAPPENS_BEFORE_H_
