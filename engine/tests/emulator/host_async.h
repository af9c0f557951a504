// Asynchronous instructions on the emulated device (hopper.h): the barriers, copies and warpgroup products of a block.
// They take effect as late as the device may let them:
//   - a copy fills its destination with NaN, and the data arrives when a thread waits for the barrier's phase
//   - a product fills its accumulator with NaN and its registers with a pattern, and is computed at wgmma_wait(). The
//     registers of the operand then have their values again
// It detects
//   - barriers that are not initialised, were overwritten, or lack barrier_init_fence() before a copy
//   - phases that never end (instead of a hang), more bytes than expected, and arrivals at a phase whose copies no
//     thread has waited for
//   - waits for a phase while the thread does not know that the phase before it has ended, so that the wait can return
//     too early, or never. A thread knows that a phase has ended if it has waited for it. It also knows what other
//     threads knew when they arrived at a phase that it has waited for, at the same __syncthreads(), or at the same
//     __syncwarp(). One warp of each block, a different one in neighbouring blocks, runs only when no other one can,
//     because such faults show when a warp is late
//   - copies that are misaligned, or not within shared memory; blocks that end before their copies
//   - swizzled copies and operands in a kernel that does not use swizzled_shared(), whose memory is aligned to 16 bytes
//   - destinations that are written while a copy is in flight, and sources that change meanwhile: data of an earlier
//     kernel that is copied before dependency_wait()
//   - products without wgmma_fence(), with a wrong descriptor, or that the warps of a warpgroup issue differently;
//     threads that end with products in flight
//   - registers or shared memory that change while a product that uses them is in flight, and shared memory that was
//     written without async_fence()
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "ops/cuda/device/tensor_map.h"

namespace charonia::cuda::host_grid {

// An error of the kernel; the block adds the thread.
struct Misuse {
  std::string text;
};

// Writes the number in an element of a product, or the two numbers in a pair of integers.
using NumbersOf = void (*)(std::uint16_t, float*);

// A product as one thread issues it.
struct Product {
  void* sums = nullptr;  // [n / 2]: float, or int for integers
  int n = 0;
  NumbersOf numbers_of = nullptr;
  bool integers = false;               // the elements are pairs
  std::uint32_t* registers = nullptr;  // 4 of operand a; null: in shared memory
  std::uint64_t a = 0, b = 0;          // descriptors
  bool transposed = false, add = false;
};

class Async {
 public:
  // A block begins. shared: its dynamic shared memory, aligned to 1024 bytes.
  void begin(std::byte* shared, std::size_t bytes, std::size_t threads);
  // The kernel has called swizzled_shared(), so its dynamic shared memory is aligned to 1024 bytes on the device too.
  void align() { aligned_ = true; }

  void init_barrier(void* at, int arrivals, std::size_t thread);
  void fence_barriers(std::size_t thread);
  void arrive(void* at, int expected_bytes, std::size_t thread);
  // Whether the phase of this parity has ended. may_arrive: lets the copies of the phase arrive if only they are
  // missing.
  bool passed(void* at, int parity, bool may_arrive, std::size_t thread);
  bool has_barriers() const { return !barriers_.empty(); }
  // The threads [begin, end) have waited for each other: each knows which phases any of them knew to have ended.
  void meet(std::size_t begin, std::size_t end);
  // The missing arrivals and bytes of the barriers, for the error of a block whose threads wait forever.
  std::string missing() const;

  void copy(void* to, const void* from, std::size_t bytes, void* barrier);
  void copy_box(void* to, const TensorBox& box, const int* at, void* barrier);
  // The thread's writes to shared memory become visible to products.
  void fence();

  void fence_products(std::size_t thread);
  void issue(std::size_t thread, const Product& product);
  void commit(std::size_t thread);
  void wait(std::size_t thread, int all_but_last);

  void end_thread(std::size_t thread) const;
  void end_block() const;

 private:
  struct Copy {
    std::byte* to;
    std::vector<std::byte> data;        // at the time of issue
    std::vector<std::uint32_t> places;  // of pieces of 16 bytes, from `to`
    std::function<std::vector<std::byte>()> read;
  };
  using Known = std::vector<std::uint64_t>;  // for each barrier, the number of phases that a thread knows to have ended
  struct Barrier {
    std::byte* at;
    std::size_t owner;
    int arrivals, pending;
    std::int64_t expected = 0, coming = 0;  // bytes
    std::uint64_t phase = 0;
    bool fenced = false;
    std::vector<Copy> copies{};
    Known arrived{}, ended{};  // what the threads knew that have arrived in this phase, and in the last one
  };
  struct Operand {
    std::vector<std::uint16_t> bits;  // [rows, 16]
    std::vector<float> values;        // the same, or [rows, 32] of pairs
  };
  struct Issued {
    Product by;  // of the first thread
    Operand a{}, b{};
    std::vector<std::array<std::uint32_t, 4>> registers;  // [128]
    int done = 0;                                         // threads
  };
  struct Warpgroup {
    std::deque<Issued> products;
    std::size_t first = 0;  // number of the first of them
  };
  struct Pending {
    Product product;
    std::size_t number, group;
  };
  // Registers in flight, and the bits of their values.
  struct Held {
    std::uint32_t* at;
    std::vector<std::uint32_t> values;
  };
  struct Thread {
    bool fenced = false;
    std::size_t issued = 0, groups = 0;
    std::deque<Pending> pending;
    std::vector<Held> sums, registers;
  };

  void check_swizzle(Swizzle swizzle) const;
  Barrier& find(const void* at);
  Known& known(std::size_t thread);
  void check_ended(Barrier& barrier);
  void add_copy(void* to, std::vector<std::uint32_t> places, std::function<std::vector<std::byte>()> read,
                void* barrier);
  void check_place(const void* to, std::size_t bytes, std::size_t alignment) const;
  Operand gather(const std::byte* memory, std::uint64_t descriptor, int rows, bool transposed, const Product& of) const;
  void compute(std::size_t thread, const Pending& pending);
  std::byte* view();

  std::byte* shared_ = nullptr;
  std::size_t bytes_ = 0;
  bool aligned_ = false;
  std::vector<Barrier> barriers_;
  std::vector<Known> known_;     // [threads] with barriers
  std::vector<std::byte> view_;  // shared memory as products see it; empty: not used yet
  std::vector<Warpgroup> warpgroups_;
  std::vector<Thread> threads_;  // with warpgroups_ empty until the block's first product
  std::size_t count_ = 0;        // of threads
};

}  // namespace charonia::cuda::host_grid
