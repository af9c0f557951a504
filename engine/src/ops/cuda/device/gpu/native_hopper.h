// The CUDA implementation of hopper.h.
#pragma once

#include "ops/cuda/device/portable.h"
#include "ops/cuda/device/tensor_map.h"

#define CHARONIA_GRID_CONSTANT __grid_constant__

#if __CUDA_ARCH__ >= 900
#define CHARONIA_SM_90(...) asm volatile(__VA_ARGS__)
#else
#define CHARONIA_SM_90(...) __trap()
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define CHARONIA_SM_90A(...) asm volatile(__VA_ARGS__)
#else
#define CHARONIA_SM_90A(...) __trap()
#endif

namespace charonia::cuda {

// Whether the architecture that is being compiled for has products. Kernels without a body for others compile faster.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kCompilesWgmma = false;
#else
inline constexpr bool kCompilesWgmma = true;
#endif

// The address in the block's shared memory.
CHARONIA_DEVICE std::uint32_t shared_offset(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
CHARONIA_DEVICE unsigned char* swizzled_shared() {
  extern __shared__ __align__(1024) unsigned char charonia_swizzled_shared[];
  return charonia_swizzled_shared;
}

CHARONIA_DEVICE void barrier_init([[maybe_unused]] std::uint64_t* b, [[maybe_unused]] int arrivals) {
  CHARONIA_SM_90("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_offset(b)), "r"(arrivals) : "memory");
}
CHARONIA_DEVICE void barrier_init_fence() { CHARONIA_SM_90("fence.mbarrier_init.release.cluster;" :: : "memory"); }
CHARONIA_DEVICE void barrier_arrive([[maybe_unused]] std::uint64_t* b) {
  CHARONIA_SM_90("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_offset(b)) : "memory");
}
CHARONIA_DEVICE void barrier_arrive_expect([[maybe_unused]] std::uint64_t* b, [[maybe_unused]] int bytes) {
  CHARONIA_SM_90("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_offset(b)),
                 "r"(bytes) : "memory");
}
CHARONIA_DEVICE void barrier_wait([[maybe_unused]] std::uint64_t* b, [[maybe_unused]] int parity) {
  int done = 0;
  while (done == 0) {
    CHARONIA_SM_90(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.s32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_offset(b)), "r"(parity)
        : "memory");
  }
}
CHARONIA_DEVICE void async_fence() { CHARONIA_SM_90("fence.proxy.async.shared::cta;" :: : "memory"); }

CHARONIA_DEVICE void copy_bulk([[maybe_unused]] void* to, [[maybe_unused]] const void* from, [[maybe_unused]] int bytes,
                               [[maybe_unused]] std::uint64_t* b) {
  CHARONIA_SM_90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_offset(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_offset(b)) : "memory");
}
#define CHARONIA_BOX(rank, coordinates, barrier)                                                               \
  "cp.async.bulk.tensor." rank ".shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {" coordinates \
  "}], [" barrier "];"
CHARONIA_DEVICE void copy_box([[maybe_unused]] void* to, [[maybe_unused]] const TensorMap& map,
                              [[maybe_unused]] const int (&at)[2], [[maybe_unused]] std::uint64_t* b) {
  CHARONIA_SM_90(CHARONIA_BOX("2d", "%2, %3", "%4")::"r"(shared_offset(to)), "l"(&map), "r"(at[0]), "r"(at[1]),
                 "r"(shared_offset(b)) : "memory");
}
CHARONIA_DEVICE void copy_box([[maybe_unused]] void* to, [[maybe_unused]] const TensorMap& map,
                              [[maybe_unused]] const int (&at)[3], [[maybe_unused]] std::uint64_t* b) {
  CHARONIA_SM_90(CHARONIA_BOX("3d", "%2, %3, %4", "%5")::"r"(shared_offset(to)), "l"(&map), "r"(at[0]), "r"(at[1]),
                 "r"(at[2]), "r"(shared_offset(b)) : "memory");
}
CHARONIA_DEVICE void copy_box([[maybe_unused]] void* to, [[maybe_unused]] const TensorMap& map,
                              [[maybe_unused]] const int (&at)[4], [[maybe_unused]] std::uint64_t* b) {
  CHARONIA_SM_90(CHARONIA_BOX("4d", "%2, %3, %4, %5", "%6")::"r"(shared_offset(to)), "l"(&map), "r"(at[0]), "r"(at[1]),
                 "r"(at[2]), "r"(at[3]), "r"(shared_offset(b)) : "memory");
}
#undef CHARONIA_BOX

CHARONIA_DEVICE void wgmma_fence() { CHARONIA_SM_90A("wgmma.fence.sync.aligned;" :: : "memory"); }
CHARONIA_DEVICE void wgmma_commit() { CHARONIA_SM_90A("wgmma.commit_group.sync.aligned;" :: : "memory"); }
// No instruction: the compiler takes the registers for changed here, so it moves no use of them to an earlier place.
CHARONIA_DEVICE void fence_register(float& x) { asm volatile("" : "+f"(x)::"memory"); }
CHARONIA_DEVICE void fence_register(int& x) { asm volatile("" : "+r"(x)::"memory"); }
CHARONIA_DEVICE void fence_register(std::uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }
template <class T, int n>
CHARONIA_DEVICE void fence_register(T (&x)[n]) {
  CHARONIA_UNROLL
  for (int i = 0; i < n; ++i) fence_register(x[i]);
}
template <int n, class... Registers>
CHARONIA_DEVICE void wgmma_wait(Registers&... complete) {
  CHARONIA_SM_90A("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
  (fence_register(complete), ...);
}
template <int n>
CHARONIA_DEVICE void take_registers() {
  static_assert(n >= 24 && n <= 256 && n % 8 == 0);
  CHARONIA_SM_90A("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n>
CHARONIA_DEVICE void leave_registers() {
  static_assert(n >= 24 && n <= 256 && n % 8 == 0);
  CHARONIA_SM_90A("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}

// Ten registers by name, and sixteen as operands; c: their constraint.
#define CHARONIA_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define CHARONIA_FOUR_SUMS(c, i) c(d[i]), c(d[(i) + 1]), c(d[(i) + 2]), c(d[(i) + 3])
#define CHARONIA_SUMS_16(c, i)                                                              \
  CHARONIA_FOUR_SUMS(c, i), CHARONIA_FOUR_SUMS(c, (i) + 4), CHARONIA_FOUR_SUMS(c, (i) + 8), \
      CHARONIA_FOUR_SUMS(c, (i) + 12)
#define CHARONIA_SUMS_32(c, i) CHARONIA_SUMS_16(c, i), CHARONIA_SUMS_16(c, (i) + 16)
#define CHARONIA_SUMS_64(c, i) CHARONIA_SUMS_32(c, i), CHARONIA_SUMS_32(c, (i) + 32)
#define CHARONIA_SUMS_128(c, i) CHARONIA_SUMS_64(c, i), CHARONIA_SUMS_64(c, (i) + 64)
#define CHARONIA_NAMES_16 CHARONIA_TEN() ", %10, %11, %12, %13, %14, %15"
#define CHARONIA_NAMES_32 CHARONIA_TEN() ", " CHARONIA_TEN(1) ", " CHARONIA_TEN(2) ", %30, %31"
#define CHARONIA_NAMES_60 \
  CHARONIA_TEN()          \
  ", " CHARONIA_TEN(1) ", " CHARONIA_TEN(2) ", " CHARONIA_TEN(3) ", " CHARONIA_TEN(4) ", " CHARONIA_TEN(5)
#define CHARONIA_NAMES_64 CHARONIA_NAMES_60 ", %60, %61, %62, %63"
#define CHARONIA_NAMES_128                                                                            \
  CHARONIA_NAMES_60 ", " CHARONIA_TEN(6) ", " CHARONIA_TEN(7) ", " CHARONIA_TEN(8) ", " CHARONIA_TEN( \
      9) ", " CHARONIA_TEN(10) ", " CHARONIA_TEN(11) ", %120, %121, %122, %123, %124, %125, %126, %127"
#define CHARONIA_PRODUCT(n, types, names, add)                                                              \
  "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " add ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #n types " {" names \
  "}, "

template <class T, int n, bool kTransposed = false>
struct WarpgroupProduct;
// r0 to r6: the numbers of the operands after the sums.
#define CHARONIA_WGMMA(T, type, n, sums, r0, r1, r2, r3, r4, r5, r6)                                       \
  template <bool kTransposed>                                                                              \
  struct WarpgroupProduct<T, n, kTransposed> {                                                             \
    CHARONIA_DEVICE static void run([[maybe_unused]] float (&d)[n / 2], [[maybe_unused]] std::uint64_t a,  \
                                    [[maybe_unused]] std::uint64_t b, [[maybe_unused]] int add) {          \
      CHARONIA_SM_90A(CHARONIA_PRODUCT(n, "k16.f32." type "." type, CHARONIA_NAMES_##sums, r2) r0           \
                      ", " r1 ", p, 1, 1, 0, " r3 ";\n\t}" : CHARONIA_SUMS_##sums("+f", 0) : "l"(a),       \
                      "l"(b), "r"(add), "n"(kTransposed ? 1 : 0));                                         \
    }                                                                                                      \
    CHARONIA_DEVICE static void run([[maybe_unused]] float (&d)[n / 2], [[maybe_unused]] std::uint32_t* a, \
                                    [[maybe_unused]] std::uint64_t b, [[maybe_unused]] int add) {          \
      CHARONIA_SM_90A(CHARONIA_PRODUCT(n, "k16.f32." type "." type, CHARONIA_NAMES_##sums,                 \
                                       r5) "{" r0 ", " r1 ", " r2 ", " r3 "}, " r4 ", p, 1, 1, " r6        \
                                           ";\n\t}" : CHARONIA_SUMS_##sums("+f", 0) : "r"(a[0]),           \
                      "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed ? 1 : 0));        \
    }                                                                                                      \
  };
#define CHARONIA_WGMMA_OF(T, type)                                                  \
  CHARONIA_WGMMA(T, type, 32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")  \
  CHARONIA_WGMMA(T, type, 64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")  \
  CHARONIA_WGMMA(T, type, 128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70") \
  CHARONIA_WGMMA(T, type, 256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
CHARONIA_WGMMA_OF(bf16, "bf16")
CHARONIA_WGMMA_OF(f16, "f16")

// r0 to r2: the numbers of the operands after the sums.
#define CHARONIA_INTEGER_WGMMA(n, sums, r0, r1, r2)                                                                \
  template <>                                                                                                      \
  struct WarpgroupProduct<i8x2, n> {                                                                               \
    CHARONIA_DEVICE static void run([[maybe_unused]] int (&d)[n / 2], [[maybe_unused]] std::uint64_t a,            \
                                    [[maybe_unused]] std::uint64_t b, [[maybe_unused]] int add) {                  \
      CHARONIA_SM_90A(CHARONIA_PRODUCT(n, "k32.s32.s8.s8", CHARONIA_NAMES_##sums, r2) r0 ", " r1 ", p;\n\t}"       \
                      : CHARONIA_SUMS_##sums("+r", 0) : "l"(a), "l"(b), "r"(add));                                 \
    }                                                                                                              \
  };
CHARONIA_INTEGER_WGMMA(128, 64, "%64", "%65", "%66")
CHARONIA_INTEGER_WGMMA(256, 128, "%128", "%129", "%130")
#undef CHARONIA_TEN
#undef CHARONIA_FOUR_SUMS
#undef CHARONIA_SUMS_16
#undef CHARONIA_SUMS_32
#undef CHARONIA_SUMS_64
#undef CHARONIA_SUMS_128
#undef CHARONIA_NAMES_16
#undef CHARONIA_NAMES_32
#undef CHARONIA_NAMES_60
#undef CHARONIA_NAMES_64
#undef CHARONIA_NAMES_128
#undef CHARONIA_PRODUCT
#undef CHARONIA_WGMMA
#undef CHARONIA_WGMMA_OF
#undef CHARONIA_INTEGER_WGMMA

// Factor: std::uint64_t or std::uint32_t*.
template <class T, int n, bool kTransposed = false, class Factor>
CHARONIA_DEVICE void wgmma(SumType<T> (&d)[n / 2], Factor a, std::uint64_t b, bool add) {
  WarpgroupProduct<T, n, kTransposed>::run(d, a, b, add ? 1 : 0);
}

}  // namespace charonia::cuda

#undef CHARONIA_SM_90
#undef CHARONIA_SM_90A
