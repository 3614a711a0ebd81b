#include "csrc/comm/cuda/device_group.h"

namespace te_jax::comm {

std::variant<std::unique_ptr<DeviceGroup>, std::string> DeviceGroup::Create(const std::vector<int>& devices,
                                                                            size_t slot_bytes) {
  auto group = std::make_unique<DeviceGroup>();
  const int ranks = static_cast<int>(devices.size());
  for (int rank = 0; rank < ranks; ++rank) {
    group->members_.push_back(std::make_unique<DeviceRank>(devices[rank], rank, ranks));
    for (const int peer : devices) {
      if (auto why = EnableAccess(devices[rank], peer)) return *why;
    }
    if (auto why = group->rank(rank).Allocate(slot_bytes)) return *why;
  }
  for (const auto& self : group->members_) {
    for (const auto& peer : group->members_) self->SetPeer(peer->rank(), peer->arena());
  }
  for (const auto& self : group->members_) {
    if (auto why = TryWrites(*self)) return *why;
  }
  for (const auto& self : group->members_) {
    if (auto why = CheckWrites(*self)) return *why;
  }
  return group;
}

}  // namespace te_jax::comm
