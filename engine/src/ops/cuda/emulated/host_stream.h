// The streams of the emulated device: what they are given, and when it is done.
//
// CHARONIA_EMULATED_STREAMS=deferred (what holds where it is not set): at the wait for it, as late as a device may
// take. So page-locked memory that is written too early changes what is uploaded from it, downloads that are read too
// early have not happened, and a stream that does not wait for another one's event does not see what that one has done.
// CHARONIA_EMULATED_STREAMS=immediate: at once, as early as a device may. In a graph, and where work is deferred, a
// kernel starts before the one in front of it, as with programmatic dependent launch (host_grid.h).
//
// As with CUDA an upload from pageable memory has read it when the call returns, a download to pageable memory is done
// then, and memory is freed when all streams are done. Events are of streams that are not captured.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string_view>
#include <variant>
#include <vector>

#include "ops/cuda/emulated/host_grid.h"

namespace charonia::cuda::host_stream {

enum class Mode { immediate, deferred };
// Of the streams that are made from now on.
void set_mode(Mode mode);
Mode mode();

class Queue;

// A place in a stream. One that was never recorded is past.
class Mark {
 public:
  // Until all in front of it is done.
  void wait() const;
  bool done() const;

 private:
  friend class Queue;
  std::shared_ptr<Queue> queue_;
  std::uint64_t count_ = 0;  // of what is in front of it
};

struct Task {
  std::function<void()> run;
};
struct Kernel {
  host_grid::Shape shape;
  std::function<void()> body;
};
using Step = std::variant<Task, Kernel>;
// What a graph repeats.
using Capture = std::vector<Step>;
using Work = std::variant<Step, std::shared_ptr<const Capture>, Mark>;

// A stream. An error of its work comes out of the call that the work is done in; what stands behind it is dropped.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  static std::shared_ptr<Queue> make();
  ~Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  void add(Step step);
  void add(std::shared_ptr<const Capture> capture);
  // What is added from now on is done when all in front of the mark is.
  void add(const Mark& mark);
  void upload(void* to, const void* from, std::size_t bytes);
  void download(void* to, const void* from, std::size_t bytes);
  Mark mark();
  void wait(std::string_view what);

  // What is added between the two is kept and not done.
  void begin_capture();
  std::shared_ptr<const Capture> end_capture();  // null when there was none
  bool capturing() const { return capture_ != nullptr; }

 private:
  friend class Mark;
  friend void wait_for_all() noexcept;
  explicit Queue(Mode mode) : mode_(mode) {}
  void add_work(Work work);
  void run_to(std::uint64_t count);

  Mode mode_;
  std::shared_ptr<Capture> capture_;
  std::deque<Work> work_;  // not done
  std::uint64_t added_ = 0, done_ = 0;
  std::uint64_t kernels_ = 0;  // that were started
  std::exception_ptr error_;   // of what wait_for_all() did
};

// For all streams. What fails comes out of the next wait for its stream.
void wait_for_all() noexcept;

// Page-locked memory.
void add_pinned(const void* at, std::size_t bytes);
void remove_pinned(const void* at) noexcept;

}  // namespace charonia::cuda::host_stream
