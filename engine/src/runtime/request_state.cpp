#include "runtime/request_state.h"

#include <algorithm>
#include <utility>

namespace charonia::runtime {
namespace {

// Orders completions, best first: completions with tokens before empty ones, empty ones before errors, then by the mean
// log probability.
bool better(const std::pair<double, Result>& one, const std::pair<double, Result>& other) {
  const auto& [mean_a, a] = one;
  const auto& [mean_b, b] = other;
  const auto rank = [](const Result& result) {
    return result.finish_reason == FinishReason::error ? 2 : result.num_output_tokens == 0 ? 1 : 0;
  };
  if (rank(a) != rank(b)) return rank(a) < rank(b);
  if (mean_a != mean_b) return mean_a > mean_b;
  return a.index < b.index;
}

}  // namespace

std::vector<Result> RequestState::ended(Result result, double mean_logprob) {
  num_output += result.num_output_tokens;
  const bool is_first = completions.empty() || result.index == completions.front()->index;
  if (is_first && reason == FinishReason::none) reason = result.finish_reason;
  if (result.finish_reason == FinishReason::error) reason = FinishReason::error;
  std::vector<Result> out;
  if (!chooses()) {
    out.push_back(std::move(result));
    return out;
  }
  held_.emplace_back(mean_logprob, std::move(result));
  if (std::ssize(held_) < num_completions()) return out;
  // The log probabilities of the prompt are in the result of completion 0. Move them to the best completion.
  auto& first = std::ranges::find(held_, 0, [](const auto& held) { return held.second.index; })->second;
  auto prompt_logprobs = std::move(first.prompt_logprobs);
  auto prompt_top_logprobs = std::move(first.prompt_top_logprobs);
  std::ranges::sort(held_, better);
  for (int i = 0; i < request.sampling.n; ++i) {
    out.push_back(std::move(held_[static_cast<std::size_t>(i)].second));
    out.back().index = i;
  }
  out.front().prompt_logprobs = std::move(prompt_logprobs);
  out.front().prompt_top_logprobs = std::move(prompt_top_logprobs);
  return out;
}

}  // namespace charonia::runtime
