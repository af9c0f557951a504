#include "outbox.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::triton {
namespace {

// Field numbers of delivery.proto.
namespace field {
enum Delivery { number = 1, chunks, arithmetic, deterministic };
enum Chunk {
  subscription_key = 1, sequence_index, finish_reason, text_output, output_ids, token_bytes, text_begin, text_end,
  in_reasoning, num_input_tokens, num_output_tokens, num_cached_tokens, num_session_tokens, queue_ms, first_token_ms,
  total_ms, cum_log_probs, output_log_probs, top_log_prob_ids, top_log_probs, prompt_ids, prompt_log_probs,
  prompt_top_log_prob_ids, prompt_top_log_probs, top_token_bytes, prompt_token_bytes, prompt_token_special,
  prompt_top_token_bytes, num_computed_tokens, num_proposed_tokens, num_accepted_tokens,
  pooled
};
}  // namespace field

static_assert(static_cast<int>(FinishReason::error) == 4, "FinishReason has the numbers of delivery.proto");

// An encoder of protobuf's wire format (https://protobuf.dev/programming-guides/encoding). A message is a list of
// fields, and a parser joins fields of the same number: the last scalar counts, repeated fields are concatenated. So
// the repeated fields of two chunks are joined by appending their encodings.
constexpr std::uint64_t kVarint = 0, kBytes = 2, kFixed32 = 5;

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  out.push_back(static_cast<char>(value));
}

void put_tag(std::string& out, int number, std::uint64_t type) {
  put_varint(out, static_cast<std::uint64_t>(number) << 3 | type);
}

// 0 is the default of scalars and need not be sent.
void put(std::string& out, int number, std::uint64_t value) {
  if (value == 0) return;
  put_tag(out, number, kVarint);
  put_varint(out, value);
}

// Protobuf extends the sign of an int32 to 64 bits.
std::uint64_t widen(std::int32_t value) { return static_cast<std::uint64_t>(static_cast<std::int64_t>(value)); }

void put(std::string& out, int number, int value) { put(out, number, widen(value)); }

void put_float(std::string& out, float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<char>(bits >> shift));
}

void put(std::string& out, int number, double value) {
  if (value == 0) return;
  put_tag(out, number, kFixed32);
  put_float(out, static_cast<float>(value));
}

void put(std::string& out, int number, std::string_view bytes) {
  put_tag(out, number, kBytes);
  put_varint(out, bytes.size());
  out += bytes;
}

void put(std::string& out, int number, std::span<const std::int32_t> values) {
  if (values.empty()) return;
  std::string packed;
  for (const auto value : values) put_varint(packed, widen(value));
  put(out, number, packed);
}

void put(std::string& out, int number, std::span<const float> values) {
  if (values.empty()) return;
  put_tag(out, number, kBytes);
  put_varint(out, values.size() * sizeof(float));
  for (const auto value : values) put_float(out, value);
}

// The numbers of the fields of the most likely tokens.
struct TopFields {
  int ids, logprobs, bytes;
};

void put(std::string& out, const TopFields& fields, const std::vector<std::vector<TokenLogprob>>& rows,
         const Extras& extras) {
  const auto [ids, logprobs] = flattened(rows);
  put(out, fields.ids, ids);
  put(out, fields.logprobs, logprobs);
  if (!extras.name_of) return;
  for (const auto id : ids) put(out, fields.bytes, extras.name_of(id).bytes);
}

void put_prompt(std::string& out, const Extras& extras) {
  put(out, field::prompt_ids, extras.prompt_ids);
  if (!extras.name_of || extras.prompt_ids.empty()) return;
  std::string special;
  for (const auto id : extras.prompt_ids) {
    const auto name = extras.name_of(id);
    put(out, field::prompt_token_bytes, name.bytes);
    special.push_back(name.special ? '\1' : '\0');
  }
  put(out, field::prompt_token_special, special);
}

std::string encode_scalars(std::uint64_t key, const Result& result, int text_begin, int text_end, bool in_reasoning) {
  std::string out;
  put(out, field::subscription_key, key);
  put(out, field::sequence_index, result.index);
  put(out, field::finish_reason, static_cast<int>(result.finish_reason));
  put(out, field::text_begin, text_begin);
  put(out, field::text_end, text_end);
  put(out, field::num_input_tokens, result.num_input_tokens);
  put(out, field::num_output_tokens, result.num_output_tokens);
  put(out, field::num_cached_tokens, result.num_cached_tokens);
  put(out, field::num_session_tokens, result.num_session_tokens);
  put(out, field::num_computed_tokens, result.num_computed_tokens);
  put(out, field::num_proposed_tokens, result.num_proposed_tokens);
  put(out, field::num_accepted_tokens, result.num_accepted_tokens);
  put(out, field::queue_ms, result.timings.queue_ms);
  put(out, field::first_token_ms, result.timings.first_token_ms);
  put(out, field::total_ms, result.timings.total_ms);
  put(out, field::cum_log_probs, result.cumulative_logprob);
  put(out, field::in_reasoning, static_cast<int>(in_reasoning));
  return out;
}

void append_repeated(std::string& out, const Result& result, const Extras& extras) {
  if (!extras.echo.empty()) put(out, field::text_output, extras.echo);
  if (!result.text.empty()) put(out, field::text_output, result.text);
  put(out, field::output_ids, result.token_ids);
  for (const auto bytes : extras.token_bytes) put(out, field::token_bytes, bytes);
  put(out, field::output_log_probs, result.logprobs);
  put(out, {field::top_log_prob_ids, field::top_log_probs, field::top_token_bytes}, result.top_logprobs, extras);
  put(out, field::pooled, result.pooled);
  put_prompt(out, extras);
  put(out, field::prompt_log_probs, result.prompt_logprobs);
  put(out, {field::prompt_top_log_prob_ids, field::prompt_top_log_probs, field::prompt_top_token_bytes},
      result.prompt_top_logprobs, extras);
}

}  // namespace

std::pair<std::vector<TokenId>, std::vector<float>> flattened(const std::vector<std::vector<TokenLogprob>>& rows) {
  std::pair<std::vector<TokenId>, std::vector<float>> flat;
  for (const auto& row : rows) {
    for (const auto& [id, logprob] : row) {
      flat.first.push_back(id);
      flat.second.push_back(logprob);
    }
  }
  return flat;
}

void Outbox::add(std::uint64_t key, const Result& result, const Extras& extras) {
  const auto [place, is_new] = places_.try_emplace({key, result.index}, waiting_.size());
  if (is_new) waiting_.emplace_back();
  auto& chunk = waiting_[place->second];
  if (result.finish_reason != FinishReason::none) places_.erase(place);  // the key may belong to another request now
  waiting_bytes_ -= chunk.size();
  // All bytes of a chunk's tokens before text_end are text, except a leading space and special tokens before it.
  if (chunk.text_begin == chunk.text_end) chunk.text_begin = chunk.text_end + result.text_begin;
  chunk.text_end += result.text_end;
  chunk.in_reasoning = chunk.in_reasoning || extras.in_reasoning;
  chunk.scalars = encode_scalars(key, result, chunk.text_begin, chunk.text_end, chunk.in_reasoning);
  append_repeated(chunk.repeated, result, extras);
  waiting_bytes_ += chunk.size();
}

void Outbox::add_error(std::uint64_t key, std::string_view text) {
  auto& chunk = waiting_.emplace_back();
  Result result;
  result.finish_reason = FinishReason::error;
  chunk.scalars = encode_scalars(key, result, 0, 0, false);
  put(chunk.repeated, field::text_output, text);
  waiting_bytes_ += chunk.size();
  places_.erase(places_.lower_bound({key, std::numeric_limits<int>::min()}),
                places_.upper_bound({key, std::numeric_limits<int>::max()}));
}

std::string Outbox::take(std::string_view arithmetic, bool deterministic) {
  std::string delivery;
  put(delivery, field::number, ++number_);
  if (!arithmetic.empty()) put(delivery, field::arithmetic, arithmetic);
  put(delivery, field::deterministic, static_cast<std::uint64_t>(deterministic));
  std::size_t count = 0;
  for (; count < waiting_.size() && delivery.size() < limits_.bytes; ++count) {
    const auto& chunk = waiting_[count];
    put_tag(delivery, field::chunks, kBytes);
    put_varint(delivery, chunk.size());
    delivery += chunk.scalars;
    delivery += chunk.repeated;
    waiting_bytes_ -= chunk.size();
  }
  waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(count));
  std::erase_if(places_, [count](const auto& entry) { return entry.second < count; });
  for (auto& [_, place] : places_) place -= count;
  unread_.push_back(delivery.size());
  unread_bytes_ += delivery.size();
  return delivery;
}

void Outbox::acknowledge(std::uint64_t number) {
  if (number > number_) {
    throw Error(ErrorCode::invalid_argument,
                cat("subscription_read is ", number, ", and the last delivery has the number ", number_,
                    "; send the number of a delivery that was received"));
  }
  while (unread_.size() > number_ - number) {
    unread_bytes_ -= unread_.front();
    unread_.pop_front();
    stalled_since_.reset();
  }
}

const char* Outbox::overflow(Clock::time_point now) {
  if (held() <= limits_.held || unlimited_) {
    over_since_.reset();
  } else if (!over_since_ || held() < least_held_) {
    over_since_ = now;
    least_held_ = held();
  }
  if (over_since_ && now - *over_since_ >= limits_.overflow_time) return "its reader is too far behind";
  if (!behind() || waiting_.empty()) {
    stalled_since_.reset();
    return nullptr;
  }
  if (!stalled_since_) stalled_since_ = now;
  return now - *stalled_since_ > limits_.stall_time ? "its reader has stopped reading" : nullptr;
}

}  // namespace charonia::triton
