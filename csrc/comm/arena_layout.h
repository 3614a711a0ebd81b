// Where what is in a rank's arena: memory that its peers write into. Offsets only, the same on every rank.
#ifndef TE_JAX_COMM_ARENA_LAYOUT_H_
#define TE_JAX_COMM_ARENA_LAYOUT_H_

#include <cstddef>

#include "csrc/comm/schedule.h"

namespace te_jax::comm {

// From its start: flags [ranks][kMaxChunks], kFlagStride bytes each; kHead bytes of scratch; slots [parity][peers], each
// after a head in which the sender's scale travels; staging [peers]; the own partial result, in float32 at most twice the
// size of one on its way.
class ArenaLayout {
 public:
  static constexpr size_t kFlagStride = 128, kHead = 256;
  // Processes share whole allocations only, and the driver packs smaller ones together.
  static constexpr size_t kGranularity = size_t{2} << 20;

  ArenaLayout(int ranks, size_t slot_bytes) : ranks_(static_cast<size_t>(ranks)), slot_(RoundUp(slot_bytes, kHead)) {}

  size_t Flag(int source, int chunk) const { return static_cast<size_t>(source * kMaxChunks + chunk) * kFlagStride; }
  size_t FlagBytes() const { return ranks_ * kMaxChunks * kFlagStride; }
  size_t Scratch() const { return FlagBytes(); }
  // Of `owner`'s arena, as is Slot: what `source`, another rank, writes.
  size_t SlotScale(int owner, int source, int parity) const {
    return Slots() + (static_cast<size_t>(parity) * (ranks_ - 1) + Peer(owner, source)) * (kHead + slot_);
  }
  size_t Slot(int owner, int source, int parity) const { return SlotScale(owner, source, parity) + kHead; }
  // Of `rank`'s arena: what is on its way to `owner`, another rank.
  size_t Staging(int rank, int owner) const { return AfterSlots() + Peer(rank, owner) * slot_; }
  size_t Partial() const { return AfterSlots() + (ranks_ - 1) * slot_; }
  size_t Bytes() const { return RoundUp(Partial() + 2 * slot_, kGranularity); }

 private:
  size_t Slots() const { return Scratch() + kHead; }
  size_t AfterSlots() const { return Slots() + 2 * (ranks_ - 1) * (kHead + slot_); }
  // The number of `other` among the peers of `rank`.
  size_t Peer(int rank, int other) const { return static_cast<size_t>(other > rank ? other - 1 : other); }
  static constexpr size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

  size_t ranks_, slot_;
};

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_ARENA_LAYOUT_H_
