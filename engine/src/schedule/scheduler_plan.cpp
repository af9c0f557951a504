// The planning of a step: scheduler.h has the rules.
#include <limits>
#include <utility>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

void Scheduler::Impl::begin_plan() {
  notice_fewer_blocks();
  num_ending = num_held = 0;
  rows_left = limits.max_logits_rows > 0 ? limits.max_logits_rows : std::numeric_limits<int>::max();
  for (std::size_t i = 0; i < running.size();) {
    auto& seq = *running[i];
    if (seq.forked) {  // in a plan that is forgotten, and nobody copied its block
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

void Scheduler::Impl::plan_decodes(StepPlan& plan) {
  collected.clear();
  for (auto* seq : running) {
    if (seq->gap() == 1 && !seq->is_full()) collected.push_back(seq);
  }
  // In the order of Before, so that blocks are never taken from a sequence that is in the plan already.
  for (auto* seq : collected) {
    if (seq->state == State::running && reserve_blocks(*seq, plan)) schedule(*seq, plan);
  }
}

void Scheduler::Impl::plan_prefill(StepPlan& plan) {
  collected.clear();
  for (auto* seq : running) {
    if (seq->gap() > 1) collected.push_back(seq);
  }
  notice_fewer_blocks();
  count_reserve();
  // What is preempted is never admitted again at once.
  bool fits = plan.preempted.empty();
  auto next = collected.begin();
  // Decodes that were held back keep their place in the budget, or there would be too many in the next step.
  while (plan.num_tokens + num_held < limits.token_budget) {
    // What is admitted may have but one token to compute, and with it a row.
    const bool may_admit =
        fits && rows_left > 0 && !waiting.empty() && static_cast<int>(running.size()) < limits.max_batch_size;
    if (may_admit && (next == collected.end() || Before{}(*waiting.begin(), *next))) {
      auto& seq = **waiting.begin();
      if (cannot_fit(seq) && !seq.has_placeholder()) {
        give_up(seq);
      } else if (admit(seq, plan)) {
        schedule(seq, plan);
      } else {
        fits = notice_fewer_blocks();
      }
    } else if (next != collected.end()) {
      schedule(**next++, plan);
    } else {
      return;
    }
  }
}

// Plans as many of a sequence's tokens as there is room for. False: none, there is no row left for its logits.
bool Scheduler::Impl::schedule(Seq& seq, StepPlan& plan) {
  ScheduledSeq part{.id = seq.id, .first_position = seq.computed};
  auto n = std::min(seq.gap(), limits.token_budget - num_held - plan.num_tokens);
  if (seq.all_rows && seq.rows_given < seq.prompt_tokens && seq.computed < seq.prompt_tokens) {
    part.all_rows = seq.computed >= seq.rows_given;
    n = std::min(n,
                 part.all_rows ? std::min(seq.prompt_tokens - seq.computed, rows_left) : seq.rows_given - seq.computed);
  }
  if (!part.all_rows && n == seq.gap() && rows_left == 0) --n;
  if (n == 0) return false;
  part.num_tokens = seq.planned = n;
  part.samples = n == seq.gap();
  rows_left -= part.num_logits_rows();
  plan.num_tokens += n;
  plan.seqs.push_back(part);
  return true;
}

void Scheduler::Impl::preempt(Seq& seq, StepPlan& plan) {
  stop_running(seq);
  enqueue(seq);
  plan.preempted.push_back(seq.id);
  ++num_preemptions;
}

// Gives the sequence blocks for all its tokens, if need be those of sequences after it, the last one first. False when
// there was none after it: it was preempted itself; when blocks come free anyway as soon as a step is resolved; or when
// there is no such number of blocks.
bool Scheduler::Impl::reserve_blocks(Seq& seq, StepPlan& plan) {
  const auto missing = blocks_for(seq.num_tokens()) - static_cast<std::int32_t>(seq.blocks.size());
  while (missing > 0 && !pool.allocate(missing, seq.blocks)) {
    const bool never = cannot_fit(seq);
    if (never && !seq.has_placeholder()) {
      give_up(seq);
      return false;
    }
    if (never || num_ending > 0) {  // its last token may turn out to be its end, and then it needs no block
      ++num_held;
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

bool Scheduler::Impl::admit(Seq& seq, StepPlan& plan) {
  if (seq.has_placeholder()) return false;
  if (seq.is_full()) broken(cat("sequence ", seq.id, " waits and has all its ", seq.max_total_tokens, " tokens"));
  const bool will_need_more = will_need_more_blocks(seq);
  const auto slack = pool.num_available() - reserve - static_cast<int>(will_need_more);
  if (!(seq.parent != nullptr ? begin_with_parent(seq, slack, plan) : begin_anew(seq, slack))) return false;
  reserve += static_cast<int>(will_need_more);
  waiting.erase(&seq);
  waiting_tokens -= seq.prompt_tokens;
  seq.state = State::running;
  running.insert(std::ranges::upper_bound(running, &seq, Before{}), &seq);
  if (seq.has_computed_prompt()) let_children_in(seq);  // preempted before, and found again
  return true;
}

// With what the prefix index has of its tokens. False, and nothing changed, when it takes more than `slack` blocks.
bool Scheduler::Impl::begin_anew(Seq& seq, std::int32_t slack) {
  // Prompts may be long: they are not looked up again as long as that cannot change the answer.
  if (slack < seq.need - (gains - seq.gains_then)) return false;
  // Rows of logits that are still to be given must be computed.
  const auto last = seq.all_rows ? std::min(seq.rows_given, seq.num_tokens() - 1) : seq.num_tokens() - 1;
  const auto available = pool.num_available();
  auto match = pool.match(seq.tokens, last, seq.salt);
  const auto num_matched = static_cast<std::int32_t>(match.blocks.size());
  const auto missing = blocks_for(seq.num_tokens()) - num_matched;
  seq.need = missing + available - pool.num_available();
  seq.gains_then = gains;
  bool fits = seq.need <= slack;
  try {
    fits = fits && pool.allocate(missing, match.blocks);
  } catch (...) {
    pool.release(match.blocks);
    throw;
  }
  if (!fits) {
    pool.release(match.blocks);
    return false;
  }
  gains += num_matched;
  seq.need = 0;
  seq.blocks = std::move(match.blocks);
  seq.nodes = std::move(match.nodes);
  seq.computed = match.num_tokens;
  seq.inserted_blocks = num_matched;
  if (seq.num_cached_tokens < 0) {
    seq.num_cached_tokens = match.num_tokens;
    if (!seq.all_rows) prefix_query_tokens += seq.prompt_tokens;
    prefix_hit_tokens += match.num_tokens;
  }
  return true;
}

// With its parent's blocks, but for the last one, which it will write to: that one it gets a copy of, unless only the
// last token of the prompt is in it, which it computes itself to sample what follows.
bool Scheduler::Impl::begin_with_parent(Seq& seq, std::int32_t slack, StepPlan& plan) {
  const auto& parent = *seq.parent;
  const auto shared = static_cast<std::size_t>((seq.prompt_tokens - 1) / pool.block_len());
  std::vector<cache::BlockId> blocks(parent.blocks.begin(),
                                     parent.blocks.begin() + static_cast<std::ptrdiff_t>(shared));
  if (slack < 1 || !pool.allocate(1, blocks)) return false;
  pool.retain(std::span(blocks).first(shared));
  if ((seq.prompt_tokens - 1) % pool.block_len() != 0)
    plan.block_copies.emplace_back(parent.blocks[shared], blocks.back());
  seq.blocks = std::move(blocks);
  seq.computed = seq.num_cached_tokens = seq.prompt_tokens - 1;
  seq.inserted_blocks = static_cast<std::int32_t>(shared);
  seq.nodes.assign(parent.nodes.begin(),
                   parent.nodes.begin() + static_cast<std::ptrdiff_t>(std::min(shared, parent.nodes.size())));
  seq.forked = true;
  return true;
}

// True when memory did not suffice for all blocks since the last look. What waits and can never fit is given up.
bool Scheduler::Impl::notice_fewer_blocks() {
  if (std::exchange(num_blocks, pool.num_blocks()) == pool.num_blocks()) return false;
  count_reserve();
  std::vector<Seq*> too_long;
  for (const auto& [id, seq] : seqs) {
    const bool waits = seq->state == State::waiting || seq->state == State::held;
    if (waits && cannot_fit(*seq) && !seq->has_placeholder()) too_long.push_back(seq.get());
  }
  std::ranges::sort(too_long, Before{});
  for (auto* seq : too_long) give_up(*seq);
  return true;
}

void Scheduler::Impl::count_reserve() {
  reserve = 0;
  for (const auto* seq : running) reserve += static_cast<int>(will_need_more_blocks(*seq));
}

}  // namespace charonia::schedule
