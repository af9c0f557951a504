#include "emulator/host_grid.h"

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#include "base/text.h"
#include "charonia/error.h"
#include "emulator/host_async.h"

namespace charonia::cuda::host_grid {
namespace {

constexpr std::size_t kStackBytes = std::size_t{256} << 10;
constexpr std::size_t kStackShiftBytes = 1024 + 64, kMaxStackShiftBytes = std::size_t{64} << 10;
constexpr std::size_t kMaxExchanged = 64;
constexpr unsigned kLanes = 32;
constexpr int kNaNByte = 0xff;                  // four such bytes are a float NaN, two are a NaN in both 16-bit types
constexpr std::size_t kSharedAlignment = 1024;  // of swizzled_shared()
constexpr unsigned kMaxClusterBlocks = 8;       // the limit that every device with clusters supports
constexpr unsigned kMaxThreads = 1024, kMaxBlocksX = 2147483647, kMaxBlocksYZ = 65535;

constexpr const char* kOrderVariable = "CHARONIA_EMULATED_ORDER";
constexpr std::uint64_t kDefaultSeed = 1;

std::uint64_t seed_of_environment() {
  const char* const text = std::getenv(kOrderVariable);
  if (text == nullptr || *text == '\0') return kDefaultSeed;
  const std::string_view all = text;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(all.data(), all.data() + all.size(), value);
  if (error != std::errc{} || end != all.data() + all.size()) {
    throw Error(ErrorCode::invalid_argument,
                cat(kOrderVariable, "=", all, " must be a whole number of at least 0, the seed of an order"));
  }
  return value;
}

std::atomic<std::uint64_t>& current_seed() {
  static std::atomic<std::uint64_t> value = seed_of_environment();
  return value;
}
std::atomic<Order> current_order = Order::ascending;

[[noreturn]] void fail(const std::string& text) {
  throw Error(ErrorCode::internal, cat("host_grid: ", text, " (", order_text(), ")"));
}

std::string to_text(const Index3& index) { return cat("(", index.x, ", ", index.y, ", ", index.z, ")"); }

// Notifies the address sanitizer which stack is in use. On the old stack: leave(to), then the jump; on the new stack:
// arrive().
class StackSwitch {
 public:
  void leave([[maybe_unused]] const StackSwitch& to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&kept_, to.bottom_, to.bytes_);
#endif
  }
  // Call on the new stack. came_from: receives the bounds of the previous stack.
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
  const void* bottom_ = nullptr;
  std::size_t bytes_ = 0;
  void* kept_ = nullptr;  // used by the sanitizer
};

// A stack with a guard page below it.
class Stack {
 public:
  Stack() : guard_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
    void* const at = mmap(nullptr, guard_ + kStackBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<std::byte*>(at);
    if (mprotect(memory_, guard_, PROT_NONE) != 0) throw std::bad_alloc();
  }
  ~Stack() {
    forget();
    munmap(memory_, guard_ + kStackBytes);
  }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  void* data() const { return memory_ + guard_; }
  // Clears the sanitizer's marks of abandoned frames.
  void forget() const {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(data(), kStackBytes);
#endif
  }

 private:
  std::size_t guard_;
  std::byte* memory_ = nullptr;
};

// Allocates exactly this number of bytes, so that the address sanitizer detects accesses beyond the end.
class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(std::size_t bytes, std::size_t alignment) : bytes_(bytes) {
    void* at = nullptr;
    if (posix_memalign(&at, std::max(alignment, sizeof(void*)), std::max<std::size_t>(bytes, 1)) != 0) {
      throw std::bad_alloc();
    }
    memory_.reset(static_cast<std::byte*>(at));
  }
  std::byte* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }
  void begin() { std::memset(data(), kNaNByte, bytes_); }
  bool holds(const void* at, std::size_t bytes) const {
    const auto first = reinterpret_cast<std::uintptr_t>(data()), wanted = reinterpret_cast<std::uintptr_t>(at);
    return wanted >= first && wanted - first <= bytes_ && bytes_ - (wanted - first) >= bytes;
  }

 private:
  struct Free {
    void operator()(std::byte* at) const { std::free(at); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_ = 0;
};

struct Variable {
  const void* key;
  bool begun;  // initialised in this block
  SharedMemory memory;
};

enum class State : std::uint8_t {
  ready,
  at_block_barrier,
  at_warp_barrier,
  at_cluster_barrier,
  at_dependency,
  at_phase,
  done
};

// Where a fiber is: not started, or abandoned; between two threads of blocks; within a thread.
enum class Context { none, between, inside };

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
};

// The buffer of __builtin_setjmp(): the calling function has saved the registers itself, so a jump is three loads.
using Point = void* [5];

struct alignas(64) Fiber {
  Place place;
  Context context = Context::none;
  bool waited = false, triggered = false;
  int exchanges = 0;
  Point at{};
  const void* frame = nullptr;                 // end of its stack when it last waited
  std::vector<Copy> open_copies;               // not committed
  std::vector<std::vector<Copy>> copy_groups;  // committed, oldest first
  std::unique_ptr<Stack> stack;
  StackSwitch stack_switch;
};

struct Warp {
  unsigned lanes = 0, arrived = 0;
  alignas(64) std::byte exchanged[2][kLanes * kMaxExchanged];
};

class Block;
using Blocks = std::vector<std::unique_ptr<Block>>;

// Runs one thread block at a time; the object is reused for later blocks.
class Block {
 public:
  // cluster: the block and its neighbours, in order.
  void prepare(const Shape& shape, const std::function<void()>& body, const Blocks& cluster);
  // threads: the order in which they run, [threads of a block].
  void begin(Index3 block, std::span<const unsigned> threads);
  // Runs until all threads are done or wait at the cluster's barrier; early: also stops when they wait for the previous
  // kernel.
  void run(bool early);
  bool done() const { return done_ == threads_; }
  bool at_cluster_barrier() const { return at_cluster_barrier_ > 0; }
  void leave_cluster_barrier() { release(State::at_cluster_barrier, 0, threads_); }
  // All threads have ended: fills the shared memory with NaN, because other blocks must not read it any more.
  void end_shared();
  // Abandons the block in its current state.
  void abort() { done_ = threads_; }

  const Shape& shape() const { return *shape_; }
  Fiber& fiber() { return *current_; }
  void sync_block() { wait_at(State::at_block_barrier, nullptr); }
  void sync_warp() { wait_at(State::at_warp_barrier, nullptr); }
  void sync_cluster() { wait_at(State::at_cluster_barrier, nullptr); }
  const Blocks& cluster() const { return *cluster_; }
  void wait_for_dependency();
  // Barriers in shared memory (host_async.h). wait_for_phase(): a thread must check its phase again afterwards.
  // notify(): the phase of a barrier may have ended.
  Async& async() { return async_; }
  bool early() const { return early_; }
  void wait_for_phase(const void* barrier);
  void notify(const void* barrier);
  // In the warp that runs only when no other one can: lets the others run.
  void let_others_run();
  const void* exchange(const void* mine, std::size_t bytes);
  unsigned char* dynamic() { return reinterpret_cast<unsigned char*>(dynamic_.data()); }
  void* variable(const void* key, std::size_t bytes, std::size_t alignment);
  bool in_shared(const void* at, std::size_t bytes) const;
  [[noreturn]] void fail_here(std::string_view text) const;

 private:
  Fiber* next();
  bool is_starved(std::size_t thread) const { return async_.has_barriers() && thread / kLanes == starved_warp_; }
  const std::uint8_t* ready_of_others() const;
  void run_fibers(Fiber& first);
  [[noreturn]] void go_to(Fiber& fiber, StackSwitch& from);
  [[noreturn]] void go_on();
  const void* switch_away(const void* result);
  void arrive();
  static void enter();
  void leave();
  const void* wait_at(State state, const void* result);
  void set_state(std::size_t thread, State state);
  void release(State from, std::size_t begin, std::size_t end);
  Warp& warp_of(const Fiber& fiber) { return warps_[index_of(fiber) / kLanes]; }
  static std::size_t index_of(const Fiber& fiber) { return fiber.place.thread.x; }

  const Shape* shape_ = nullptr;
  const std::function<void()>* body_ = nullptr;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  SharedMemory dynamic_;
  std::vector<Variable> variables_;
  Async async_;
  std::vector<const void*> awaited_;  // [threads] the barrier of a thread at_phase
  std::size_t static_bytes_ = 0;
  std::span<const unsigned> order_;
  // Separate from the fibers, for fast searches: [threads] the state of each thread and its position in the order;
  // [turns] whether the thread at each position is ready.
  std::vector<State> states_;
  std::vector<unsigned> turns_;
  std::vector<std::uint8_t> ready_;
  std::size_t next_turn_ = 0, starved_warp_ = 0;
  const Blocks* cluster_ = nullptr;
  std::size_t threads_ = 0, done_ = 0, at_barrier_ = 0, at_cluster_barrier_ = 0;
  bool early_ = false, from_scheduler_ = false;
  Fiber* current_ = nullptr;
  std::exception_ptr error_;
  Point scheduler_{};
  StackSwitch scheduler_stack_;
  StackSwitch scheduler_bounds_;  // bounds of the same stack, from the fibers' point of view
};

// The block whose fibers this thread runs.
thread_local Block* running = nullptr;
thread_local LoadWatch load_watch;

Block& block() {
  if (running == nullptr) fail_outside();
  return *running;
}

// Unused blocks: of a kernel and of the next one.
Blocks& idle_blocks() {
  thread_local Blocks blocks;
  return blocks;
}

void Block::prepare(const Shape& shape, const std::function<void()>& body, const Blocks& cluster) {
  shape_ = &shape;
  cluster_ = &cluster;
  body_ = &body;
  threads_ = shape.block.x;
  if (fibers_.size() < threads_) fibers_.resize(threads_);
  states_.resize(threads_);
  turns_.resize(threads_);
  ready_.resize(threads_);
  warps_.resize(threads_ / kLanes);
  if (dynamic_.data() == nullptr || dynamic_.bytes() != shape.dynamic_shared_bytes) {
    dynamic_ = SharedMemory(shape.dynamic_shared_bytes, kSharedAlignment);
  }
  variables_.clear();
  static_bytes_ = 0;
}

void Block::begin(Index3 at, std::span<const unsigned> threads) {
  order_ = threads;
  dynamic_.begin();
  for (auto& variable : variables_) variable.begun = false;
  for (std::size_t i = 0; i < threads_; ++i) {
    auto& fiber = fibers_[i];
    fiber.place = {{static_cast<unsigned>(i), 0, 0}, at, shape_->block, shape_->grid};
    if (fiber.context == Context::inside) fiber.context = Context::none;
    fiber.waited = fiber.triggered = false;
    fiber.exchanges = 0;
    fiber.open_copies.clear();
    fiber.copy_groups.clear();
  }
  for (std::size_t turn = 0; turn < threads_; ++turn) turns_[order_[turn]] = static_cast<unsigned>(turn);
  std::ranges::fill(states_, State::ready);
  std::ranges::fill(ready_, std::uint8_t{1});
  for (auto& warp : warps_) warp.lanes = kLanes, warp.arrived = 0;
  done_ = at_barrier_ = at_cluster_barrier_ = 0;
  error_ = nullptr;
  async_.begin(dynamic_.data(), dynamic_.bytes(), threads_);
  starved_warp_ = (at.x + at.y + at.z) % warps_.size();
}

void Block::run(bool early) {
  if (running != nullptr) throw Error(ErrorCode::internal, "host_grid: a kernel launches a kernel");
  early_ = early;
  if (!early) {
    release(State::at_dependency, 0, threads_);
    release(State::at_phase, 0, threads_);
  }
  next_turn_ = 0;
  if (auto* const first = next()) run_fibers(*first);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));  // the other fibers are abandoned
  if (done_ == threads_ || at_cluster_barrier_ == threads_) return;
  const auto waiting_for_phase = std::ranges::count(states_, State::at_phase);
  if (early && (waiting_for_phase > 0 || std::ranges::find(states_, State::at_dependency) != states_.end())) return;
  if (waiting_for_phase > 0) {
    fail(cat(shape_->what, ": ", waiting_for_phase, " threads wait at barrier_wait() for a phase that never ends (",
             async_.missing(), "), ", at_barrier_, " at __syncthreads(), and ", done_, " of ", threads_,
             " have ended"));
  }
  fail(cat(shape_->what, ": of ", threads_, " threads ", at_barrier_, " wait at __syncthreads(), ",
           at_cluster_barrier_ > 0 ? cat(at_cluster_barrier_, " at cluster_sync(), ") : "", done_,
           " have ended, and the others wait for lanes of their warp that never arrive"));
}

// The first ready turn of a thread that is not in the starved warp; null if there is none.
const std::uint8_t* Block::ready_of_others() const {
  for (std::size_t i = 0; i < threads_; ++i) {
    const auto turn = (next_turn_ + i) % threads_;
    if (ready_[turn] != 0 && order_[turn] / kLanes != starved_warp_) return &ready_[turn];
  }
  return nullptr;
}

void Block::let_others_run() {
  if (is_starved(index_of(*current_)) && ready_of_others() != nullptr) switch_away(nullptr);
}

// Returns the next ready fiber, round-robin in the order of the threads; null if none is ready.
Fiber* Block::next() {
  const auto find = [&](std::size_t begin, std::size_t end) {
    const auto* const at = end == begin ? nullptr : std::memchr(&ready_[begin], 1, end - begin);
    return static_cast<const std::uint8_t*>(at);
  };
  const auto* found = async_.has_barriers() ? ready_of_others() : nullptr;
  if (found == nullptr) found = find(next_turn_, threads_);
  if (found == nullptr) found = find(0, next_turn_);
  if (found == nullptr) return nullptr;
  const auto turn = static_cast<std::size_t>(found - ready_.data());
  next_turn_ = turn + 1;
  // Fibers and their stacks are far apart in memory, and the next ones in the order will probably run next.
  if (turn + 2 < threads_) {
    constexpr std::size_t kLine = 64;
    __builtin_prefetch(&fibers_[order_[turn + 2]].at);
    const auto* const frame = static_cast<const char*>(fibers_[order_[turn + 1]].frame);
    __builtin_prefetch(frame);
    __builtin_prefetch(frame + kLine);
  }
  return &fibers_[order_[turn]];
}

// Runs fibers until none is ready or one has failed. Each fiber switches to the next one.
void Block::run_fibers(Fiber& first) {
  running = this;
  if (__builtin_setjmp(scheduler_) == 0) {
    from_scheduler_ = true;
    go_to(first, scheduler_stack_);
  }
  scheduler_stack_.arrive();
  current_ = nullptr;
  current_place = nullptr;
  running = nullptr;
}

// Does not return; a later jump returns to the old stack. from: the old stack.
void Block::go_to(Fiber& fiber, StackSwitch& from) {
  current_ = &fiber;
  current_place = &fiber.place;
  if (std::exchange(fiber.context, Context::inside) != Context::none) {
    from.leave(fiber.stack_switch);
    __builtin_longjmp(fiber.at, 1);
  }
  if (!fiber.stack) fiber.stack = std::make_unique<Stack>();
  fiber.stack->forget();
  fiber.stack_switch.set(fiber.stack->data(), kStackBytes);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack->data();
  // Different offsets in the stacks, which consist of whole pages: otherwise their tops would share only a few cache
  // lines.
  context.uc_stack.ss_size = kStackBytes - index_of(fiber) * kStackShiftBytes % kMaxStackShiftBytes;
  context.uc_link = nullptr;
  makecontext(&context, &Block::enter, 0);
  from.leave(fiber.stack_switch);
#if defined(__SANITIZE_ADDRESS__)
  // This frame is never returned to. The sanitizer detects abandoned frames for longjmp, but not for setcontext.
  __asan_handle_no_return();
#endif
  setcontext(&context);
  std::abort();  // setcontext() returns only if it fails
}

// Switches from the running fiber to the next one, or back to run_fibers().
void Block::go_on() {
  auto& from = current_->stack_switch;
  if (auto* const to = error_ ? nullptr : next()) {
    from_scheduler_ = false;
    go_to(*to, from);
  }
  from.leave(scheduler_bounds_);
  __builtin_longjmp(scheduler_, 1);
}

// Returns `result` when the fiber runs again. Functions that kernels call end with a tail call of this function. The
// compiler makes it a jump, because each return after a switch is mispredicted and costs twenty cycles.
[[gnu::noinline]] const void* Block::switch_away(const void* result) {
  current_->frame = __builtin_frame_address(0);
  if (__builtin_setjmp(current_->at) == 0) go_on();
  arrive();
  return result;
}

void Block::arrive() { current_->stack_switch.arrive(from_scheduler_ ? &scheduler_bounds_ : nullptr); }

// The main function of a fiber. It runs a thread of this block, then of the next block; a new context for each thread
// would cost as much as many threads' work.
void Block::enter() {
  auto& self = *running;
  self.arrive();
  while (true) {
    try {
      (*self.body_)();
      self.leave();
    } catch (...) {
      self.error_ = std::current_exception();
    }
    self.current_->context = Context::between;
    self.switch_away(nullptr);
  }
}

// A thread that has ended no longer counts for the block's barriers, as on the device.
void Block::leave() {
  auto& fiber = *current_;
  if (shape_->overlap && !fiber.waited) {
    fail_here("ends without dependency_wait(): the next kernel could start before the previous kernel has ended");
  }
  try {
    async_.end_thread(index_of(fiber));
    if (done_ + 1 == threads_) async_.end_block();
  } catch (const Misuse& misuse) {
    fail_here(misuse.text);
  }
  set_state(index_of(fiber), State::done);
  ++done_;
  --warp_of(fiber).lanes;
  if (at_barrier_ > 0 && at_barrier_ + done_ == threads_) release(State::at_block_barrier, 0, threads_);
}

void Block::set_state(std::size_t thread, State state) {
  states_[thread] = state;
  ready_[turns_[thread]] = state == State::ready ? 1 : 0;
}

void Block::release(State from, std::size_t begin, std::size_t end) {
  for (auto i = begin; i < end; ++i) {
    if (states_[i] == from) set_state(i, State::ready);
  }
  if (from == State::at_block_barrier) at_barrier_ = 0;
  if (from == State::at_cluster_barrier) at_cluster_barrier_ = 0;
}

// Returns `result` when the thread may continue.
inline const void* Block::wait_at(State state, const void* result) {
  auto& fiber = *current_;
  set_state(index_of(fiber), state);
  if (state == State::at_block_barrier) {
    if (++at_barrier_ + done_ == threads_) {
      if (async_.has_barriers()) async_.meet(0, threads_);
      release(state, 0, threads_);
      return result;
    }
  } else if (state == State::at_cluster_barrier) {
    ++at_cluster_barrier_;
  } else if (state == State::at_warp_barrier) {
    auto& warp = warp_of(fiber);
    if (++warp.arrived == kLanes) {
      warp.arrived = 0;
      const auto first = index_of(fiber) / kLanes * kLanes;
      if (async_.has_barriers()) async_.meet(first, first + kLanes);
      release(state, first, first + kLanes);
      return result;
    }
  }
  return switch_away(result);
}

void Block::wait_for_phase(const void* barrier) {
  awaited_.resize(threads_);
  awaited_[index_of(*current_)] = barrier;
  wait_at(State::at_phase, nullptr);
}

void Block::notify(const void* barrier) {
  for (std::size_t i = 0; i < std::min(awaited_.size(), threads_); ++i) {
    if (awaited_[i] == barrier && states_[i] == State::at_phase) set_state(i, State::ready);
  }
}

void Block::wait_for_dependency() {
  current_->waited = true;
  if (early_) wait_at(State::at_dependency, nullptr);
}

// Two alternating buffers: a lane that is one exchange ahead does not overwrite data that others still read.
const void* Block::exchange(const void* mine, std::size_t bytes) {
  auto& fiber = *current_;
  auto* const buffer = warp_of(fiber).exchanged[fiber.exchanges++ % 2];
  std::memcpy(buffer + index_of(fiber) % kLanes * bytes, mine, bytes);
  return wait_at(State::at_warp_barrier, buffer);
}

void* Block::variable(const void* key, std::size_t bytes, std::size_t alignment) {
  auto found = std::ranges::find(variables_, key, &Variable::key);
  if (found == variables_.end()) {
    static_bytes_ += bytes;
    const auto dynamic = shape_->dynamic_shared_bytes;
    if (static_bytes_ > kGivenSharedBytes) {
      fail(cat(shape_->what, ": ", static_bytes_, " bytes of static shared memory; a block has ", kGivenSharedBytes));
    }
    const auto most = dynamic > kGivenSharedBytes ? kMaxSharedBytes : kGivenSharedBytes;
    if (static_bytes_ + dynamic > most) {
      fail(cat(shape_->what, ": ", static_bytes_, " bytes of static and ", dynamic,
               " of dynamic shared memory; a block has ", most,
               most < kMaxSharedBytes ? ", because larger dynamic shared memory was not requested" : ""));
    }
    variables_.push_back({key, false, SharedMemory(bytes, alignment)});
    found = variables_.end() - 1;
  }
  if (!found->begun) {
    found->memory.begin();
    found->begun = true;
  }
  return found->memory.data();
}

void Block::end_shared() {
  dynamic_.begin();
  for (auto& variable : variables_) variable.memory.begin();
}

bool Block::in_shared(const void* at, std::size_t bytes) const {
  return dynamic_.holds(at, bytes) ||
         std::ranges::any_of(variables_, [&](const Variable& one) { return one.begun && one.memory.holds(at, bytes); });
}

void Block::fail_here(std::string_view text) const {
  const auto& at = current_->place;
  fail(cat(shape_->what, ": thread ", at.thread.x, " of block ", to_text(at.block), " ", text));
}

}  // namespace

void set_order(Order order) { current_order = order; }
void set_seed(std::uint64_t seed) { current_seed() = seed; }
std::uint64_t seed() { return current_seed(); }
std::string order_text() {
  return cat(kOrderVariable, "=", seed(), current_order == Order::descending ? ", descending" : "");
}

void check(const Shape& shape) {
  const auto& [x, y, z] = shape.grid;
  if (x == 0 || y == 0 || z == 0 || x > kMaxBlocksX || y > kMaxBlocksYZ || z > kMaxBlocksYZ) {
    fail(cat(shape.what, ": a grid of ", to_text(shape.grid), " blocks; it may have from (1, 1, 1) to ",
             to_text({kMaxBlocksX, kMaxBlocksYZ, kMaxBlocksYZ})));
  }
  const auto& block = shape.block;
  if (block.x == 0 || block.x > kMaxThreads || block.y != 1 || block.z != 1 || block.x % kLanes != 0) {
    fail(cat(shape.what, ": blocks of ", to_text(block),
             " threads; kernels here have one dimension, whole warps and at most ", kMaxThreads, " threads"));
  }
  const auto blocks = shape.cluster_y;
  if (blocks == 0 || blocks > kMaxClusterBlocks || (blocks & (blocks - 1)) != 0 || y % blocks != 0) {
    fail(cat(shape.what, ": clusters of ", blocks, " of ", y, " blocks along y; they may have 1, 2, 4 or ",
             kMaxClusterBlocks, ", and divide the grid"));
  }
  if (shape.dynamic_shared_bytes > kMaxSharedBytes) {
    fail(cat(shape.what, ": ", shape.dynamic_shared_bytes, " bytes of dynamic shared memory; a block has ",
             kMaxSharedBytes));
  }
}

struct Run::Impl {
  Impl(Shape&& what, std::function<void()>&& of) : shape(std::move(what)), body(std::move(of)) {
    check(shape);
    auto& idle = idle_blocks();
    while (cluster.size() < shape.cluster_y) {
      if (idle.empty()) {
        cluster.push_back(std::make_unique<Block>());
      } else {
        cluster.push_back(std::move(idle.back()));
        idle.pop_back();
      }
    }
    for (auto& block : cluster) block->prepare(shape, body, cluster);
    clusters.resize(std::size_t{shape.grid.x} * (shape.grid.y / shape.cluster_y) * shape.grid.z);
    threads.resize(cluster.size(), std::vector<unsigned>(shape.block.x));
    turns.resize(cluster.size());
    std::iota(clusters.begin(), clusters.end(), std::size_t{0});
    std::iota(turns.begin(), turns.end(), std::size_t{0});
    const auto number = seed();
    shuffled = number != 0;
    descending = current_order == Order::descending;
    std::seed_seq numbers{static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(number >> 32),
                          static_cast<std::uint32_t>(shape.place), static_cast<std::uint32_t>(shape.place >> 32)};
    random.seed(numbers);
    draw(clusters);
  }

  ~Impl() {
    for (auto& block : cluster) {
      block->abort();
      idle_blocks().push_back(std::move(block));
    }
  }

  template <class T>
  void draw(std::vector<T>& order) {
    if (shuffled) std::ranges::shuffle(order, random);
    if (descending) std::ranges::reverse(order);
  }

  void begin_cluster() {
    const auto at = clusters[next_cluster++];
    const auto row = at / shape.grid.x, rows = std::size_t{shape.grid.y} / shape.cluster_y;
    for (std::size_t i = 0; i < cluster.size(); ++i) {
      std::iota(threads[i].begin(), threads[i].end(), 0U);
      draw(threads[i]);
      cluster[i]->begin({static_cast<unsigned>(at % shape.grid.x),
                         static_cast<unsigned>(row % rows * shape.cluster_y + i), static_cast<unsigned>(row / rows)},
                        threads[i]);
    }
    if (cluster.size() > 1) draw(turns);
  }

  // Runs the blocks in turn, up to the cluster's barrier or the end. When all blocks have reached the barrier, they
  // continue.
  void run_cluster() {
    for (;;) {
      for (const auto i : turns) {
        auto& block = *cluster[i];
        if (block.done() || block.at_cluster_barrier()) continue;
        block.run(false);
        if (block.done() && cluster.size() > 1) block.end_shared();
      }
      if (std::ranges::all_of(cluster, [](const auto& block) { return block->done(); })) return;
      if (std::ranges::any_of(cluster, [](const auto& block) { return block->done(); })) {
        fail(cat(shape.what, ": a block has ended and another one of its cluster waits at cluster_sync()"));
      }
      for (auto& block : cluster) block->leave_cluster_barrier();
    }
  }

  Shape shape;
  std::function<void()> body;
  Blocks cluster;
  std::vector<std::size_t> clusters;           // in the order of execution
  std::vector<std::vector<unsigned>> threads;  // of each block of a cluster, in the order of execution
  std::vector<std::size_t> turns;              // of the cluster's blocks, in the order of execution
  std::size_t next_cluster = 0;
  bool shuffled = false, descending = false, started = false;
  std::minstd_rand random;
};

Run::Run(Shape shape, std::function<void()> body) : impl_(std::make_unique<Impl>(std::move(shape), std::move(body))) {}
Run::~Run() = default;

void Run::start() {
  impl_->begin_cluster();
  impl_->started = true;
  impl_->cluster[impl_->turns.front()]->run(true);
}

void Run::finish() {
  if (impl_->started) impl_->run_cluster();
  while (impl_->next_cluster < impl_->clusters.size()) {
    impl_->begin_cluster();
    impl_->run_cluster();
  }
}

constinit thread_local const Place* current_place = nullptr;
void fail_outside() { throw Error(ErrorCode::internal, "host_grid: a device function was called outside a kernel"); }
void sync_block() { block().sync_block(); }
void sync_warp() { block().sync_warp(); }
void sync_cluster() { block().sync_cluster(); }
int rank_in_cluster() { return static_cast<int>(place().block.y % block().cluster().size()); }
const void* at_rank(const void* own_shared, std::size_t bytes, int rank) {
  auto& own = block();
  const auto offset = static_cast<const unsigned char*>(own_shared) - own.dynamic();
  const auto size = static_cast<std::ptrdiff_t>(own.shape().dynamic_shared_bytes);
  if (offset < 0 || offset + static_cast<std::ptrdiff_t>(bytes) > size) {
    own.fail_here(cat("map_shared_rank(): ", bytes, " bytes that are not in the block's dynamic shared memory"));
  }
  if (rank < 0 || rank >= static_cast<int>(own.cluster().size())) {
    own.fail_here(cat("map_shared_rank(): rank ", rank, " of a cluster of ", own.cluster().size()));
  }
  return own.cluster()[static_cast<std::size_t>(rank)]->dynamic() + offset;
}
void wait_for_dependency() { block().wait_for_dependency(); }
unsigned char* dynamic_shared_memory() { return block().dynamic(); }
unsigned char* swizzled_shared_memory() {
  block().async().align();
  return block().dynamic();
}
void* static_shared_memory(const void* key, std::size_t bytes, std::size_t alignment) {
  return block().variable(key, bytes, alignment);
}
const void* exchange_bytes(const void* mine, std::size_t bytes) { return block().exchange(mine, bytes); }

void check_aligned(const void* at, std::size_t bytes, std::string_view what) {
  if (reinterpret_cast<std::uintptr_t>(at) % bytes == 0) return;
  block().fail_here(cat(what, "(): an access of ", bytes, " bytes is misaligned by ",
                        reinterpret_cast<std::uintptr_t>(at) % bytes, " bytes"));
}

void check_shared(const void* at, std::size_t bytes, std::string_view what) {
  check_aligned(at, bytes, what);
  if (block().in_shared(at, bytes)) return;
  block().fail_here(cat(what, "(): ", bytes, " bytes that are not in the block's shared memory"));
}

void check_waited(std::string_view what) {
  const auto& here = block();
  if (here.shape().overlap && !block().fiber().waited)
    here.fail_here(cat("calls ", what, "() before dependency_wait()"));
}

void check_atomic(const void* at, std::size_t bytes) {
  check_aligned(at, bytes, "an atomic function");
  if (!block().fiber().waited && !block().in_shared(at, bytes)) check_waited("an atomic function");
}

Calls& calls() {
  thread_local Calls all;
  return all;
}
void note_trigger() {
  block().fiber().triggered = true;
  ++calls().triggers;
}
namespace {
void note_request() { ++(block().fiber().triggered ? calls().requests_after : calls().requests_before); }
}  // namespace

void watch_streaming_loads(LoadWatch watch) { load_watch = std::move(watch); }
void note_streaming_load(const void* at, std::size_t bytes) {
  note_request();
  if (load_watch) load_watch(place(), at, bytes);
}

void copy_later(void* shared, const void* global_or_null, std::size_t bytes) {
  check_shared(shared, bytes, "copy_async");
  if (global_or_null != nullptr) {
    check_aligned(global_or_null, bytes, "copy_async");
    if (block().in_shared(global_or_null, bytes)) block().fail_here("copy_async(): from shared memory");
    note_request();
  }
  std::memset(shared, kNaNByte, bytes);
  block().fiber().open_copies.push_back({shared, global_or_null, bytes});
}

void commit_copies() {
  auto& fiber = block().fiber();
  fiber.copy_groups.push_back(std::move(fiber.open_copies));
  fiber.open_copies.clear();
}

void wait_copies(int all_but_last) {
  auto& groups = block().fiber().copy_groups;
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

namespace {

// Calls f with the block's asynchronous state, and adds the thread to its errors.
template <class F>
auto with_async(F f) {
  auto& here = block();
  try {
    return f(here.async());
  } catch (const Misuse& misuse) {
    here.fail_here(misuse.text);
  }
}
std::size_t this_thread() { return place().thread.x; }

}  // namespace

std::uint32_t offset_in_shared(const void* at) {
  auto& here = block();
  const auto offset = static_cast<const unsigned char*>(at) - here.dynamic();
  if (offset < 0 || offset >= static_cast<std::ptrdiff_t>(here.shape().dynamic_shared_bytes)) {
    here.fail_here("uses an address that is not in the block's dynamic shared memory");
  }
  return static_cast<std::uint32_t>(offset);
}

void init_barrier(void* at, int arrivals) {
  check_shared(at, sizeof(std::uint64_t), "barrier_init");
  with_async([&](Async& async) { async.init_barrier(at, arrivals, this_thread()); });
}
void fence_barriers() {
  with_async([](Async& async) { async.fence_barriers(this_thread()); });
}
void arrive_at_barrier(void* at, int expected_bytes) {
  with_async([&](Async& async) { async.arrive(at, expected_bytes, this_thread()); });
  block().notify(at);
}
void copy_bulk(void* to, const void* from, std::size_t bytes, void* barrier) {
  note_request();
  ++calls().bulk_copies;
  with_async([&](Async& async) { async.copy(to, from, bytes, barrier); });
  block().notify(barrier);
}
void copy_box(void* to, const TensorMap& map, const int* at, std::size_t rank, void* barrier) {
  TensorBox box;
  std::memcpy(&box, map.bytes.data(), sizeof box);
  if (box.rank != static_cast<int>(rank))
    block().fail_here(cat("copies a box with ", rank, " coordinates of ", box.rank));
  note_request();
  ++calls().bulk_copies;
  with_async([&](Async& async) { async.copy_box(to, box, at, barrier); });
  block().notify(barrier);
}
// A block that has started early lets no copy arrive: the kernel in front may still write the source.
void wait_at_barrier(void* at, int parity) {
  block().let_others_run();
  while (!with_async([&](Async& async) { return async.passed(at, parity, !block().early(), this_thread()); })) {
    block().wait_for_phase(at);
  }
}
void fence_shared() {
  with_async([](Async& async) { async.fence(); });
}

void fence_products() {
  sync_warp();
  with_async([](Async& async) { async.fence_products(this_thread()); });
}
void issue_product(const Product& product) {
  with_async([&](Async& async) { async.issue(this_thread(), product); });
}
void commit_products() {
  sync_warp();
  with_async([](Async& async) { async.commit(this_thread()); });
}
void wait_products(int all_but_last) {
  sync_warp();
  with_async([&](Async& async) { async.wait(this_thread(), all_but_last); });
}

}  // namespace charonia::cuda::host_grid
