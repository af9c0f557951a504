// Without the check of fortified longjmp, which takes another fiber's stack for a broken one.
#undef _FORTIFY_SOURCE
#include "ops/cuda/device/host_grid.h"

#include <csetjmp>
#include <exception>
#include <memory>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cuda::host_grid {
namespace {

constexpr std::size_t kStackBytes = std::size_t{256} << 10;
constexpr std::size_t kStackShiftBytes = 1024 + 64, kMostStackShiftBytes = std::size_t{64} << 10;
constexpr std::size_t kMostExchanged = 64;
constexpr unsigned kLanes = 32;
constexpr int kNaNByte = 0xff;  // four of them are a NaN, two are one in either 16-bit type

// Tells the address sanitizer which stack is in use. From one stack: leave(to), then the jump; on the other one:
// arrive().
class StackSwitch {
 public:
  // For good: what the sanitizer keeps for the stack that is left is dropped.
  static void leave_for_good(const StackSwitch& to) { start(nullptr, to); }
  void leave(const StackSwitch& to) { start(&kept_, to); }
  // On this stack, after it was left. came_from: gets the bounds of the stack before.
  void arrive(StackSwitch* came_from = nullptr) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    std::size_t bytes = 0;
    __sanitizer_finish_switch_fiber(kept_, &bottom, &bytes);
    if (came_from != nullptr) came_from->set(bottom, bytes);
#else
    (void)came_from;
#endif
  }
  void set(const void* bottom, std::size_t bytes) { bottom_ = bottom, bytes_ = bytes, kept_ = nullptr; }

 private:
  static void start([[maybe_unused]] void** kept, [[maybe_unused]] const StackSwitch& to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(kept, to.bottom_, to.bytes_);
#endif
  }

  const void* bottom_ = nullptr;
  std::size_t bytes_ = 0;
  void* kept_ = nullptr;  // the sanitizer's
};

class Stack {
 public:
  Stack() {
    memory_ = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Stack() { munmap(memory_, kStackBytes); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  void* data() const { return memory_; }

 private:
  void* memory_;
};

enum class State { ready, at_block_barrier, at_warp_barrier, done };

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
};

struct Fiber {
  Place place;
  State state = State::ready;
  bool started = false;
  int exchanges = 0;
  std::vector<Copy> open_copies;               // not committed
  std::vector<std::vector<Copy>> copy_groups;  // committed, oldest first
  std::unique_ptr<Stack> stack;
  StackSwitch stack_switch;
  jmp_buf at{};
};

struct Warp {
  unsigned lanes = 0, arrived = 0;
  alignas(64) std::byte exchanged[2][kLanes * kMostExchanged];
};

class Grid {
 public:
  void run(Index3 grid, Index3 block, std::size_t dynamic_bytes, const std::function<void()>& body);
  Fiber& fiber() { return *current_; }
  void sync_block() { wait_at(State::at_block_barrier); }
  void sync_warp();
  const void* exchange(const void* mine, std::size_t bytes);
  unsigned char* dynamic() { return reinterpret_cast<unsigned char*>(dynamic_.data()); }
  Order order = Order::ascending;

 private:
  void run_block();
  void resume(Fiber& fiber);
  void wait_at(State state);
  void release(State from, std::size_t begin, std::size_t end);
  Warp& warp_of(const Fiber& fiber) { return warps_[index_of(fiber) / kLanes]; }
  std::size_t index_of(const Fiber& fiber) const { return static_cast<std::size_t>(&fiber - fibers_.data()); }
  [[noreturn]] static void enter();
  void leave();

  struct alignas(128) Line {
    std::byte bytes[128];
  };
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<Line> dynamic_;
  std::size_t threads_ = 0, done_ = 0, at_barrier_ = 0;
  const std::function<void()>* body_ = nullptr;
  Fiber* current_ = nullptr;
  std::exception_ptr error_;
  jmp_buf scheduler_{};
  StackSwitch scheduler_stack_;
  StackSwitch scheduler_bounds_;  // of the same stack, as the fibers see it
};

Grid& grid() {
  thread_local Grid one;
  return one;
}

void Grid::run(Index3 dim, Index3 block, std::size_t dynamic_bytes, const std::function<void()>& body) {
  if (current_ != nullptr) throw Error(ErrorCode::internal, "host_grid: a kernel launches a kernel");
  threads_ = std::size_t{block.x} * block.y * block.z;
  if (threads_ == 0 || threads_ > 1024 || block.y != 1 || block.z != 1 || block.x % kLanes != 0) {
    throw Error(ErrorCode::internal, cat("host_grid: blocks of ", block.x, " x ", block.y, " x ", block.z,
                                         " threads; kernels here have one dimension and whole warps"));
  }
  if (fibers_.size() < threads_) fibers_.resize(threads_);
  warps_.resize(threads_ / kLanes);
  dynamic_.resize(dynamic_bytes / sizeof(Line) + 1);
  body_ = &body;
  error_ = nullptr;
  for (unsigned z = 0; z < dim.z; ++z) {
    for (unsigned y = 0; y < dim.y; ++y) {
      for (unsigned x = 0; x < dim.x; ++x) {
        std::memset(dynamic_.data(), kNaNByte, dynamic_.size() * sizeof(Line));
        for (std::size_t i = 0; i < threads_; ++i) {
          auto& fiber = fibers_[i];
          fiber.place = {{static_cast<unsigned>(i), 0, 0}, {x, y, z}, block, dim};
          fiber.state = State::ready;
          fiber.started = false;
          fiber.exchanges = 0;
          fiber.open_copies.clear();
          fiber.copy_groups.clear();
        }
        for (auto& warp : warps_) warp.lanes = kLanes, warp.arrived = 0;
        run_block();
        if (error_) std::rethrow_exception(error_);
      }
    }
  }
}

void Grid::run_block() {
  done_ = at_barrier_ = 0;
  while (done_ < threads_) {
    bool any = false;
    for (std::size_t i = 0; i < threads_; ++i) {
      auto& fiber = fibers_[order == Order::ascending ? i : threads_ - 1 - i];
      if (fiber.state != State::ready) continue;
      any = true;
      resume(fiber);
      if (error_) return;  // the other fibers are given up where they stand
    }
    if (!any) {
      throw Error(ErrorCode::internal,
                  cat("host_grid: of ", threads_, " threads ", at_barrier_, " wait at __syncthreads(), ", done_,
                      " have ended and the others wait for lanes of their warp that do not come"));
    }
  }
}

void Grid::resume(Fiber& fiber) {
  current_ = &fiber;
  if (_setjmp(scheduler_) == 0) {
    if (fiber.started) {
      scheduler_stack_.leave(fiber.stack_switch);
      _longjmp(fiber.at, 1);
    }
    fiber.started = true;
    if (!fiber.stack) fiber.stack = std::make_unique<Stack>();
    fiber.stack_switch.set(fiber.stack->data(), kStackBytes);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack->data();
    // Not the same offset in all stacks, which are whole pages: their tops would share few lines of the caches.
    context.uc_stack.ss_size = kStackBytes - index_of(fiber) * kStackShiftBytes % kMostStackShiftBytes;
    context.uc_link = nullptr;
    makecontext(&context, &Grid::enter, 0);
    scheduler_stack_.leave(fiber.stack_switch);
    setcontext(&context);
  }
  scheduler_stack_.arrive();
  current_ = nullptr;
}

void Grid::enter() {
  auto& self = grid();
  self.current_->stack_switch.arrive(&self.scheduler_bounds_);
  try {
    (*self.body_)();
  } catch (...) {
    self.error_ = std::current_exception();
  }
  self.leave();
  StackSwitch::leave_for_good(self.scheduler_bounds_);
  _longjmp(self.scheduler_, 1);
}

// A thread that ended is no longer waited for at the block's barriers, as on the device.
void Grid::leave() {
  auto& fiber = *current_;
  fiber.state = State::done;
  ++done_;
  --warp_of(fiber).lanes;
  if (at_barrier_ > 0 && at_barrier_ + done_ == threads_) release(State::at_block_barrier, 0, threads_);
}

void Grid::release(State from, std::size_t begin, std::size_t end) {
  for (auto i = begin; i < end; ++i) {
    if (fibers_[i].state == from) fibers_[i].state = State::ready;
  }
  if (from == State::at_block_barrier) at_barrier_ = 0;
}

void Grid::wait_at(State state) {
  auto& fiber = *current_;
  fiber.state = state;
  if (state == State::at_block_barrier) {
    if (++at_barrier_ + done_ == threads_) {
      release(state, 0, threads_);
      return;
    }
  } else {
    auto& warp = warp_of(fiber);
    if (++warp.arrived == kLanes) {
      warp.arrived = 0;
      const auto first = index_of(fiber) / kLanes * kLanes;
      release(state, first, first + kLanes);
      return;
    }
  }
  if (_setjmp(fiber.at) == 0) {
    fiber.stack_switch.leave(scheduler_bounds_);
    _longjmp(scheduler_, 1);
  }
  fiber.stack_switch.arrive(&scheduler_bounds_);
}

void Grid::sync_warp() { wait_at(State::at_warp_barrier); }

// Two buffers in turn: a lane that is one exchange ahead does not disturb those that still read.
const void* Grid::exchange(const void* mine, std::size_t bytes) {
  auto& fiber = *current_;
  auto* const buffer = warp_of(fiber).exchanged[fiber.exchanges++ % 2];
  std::memcpy(buffer + index_of(fiber) % kLanes * bytes, mine, bytes);
  sync_warp();
  return buffer;
}

}  // namespace

void set_order(Order order) { grid().order = order; }

void run(Index3 dim, Index3 block, std::size_t dynamic_shared_bytes, const std::function<void()>& body) {
  grid().run(dim, block, dynamic_shared_bytes, body);
}

const Place& place() { return grid().fiber().place; }
void sync_block() { grid().sync_block(); }
void sync_warp() { grid().sync_warp(); }
unsigned char* dynamic_shared_memory() { return grid().dynamic(); }
const void* exchange_bytes(const void* mine, std::size_t bytes) { return grid().exchange(mine, bytes); }

void copy_later(void* shared, const void* global_or_null, std::size_t bytes) {
  std::memset(shared, kNaNByte, bytes);
  grid().fiber().open_copies.push_back({shared, global_or_null, bytes});
}

void commit_copies() {
  auto& fiber = grid().fiber();
  fiber.copy_groups.push_back(std::move(fiber.open_copies));
  fiber.open_copies.clear();
}

void wait_copies(int all_but_last) {
  auto& groups = grid().fiber().copy_groups;
  while (static_cast<int>(groups.size()) > all_but_last) {
    for (const auto& copy : groups.front()) {
      if (copy.from == nullptr) {
        std::memset(copy.to, 0, copy.bytes);
      } else {
        std::memcpy(copy.to, copy.from, copy.bytes);
      }
    }
    groups.erase(groups.begin());
  }
}

}  // namespace charonia::cuda::host_grid
