// Detects events that Triton does not report to a backend: a client disconnects, the model is unloaded or loaded again,
// the server exits.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "calls.h"
#include "charonia/engine.h"
#include "generations.h"
#include "standing.h"
#include "subscriptions.h"
#include "triton_api.h"

namespace charonia::triton {

// One thread per model. It sleeps while there are no requests and no subscriptions. Otherwise it cancels the requests
// of disconnected clients, at most kPollPeriod after the disconnection. It ends subscriptions whose clients do not
// read. It asks the server whether the model is still served, because an unload completes, and the server calls
// ModelFinalize, only after every request has ended.
class Watcher {
 public:
  static constexpr std::chrono::milliseconds kPollPeriod{10};
  static constexpr std::chrono::milliseconds kIdlePeriod{100};  // while there are subscriptions without requests
  // How long a subscription without requests stays open when the server exits or has loaded another model of the same
  // name: requests may still be on their way. After a replacement, the time also counts from the last request.
  static constexpr std::chrono::seconds kLinger{1};
  static constexpr std::chrono::milliseconds kStandingPeriod{50};

  // Ends every request in flight. The clients receive `why`. Called at most once.
  using EndAll = std::function<void(const std::string& why)>;

  // When the server exits, requests may continue for the setting drain_timeout_s. An unload ends them immediately.
  Watcher(TRITONSERVER_Server* server, std::string model, ModelStanding& standing, const Generation& generation,
          Engine& engine, CallTable& calls, Subscriptions& subscriptions, EndAll end_all);

 private:
  using Clock = std::chrono::steady_clock;

  void run(const std::stop_token& stop);
  void watch_standing();
  void watch_generation(Clock::time_point now);
  void end_subscriptions(Clock::time_point now);

  TRITONSERVER_Server* server_;
  std::string name_;
  ModelStanding& standing_;
  const Generation& generation_;
  std::chrono::duration<double> drain_;
  Engine& engine_;
  CallTable& calls_;
  Subscriptions& subscriptions_;
  EndAll end_all_;

  Clock::time_point next_look_{};
  std::optional<Clock::time_point> end_at_;  // when all requests end; set when the server exits or unloads the model
  // Since when a newer model has replaced this one. The requests of this model still end normally.
  std::optional<Clock::time_point> replaced_at_;
  Clock::time_point idle_until_{};  // with end_at_ or replaced_at_: subscriptions without requests stay until then
  std::string why_;
  std::jthread thread_;  // last: uses the members above
};

}  // namespace charonia::triton
