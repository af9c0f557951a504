// Subscriptions: one stream of a client for the results of many requests (docs/contracts.md, "Subscriptions").
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "charonia/engine.h"
#include "charonia/types.h"
#include "outbox.h"
#include "responses.h"

namespace charonia::triton {

// One subscription. Its requests share its ownership.
class Subscription {
 public:
  Subscription(std::string name, std::shared_ptr<ResponseStream> stream)
      : name_(std::move(name)), stream_(std::move(stream)) {}

  // Whether nothing more can be sent. Then its requests must be cancelled. Thread-safe.
  bool over() const { return over_; }

 private:
  friend class Subscriptions;

  const std::string name_;
  const std::shared_ptr<ResponseStream> stream_;
  std::atomic<bool> over_ = false;
  // Protected by the mutex of Subscriptions.
  Outbox outbox_;
  std::set<std::uint64_t> running_;  // keys of the requests in the engine
  std::set<std::uint64_t> refused_;  // keys of requests that were cancelled before they arrived, at most kMostRefused
  Outbox::Clock::time_point idle_since_ = Outbox::Clock::now();  // valid if running_ is empty
  bool touched_ = false;             // something was added since the last flush()
};

// The subscriptions of a model, by name. Thread-safe. One lock protects all subscriptions, and is held while one sends.
class Subscriptions {
 public:
  using Clock = Outbox::Clock;

  // `opened` and `closed` are called for each subscription.
  Subscriptions(std::function<void()> opened, std::function<void()> closed)
      : opened_(std::move(opened)), closed_(std::move(closed)) {}

  static constexpr std::size_t kMost = 1024;  // maximum number of open subscriptions
  // If more requests of a subscription are cancelled before they arrive, those with the smallest keys are forgotten.
  static constexpr std::size_t kMostRefused = 4096;

  // Opens a subscription and sends a delivery that describes the engine. Throws Error(invalid_argument) if the name is
  // open, and Error(resource_exhausted) if there are kMost.
  void open(const std::string& name, std::shared_ptr<ResponseStream> stream, const EngineInfo& info);
  // Ends the subscription without an error. Does nothing if it does not exist.
  void close(const std::string& name);
  // Calls Outbox::acknowledge(), and sends the deliveries that are due. Does nothing if the subscription does not
  // exist.
  void acknowledge(const std::string& name, std::uint64_t number);

  // Registers a request with this key; ended() must follow. Throws Error(unavailable) if the subscription does not
  // exist, and Error(invalid_argument) if a request with this key is in the engine, or refuse() has its key.
  std::shared_ptr<Subscription> begin(const std::string& name, std::uint64_t key);
  void ended(Subscription& subscription, std::uint64_t key);
  // The request with this key was cancelled before it arrived. begin() will reject it once. Does nothing if the
  // subscription does not exist.
  void refuse(const std::string& name, std::uint64_t key);

  // Call Outbox::add() and Outbox::add_error(). flush() sends the chunks. They do nothing if the subscription is over.
  void add(const std::shared_ptr<Subscription>& subscription, std::uint64_t key, const Result& result,
           const Extras& extras);
  void add_error(const std::shared_ptr<Subscription>& subscription, std::uint64_t key, std::string_view text);
  void flush();

  // These functions are for the watcher. They do nothing while another thread sends. look() ends the subscriptions of
  // clients that have disconnected or do not read.
  void look(Clock::time_point now);
  // Calls Outbox::set_flow_control(). It is off while the model is unloaded or replaced and while the server exits,
  // because readers cannot acknowledge deliveries then.
  void set_flow_control(bool on);
  // Ends the subscriptions that have had no request since `since`, with an error.
  void end_idle(const std::exception& error, Clock::time_point since);

 private:
  using Entry = std::map<std::string, std::shared_ptr<Subscription>>::iterator;

  // Call these with mutex_ locked. The factories of ended streams are returned or added to `left`, so that the caller
  // can destroy them after it unlocks mutex_.
  std::shared_ptr<Subscription> known(const std::string& name);
  void touch(const std::shared_ptr<Subscription>& subscription);
  void send(Subscription& subscription, const EngineInfo* info = nullptr);
  void send_due(Subscription& subscription);
  FactoryPtr end(Subscription& subscription, const std::exception* error);
  Entry remove(Entry entry, const std::exception* error, std::vector<FactoryPtr>& left);

  std::function<void()> opened_, closed_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Subscription>> open_;
  std::vector<std::shared_ptr<Subscription>> touched_;
};

}  // namespace charonia::triton
