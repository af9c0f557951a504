// The rounds in which the owners of waiting sequences take turns.
//
// A new sequence gets the round after the last round of its owner, but not a round that is over. Sequences of a lower
// round run first. So each owner with waiting sequences has one sequence per round, however many sequences it adds.
// Sequences of one owner stay in the order of arrival. Every priority has its own rounds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>

namespace charonia::schedule {

class Rounds {
 public:
  // Returns the round of a new sequence. removed() must follow.
  std::uint64_t add(int priority, std::uint64_t owner) {
    auto& level = levels_[priority];
    if (level.num_seqs++ == 0) level.current = latest_ + 1;
    // Forgets owners that have no sequences left.
    if (level.last.size() > 2 * level.num_seqs) level.begin(level.current + 1);
    auto& last = level.last[owner];
    last = std::max(last + 1, level.current);
    latest_ = std::max(latest_, last);
    return last;
  }

  // A sequence of this round was admitted: earlier rounds are over.
  void admitted(int priority, std::uint64_t round) {
    auto& level = levels_.at(priority);
    if (round > level.current) level.begin(round);
  }

  // A sequence was removed.
  void removed(int priority) {
    const auto level = levels_.find(priority);
    if (--level->second.num_seqs == 0) levels_.erase(level);
  }

 private:
  struct Level {
    void begin(std::uint64_t round) {
      current = round;
      std::erase_if(last, [round](const auto& entry) { return entry.second < round; });
    }

    std::uint64_t current = 0;                              // earlier rounds are over
    std::unordered_map<std::uint64_t, std::uint64_t> last;  // by owner: the last round that it got; none is over
    std::size_t num_seqs = 0;
  };

  std::map<int, Level> levels_;  // by priority; only priorities with sequences
  std::uint64_t latest_ = 0;     // the last round of any priority, so that later sequences run after earlier ones
};

}  // namespace charonia::schedule
