// All ranks of a group that one thread has at hand, for tests and benchmarks: what the ranks of a program do together
// (channel.h) is done by it alone.
#ifndef TE_JAX_COMM_CUDA_DEVICE_GROUP_H_
#define TE_JAX_COMM_CUDA_DEVICE_GROUP_H_

#include <cstddef>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "csrc/comm/cuda/device_rank.h"

namespace te_jax::comm {

class DeviceGroup {
 public:
  // A group of these devices, in the order of ranks, whose slots hold `slot_bytes`; or why there can't be one.
  static std::variant<std::unique_ptr<DeviceGroup>, std::string> Create(const std::vector<int>& devices,
                                                                        size_t slot_bytes);

  int ranks() const { return static_cast<int>(members_.size()); }
  DeviceRank& rank(int rank) const { return *members_[static_cast<size_t>(rank)]; }

 private:
  std::vector<std::unique_ptr<DeviceRank>> members_;
};

}  // namespace te_jax::comm

#endif  // TE_JAX_COMM_CUDA_DEVICE_GROUP_H_
