// Where what is in a rank's arena: memory that its peers write into. Offsets only, the same on every rank.
#ifndef TE_JAX_COMM_ARENA_LAYOUT_H_
#define TE_JAX_COMM_ARENA_LAYOUT_H_

#include <cstddef>

#include "csrc/comm/schedule.h"

namespace te_jax::comm {

// From its start: flags [ranks][kMaxChunks], kFlagStride bytes each; kHead bytes of scratch; slots [parity][ranks], each
// after a head in which the sender's scale travels; staging [ranks]; the own partial result, in float32 at most twice
// the size of one on its way.
class ArenaLayout {
 public:
  static constexpr size_t kFlagStride = 128, kHead = 256;
  // Processes share whole allocations only, and the driver packs smaller ones together.
  static constexpr size_t kGranularity = size_t{2} << 20;

  ArenaLayout(int ranks, size_t slot_bytes) : ranks_(static_cast<size_t>(ranks)), slot_(RoundUp(slot_bytes, kHead)) {}

  size_t Flag(int source, int chunk) const { return static_cast<size_t>(source * kMaxChunks + chunk) * kFlagStride; }
  size_t FlagBytes() const { return ranks_ * kMaxChunks * kFlagStride; }
  size_t Scratch() const { return FlagBytes(); }
  size_t SlotScale(int source, int parity) const {
    return Scratch() + kHead + (static_cast<size_t>(parity) * ranks_ + static_cast<size_t>(source)) * (kHead + slot_);
  }
  size_t Slot(int source, int parity) const { return SlotScale(source, parity) + kHead; }
  size_t Staging(int owner) const { return SlotScale(0, 2) + static_cast<size_t>(owner) * slot_; }
  size_t Partial() const { return SlotScale(0, 2) + ranks_ * slot_; }
  size_t Bytes() const { return RoundUp(Partial() + 2 * slot_, kGranularity); }

 private:
  static constexpr size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

  size_t ranks_, slot_;
};

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_ARENA_LAYOUT_H_
