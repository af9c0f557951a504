// One sequence of a request: what the engine thread knows of it beside its tokens and blocks, which the scheduler owns.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "charonia/types.h"
#include "ops/step.h"
#include "runtime/mask_threads.h"
#include "runtime/prompt_logprobs.h"
#include "text/text_stream.h"

namespace charonia::runtime {

using Clock = std::chrono::steady_clock;
struct Group;

class Sequence {
 public:
  // Number `index` of a group that has begun. id: the scheduler's. max_tokens: resolved against session_len.
  Sequence(Group& group, int index, std::uint64_t id, const text::TokenTable& table, int max_tokens);

  // What to sample the next token with. `tokens` are prompt and output so far, the last one perhaps a placeholder (see
  // schedule/scheduler.h). Spans stay valid until the next call, and as long as those tokens do.
  ops::SampleRow sample_row(std::span<const TokenId> tokens);

  // Whether sample_row() must see the last token itself, so that it cannot be called before that is known.
  bool needs_last_token() const;

  // Takes a sampled token. Returns why the sequence ends with it, or none.
  FinishReason accept(const ops::Sampled& sampled, Clock::time_point now);

  // The response that is due now, if any: the first token at once, then at most one per interval.
  std::optional<Result> due(Clock::time_point now, std::chrono::nanoseconds interval);
  // The last response. error, code: with FinishReason::error.
  Result last(FinishReason reason, Clock::time_point now, std::string error = {}, ErrorCode code = ErrorCode::internal);

  int num_input() const;
  // Whether the sampled tokens' log probabilities are needed, though they may not be sent.
  bool scores() const;

  Group& group;
  const int index;
  const std::uint64_t id;
  const int max_tokens;
  std::optional<Clock::time_point> first_scheduled, first_token, last_token;
  int num_output = 0;
  int num_cached = 0;
  std::optional<PromptLogprobs> prompt_logprobs;  // of sequence 0, where they were asked for
  std::shared_ptr<SequenceMask> mask;             // null: every token may follow

 private:
  struct TokenInfo {
    TokenId id;
    float logprob;
    std::vector<TokenLogprob> top;
  };
  void fill(Result& result, const text::TextChunk& chunk, Clock::time_point now);

  const std::uint64_t seed_;
  text::TextStream text_;
  std::vector<TokenInfo> unsent_;  // sampled, not in a result yet
  double cumulative_logprob_ = 0;
  std::vector<TokenId> banned_;
  std::optional<Clock::time_point> last_sent_;
};

}  // namespace charonia::runtime
