// Decides which sequence gets which tokens in the next step. It handles integers only. docs/cache_and_scheduler.md
// introduces it.
//
// Every sequence has num_computed tokens, which catch up with its number of tokens. The gap is the difference. Prefill,
// decode, prefix hit and recomputation differ only in the gap. Under the token budget, a step first takes the sequences
// with a gap of one (decodes), then chunks of the others. When blocks run out, the youngest sequence of the lowest
// priority is preempted: its blocks are released, it keeps its tokens, and it waits at the position of its arrival to
// be recomputed.
//
// The rules ("before" means: higher priority, then the owner's turn (rounds.h), then earlier arrival):
//   Decodes    Every step takes all decodes. Prefill gets the rest of the budget. There are never more decodes than the
//              budget: a sequence becomes a decode only in a step that has all other decodes.
//   Time       (step_time.h) Prefill next to decodes may be limited further, by the estimated time of the step.
//   Forced     If a sequence has tokens that are known before they are computed (append()), every step computes one of
//              them, like a decode. Its other tokens are scheduled with prefill, in the order of "before".
//   Prefill    In the order of "before", running and waiting sequences together. A waiting sequence that does not fit
//              is not overtaken by another waiting sequence, unless its adapter has no slot.
//   Admission  (admission.cpp) A waiting sequence gets the blocks of all its tokens when it is admitted, and one block
//              stays available for every running sequence that will need another one. A single sequence is always
//              admitted. A plan that preempts admits no sequence.
//   Windows    (windows.cpp) Of each kind with a window, a sequence gets the units for its window and the largest step.
//              advance() releases the units before the window, and prefill takes others for its next tokens.
//   States     (states.cpp) Of kind `state`, a sequence has one unit. Prefill ends a part at the positions of
//              snapshots, and at the end of a block a decode leaves one too. The next step then writes another unit.
//   Blocks     A decode may take blocks from sequences after it, never from sequences before it. So the first sequence
//              always progresses. Two sequences that computed the same full block share one copy from then on.
//   Rows       (logits_rows.h) The rows of logits of a step may be limited.
//   Proposals  (proposals.cpp) A decode may compute proposed next tokens with it. They take no block in reserve.
//   Children   (children.cpp) A sequence may begin with the blocks of another sequence that has the same prompt.
//   Memory     (fewer_blocks.cpp) The pool may shrink when memory runs out; then some sequences are impossible.
//   Loads      (loads.cpp) An admitted sequence may find KV of its next blocks in an offload. It computes no token
//              until these blocks are read and copied. Other sequences continue.
//   Adapters   (adapter_slots.h) The running sequences may have as many adapters as the device has slots.
//   Held       A sequence whose next token cannot be sampled yet releases its blocks, so that no other sequence waits.
//
// The next step may be planned while one still runs. advance() counts its tokens as computed, and adds a placeholder
// for the unknown token to every sequence that samples. resolve() replaces the placeholders by the tokens.
//
//     plan(N)  advance(N)  plan(N+1)  resolve(N)  advance(N+1)  plan(N+2)  resolve(N+1) ...
//
// A placeholder is never matched or inserted. A preempted sequence with a placeholder waits until it is resolved. A
// sequence whose placeholder is its last allowed token is *ending*: it is not planned again, but holds its blocks until
// it is removed. While a sequence is ending there are no preemptions: a decode that finds no block waits for the ending
// sequence's blocks.
//
// A step costs time proportional to the running sequences and the admitted tokens, not to the number of waiting
// sequences.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/cache_kind.h"
#include "cache/block_manager.h"
#include "schedule/offload.h"
#include "schedule/step_time.h"

namespace charonia::schedule {

// The most states after proposals in a plan, of all states of a cache: a quarter, because they may evict snapshots.
constexpr std::int32_t most_proposal_states(std::int32_t num_states) { return std::max(num_states / 4, 1); }

using SeqId = std::uint64_t;
using TokenId = std::int32_t;

struct Limits {
  int max_batch_size = 64;  // most running sequences
  int token_budget = 512;   // most tokens in a step
  int max_logits_rows = 0;  // most rows of logits in a step: at least max_batch_size, or 0 for no bound
  // With a kind `state`: the distance of the snapshots of a long prefill, rounded up to whole blocks.
  int snapshot_tokens = 2048;
  std::int64_t load_bytes = 1;  // after so many bytes, no block is copied from an offload for a step with other tokens
  int adapter_slots = 0;        // the most adapters of running sequences; 0: no limit
};

struct SeqOptions {
  int priority = 0;
  std::uint64_t owner = 0;  // waiting sequences of one priority are admitted owner by owner in turn
  std::uint64_t salt = 0;  // separates sequences that must not share blocks although their tokens are equal
  std::uint64_t adapter = 0;  // a number of its adapter; 0: none
  // Every row of the prompt gives logits (prompt log probabilities), so no prefix is looked up. Each row gives logits
  // once; rows that are recomputed after a preemption do not.
  bool all_rows = false;
  // An existing sequence with the same prompt and salt, or 0. The new sequence waits until the parent's prompt is
  // computed, shares the parent's blocks, and computes only the prompt's last token. It gets a copy of the block with
  // that token, if this block holds other tokens of the prompt. It becomes an ordinary sequence if the parent is
  // removed or preempted before, or with all_rows.
  SeqId parent = 0;
  // Like `salt`, for an offload: sequences of one scope have equal KV for equal tokens, also in other engines that use
  // the offload. Empty: no offload.
  std::string scope = {};
};

struct ScheduledSeq {
  SeqId id = 0;
  std::int32_t first_position = 0;  // position of the first token to compute
  std::int32_t num_tokens = 0;      // >= 1
  bool samples = false;             // after this step all its tokens are computed: its last one gives the next token
  bool all_rows = false;            // every row gives logits; such a part ends at the end of the prompt at the latest
  bool forced = false;              // computes appended tokens and the sampled token before them (see append())
  std::int32_t num_proposed = 0;    // the last tokens are proposals (see propose()); each has a row of logits
  // The rows of logits of a step are ordered by part in plan order, then by token.
  std::int32_t num_logits_rows() const { return all_rows ? num_tokens : samples ? 1 + num_proposed : 0; }
};

struct StepPlan {
  std::vector<ScheduledSeq> seqs;
  std::int32_t num_tokens = 0;   // sum, <= token_budget
  std::vector<SeqId> preempted;  // their blocks were released in this plan
  // Blocks to copy before the step, for sequences that begin with their parent's blocks.
  std::vector<BlockCopy> block_copies;
  // Sequences that cannot continue: the pool's memory did not grow as planned, and they need more blocks than the pool
  // now has. Every plan names them until they are removed.
  std::vector<SeqId> impossible;
  bool waits_for_load = false;  // a sequence waits for KV that is being read
  bool waits_for_slot = false;  // the batch has a place for the first waiting sequence, but no slot for its adapter
  bool empty() const { return seqs.empty(); }
};

class Scheduler {
 public:
  // step_time: limits the prefill of steps with decodes; must outlive the scheduler. Null: only the token budget limits
  // it.
  Scheduler(Limits limits, cache::BlockManager& blocks, StepTime* step_time = nullptr);
  ~Scheduler();

  // Null: no offload. It must outlive the scheduler.
  void set_offload(Offload* offload);

  // Queues a sequence. The prompt has >= 1 token. max_total_tokens limits prompt plus sampled tokens; it is more than
  // the prompt and at most capacity_tokens() at construction. Throws Error(internal) if one of these does not hold, if
  // the id exists, or if the parent is unknown or has another prompt or salt.
  void add(SeqId id, std::vector<TokenId> prompt, std::int32_t max_total_tokens, const SeqOptions& options = {});

  // Plans the next step: allocates blocks, matches prefixes, preempts. Empty only if there is no sequence, or if all
  // sequences wait for placeholders or for KV that is being read, or are impossible. If a plan never advances, the next
  // plan discards it, with its block copies. Its step must not have been launched if there is a kind `state`, because a
  // step changes states in place. Throws Error(internal) if a sequence that has all its max_total_tokens was not
  // removed.
  StepPlan plan();

  // Counts the planned tokens as computed, inserts full blocks into the prefix index, and adds placeholders to the
  // sequences with `samples`: -1 - i for the step's i-th row of logits. Proposals do not count as computed yet. Skips
  // sequences that were removed since plan().
  // Throws Error(internal) and changes nothing if the plan does not fit or an earlier placeholder is unresolved.
  void advance(const StepPlan& plan);

  // Replaces placeholders by tokens. `sampled` has one token for each part with `samples`, in plan order, also for
  // sequences that were removed since. Throws Error(internal) and changes nothing if `sampled` does not fit.
  void resolve(const StepPlan& plan, std::span<const TokenId> sampled);

  // Appends a known token that was not sampled, between resolve() and the next plan(). It is computed like a sampled
  // token. Throws Error(internal) if the sequence has a placeholder or all its max_total_tokens.
  void append(SeqId id, TokenId token);

  // Proposes tokens that may follow the last one, between resolve() and the next plan(). If the sequence is a decode,
  // the plan may compute the first of them in the same step. Such a plan must be resolved before the next plan(). Has
  // no effect if the sequence waits, has not computed its prompt, or has a larger gap or a placeholder.
  void propose(SeqId id, std::vector<TokenId> tokens);

  // Adds a token that the resolved step sampled after a proposal. Returns false and drops the remaining proposals if
  // the last token of the sequence differs from its proposal. Otherwise counts the proposal as computed, appends
  // `next`, which was sampled in the row of the proposal, and returns true. Call it between resolve() and the next
  // plan().
  bool accept(SeqId id, TokenId next);

  // The contents of a sequence's blocks may be wrong (its logits were not finite). Removes them, and all descendants of
  // the first one, from the prefix index, so that no later sequence begins with them. Blocks of the first `known_good`
  // tokens remain. Shared blocks leave the index too, because they may be the cause; their current users continue, but
  // index no more blocks.
  void forget_prefix(SeqId id, std::size_t known_good = 0);

  // The token that the resolved step, or the last accept(), gave to a running sequence is not valid. Removes the token and
  // releases the sequence's blocks: it waits at the position of its arrival, and all its tokens are computed again. Call
  // it between resolve() and the next plan().
  void sample_again(SeqId id);

  // Removes a sequence in any state and releases its blocks. Returns false if it is unknown.
  bool remove(SeqId id);

  // For a known sequence (otherwise Error(internal)). Spans stay valid until the next call that is not const.
  std::span<const TokenId> tokens(SeqId id) const;  // prompt and sampled tokens; the last may be a placeholder: < 0
  std::span<const TokenId> proposed(SeqId id) const;  // the proposals of the plan that are not accepted or dropped yet
  std::span<const cache::BlockId> blocks(SeqId id) const;  // for at least the tokens planned so far
  // Its units of each kind after kind 0: for its window and at least the tokens planned so far. Of kind `state`: the
  // next step reads the first one if the sequence has computed tokens, and writes the last one. Empty while it waits.
  std::span<const cache::UnitRange> units(SeqId id) const;
  // The slot of its adapter while it runs; -1: it has none, or there are no slots.
  int adapter_slot(SeqId id) const;
  // The units of each kind `state` for the states after the proposals of the plan. Empty without proposals.
  std::span<const cache::UnitRange> proposal_units(SeqId id) const;
  // The number of proposals whose states a plan can keep. There is no limit without a kind `state`.
  std::int32_t max_proposal_states() const;
  // The nodes of the prefix index for its full computed blocks, in order, for a session to pin. Empty while it waits.
  std::vector<cache::PrefixNode> inserted(SeqId id) const;
  // Where later sequences may begin, in blocks: at the end of its prompt, at a branch, and after its computed blocks.
  // Units of these places are in the index, unless they were evicted. Empty while it waits.
  std::vector<std::int32_t> hit_ends(SeqId id) const;
  // Prompt tokens that came from the prefix index, an offload or the parent after the first admission; -1 before it.
  // Tokens from the parent do not count in prefix_query_tokens and prefix_hit_tokens, tokens from an offload not in
  // prefix_hit_tokens.
  std::int32_t num_cached_tokens(SeqId id) const;

  int num_running() const;                   // sequences that hold blocks
  int num_waiting() const;                   // all other sequences
  std::int64_t waiting_tokens() const;       // prompt tokens of the waiting sequences
  std::int64_t num_preemptions() const;      // since construction
  std::int64_t prefix_query_tokens() const;  // prompt tokens looked up at first admission
  std::int64_t prefix_hit_tokens() const;
  std::int64_t loaded_tokens() const;  // from the offload
  std::int64_t capacity_tokens() const;  // num_blocks * block_len; shrinks when the pool's memory runs out

  // For tests.
  void check_integrity() const;  // throws Error(internal); includes the block manager's
  std::int32_t num_computed(SeqId id) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace charonia::schedule
