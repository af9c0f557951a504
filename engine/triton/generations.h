// Which of the models that were loaded under one name, one after the other, is the last.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace charonia::triton {

// Of all models of the backend. Any thread.
//
// A model that the server loads anew is loaded beside the one that it has, takes its place, and the old one then is
// destroyed once none of its requests is left. Nothing tells the old one: the server says of the name that it is ready.
class Generations {
 private:
  friend class Generation;
  using Key = std::pair<std::string, std::uint64_t>;  // name and version: the server may have several versions at once

  std::mutex mutex_;
  std::map<Key, std::set<std::uint64_t>> loaded_;  // numbers; a later one is greater
  std::uint64_t last_ = 0;
};

// One model's place among them.
class Generation {
 public:
  Generation(Generations& all, std::string name, std::uint64_t version) : all_(all), key_(std::move(name), version) {}
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // It is loaded: those of the same name and version that were before are replaced, as long as it is there. At most
  // once.
  void begin();
  // A later one has begun, and is there.
  bool replaced() const;

 private:
  Generations& all_;
  const Generations::Key key_;
  std::uint64_t number_ = 0;  // 0: it has not begun. Under all_.mutex_
};

}  // namespace charonia::triton
