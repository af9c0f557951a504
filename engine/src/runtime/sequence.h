// A request in flight: what the engine thread knows of it beside its tokens and blocks, which the scheduler owns.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "charonia/engine.h"
#include "ops/ops.h"
#include "sample/text_stream.h"

namespace charonia::runtime {

using Clock = std::chrono::steady_clock;

class Sequence {
 public:
  // end_ids: the ids that end this sequence. max_tokens: resolved against session_len.
  Sequence(Request request, std::shared_ptr<Engine::Callback> callback, Clock::time_point submitted,
           const sample::TokenTable& table, std::vector<TokenId> end_ids, int max_tokens, std::uint64_t seed);

  // What to sample the next token with. `tokens` are prompt and output so far, the last one perhaps a placeholder (see
  // schedule/scheduler.h). Spans stay valid until the next call, and as long as those tokens do.
  ops::SampleRow sample_row(std::span<const TokenId> tokens);

  // Whether sample_row() must see the last token itself, so that it cannot be called before that is known.
  bool needs_last_token() const;

  // Takes a sampled token. Returns why the sequence ends with it, or none.
  FinishReason accept(const ops::Sampled& sampled, Clock::time_point now);

  // The response that is due now, if any: the first token at once, then at most one per interval.
  std::optional<Result> due(Clock::time_point now, std::chrono::milliseconds interval);
  // The last response. error: with FinishReason::error.
  Result last(FinishReason reason, Clock::time_point now, std::string error = {});

  void scheduled(Clock::time_point now) {
    if (!first_scheduled) first_scheduled = now;
  }

  int num_input() const { return static_cast<int>(request.input_ids.size()); }

  Request request;
  std::shared_ptr<Engine::Callback> callback;
  Clock::time_point submitted;
  std::optional<Clock::time_point> first_scheduled, first_token, last_token;
  int num_output = 0;
  int num_cached = 0;
  int max_tokens = 0;

 private:
  struct TokenInfo {
    TokenId id;
    float logprob;
    std::vector<TokenLogprob> top;
  };
  void fill(Result& result, const sample::Piece& piece, Clock::time_point now);

  std::vector<TokenId> end_ids_;
  std::uint64_t seed_;
  sample::TextStream text_;
  std::vector<TokenInfo> unsent_;  // sampled, not in a result yet
  std::vector<TokenId> banned_;
  std::optional<Clock::time_point> last_sent_;
};

}  // namespace charonia::runtime
