// How the threads of one host find the channel of their call. Programs may run several times at once and do independent
// calls in different orders on different devices, so a channel of a group's own, in which every rank makes the same
// calls in the same order, isn't there. What all ranks of a call agree on is the call site (who owns a HostMeetings), the
// run of the program, the group, and how often the rank has been here in this run: calls of one site and run follow each
// other on every rank. Each such call gets a channel of its own.
#ifndef TE_JAX_COMM_HOST_MEETING_H_
#define TE_JAX_COMM_HOST_MEETING_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/comm/host_channel.h"

namespace te_jax::comm {

class HostMeetings {
 public:
  struct Call {
    int64_t run = 0;
    int32_t group = 0;
    int rank = 0;
    uint32_t number = 0;  // of the rank's call in this run, from 0
    std::shared_ptr<HostChannel> channel;
  };

  // The channel of the next call of `rank`. Has to be given back to Leave.
  Call Join(int64_t run, int32_t group, int rank, int ranks, std::chrono::milliseconds timeout);
  void Leave(const Call& call);

  // Calls that a rank has joined and that not every rank has left.
  size_t open() const;

 private:
  struct Meeting {
    std::shared_ptr<HostChannel> channel;
    int left = 0;
  };
  struct Run {
    uint32_t first = 0;            // the number of meetings.front()
    std::vector<uint32_t> joined;  // by rank: how many calls
    std::deque<Meeting> meetings;
  };

  mutable std::mutex mutex_;
  std::map<std::pair<int64_t, int32_t>, Run> runs_;  // by run and group; one whose ranks are level is forgotten
};

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_HOST_MEETING_H_
