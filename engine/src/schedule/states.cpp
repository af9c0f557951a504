// Policy: the kind `state`. A sequence has one unit with its state after its computed tokens. At the end of a block the
// state can become the snapshot of this block's node. No state is copied for it: the node gets the unit, the next step
// reads it and writes another unit, and the sequence releases it then. The unit of a snapshot never changes.
//
// A sequence leaves snapshots
//   1. at the last end of a block before the last token that it had at admission: the same prompt, or a prompt that
//      only continues it, begins there;
//   2. where a lookup found its blocks, but no state: the branch of a prompt that several sequences begin with;
//   3. at every multiple of snapshot_tokens of its prefill: a preempted sequence begins there, and so does a prompt
//      that leaves this one in between;
//   4. at each end of a block of its decodes, for the next turn of a conversation. The one before is dropped,
//   5. and at the end of the blocks that it has loaded.
// Prefill ends a part at 1 to 3. Snapshots are evicted like other units: the least recently used one first. If no unit
// is left for a sequence at a snapshot, it takes the snapshot back, and its next step changes it.
#include <algorithm>
#include <cstdint>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

// Called at admission. indexed_tokens: the tokens whose blocks the index has.
void Scheduler::Impl::begin_states(Seq& seq, std::int32_t indexed_tokens) {
  seq.prefill_end = (seq.num_tokens() - 1) / pool.block_len() * pool.block_len();
  seq.branch = indexed_tokens > seq.computed ? indexed_tokens : 0;
}

// How many units the next step of a running sequence needs in addition: 1 if it must not change the one that it has.
int Scheduler::Impl::states_wanted(Seq& seq, std::size_t kind) {
  const auto& states = pool.kinds()[kind];
  const auto& units = seq.units[kind].units;
  if (units.size() != 1) return 0;
  if (states.is_private(units.front())) return 0;
  return states.num_available() == 0 && pool.withdraw_unit(kind, units.front()) ? 0 : 1;
}

// How many of the next num_tokens tokens a part of prefill may compute.
std::int32_t Scheduler::Impl::up_to_snapshot(const Seq& seq, std::int32_t num_tokens) const {
  if (!pool.has_prefix_index()) return num_tokens;
  auto end = (seq.computed / snapshot_tokens + 1) * snapshot_tokens;
  for (const auto position : {seq.branch, seq.prefill_end}) {
    if (position > seq.computed) end = std::min(end, position);
  }
  return std::min(num_tokens, end - seq.computed);
}

// The unit of a sequence with its state at `position`, the end of a block, if this becomes a snapshot; else kNone.
cache::BlockId Scheduler::Impl::snapshot_at(const Seq& seq, std::size_t kind, std::int32_t position) const {
  const bool decodes = position > seq.prefill_end;
  const bool wanted = decodes || seq.load || position == seq.prefill_end || position == seq.branch ||
                      position % snapshot_tokens == 0;
  return position == seq.computed && wanted ? seq.units[kind].units.back() : cache::kNone;
}

// Called after a block was inserted at `node`. unit: the unit of the snapshot at its end; kNone: there is none.
void Scheduler::Impl::keep_snapshot(Seq& seq, std::size_t kind, cache::BlockId unit, const cache::PrefixNode& node) {
  if (unit == cache::kNone) return;
  seq.units[kind].units.back() = unit;
  if (seq.computed <= seq.prefill_end) return;
  pool.drop_unit(kind, seq.last_snapshot);
  seq.last_snapshot = node;
}

}  // namespace charonia::schedule
