#include "calls.h"

#include <algorithm>
#include <utility>

#include "base/duration.h"
#include "base/text.h"
#include "error.h"

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

Watcher::Watcher(WatchedModel model, const Generation& generation, Engine& engine, CallTable& calls,
                 Subscriptions& subscriptions, EndAll end_all)
    : model_(std::move(model)),
      generation_(generation),
      drain_(engine.info().config.drain_timeout_s),
      engine_(engine),
      calls_(calls),
      subscriptions_(subscriptions),
      end_all_(std::move(end_all)),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

void Watcher::run(const std::stop_token& stop) {
  while (calls_.wait_until_busy(stop)) {
    const auto now = Clock::now();
    subscriptions_.look(now);
    for (const auto handle : calls_.take_abandoned()) engine_.cancel(handle);
    watch_model();
    end_subscriptions(now);
    calls_.pause(stop, kPollPeriod, kIdlePeriod);
  }
}

void Watcher::watch_model() {
  const auto now = Clock::now();
  if (!end_at_) {
    if (now < next_look_) return;
    next_look_ = now + kModelPeriod;
    switch (model_.now()) {
      case ModelState::unknown:
      case ModelState::served:
        return watch_generation(now);
      case ModelState::unloading:
        end_at_ = idle_until_ = now;
        why_ = cat("model '", model_.name(), "' is being unloaded");
        break;
      case ModelState::exiting:
        end_at_ = now + duration_of(drain_.count());
        idle_until_ = std::min(*end_at_, now + kIdleTimeout);
        why_ = "the server is shutting down";
        break;
    }
    const auto left = std::chrono::duration_cast<std::chrono::seconds>(*end_at_ - now).count();
    log_info(cat(why_, ": the requests of '", model_.name(), "' end ",
                 left > 0 ? cat("in at most ", left, " s") : "now"));
  }
  // Once end_at_ is set, the server is not asked again, because it may end before this thread.
  if (end_all_ && now >= *end_at_) std::exchange(end_all_, nullptr)(why_);
}

// Notices a newer model of this name. The newer model may still be warming up while this model is served. If its
// warm-up fails, this model is no longer replaced.
void Watcher::watch_generation(Clock::time_point now) {
  if (!generation_.replaced()) return replaced_at_.reset();
  if (replaced_at_) return;
  replaced_at_ = now;
  idle_until_ = now + kIdleTimeout;
  why_ = cat("model '", model_.name(), "' was loaded again");
  log_info(why_ + ": each subscription of the earlier model ends when its last request has ended");
}

void Watcher::end_subscriptions(Clock::time_point now) {
  const bool goes = end_at_ || replaced_at_;
  subscriptions_.set_flow_control(!goes);
  if (!goes || now < idle_until_) return;
  // While the newer model is warming up, clients still open and use subscriptions of this model.
  const auto since = end_at_ ? Clock::time_point::max() : now - kIdleTimeout;
  subscriptions_.end_idle(Error(ErrorCode::unavailable, why_), since);
}

}  // namespace charonia::triton
