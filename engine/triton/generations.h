// Finds out which of several models that were loaded under the same name is the newest.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace charonia::triton {

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
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // The model is loaded: it replaces older models of the same name and version. Call it at most once.
  void begin();
  // Whether a newer model of this name and version is loaded.
  bool replaced() const;

 private:
  Generations& all_;
  const Generations::Key key_;
  std::uint64_t number_ = 0;  // 0 before begin(); under all_.mutex_
};

}  // namespace charonia::triton
