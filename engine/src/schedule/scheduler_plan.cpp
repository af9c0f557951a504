// The planning of a step: first the decodes, then prefill under what is left of the token budget. scheduler.h has the
// rules.
#include <algorithm>
#include <cstdint>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

// Forgets a plan that never advanced, and counts the sequences that are ending.
void Scheduler::Impl::begin_plan() {
  notice_fewer_blocks();
  num_ending = num_stalled = 0;
  rows.begin_step();
  for (std::size_t i = 0; i < running.size();) {
    auto& seq = *running[i];
    if (seq.forked) {  // it began with its parent's blocks in that plan: its copy of one was not made
      stop_running(seq);
      enqueue(seq);
      continue;
    }
    ++i;
    seq.planned = 0;
    if (!seq.is_full()) continue;
    if (!seq.has_placeholder()) {
      broken(cat("sequence ", seq.id, " has all its ", seq.max_total_tokens, " tokens and was not removed"));
    }
    ++num_ending;
  }
}

// One token of each decode, and then one of each sequence with appended tokens (Scheduler::append()).
void Scheduler::Impl::plan_decodes(StepPlan& plan) {
  collected.clear();
  for (auto* seq : running) {
    if (seq->is_decode() || (seq->forced && !seq->is_full())) collected.push_back(seq);
  }
  // In the order of Before, so that blocks are never taken from a sequence that is in the plan already.
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

// Goes through the running and the waiting sequences together, in the order of Before. Those with appended tokens are in
// the plan with one already, and the bound on the time does not hold for them: these tokens are output, not prompt.
void Scheduler::Impl::plan_prefill(StepPlan& plan) {
  collected.clear();
  for (auto* seq : running) {
    if (seq->gap() > 1 && (!seq->forced || seq->planned > 0)) collected.push_back(seq);
  }
  notice_fewer_blocks();
  count_reserve();
  bool fits = plan.preempted.empty();  // what was preempted is not admitted again at once
  if (time != nullptr) time->begin_prefill(plan.num_tokens);
  auto next = collected.begin();
  // Stalled decodes keep their place in the budget. Otherwise the next step could have more decodes than it allows.
  while (plan.num_tokens + num_stalled < limits.token_budget) {
    const bool in_time = time == nullptr || time->any_left();
    if (in_time && fits && may_admit() && (next == collected.end() || Before{}(*waiting.begin(), *next))) {
      auto& seq = **waiting.begin();
      if (cannot_fit(seq) && !seq.has_placeholder()) {
        mark_impossible(seq);
      } else if (admit(seq, plan)) {
        schedule_prefill(seq, plan);
      } else {
        fits = notice_fewer_blocks();
      }
    } else if (next != collected.end()) {
      auto& seq = **next++;
      if (in_time || seq.forced) schedule_prefill(seq, plan);
    } else {
      return;
    }
  }
}

// Whether one more sequence may run, if it has its blocks.
bool Scheduler::Impl::may_admit() const {
  // It may have only one token to compute, and that one samples.
  return rows.any_left() && !waiting.empty() && static_cast<int>(running.size()) < limits.max_batch_size;
}

// Plans as many of a running sequence's tokens as the budget, the time and the rows of logits allow. False: none.
bool Scheduler::Impl::schedule_prefill(Seq& seq, StepPlan& plan) {
  const bool timed = time != nullptr && !seq.forced;
  auto most_tokens = std::min(seq.gap(), seq.planned + limits.token_budget - num_stalled - plan.num_tokens);
  if (timed) most_tokens = time->fit(seq.computed, most_tokens);
  if (!schedule(seq, most_tokens, plan)) return false;
  if (timed) time->take(seq.computed, seq.planned);
  return true;
}

// Plans as many of a running sequence's tokens as the rows of logits allow, at most most_tokens from `computed` on.
// False: none. The token of a forced sequence that plan_decodes() has planned is among them: the new part replaces that
// one, which did not sample, and so took no row.
bool Scheduler::Impl::schedule(Seq& seq, std::int32_t most_tokens, StepPlan& plan) {
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

// Gives a decode blocks for all its tokens, if need be those of sequences after it, the last one first. False when
//   - there was none after it, so it was preempted itself,
//   - a sequence is ending: its blocks come free when its last token is resolved, and nobody is preempted for them,
//   - or there are not that many blocks.
bool Scheduler::Impl::reserve_blocks(Seq& seq, StepPlan& plan) {
  const auto missing = blocks_for(seq.num_tokens()) - static_cast<std::int32_t>(seq.blocks.size());
  while (missing > 0 && !pool.allocate(missing, seq.blocks)) {
    const bool never = cannot_fit(seq);
    if (never && !seq.has_placeholder()) {
      mark_impossible(seq);
      return false;
    }
    if (never || num_ending > 0) {  // with `never`: its placeholder may turn out to be its end
      ++num_stalled;
      return false;
    }
    auto& victim = *running.back();
    if (&victim == &seq && running.size() == 1) {
      broken(cat("sequence ", seq.id, " runs alone and needs ", missing, " more blocks, ", pool.num_available(), " of ",
                 pool.num_blocks(), " are available"));
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
