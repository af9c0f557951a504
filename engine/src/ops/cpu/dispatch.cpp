#include "ops/cpu/dispatch.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/text.h"
#include "charonia/error.h"
#include "ops/cpu/amx.h"

namespace charonia::ops::cpu {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};

std::string names_of(const std::vector<InstructionSet>& sets) {
  std::string out;
  for (const auto& set : sets) out += cat(out.empty() ? "" : ", ", set.name);
  return out;
}

#if defined(__x86_64__)
// What is wrong with the GEMMs of matrix tiles on this machine; empty: nothing. Looked at once.
const std::string& amx_mismatch() {
  static const std::string mismatch = gemm_mismatch(amx::kernels().linear_bf16, portable::kernels().linear_bf16);
  return mismatch;
}
#endif

}  // namespace

std::string instruction_set_warning() {
#if defined(__x86_64__)
  if (has_amx() && !amx_mismatch().empty()) {
    return cat("this processor's AMX is not used: a GEMM through its matrix tiles is wrong (", amx_mismatch(),
               "); please report this");
  }
#endif
  return {};
}

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets = {{kNames[0], &portable::kernels()}};
#if defined(__x86_64__)
  // The builtin also asks whether the system saves the wide registers.
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx2) sets.push_back({kNames[1], &avx2::kernels()});
  if (has_avx512) sets.push_back({kNames[2], &avx512::kernels()});
  if (has_avx512 && __builtin_cpu_supports("avx512bf16")) sets.push_back({kNames[3], &avx512_bf16::kernels()});
  if (has_avx512 && __builtin_cpu_supports("avx512bf16") && has_amx() && amx_mismatch().empty()) {
    sets.push_back({kNames[4], &amx::kernels()});
  }
#endif
  return sets;
}

IntegerKernels integer_kernels(const Kernels& kernels) {
#if defined(__x86_64__)
  const bool has_vnni = &kernels == &avx2::kernels() ? has_avx_vnni() : has_avx512_vnni();
  return {.linear = kernels.linear_i8_vnni != nullptr && has_vnni ? kernels.linear_i8_vnni : kernels.linear_i8,
          .tiles = has_amx_int8() ? kernels.linear_i8_tiles : nullptr};
#else
  return {.linear = kernels.linear_i8};
#endif
}

InstructionSet instruction_set(std::string_view name) {
  const auto sets = instruction_sets();
  if (name.empty()) return sets.back();
  const auto set = std::find_if(sets.begin(), sets.end(), [&](const auto& s) { return s.name == name; });
  if (set != sets.end()) return *set;
  if (std::find(kNames.begin(), kNames.end(), name) != kNames.end()) {
    throw Error(ErrorCode::unsupported,
                cat("this processor cannot run the instruction set '", name, "': it has ", names_of(sets)));
  }
  throw Error(ErrorCode::invalid_argument,
              cat("unknown instruction set '", name, "': CHARONIA_ISA takes one of ", names_of(sets)));
}

}  // namespace charonia::ops::cpu
