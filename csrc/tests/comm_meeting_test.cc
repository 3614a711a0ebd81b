// How ranks of one host find each other: by call site, run, group and number. Threads, under ThreadSanitizer.
#include "csrc/comm/host_meeting.h"

#include <atomic>
#include <functional>
#include <random>
#include <set>
#include <thread>

#include "csrc/comm/exchange.h"
#include "csrc/tests/check.h"

namespace te_jax::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTimeout(20000);

TEST(RanksOfOneCallMeet) {
  HostMeetings meetings;
  const auto first = meetings.Join(7, 0, 0, 2, kTimeout), again = meetings.Join(7, 0, 0, 2, kTimeout);
  const auto other_run = meetings.Join(8, 0, 0, 2, kTimeout), other_group = meetings.Join(7, 1, 0, 2, kTimeout);
  const auto peer = meetings.Join(7, 0, 1, 2, kTimeout);
  EXPECT(first.channel == peer.channel);
  const std::set<HostChannel*> all = {first.channel.get(), again.channel.get(), other_run.channel.get(),
                                      other_group.channel.get()};
  EXPECT_EQ(all.size(), size_t{4});
  EXPECT_EQ(meetings.open(), size_t{4});
}

TEST(WhatIsOverIsForgotten) {
  HostMeetings meetings;
  const HostChannel* last = nullptr;
  for (int round = 0; round < 3; ++round) {
    const auto a = meetings.Join(1, 0, 0, 2, kTimeout);
    meetings.Leave(a);  // a rank may leave before its peer comes, having got all it needs
    const auto ahead = meetings.Join(1, 0, 0, 2, kTimeout);
    const auto b = meetings.Join(1, 0, 1, 2, kTimeout);
    EXPECT(a.channel == b.channel);
    EXPECT(ahead.channel != b.channel);
    EXPECT(a.channel.get() != last);
    meetings.Leave(b);
    EXPECT_EQ(meetings.open(), size_t{1});
    const auto after = meetings.Join(1, 0, 1, 2, kTimeout);
    EXPECT(after.channel == ahead.channel);
    meetings.Leave(ahead);
    meetings.Leave(after);
    EXPECT_EQ(meetings.open(), size_t{0});
    last = after.channel.get();
  }
}

// Every rank joins the calls of its run in order, but ranks and runs are at different places all the time.
TEST(ManyRunsAtOnce) {
  constexpr int kRanks = 4, kRuns = 6, kCalls = 50;
  HostMeetings meetings;
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int run = 0; run < kRuns; ++run) {
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, run, rank] {
        std::minstd_rand random(static_cast<unsigned>(run * 16 + rank + 1));
        for (int call = 0; call < kCalls; ++call) {
          if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
          const auto joined = meetings.Join(run, run % 2, rank, kRanks, kTimeout);
          HostChannel& channel = *joined.channel;
          const int next = (rank + 1) % kRanks, previous = (rank + kRanks - 1) % kRanks;
          auto& slot = channel.Slot(next, rank, 0);  // a call that is mistaken for another shows here
          slot.assign(8, static_cast<std::byte>(run * kCalls + call));
          channel.Post(rank, next, 0, 1);
          failures += channel.Await(rank, previous, 0, 1).has_value();
          failures += channel.Slot(rank, previous, 0)[7] != static_cast<std::byte>(run * kCalls + call);
          meetings.Leave(joined);
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failures.load(), 0);
  EXPECT_EQ(meetings.open(), size_t{0});
}

// Exchanges

std::vector<std::string> OnAllRanks(int ranks, const std::function<std::string(int)>& body) {
  std::vector<std::string> results(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] { results[static_cast<size_t>(rank)] = body(rank); });
  }
  for (auto& thread : threads) thread.join();
  return results;
}

std::string TextOf(const std::variant<std::vector<std::string>, std::string>& answer) {
  if (const auto* why = std::get_if<std::string>(&answer)) return "error: " + *why;
  std::string text;
  for (const std::string& each : std::get<0>(answer)) text += each + " ";
  return text;
}

TEST(EverybodyHearsEverybody) {
  LocalBoard board;
  const auto said = OnAllRanks(4, [&](int rank) {
    Exchange exchange(board, "g", rank, 4);
    std::string text;
    for (int round = 0; round < 20; ++round) {
      text = TextOf(exchange.All("round", std::to_string(round * 10 + rank), kTimeout));
    }
    return text;
  });
  for (const std::string& each : said) EXPECT_CONTAINS(each, "190 191 192 193 ");
  EXPECT_EQ(board.size(), size_t{4});  // only what was said last
}

TEST(ARankThatIsMissing) {
  LocalBoard board;
  const auto said = OnAllRanks(2, [&](int rank) {  // of three
    return TextOf(Exchange(board, "devices 0 1 2", rank, 3).All("first call", "", milliseconds(50)));
  });
  EXPECT_CONTAINS(said[0], "error: rank 0 of devices 0 1 2 waited 50 ms for rank 2 at \"first call\"");
}

TEST(RanksAtDifferentPlaces) {
  LocalBoard board;
  const auto said = OnAllRanks(2, [&](int rank) {
    return TextOf(Exchange(board, "g", rank, 2).All(rank == 0 ? "ready" : "first call", "", kTimeout));
  });
  EXPECT_CONTAINS(said[0], "rank 0 of g is at \"ready\", rank 1 at \"first call\"");
  EXPECT_CONTAINS(said[1], "ranks have to make the same calls in the same order");
}

TEST(TwoDevicesOfOneRank) {
  LocalBoard board;
  Exchange one(board, "g", 0, 2), two(board, "g", 0, 2);
  EXPECT_CONTAINS(TextOf(one.All("x", "", milliseconds(1))), "waited 1 ms for rank 1");
  EXPECT_CONTAINS(TextOf(two.All("x", "", milliseconds(1))), "devices in different orders");
}

}  // namespace
}  // namespace te_jax::comm

int main() { return te_jax::testing::RunAll(); }
