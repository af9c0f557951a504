// Runs kernels on the CPU, for tests: the blocks of a grid one after another, the threads of a block as fibers of the
// calling thread, which switch at barriers and warp functions. x86-64 and AArch64, Linux. It detects
//   - missing barriers: shared memory (static and dynamic) and the targets of unfinished asynchronous copies hold NaN
//     until they are written, and threads and blocks run in a random order
//   - barriers that not all threads reach, and warp functions that not all lanes call
//   - clusters whose blocks do not all reach a barrier, and shared memory of a block that is read before it is written
//     or after the block has ended
//   - launches that a device of compute capability 9.0 rejects (check())
//   - addresses that are not aligned, or not in shared memory although they must be, in the functions of portable.h and
//     tensor_core.h; other accesses of 8 or 16 bytes with -fsanitize=alignment (scripts/sanitize.sh grid)
//   - wrong use of barriers, copies by the TMA unit and warpgroup products (host_async.h)
//   - threads that end without dependency_wait(), and early reads before it: the first block of a kernel runs up to it
//     before the previous kernel has run, if a stream has both (host_stream.h)
//   - accesses beyond an object in shared memory, and beyond a fiber's stack, with the address sanitizer
// docs/gpu_testing.md describes what it cannot detect.
//
// CHARONIA_EMULATED_ORDER=<number>: the seed of the order of blocks and of a block's threads; the default is 1; 0 means
// ascending. Errors and failing tests (tests/cuda/host_grid_listener.cpp) print it. With the same seed, a stream's
// kernels run in the same orders again.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/dtype.h"

namespace charonia::cuda {

struct TensorMap;

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace host_grid {

// Maximum bytes of shared memory of a block: with and without the attribute that allows more.
inline constexpr std::size_t kMaxSharedBytes = std::size_t{227} << 10, kGivenSharedBytes = std::size_t{48} << 10;

// The order of the blocks and threads of all later grids of this process: the seed's order, or its reverse. A test that
// runs with both has run every pair of threads in both orders.
enum class Order { ascending, descending };
void set_order(Order order);
void set_seed(std::uint64_t seed);
std::uint64_t seed();
// "CHARONIA_EMULATED_ORDER=<seed>", followed by ", descending" for the reverse order.
std::string order_text();

struct Shape {
  Index3 grid, block;
  unsigned cluster_y = 1;  // blocks of a cluster, neighbours along y
  std::size_t dynamic_shared_bytes = 0;
  // Programmatic dependent launch: every thread must call dependency_wait().
  bool overlap = false;
  std::string what;  // for messages
  // Position of the kernel in its stream. Grids at different positions run in different orders.
  std::uint64_t place = 0;
};

// Throws charonia::Error(internal) for a shape that a device would reject.
void check(const Shape& shape);

// A grid. An error or exception of the kernel ends the grid and is thrown by start() or finish(). One thread must call
// both.
class Run {
 public:
  Run(Shape shape, std::function<void()> body);  // body(): called in every thread of every block
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;
  // Runs the first block until all of its threads wait in dependency_wait() or for threads that do.
  void start();
  // Runs the whole grid.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The indices of the running thread.
struct Place {
  Index3 thread, block, block_dim, grid_dim;
};
extern constinit thread_local const Place* current_place;  // null outside of a kernel
[[noreturn]] void fail_outside();
inline const Place& place() {
  if (current_place == nullptr) fail_outside();
  return *current_place;
}

void sync_block();
void sync_warp();
// sync_cluster(): a barrier of all threads of all blocks of a cluster. at_rank(): the other block's dynamic shared
// memory at the same offset; it is NaN again after that block has ended.
void sync_cluster();
int rank_in_cluster();
const void* at_rank(const void* own_shared, std::size_t bytes, int rank);
void wait_for_dependency();
// The same memory; only the second one is aligned for swizzled data on the device.
unsigned char* dynamic_shared_memory();
unsigned char* swizzled_shared_memory();

// The block's variable with this key. Filled with NaN when the block begins.
void* static_shared_memory(const void* key, std::size_t bytes, std::size_t alignment);
template <class T, class Key>
T& shared_variable(Key) {
  static char key;
  return *static_cast<T*>(static_shared_memory(&key, sizeof(T), alignof(T)));
}

// Throw if an access of this size in global or shared memory is not allowed.
void check_aligned(const void* at, std::size_t bytes, std::string_view what);
void check_shared(const void* at, std::size_t bytes, std::string_view what);
// Throws if the thread must call dependency_wait() and has not.
void check_waited(std::string_view what);
// Both checks, for an atomic function, which may change shared memory before dependency_wait().
void check_atomic(const void* at, std::size_t bytes);

// All lanes of the warp exchange `bytes` bytes (at most 64): returns the data of all 32 lanes, `bytes` apart. The
// memory stays valid until the lane's second next exchange.
const void* exchange_bytes(const void* mine, std::size_t bytes);
template <class T>
const T* exchange(const T& mine) {
  static_assert(sizeof(T) <= 64);
  return static_cast<const T*>(exchange_bytes(&mine, sizeof(T)));
}

// Called for every load_streaming() in the kernels that the calling thread runs, for tests of memory access patterns.
// The n-th call of every lane of a warp belongs to one instruction. Empty: not called.
using LoadWatch = std::function<void(const Place& by, const void* at, std::size_t bytes)>;
void watch_streaming_loads(LoadWatch watch);
void note_streaming_load(const void* at, std::size_t bytes);

// Counts calls in the kernels that the calling thread runs, for tests.
struct Calls {
  std::uint64_t triggers = 0;         // dependency_trigger()
  // Copies from memory and load_streaming() before the thread's first trigger. On a GPU, the first trigger of any thread
  // counts for its block. Threads run one after the other here, so a count for blocks would only show their order.
  std::uint64_t requests_before = 0;
  std::uint64_t requests_after = 0;   // the same, after it
  std::uint64_t bulk_copies = 0;      // copy_bulk() and copy_box(), also counted as requests
  std::uint64_t prefetches = 0;       // prefetch_l2()
};
Calls& calls();
void note_trigger();

void copy_later(void* shared, const void* global_or_null, std::size_t bytes);  // null: zeros
void commit_copies();
void wait_copies(int all_but_last);

// For native_hopper.h; host_async.h has their contracts. offset_in_shared(): in the block's dynamic shared memory.
struct Product;
std::uint32_t offset_in_shared(const void* at);
void init_barrier(void* at, int arrivals);
void fence_barriers();
void arrive_at_barrier(void* at, int expected_bytes);
void wait_at_barrier(void* at, int parity);
void copy_bulk(void* to, const void* from, std::size_t bytes, void* barrier);
void copy_box(void* to, const TensorMap& map, const int* at, std::size_t rank, void* barrier);
void fence_shared();
void fence_products();
void issue_product(const Product& product);
void commit_products();
void wait_products(int all_but_last);

}  // namespace host_grid

}  // namespace charonia::cuda
