#include "charonia/types.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "charonia/error.h"
#include "charonia/metrics.h"
#include "errors.h"

namespace charonia {
namespace {

TEST(SamplingParams, DefaultsAreValid) { EXPECT_NO_THROW(SamplingParams{}.validate(10)); }

TEST(SamplingParams, EveryRangeIsCheckedAndTheFieldNamed) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<std::pair<std::string, std::function<void(SamplingParams&)>>> wrong = {
      {"max_tokens", [](auto& s) { s.max_tokens = 0; }},
      {"min_tokens", [](auto& s) { s.min_tokens = -1; }},
      {"min_tokens", [](auto& s) { s.max_tokens = 3, s.min_tokens = 4; }},
      {"temperature", [](auto& s) { s.temperature = -0.1F; }},
      {"temperature", [&](auto& s) { s.temperature = nan; }},
      {"temperature", [&](auto& s) { s.temperature = inf; }},
      {"top_k", [](auto& s) { s.top_k = -1; }},
      {"top_p", [](auto& s) { s.top_p = 0; }},
      {"top_p", [](auto& s) { s.top_p = 1.01F; }},
      {"top_p", [&](auto& s) { s.top_p = nan; }},
      {"min_p", [](auto& s) { s.min_p = -0.1F; }},
      {"min_p", [&](auto& s) { s.min_p = nan; }},
      {"repetition_penalty", [](auto& s) { s.repetition_penalty = 0; }},
      {"presence_penalty", [](auto& s) { s.presence_penalty = 2.1F; }},
      {"frequency_penalty", [&](auto& s) { s.frequency_penalty = nan; }},
      {"logprobs", [](auto& s) { s.logprobs = 21; }},
      {"stop_words", [](auto& s) { s.stop_words = {""}; }},
      {"stop_words", [](auto& s) { s.stop_words.assign(65, "x"); }},
      {"stop_words", [](auto& s) { s.stop_words = {std::string(1025, 'x')}; }},
      {"bad_words", [](auto& s) { s.bad_words.assign(4097, {1}); }},
      {"bad_words", [](auto& s) { s.bad_words = {std::vector<TokenId>(257, 1)}; }},
      {"end_id", [](auto& s) { s.end_ids = {10}; }},
      {"end_id", [](auto& s) { s.end_ids.assign(257, 1); }},
      {"bad_words", [](auto& s) { s.bad_words = {{}}; }},
      {"bad_words", [](auto& s) { s.bad_words = {{1, -1}}; }},
      {"logit_bias", [](auto& s) { s.logit_bias = {{11, 1.0F}}; }},
      {"logit_bias", [](auto& s) { s.logit_bias.assign(11, {1, 1.0F}); }},
      {"logit_bias", [](auto& s) { s.logit_bias = {{1, 101.0F}}; }},
      {"logit_bias", [&](auto& s) { s.logit_bias = {{1, nan}}; }},
  };
  for (const auto& [field, change] : wrong) {
    SamplingParams sampling;
    change(sampling);
    expect_error(ErrorCode::invalid_argument, {field}, [&] { sampling.validate(10); });
  }
}

// The uploads of every step are limited.
TEST(SamplingParams, BiasesAreLimitedIfEachSequenceHasItsOwn) {
  constexpr int kVocab = 262'144;
  SamplingParams sampling;
  sampling.n = 128;
  sampling.logit_bias.assign(kVocab, {1, 1.0F});
  EXPECT_NO_THROW(sampling.validate(kVocab)) << "all sequences must share one list";
  sampling.logprobs = 0;
  EXPECT_THROW(sampling.validate(kVocab), Error);
  sampling.n = 8;
  EXPECT_NO_THROW(sampling.validate(kVocab));
  sampling.logprobs = -1;
  sampling.best_of = 9;
  EXPECT_THROW(sampling.validate(kVocab), Error);
}

TEST(Metrics, CatalogueIsInTheOrderOfTheEnumeration) {
  int index = 0;
  for (const auto& info : metric_catalogue()) {
    EXPECT_EQ(static_cast<int>(info.metric), index++);
    EXPECT_TRUE(info.name.starts_with("charonia_"));
    EXPECT_EQ(info.kind == MetricKind::histogram, !info.buckets.empty());
    EXPECT_EQ(info.label.empty(), info.label_values.empty());
  }
  EXPECT_EQ(index, static_cast<int>(Metric::token_mask_seconds) + 1);
}

}  // namespace
}  // namespace charonia
