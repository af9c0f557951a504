#include "subscriptions.h"

#include "base/text.h"
#include "error.h"

namespace charonia::triton {

void Subscriptions::open(const std::string& name, std::shared_ptr<ResponseStream> stream, const EngineInfo& info) {
  const std::lock_guard lock(mutex_);
  if (open_.size() >= kMost && !open_.contains(name)) {
    throw Error(ErrorCode::resource_exhausted,
                cat("there are ", kMost, " subscriptions, which is the limit; retry after 1 s"));
  }
  const auto subscription = std::make_shared<Subscription>(name, std::move(stream));
  if (!open_.emplace(name, subscription).second) {
    throw Error(ErrorCode::invalid_argument,
                cat("subscription '", name, "' is open already: choose a unique name, such as a UUID"));
  }
  opened_();
  send(*subscription, &info);
}

void Subscriptions::close(const std::string& name) {
  std::vector<FactoryPtr> left;
  const std::lock_guard lock(mutex_);
  if (const auto found = open_.find(name); found != open_.end()) remove(found, nullptr, left);
}

void Subscriptions::acknowledge(const std::string& name, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto subscription = known(name);
  if (!subscription) return;
  subscription->outbox_.acknowledge(number);
  send_due(*subscription);
}

std::shared_ptr<Subscription> Subscriptions::begin(const std::string& name, std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  auto subscription = known(name);
  if (!subscription) {
    throw Error(ErrorCode::unavailable,
                cat("there is no subscription '", name, "', or it has ended: open one, and send the request again"));
  }
  if (subscription->refused_.erase(key) > 0) {
    throw Error(ErrorCode::invalid_argument, "the request was cancelled before it arrived");
  }
  if (!subscription->running_.insert(key).second) {
    throw Error(ErrorCode::invalid_argument,
                cat("subscription_key is ", key, ", and a request of subscription '", name,
                    "' with that key is running: give each request a key of its own"));
  }
  return subscription;
}

void Subscriptions::ended(Subscription& subscription, std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  subscription.running_.erase(key);
  subscription.idle_since_ = Clock::now();
}

void Subscriptions::refuse(const std::string& name, std::uint64_t key) {
  const std::lock_guard lock(mutex_);
  const auto subscription = known(name);
  if (!subscription) return;
  auto& refused = subscription->refused_;
  refused.insert(key);
  if (refused.size() > kMostRefused) refused.erase(refused.begin());
}

void Subscriptions::add(const std::shared_ptr<Subscription>& subscription, std::uint64_t key, const Result& result,
                        const Extras& extras) {
  const std::lock_guard lock(mutex_);
  if (subscription->over_) return;
  subscription->outbox_.add(key, result, extras);
  touch(subscription);
}

void Subscriptions::add_error(const std::shared_ptr<Subscription>& subscription, std::uint64_t key,
                              std::string_view text) {
  const std::lock_guard lock(mutex_);
  if (subscription->over_) return;
  subscription->outbox_.add_error(key, text);
  touch(subscription);
}

void Subscriptions::flush() {
  std::vector<std::shared_ptr<Subscription>> sent;  // declared before the lock, because it may destroy a subscription
  const std::lock_guard lock(mutex_);
  sent.swap(touched_);
  for (const auto& subscription : sent) {
    subscription->touched_ = false;
    send_due(*subscription);
  }
}

void Subscriptions::look(Clock::time_point now) {
  std::vector<FactoryPtr> left;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  for (auto entry = open_.begin(); entry != open_.end();) {
    auto& subscription = *entry->second;
    if (subscription.over_ || subscription.stream_->abandoned()) {
      entry = remove(entry, nullptr, left);
    } else if (const auto* why = subscription.outbox_.overflow(now); why != nullptr) {
      log_warning(cat("subscription '", subscription.name_, "' ends, and its requests with it: ", why));
      const Error error(ErrorCode::unavailable, cat("the subscription was ended: ", why));
      entry = remove(entry, &error, left);
    } else {
      ++entry;
    }
  }
}

void Subscriptions::set_flow_control(bool on) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  for (const auto& [name, subscription] : open_) {
    subscription->outbox_.set_flow_control(on);
    if (!on) send_due(*subscription);
  }
}

void Subscriptions::end_idle(const std::exception& error, Clock::time_point since) {
  std::vector<FactoryPtr> left;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  for (auto entry = open_.begin(); entry != open_.end();) {
    const auto& subscription = *entry->second;
    const bool waits = !subscription.running_.empty() || !subscription.outbox_.empty();
    const bool idle = !waits && subscription.idle_since_ <= since;
    entry = idle ? remove(entry, &error, left) : std::next(entry);
  }
}

std::shared_ptr<Subscription> Subscriptions::known(const std::string& name) {
  const auto found = open_.find(name);
  return found == open_.end() || found->second->over_ ? nullptr : found->second;
}

void Subscriptions::touch(const std::shared_ptr<Subscription>& subscription) {
  if (subscription->touched_) return;
  subscription->touched_ = true;
  touched_.push_back(subscription);
}

void Subscriptions::send(Subscription& subscription, const EngineInfo* info) {
  try {
    auto& outbox = subscription.outbox_;
    subscription.stream_->send(info == nullptr ? outbox.take() : outbox.take(info->arithmetic, info->deterministic()));
  } catch (const std::exception& error) {
    log_error(std::string("cannot send a delivery: ") + error.what());
    subscription.over_ = true;  // look() removes it
  }
}

void Subscriptions::send_due(Subscription& subscription) {
  while (!subscription.over_ && subscription.outbox_.due()) send(subscription);
}

FactoryPtr Subscriptions::end(Subscription& subscription, const std::exception* error) {
  subscription.over_ = true;
  return error == nullptr ? subscription.stream_->close() : subscription.stream_->fail(*error);
}

Subscriptions::Entry Subscriptions::remove(Entry entry, const std::exception* error, std::vector<FactoryPtr>& left) {
  if (auto factory = end(*entry->second, error)) left.push_back(std::move(factory));
  const auto next = open_.erase(entry);
  closed_();
  return next;
}

}  // namespace charonia::triton
