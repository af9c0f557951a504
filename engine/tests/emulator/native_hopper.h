// The emulated device's implementation of hopper.h.
#pragma once

#include "emulator/host_async.h"
#include "ops/cuda/device/portable.h"
#include "ops/cuda/device/tensor_map.h"

#define CHARONIA_GRID_CONSTANT

namespace charonia::cuda {

inline constexpr bool kCompilesWgmma = true;

inline std::uint32_t shared_offset(const void* p) { return host_grid::offset_in_shared(p); }
inline unsigned char* swizzled_shared() { return host_grid::swizzled_shared_memory(); }

inline void barrier_init(std::uint64_t* b, int arrivals) { host_grid::init_barrier(b, arrivals); }
inline void barrier_init_fence() { host_grid::fence_barriers(); }
inline void barrier_arrive(std::uint64_t* b) { host_grid::arrive_at_barrier(b, 0); }
inline void barrier_arrive_expect(std::uint64_t* b, int bytes) { host_grid::arrive_at_barrier(b, bytes); }
inline void barrier_wait(std::uint64_t* b, int parity) { host_grid::wait_at_barrier(b, parity); }
inline void async_fence() { host_grid::fence_shared(); }

inline void copy_bulk(void* to, const void* from, int bytes, std::uint64_t* b) {
  host_grid::copy_bulk(to, from, static_cast<std::size_t>(bytes), b);
}
template <std::size_t rank>
void copy_box(void* to, const TensorMap& map, const int (&at)[rank], std::uint64_t* b) {
  host_grid::copy_box(to, map, at, rank, b);
}

inline void wgmma_fence() { host_grid::fence_products(); }
inline void wgmma_commit() { host_grid::commit_products(); }
template <int n, class... Registers>
void wgmma_wait(Registers&... /*complete*/) {
  host_grid::wait_products(n);
}
template <int n>
void take_registers() {
  static_assert(n >= 24 && n <= 256 && n % 8 == 0);
  host_grid::sync_warp();
}
template <int n>
void leave_registers() {
  take_registers<n>();
}

// The number in an element, or the two numbers in a pair.
template <class T>
void numbers_of(std::uint16_t bits, float* to) {
  if constexpr (std::is_same_v<T, i8x2>) {
    for (int i = 0; i < 2; ++i) to[i] = static_cast<std::int8_t>(bits >> 8 * i);
  } else {
    *to = to_float(T{bits});
  }
}

template <class T, int n, bool kTransposed = false>
void wgmma(SumType<T> (&d)[n / 2], std::uint64_t a, std::uint64_t b, bool add) {
  static_assert(!kIsPair<T> || (!kTransposed && (n == 128 || n == 256)));
  host_grid::issue_product({.sums = d,
                            .n = n,
                            .numbers_of = numbers_of<T>,
                            .integers = kIsPair<T>,
                            .a = a,
                            .b = b,
                            .transposed = kTransposed,
                            .add = add});
}
template <class T, int n, bool kTransposed = false>
void wgmma(float (&d)[n / 2], std::uint32_t* a, std::uint64_t b, bool add) {
  static_assert(!kIsPair<T>);
  host_grid::issue_product(
      {.sums = d, .n = n, .numbers_of = numbers_of<T>, .registers = a, .b = b, .transposed = kTransposed, .add = add});
}

}  // namespace charonia::cuda
