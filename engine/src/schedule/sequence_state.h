// The state of one sequence. The comment above each group of fields names the file that owns them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/text.h"
#include "charonia/error.h"
#include "schedule/scheduler.h"

namespace charonia::schedule {

[[noreturn]] inline void broken(const std::string& what) { throw Error(ErrorCode::internal, cat("scheduler: ", what)); }

enum class State {
  waiting,             // in the queue
  waiting_for_parent,  // outside the queue, until its parent's prompt is computed (children.cpp)
  running,             // holds blocks
  impossible,          // needs more blocks than the pool has (fewer_blocks.cpp)
};

struct Seq {
  // Arguments of add().
  SeqId id = 0;
  int priority = 0;
  std::uint64_t round = 0;  // from Rounds
  std::uint64_t arrival = 0;
  std::uint64_t salt = 0;
  std::string scope;
  std::uint64_t adapter = 0;
  bool all_rows = false;
  std::int32_t prompt_tokens = 0;
  std::int32_t max_total_tokens = 0;

  State state = State::waiting;
  std::vector<TokenId> tokens;          // prompt and sampled tokens; the last may be a placeholder (negative)
  std::int32_t num_cached_tokens = -1;  // -1: never admitted

  // Valid while it runs. Zero and empty otherwise.
  std::vector<cache::BlockId> blocks;
  std::vector<cache::UnitRange> units;   // by kind after kind 0: those that it still needs (windows.cpp, states.cpp)
  std::int32_t computed = 0;             // tokens whose KV is in the blocks
  std::int32_t planned = 0;              // tokens of the plan that has not advanced yet
  std::int32_t inserted_blocks = 0;      // full computed blocks that were offered to the prefix index
  std::vector<cache::PrefixNode> nodes;  // the nodes of those that are in the index
  bool forced = false;  // its gap is a sampled token and appended tokens after it; every step computes at least one
  std::vector<TokenId> proposed;         // tokens that may follow its last token (proposals.cpp)
  std::int32_t planned_proposals = 0;    // part of `planned`
  std::vector<cache::UnitRange> proposal_units;  // by kind; of kind `state`: that of each proposal, until the next plan

  int plans_without_slot = 0;  // in which it was the first waiting sequence, and its adapter had no slot

  // Used by admission.cpp: the last lookup that did not fit.
  std::int32_t need = 0;        // available blocks that it needed
  std::vector<std::int32_t> units_need;  // available units that it needed, by kind
  std::int64_t activated_at_lookup = 0;  // Impl::activated_blocks at the last lookup

  // Used by loads.cpp. Valid while it runs.
  std::unique_ptr<Load> load;  // its next blocks, which are being read; null: none
  bool counts_loaded = false;  // loaded tokens count in num_cached_tokens

  // Used by states.cpp. Valid while it runs.
  std::int32_t prefill_end = 0;    // the last end of a block before the last token that it had at admission
  std::int32_t branch = 0;         // up to here the index or an offload has its blocks, but not its units; 0: none
  cache::PrefixNode last_snapshot;  // of its decodes

  // Used by children.cpp.
  Seq* parent = nullptr;       // shares its blocks with this sequence; null after a step with it has advanced
  std::vector<Seq*> children;  // sequences whose parent this is
  bool forked = false;         // began with its parent's blocks in the plan that has not advanced yet

  // Used by logits_rows.h.
  // With all_rows: how many of the prompt's first rows of logits the caller has received.
  std::int32_t rows_given = 0;

  std::int32_t num_tokens() const { return static_cast<std::int32_t>(tokens.size()); }
  std::int32_t gap() const { return num_tokens() - computed; }
  bool has_placeholder() const { return tokens.back() < 0; }
  bool is_full() const { return num_tokens() >= max_total_tokens; }
  bool is_decode() const { return gap() == 1 && !is_full(); }
  bool has_computed_prompt() const { return state == State::running && computed >= prompt_tokens; }
};

// The order of sequences: higher priority first, then lower round, then earlier arrival.
struct Before {
  bool operator()(const Seq* a, const Seq* b) const {
    return std::tie(b->priority, a->round, a->arrival) < std::tie(a->priority, b->round, b->arrival);
  }
};

}  // namespace charonia::schedule
