#include "csrc/comm/exchange.h"

#include <algorithm>

namespace te_jax::comm {

using std::chrono::milliseconds;

std::optional<std::string> LocalBoard::Put(const std::string& key, const std::string& value) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!values_.emplace(key, value).second) return "it was written before";
  changed_.notify_all();
  return std::nullopt;
}

std::optional<std::string> LocalBoard::Get(const std::string& key, milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto there = [&] { return values_.count(key) != 0; };
  if (!changed_.wait_for(lock, timeout, there)) return std::nullopt;
  return values_.at(key);
}

void LocalBoard::Remove(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  values_.erase(key);
}

size_t LocalBoard::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return values_.size();
}

std::string Exchange::Key(uint64_t number, int rank) const {
  return "te_jax/" + group_ + "/" + std::to_string(number) + "/" + std::to_string(rank);
}

std::variant<std::vector<std::string>, std::string> Exchange::All(const std::string& what, const std::string& mine,
                                                                  milliseconds timeout) {
  const std::string who = "rank " + std::to_string(rank_) + " of " + group_;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const uint64_t number = number_++;
  if (const auto why = board_.Put(Key(number, rank_), what + "\n" + mine)) {
    return who + " can't say that it is at \"" + what + "\": " + *why +
           " (do two meshes of one shape have their devices in different orders?)";
  }
  std::vector<std::string> all;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) {
      all.push_back(mine);
      continue;
    }
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now());
    const auto value = board_.Get(Key(number, rank), std::max(left, milliseconds(1)));
    if (!value.has_value()) {
      return who + " waited " + std::to_string(timeout.count()) + " ms for rank " + std::to_string(rank) + " at \"" +
             what + "\"";
    }
    const size_t end = value->find('\n');
    if (value->substr(0, end) != what) {
      return who + " is at \"" + what + "\", rank " + std::to_string(rank) + " at \"" + value->substr(0, end) +
             "\": ranks have to make the same calls in the same order";
    }
    all.push_back(value->substr(end + 1));
  }
  // Everybody is here, so everybody has read what was said before.
  if (number > 0) board_.Remove(Key(number - 1, rank_));
  return all;
}

}  // namespace te_jax::comm
