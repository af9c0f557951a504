// The state of a model in the server: whether the model is ready, whether it ever was, and whether a newer model of the
// same name has replaced it.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "error.h"
#include "triton_api.h"

namespace charonia::triton {

// unknown: the server returns an error, or the model was never ready. In the second case, the model is being loaded or
// warmed up, perhaps while the server itself starts.
enum class ModelState { unknown, served, unloading, exiting };

class WatchedModel {
 public:
  // warmup: the server sends requests before the model is ready. Without warmup, a request shows that the model is
  // ready.
  WatchedModel(TRITONSERVER_Server* server, std::string name, std::uint64_t version, bool warmup)
      : server_(server), name_(std::move(name)), version_(static_cast<std::int64_t>(version)), was_served_(!warmup) {}

  const std::string& name() const { return name_; }

  // Asks the server for the current state. The server must not have ended.
  ModelState now() {
    bool ready = false;
    const ErrorPtr error(TRITONSERVER_ServerModelIsReady(server_, name_.c_str(), version_, &ready));
    if (!error && ready) {
      was_served_ = true;
      return ModelState::served;
    }
    if (!was_served_) return ModelState::unknown;
    if (!error) return ModelState::unloading;
    return TRITONSERVER_ErrorCode(error.get()) == TRITONSERVER_ERROR_UNAVAILABLE ? ModelState::exiting
                                                                                 : ModelState::unknown;
  }

 private:
  TRITONSERVER_Server* server_;
  std::string name_;
  std::int64_t version_;
  bool was_served_;
};

// The generations of all models of the backend. Thread-safe.
//
// When the server reloads a model, it loads the new model, replaces the old one, and destroys the old one when its
// requests have ended. It does not notify the old model, and reports that the name is ready.
class Generations {
 private:
  friend class Generation;
  using Key = std::pair<std::string, std::uint64_t>;  // name and version; the server may have several versions

  std::mutex mutex_;
  std::map<Key, std::set<std::uint64_t>> loaded_;  // numbers; a newer model has a larger number
  std::uint64_t last_ = 0;
};

// The generation of one model.
class Generation {
 public:
  Generation(Generations& all, std::string name, std::uint64_t version) : all_(all), key_(std::move(name), version) {}
  ~Generation() {
    const std::lock_guard lock(all_.mutex_);
    const auto found = all_.loaded_.find(key_);
    if (found == all_.loaded_.end()) return;
    found->second.erase(number_);
    if (found->second.empty()) all_.loaded_.erase(found);
  }
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // The model is loaded: it replaces older models of the same name and version. Call it at most once.
  void begin() {
    const std::lock_guard lock(all_.mutex_);
    number_ = ++all_.last_;
    all_.loaded_[key_].insert(number_);
  }
  // Whether a newer model of this name and version is loaded.
  bool replaced() const {
    const std::lock_guard lock(all_.mutex_);
    const auto found = all_.loaded_.find(key_);
    return number_ != 0 && found != all_.loaded_.end() && *found->second.rbegin() > number_;
  }

 private:
  Generations& all_;
  const Generations::Key key_;
  std::uint64_t number_ = 0;  // 0 before begin(); under all_.mutex_
};

}  // namespace charonia::triton
