// The numbers by which the prefix cache tells cache_salts apart. Engine thread.
//
// A number belongs to one text, and is never given again: two salts cannot share blocks, as two hashes of them could. Of
// more than `most` texts the one that was not used for the longest time is forgotten. When it comes back it has a new
// number, and its blocks are not found any more.
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

  // What the prefix cache is given. Without a salt it is the class: prompts of different classes share no blocks either.
  // prefix_class is less than 2^32, and the numbers of salts are not.
  std::uint64_t number(std::string_view salt, std::uint64_t prefix_class) {
    if (salt.empty()) return prefix_class;
    std::string text = std::to_string(prefix_class) + '/';
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
  using Used = std::list<std::pair<std::string, std::uint64_t>>;  // used last: in front
  std::size_t most_;
  std::uint64_t last_ = std::uint64_t{1} << 32;
  Used used_;
  std::unordered_map<std::string_view, Used::iterator> by_text_;  // the texts are those of used_
};

}  // namespace charonia::runtime
