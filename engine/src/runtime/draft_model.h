// Speculation with a draft model: a small model with the vocabulary of the engine's model, whose next tokens are
// proposals (docs/speculation.md).
//
// It has its own device, weights and KV cache. A sequence is known by its id, and has blocks of this cache while it is
// drafted for. Its tokens only grow, so only tokens without KV are computed: the prompt in chunks, and after a step
// the tokens that were not proposed. Blocks that only hold tokens of the sequence enter a prefix index of their own. If
// there are no free blocks, the sequence that was drafted for least recently loses its blocks, and computes them again
// when it needs them. A sequence that cannot have blocks has no proposals.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "cache/block_manager.h"
#include "ops/step.h"
#include "runtime/executor.h"
#include "runtime/memory_plan.h"
#include "runtime/proposals.h"
#include "text/token_table.h"

namespace charonia::runtime {

// Throws Error(invalid_argument), with the name of the draft model and the first token that differs. table: of the
// engine's model. Padding after the last token of a tokenizer does not count.
void check_vocabulary(const DraftPlan& plan, const text::TokenTable& table);

class DraftModel {
 public:
  using SeqId = std::uint64_t;

  struct Wanted {
    SeqId id = 0;
    int count = 0;  // number of proposals
    // How the engine's model samples the token after these tokens. A draft that samples in the same way, with the same
    // random number, often finds the same token, at every temperature.
    std::function<ops::SampleRow(std::span<const TokenId> tokens)> row;
    // Out: at most `count`; fewer if the model gives a token that the engine's model does not have.
    std::vector<TokenId> proposals = {};
    bool sampled = false;  // out: false if its KV is not complete yet, or if it has no blocks
  };

  // Loads the model. vocab_size: of the engine's model. Throws the errors of Executor, with the name of the draft
  // model.
  DraftModel(DraftPlan plan, int vocab_size);
  DraftModel(const DraftModel&) = delete;  // the executor refers to plan_

  // Sets the tokens of a sequence: the prompt and the output so far, without placeholders. salt: SeqOptions::salt.
  // Returns the number of tokens that must be computed before the first proposal, at least 1. Empty: the sequence
  // cannot have proposals, because it is too long, has a token that the draft model does not have, or got no blocks in
  // one of the last calls.
  std::optional<int> missing(SeqId id, std::span<const TokenId> tokens, std::uint64_t salt);
  // Computes proposals for different sequences. Call missing() for each of them before; it must return a number.
  // max_rows: of the first step, which computes missing tokens; a sequence with more gets the rest in later calls.
  // Reports the time of its steps to the policy.
  void propose(std::span<Wanted> all, int max_rows, SpeculationPolicy& policy);
  void forget(SeqId id);  // the sequence has ended; does nothing if it is unknown

  std::int64_t untouched_bytes() const { return executor_->untouched_bytes(); }
  // For tests: throws Error(internal), also if it has more sequences than are alive.
  void check_integrity(std::size_t alive) const;

 private:
  struct Sequence {
    std::vector<TokenId> tokens;   // of the last call of missing(), and the proposals after them
    std::int32_t known = 0;        // the number of tokens that are not proposals
    std::int32_t computed = 0;     // the number of its first tokens that have KV
    bool began = false;            // computed more than it has found in the prefix index
    std::uint64_t used = 0;        // the last call of propose() for it
    int pause = 0;                 // calls of missing() that still return nothing, because it got no blocks
    std::vector<cache::BlockId> blocks;
    std::vector<cache::UnitRange> units;    // by kind
    std::vector<cache::PrefixNode> nodes;   // of its first blocks
    std::size_t num_inserted = 0;           // blocks that were given to the prefix index
  };
  struct Job {
    Wanted* wanted = nullptr;
    Sequence* sequence = nullptr;
    std::int32_t size = 0;  // the number of tokens that the next step computes
    bool samples() const { return sequence->computed + size == std::ssize(sequence->tokens); }
  };

  void release(Sequence& sequence);
  void insert_blocks(Sequence& sequence, std::uint64_t salt);
  int blocks_of(std::int32_t tokens) const { return (tokens + blocks_->block_len() - 1) / blocks_->block_len(); }
  bool allocate(Sequence& sequence, std::int32_t tokens);
  void compute(std::span<Job* const> jobs, SpeculationPolicy& policy);

  DraftPlan plan_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<cache::BlockManager> blocks_;
  int vocab_size_ = 0;         // tokens that both models have
  bool lacks_tokens_ = false;  // the engine's model has more
  std::unordered_map<SeqId, Sequence> sequences_;
  std::uint64_t calls_ = 0;  // of propose()
};

}  // namespace charonia::runtime
