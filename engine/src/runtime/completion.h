// One completion of a request: the state that the engine thread keeps. The scheduler keeps its tokens and blocks.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "charonia/types.h"
#include "ops/step.h"
#include "runtime/mask_threads.h"
#include "runtime/pooling.h"
#include "runtime/proposals.h"
#include "runtime/prompt_logprobs.h"
#include "runtime/thinking.h"
#include "text/text_stream.h"

namespace charonia::runtime {

using Clock = std::chrono::steady_clock;
struct RequestState;

class Completion {
 public:
  // Completion number `index` of a request that has begun. id: its id in the scheduler. max_tokens: already limited by
  // session_len.
  Completion(RequestState& state, int index, std::uint64_t id, const text::TokenTable& table, int max_tokens);

  // Returns how to sample the next token. tokens: the prompt and the output so far; the last token may be a placeholder
  // (see schedule/scheduler.h). row: its number among the rows of this completion in the step, which has several rows
  // with proposals. The spans in it are valid until the next call with the same number, and while `tokens` is valid.
  ops::SampleRow sample_row(std::span<const TokenId> tokens, std::size_t row = 0);

  // Returns the tokens so far and proposed tokens after them. `tokens` begins with the tokens of the previous call. Valid
  // until the next call.
  std::span<const TokenId> with_proposals(std::span<const TokenId> tokens, std::span<const TokenId> proposed);

  // The numbers of entries that a GPU receives for the completion, which has so many tokens so far, and for each of its
  // rows (most_with_entries()).
  std::pair<std::int64_t, std::int64_t> entries(std::size_t num_tokens) const;

  // Whether sample_row() needs the last token, so that it cannot be called with a placeholder.
  bool needs_last_token() const;

  // Returns the mean log probability of the sampled tokens, without those that were forced: -infinity without tokens.
  double mean_logprob() const {
    return num_scored_ == 0 ? -std::numeric_limits<double>::infinity() : scored_logprob_ / num_scored_;
  }

  // Whether the next token is known before it is sampled: the thinking ends.
  bool forces_next() const { return thinking_ && thinking_->forced(); }

  // Adds tokens that were sampled and delivered by another engine (Request::resumed). Returns false if the completion
  // has ended with one of them.
  bool resume(std::span<const TokenId> tokens);

  // Adds a sampled token. Returns the finish reason if the completion ends with it, else none.
  FinishReason accept(const ops::Sampled& sampled, Clock::time_point now);

  // Returns the response that is due now, if any: the first one immediately, later ones at most once per interval.
  std::optional<Result> due(Clock::time_point now, std::chrono::nanoseconds interval);
  // Returns the response that reports how many tokens of the prompt are computed.
  Result progress(int num_computed, Clock::time_point now) const;
  // Returns the last response. error and code are set with FinishReason::error.
  Result last(FinishReason reason, Clock::time_point now, std::string error = {}, ErrorCode code = ErrorCode::internal);

  int num_input() const;
  // Whether the prompt counts as computed with this completion.
  bool is_first() const;
  // Whether log probabilities of the sampled tokens are needed, even if they are not sent.
  bool scores() const;

  RequestState& state;
  const int index;
  const std::uint64_t id;
  const int max_tokens;
  std::optional<Clock::time_point> first_scheduled, first_token, last_token;
  std::optional<MeanRow> mean;  // of a request for an embedding that is a mean
  std::vector<float> pooled;    // moved into the last response
  int num_output = 0;
  int num_cached = 0;
  std::optional<PromptLogprobs> prompt_logprobs;  // of completion 0, if they were requested
  std::shared_ptr<SequenceMask> mask;             // null: all tokens are allowed

  // Speculation.
  std::uint64_t salt = 0;                  // SeqOptions::salt
  std::unique_ptr<ProposalSource> source;  // null: before its first proposals
  Acceptance acceptance;
  int confidence = 0;  // of the last proposals
  bool proposes = true;  // false after logits that a proposal may have broken
  int num_proposed = 0, num_accepted = 0;  // tokens so far

 private:
  struct TokenInfo {
    TokenId id;
    float logprob;
    std::vector<TokenLogprob> top;
  };
  void fill(Result& result, const text::TextChunk& chunk, Clock::time_point now);
  void fill_numbers(Result& result, Clock::time_point now) const;

  const std::uint64_t seed_;
  text::TextStream text_;
  std::optional<Thinking> thinking_;  // unset: it has no budget
  std::vector<TokenInfo> unsent_;  // sampled tokens that are not in a result yet
  double cumulative_logprob_ = 0;
  double scored_logprob_ = 0;  // without forced tokens
  int num_scored_ = 0;
  std::vector<TokenId> history_;  // of with_proposals()
  std::size_t num_known_ = 0;     // tokens in it before the proposals
  std::vector<std::vector<TokenId>> banned_;  // by row of the step
  std::optional<Clock::time_point> last_sent_;
};

}  // namespace charonia::runtime
