// In which order the blocks of the norm kernel (norm.cu) do what: plain C++, tested on the host.
#ifndef TE_JAX_KERNELS_NORM_SCHEDULE_H_
#define TE_JAX_KERNELS_NORM_SCHEDULE_H_

#include <algorithm>
#include <cstdint>

#include "csrc/core/scale.h"
#include "csrc/kernels/workspace.h"

namespace te_jax::kernels {

// What one kernel does of a norm, in the order in which its blocks take it: `row_tasks` blocks find the statistics of
// a strip of kTileRows rows, `tiles` blocks write it. Strips are written `lead` strips behind, while the L2 cache has
// what the statistics have read.
struct NormSchedule {
  uint32_t strips;
  uint32_t row_tasks, tiles;  // of a strip
  uint32_t lead;              // strips
  int log2_row_threads;       // of the threads that share a row
};

struct NormTask {
  bool writes;
  uint32_t index;  // of the row task or the tile
};

// Task number `ticket`: the row tasks of `lead` strips; then those of a strip and the tiles of another, mixed evenly,
// for memory is read by the ones and written by the others; then the tiles that are left.
TE_JAX_HOST_DEVICE inline NormTask TaskOf(uint32_t ticket, const NormSchedule& schedule, uint32_t lead) {
  const uint32_t row_tasks = schedule.row_tasks, tiles = schedule.tiles, per_strip = row_tasks + tiles;
  if (ticket < lead * row_tasks) return {false, ticket};
  ticket -= lead * row_tasks;
  const uint32_t mixed = schedule.strips - lead, strip = ticket / per_strip;
  if (strip >= mixed) return {true, mixed * tiles + ticket - mixed * per_strip};
  const uint32_t place = ticket - strip * per_strip;
  const uint32_t before = place * row_tasks / per_strip;  // row tasks
  const bool reads = (place + 1) * row_tasks / per_strip != before;
  if (reads) return {false, (strip + lead) * row_tasks + before};
  return {true, strip * tiles + place - before};
}

// `held` columns of a row stay in the registers of each of the threads that share it, of `threads` of a block.
inline NormSchedule MakeSchedule(int64_t rows, int64_t cols, int held, int threads) {
  constexpr uint32_t kRunning = 132 * 4;  // blocks that an H200 runs at once: a strip is written so many tasks later
  NormSchedule schedule{};
  schedule.log2_row_threads = 5;
  while ((1 << schedule.log2_row_threads) < threads && (int64_t{held} << schedule.log2_row_threads) < cols) {
    ++schedule.log2_row_threads;
  }
  schedule.strips = static_cast<uint32_t>(NumRowTiles(rows));
  schedule.row_tasks = static_cast<uint32_t>((kTileRows << schedule.log2_row_threads) / threads);
  schedule.tiles = static_cast<uint32_t>(NumColTiles(cols));
  const uint32_t per_strip = schedule.row_tasks + schedule.tiles;
  schedule.lead = std::min(schedule.strips, 1 + (kRunning + per_strip - 1) / per_strip);
  return schedule;
}

}  // namespace te_jax::kernels

#endif  // TE_JAX_KERNELS_NORM_SCHEDULE_H_
