#include "watcher.h"

#include <algorithm>
#include <utility>

#include "base/duration.h"
#include "error.h"

namespace charonia::triton {

Watcher::Watcher(TRITONSERVER_Server* server, std::string model, ModelStanding& standing, const Generation& generation,
                 Engine& engine, CallTable& calls, Subscriptions& subscriptions, EndAll end_all)
    : server_(server),
      name_(std::move(model)),
      standing_(standing),
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
    watch_standing();
    end_subscriptions(now);
    calls_.pause(stop, kPollPeriod, kIdlePeriod);
  }
}

void Watcher::watch_standing() {
  const auto now = Clock::now();
  if (!end_at_) {
    if (now < next_look_) return;
    next_look_ = now + kStandingPeriod;
    switch (standing_.now()) {
      case Standing::unknown:
      case Standing::served:
        return watch_generation(now);
      case Standing::unloading:
        end_at_ = idle_until_ = now;
        why_ = "model '" + name_ + "' is being unloaded";
        break;
      case Standing::exiting:
        end_at_ = now + duration_of(drain_.count());
        idle_until_ = std::min(*end_at_, now + kLinger);
        why_ = "the server is shutting down";
        break;
    }
    const auto left = std::chrono::duration_cast<std::chrono::seconds>(*end_at_ - now).count();
    log_info(why_ + ": the requests of '" + name_ + "' end " +
             (left > 0 ? "in at most " + std::to_string(left) + " s" : "now"));
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
  idle_until_ = now + kLinger;
  why_ = "model '" + name_ + "' was loaded anew";
  log_info(why_ + ": each subscription of the one before ends when its last request has ended");
}

void Watcher::end_subscriptions(Clock::time_point now) {
  const bool goes = end_at_ || replaced_at_;
  subscriptions_.set_flow_control(!goes);
  if (!goes || now < idle_until_) return;
  // While the newer model is warming up, clients still open and use subscriptions of this model.
  const auto since = end_at_ ? Clock::time_point::max() : now - kLinger;
  subscriptions_.end_idle(Error(ErrorCode::unavailable, why_), since);
}

}  // namespace charonia::triton
