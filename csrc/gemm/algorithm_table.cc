#include "csrc/gemm/algorithm_table.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace te_jax::gemm {
namespace {

constexpr char kDigits[] = "0123456789abcdef";
constexpr size_t kDigitsPerWord = 16;
constexpr uint64_t kOwn = ~uint64_t{0};  // first word
constexpr float kWorthwhile = 0.99f;  // of the first candidate's time

}  // namespace

std::string ToHex(const AlgorithmBlob& blob) {
  std::string text;
  for (uint64_t word : blob) {
    for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(word >> shift) & 0xf];
  }
  return text;
}

std::optional<AlgorithmBlob> FromHex(const std::string& text) {
  AlgorithmBlob blob{};
  if (text.size() != blob.size() * kDigitsPerWord) return std::nullopt;
  for (size_t i = 0; i < text.size(); ++i) {
    const char* digit = std::find(kDigits, kDigits + kDigitsPerWord, text[i]);
    if (digit == kDigits + kDigitsPerWord) return std::nullopt;
    uint64_t& word = blob[i / kDigitsPerWord];
    word = (word << 4) | static_cast<uint64_t>(digit - kDigits);
  }
  return blob;
}

AlgorithmBlob BlobOf(const OwnAlgorithm& own) { return {kOwn, own.kernel, own.version}; }

std::optional<OwnAlgorithm> OwnOf(const AlgorithmBlob& blob) {
  const OwnAlgorithm own{static_cast<uint32_t>(blob[1]), static_cast<uint32_t>(blob[2])};
  return blob == BlobOf(own) ? std::optional(own) : std::nullopt;
}

const char* NameOf(Choice::Source source) {
  switch (source) {
    case Choice::kTimed: return "timed";
    case Choice::kLoaded: return "loaded";
    case Choice::kFirst: return "first";
  }
  return "";
}

std::optional<Choice> AlgorithmTable::Get(const AlgorithmKey& key, std::chrono::milliseconds patience,
                                          const std::function<Choice(const Choice* loaded)>& make) {
  std::unique_lock<std::mutex> lock(mutex_);
  Entry& entry = entries_[key];  // a map: it stays where it is
  if (entry.state == kBusy) {
    if (!done_.wait_for(lock, patience, [&entry] { return entry.state == kReady; })) return std::nullopt;
  }
  if (entry.state == kReady) return entry.choice;
  entry.state = kBusy;
  const Choice loaded = entry.choice;
  const bool is_loaded = entry.loaded;
  lock.unlock();
  Choice made = make(is_loaded ? &loaded : nullptr);
  lock.lock();
  entry.choice = std::move(made);
  entry.state = kReady;
  done_.notify_all();
  return entry.choice;
}

bool AlgorithmTable::Load(const AlgorithmKey& key, Choice choice) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[key];
  const bool known = entry.state == kReady || entry.loaded;
  if (entry.state == kBusy || (known && entry.choice.algorithm == choice.algorithm)) return false;
  choice.source = Choice::kLoaded;
  entry.choice = std::move(choice);
  entry.loaded = true;
  entry.state = kUnseen;
  return true;
}

std::vector<std::pair<AlgorithmKey, Choice>> AlgorithmTable::All() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<AlgorithmKey, Choice>> all;
  for (const auto& [key, entry] : entries_) {
    if (entry.state == kReady || (entry.state == kUnseen && entry.loaded)) all.emplace_back(key, entry.choice);
  }
  return all;
}

float Median(std::vector<float> values) {
  if (values.empty()) return std::numeric_limits<float>::infinity();
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

size_t Fastest(const std::vector<float>& times) {
  const auto fastest = std::min_element(times.begin(), times.end());
  return fastest != times.end() && *fastest < kWorthwhile * times.front()
             ? static_cast<size_t>(fastest - times.begin())
             : 0;
}

std::vector<size_t> Finalists(const std::vector<float>& times, size_t count) {
  std::vector<size_t> order(times.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&times](size_t a, size_t b) { return times[a] < times[b]; });
  order.resize(std::min(count, order.size()));
  if (!times.empty() && std::find(order.begin(), order.end(), size_t{0}) == order.end()) order.push_back(0);
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace te_jax::gemm
