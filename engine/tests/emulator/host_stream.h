// The streams of the emulated device, and when they run their work.
//
// CHARONIA_EMULATED_STREAMS=deferred (the default): at the wait for the work, as late as a device may run it. This
// exposes three errors: page-locked memory that is written too early changes the upload; a download that is read too
// early has not happened; a stream that does not wait for another stream's event does not see its results.
// CHARONIA_EMULATED_STREAMS=immediate: immediately, as early as a device may run it. In a graph and in deferred mode, a
// kernel starts before the previous one, as with programmatic dependent launch (host_grid.h).
//
// As with CUDA, an upload from pageable memory has read the data when the call returns, and a download to pageable
// memory is complete. Memory is freed when all streams are done. Events belong to streams that are not being captured.
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

#include "emulator/host_grid.h"

namespace charonia::cuda::host_stream {

enum class Mode { immediate, deferred };
// Applies to streams that are created later.
void set_mode(Mode mode);
Mode mode();

class Queue;

// A position in a stream. A mark that was never recorded counts as reached.
class Mark {
 public:
  // Waits until all earlier work is done.
  void wait() const;
  bool done() const;

 private:
  friend class Queue;
  std::shared_ptr<Queue> queue_;
  std::uint64_t count_ = 0;  // number of earlier work items
};

struct Task {
  std::function<void()> run;
};
struct Kernel {
  host_grid::Shape shape;
  std::function<void()> body;
};
using Step = std::variant<Task, Kernel>;
// The content of a graph.
using Capture = std::vector<Step>;
using Work = std::variant<Step, std::shared_ptr<const Capture>, Mark>;

// A stream. An error of its work is thrown by the call in which the work runs; later work is dropped.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  static std::shared_ptr<Queue> make();
  ~Queue() = default;
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  void add(Step step);
  void add(std::shared_ptr<const Capture> capture);
  // Work that is added later runs only after the mark is reached.
  void add(const Mark& mark);
  void upload(void* to, const void* from, std::size_t bytes);
  void download(void* to, const void* from, std::size_t bytes);
  Mark mark();
  void wait(std::string_view what);

  // Work that is added between the two calls is recorded and not run.
  void begin_capture();
  std::shared_ptr<const Capture> end_capture();  // null if there was no capture
  bool capturing() const { return capture_ != nullptr; }

 private:
  friend class Mark;
  friend void wait_for_all() noexcept;
  explicit Queue(Mode mode) : mode_(mode) {}
  void add_work(Work work);
  void run_to(std::uint64_t count);

  Mode mode_;
  std::shared_ptr<Capture> capture_;
  std::deque<Work> work_;  // not run yet
  std::uint64_t added_ = 0, done_ = 0;
  std::uint64_t kernels_ = 0;  // number of started kernels
  std::exception_ptr error_;   // from wait_for_all()
};

// Waits for all streams. Errors are thrown by the next wait for their stream.
void wait_for_all() noexcept;

// Page-locked memory.
void add_pinned(const void* at, std::size_t bytes);
void remove_pinned(const void* at) noexcept;

}  // namespace charonia::cuda::host_stream
