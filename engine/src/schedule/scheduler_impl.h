// The state of a Scheduler and its transitions, grouped by the file that defines them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "cache/units.h"
#include "schedule/adapter_slots.h"
#include "schedule/logits_rows.h"
#include "schedule/rounds.h"
#include "schedule/scheduler.h"
#include "schedule/sequence_state.h"

namespace charonia::schedule {

struct Scheduler::Impl {
  Impl(Limits limits_in, cache::BlockManager& pool_in, StepTime* step_time)
      : limits(limits_in),
        pool(pool_in),
        time(step_time),
        initial_blocks(pool_in.num_blocks()),
        units_reserve(pool_in.kinds().size()),
        units_wanted(pool_in.kinds().size()),
        snapshot_tokens(blocks_for(std::max(limits_in.snapshot_tokens, 1)) * pool_in.block_len()),
        rows(limits.max_logits_rows),
        adapters(limits.adapter_slots) {
    known_blocks = all_blocks();
    for (std::size_t k = 0; k < num_kinds(); ++k) {
      if (!is_state(k)) continue;
      max_proposal_states = std::min(max_proposal_states, most_proposal_states(pool.kinds()[k].num_units()));
    }
  }

  Seq& at(SeqId id) const;    // throws Error(internal) if unknown
  Seq* find(SeqId id) const;  // null if unknown
  std::int32_t blocks_for(std::int32_t tokens) const { return (tokens + pool.block_len() - 1) / pool.block_len(); }

  // scheduler.cpp: transitions of a sequence
  void enqueue(Seq& seq);
  void stop_running(Seq& seq);  // releases its blocks; the caller sets its next state
  void insert_blocks(Seq& seq);  // inserts its full computed blocks into the prefix index

  // scheduler_plan.cpp: the steps of plan()
  void begin_plan();
  void plan_decodes(StepPlan& plan);
  void plan_prefill(StepPlan& plan);
  bool lacks_slot() const;
  bool may_admit() const;
  Seq* next_waiting() const;
  bool schedule_prefill(Seq& seq, StepPlan& plan);
  bool schedule(Seq& seq, std::int32_t most_tokens, StepPlan& plan);
  bool reserve_blocks(Seq& seq, StepPlan& plan);
  void preempt(Seq& seq, StepPlan& plan);

  // admission.cpp: which sequences may start to run
  bool admit(Seq& seq, StepPlan& plan);
  bool begin_with_prefix(Seq& seq, std::int32_t slack);
  bool may_fit(const Seq& seq, std::int32_t slack) const;
  bool will_need_more_blocks(const Seq& seq) const;
  void count_reserve();

  // loads.cpp: KV from an offload
  void begin_load(Seq& seq, std::int32_t last);
  bool load_blocks(Seq& seq, StepPlan& plan);
  cache::BlockId place_of(Seq& seq, const PrefixPart& part);
  void use_loaded_blocks(Seq& seq, std::int32_t end);
  void end_load(Seq& seq);
  bool allocate_loaded_units(Seq& seq);

  // windows.cpp: kinds of cache with windows
  std::size_t num_kinds() const { return units_reserve.size(); }  // after kind 0
  int units_slack(const Seq& seq, std::size_t kind) const;
  std::int32_t most_units(std::size_t kind, std::int32_t tokens) const;
  bool will_need_more_units(const Seq& seq, std::size_t kind) const;
  bool allocate_next(Seq& seq);
  std::int32_t extend_units(Seq& seq, std::int32_t num_tokens);
  void release_units_before_windows(Seq& seq);
  void plan_starved(StepPlan& plan);

  // states.cpp: the kind `state`
  bool is_state(std::size_t kind) const { return pool.kinds()[kind].kind() == CacheKind::state; }
  void begin_states(Seq& seq, std::int32_t indexed_tokens);
  int states_wanted(Seq& seq, std::size_t kind);
  std::int32_t up_to_snapshot(const Seq& seq, std::int32_t num_tokens) const;
  cache::BlockId snapshot_at(const Seq& seq, std::size_t kind, std::int32_t position) const;
  void keep_snapshot(Seq& seq, std::size_t kind, cache::BlockId unit, const cache::PrefixNode& node);

  // proposals.cpp: proposed next tokens
  void plan_proposals(StepPlan& plan);
  std::int32_t allocate_proposals(Seq& seq, std::int32_t count);
  std::int32_t allocate_proposal_states(Seq& seq, std::int32_t count);
  void release_proposal_states(Seq& seq);

  // children.cpp: children of one prompt
  Seq* parent_of(SeqId id, std::span<const TokenId> prompt, const SeqOptions& options) const;
  bool has_parents_units(const Seq& seq) const;
  bool begin_with_parent(Seq& seq, std::int32_t slack, StepPlan& plan);
  void leave_parent(Seq& seq);
  void queue_children(const Seq& seq);
  void leave_children(Seq& seq);

  // fewer_blocks.cpp: out of memory
  int all_blocks() const;  // of all kinds
  bool cannot_fit(const Seq& seq) const;
  bool notice_fewer_blocks();
  void mark_impossible(Seq& seq);

  void check_lists() const;  // scheduler_check.cpp

  Limits limits;
  cache::BlockManager& pool;
  StepTime* time;      // null: no limit
  Offload* offload = nullptr;
  int initial_blocks;  // blocks of the pool at construction
  int known_blocks;    // all_blocks() at the last notice_fewer_blocks()

  std::unordered_map<SeqId, std::unique_ptr<Seq>> seqs;
  std::vector<Seq*> running;  // in the order of Before
  std::set<Seq*, Before> waiting;
  std::vector<Seq*> impossible;
  std::uint64_t arrivals = 0;
  Rounds rounds;
  std::int64_t waiting_tokens = 0;  // prompt tokens of all sequences that do not run
  std::int64_t activated_blocks = 0;  // blocks that became Active and that a waiting sequence may begin with

  // Temporary lists of plan() and advance().
  std::vector<Seq*> collected;
  int num_ending = 0;   // running sequences whose last token is a placeholder
  int num_stalled = 0;  // decodes that wait for the blocks of ending sequences
  int reserve = 0;      // running sequences that will need another block
  std::vector<int> units_reserve;  // running sequences that will need another unit, by kind after kind 0
  std::vector<int> units_wanted;   // number of units to allocate, by kind after kind 0
  std::int32_t snapshot_tokens;    // distance of the snapshots of a long prefill, whole blocks
  std::vector<cache::BlockId> units_of_block;  // of the block that is inserted, by kind after kind 0
  Seq* starved = nullptr;          // the first running sequence that got no units for its next token in this plan
  LogitsRows rows;
  AdapterSlots adapters;
  std::int64_t loaded_bytes = 0;  // that this plan has copied from the offload
  bool any_proposed = false;  // a sequence may have proposals
  std::int32_t max_proposal_states = std::numeric_limits<std::int32_t>::max();  // of all sequences of a plan
  std::size_t first_share = 0;  // of proposals: counts up (proposals.cpp)

  std::int64_t num_preemptions = 0, prefix_query_tokens = 0, prefix_hit_tokens = 0, loaded_tokens = 0;
};

}  // namespace charonia::schedule
