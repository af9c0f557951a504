// Which sequence gets which tokens in the next step. Integers only. docs/cache_and_scheduler.md introduces it.
//
// Every sequence has num_computed tokens, which catch up with its number of tokens. Prefill, decode, prefix hit and
// recomputation are the same thing seen at different gaps. A step first takes the sequences whose gap is one (decodes),
// then chunks of the others, under the token budget. When blocks run out, the youngest sequence of lowest priority is
// preempted: it gives its blocks back, keeps its tokens, and waits at its arrival's place to be recomputed.
//
// The rules ("before" means: higher priority, then earlier arrival):
//   Decodes    All of them, in every step; prefill gets what they leave of the budget. There are never more decodes
//              than the budget: a sequence becomes one only in a step in which all other decodes had their place.
//   Time       (step_time.h) Prefill beside decodes may be bounded further, by the time that the step will take.
//   Forced     Of a sequence with tokens that are known before they are computed (append()) one is computed in every
//              step, like a decode. Its other tokens have their turn with prefill, in the order of "before".
//   Prefill    In the order of "before", running and waiting sequences alike. A waiting sequence that does not fit is
//              not overtaken by another waiting one.
//   Admission  (admission.cpp) A waiting sequence gets the blocks of all its tokens when it is admitted, and one block
//              stays available for every running sequence that will need another one. A sequence that is alone is
//              always admitted. A plan that preempts admits nobody.
//   Blocks     A decode may take blocks from sequences after it, never from those before. So the first one always
//              progresses. Two sequences that computed the same full block share one of them from then on.
//   Rows       (logits_rows.h) The rows of logits of a step may be bounded.
//   Children   (children.cpp) A sequence may begin with the blocks of another one that has the same prompt.
//   Memory     (fewer_blocks.cpp) The pool may turn out to be smaller than it was; then some sequences are impossible.
//   Held       A sequence whose next token cannot be sampled yet gives its blocks back, so that nobody waits for it.
//
// The next step may be planned while one still runs. advance() counts its tokens as computed, and gives every sequence
// that samples a placeholder for the token that is not known yet. resolve() puts the tokens in their place.
//
//     plan(N)  advance(N)  plan(N+1)  resolve(N)  advance(N+1)  plan(N+2)  resolve(N+1) ...
//
// A placeholder is never matched or inserted. A preempted sequence with a placeholder waits until it is resolved. A
// sequence whose placeholder is the last token it may have is *ending*: it is not planned again, but holds its blocks
// until it is removed. While one is ending, nobody is preempted: a decode that finds no block waits for those.
//
// A step costs time in proportion to the running sequences and the admitted tokens, not to the number that wait.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cache/block_manager.h"
#include "schedule/step_time.h"

namespace charonia::schedule {

using SeqId = std::uint64_t;
using TokenId = std::int32_t;

struct Limits {
  int max_batch_size = 64;  // most running sequences
  int token_budget = 512;   // most tokens in a step
  int max_logits_rows = 0;  // most rows of logits in a step: at least max_batch_size, or 0 for no bound
};

struct SeqOptions {
  int priority = 0;
  std::uint64_t salt = 0;  // separates sequences that must not share blocks although their tokens are equal
  // Every row of the prompt gives logits (prompt log probabilities), so no prefix is looked up. Each row gives them
  // once: rows that are recomputed after a preemption do not.
  bool all_rows = false;
  // A sequence with the same prompt and salt that was added before and is still there, or 0. This one waits until the
  // parent's prompt is computed, shares its blocks (of the one with the prompt's last token it has a copy, where that
  // holds other tokens of the prompt too), and computes that last token only. It is a sequence like any other when the
  // parent is removed or preempted before, and with all_rows.
  SeqId parent = 0;
};

struct ScheduledSeq {
  SeqId id = 0;
  std::int32_t first_position = 0;  // position of the first token to compute
  std::int32_t num_tokens = 0;      // >= 1
  bool samples = false;             // all its tokens are computed after this step: the last row gives the next one
  bool all_rows = false;            // every row gives logits; such a part does not go beyond the end of the prompt
  bool forced = false;              // tokens that were appended, and the sampled one before them (see append())
  // A step's rows of logits are those of its parts in plan order, each in the order of its tokens.
  std::int32_t num_logits_rows() const { return all_rows ? num_tokens : samples ? 1 : 0; }
};

struct StepPlan {
  std::vector<ScheduledSeq> seqs;
  std::int32_t num_tokens = 0;   // sum, <= token_budget
  std::vector<SeqId> preempted;  // gave their blocks back in this plan
  // Blocks to copy (from, to) before the step, for sequences that begin with their parent's blocks.
  std::vector<std::pair<cache::BlockId, cache::BlockId>> block_copies;
  // Sequences that cannot go on: the pool's memory did not suffice, and they need more blocks than there are now. They
  // are named in every plan until they are removed.
  std::vector<SeqId> impossible;
  bool empty() const { return seqs.empty(); }
};

// In place of a sampled token: there was none. The sequence is held, and is to be computed again.
inline constexpr TokenId kNotSampled = -1;

class Scheduler {
 public:
  // step_time: bounds the prefill of steps with decodes; it outlives the scheduler. Null: the token budget alone does.
  Scheduler(Limits limits, cache::BlockManager& blocks, StepTime* step_time = nullptr);
  ~Scheduler();

  // Queues a sequence. The prompt has >= 1 token. max_total_tokens bounds prompt plus sampled tokens; it is more than
  // the prompt and at most what capacity_tokens() was at construction. Throws Error(internal) when these do not hold,
  // on a known id, and on a parent that is not known or has another prompt or salt.
  void add(SeqId id, std::vector<TokenId> prompt, std::int32_t max_total_tokens, const SeqOptions& options = {});

  // Plans the next step: allocates blocks, matches prefixes, preempts. Empty only when there is no sequence, or when
  // all of them wait for placeholders to be resolved, are held or are impossible. A plan that never advances (the step
  // failed) is forgotten by the next one, with its block copies. Throws Error(internal) when a sequence that has all
  // its max_total_tokens was not removed.
  StepPlan plan();

  // The planned tokens count as computed, full blocks are inserted into the prefix index, and the sequences with
  // `samples` get their placeholders: -1 - i for the step's i-th row of logits. Sequences removed since plan() are
  // skipped. Throws Error(internal), changing nothing, when the plan does not fit or an earlier placeholder is still
  // there.
  void advance(const StepPlan& plan);

  // `sampled` has one token for each part with `samples`, in plan order, also for sequences that were removed since.
  // Each takes the place of its placeholder; with kNotSampled the placeholder goes, and the sequence is held. No later
  // step may have been planned with it then. Throws Error(internal), changing nothing, when `sampled` does not fit.
  void resolve(const StepPlan& plan, std::span<const TokenId> sampled);

  // One more token of a sequence whose tokens are all known, between resolve() and the next plan(): it was not sampled,
  // and is computed like one that was. Throws Error(internal) where the sequence has all its max_total_tokens.
  void append(SeqId id, TokenId token);

  // A sequence whose tokens are all known is not planned from hold() until resume(). It gives its blocks back, keeps its
  // tokens, and is computed anew like one that was preempted. resume() does nothing to one that is not held.
  void hold(SeqId id);
  void resume(SeqId id);

  // What the blocks of a known sequence hold is suspect (it gave logits that are not finite): they leave the prefix
  // index, with all descendants of the first, so that no later sequence begins with them. Those that it shares leave it
  // too, as they may be the cause; who uses them now goes on, and indexes nothing more.
  void forget_prefix(SeqId id);

  // Forgets a sequence, in any state, and releases its blocks. False if it is not known.
  bool remove(SeqId id);

  // Of a known sequence (otherwise Error(internal)). Spans stay valid until the next call that is not const.
  std::span<const TokenId> tokens(SeqId id) const;  // prompt and sampled so far; the last may be a placeholder: < 0
  std::span<const cache::BlockId> blocks(SeqId id) const;  // covers at least the tokens planned so far
  // The nodes of the prefix index for its full computed blocks, in their order, for a session to pin. Empty while it
  // waits.
  std::vector<cache::PrefixNode> inserted(SeqId id) const;
  // Prompt tokens that came from the prefix index, or from the parent, when the sequence was first admitted; -1 before.
  // Those of the parent do not count in prefix_query_tokens and prefix_hit_tokens.
  std::int32_t num_cached_tokens(SeqId id) const;

  int num_running() const;                   // hold blocks
  int num_waiting() const;                   // all others
  std::int64_t waiting_tokens() const;       // prompt tokens of the waiting sequences
  std::int64_t num_preemptions() const;      // since construction
  std::int64_t prefix_query_tokens() const;  // prompt tokens looked up, and found, at first admission
  std::int64_t prefix_hit_tokens() const;
  std::int64_t capacity_tokens() const;  // num_blocks * block_len: less once the pool's memory did not suffice

  // For tests.
  void check_integrity() const;  // throws Error(internal); includes the block manager's
  std::int32_t num_computed(SeqId id) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace charonia::schedule
