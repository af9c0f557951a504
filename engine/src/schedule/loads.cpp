// Loads: KV that an offload has stored. After the prefix index, admission asks the offload for the next blocks. They
// are read while other sequences continue, and copied to the blocks and units that the sequence holds.
//
// Without further kinds of cache, each block that is copied counts as computed, so a load that fails leaves the blocks
// before. With further kinds, a prefix needs its units too. They are loaded last, and the sequence begins after the
// last loaded block, or where the index ended if the load fails. Meanwhile it holds the units for both places.
#include <algorithm>
#include <cstdint>

#include "schedule/scheduler_impl.h"

namespace charonia::schedule {

// last: the number of tokens that need not be computed.
void Scheduler::Impl::begin_load(Seq& seq, std::int32_t last) {
  const auto whole = last / pool.block_len() * pool.block_len();
  if (offload == nullptr || seq.scope.empty() || whole <= seq.computed) return;
  const auto prefix = std::span<const TokenId>(seq.tokens).first(static_cast<std::size_t>(whole));
  auto found = offload->find(seq.scope, prefix, seq.inserted_blocks, !running.empty());
  seq.branch = std::max(seq.branch, found.branch * pool.block_len());
  seq.load = std::move(found.load);
}

// Copies the parts of a running sequence's load that have been read. Returns false while it waits for more. Next to
// other tokens a plan copies few bytes, so that they do not wait. The last part is copied only if the sequence can be
// scheduled, because a decode must be in every plan.
bool Scheduler::Impl::load_blocks(Seq& seq, StepPlan& plan) {
  if (!seq.load) return true;
  while (!seq.load->done()) {
    const auto part = seq.load->part();
    const auto bytes = seq.load->bytes();
    auto next = Load::Next::waits;
    if (rows.any_left() && (plan.seqs.empty() || loaded_bytes < limits.load_bytes)) {
      const bool has_place = part.kind == CacheKind::full || allocate_loaded_units(seq);
      next = has_place ? seq.load->next(place_of(seq, part)) : Load::Next::failed;
    }
    if (next == Load::Next::waits) {
      plan.waits_for_load = true;
      return false;
    }
    if (next == Load::Next::failed) break;
    loaded_bytes += bytes;
    if (num_kinds() == 0) use_loaded_blocks(seq, part.index + 1);
  }
  if (num_kinds() > 0) end_load(seq);
  seq.load.reset();
  return true;
}

// The block or unit of the sequence for a part of its load.
cache::BlockId Scheduler::Impl::place_of(Seq& seq, const PrefixPart& part) {
  if (part.kind == CacheKind::full) return seq.blocks[static_cast<std::size_t>(part.index)];
  std::size_t k = 0;
  while (pool.kinds()[k].kind() != part.kind) ++k;
  auto& range = seq.units[k];
  if (is_state(k)) return range.units.back();
  // The units from block `computed` on have no contents yet.
  const auto first = std::max(pool.kinds()[k].first_needed(seq.load->end * pool.block_len()), seq.inserted_blocks);
  return range.at(seq.inserted_blocks + part.index - first);
}

// Takes the units with a window that the load needs besides those for the next step, and the unit of the token after
// the load. Returns false if there are too few.
bool Scheduler::Impl::allocate_loaded_units(Seq& seq) {
  const auto end = seq.load->end;
  for (std::size_t k = 0; k < num_kinds(); ++k) {
    const auto first = std::max(pool.kinds()[k].first_needed(end * pool.block_len()), seq.inserted_blocks);
    const auto held = seq.units[k].end() - seq.inserted_blocks;
    units_wanted[k] = is_state(k) ? 0 : std::max(0, end + 1 - first - held);
    if (units_wanted[k] > 0 && units_wanted[k] > units_slack(seq, k)) return false;
  }
  return pool.allocate(0, seq.blocks, units_wanted, seq.units);
}

// The blocks before `end` count as computed.
void Scheduler::Impl::use_loaded_blocks(Seq& seq, std::int32_t end) {
  const auto tokens = end * pool.block_len() - seq.computed;
  seq.computed += tokens;
  loaded_tokens += tokens;
  if (seq.counts_loaded) seq.num_cached_tokens += tokens;
  insert_blocks(seq);
  if (seq.has_computed_prompt()) queue_children(seq);  // it was preempted
}

// Releases the units that the sequence does not need: after the load, or before it if the load has failed.
void Scheduler::Impl::end_load(Seq& seq) {
  const auto end = seq.load->end;
  const bool done = seq.load->done();
  const auto release = [&](std::size_t k, std::int32_t from, std::int32_t to) {
    auto& units = seq.units[k].units;
    if (from >= to) return;
    const auto count = static_cast<std::size_t>(to - from);
    pool.release_units(k, std::span(units).subspan(static_cast<std::size_t>(from), count));
    units.erase(units.begin() + from, units.begin() + to);
  };
  for (std::size_t k = 0; k < num_kinds(); ++k) {
    auto& range = seq.units[k];
    if (is_state(k)) {
      if (done) release(k, 0, static_cast<std::int32_t>(range.units.size()) - 1);
      continue;
    }
    if (done) {
      const auto first = pool.kinds()[k].first_needed(end * pool.block_len());
      release(k, 0, std::min(first, seq.inserted_blocks) - range.first);
      range.first = first;
    }
    const auto most = std::min(blocks_for(seq.num_tokens()) - range.first, most_units(k, limits.token_budget));
    release(k, most, static_cast<std::int32_t>(range.units.size()));
  }
  if (done) use_loaded_blocks(seq, end);
}

}  // namespace charonia::schedule
