#include "emulator/host_stream.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::cuda::host_stream {
namespace {

constexpr const char* kModeVariable = "CHARONIA_EMULATED_STREAMS";

Mode mode_of_environment() {
  const char* const text = std::getenv(kModeVariable);
  const std::string_view value = text == nullptr ? "" : text;
  if (value.empty() || value == "deferred") return Mode::deferred;
  if (value == "immediate") return Mode::immediate;
  throw Error(ErrorCode::invalid_argument, cat(kModeVariable, "=", value, " must be deferred or immediate"));
}

std::atomic<Mode>& current_mode() {
  static std::atomic<Mode> mode = mode_of_environment();
  return mode;
}

// All deferred streams use one lock, because a wait for one stream may run the work of others, in any thread.
std::recursive_mutex& lock() {
  static std::recursive_mutex one;
  return one;
}

std::vector<std::weak_ptr<Queue>>& all_queues() {
  static std::vector<std::weak_ptr<Queue>> queues;
  return queues;
}

std::map<const std::byte*, std::size_t>& pinned() {
  static std::map<const std::byte*, std::size_t> ranges;
  return ranges;
}

bool is_pinned(const void* at) {
  const std::lock_guard guard(lock());
  const auto* const address = static_cast<const std::byte*>(at);
  const auto behind = pinned().upper_bound(address);
  if (behind == pinned().begin()) return false;
  const auto& [begin, bytes] = *std::prev(behind);
  return static_cast<std::size_t>(address - begin) < bytes;
}

// Runs steps in order, but starts a kernel before the previous one has run.
class Executor {
 public:
  explicit Executor(std::uint64_t& kernels) : kernels_(kernels) {}
  void run(const Step& step) {
    if (const auto* const kernel = std::get_if<Kernel>(&step)) {
      auto shape = kernel->shape;
      shape.place = kernels_++;
      const bool overlap = shape.overlap;
      auto next = std::make_unique<host_grid::Run>(std::move(shape), kernel->body);
      if (held_ && overlap) next->start();
      finish();
      held_ = std::move(next);
    } else {
      finish();
      std::get<Task>(step).run();
    }
  }
  void run(const Capture& capture) {
    for (const auto& step : capture) run(step);
  }
  void finish() {
    if (const auto held = std::exchange(held_, nullptr)) held->finish();
  }

 private:
  std::uint64_t& kernels_;
  std::unique_ptr<host_grid::Run> held_;
};

}  // namespace

void set_mode(Mode mode) { current_mode() = mode; }
Mode mode() { return current_mode(); }

void Mark::wait() const {
  if (queue_ == nullptr) return;
  const std::lock_guard guard(lock());
  queue_->run_to(count_);
}

bool Mark::done() const {
  if (queue_ == nullptr) return true;
  const std::lock_guard guard(lock());
  return queue_->done_ >= count_;
}

std::shared_ptr<Queue> Queue::make() {
  std::shared_ptr<Queue> queue(new Queue(mode()));
  const std::lock_guard guard(lock());
  std::erase_if(all_queues(), [](const auto& one) { return one.expired(); });
  all_queues().push_back(queue);
  return queue;
}

void Queue::add(Step step) {
  if (capture_) {
    capture_->push_back(std::move(step));
  } else {
    add_work(std::move(step));
  }
}

void Queue::add(std::shared_ptr<const Capture> capture) {
  if (capture_) throw Error(ErrorCode::internal, "a graph is launched within a capture");
  add_work(std::move(capture));
}

void Queue::add(const Mark& mark) {
  if (capture_) throw Error(ErrorCode::internal, "an event is waited for within a capture");
  if (mark.queue_ != nullptr && mark.queue_.get() != this) add_work(mark);
}

Mark Queue::mark() {
  if (capture_) throw Error(ErrorCode::internal, "an event is recorded within a capture");
  Mark mark;
  if (mode_ == Mode::immediate) return mark;
  const std::lock_guard guard(lock());
  mark.queue_ = shared_from_this();
  mark.count_ = added_;
  return mark;
}

void Queue::upload(void* to, const void* from, std::size_t bytes) {
  if (capture_ || mode_ == Mode::immediate || is_pinned(from)) {
    add(Task{[=] { std::memcpy(to, from, bytes); }});
    return;
  }
  const auto* const begin = static_cast<const std::byte*>(from);
  add(Task{[to, copy = std::vector<std::byte>(begin, begin + bytes)] { std::memcpy(to, copy.data(), copy.size()); }});
}

void Queue::download(void* to, const void* from, std::size_t bytes) {
  add(Task{[=] { std::memcpy(to, from, bytes); }});
  if (!capture_ && !is_pinned(to)) wait("download to pageable memory");
}

void Queue::wait(std::string_view what) {
  if (capture_) throw Error(ErrorCode::internal, cat(what, ": a wait within a capture"));
  const std::lock_guard guard(lock());
  run_to(added_);
}

void Queue::add_work(Work work) {
  if (mode_ == Mode::immediate) {
    if (const auto* const mark = std::get_if<Mark>(&work)) return mark->wait();
    Executor executor(kernels_);
    if (const auto* const step = std::get_if<Step>(&work)) {
      executor.run(*step);
    } else {
      executor.run(*std::get<std::shared_ptr<const Capture>>(work));
    }
    executor.finish();
    return;
  }
  const std::lock_guard guard(lock());
  ++added_;
  work_.push_back(std::move(work));
}

void Queue::run_to(std::uint64_t count) {
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  try {
    Executor executor(kernels_);
    while (done_ < count) {
      const auto work = std::move(work_.front());
      work_.pop_front();
      ++done_;
      if (const auto* const mark = std::get_if<Mark>(&work)) {
        executor.finish();
        mark->wait();
      } else if (const auto* const step = std::get_if<Step>(&work)) {
        executor.run(*step);
      } else {
        executor.run(*std::get<std::shared_ptr<const Capture>>(work));
      }
    }
    executor.finish();
  } catch (...) {
    work_.clear();
    done_ = added_;
    throw;
  }
}

void Queue::begin_capture() { capture_ = std::make_shared<Capture>(); }
std::shared_ptr<const Capture> Queue::end_capture() { return std::exchange(capture_, nullptr); }

void wait_for_all() noexcept {
  const std::lock_guard guard(lock());
  for (const auto& one : all_queues()) {
    const auto queue = one.lock();
    if (queue == nullptr) continue;
    try {
      queue->run_to(queue->added_);
    } catch (...) {
      queue->error_ = std::current_exception();
    }
  }
}

void add_pinned(const void* at, std::size_t bytes) {
  const std::lock_guard guard(lock());
  pinned().emplace(static_cast<const std::byte*>(at), bytes);
}

void remove_pinned(const void* at) noexcept {
  const std::lock_guard guard(lock());
  pinned().erase(static_cast<const std::byte*>(at));
}

}  // namespace charonia::cuda::host_stream
