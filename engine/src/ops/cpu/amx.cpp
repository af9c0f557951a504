#include "ops/cpu/amx.h"

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "base/text.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace charonia::ops::cpu {
namespace {

#if defined(__x86_64__) && defined(__linux__)

constexpr unsigned kAmxBf16 = 1U << 22, kAmxInt8 = 1U << 25;
constexpr unsigned kTileConfigState = 17, kTileDataState = 18;  // bits of XCR0

// Checks the bits of processor features (CPUID leaf 7) and of the register states that the system saves (XCR0).
bool processor_has_amx(unsigned kind) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kAmxTile = 1U << 24;
  if ((d & kind) == 0 || (d & kAmxTile) == 0) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTiles = 1U << kTileConfigState | 1U << kTileDataState;
  return (low & kTiles) == kTiles;
}

// Linux provides the 8 KiB of tile registers only to processes that request them. All threads inherit the permission,
// including threads that already run.
bool request_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileDataState) == 0;
}

#endif

// Small multiples of 1/8 in bf16: products and sums of a few hundred of them are exact in float, in any order.
std::uint16_t random_eighths(std::uint32_t& state) {
  state = state * 1664525U + 1013904223U;
  return float_to_bf16(static_cast<float>(static_cast<int>(state >> 27) - 16) / 8);
}

}  // namespace

bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  // All processors with AMX also have VBMI, which the AMX kernels use. An emulator may not have it.
  static const bool has = processor_has_amx(kAmxBf16) && __builtin_cpu_supports("avx512vbmi") && request_tiles();
  return has;
#else
  return false;
#endif
}

bool has_amx_int8() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool has = has_amx() && processor_has_amx(kAmxInt8);
  return has;
#else
  return false;
#endif
}

bool has_avx512_vnni() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vnni") != 0;
#else
  return false;
#endif
}

// The compiler's check includes that the system saves AVX2 registers. Not every compiler can check for AVX-VNNI.
bool has_avx_vnni() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool has = [] {
    __builtin_cpu_init();
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kAvxVnni = 1U << 4;
    return __builtin_cpu_supports("avx2") != 0 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kAvxVnni) != 0;
  }();
  return has;
#else
  return false;
#endif
}

std::string gemm_mismatch(void (*candidate)(const LinearArgs&), void (*reference)(const LinearArgs&)) {
  constexpr int kK = 133, kColumns = 50, kStride = 140;
  constexpr std::size_t kPairs = (kK + 1) / 2;
  std::uint32_t state = 1;
  std::vector<Bf16> a(static_cast<std::size_t>(kRowBlock) * kStride), panel(kPairs * kPanel * 2);
  std::vector<float> bias(kColumns);
  for (auto& x : a) x.bits = random_eighths(state);
  for (std::size_t i = 0; i < panel.size(); ++i) {
    const bool beyond = i / (2 * kPanel) == kPairs - 1 && i % 2 == 1;  // kK is odd, so the last pair has one element
    panel[i].bits = beyond ? 0 : random_eighths(state);
  }
  for (auto& x : bias) x = bf16_to_float(random_eighths(state));
  const auto gemm = [&](void (*kernel)(const LinearArgs&), int rows) {
    std::vector<float> out(static_cast<std::size_t>(rows * kColumns), NAN);
    kernel({.a = a.data(),
            .a_stride = kStride,
            .rows = rows,
            .k = kK,
            .panel = panel.data(),
            .out = out.data(),
            .out_stride = kColumns,
            .columns = kColumns,
            .bias = bias.data()});
    return out;
  };
  for (const int rows : {1, 7, 16, 19, 33, kRowBlock}) {
    const auto got = gemm(candidate, rows), expected = gemm(reference, rows);
    for (std::size_t i = 0; i < got.size(); ++i) {
      if (got[i] != expected[i]) {
        return cat("row ", i / kColumns, " of ", rows, ", feature ", i % kColumns, " is ", got[i], ", expected ",
                   expected[i]);
      }
    }
  }
  return {};
}

}  // namespace charonia::ops::cpu
