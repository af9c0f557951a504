// Plans a step: first the decodes, then prefill within the rest of the token budget. scheduler.h has the rules.
#include <algorithm>
#include <cstdint>
#include <ranges>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

// Discards a plan that never advanced, and counts the ending sequences.
void Scheduler::Impl::begin_plan() {
  notice_fewer_blocks();
  num_ending = num_stalled = 0;
  loaded_bytes = 0;
  starved = nullptr;
  rows.begin_step();
  for (std::size_t i = 0; i < running.size();) {
    auto& seq = *running[i];
    if (seq.forked) {  // it began with its parent's blocks in that plan, and its block copy was not made
      stop_running(seq);
      enqueue(seq);
      continue;
    }
    ++i;
    seq.planned = seq.planned_proposals = 0;
    release_proposal_states(seq);
    if (seq.has_placeholder() && !seq.proposed.empty()) {
      broken(cat("sequence ", seq.id, " has ", seq.proposed.size(), " proposals of a step that is not resolved"));
    }
    if (!seq.is_full()) continue;
    if (!seq.has_placeholder()) {
      broken(cat("sequence ", seq.id, " has all its ", seq.max_total_tokens, " tokens, but was not removed"));
    }
    ++num_ending;
  }
}

// Plans one token of each decode, and one of each sequence with appended tokens (Scheduler::append()).
void Scheduler::Impl::plan_decodes(StepPlan& plan) {
  collected.clear();
  for (auto* seq : running) {
    if (seq->is_decode() || (seq->forced && !seq->is_full())) collected.push_back(seq);
  }
  // In the order of Before, so that no blocks are taken from a sequence that is already in the plan.
  auto forced = collected.begin();
  for (auto* seq : collected) {
    if (seq->state != State::running || !reserve_blocks(*seq, plan)) continue;
    if (seq->forced) {
      *forced++ = seq;
    } else {
      schedule(*seq, 1, plan);
    }
  }
  collected.erase(forced, collected.end());
  for (auto* seq : collected) schedule(*seq, 1, plan);
}

// Goes through the running and the waiting sequences together, in the order of Before. Sequences with appended tokens
// already have one token in the plan. The time limit does not apply to their other tokens, because these are output,
// not prompt.
void Scheduler::Impl::plan_prefill(StepPlan& plan) {
  collected.clear();
  for (auto* seq : running) {
    if (seq->gap() > 1 && (!seq->forced || seq->planned > 0)) collected.push_back(seq);
  }
  notice_fewer_blocks();
  count_reserve();
  bool fits = plan.preempted.empty();  // preempted sequences are not admitted again in the same plan
  if (time != nullptr) time->begin_prefill(plan.num_tokens);
  auto next = collected.begin();
  if (lacks_slot()) ++(*waiting.begin())->plans_without_slot;
  auto* first = fits ? next_waiting() : nullptr;
  // Stalled decodes keep their share of the budget. Otherwise the next step could have more decodes than the budget.
  while (plan.num_tokens + num_stalled < limits.token_budget) {
    const bool in_time = time == nullptr || time->any_left();
    if (in_time && fits && first != nullptr && may_admit() &&
        (next == collected.end() || Before{}(first, *next))) {
      auto& seq = *first;
      if (cannot_fit(seq) && !seq.has_placeholder()) {
        mark_impossible(seq);
      } else if (admit(seq, plan)) {
        if (load_blocks(seq, plan)) schedule_prefill(seq, plan);
      } else {
        fits = notice_fewer_blocks();
      }
      first = fits ? next_waiting() : nullptr;
    } else if (next != collected.end()) {
      auto& seq = **next++;
      if ((in_time || seq.forced) && load_blocks(seq, plan)) schedule_prefill(seq, plan);
    } else {
      plan.waits_for_slot = in_time && fits && may_admit() && lacks_slot();
      return;
    }
  }
}

// Whether the first waiting sequence has no slot for its adapter.
bool Scheduler::Impl::lacks_slot() const {
  return !waiting.empty() && !adapters.has_room((*waiting.begin())->adapter);
}

// Whether one more sequence may run, apart from its blocks and its adapter.
bool Scheduler::Impl::may_admit() const {
  // It may have only one token to compute, and then it samples.
  return rows.any_left() && static_cast<int>(running.size()) < limits.max_batch_size;
}

// Returns the waiting sequence that runs next; null if none may run. If the adapter of the first one has no slot,
// another one may overtake it (adapter_slots.h). Only a few are considered, so that a plan costs little.
Seq* Scheduler::Impl::next_waiting() const {
  constexpr int kMostConsidered = 256;
  if (waiting.empty() || !may_admit()) return nullptr;
  auto& first = **waiting.begin();
  if (adapters.has_room(first.adapter)) return &first;
  const bool adapters_overtake = first.plans_without_slot <= kOvertakenPlans;
  for (auto* seq : waiting | std::views::take(kMostConsidered)) {
    if (seq->priority != first.priority) break;
    if (seq->adapter == 0 || (adapters_overtake && adapters.has_room(seq->adapter))) return seq;
  }
  return nullptr;
}

// Plans as many tokens of a running sequence as the budget, the time and the rows of logits allow. Returns false if
// none.
bool Scheduler::Impl::schedule_prefill(Seq& seq, StepPlan& plan) {
  const bool timed = time != nullptr && !seq.forced;
  auto most_tokens = std::min(seq.gap(), seq.planned + limits.token_budget - num_stalled - plan.num_tokens);
  if (timed) most_tokens = time->fit(seq.computed, most_tokens);
  most_tokens = extend_units(seq, most_tokens);
  if (!schedule(seq, most_tokens, plan)) return false;
  if (timed) time->take(seq.computed, seq.planned);
  return true;
}

// Plans as many tokens of a running sequence, from `computed` on, as the rows of logits allow, at most most_tokens.
// Returns false if none. If plan_decodes() has already planned a token of a forced sequence, the new part replaces that
// part, which did not sample and took no row.
bool Scheduler::Impl::schedule(Seq& seq, std::int32_t most_tokens, StepPlan& plan) {
  if (most_tokens == 0) return false;
  auto part = rows.take_part(seq, most_tokens);
  if (part.num_tokens == 0) return false;
  part.forced = seq.forced;
  plan.num_tokens += part.num_tokens - seq.planned;
  if (seq.planned > 0) {
    *std::ranges::find(plan.seqs, seq.id, &ScheduledSeq::id) = part;
  } else {
    plan.seqs.push_back(part);
  }
  seq.planned = part.num_tokens;
  return true;
}

// Allocates blocks for all tokens of a decode, and units for its next token. If necessary, takes blocks of sequences
// after it, the last one first. Returns false if
//   - there was no sequence after it, so it was preempted itself,
//   - a sequence is ending: its blocks become free when its last token is resolved; until then there is no preemption,
//   - or the pool does not have that many blocks.
bool Scheduler::Impl::reserve_blocks(Seq& seq, StepPlan& plan) {
  while (!allocate_next(seq)) {
    const bool never = cannot_fit(seq);
    if (never && !seq.has_placeholder()) {
      mark_impossible(seq);
      return false;
    }
    if (never || num_ending > 0) {  // with `never`: its placeholder may be its last token
      ++num_stalled;
      return false;
    }
    auto& victim = *running.back();
    if (&victim == &seq && running.size() == 1) {
      broken(cat("sequence ", seq.id, " runs alone and needs more than its ", seq.blocks.size(), " blocks, but ",
                 pool.num_available(), " of ", pool.num_blocks(), " are available"));
    }
    preempt(victim, plan);
    if (&victim == &seq) return false;
  }
  return true;
}

void Scheduler::Impl::preempt(Seq& seq, StepPlan& plan) {
  stop_running(seq);
  enqueue(seq);
  plan.preempted.push_back(seq.id);
  ++num_preemptions;
}

}  // namespace charonia::schedule
