#include "charonia/types.h"

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

template <class T>
void require(bool holds, std::string_view field, T value, std::string_view range) {
  if (!holds) throw Error(ErrorCode::invalid_argument, cat(field, " = ", value, " is out of range: it must be ", range));
}

constexpr int kMaxStopWords = 64;
constexpr std::size_t kMaxStopWordBytes = 1024;
constexpr int kMaxLogprobs = 20;
constexpr int kMaxSequences = 128;

}  // namespace

void SamplingParams::validate(int vocab_size) const {
  const auto token = [&](std::string_view field, TokenId id) {
    require(id >= 0 && id < vocab_size, field, id, cat("a token id in [0, ", vocab_size, ")"));
  };
  if (max_tokens) require(*max_tokens >= 1, "max_tokens", *max_tokens, ">= 1");
  require(min_tokens >= 0, "min_tokens", min_tokens, ">= 0");
  if (max_tokens && min_tokens > *max_tokens) {
    require(false, "min_tokens", min_tokens, cat("at most max_tokens (", *max_tokens, ")"));
  }
  require(std::isfinite(temperature) && temperature >= 0, "temperature", temperature, ">= 0");
  require(top_k >= 0, "top_k", top_k, ">= 0 (0: all tokens)");
  require(top_p > 0 && top_p <= 1, "top_p", top_p, "in (0, 1]");
  require(min_p >= 0 && min_p <= 1, "min_p", min_p, "in [0, 1]");
  require(repetition_penalty >= 0.01F && repetition_penalty <= 100, "repetition_penalty", repetition_penalty,
          "in [0.01, 100]");
  require(presence_penalty >= -2 && presence_penalty <= 2, "presence_penalty", presence_penalty, "in [-2, 2]");
  require(frequency_penalty >= -2 && frequency_penalty <= 2, "frequency_penalty", frequency_penalty, "in [-2, 2]");
  require(logprobs >= -1 && logprobs <= kMaxLogprobs, "logprobs", logprobs, cat("in [0, ", kMaxLogprobs, "]"));
  require(prompt_logprobs >= -1 && prompt_logprobs <= kMaxLogprobs, "prompt_logprobs", prompt_logprobs,
          cat("in [0, ", kMaxLogprobs, "]"));
  require(n >= 1 && n <= kMaxSequences, "n", n, cat("in [1, ", kMaxSequences, "]"));
  require(best_of == 0 || (best_of >= n && best_of <= kMaxSequences), "best_of", best_of,
          cat("0, or in [n, ", kMaxSequences, "] with n = ", n));
  require(stop_words.size() <= kMaxStopWords, "the number of stop_words", stop_words.size(),
          cat("at most ", kMaxStopWords));
  for (const auto& word : stop_words) {
    require(!word.empty(), "stop_words", "''", "without empty words");
    require(word.size() <= kMaxStopWordBytes, "the length of a word of stop_words", word.size(),
            cat("at most ", kMaxStopWordBytes, " bytes"));
  }
  for (const auto id : end_ids) token("end_id", id);
  for (const auto& word : bad_words) {
    require(!word.empty(), "bad_words", "[]", "without empty words");
    for (const auto id : word) token("bad_words", id);
  }
  for (const auto& [id, bias] : logit_bias) {
    token("logit_bias", id);
    require(bias >= -100 && bias <= 100, "logit_bias", bias, "in [-100, 100]");
  }
}

}  // namespace charonia
