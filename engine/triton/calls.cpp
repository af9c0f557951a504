#include "calls.h"

namespace charonia::triton {

void CallTable::add(const std::shared_ptr<Call>& call) {
  {
    const std::lock_guard lock(mutex_);
    calls_.emplace(call.get(), call);
  }
  busy_.notify_all();
}

void CallTable::submitted(const Call& call, Engine::Handle handle) {
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(&call);
  if (found == calls_.end()) return;
  if (const auto live = found->second.lock()) live->handle_ = handle;
}

void CallTable::remove(const Call& call) {
  const std::lock_guard lock(mutex_);
  calls_.erase(&call);
}

std::vector<Engine::Handle> CallTable::of_session(std::string_view session_id) {
  std::vector<std::shared_ptr<Call>> looked_at;  // as in take_abandoned()
  std::vector<Engine::Handle> handles;
  const std::lock_guard lock(mutex_);
  looked_at.reserve(calls_.size());
  for (const auto& entry : calls_) {
    auto call = entry.second.lock();
    if (!call) continue;
    if (call->handle_ && call->session_id == session_id) handles.push_back(*call->handle_);
    looked_at.push_back(std::move(call));
  }
  return handles;
}

std::vector<Engine::Handle> CallTable::take_abandoned() {
  // Declared before the lock, because it may own the last reference to a call. The call must not be destroyed under the
  // lock.
  std::vector<std::shared_ptr<Call>> looked_at;
  std::vector<Engine::Handle> abandoned;
  const std::lock_guard lock(mutex_);
  looked_at.reserve(calls_.size());
  for (auto entry = calls_.begin(); entry != calls_.end();) {
    auto call = entry->second.lock();
    if (!call) {
      entry = calls_.erase(entry);
      continue;
    }
    if (call->handle_ && !call->cancel_given_ && call->abandoned()) {
      call->cancel_given_ = true;
      abandoned.push_back(*call->handle_);
    }
    looked_at.push_back(std::move(call));
    ++entry;
  }
  return abandoned;
}

bool CallTable::empty() {
  const std::lock_guard lock(mutex_);
  return calls_.empty();
}

void CallTable::opened() {
  {
    const std::lock_guard lock(mutex_);
    ++num_subscriptions_;
  }
  busy_.notify_all();
}

void CallTable::closed() {
  const std::lock_guard lock(mutex_);
  --num_subscriptions_;
}

bool CallTable::wait_until_busy(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  busy_.wait(lock, stop, [this] { return !calls_.empty() || num_subscriptions_ > 0; });
  return !stop.stop_requested();
}

void CallTable::pause(const std::stop_token& stop, std::chrono::milliseconds time,
                      std::chrono::milliseconds idle_time) {
  std::unique_lock lock(mutex_);
  if (calls_.empty()) {
    busy_.wait_for(lock, stop, idle_time, [this] { return !calls_.empty(); });
  } else {
    busy_.wait_for(lock, stop, time, [] { return false; });
  }
}

}  // namespace charonia::triton
