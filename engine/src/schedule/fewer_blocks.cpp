// Policy: memory that did not suffice. The pool's memory may grow while it is used (cache/free_blocks.h). When the
// system has no more, the pool keeps the size that it has reached, and a sequence that was accepted may need more
// blocks than there are. It is named in StepPlan::impossible until the caller removes it.
//
// A sequence with a placeholder is not marked: the token may turn out to be its last one.
#include <algorithm>
#include <utility>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

bool Scheduler::Impl::cannot_fit(const Seq& seq) const { return blocks_for(seq.num_tokens()) > pool.num_blocks(); }

// True when the pool has become smaller since the last look. Waiting sequences that can never fit are marked.
bool Scheduler::Impl::notice_fewer_blocks() {
  if (std::exchange(known_blocks, pool.num_blocks()) == pool.num_blocks()) return false;
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
