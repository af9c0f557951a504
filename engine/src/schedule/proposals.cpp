// Policy: proposals (speculation). A decode may compute tokens that may follow it in the same step. Each of them has a
// row of logits, and the next token is sampled from this row as if the proposal were true. The caller accepts a
// proposal if it equals the sampled token, so proposals change no token.
//
// The KV of a proposal counts as computed only when the proposal is accepted. Until then its slots lie after all
// computed tokens in blocks that only this sequence uses, and the next step writes them again. So a rejected proposal
// needs no rollback. A state cannot be taken back, so the state after each proposal has a unit of its own. Accepting the
// proposal gives it to the sequence. The next plan releases the others.
//
// Proposals are shared evenly. They get at most half of what the decodes leave of the token budget and of the rows of logits, so that prefill
// goes on. They take no block or unit that is in reserve, and they never preempt.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

void Scheduler::propose(SeqId id, std::vector<TokenId> tokens) {
  auto& seq = impl_->at(id);
  if (std::ranges::any_of(tokens, [](TokenId token) { return token < 0; })) {
    broken(cat("a proposal for sequence ", id, " is not a token id"));
  }
  const bool decodes = seq.has_computed_prompt() && seq.is_decode() && !seq.has_placeholder() && !seq.forced;
  if (!decodes) return;
  seq.planned -= std::exchange(seq.planned_proposals, 0);  // of a plan that was discarded
  seq.proposed = std::move(tokens);
  impl_->any_proposed = true;
}

void Scheduler::Impl::plan_proposals(StepPlan& plan) {
  if (!std::exchange(any_proposed, false)) return;
  count_reserve();
  // Every other sequence may need a row in this step.
  const auto all = std::min(static_cast<int>(seqs.size()), limits.max_batch_size);
  const auto others = all - static_cast<int>(plan.seqs.size());
  const auto rows_left = (rows.left() - std::max(others, 0)) / 2;
  const auto tokens_left = (limits.token_budget - num_stalled - plan.num_tokens) / 2;
  auto left = std::min(rows_left, tokens_left);
  // Shared evenly: each sequence in turn gets one proposal more, and the first turn changes from plan to plan.
  struct Share {
    ScheduledSeq* part;
    std::int32_t wanted, count = 0;
  };
  std::vector<Share> shares;
  for (auto& part : plan.seqs) {
    auto& seq = at(part.id);
    if (seq.proposed.empty()) continue;
    any_proposed = true;  // if this plan is discarded, the next plan considers them again
    // The token that is sampled after the last proposal must fit too.
    const auto most = part.forced ? 0 : seq.max_total_tokens - seq.num_tokens() - 1;
    shares.push_back({&part, std::min(static_cast<std::int32_t>(seq.proposed.size()), most)});
  }
  if (shares.empty()) return;
  std::ranges::rotate(shares, shares.begin() + static_cast<std::ptrdiff_t>(first_share++ % shares.size()));
  for (bool any = true; any && left > 0;) {
    any = false;
    for (auto& share : shares) {
      if (left <= 0 || share.count >= share.wanted) continue;
      any = true;
      ++share.count;
      --left;
    }
  }
  // The other running sequences may need a state in this plan, and so may a waiting one.
  const auto spared = static_cast<int>(running.size() - plan.seqs.size()) + (waiting.empty() ? 0 : 2);
  auto states_left = max_proposal_states;
  for (const auto& share : shares) {
    auto& part = *share.part;
    auto& seq = at(part.id);
    for (std::size_t k = 0; k < num_kinds(); ++k) {
      if (is_state(k)) states_left = std::min(states_left, std::max(pool.kinds()[k].num_available() - spared, 0));
    }
    const auto wanted = std::min(share.count, states_left);
    const auto count = wanted > 0 ? allocate_proposals(seq, wanted) : 0;
    states_left -= count;
    seq.proposed.resize(static_cast<std::size_t>(count));
    seq.planned_proposals = part.num_proposed = count;
    seq.planned += count;
    part.num_tokens += count;
    plan.num_tokens += count;
    rows.take(count);
  }
}

// Allocates the blocks and units of the first proposals. Returns how many have them.
std::int32_t Scheduler::Impl::allocate_proposals(Seq& seq, std::int32_t count) {
  const auto blocks = static_cast<std::int32_t>(seq.blocks.size());
  const auto own_reserve = static_cast<std::int32_t>(will_need_more_blocks(seq));
  const auto slack = std::max(pool.num_available() - reserve + own_reserve, 0);
  const auto missing = std::clamp(blocks_for(seq.num_tokens() + count) - blocks, 0, slack);
  std::ranges::fill(units_wanted, 0);
  if (missing > 0 && !pool.allocate(missing, seq.blocks, units_wanted, seq.units)) return 0;
  reserve -= own_reserve - static_cast<std::int32_t>(will_need_more_blocks(seq));
  const auto room = static_cast<std::int32_t>(seq.blocks.size()) * pool.block_len() - seq.num_tokens();
  return allocate_proposal_states(seq, extend_units(seq, 1 + std::min(count, room)) - 1);
}

// Allocates a unit of each kind `state` for each proposal.
std::int32_t Scheduler::Impl::allocate_proposal_states(Seq& seq, std::int32_t count) {
  for (std::size_t k = 0; k < num_kinds(); ++k) units_wanted[k] = is_state(k) ? count : 0;
  seq.proposal_units.resize(num_kinds());
  return pool.allocate(0, seq.blocks, units_wanted, seq.proposal_units) ? count : 0;
}

void Scheduler::Impl::release_proposal_states(Seq& seq) {
  for (std::size_t k = 0; k < seq.proposal_units.size(); ++k) pool.release_units(k, seq.proposal_units[k].units);
  seq.proposal_units.clear();
}

bool Scheduler::accept(SeqId id, TokenId next) {
  auto& seq = impl_->at(id);
  if (next < 0) broken(cat("the sampled token ", next, " is not a token id"));
  if (seq.has_placeholder()) broken(cat("sequence ", id, " accepts, but its last token is not sampled yet"));
  if (seq.proposed.empty() || seq.proposed.front() != seq.tokens.back() || seq.is_full()) {
    seq.proposed.clear();
    return false;
  }
  seq.proposed.erase(seq.proposed.begin());
  ++seq.computed;
  for (std::size_t k = 0; k < impl_->num_kinds(); ++k) {
    if (!impl_->is_state(k)) continue;
    auto& units = seq.proposal_units[k].units;
    seq.units[k].units.push_back(units.front());
    units.erase(units.begin());
  }
  impl_->insert_blocks(seq);
  impl_->release_units_before_windows(seq);
  seq.tokens.push_back(next);
  return true;
}

}  // namespace charonia::schedule
