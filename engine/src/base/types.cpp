#include "charonia/types.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia {

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::none: return "";
    case FinishReason::stop: return "stop";
    case FinishReason::length: return "length";
    case FinishReason::cancelled: return "cancelled";
    case FinishReason::error: return "error";
  }
  return "";
}

namespace {

constexpr std::array<std::string_view, 6> kGuideTypes = {"json",         "json_schema",    "regex",
                                                         "ebnf_grammar", "structural_tag", "choice"};

}  // namespace

std::string_view to_string(GuideType type) { return kGuideTypes.at(static_cast<std::size_t>(type)); }

GuideType guide_type(std::string_view name) {
  const auto found = std::ranges::find(kGuideTypes, name);
  if (found == kGuideTypes.end()) {
    std::string names;
    for (const auto one : kGuideTypes) names += cat(names.empty() ? "" : ", ", one);
    throw Error(ErrorCode::invalid_argument,
                cat("guided_decoding_guide_type = '", name, "' is unknown: it is one of ", names));
  }
  return static_cast<GuideType>(found - kGuideTypes.begin());
}

namespace {

// `range`: the valid range, in pieces. They are joined only for the error, because lists can be long.
template <class T, class... Range>
void require(bool holds, std::string_view field, const T& value, const Range&... range) {
  if (!holds) {
    throw Error(ErrorCode::invalid_argument, cat(field, " = ", value, " is out of range: it must be ", range...));
  }
}

constexpr std::size_t kMaxStopWordBytes = 1024;
constexpr std::size_t kMaxBadWordTokens = 256;  // each word is compared at every step
// Limits the total number of biases of one request. Each step uploads them once, or once per sequence if log
// probabilities or best_of are requested.
constexpr std::size_t kMaxBiases = std::size_t{2} << 20;

}  // namespace

void SamplingParams::validate(int vocab_size) const {
  const auto token = [&](std::string_view field, TokenId id) {
    require(id >= 0 && id < vocab_size, field, id, "a token id in [0, ", vocab_size, ")");
  };
#include "base/generated/sampling_checks.inc"
  if (max_tokens && min_tokens > *max_tokens) {
    require(false, "min_tokens", min_tokens, "at most max_tokens (", *max_tokens, ")");
  }
  require(best_of == 0 || (best_of >= n && best_of <= SamplingMaximum::best_of), "best_of", best_of,
          "0, or in [n, ", SamplingMaximum::best_of, "] with n = ", n);
  require(stop_words.size() <= kMaxStopWords, "the number of stop_words", stop_words.size(), "at most ",
          kMaxStopWords);
  for (const auto& word : stop_words) {
    require(!word.empty(), "stop_words", "''", "without empty words");
    require(word.size() <= kMaxStopWordBytes, "the length of a word of stop_words", word.size(),
            "at most ", kMaxStopWordBytes, " bytes");
  }
  require(end_ids.size() <= kMaxEndIds, "the number of end_id", end_ids.size(), "at most ", kMaxEndIds);
  for (const auto id : end_ids) token("end_id", id);
  for (const auto& [name, ids] : {std::pair{"thinking_begin_ids", &thinking_begin_ids},
                                  std::pair{"thinking_end_ids", &thinking_end_ids}}) {
    require(ids->size() <= kMaxThinkingMark, cat("the number of ", name), ids->size(), "at most ", kMaxThinkingMark);
    for (const auto id : *ids) token(name, id);
  }
  const auto& calls = thinking_call_ids;
  require(calls.empty() || calls.size() == 2 || calls.size() == kMaxThinkingCallMarks,
          "the number of lists of thinking_call_ids", calls.size(), "0, 2 or ", kMaxThinkingCallMarks);
  for (const auto& ids : calls) {
    require(!ids.empty(), "thinking_call_ids", "[]", "without empty lists");
    require(ids.size() <= kMaxThinkingMark, "the length of a list of thinking_call_ids", ids.size(), "at most ",
            kMaxThinkingMark, " tokens");
    for (const auto id : ids) token("thinking_call_ids", id);
  }
  if (thinking_budget && thinking_end_ids.empty()) {
    throw Error(ErrorCode::invalid_argument,
                cat("thinking_budget = ", *thinking_budget, ": the response has no thinking that the engine can end. A ",
                    "budget needs `messages`, no begun message, and a chat template in which a mark ends the thinking. ",
                    "Leave thinking_budget out; in Python, set thinking_end_ids"));
  }
  require(bad_words.size() <= kMaxBadWords, "the number of bad_words", bad_words.size(), "at most ", kMaxBadWords);
  for (const auto& word : bad_words) {
    require(!word.empty(), "bad_words", "[]", "without empty words");
    require(word.size() <= kMaxBadWordTokens, "the length of a word of bad_words", word.size(),
            "at most ", kMaxBadWordTokens, " tokens");
    for (const auto id : word) token("bad_words", id);
  }
  require(logit_bias.size() <= static_cast<std::size_t>(vocab_size), "the number of logit_bias", logit_bias.size(),
          "at most the vocabulary's ", vocab_size);
  const auto lists = static_cast<std::size_t>(logprobs >= 0 || best_of > 0 ? std::max(n, best_of) : 1);
  require(logit_bias.size() * lists <= kMaxBiases, "the number of logit_bias", logit_bias.size(), "at most ",
          kMaxBiases / lists, " for ", lists, " sequences with log probabilities or best_of; send fewer of either");
  for (const auto& [id, bias] : logit_bias) token("logit_bias", id);
}

}  // namespace charonia
