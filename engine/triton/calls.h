// The requests that are in the engine, and the thread that ends them: because of events that Triton does not report to
// a backend. A client disconnects, the model is unloaded or loaded again, the server exits.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "charonia/engine.h"
#include "responses.h"
#include "model_state.h"
#include "subscriptions.h"
#include "telemetry.h"
#include "triton_api.h"

namespace charonia::triton {

// One request and its responses. The engine's callback owns it.
struct Call {
  explicit Call(TRITONBACKEND_Request* request) : stream(std::make_shared<ResponseStream>(request)) {}

  // Whether the client has disconnected or has received an error.
  bool abandoned() { return subscription ? failed || subscription->over() : stream->abandoned(); }

  std::shared_ptr<ResponseStream> stream;      // with a subscription, only until the request is in the engine
  std::shared_ptr<Subscription> subscription;  // receives the results; null: the stream does
  std::uint64_t key = 0;                       // subscription_key
  std::atomic<bool> failed = false;            // the subscription has received its error
  std::string session_id;                      // empty without a session
  OutputSet outputs;
  std::shared_ptr<TracedRequest> traced;  // null: not traced
  std::string id;                         // request id

  // The sending thread alone uses the following members.
  std::string echo;                 // sent with the first response of each sequence
  bool in_reasoning = false;        // sent like echo, to a subscription: the prompt ends within the reasoning
  std::vector<TokenId> prompt_ids;  // sent with the first response of sequence 0; empty if not requested
  std::vector<bool> begun;          // [n]: whether the first response was sent
  std::size_t num_open = 1;         // sequences that have not ended
  Totals totals;

 private:
  friend class CallTable;
  std::optional<Engine::Handle> handle_;
  bool cancel_given_ = false;
};

// The calls in flight. Thread-safe.
class CallTable {
 public:
  void add(const std::shared_ptr<Call>& call);              // before it is submitted
  void submitted(const Call& call, Engine::Handle handle);  // does nothing if the call has ended
  void remove(const Call& call);

  // Returns the handles of a session's calls that are in the engine.
  std::vector<Engine::Handle> of_session(std::string_view session_id);

  // Returns the handles of abandoned calls, each once.
  std::vector<Engine::Handle> take_abandoned();

  bool empty();

  // A subscription was opened or closed.
  void opened();
  void closed();

  // Waits until there is a call or a subscription. Returns false when stopped.
  bool wait_until_busy(const std::stop_token& stop);
  // Waits for `time`. If there are only subscriptions, waits for `idle_time` or until there is a call. Returns early
  // when stopped.
  void pause(const std::stop_token& stop, std::chrono::milliseconds time, std::chrono::milliseconds idle_time);

 private:
  std::mutex mutex_;
  std::condition_variable_any busy_;
  std::unordered_map<const Call*, std::weak_ptr<Call>> calls_;
  int num_subscriptions_ = 0;
};

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
  static constexpr std::chrono::seconds kIdleTimeout{1};
  static constexpr std::chrono::milliseconds kModelPeriod{50};

  // Ends every request in flight. The clients receive `why`. Called at most once.
  using EndAll = std::function<void(const std::string& why)>;

  // When the server exits, requests may continue for the setting drain_timeout_s. An unload ends them immediately.
  Watcher(WatchedModel model, const Generation& generation, Engine& engine, CallTable& calls,
          Subscriptions& subscriptions, EndAll end_all);

 private:
  using Clock = std::chrono::steady_clock;

  void run(const std::stop_token& stop);
  void watch_model();
  void watch_generation(Clock::time_point now);
  void end_subscriptions(Clock::time_point now);

  WatchedModel model_;
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
