// Generated from definitions/sampling_parameters.toml by `make generate`; do not edit.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace charonia {

// The parameters of a row's request that kernels need in a step.
struct RowSampling {
  // 0 is greedy; >= 0
  float temperature = 1.0F;
  // sample from the k most probable tokens; >= 0 (0: all tokens)
  int top_k = 0;
  // sample from the fewest tokens whose probabilities add up to it; in (0, 1]
  float top_p = 1.0F;
  // minimum probability, relative to the most probable token; in [0, 1]
  float min_p = 0.0F;
  // for tokens of prompt and output: positive logits are divided by it, others multiplied; 1: none; in [0.01, 100]
  float repetition_penalty = 1.0F;
  // subtracted from the logits of tokens that are in the output; in [-2, 2]
  float presence_penalty = 0.0F;
  // subtracted from the logits of tokens for each occurrence in the output; in [-2, 2]
  float frequency_penalty = 0.0F;
};

// Names and meanings are OpenAI's if OpenAI has the parameter. validate() checks every range given here.
struct SamplingParams : RowSampling {
  // longest completion in tokens; unset: until session_len is reached; >= 1
  std::optional<int> max_tokens;
  // minimum output tokens; before that, end ids and stop words do not end the sequence; >= 0
  int min_tokens = 0;
  // equal requests with the same seed give the same tokens; unset: a new seed for each request
  std::optional<std::uint64_t> seed;
  // texts that end the sequence and are not output; matched as UTF-8 within and across tokens; at most 64 of 1 to 1024
  // bytes
  std::vector<std::string> stop_words;
  // tokens that end the sequence, at most 256; empty: the model's own
  std::vector<std::int32_t> end_ids;
  // end ids do not end the sequence
  bool ignore_eos = false;
  // token sequences that are never completed; for a text, the sequences that the tokenizer makes of it
  std::vector<std::vector<std::int32_t>> bad_words;
  // added to the logits, by token id; for a repeated token, the sum; in [-100, 100]
  std::vector<std::pair<std::int32_t, float>> logit_bias;
  // log probabilities of the sampled token and of this many top tokens; unset: none; in [0, 20]
  int logprobs = -1;
  // log probabilities of the prompt's tokens from the second one on, and of this many top tokens; unset: none;
  // in [0, 20]
  int prompt_logprobs = -1;
  // sequences to return; they share the prompt's KV blocks. Sequence i has the seed `seed + i`; in [1, 128]
  int n = 1;
  // sequences to sample, at least n; the n sequences with the largest mean log probability per token are returned, best
  // first. More than n: only without streaming; in [1, 128]
  int best_of = 0;

  // Throws Error(invalid_argument) naming the field, its value and the range. vocab_size bounds token ids.
  void validate(int vocab_size) const;
};

// The maximum of each parameter that has one and is an integer.
struct SamplingMaximum {
  static constexpr int logprobs = 20;
  static constexpr int prompt_logprobs = 20;
  static constexpr int n = 128;
  static constexpr int best_of = 128;
};

// Calls visit(name, tensor, member) for every parameter. tensor: the Triton input of shape [1] with its value; "" if
// other code reads it.
template <class Visitor>
void visit_sampling(Visitor&& visit) {
  visit("max_tokens", "max_tokens", &SamplingParams::max_tokens);
  visit("min_tokens", "min_tokens", &SamplingParams::min_tokens);
  visit("temperature", "temperature", &SamplingParams::temperature);
  visit("top_k", "top_k", &SamplingParams::top_k);
  visit("top_p", "top_p", &SamplingParams::top_p);
  visit("min_p", "min_p", &SamplingParams::min_p);
  visit("repetition_penalty", "repetition_penalty", &SamplingParams::repetition_penalty);
  visit("presence_penalty", "presence_penalty", &SamplingParams::presence_penalty);
  visit("frequency_penalty", "frequency_penalty", &SamplingParams::frequency_penalty);
  visit("seed", "seed", &SamplingParams::seed);
  visit("stop_words", "", &SamplingParams::stop_words);
  visit("end_ids", "", &SamplingParams::end_ids);
  visit("ignore_eos", "ignore_eos", &SamplingParams::ignore_eos);
  visit("bad_words", "", &SamplingParams::bad_words);
  visit("logit_bias", "", &SamplingParams::logit_bias);
  visit("logprobs", "", &SamplingParams::logprobs);
  visit("prompt_logprobs", "", &SamplingParams::prompt_logprobs);
  visit("n", "num_return_sequences", &SamplingParams::n);
  visit("best_of", "best_of", &SamplingParams::best_of);
}

}  // namespace charonia
