#include "runtime/request_state.h"

#include <algorithm>
#include <utility>

namespace charonia::runtime {
namespace {

double mean_logprob(const Result& result) {
  return result.num_output_tokens == 0 ? 0 : result.cumulative_logprob / result.num_output_tokens;
}

// Orders completions, best first: completions with tokens before empty ones, empty ones before errors, then by the mean
// log probability.
bool better(const Result& a, const Result& b) {
  const auto rank = [](const Result& result) {
    return result.finish_reason == FinishReason::error ? 2 : result.num_output_tokens == 0 ? 1 : 0;
  };
  if (rank(a) != rank(b)) return rank(a) < rank(b);
  if (mean_logprob(a) != mean_logprob(b)) return mean_logprob(a) > mean_logprob(b);
  return a.index < b.index;
}

}  // namespace

std::vector<Result> RequestState::ended(Result result) {
  num_output += result.num_output_tokens;
  const bool is_first = completions.empty() || result.index == completions.front()->index;
  if (is_first && reason == FinishReason::none) reason = result.finish_reason;
  if (result.finish_reason == FinishReason::error) reason = FinishReason::error;
  std::vector<Result> out;
  if (!chooses()) {
    out.push_back(std::move(result));
    return out;
  }
  held_.push_back(std::move(result));
  if (std::ssize(held_) < num_completions()) return out;
  // The log probabilities of the prompt are in the result of completion 0. Move them to the best completion.
  const auto first = std::ranges::find(held_, 0, &Result::index);
  auto prompt_logprobs = std::move(first->prompt_logprobs);
  auto prompt_top_logprobs = std::move(first->prompt_top_logprobs);
  std::ranges::sort(held_, better);
  held_.resize(static_cast<std::size_t>(request.sampling.n));
  for (std::size_t i = 0; i < held_.size(); ++i) held_[i].index = static_cast<int>(i);
  held_.front().prompt_logprobs = std::move(prompt_logprobs);
  held_.front().prompt_top_logprobs = std::move(prompt_top_logprobs);
  return std::move(held_);
}

}  // namespace charonia::runtime
