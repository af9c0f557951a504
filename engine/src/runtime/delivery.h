// The delivery thread. It calls the callbacks of results, so that a slow callback never delays a step.
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

  // Delivers the queued results, and waits until the thread has ended. Must not be called from a callback. Nothing may
  // be pushed afterwards.
  void close();

  // Queues a result for `callback`. Does not wait for callbacks. wake() starts the delivery. Call wake() once for all
  // results of a step, because waking a thread costs as much as many results.
  void push(std::shared_ptr<Engine::Callback> callback, Result result);
  void wake();
  // Sets a function that the thread calls after the callbacks of each batch of results.
  void after_each(std::function<void()> function);
  // Whether the caller is the delivery thread, for example in a callback. Thread-safe, also during close().
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
  bool pushed_ = false;  // since the last wake(); used only by the thread that pushes
  std::thread thread_;
};

}  // namespace charonia::runtime
