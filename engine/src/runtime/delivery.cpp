#include "runtime/delivery.h"

#include <utility>

namespace charonia::runtime {
namespace {

thread_local const Delivery* of_this_thread = nullptr;

}  // namespace

Delivery::Delivery() : thread_([this] { run(); }) {}

void Delivery::close() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Delivery::push(std::shared_ptr<Engine::Callback> callback, Result result) {
  {
    const std::lock_guard lock(mutex_);
    items_.push_back({std::move(callback), std::move(result)});
  }
  pushed_ = true;
}

void Delivery::wake() {
  if (std::exchange(pushed_, false)) wake_.notify_one();
}

void Delivery::after_each(std::function<void()> function) {
  auto after = std::make_shared<const std::function<void()>>(std::move(function));
  const std::lock_guard lock(mutex_);
  after_.swap(after);
}

bool Delivery::on_this_thread() const { return of_this_thread == this; }

void Delivery::run() {
  of_this_thread = this;
  std::deque<Item> batch;
  std::shared_ptr<const std::function<void()>> after;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !items_.empty(); });
      if (items_.empty()) return;
      batch.swap(items_);
      after = after_;
    }
    for (auto& item : batch) (*item.callback)(std::move(item.result));
    if (after) (*after)();
    batch.clear();
  }
}

}  // namespace charonia::runtime
