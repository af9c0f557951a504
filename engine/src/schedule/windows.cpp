// Policy: kinds of cache with windows (cache/units.h).
//
// A sequence has the units from its window to its next tokens. At admission it gets the units for its window and the
// largest step, or fewer if it is short. advance() releases the units before the window. Prefill takes units for the
// tokens of each step, and computes fewer tokens if there are not enough units. If no sequence can compute a token, the
// last ones are preempted.
#include <algorithm>
#include <cstdint>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

// Available units of a kind, without those in reserve for running sequences and for this one.
int Scheduler::Impl::units_slack(const Seq& seq, std::size_t kind) const {
  return pool.kinds()[kind].num_available() - units_reserve[kind] - static_cast<int>(will_need_more_units(seq, kind));
}

// The most units that a sequence has, if a step computes this many of its tokens.
std::int32_t Scheduler::Impl::most_units(std::size_t kind, std::int32_t tokens) const {
  return std::min(pool.kinds()[kind].most_for(tokens), pool.kinds()[kind].num_units());
}

// Like will_need_more_blocks(). With a whole window, a sequence releases a unit for each one that it takes.
bool Scheduler::Impl::will_need_more_units(const Seq& seq, std::size_t kind) const {
  if (is_state(kind)) return false;
  const bool runs = seq.state == State::running;
  const auto end = runs ? seq.units[kind].end() : blocks_for(seq.num_tokens());
  const auto held = runs ? static_cast<std::int32_t>(seq.units[kind].units.size()) : end;
  return end < blocks_for(seq.max_total_tokens - 1) && held < most_units(kind, 1);
}

// Allocates the blocks for all tokens of a sequence, and the units for its next token. All or none.
bool Scheduler::Impl::allocate_next(Seq& seq) {
  const auto missing = blocks_for(seq.num_tokens()) - static_cast<std::int32_t>(seq.blocks.size());
  bool has_all = missing <= 0;
  for (std::size_t k = 0; k < num_kinds(); ++k) {
    units_wanted[k] = is_state(k) ? states_wanted(seq, k)
                                  : std::max(0, blocks_for(seq.computed + 1) - seq.units[k].end());
    has_all = has_all && units_wanted[k] == 0;
  }
  return has_all || pool.allocate(std::max(missing, 0), seq.blocks, units_wanted, seq.units);
}

// Takes units for the next num_tokens tokens. Leaves the units in reserve, but takes the unit of the next token if it
// can. Returns how many of the tokens have their units.
std::int32_t Scheduler::Impl::extend_units(Seq& seq, std::int32_t num_tokens) {
  for (std::size_t k = 0; k < num_kinds(); ++k) {
    auto& range = seq.units[k];
    if (is_state(k)) {
      std::ranges::fill(units_wanted, 0);
      units_wanted[k] = states_wanted(seq, k);
      const bool has_state = units_wanted[k] == 0 || pool.allocate(0, seq.blocks, units_wanted, seq.units);
      num_tokens = has_state ? up_to_snapshot(seq, num_tokens) : 0;
      continue;
    }
    if (const auto missing = blocks_for(seq.computed + num_tokens) - range.end(); missing > 0) {
      const auto least = std::max(0, blocks_for(seq.computed + 1) - range.end());
      std::ranges::fill(units_wanted, 0);
      units_wanted[k] = std::clamp(pool.kinds()[k].num_available() - units_reserve[k], least, missing);
      pool.allocate(0, seq.blocks, units_wanted, seq.units);
    }
    num_tokens = std::min(num_tokens, range.end() * pool.block_len() - seq.computed);
  }
  if (num_tokens == 0 && starved == nullptr) starved = &seq;
  return num_tokens;
}

// Its children compute the last token of the prompt again, usually in the next step. They begin with its units. Also
// releases the unit of kind `state` that the last step has read.
void Scheduler::Impl::release_units_before_windows(Seq& seq) {
  const bool keeps_for_children = !seq.children.empty() && seq.computed == seq.prompt_tokens;
  for (std::size_t k = 0; k < num_kinds(); ++k) {
    auto& range = seq.units[k];
    if (is_state(k)) {
      if (range.units.size() == 1) continue;
      pool.release_units(k, std::span(range.units).first(1));
      range.units.erase(range.units.begin());
      continue;
    }
    const auto first = pool.kinds()[k].first_needed(seq.computed - static_cast<int>(keeps_for_children));
    if (first <= range.first) continue;
    const auto count = first - range.first;
    pool.release_units(k, std::span(range.units).first(static_cast<std::size_t>(count)));
    range.units.erase(range.units.begin(), range.units.begin() + count);
    range.first = first;
  }
}

// If all running sequences wait for units: preempts the last ones until the first one computes. A sequence alone has
// enough units, unless the pool has shrunk. A sequence that loads blocks will compute.
void Scheduler::Impl::plan_starved(StepPlan& plan) {
  if (starved == nullptr || !plan.seqs.empty() || plan.waits_for_load || num_ending > 0 || num_stalled > 0) return;
  auto& seq = *starved;
  while (!schedule_prefill(seq, plan)) {
    auto& victim = *running.back();
    if (&victim != &seq) {
      preempt(victim, plan);
    } else if (cannot_fit(seq)) {
      if (!seq.has_placeholder()) mark_impossible(seq);
      return;
    } else {
      broken(cat("sequence ", seq.id, " runs alone and has no units for its next token"));
    }
  }
}

}  // namespace charonia::schedule
