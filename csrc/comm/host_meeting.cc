#include "csrc/comm/host_meeting.h"

namespace te_jax::comm {

HostMeetings::Call HostMeetings::Join(int64_t run, int32_t group, int rank, int ranks,
                                      std::chrono::milliseconds timeout) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Run& calls = runs_[{run, group}];
  if (calls.joined.empty()) calls.joined.resize(static_cast<size_t>(ranks));
  const uint32_t number = calls.joined[static_cast<size_t>(rank)]++;
  while (number - calls.first >= calls.meetings.size()) {
    calls.meetings.push_back({std::make_shared<HostChannel>(ranks, timeout), 0});
  }
  return {run, group, rank, number, calls.meetings[number - calls.first].channel};
}

void HostMeetings::Leave(const Call& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = runs_.find({call.run, call.group});
  if (found == runs_.end()) return;
  Run& calls = found->second;
  const auto ranks = static_cast<int>(calls.joined.size());
  ++calls.meetings[call.number - calls.first].left;
  while (!calls.meetings.empty() && calls.meetings.front().left == ranks) {
    calls.meetings.pop_front();
    ++calls.first;
  }
  // Every rank has left all that any has joined: they would all start from 0 again. No one tells when a run has ended.
  if (calls.meetings.empty()) runs_.erase(found);
}

size_t HostMeetings::open() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t count = 0;
  for (const auto& [key, calls] : runs_) count += calls.meetings.size();
  return count;
}

}  // namespace te_jax::comm
