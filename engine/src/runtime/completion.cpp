#include "runtime/completion.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "ops/generated/penalties.h"
#include "runtime/request_state.h"

namespace charonia::runtime {
namespace {

double milliseconds(Clock::duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); }

}  // namespace

Completion::Completion(RequestState& state_in, int index_in, std::uint64_t id_in, const text::TokenTable& table,
                   int max_tokens_in)
    : state(state_in),
      index(index_in),
      id(id_in),
      max_tokens(max_tokens_in),
      seed_(state.seed + static_cast<std::uint64_t>(index)),
      text_(table, state.stop_words, state.request.strip_leading_space, state.stop_until),
      thinking_(state.thinking) {}

bool Completion::scores() const {
  const auto& sampling = state.request.sampling;
  return sampling.logprobs >= 0 || sampling.best_of > 0;
}

bool Completion::is_first() const { return state.completions.front().get() == this; }

int Completion::num_input() const { return static_cast<int>(state.request.input_ids.size()); }

ops::SampleRow Completion::sample_row(std::span<const TokenId> tokens, std::size_t row_number) {
  if (!state.request.pooling.empty()) {
    ops::SampleRow whole;
    whole.target = 0;
    whole.logits = true;
    return whole;
  }
  const auto& sampling = state.request.sampling;
  const auto prompt_size = state.request.input_ids.size();
  const TokenId pending = tokens.back() < 0 ? -1 - tokens.back() : -1;
  const auto known = tokens.first(tokens.size() - (pending >= 0 ? 1 : 0));
  const bool at_first = std::ssize(tokens) - num_input() < sampling.min_tokens && !sampling.ignore_eos;
  const auto& always = at_first ? state.banned_at_first : state.banned;
  if (row_number >= banned_.size()) banned_.resize(row_number + 1);
  auto& banned = banned_[row_number];
  banned.clear();
  std::optional<Thinking> thinking;
  if (thinking_ && pending < 0) {
    thinking = thinking_;
    for (const auto token : known.subspan(prompt_size + static_cast<std::size_t>(num_output))) thinking->push(token);
    std::ranges::copy(thinking->banned(), std::back_inserter(banned));
  }
  for (const auto& word : sampling.bad_words) {
    const auto head = word.size() - 1;  // a word may begin in the prompt
    if (known.size() >= head && std::equal(word.begin(), word.end() - 1, known.end() - static_cast<long>(head))) {
      banned.push_back(word.back());
    }
  }
  if (!banned.empty()) {
    std::ranges::sort(banned);
    const auto own = std::ssize(banned);
    banned.insert(banned.end(), always.begin(), always.end());
    std::inplace_merge(banned.begin(), banned.begin() + own, banned.end());
  }
  ops::SampleRow row;
  static_cast<RowSampling&>(row) = sampling;
  row.seed = seed_;
  row.position = static_cast<std::int64_t>(tokens.size());
  row.prompt = known.first(prompt_size);
  row.output = known.subspan(prompt_size);
  row.pending = pending;
  row.bias = sampling.logit_bias;
  row.banned = banned.empty() ? always : banned;
  row.logprobs = scores() ? std::max(sampling.logprobs, 0) : -1;
  row.mask = mask == nullptr ? nullptr : mask->row(row_number);
  if (thinking) {
    if (const auto forced = thinking->forced()) row.target = *forced;
  }
  return row;
}

std::span<const TokenId> Completion::with_proposals(std::span<const TokenId> tokens,
                                                    std::span<const TokenId> proposed) {
  history_.resize(num_known_);
  history_.insert(history_.end(), tokens.begin() + static_cast<std::ptrdiff_t>(num_known_), tokens.end());
  num_known_ = tokens.size();
  history_.insert(history_.end(), proposed.begin(), proposed.end());
  return history_;
}

std::pair<std::int64_t, std::int64_t> Completion::entries(std::size_t num_tokens) const {
  const auto& sampling = state.request.sampling;
  const auto counts = has_penalties(sampling) ? num_tokens : 0;
  const auto lists = scores() ? sampling.logit_bias.size() + state.banned_at_first.size() : 0;
  return {static_cast<std::int64_t>(counts), static_cast<std::int64_t>(lists)};
}

bool Completion::needs_last_token() const {
  return !state.request.sampling.bad_words.empty() || (thinking_ && thinking_->may_decide_next());
}

bool Completion::resume(std::span<const TokenId> tokens) {
  for (const auto token : tokens) {
    if (thinking_) thinking_->push(token);
    const bool ends = !state.request.sampling.ignore_eos && std::ranges::binary_search(state.end_ids, token);
    if (ends || text_.push(token, ++num_output >= state.request.sampling.min_tokens)) return false;
  }
  text_.skip(num_output);
  return num_output < max_tokens;
}

FinishReason Completion::accept(const ops::Sampled& sampled, Clock::time_point now) {
  const auto& sampling = state.request.sampling;
  ++num_output;
  if (scores()) {
    cumulative_logprob_ += sampled.logprob;
    if (!forces_next()) {
      scored_logprob_ += sampled.logprob;
      ++num_scored_;
    }
  }
  if (thinking_) thinking_->push(sampled.token);
  if (!first_token) first_token = now;
  last_token = now;
  TokenInfo info{sampled.token, sampled.logprob, {}};
  for (const auto& [id, logprob] : sampled.top) info.top.push_back({id, logprob});
  unsent_.push_back(std::move(info));

  const bool ends = !sampling.ignore_eos && std::ranges::binary_search(state.end_ids, sampled.token);
  if (ends) {
    text_.push_silent(sampled.token);
    return FinishReason::stop;
  }
  if (text_.push(sampled.token, num_output >= sampling.min_tokens)) return FinishReason::stop;
  if (num_output < max_tokens) return FinishReason::none;
  return text_.holds_stop() ? FinishReason::stop : FinishReason::length;
}

std::optional<Result> Completion::due(Clock::time_point now, std::chrono::nanoseconds interval) {
  if (!state.request.stream || (last_sent_ && now - *last_sent_ < interval)) return std::nullopt;
  const auto chunk = text_.take();
  if (chunk.num_tokens == 0) return std::nullopt;
  last_sent_ = now;
  Result result;
  fill(result, chunk, now);
  return result;
}

Result Completion::progress(int num_computed, Clock::time_point now) const {
  Result result;
  fill_numbers(result, now);
  result.num_computed_tokens = num_computed;
  return result;
}

Result Completion::last(FinishReason reason, Clock::time_point now, std::string error, ErrorCode code) {
  Result result;
  fill(result, text_.finish(), now);
  result.finish_reason = reason;
  result.error = std::move(error);
  result.error_code = code;
  return result;
}

void Completion::fill(Result& result, const text::TextChunk& chunk, Clock::time_point now) {
  const int wanted = state.request.sampling.logprobs;
  const auto end = unsent_.begin() + chunk.num_tokens;
  for (auto info = unsent_.begin(); info != end; ++info) {
    result.token_ids.push_back(info->id);
    if (wanted >= 0) result.logprobs.push_back(info->logprob);
    if (wanted > 0) result.top_logprobs.push_back(std::move(info->top));
  }
  unsent_.erase(unsent_.begin(), end);
  result.text_begin = chunk.text_begin;
  result.text_end = chunk.text_end;
  result.text = chunk.text;
  if (prompt_logprobs) {
    prompt_logprobs->move_to(result);
    prompt_logprobs.reset();
  }
  result.pooled = std::move(pooled);
  fill_numbers(result, now);
}

void Completion::fill_numbers(Result& result, Clock::time_point now) const {
  result.index = index;
  result.cumulative_logprob = cumulative_logprob_;
  result.num_session_tokens = state.num_session_tokens;
  result.num_input_tokens = num_input();
  result.num_output_tokens = num_output;
  result.num_cached_tokens = num_cached;
  result.timings.queue_ms = milliseconds(first_scheduled.value_or(now) - state.submitted);
  result.timings.first_token_ms = first_token ? milliseconds(*first_token - state.submitted) : 0;
  result.timings.total_ms = milliseconds(now - state.submitted);
  result.num_proposed_tokens = num_proposed;
  result.num_accepted_tokens = num_accepted;
}

}  // namespace charonia::runtime
