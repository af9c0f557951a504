// Policy: children of one prompt (several completions of a request). A child starts with its parent's blocks, so its
// prompt is not computed a second time.
//
// A child waits outside the queue, where it blocks no other sequence, until its parent's prompt is computed. Then it
// enters the queue at the position of its arrival. It remains a child until the first step with it has advanced. If the
// parent stops running before that (removed, preempted, impossible), the child becomes an ordinary sequence.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

// The parent of a new sequence; null if it has none.
Seq* Scheduler::Impl::parent_of(SeqId id, std::span<const TokenId> prompt, const SeqOptions& options) const {
  if (options.parent == 0 || options.all_rows) return nullptr;
  auto& parent = at(options.parent);
  if (parent.salt != options.salt || parent.prompt_tokens != std::ssize(prompt) ||
      !std::equal(prompt.begin(), prompt.end(), parent.tokens.begin())) {
    broken(cat("sequence ", id, " and its parent ", options.parent, " have different prompts or salts"));
  }
  return parent.state == State::impossible ? nullptr : &parent;
}

// Whether the parent still has the units that the child's first token reads. If the parent has generated tokens since,
// it may have released some. Its state already includes that token. Then the child becomes an ordinary sequence.
bool Scheduler::Impl::has_parents_units(const Seq& seq) const {
  for (std::size_t k = 0; k < num_kinds(); ++k) {
    if (is_state(k)) return false;
    if (seq.parent->units[k].first > pool.kinds()[k].first_needed(seq.prompt_tokens - 1)) return false;
  }
  return true;
}

// Shares all of its parent's blocks before the block with the prompt's last token. The child writes to that block, so
// it gets its own: a copy, unless the block holds no other token of the prompt. The child computes the last token
// itself, to sample the next one. Returns false and changes nothing if no block is available.
bool Scheduler::Impl::begin_with_parent(Seq& seq, std::int32_t slack, StepPlan& plan) {
  const auto& parent = *seq.parent;
  const auto shared = static_cast<std::size_t>((seq.prompt_tokens - 1) / pool.block_len());
  const bool copies = (seq.prompt_tokens - 1) % pool.block_len() != 0;
  std::vector<cache::BlockId> blocks(parent.blocks.begin(),
                                     parent.blocks.begin() + static_cast<std::ptrdiff_t>(shared));
  std::vector<cache::UnitRange> units(num_kinds());
  bool fits = slack >= 1;
  for (std::size_t k = 0; k < num_kinds(); ++k) {
    const auto& all = parent.units[k];
    auto& range = units[k];
    range.first = pool.kinds()[k].first_needed(seq.prompt_tokens - 1);
    range.units.assign(all.units.begin() + (range.first - all.first),
                       all.units.begin() + (static_cast<std::int32_t>(shared) - all.first));
    units_wanted[k] = 1;
    fits = fits && units_slack(seq, k) >= 1;
  }
  if (!fits || !pool.allocate(1, blocks, units_wanted, units)) return false;
  pool.retain(std::span(blocks).first(shared));
  if (copies) plan.block_copies.push_back({parent.blocks[shared], blocks.back()});
  for (std::size_t k = 0; k < num_kinds(); ++k) {
    const std::span<const cache::BlockId> own(units[k].units);
    pool.retain_units(k, own.first(own.size() - 1));
    const auto from = parent.units[k].units[shared - static_cast<std::size_t>(parent.units[k].first)];
    if (copies) plan.block_copies.push_back({from, own.back(), pool.kinds()[k].kind()});
  }
  seq.blocks = std::move(blocks);
  seq.units = std::move(units);
  seq.computed = seq.num_cached_tokens = seq.prompt_tokens - 1;
  seq.inserted_blocks = static_cast<std::int32_t>(shared);
  seq.nodes.assign(parent.nodes.begin(),
                   parent.nodes.begin() + static_cast<std::ptrdiff_t>(std::min(shared, parent.nodes.size())));
  seq.forked = true;
  return true;
}

void Scheduler::Impl::leave_parent(Seq& seq) {
  if (seq.parent == nullptr) return;
  std::erase(seq.parent->children, &seq);
  seq.parent = nullptr;
}

// Called when the sequence's prompt is computed.
void Scheduler::Impl::queue_children(const Seq& seq) {
  for (auto* child : seq.children) {
    if (child->state == State::waiting_for_parent) enqueue(*child);
  }
}

void Scheduler::Impl::leave_children(Seq& seq) {
  queue_children(seq);
  for (auto* child : seq.children) child->parent = nullptr;
  seq.children.clear();
}

}  // namespace charonia::schedule
