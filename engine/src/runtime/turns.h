// A queue in which owners take turns, however many entries each owner has.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>

namespace charonia::runtime {

// Holds no references: an entry without other references is skipped. Entries of one owner stay in order.
template <class T>
class Turns {
 public:
  bool empty() const { return waiting_.empty(); }
  void clear() { waiting_.clear(); }
  void add(const std::string& owner, const std::shared_ptr<T>& one) { waiting_[owner].push_back(one); }

  // Removes and returns the first entry of the next owner; null if there is none.
  std::shared_ptr<T> next() {
    while (!waiting_.empty()) {
      auto at = waiting_.upper_bound(last_);
      if (at == waiting_.end()) at = waiting_.begin();
      auto& entries = at->second;
      const auto found = entries.front().lock();
      entries.pop_front();
      if (found) last_ = at->first;
      if (entries.empty()) waiting_.erase(at);
      if (found) return found;
    }
    return nullptr;
  }

 private:
  std::map<std::string, std::deque<std::weak_ptr<T>>> waiting_;  // by owner; no list is empty
  std::string last_;                                             // the owner of the last turn
};

}  // namespace charonia::runtime
