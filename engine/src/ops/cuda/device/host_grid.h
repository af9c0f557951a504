// Runs kernels on the CPU: the blocks of a grid one after the other, the threads of a block as fibers of the calling
// thread, switched at barriers and warp functions. For tests: it finds missing barriers (dynamic shared memory and the
// targets of unfinished asynchronous copies hold NaN until they are written), barriers that not all threads reach, and
// warp functions that not all lanes take part in. It does not find races that the order of the fibers hides; the order
// can be turned round (Order::descending), which uncovers most of them. x86-64 and AArch64, Linux.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "base/dtype.h"

namespace charonia::cuda {

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace host_grid {

enum class Order { ascending, descending };

// Of the threads within a block; for all grids that this thread runs from now on.
void set_order(Order order);

// Runs body() in every thread of every block. Throws charonia::Error(internal) when threads wait for what never comes.
// An exception of `body` ends the grid and is passed on.
void run(Index3 grid, Index3 block, std::size_t dynamic_shared_bytes, const std::function<void()>& body);

// The thread that runs.
struct Place {
  Index3 thread, block, block_dim, grid_dim;
};
const Place& place();

void sync_block();
void sync_warp();
unsigned char* dynamic_shared_memory();

// All lanes of the warp meet, each gives `bytes` (at most 64) and gets those of all 32, `bytes` apart. The memory stays
// until the lane's next but one exchange.
const void* exchange_bytes(const void* mine, std::size_t bytes);
template <class T>
const T* exchange(const T& mine) {
  static_assert(sizeof(T) <= 64);
  return static_cast<const T*>(exchange_bytes(&mine, sizeof(T)));
}

void copy_later(void* shared, const void* global_or_null, std::size_t bytes);  // null: zeros
void commit_copies();
void wait_copies(int all_but_last);

}  // namespace host_grid

// ---- CUDA's names ----

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

#define threadIdx (::charonia::cuda::host_grid::place().thread)
#define blockIdx (::charonia::cuda::host_grid::place().block)
#define blockDim (::charonia::cuda::host_grid::place().block_dim)
#define gridDim (::charonia::cuda::host_grid::place().grid_dim)

inline void __syncthreads() { host_grid::sync_block(); }
inline void __syncwarp() { host_grid::sync_warp(); }
inline unsigned char* dynamic_shared() { return host_grid::dynamic_shared_memory(); }

template <class T>
T shuffle_xor(T x, int mask) {
  return host_grid::exchange(x)[(static_cast<int>(host_grid::place().thread.x) % 32) ^ mask];
}
template <class T>
T shuffle_from(T x, int lane) {
  return host_grid::exchange(x)[lane];
}
template <class T>
T shuffle_up(T x, int delta) {
  const int lane = static_cast<int>(host_grid::place().thread.x) % 32;
  return host_grid::exchange(x)[lane >= delta ? lane - delta : lane];
}
inline unsigned ballot(bool x) {
  const auto* lanes = host_grid::exchange(x);
  unsigned out = 0;
  for (unsigned lane = 0; lane < 32; ++lane) out |= static_cast<unsigned>(lanes[lane]) << lane;
  return out;
}
inline bool any_lane(bool x) { return ballot(x) != 0; }

// Fibers are not interrupted, so plain arithmetic is atomic.
template <class T>
T atomicAdd(T* at, T value) {
  const T old = *at;
  *at = old + value;
  return old;
}
template <class T>
T atomicMax(T* at, T value) {
  const T old = *at;
  *at = std::max(old, value);
  return old;
}
template <class T>
T atomicMin(T* at, T value) {
  const T old = *at;
  *at = std::min(old, value);
  return old;
}
template <class T>
T atomicOr(T* at, T value) {
  const T old = *at;
  *at = old | value;
  return old;
}
inline void __threadfence() {}

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline long long __double2ll_rn(double x) { return std::llrint(x); }
using ::expf;
using ::fabsf;
using ::logf;
using ::tanhf;
using std::exp2f;
using std::fmaf;
using std::fmaxf;
using std::fminf;
using std::log2f;
using std::max;
using std::min;

}  // namespace charonia::cuda
