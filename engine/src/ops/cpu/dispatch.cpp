#include "ops/cpu/dispatch.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

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

#ifdef CHARONIA_WITH_amx
// Describes an error of the AMX GEMMs on this machine; empty if there is none. Computed once.
const std::string& amx_mismatch() {
  static const std::string mismatch = gemm_mismatch(amx::kernels().linear_bf16, portable::kernels().linear_bf16);
  return mismatch;
}
#endif

// An instruction set of kNames, and whether this processor can run it. CMake defines CHARONIA_WITH_<name> for the sets
// in this build.
struct Candidate {
  std::string_view name;
  bool runs = false;
  const Kernels& (*kernels)() = nullptr;  // null: not in this build
};

// The smallest first.
std::vector<Candidate> candidates() {
  std::vector<Candidate> out = {{kNames[0], true, portable::kernels}};
#if defined(__x86_64__)
  // The builtin also checks that the system saves the wide registers.
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
  out.push_back({kNames[1], has_avx2});
  out.push_back({kNames[2], has_avx512});
  out.push_back({kNames[3], has_bf16});
  out.push_back({kNames[4], has_bf16 && has_amx()});
#endif
#ifdef CHARONIA_WITH_avx2
  out[1].kernels = avx2::kernels;
#endif
#ifdef CHARONIA_WITH_avx512
  out[2].kernels = avx512::kernels;
#endif
#ifdef CHARONIA_WITH_avx512_bf16
  out[3].kernels = avx512_bf16::kernels;
#endif
#ifdef CHARONIA_WITH_amx
  out[4].kernels = amx::kernels;
  out[4].runs = out[4].runs && amx_mismatch().empty();
#endif
#if defined(__x86_64__)
  // On Intel processors, bf16 dot products have no more multiply-adds per cycle than fp32, which needs no conversions:
  // on an Emerald Rapids, prefill with fp32 is 1.7 times as fast. AMD processors have twice as many.
  if (__builtin_cpu_is("intel")) std::swap(out[2], out[3]);
#endif
  return out;
}

#if defined(__x86_64__)
bool is_avx2([[maybe_unused]] const Kernels& kernels) {
#ifdef CHARONIA_WITH_avx2
  return &kernels == &avx2::kernels();
#else
  return false;
#endif
}
#endif

}  // namespace

std::string instruction_set_warning() {
#ifdef CHARONIA_WITH_amx
  if (has_amx() && !amx_mismatch().empty()) {
    return cat("this processor's AMX is not used: a test GEMM with its matrix tiles gave a wrong result (",
               amx_mismatch(), "); please report this");
  }
#endif
  const auto all = candidates();
  const auto best = std::find_if(all.rbegin(), all.rend(), [](const auto& one) { return one.runs; });
  if (best->kernels != nullptr) return {};
  return cat("this processor has ", best->name, ", but this build was made on another processor and lacks it. It uses ",
             instruction_sets().back().name, ", which is slower. Build it here, or with CHARONIA_KERNELS=all");
}

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
  for (const auto& one : candidates()) {
    if (one.runs && one.kernels != nullptr) sets.push_back({one.name, &one.kernels()});
  }
  return sets;
}

IntegerKernels integer_kernels(const Kernels& kernels) {
#if defined(__x86_64__)
  const bool has_vnni = is_avx2(kernels) ? has_avx_vnni() : has_avx512_vnni();
  return {.linear = kernels.linear_i8_vnni != nullptr && has_vnni ? kernels.linear_i8_vnni : kernels.linear_i8,
          .tiles = has_amx_int8() ? kernels.linear_i8_tiles : nullptr};
#else
  return {.linear = kernels.linear_i8};
#endif
}

bool has_fixed_kernel([[maybe_unused]] const Kernels& kernels) {
#if defined(__x86_64__)
  return kernels.quant_linear_fixed != nullptr && (is_avx2(kernels) || has_avx512_vnni());
#else
  return false;
#endif
}

InstructionSet instruction_set(std::string_view name) {
  const auto sets = instruction_sets();
  if (name.empty()) return sets.back();
  const auto set = std::find_if(sets.begin(), sets.end(), [&](const auto& s) { return s.name == name; });
  if (set != sets.end()) return *set;
  if (std::find(kNames.begin(), kNames.end(), name) != kNames.end()) {
    throw Error(
        ErrorCode::unsupported,
        cat("the instruction set '", name, "' cannot be used: this processor and this build support ", names_of(sets)));
  }
  throw Error(ErrorCode::invalid_argument,
              cat("unknown instruction set '", name, "': CHARONIA_ISA takes one of ", names_of(sets)));
}

}  // namespace charonia::ops::cpu
