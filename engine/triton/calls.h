// The requests that are in the engine.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "charonia/engine.h"
#include "responses.h"
#include "subscriptions.h"
#include "request_log.h"

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
  std::string session_id;  // empty without a session
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

}  // namespace charonia::triton
