// Notices what Triton does not tell a backend: clients that leave, a model being unloaded or loaded anew, a server that
// exits.
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

// One thread per model. While requests are in flight it cancels those whose client has left (kPollPeriod at most after
// it left), ends subscriptions that nobody reads, and asks the server whether the model is still served: an unload
// completes only when every request has ended, and the backend's ModelFinalize comes only then. Without requests it
// sleeps.
class Watcher {
 public:
  static constexpr std::chrono::milliseconds kPollPeriod{10};
  static constexpr std::chrono::milliseconds kIdlePeriod{100};  // while there are subscriptions without requests
  // That a subscription without requests stays open when the server exits, or has another model of the same name: some
  // may still be on their way to it. Of one that was replaced: since its last request.
  static constexpr std::chrono::seconds kLinger{1};
  static constexpr std::chrono::milliseconds kStandingPeriod{50};

  // Ends every request in flight; `why` is for their clients. Called at most once.
  using EndAll = std::function<void(const std::string& why)>;

  // When the server exits, requests may go on for the setting drain_timeout_s; an unload ends them at once.
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
  std::optional<Clock::time_point> end_at_;  // set once it is known that the model goes
  // Set while another model has taken this one's place, whose requests come to their ends.
  std::optional<Clock::time_point> replaced_at_;
  Clock::time_point idle_until_{};  // with either: subscriptions without requests may stay until then
  std::string why_;
  std::jthread thread_;  // last: it uses all of the above
};

}  // namespace charonia::triton
