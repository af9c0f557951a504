// Policy: out of memory. The pool's memory may grow during use (cache/free_blocks.h). If the system has no more memory,
// the pool keeps its current size, and an accepted sequence may need more blocks than the pool has.
// StepPlan::impossible names such a sequence until the caller removes it.
//
// A sequence with a placeholder is not marked, because that token may be its last one.
#include <algorithm>
#include <utility>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

int Scheduler::Impl::all_blocks() const {
  int all = pool.num_blocks();
  for (const auto& kind : pool.kinds()) all += kind.num_units();
  return all;
}

// A sequence needs at least the units for one token of each kind with a window.
bool Scheduler::Impl::cannot_fit(const Seq& seq) const {
  const auto blocks = blocks_for(seq.num_tokens());
  return blocks > pool.num_blocks() || std::ranges::any_of(pool.kinds(), [blocks](const cache::Units& kind) {
           return std::min(blocks, kind.most_for(1)) > kind.num_units();
         });
}

// Returns true if the pool has shrunk since the last call. Marks waiting sequences that can never fit.
bool Scheduler::Impl::notice_fewer_blocks() {
  if (std::exchange(known_blocks, all_blocks()) == all_blocks()) return false;
  count_reserve();
  std::vector<Seq*> too_long;
  for (const auto& [id, seq] : seqs) {
    const bool waits = seq->state == State::waiting || seq->state == State::waiting_for_parent;
    if (waits && cannot_fit(*seq) && !seq->has_placeholder()) too_long.push_back(seq.get());
  }
  std::ranges::sort(too_long, Before{});
  for (auto* seq : too_long) mark_impossible(*seq);
  return true;
}

void Scheduler::Impl::mark_impossible(Seq& seq) {
  if (seq.state == State::running) stop_running(seq);
  if (seq.state == State::waiting) waiting.erase(&seq);
  leave_parent(seq);
  leave_children(seq);
  seq.state = State::impossible;
  impossible.push_back(&seq);
}

}  // namespace charonia::schedule
