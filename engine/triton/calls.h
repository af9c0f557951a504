// The requests that are in the engine, as the server sees them.
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
#include "outputs.h"
#include "response_stream.h"
#include "subscriptions.h"
#include "totals.h"
#include "traced_request.h"

namespace charonia::triton {

// One request and its responses. The engine's callback owns it.
struct Call {
  explicit Call(TRITONBACKEND_Request* request) : stream(std::make_shared<ResponseStream>(request)) {}

  // Whether nobody waits for what comes of it: its client has left, or it has had an error.
  bool abandoned() { return subscription ? failed || subscription->over() : stream->abandoned(); }

  std::shared_ptr<ResponseStream> stream;      // of one that goes to a subscription, only until it is in the engine
  std::shared_ptr<Subscription> subscription;  // where its results go; null: to the stream
  std::uint64_t key = 0;                       // its number in there
  bool parsed = false;                         // what its answer is read by goes there, too
  bool logprobs = false;                       // and its log probabilities
  std::atomic<bool> failed = false;            // the subscription has had its error
  std::string session_id;  // empty: none
  OutputSet outputs;
  std::shared_ptr<TracedRequest> traced;  // null: it is not
  std::string id;                         // the request's

  // Of its sequences; for the thread that sends.
  std::string echo;                 // goes out with each one's first response
  std::string parsing_options;      // goes out with every response, to a subscription with the first
  bool options_sent = false;        // that was done
  std::vector<TokenId> prompt_ids;  // with the first response of all; empty where not asked for
  std::vector<bool> begun;          // [n]: whether that was sent
  std::size_t num_open = 1;         // how many have not ended
  Totals totals;

 private:
  friend class CallTable;
  std::optional<Engine::Handle> handle_;
  bool cancel_given_ = false;
};

// Knows the calls in flight and which of them nobody waits for any more. Any thread.
class CallTable {
 public:
  void add(const std::shared_ptr<Call>& call);              // before it is submitted
  void submitted(const Call& call, Engine::Handle handle);  // nothing where it has already ended
  void remove(const Call& call);

  // The handles of the calls of a session that are in the engine.
  std::vector<Engine::Handle> of_session(std::string_view session_id);

  // The handles of calls whose client has left or whose stream was ended early; each is handed out once.
  std::vector<Engine::Handle> take_abandoned();

  bool empty();

  // A subscription is open, or is not any more.
  void opened();
  void closed();

  // Waits until there is a call or a subscription. False when stopped.
  bool wait_until_busy(const std::stop_token& stop);
  // Waits for `time`, or shorter when stopped; while there are only subscriptions, for `idle_time` or until there is a
  // call.
  void pause(const std::stop_token& stop, std::chrono::milliseconds time, std::chrono::milliseconds idle_time);

 private:
  std::mutex mutex_;
  std::condition_variable_any busy_;
  std::unordered_map<const Call*, std::weak_ptr<Call>> calls_;
  int num_subscriptions_ = 0;
};

}  // namespace charonia::triton
