// Speculation with a draft model: a small model with the vocabulary of the engine's model, whose next tokens are
// proposals (docs/speculation.md).
//
// It has its own device, weights and KV cache. A sequence is known by its id, and has blocks of this cache while it is
// drafted for. Its tokens only grow, so only tokens without KV are computed: the prompt in chunks, and after a step
// the tokens that were not proposed. Blocks that only hold tokens of the sequence enter a prefix index of their own. If
// there are no free blocks, the sequence that was drafted for least recently loses its blocks, and computes them again
// when it needs them. A sequence that cannot have blocks has no proposals.
//
// speculative_method = mtp uses the MTP layer of the engine's model (model/decoder.h) as the draft model. Its row i
// needs token i + 1 and the model's hidden state of token i. So the engine reports each step of the model (computed()),
// and the hidden states are kept until the layer computes these rows: when proposals are wanted, or when a sequence has
// many of them. The first proposal comes from the last row. For further proposals, a row has the hidden state of the
// layer's own row before it. The KV of such rows is written again when the model's hidden states are known. If hidden
// states are missing (the model had a prefix hit and the layer had none, or another sequence took the blocks), the
// sequence has no proposals from then on. The prefix index knows row i by the tokens 0 .. i + 1. speculative_method =
// eagle3 uses an EAGLE-3 head in the same way. Below, "layer" means both.
//
// The hidden states are in a table on the model's device (model/decoder.h). place() gives a step's rows their rows of
// the table before the step is launched, so that the next step may be launched before this one is collected. A layer
// computes only rows of collected steps, also while the next step runs.
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
    int count = 0;  // number of proposals; Layer: 0: only KV is computed
    // How the engine's model samples the token after these tokens. A draft that samples in the same way, with the same
    // random number, often finds the same token, at every temperature.
    std::function<ops::SampleRow(std::span<const TokenId> tokens)> row = {};
    // Out: at most `count`; fewer if the model gives a token that the engine's model does not have.
    std::vector<TokenId> proposals = {};
    bool sampled = false;  // out: false if its KV is not complete yet, or if it has no blocks
  };

  // Loads the model. vocab_size: of the engine's model. main: its executor, which must outlive this object. Throws the
  // errors of Executor, with the name of the draft model.
  DraftModel(DraftPlan plan, int vocab_size, const Executor* main = nullptr);
  DraftModel(const DraftModel&) = delete;  // the executor refers to plan_

  // Sets the tokens of a sequence: the prompt and the output so far, without placeholders. salt: SeqOptions::salt.
  // Returns the number of tokens that must be computed before the first proposal, at least 1. Empty: the sequence
  // cannot have proposals, because it is too long, has a token that the draft model does not have, or got no blocks in
  // one of the last calls. Layer: also because hidden states are missing.
  std::optional<int> set_tokens(SeqId id, std::span<const TokenId> tokens, std::uint64_t salt);
  // An estimate of what set_tokens() will return for so many tokens, when the last ones are not known yet.
  std::optional<int> missing(SeqId id, std::int32_t tokens);
  // Computes proposals for different sequences. Call set_tokens() for each of them before; it must return a number.
  // max_rows: of the first step, which computes missing tokens; a sequence with more gets the rest in later calls.
  // Reports the time of its steps to the policy. Layer: max_rows is ignored, and set_tokens() may return nothing for
  // sequences without proposals.
  void propose(std::span<Wanted> all, int max_rows, SpeculationPolicy& policy);

  // Whether it is a layer that reads hidden states of the engine's model.
  bool reads_hidden() const { return plan_.method->reads_hidden; }
  // Layer: the model's next step will compute tokens [first, first + rows) of a sequence. Appends the rows of the table
  // for their hidden states (StepInput::hidden_rows); -1 if the sequence does not need them, or if there are none left.
  void place(SeqId id, std::int32_t first, std::int32_t rows, std::vector<std::int32_t>& hidden_rows);
  // Layer: the step of place() is collected, and has computed tokens from `first` on of a sequence. Rejected proposals
  // may be among them. Takes these rows of the table.
  void computed(SeqId id, std::int32_t first, std::span<const std::int32_t> hidden_rows);
  // Layer: the same for a sequence that has ended.
  void drop(std::span<const std::int32_t> hidden_rows);
  // Layer: whether the sequence has so many hidden states that the next call of propose() must compute them.
  bool must_compute(SeqId id) const;
  // Layer: after set_tokens(): whether propose() for this sequence gives the prefix index another block.
  bool fills_block(SeqId id) const;
  void forget(SeqId id);  // the sequence has ended; does nothing if it is unknown

  std::int64_t untouched_bytes() const { return executor_->untouched_bytes(); }
  std::vector<std::string> warnings() const { return executor_->warnings(); }
  std::vector<std::string> kernel_report() const;  // Executor::kernel_report(), with the name of the draft model
  std::string name() const;  // for messages: of the method and the model
  std::int64_t weight_bytes_per_step() const { return executor_->weight_bytes_per_step(); }
  std::int64_t gemms_rejected() const { return executor_->gemms_rejected(); }
  // For tests: throws Error(internal), also if it has more sequences than are alive. in_flight: steps may have rows of
  // the table.
  void check_integrity(std::size_t alive, bool in_flight = true) const;

 private:
  struct Sequence {
    std::vector<TokenId> tokens;   // of the last call of set_tokens(), and the proposals after them
    std::int32_t known = 0;        // the number of tokens that are not proposals
    std::uint64_t salt = 0;        // for the prefix index
    std::int32_t computed = 0;     // the number of its first rows that have KV
    bool lost = false;             // Layer: hidden states of its tokens are missing
    bool began = false;            // computed more than it has found in the prefix index
    bool searched = false;         // the prefix index, at least once
    std::uint64_t used = 0;        // the last call of propose() or computed() for it
    int pause = 0;                 // calls that still return nothing, because it got no blocks
    std::vector<cache::BlockId> blocks;
    std::vector<cache::UnitRange> units;    // by kind
    std::vector<cache::PrefixNode> nodes;   // of its first blocks
    std::size_t num_inserted = 0;           // blocks that were given to the prefix index
    std::int32_t first_hidden = 0;     // the row of the first one of `hidden`
    std::vector<std::int32_t> hidden;  // Layer: where the hidden states of rows are that are not computed yet
  };
  struct Job {
    Wanted* wanted = nullptr;
    Sequence* sequence = nullptr;
    std::uint64_t sample_id = 0;  // SampleRow::sequence: another one in each call, because proposals may be rejected
    std::int32_t size = 0;        // the number of rows that the next step computes
    std::int32_t last_row = -1;   // Layer: the row of its last token in the last step; -1: no step yet
  };

  // Row i of a sequence has token i + 1 in a layer, and token i in a draft model.
  int offset() const { return reads_hidden() ? 1 : 0; }
  bool fits(std::int32_t tokens) const;
  static bool pauses(Sequence& sequence);
  std::uint64_t salt_of(std::span<const TokenId> tokens, std::uint64_t salt) const;
  static std::int32_t hidden_rows(const Sequence& sequence) {
    return static_cast<std::int32_t>(sequence.hidden.size());
  }
  void keep_hidden(Sequence& sequence, std::int32_t from, std::int32_t count);
  // The end of the rows that can be computed now. Layer: whose hidden states are known.
  std::int32_t end_of(const Sequence& sequence) const;
  bool samples(const Job& job) const;  // its next step does
  void find_prefix(Sequence& sequence, std::span<const TokenId> tokens, std::uint64_t salt);
  void release(Sequence& sequence);
  void lose(Sequence& sequence);
  void drop_computed(Sequence& sequence);
  void insert_blocks(Sequence& sequence);
  int blocks_of(std::int32_t tokens) const { return (tokens + blocks_->block_len() - 1) / blocks_->block_len(); }
  bool allocate(Sequence& sequence, std::int32_t tokens);
  void compute(std::span<Job* const> jobs, SpeculationPolicy& policy);

  DraftPlan plan_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<cache::BlockManager> blocks_;
  int vocab_size_ = 0;         // tokens that both models have
  bool lacks_tokens_ = false;  // the engine's model has more
  std::unordered_map<SeqId, Sequence> sequences_;
  std::vector<std::int32_t> free_hidden_;  // rows of the table
  std::size_t num_hidden_ = 0;             // all of them
  std::uint64_t calls_ = 0;  // of propose() and computed()
  std::uint64_t sample_ids_ = 0;
  bool warned_ = false;  // that its logits are not finite
};

}  // namespace charonia::runtime
