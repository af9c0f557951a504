#include "outbox.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <span>

#include "base/text.h"
#include "charonia/error.h"

namespace charonia::triton {
namespace {

static_assert(std::endian::native == std::endian::little, "deliveries are little-endian");

// Before a chunk's ids and its text. The client unpacks it (client/charonia_client/subscription.py).
struct Head {
  std::uint64_t key;
  std::uint32_t text_bytes, num_ids;
  std::int32_t index, finish_reason, text_begin, text_end;
  std::int32_t num_input_tokens, num_output_tokens, num_cached_tokens, num_session_tokens;
  float cum_log_prob;
  std::array<float, 3> timings;  // queue, first token, total; milliseconds
};
static_assert(sizeof(Head) == 64);

// In place of a reason, and beside it.
constexpr std::int32_t kOptions = 5, kTokens = 16, kLogprobs = 32;

// What of a sequence is as its last chunk has it.
void update(Result& result, const Result& more) {
  result.finish_reason = more.finish_reason;
  result.cumulative_logprob = more.cumulative_logprob;
  result.num_input_tokens = more.num_input_tokens;
  result.num_output_tokens = more.num_output_tokens;
  result.num_cached_tokens = more.num_cached_tokens;
  result.num_session_tokens = more.num_session_tokens;
  result.timings = more.timings;
}

// The chunk `more` behind `result`, of which it is the continuation, but for the text.
void join(Result& result, const Result& more) {
  // All bytes of a chunk's tokens that are before its end are text, but for a leading space and what precedes it.
  if (result.text_begin == result.text_end) result.text_begin = result.text_end + more.text_begin;
  result.text_end += more.text_end;
  result.token_ids.insert(result.token_ids.end(), more.token_ids.begin(), more.token_ids.end());
  update(result, more);
}

// How many of the most likely tokens there are for each token. Throws Error(internal) for a result that nobody could
// unpack: one with other log probabilities than one for each token, or rows of several lengths.
std::size_t count_tops(const Result& result) {
  const auto& rows = result.top_logprobs;
  const auto tops = rows.empty() ? 0 : rows.front().size();
  const bool even = std::ranges::all_of(rows, [tops](const auto& row) { return row.size() == tops; });
  const auto tokens = result.token_ids.size();
  if (result.logprobs.size() != tokens || (!rows.empty() && rows.size() != tokens) || !even) {
    throw Error(ErrorCode::internal,
                cat("a response of ", tokens, " tokens has ", result.logprobs.size(), " log probabilities, and ",
                    rows.size(), " rows of most likely tokens, which must be of one length"));
  }
  return tops;
}

template <class Value>
void append_values(std::string& packed, std::span<const Value> values) {
  packed.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
}

}  // namespace

std::size_t Outbox::packed_size(const Chunk& chunk) {
  const auto& result = chunk.result;
  auto size = sizeof(Head) + result.token_ids.size() * sizeof(TokenId) + chunk.sizes.size() * sizeof(std::uint32_t) +
              result.text.size();
  if (chunk.logprobs) {
    size += result.logprobs.size() * sizeof(float) + sizeof(std::uint32_t) +
            chunk.top_ids.size() * (sizeof(TokenId) + sizeof(float));
  }
  return size;
}

void Outbox::add_logprobs(Chunk& chunk, const Result& more) {
  auto& logprobs = chunk.result.logprobs;
  logprobs.insert(logprobs.end(), more.logprobs.begin(), more.logprobs.end());
  for (const auto& row : more.top_logprobs) {
    for (const auto& [id, logprob] : row) {
      chunk.top_ids.push_back(id);
      chunk.top_logprobs.push_back(logprob);
    }
  }
}

void Outbox::add(std::uint64_t key, const Result& result, std::string_view before, const TokenBytes* tokens,
                 bool logprobs) {
  const auto tops = logprobs ? count_tops(result) : 0;
  const auto [place, fresh] = places_.try_emplace({key, result.index}, waiting_.size());
  const auto at = place->second;
  if (!fresh && logprobs && !result.token_ids.empty() && !waiting_[at].result.token_ids.empty() &&
      waiting_[at].tops != tops) {
    throw Error(ErrorCode::internal,
                cat("a response has ", tops, " most likely tokens for each of its own, and the one before ",
                    waiting_[at].tops));
  }
  // What comes with this key later is another request's.
  if (result.finish_reason != FinishReason::none) places_.erase(place);
  auto& chunk = fresh ? waiting_.emplace_back() : waiting_[at];
  auto& own = chunk.result;
  if (fresh) {
    chunk.key = key;
    chunk.form = tokens == nullptr ? Form::text : Form::tokens;
    chunk.logprobs = logprobs;
    own.index = result.index;
    own.text_begin = result.text_begin;
    own.text_end = result.text_end;
    own.text = before;
    own.token_ids = result.token_ids;
    update(own, result);
  } else {
    packed_ -= packed_size(chunk);
    join(own, result);
  }
  if (logprobs) add_logprobs(chunk, result);
  if (!result.token_ids.empty()) chunk.tops = static_cast<std::uint32_t>(tops);
  own.text += tokens == nullptr ? result.text : tokens->joined;
  if (tokens != nullptr) chunk.sizes.insert(chunk.sizes.end(), tokens->sizes.begin(), tokens->sizes.end());
  packed_ += packed_size(chunk);
}

void Outbox::add_options(std::uint64_t key, std::string_view options) {
  auto& chunk = waiting_.emplace_back();
  chunk.key = key;
  chunk.form = Form::options;
  chunk.result.text = options;
  packed_ += packed_size(chunk);
}

void Outbox::add_error(std::uint64_t key, std::string_view text) {
  auto& chunk = waiting_.emplace_back();
  chunk.key = key;
  chunk.result.finish_reason = FinishReason::error;
  chunk.result.text = text;
  packed_ += packed_size(chunk);
  places_.erase(places_.lower_bound({key, std::numeric_limits<int>::min()}),
                places_.upper_bound({key, std::numeric_limits<int>::max()}));
}

std::string Outbox::take() {
  std::size_t count = 0, bytes = 0;
  while (count < waiting_.size() && bytes < limits_.bytes) bytes += packed_size(waiting_[count++]);
  std::string packed;
  packed.reserve(sizeof(number_) + bytes);
  ++number_;
  append_values(packed, std::span<const std::uint64_t>(&number_, 1));
  for (std::size_t i = 0; i < count; ++i) append(packed, waiting_[i]);
  packed_ -= bytes;
  waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(count));
  std::erase_if(places_, [count](const auto& entry) { return entry.second < count; });
  for (auto& [_, place] : places_) place -= count;
  sent_.push_back(packed.size());
  sent_bytes_ += packed.size();
  return packed;
}

void Outbox::append(std::string& packed, const Chunk& chunk) {
  const auto& result = chunk.result;
  const auto& timings = result.timings;
  const auto reason = static_cast<std::int32_t>(result.finish_reason) + (chunk.logprobs ? kLogprobs : 0);
  const Head head{.key = chunk.key,
                  .text_bytes = static_cast<std::uint32_t>(result.text.size()),
                  .num_ids = static_cast<std::uint32_t>(result.token_ids.size()),
                  .index = result.index,
                  .finish_reason = chunk.form == Form::options  ? kOptions
                                   : chunk.form == Form::tokens ? reason + kTokens
                                                                : reason,
                  .text_begin = result.text_begin,
                  .text_end = result.text_end,
                  .num_input_tokens = result.num_input_tokens,
                  .num_output_tokens = result.num_output_tokens,
                  .num_cached_tokens = result.num_cached_tokens,
                  .num_session_tokens = result.num_session_tokens,
                  .cum_log_prob = static_cast<float>(result.cumulative_logprob),
                  .timings = {static_cast<float>(timings.queue_ms), static_cast<float>(timings.first_token_ms),
                              static_cast<float>(timings.total_ms)}};
  append_values(packed, std::span<const Head>(&head, 1));
  append_values(packed, std::span<const TokenId>(result.token_ids));
  append_values(packed, std::span<const std::uint32_t>(chunk.sizes));
  if (chunk.logprobs) {
    append_values(packed, std::span<const float>(result.logprobs));
    append_values(packed, std::span<const std::uint32_t>(&chunk.tops, 1));
    append_values(packed, std::span<const TokenId>(chunk.top_ids));
    append_values(packed, std::span<const float>(chunk.top_logprobs));
  }
  packed += result.text;
}

void Outbox::read(std::uint64_t number) {
  if (number > number_) {
    throw Error(ErrorCode::invalid_argument,
                cat("subscription_read is ", number, ", and the last delivery has the number ", number_,
                    "; send the number of a delivery that has come"));
  }
  const auto unread = number_ - number;
  while (sent_.size() > unread) {
    sent_bytes_ -= sent_.front();
    sent_.pop_front();
    behind_since_.reset();
  }
}

const char* Outbox::hopeless(Clock::time_point now) {
  if (held() <= limits_.held || unbound_) {
    over_since_.reset();
  } else if (!over_since_ || held() < least_held_) {
    over_since_ = now;
    least_held_ = held();
  }
  if (over_since_ && now - *over_since_ >= limits_.catching_up) return "its reader is too far behind";
  if (waiting_.empty() || !behind()) {
    behind_since_.reset();
    return nullptr;
  }
  if (!behind_since_) behind_since_ = now;
  return now - *behind_since_ > limits_.patience ? "its reader has stopped reading" : nullptr;
}

}  // namespace charonia::triton
