// Which sequence gets which tokens in the next step. Integers only.
//
// Every sequence has num_computed tokens that catch up with its number of tokens; prefill, decode, prefix hit and
// recomputation are the same thing seen at different gaps. A step takes first the sequences whose gap is one (decodes),
// then chunks of the others, by priority and arrival, under the token budget. When blocks run out, the youngest
// sequence of lowest priority gives its blocks back, keeps its tokens and waits at the front of its priority to be
// recomputed.
//
// Rules in detail ("before" means: higher priority, then earlier arrival):
//   Decodes    All of them, in every step. There are never more than the budget allows, since a sequence becomes one
//              only by getting tokens in a step in which all others got theirs. Prefill waits while they fill the
//              budget.
//   Prefill    In the order of "before", among running and waiting sequences alike. Waiting ones are admitted in that
//              order only: one that does not fit yet is not overtaken.
//   Admission  A sequence gets the blocks of all its tokens when it is admitted, so that only decoding takes blocks
//              later; and only if one block stays available for every running sequence that will need another one.
//              What runs alone is always admitted. A plan that preempts admits nobody.
//   Blocks     A sequence takes blocks from those after it, never from those before. So the first one always goes
//              ahead.
//              Two sequences that computed the same full block share one of them from then on.
//   Rows       Steps may be bounded in their rows of logits. Each decode has one, which never is too many; the others
//              share what is left, in the order of "before": who finds none computes all tokens but the last.
//   Children   A sequence that is to begin with its parent's blocks waits beside the queue, so that it holds up nobody,
//              until its parent's prompt is computed. Then it has the place in the queue that its arrival gives it.
//
// The next step may be planned while one still runs: advance() counts its tokens as computed and gives every sequence
// that samples a placeholder for the token that nobody knows yet; resolve() puts the tokens in their place.
//
//     plan(N)  advance(N)  plan(N+1)  resolve(N)  advance(N+1)  plan(N+2)  resolve(N+1) ...
//
// Nothing unknown is ever matched or inserted, and what is preempted with a placeholder waits until it is resolved. A
// sequence whose placeholder is its last token is not planned again, but holds its blocks until it is removed. Where
// there is one, nobody is preempted: who finds no block waits for those.
//
// A step costs time in proportion to the running sequences and the tokens that are admitted, however many wait.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cache/block_manager.h"

namespace charonia::schedule {

using SeqId = std::uint64_t;
using TokenId = std::int32_t;

struct Limits {
  int max_batch_size = 64;  // most running sequences
  int token_budget = 512;   // most tokens in a step
  int max_logits_rows = 0;  // most rows of logits in a step, at least max_batch_size; 0: no bound
};

struct SeqOptions {
  int priority = 0;
  std::uint64_t salt = 0;  // keeps apart what must not share blocks though the tokens are equal
  // Every row of the prompt gives logits (prompt log probabilities): no prefix is looked up, since all must be
  // computed. Each row is asked for once: what is computed anew after a preemption gives no logits a second time.
  bool all_rows = false;
  // A sequence with the same prompt and salt that was added before and still is there: this one waits until the prompt
  // of that one is computed, then shares its blocks, of which the one that is not full is copied, and computes the
  // prompt's last token only. 0: none. When the parent is removed or preempted before, and with all_rows, this is a
  // sequence like any other.
  SeqId parent = 0;
};

struct ScheduledSeq {
  SeqId id = 0;
  std::int32_t first_position = 0;  // position of the first token to compute
  std::int32_t num_tokens = 0;      // >= 1
  bool samples = false;             // after this step everything is computed: the last row gives the next token
  bool all_rows = false;            // every row gives logits; such a part does not go beyond the end of the prompt
  // The step's rows of logits: this part's, in the order of its tokens, after those of the parts before it.
  std::int32_t num_logits_rows() const { return all_rows ? num_tokens : samples ? 1 : 0; }
};

struct StepPlan {
  std::vector<ScheduledSeq> seqs;
  std::int32_t num_tokens = 0;   // sum, <= token_budget
  std::vector<SeqId> preempted;  // gave their blocks back in this plan
  // Blocks to copy (from, to) before the step: of sequences that begin with their parent's blocks.
  std::vector<std::pair<cache::BlockId, cache::BlockId>> block_copies;
  // Cannot go on, since there are fewer blocks now than when they were added: the pool's memory did not suffice. They
  // are named in every plan until they are removed.
  std::vector<SeqId> impossible;
  bool empty() const { return seqs.empty(); }
};

class Scheduler {
 public:
  Scheduler(Limits limits, cache::BlockManager& blocks);
  ~Scheduler();

  // Queues a sequence. prompt has >= 1 token, max_total_tokens bounds prompt plus what will be sampled, and must be at
  // most what capacity_tokens() was at construction (the caller checks). Throws Error(internal) on a known id, a parent
  // that is not known or has another prompt, and where these do not hold.
  void add(SeqId id, std::vector<TokenId> prompt, std::int32_t max_total_tokens, const SeqOptions& options = {});

  // Plans the next step; allocates blocks, matches prefixes, preempts. Empty only when there is no sequence at all,
  // when those that are there wait for placeholders to be resolved, or when they are impossible. A plan that never
  // advances (the step failed) is forgotten by the next one, and so are its block copies: sequences that were to begin
  // with them begin anew. Throws Error(internal) when a sequence that has all its max_total_tokens was not removed.
  StepPlan plan();

  // The planned tokens count as computed, full blocks are inserted into the prefix index, and the sequences with
  // `samples` get their placeholders: -1 - i, where i counts the step's rows of logits. Sequences removed since
  // plan() are skipped. Throws Error(internal), changing nothing, when the plan does not fit or an earlier placeholder
  // is still there.
  void advance(const StepPlan& plan);

  // `sampled` has one token for each part with `samples`, in plan order; each takes the place of its placeholder.
  // Sequences removed since are skipped (their token still has its place in `sampled`). Throws Error(internal),
  // changing nothing, when `sampled` does not fit.
  void resolve(const StepPlan& plan, std::span<const TokenId> sampled);

  // What the blocks hold is in doubt, since a step failed that had advanced: every running sequence gives its blocks
  // back and is computed anew, and the prefix index is emptied. Sequences of that step, which may have placeholders and
  // whose rows of logits count as given, must have been removed.
  void restart();

  // Forgets a sequence in whatever state it is and releases its blocks. False if it is not known.
  bool remove(SeqId id);

  // Of a known sequence (otherwise Error(internal)). Spans stay valid until the next call that is not const.
  std::span<const TokenId> tokens(SeqId id) const;  // prompt and sampled so far; the last may be a placeholder: < 0
  std::span<const cache::BlockId> blocks(SeqId id) const;  // covers at least the tokens planned so far
  std::int32_t num_computed(SeqId id) const;
  // The nodes of the prefix index that hold the full blocks computed so far, from the first on; for a session to pin.
  // None while it waits.
  std::vector<cache::PrefixNode> inserted(SeqId id) const;
  // Prompt tokens that came from the prefix index, or from the parent, when the sequence was first scheduled; -1 before
  // that. The parent's do not count in prefix_query_tokens and prefix_hit_tokens.
  std::int32_t num_cached_tokens(SeqId id) const;

  int num_running() const;                   // hold blocks
  int num_waiting() const;                   // all others
  std::int64_t waiting_tokens() const;       // prompt tokens of the waiting sequences
  std::int64_t num_preemptions() const;      // since construction
  std::int64_t prefix_query_tokens() const;  // prompt tokens looked up, and found, at first scheduling
  std::int64_t prefix_hit_tokens() const;
  std::int64_t capacity_tokens() const;  // num_blocks * block_len; less once the pool's memory did not suffice

  void check_integrity() const;  // throws Error(internal); includes the block manager's

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace charonia::schedule
