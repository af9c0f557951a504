#include "watcher.h"

#include <utility>

#include "base/duration.h"
#include "error.h"

namespace charonia::triton {

Watcher::Watcher(TRITONSERVER_Server* server, std::string model, ModelStanding& standing, Engine& engine,
                 CallTable& calls, SendWatch& sending, Withdrawal& withdrawal, EndAll end_all)
    : server_(server),
      name_(std::move(model)),
      standing_(standing),
      drain_(engine.info().config.drain_timeout_s),
      engine_(engine),
      calls_(calls),
      sending_(sending),
      withdrawal_(withdrawal),
      end_all_(std::move(end_all)),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

void Watcher::run(const std::stop_token& stop) {
  while (calls_.wait_until_busy(stop)) {
    if (!engine_.failure().empty()) return after_failure(stop);
    for (const auto handle : calls_.take_abandoned()) engine_.cancel(handle);
    watch_standing();
    if (sending_.stuck(Clock::now())) exit_stuck_server();
    calls_.pause(stop, kPollPeriod);
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
        return;
      case Standing::unloading:
        end_at_ = now;
        why_ = "model '" + name_ + "' is being unloaded";
        break;
      case Standing::exiting:
        end_at_ = now + duration_of(drain_.count());
        why_ = "the server is shutting down";
        break;
    }
    const auto left = std::chrono::duration_cast<std::chrono::seconds>(*end_at_ - now).count();
    log_info(why_ + ": the requests of '" + name_ + "' end " +
             (left > 0 ? "in at most " + std::to_string(left) + " s" : "now"));
  }
  // The server is not asked again: it may be gone before this thread is.
  if (end_all_ && now >= *end_at_) std::exchange(end_all_, nullptr)(why_);
}

void Watcher::after_failure(const std::stop_token& stop) {
  const bool exits = engine_.info().config.exit_on_device_failure;
  const auto began = Clock::now();
  while (!calls_.empty() && Clock::now() < began + kMaxResponseTime && !stop.stop_requested()) {
    calls_.pause(stop, kPollPeriod);
  }
  const auto responded = Clock::now();
  bool withdrawn = false;
  while (!stop.stop_requested()) {
    // Without one of its responses there is nothing that would keep it loaded: then it stays as it is until there is.
    withdrawn = withdrawn || withdrawal_.begin(server_, name_);
    if (exits && Clock::now() >= responded + kFarewell) exit_server();
    if (standing_.now() == Standing::exiting) return withdrawal_.end();
    calls_.pause(stop, kStandingPeriod);
  }
}

}  // namespace charonia::triton
