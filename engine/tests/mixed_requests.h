// Requests with all kinds of parameters, and everything that their responses must reproduce.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine_support.h"

namespace charonia::testing {

// Tokens that must be special in the model of mixed_requests(). They begin and end the header of a message of thinking,
// and end its text.
inline const std::vector<int> kHeaderMarks = {36, 37, 38};

// Requests of every kind; many have common prefixes.
inline std::vector<Request> mixed_requests(int count) {
  std::mt19937 random(23);
  const auto below = [&](int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); };
  std::vector<Request> out;
  for (int i = 0; i < count; ++i) {
    std::vector<TokenId> prompt;
    for (int t = 0; t < 8 * below(3); ++t) prompt.push_back(1 + t);
    for (int t = below(30); t >= 0; --t) prompt.push_back(below(40));
    auto one = request(prompt, 1 + below(40));
    auto& sampling = one.sampling;
    sampling.ignore_eos = below(3) == 0;
    sampling.seed = static_cast<std::uint64_t>(i);
    sampling.temperature = below(3) == 0 ? 0.0F : 0.9F;
    if (below(3) == 0) sampling.top_k = 1 + below(10);
    if (below(3) == 0) sampling.top_p = 0.8F;
    if (below(4) == 0) sampling.min_p = 0.05F;
    if (below(3) == 0) sampling.repetition_penalty = 1.2F;
    if (below(3) == 0) sampling.presence_penalty = 0.6F;
    if (below(3) == 0) sampling.frequency_penalty = 0.4F;
    if (below(4) == 0) sampling.min_tokens = std::min(below(20), *sampling.max_tokens);
    if (below(4) == 0) sampling.logit_bias = {{below(40), 3.0F}, {below(40), -4.0F}};
    if (below(5) == 0) sampling.bad_words = {{below(40)}};
    if (below(5) == 0) sampling.bad_words.push_back({below(40), below(40)});
    if (below(5) == 0) sampling.stop_words = {std::string(1, static_cast<char>('a' + below(26)))};
    if (below(4) == 0) sampling.end_ids = {below(40), below(40)};
    if (below(3) == 0) sampling.logprobs = below(4);
    one.priority = below(3) - 1;
    one.stream = below(2) == 0;
    if (below(6) == 0) sampling.n = 2 + below(3);
    if (below(6) == 0 && !one.stream) sampling.best_of = sampling.n + below(3);
    if (below(5) == 0) sampling.prompt_logprobs = below(3);
    one.prompt_logits = sampling.prompt_logprobs >= 0 && one.stream;
    if (below(8) == 0) {
      const auto modulus = 2 + below(3);
      one.mask = std::make_shared<MaskOf>(40, [modulus](TokenId token, std::span<const TokenId> output) {
        return (token + static_cast<TokenId>(output.size())) % modulus != 1;
      });
    }
    if (below(4) == 0) {
      sampling.thinking_budget = below(12);
      sampling.thinking_end_ids = {below(40), below(40)};
      if (below(2) == 0) sampling.thinking_begin_ids = {below(40)};
      sampling.thinking_begun = below(2) == 0;
      if (i % 2 == 0) {  // messages, which the bias makes likely
        const TokenId word = 1 + i % 20;
        sampling.thinking_begin_ids = {kHeaderMarks[0], word, kHeaderMarks[1]};
        sampling.thinking_end_ids.insert(sampling.thinking_end_ids.begin(), kHeaderMarks[2]);
        for (const TokenId id : {kHeaderMarks[0], word, kHeaderMarks[1], kHeaderMarks[2]}) {
          sampling.logit_bias.emplace_back(id, 20.0F);
        }
      } else {  // calls, which the bias makes likely, and blocks after them
        const TokenId call = 1 + i % 20, end = 21 + i % 19;
        sampling.thinking_call_ids = {{call}, {end}};
        for (const TokenId id : {call, end}) sampling.logit_bias.emplace_back(id, 9.0F);
        for (const TokenId id : sampling.thinking_begin_ids) sampling.logit_bias.emplace_back(id, 9.0F);
      }
    }
    out.push_back(std::move(one));
  }
  return out;
}

struct Outcome {
  std::vector<std::vector<TokenId>> tokens;  // by sequence
  std::vector<std::vector<float>> logprobs;
  std::vector<float> prompt_logprobs;
  std::vector<std::vector<float>> prompt_logits;
  std::vector<std::string> texts;
  std::vector<FinishReason> reasons;
  std::string errors;
  bool operator==(const Outcome&) const = default;
};

inline Outcome outcome(Collector& collector, const Request& request) {
  Outcome out;
  for (int i = 0; i < request.sampling.n; ++i) {
    out.tokens.push_back(collector.tokens(i));
    out.logprobs.push_back(collector.logprobs(i));
    out.texts.push_back(collector.text(i));
    out.reasons.push_back(collector.last(i).finish_reason);
    if (!collector.last(i).error.empty()) out.errors += collector.last(i).error + "\n";
  }
  out.prompt_logprobs = collector.prompt_logprobs();
  for (const auto& result : collector.wait()) {
    out.prompt_logits.insert(out.prompt_logits.end(), result.prompt_logits.begin(), result.prompt_logits.end());
  }
  EXPECT_EQ(out.prompt_logits.size(), request.prompt_logits ? request.input_ids.size() - 1 : 0U);
  return out;
}

// While other requests run.
inline std::vector<Outcome> outcomes_beside(Engine& engine, const std::vector<Request>& requests) {
  std::deque<Collector> collectors;
  for (const auto& one : requests) collectors.emplace_back(engine, one);
  std::vector<Outcome> out;
  for (std::size_t i = 0; i < requests.size(); ++i) out.push_back(outcome(collectors[i], requests[i]));
  return out;
}

inline std::vector<Outcome> outcomes(Engine& engine, const std::vector<Request>& requests) {
  auto out = outcomes_beside(engine, requests);
  engine.check_integrity();
  EXPECT_EQ(engine.stats().blocks_active, 0);
  return out;
}

}  // namespace charonia::testing
