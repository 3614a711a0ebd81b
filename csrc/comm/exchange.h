// How ranks tell each other things on the host, once, before a group's first call: through a board on which everybody
// writes and reads, of this process or of all.
#ifndef TE_JAX_COMM_EXCHANGE_H_
#define TE_JAX_COMM_EXCHANGE_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace te_jax::comm {

class Board {
 public:
  virtual ~Board() = default;
  // Why it can't be written; nothing if it was.
  virtual std::optional<std::string> Put(const std::string& key, const std::string& value) = 0;
  // The value, as soon as it is there; nothing if it isn't in time.
  virtual std::optional<std::string> Get(const std::string& key, std::chrono::milliseconds timeout) = 0;
  virtual void Remove(const std::string& key) = 0;
};

// That of the threads of one process.
class LocalBoard : public Board {
 public:
  std::optional<std::string> Put(const std::string& key, const std::string& value) override;
  std::optional<std::string> Get(const std::string& key, std::chrono::milliseconds timeout) override;
  void Remove(const std::string& key) override;
  size_t size() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

// One rank's end of the exchanges of a group.
class Exchange {
 public:
  Exchange(Board& board, std::string group, int rank, int ranks)
      : board_(board), group_(std::move(group)), rank_(rank), ranks_(ranks) {}

  // What every rank says, in the order of ranks, once all have; or why not, naming the rank that didn't. All ranks have
  // to be at the same point of their programs, which `what` names.
  std::variant<std::vector<std::string>, std::string> All(const std::string& what, const std::string& mine,
                                                          std::chrono::milliseconds timeout);

 private:
  std::string Key(uint64_t number, int rank) const;

  Board& board_;
  const std::string group_;
  const int rank_, ranks_;
  uint64_t number_ = 0;
};

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_EXCHANGE_H_
