// Which algorithm was chosen for which GEMM, and how one is chosen from measured times. Pure host code without a CUDA
// call, so that it can be tested anywhere.
#ifndef TE_JAX_GEMM_ALGORITHM_TABLE_H_
#define TE_JAX_GEMM_ALGORITHM_TABLE_H_

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace te_jax::gemm {

// The 64 bytes of a cublasLtMatmulAlgo_t, or a kernel of ours (own_kernels.h).
using AlgorithmBlob = std::array<uint64_t, 8>;

// A kernel of ours as an algorithm. A kernel that adds up in another order than before is another version, so that a
// choice that was kept for the old one isn't taken for it. No cublasLtMatmulAlgo_t starts like it.
struct OwnAlgorithm {
  uint32_t kernel = 0, version = 0;
};
AlgorithmBlob BlobOf(const OwnAlgorithm& own);
std::optional<OwnAlgorithm> OwnOf(const AlgorithmBlob& blob);

// 128 hexadecimal digits, and back; nullopt for anything else.
std::string ToHex(const AlgorithmBlob& blob);
std::optional<AlgorithmBlob> FromHex(const std::string& text);

// The type of device and the description (ToString(GemmDesc)). Not the device's number: all GPUs of a kind choose the
// same, so that they compute the same.
struct AlgorithmKey {
  std::string device, gemm;
  bool operator<(const AlgorithmKey& other) const {
    return device != other.device ? device < other.device : gemm < other.gemm;
  }
};

struct Choice {
  enum Source { kTimed, kLoaded, kFirst };
  AlgorithmBlob algorithm{};
  Source source = kTimed;
  float time_us = 0.0f, first_us = 0.0f;  // of the chosen algorithm, and of the heuristic's first; 0: not known
  int candidates = 0;                     // that were timed
  std::string note;                       // why the heuristic's first was taken without timing
};
const char* NameOf(Choice::Source source);

// Choices by key. Each is made once, by one thread, while no lock is held.
class AlgorithmTable {
 public:
  // The choice for `key`. If there is none yet, or a loaded one that no one has looked at, this thread or another one
  // calls make(the loaded one or null) and all get its result. nullopt if the other one takes longer than `patience`:
  // waiting for ever could deadlock, if its device waited for work that this thread has still to queue on another.
  std::optional<Choice> Get(const AlgorithmKey& key, std::chrono::milliseconds patience,
                            const std::function<Choice(const Choice* loaded)>& make);

  // Takes a choice made elsewhere instead of what there is. False if that is the same or is being made.
  bool Load(const AlgorithmKey& key, Choice choice);

  // Everything that was chosen or loaded, in the order of the keys.
  std::vector<std::pair<AlgorithmKey, Choice>> All() const;

 private:
  enum State { kUnseen, kBusy, kReady };
  struct Entry {
    State state = kUnseen;
    bool loaded = false;
    Choice choice;
  };
  mutable std::mutex mutex_;
  std::condition_variable done_;
  std::map<AlgorithmKey, Entry> entries_;
};

// The median; the lower one of an even number. Infinity for none.
float Median(std::vector<float> values);

// The index of the algorithm to use, given a time for each candidate in the heuristic's order: the fastest if it beats
// the first by more than 1%, otherwise the first, so that noise doesn't choose.
size_t Fastest(const std::vector<float>& times);

// The indices of the `count` fastest, and 0, in increasing order.
std::vector<size_t> Finalists(const std::vector<float>& times, size_t count);

}  // namespace te_jax::gemm

#endif  // TE_JAX_GEMM_ALGORITHM_TABLE_H_
