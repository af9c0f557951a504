// Admission: selects the waiting sequences that start to run, and their blocks.
//
// A sequence gets blocks for all its tokens when it is admitted, so later only decoding takes blocks. For each running
// sequence that will need another block, one block stays in reserve. Without the reserve, admitting a sequence would
// soon cause a preemption. For kinds with windows, it gets the units for its window and the largest step. For kind
// `state`, it gets one unit, and uses the unit of the snapshot that it begins with until its first step is computed.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

// Admits the first waiting sequence. Returns false and changes nothing if it does not fit.
bool Scheduler::Impl::admit(Seq& seq, StepPlan& plan) {
  if (seq.has_placeholder()) return false;
  if (seq.is_full())
    broken(cat("sequence ", seq.id, " is queued, but already has all its ", seq.max_total_tokens, " tokens"));
  const auto own_reserve = static_cast<int>(will_need_more_blocks(seq));
  const auto slack = pool.num_available() - reserve - own_reserve;
  if (seq.parent != nullptr && !has_parents_units(seq)) leave_parent(seq);
  const bool fits = seq.parent != nullptr ? begin_with_parent(seq, slack, plan) : begin_with_prefix(seq, slack);
  if (!fits) return false;
  reserve += own_reserve;
  waiting.erase(&seq);
  rounds.admitted(seq.priority, seq.round);
  waiting_tokens -= seq.prompt_tokens;
  seq.state = State::running;
  adapters.take(seq.adapter);
  running.insert(std::ranges::upper_bound(running, &seq, Before{}), &seq);
  for (std::size_t k = 0; k < num_kinds(); ++k) units_reserve[k] += static_cast<int>(will_need_more_units(seq, k));
  if (seq.has_computed_prompt()) queue_children(seq);  // it was preempted, and its prompt was found in the index
  return true;
}

// Starts with the blocks of its tokens that the prefix index has. Returns false and changes nothing if the sequence
// takes more than `slack` of the available blocks, or more than units_slack(): new ones, and matched ones that were
// Cached.
//
// A lookup costs time proportional to the prompt, so it is not repeated while its result cannot change (may_fit()).
bool Scheduler::Impl::begin_with_prefix(Seq& seq, std::int32_t slack) {
  if (!may_fit(seq, slack)) return false;
  seq.units_need.resize(num_kinds());
  for (std::size_t k = 0; k < num_kinds(); ++k) seq.units_need[k] = units_slack(seq, k);
  // The last token is always computed, and also rows whose logits the caller has not yet received.
  const auto last = seq.all_rows ? std::min(seq.rows_given, seq.num_tokens() - 1) : seq.num_tokens() - 1;
  const auto available = pool.num_available();
  auto match = pool.match(seq.tokens, last, seq.salt);
  const auto num_matched = static_cast<std::int32_t>(match.blocks.size());
  const auto missing = blocks_for(seq.num_tokens()) - num_matched;
  seq.need = missing + available - pool.num_available();
  seq.activated_at_lookup = activated_blocks;
  bool fits = seq.need <= slack;
  for (std::size_t k = 0; k < num_kinds(); ++k) {
    const auto& range = match.units[k];
    const auto count = std::min(blocks_for(seq.num_tokens()) - range.first, most_units(k, limits.token_budget));
    units_wanted[k] = is_state(k) ? 1 : count - static_cast<std::int32_t>(range.units.size());
    seq.units_need[k] += units_wanted[k] - units_slack(seq, k);
    fits = fits && units_wanted[k] <= units_slack(seq, k);
  }
  const auto release = [&] {
    pool.release(match.blocks);
    for (std::size_t k = 0; k < num_kinds(); ++k) pool.release_units(k, match.units[k].units);
  };
  try {
    fits = fits && pool.allocate(missing, match.blocks, units_wanted, match.units);
  } catch (...) {
    release();
    throw;
  }
  if (!fits) {
    release();
    return false;
  }
  activated_blocks += num_matched;
  seq.need = 0;
  seq.units_need.clear();
  seq.blocks = std::move(match.blocks);
  seq.units = std::move(match.units);
  seq.nodes = std::move(match.nodes);
  seq.computed = match.num_tokens;
  seq.inserted_blocks = num_matched;
  begin_states(seq, match.num_indexed);
  if (seq.num_cached_tokens < 0) {
    seq.num_cached_tokens = match.num_tokens;
    if (!seq.all_rows) prefix_query_tokens += seq.prompt_tokens;
    prefix_hit_tokens += match.num_tokens;
    seq.counts_loaded = true;
  }
  begin_load(seq, last);
  return true;
}

// Whether a lookup may find that the sequence fits. Since the last lookup, `need` can shrink by at most one for each
// block that became Active (`activated_blocks`). Example: a sequence needed 10 blocks when 4 were available. It is
// looked up again when 10 are available, or when 6 have become Active and 4 are still available. With windows, one
// block can complete a much longer prefix, so each such block causes a lookup.
bool Scheduler::Impl::may_fit(const Seq& seq, std::int32_t slack) const {
  const auto activated = activated_blocks - seq.activated_at_lookup;
  if (num_kinds() == 0 || activated == 0) {
    if (slack < seq.need - activated) return false;
    for (std::size_t k = 0; k < seq.units_need.size(); ++k) {
      if (units_slack(seq, k) < seq.units_need[k]) return false;
    }
  }
  return true;
}

// Whether the sequence will need more blocks than for its current tokens. The last token that it may sample needs no
// space, because its KV is never read. A sequence cannot have more blocks than the pool.
bool Scheduler::Impl::will_need_more_blocks(const Seq& seq) const {
  const auto most = std::min(blocks_for(seq.max_total_tokens - 1), pool.num_blocks());
  return most > (seq.state == State::running ? std::ssize(seq.blocks) : blocks_for(seq.num_tokens()));
}

void Scheduler::Impl::count_reserve() {
  reserve = 0;
  std::ranges::fill(units_reserve, 0);
  for (const auto* seq : running) {
    reserve += static_cast<int>(will_need_more_blocks(*seq));
    for (std::size_t k = 0; k < num_kinds(); ++k) units_reserve[k] += static_cast<int>(will_need_more_units(*seq, k));
  }
}

}  // namespace charonia::schedule
