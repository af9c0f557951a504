// The devices for the tests of the operations: the instruction sets of this processor.
#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/dispatch.h"
#include "ops_support.h"

namespace charonia::ops {

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const auto& isa : cpu::instruction_sets()) names.emplace_back(isa.name);
  return names;
}

std::unique_ptr<Ops> make_ops(std::string_view device, int threads) {
  return std::make_unique<cpu::CpuOps>(threads, cpu::instruction_set(device));
}

// Instruction sets that multiply pairs of bf16 always take bf16 activations.
DeviceTraits traits(std::string_view device) {
  const auto& kernels = *cpu::instruction_set(device).kernels;
  return {.attention_in_bf16 = kernels.quant_linear_bf16 != nullptr,
          .fixed_point_rows = cpu::has_fixed_kernel(kernels)};
}

}  // namespace charonia::ops
