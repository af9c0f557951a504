#include "ops/cuda/device/carveout.h"

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cuda {

int shared_carveout(std::string_view setting) {
  if (setting.empty()) return kSharedCarveout;
  const auto percent = parse_number<int>(setting);
  if (!percent || *percent < kDriversCarveout || *percent > 100) {
    throw Error(ErrorCode::invalid_argument,
                cat("CHARONIA_CUDA_CARVEOUT = ", setting,
                    ": give the percentage of shared memory, 0 to 100, or -1 to leave it to the driver"));
  }
  return *percent;
}

}  // namespace charonia::cuda
