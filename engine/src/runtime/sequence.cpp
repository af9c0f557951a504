#include "runtime/sequence.h"

#include <algorithm>
#include <utility>

namespace charonia::runtime {
namespace {

double milliseconds(Clock::duration duration) { return std::chrono::duration<double, std::milli>(duration).count(); }

}  // namespace

Sequence::Sequence(Request request_in, std::shared_ptr<Engine::Callback> callback_in, Clock::time_point submitted_in,
                   const sample::TokenTable& table, std::vector<TokenId> end_ids, int max_tokens_in, std::uint64_t seed)
    : request(std::move(request_in)),
      callback(std::move(callback_in)),
      submitted(submitted_in),
      max_tokens(max_tokens_in),
      end_ids_(std::move(end_ids)),
      seed_(seed),
      text_(table, request.sampling.stop_words, request.strip_leading_space) {}

ops::SampleRow Sequence::sample_row(std::span<const TokenId> tokens) {
  const auto& sampling = request.sampling;
  const auto prompt_size = request.input_ids.size();
  const TokenId pending = tokens.back() < 0 ? -1 - tokens.back() : -1;
  const auto known = tokens.first(tokens.size() - (pending >= 0 ? 1 : 0));
  banned_.clear();
  if (std::ssize(tokens) - num_input() < sampling.min_tokens && !sampling.ignore_eos) banned_ = end_ids_;
  for (const auto& word : sampling.bad_words) {
    const auto head = word.size() - 1;  // a word may begin in the prompt
    if (known.size() >= head && std::equal(word.begin(), word.end() - 1, known.end() - static_cast<long>(head))) {
      banned_.push_back(word.back());
    }
  }
  ops::SampleRow row;
  row.temperature = sampling.temperature;
  row.top_k = sampling.top_k;
  row.top_p = sampling.top_p;
  row.min_p = sampling.min_p;
  row.repetition_penalty = sampling.repetition_penalty;
  row.presence_penalty = sampling.presence_penalty;
  row.frequency_penalty = sampling.frequency_penalty;
  row.seed = seed_;
  row.position = static_cast<std::int64_t>(tokens.size());
  row.prompt = known.first(prompt_size);
  row.output = known.subspan(prompt_size);
  row.pending = pending;
  row.bias = sampling.logit_bias;
  row.banned = banned_;
  row.logprobs = sampling.logprobs;
  return row;
}

bool Sequence::needs_last_token() const {
  return std::ranges::any_of(request.sampling.bad_words, [](const auto& word) { return word.size() > 1; });
}

FinishReason Sequence::accept(const ops::Sampled& sampled, Clock::time_point now) {
  const auto& sampling = request.sampling;
  ++num_output;
  if (!first_token) first_token = now;
  last_token = now;
  TokenInfo info{sampled.token, sampled.logprob, {}};
  for (const auto& [id, logprob] : sampled.top) info.top.push_back({id, logprob});
  unsent_.push_back(std::move(info));

  const bool ends =
      !sampling.ignore_eos && std::find(end_ids_.begin(), end_ids_.end(), sampled.token) != end_ids_.end();
  if (ends) {
    text_.push_silent(sampled.token);
    return FinishReason::stop;
  }
  if (text_.push(sampled.token, num_output >= sampling.min_tokens)) return FinishReason::stop;
  return num_output >= max_tokens ? FinishReason::length : FinishReason::none;
}

std::optional<Result> Sequence::due(Clock::time_point now, std::chrono::milliseconds interval) {
  if (!request.stream || (last_sent_ && now - *last_sent_ < interval)) return std::nullopt;
  const auto piece = text_.take();
  if (piece.num_tokens == 0) return std::nullopt;
  last_sent_ = now;
  Result result;
  fill(result, piece, now);
  return result;
}

Result Sequence::last(FinishReason reason, Clock::time_point now, std::string error) {
  Result result;
  fill(result, text_.finish(), now);
  result.finish_reason = reason;
  result.error = std::move(error);
  return result;
}

void Sequence::fill(Result& result, const sample::Piece& piece, Clock::time_point now) {
  const int wanted = request.sampling.logprobs;
  const auto end = unsent_.begin() + piece.num_tokens;
  for (auto info = unsent_.begin(); info != end; ++info) {
    result.token_ids.push_back(info->id);
    if (wanted >= 0) result.logprobs.push_back(info->logprob);
    if (wanted > 0) result.top_logprobs.push_back(std::move(info->top));
  }
  unsent_.erase(unsent_.begin(), end);
  result.text_begin = piece.text_begin;
  result.text_end = piece.text_end;
  result.text = piece.text;
  result.num_input_tokens = num_input();
  result.num_output_tokens = num_output;
  result.num_cached_tokens = num_cached;
  result.timings.queue_ms = milliseconds(first_scheduled.value_or(now) - submitted);
  result.timings.first_token_ms = first_token ? milliseconds(*first_token - submitted) : 0;
  result.timings.total_ms = milliseconds(now - submitted);
}

}  // namespace charonia::runtime
