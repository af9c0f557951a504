// The delivery thread: results leave the engine through it, so that a slow consumer never delays a step.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "charonia/engine.h"

namespace charonia::runtime {

class Delivery {
 public:
  Delivery();
  ~Delivery() { close(); }

  // Delivers what is queued, and waits until the thread has ended. Not from a callback; nothing may be pushed after.
  void close();

  // Queues a result for `callback`. Never blocks. wake() has it delivered: once for all results of a step, since waking
  // a thread costs as much as many results.
  void push(std::shared_ptr<Engine::Callback> callback, Result result);
  void wake();
  // Has it call that after the callbacks of results that were queued together.
  void after_each(std::function<void()> function);
  // Whether this is its thread, as in a callback. Any thread may ask, also while another one closes it.
  bool on_this_thread() const;

 private:
  struct Item {
    std::shared_ptr<Engine::Callback> callback;
    Result result;
  };
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Item> items_;
  std::shared_ptr<const std::function<void()>> after_;
  bool stop_ = false;
  bool pushed_ = false;  // since the last wake(); of the thread that pushes
  std::thread thread_;
};

}  // namespace charonia::runtime
