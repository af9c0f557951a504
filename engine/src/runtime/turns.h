// Things that wait, of several owners who take turns.
#pragma once

#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>

namespace charonia::runtime {

// Nothing is held: what nobody else holds any more does not wait. An owner's are in the order in which they came.
template <class T>
class Turns {
 public:
  bool empty() const { return waiting_.empty(); }
  void clear() { waiting_.clear(); }
  void add(const std::string& owner, const std::shared_ptr<T>& one) { waiting_[owner].push_back(one); }
  // The owner has had a turn without next().
  void count(std::string owner) { last_ = std::move(owner); }

  // The first one for which `wanted` is true of the owner whose turn it is; null: there is none. All before it go.
  template <class Wanted>
  std::shared_ptr<T> next(Wanted wanted) {
    while (!waiting_.empty()) {
      auto at = waiting_.upper_bound(last_);
      if (at == waiting_.end()) at = waiting_.begin();
      auto& ones = at->second;
      std::shared_ptr<T> found;
      while (!found && !ones.empty()) {
        found = ones.front().lock();
        ones.pop_front();
        if (found && !wanted(*found)) found.reset();
      }
      if (found) last_ = at->first;
      if (ones.empty()) waiting_.erase(at);
      if (found) return found;
    }
    return nullptr;
  }

  // Forgets what nobody holds any more.
  void tidy() {
    for (auto at = waiting_.begin(); at != waiting_.end();) {
      std::erase_if(at->second, [](const auto& one) { return one.expired(); });
      at = at->second.empty() ? waiting_.erase(at) : std::next(at);
    }
  }

 private:
  std::map<std::string, std::deque<std::weak_ptr<T>>> waiting_;  // by owner; none is empty
  std::string last_;                                             // the owner who had the last turn
};

}  // namespace charonia::runtime
