// On the emulated device, ranks need no library.
#include "ops/cuda/collectives/local_collectives.h"

namespace charonia::ops {

std::string nccl_missing() { return {}; }

std::shared_ptr<NcclGroup> make_nccl_group(const std::vector<int>& devices) {
  return std::make_shared<cuda::LocalCollectives>(devices.empty() ? 0 : devices.front(),
                                                  static_cast<int>(devices.size()));
}

}  // namespace charonia::ops
