// Subscriptions: one stream of a client for the results of many of its requests (docs/contracts.md, "Subscriptions").
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

#include "charonia/types.h"
#include "outbox.h"
#include "response_stream.h"

namespace charonia::triton {

// One subscription, for its requests: they keep it, and see when it is over.
class Subscription {
 public:
  Subscription(std::string name, std::shared_ptr<ResponseStream> stream)
      : name_(std::move(name)), stream_(std::move(stream)) {}

  // Nothing goes out any more: its requests are to be cancelled. Any thread.
  bool over() const { return over_; }

 private:
  friend class Subscriptions;

  const std::string name_;
  const std::shared_ptr<ResponseStream> stream_;
  std::atomic<bool> over_ = false;
  // Under the lock of Subscriptions.
  Outbox outbox_;
  std::set<std::uint64_t> running_;  // keys of the requests in the engine
  Outbox::Clock::time_point idle_since_ = Outbox::Clock::now();  // where there is none
  bool touched_ = false;             // since the last flush()
};

// The subscriptions of a model, by name. Any thread may call. One lock is held for all of them, also while one sends.
class Subscriptions {
 public:
  using Clock = Outbox::Clock;

  // `opened` and `closed` are told of each.
  Subscriptions(std::function<void()> opened, std::function<void()> closed)
      : opened_(std::move(opened)), closed_(std::move(closed)) {}

  static constexpr std::size_t kMost = 1024;  // that may be open

  // Sends an empty delivery, which says that it is there. Throws Error(invalid_argument) for a name that is open, and
  // Error(overloaded) where there are kMost.
  void open(const std::string& name, std::shared_ptr<ResponseStream> stream);
  // Ends it in order. No error where there is none.
  void close(const std::string& name);
  // As Outbox::read(), and sends what waits. No error where there is none.
  void read(const std::string& name, std::uint64_t number);

  // A request with that key is to be submitted: ended() has to follow. Throws Error(unavailable) where there is no such
  // subscription, and Error(invalid_argument) where it has a request with that key in the engine.
  std::shared_ptr<Subscription> begin(const std::string& name, std::uint64_t key);
  void ended(Subscription& subscription, std::uint64_t key);

  // As Outbox::add(), add_options() and add_error(). flush() sends it. Nothing where it is over.
  void add(const std::shared_ptr<Subscription>& subscription, std::uint64_t key, const Result& result,
           std::string_view before, const TokenBytes* tokens = nullptr, bool logprobs = false);
  void add_options(const std::shared_ptr<Subscription>& subscription, std::uint64_t key, std::string_view options);
  void add_error(const std::shared_ptr<Subscription>& subscription, std::uint64_t key, std::string_view text);
  void flush();

  // For the watcher; they do nothing while something is sent. look() ends those whose clients have left or do not read.
  void look(Clock::time_point now);
  // Whether readers can say how far they are: those of a model that goes cannot, and nothing waits for them.
  void bind(bool heard);
  // Ends those that have had no request since then, with an error.
  void end_idle(const std::exception& error, Clock::time_point since);

 private:
  using Entry = std::map<std::string, std::shared_ptr<Subscription>>::iterator;

  // All under mutex_. What ended streams leave is not for under a lock: it is returned, or goes to `left`.
  std::shared_ptr<Subscription> known(const std::string& name);
  void touch(const std::shared_ptr<Subscription>& subscription);
  void send(Subscription& subscription);
  void send_due(Subscription& subscription);
  FactoryPtr end(Subscription& subscription, const std::exception* error);
  Entry remove(Entry entry, const std::exception* error, std::vector<FactoryPtr>& left);

  std::function<void()> opened_, closed_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Subscription>> open_;
  std::vector<std::shared_ptr<Subscription>> touched_;
};

}  // namespace charonia::triton
