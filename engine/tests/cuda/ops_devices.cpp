// The devices for the tests of the operations: a CUDA device in normal mode and in reproducible mode.
#include "ops/cuda/make_cuda_ops.h"
#include "ops_support.h"

namespace charonia::ops {

std::vector<std::string> device_names() { return {"cuda", "cuda_reproducible"}; }

std::unique_ptr<Ops> make_ops(std::string_view device, int) {
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
