// Every task of a norm is done once, and none waits for one that comes later.
#include "csrc/kernels/norm_schedule.h"

#include <cstdint>
#include <vector>

#include "csrc/tests/check.h"

namespace te_jax::kernels {
namespace {

void CheckSchedule(int64_t rows, int64_t cols, bool unseeded) {
  const NormSchedule schedule = MakeSchedule(rows, cols, /*held=*/64, /*threads=*/256);
  EXPECT(schedule.lead >= 1 && schedule.lead <= schedule.strips);
  EXPECT(schedule.row_tasks * (256u >> schedule.log2_row_threads) == kTileRows);
  const uint32_t row_tasks = schedule.strips * schedule.row_tasks, tiles = schedule.strips * schedule.tiles;
  std::vector<uint32_t> done(schedule.strips);
  uint32_t next_row_task = 0, next_tile = 0;
  for (uint32_t ticket = 0; ticket < row_tasks + tiles; ++ticket) {
    const NormTask task = TaskOf(ticket, schedule, unseeded ? schedule.strips : schedule.lead);
    if (task.writes) {
      EXPECT(task.index == next_tile++);
      EXPECT(done[task.index / schedule.tiles] == schedule.row_tasks);
      EXPECT(!unseeded || next_row_task == row_tasks);
    } else {
      EXPECT(task.index == next_row_task++);
      ++done[task.index / schedule.row_tasks];
    }
  }
  EXPECT(next_row_task == row_tasks && next_tile == tiles);
}

TEST(EveryTaskOnceAndNoneWaitsForALaterOne) {
  for (const int64_t rows : {1, 16, 128, 129, 1000, 2048, 8192, 20000}) {
    for (const int64_t cols : {16, 64, 272, 1024, 4096, 5120, 16384, 40000}) {
      for (const bool unseeded : {false, true}) CheckSchedule(rows, cols, unseeded);
    }
  }
}

TEST(AStripIsWrittenLongAfterItsStatistics) {
  const NormSchedule schedule = MakeSchedule(8192, 4096, 64, 256);
  std::vector<uint32_t> finished(schedule.strips);
  for (uint32_t ticket = 0; ticket < schedule.strips * (schedule.row_tasks + schedule.tiles); ++ticket) {
    const NormTask task = TaskOf(ticket, schedule, schedule.lead);
    if (!task.writes) finished[task.index / schedule.row_tasks] = ticket;
    const uint32_t strip = task.index / schedule.tiles;
    if (task.writes && task.index % schedule.tiles == 0 && strip >= schedule.lead) {
      // At the end only tiles are left, which are fewer tasks.
      EXPECT(ticket - finished[strip] >= (strip + schedule.lead < schedule.strips ? 528u : 350u));
    }
  }
}

}  // namespace
}  // namespace te_jax::kernels

TEST_MAIN
