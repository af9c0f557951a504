// The devices for the tests of the operations: a CUDA device in normal mode and in reproducible mode.
#include "ops/cuda/make_cuda_ops.h"
#include "ops_support.h"
#if defined(CHARONIA_CUDA_ON_HOST)
#include "emulator/host_grid.h"
#endif

namespace charonia::ops {

std::vector<std::string> device_names() { return {"cuda", "cuda_reproducible"}; }

std::unique_ptr<Ops> make_ops(std::string_view device, int) {
#if defined(CHARONIA_CUDA_ON_HOST)
  // A test runs once for each device, so its kernels run in both orders of threads.
  using cuda::host_grid::Order;
  cuda::host_grid::set_order(device == "cuda" ? Order::descending : Order::ascending);
#endif
  return make_cuda_ops({.reproducible = device == "cuda_reproducible"});
}

DeviceTraits traits(std::string_view device) {
#if defined(CHARONIA_CUDA_ON_HOST)
  constexpr double kEffort = 0.15;
#else
  constexpr double kEffort = 1;
#endif
  return {.bitwise = device == "cuda_reproducible",
          // Probabilities are rounded before the product with v, and so are the sums of their rows.
          .attention_roundings = 2,
          .effort = kEffort};
}

}  // namespace charonia::ops
