// Numbers for the cache_salts of requests. The prefix cache compares these numbers. Used by the engine thread.
//
// A number belongs to one text and is never reused. So two salts cannot share blocks; with hashes they could. When
// there are more than `most` texts, the least recently used text is removed. If it is used again, it gets a new number,
// and its old blocks are not found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace charonia::runtime {

class CacheSalts {
 public:
  // most >= 1.
  explicit CacheSalts(std::size_t most = std::size_t{1} << 16) : most_(most) {}

  // Returns the number for the prefix cache. Without a salt and an adapter, this is prefix_class. Prompts of different
  // classes or adapters share no blocks, with or without a salt. prefix_class is less than 2^32; other numbers are
  // larger. adapter: a number of a LoRA adapter; 0: none.
  std::uint64_t number(std::string_view salt, std::uint64_t prefix_class, std::uint64_t adapter = 0) {
    if (salt.empty() && adapter == 0) return prefix_class;
    std::string text = std::to_string(prefix_class) + '/' + std::to_string(adapter) + '/';
    text += salt;
    if (const auto found = by_text_.find(text); found != by_text_.end()) {
      used_.splice(used_.begin(), used_, found->second);
      return found->second->second;
    }
    if (used_.size() == most_) {
      by_text_.erase(used_.back().first);
      used_.pop_back();
    }
    used_.emplace_front(std::move(text), last_ + 1);
    try {
      by_text_.emplace(used_.front().first, used_.begin());
    } catch (...) {
      used_.pop_front();
      throw;
    }
    return ++last_;
  }

 private:
  using Used = std::list<std::pair<std::string, std::uint64_t>>;  // most recently used first
  std::size_t most_;
  std::uint64_t last_ = std::uint64_t{1} << 32;
  Used used_;
  std::unordered_map<std::string_view, Used::iterator> by_text_;  // the keys point into used_
};

}  // namespace charonia::runtime
