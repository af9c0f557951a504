#include "schedule/step_time.h"

#include <algorithm>
#include <bit>

namespace charonia::schedule {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();
// Number of steps with prefill until decodes are measured alone again: one in a hundred steps, at a third of the time.
// While there are few measurements the interval is shorter, so that a slow first measurement does not count for long.
constexpr std::int64_t kMaxAge = 100;
constexpr std::int64_t kMaxAgePerMeasurement = 8;
// One step may be planned before the previous one is measured.
constexpr int kMaxProbes = 2;
// Rows of a tile of the devices' GEMMs. A step with only full tiles wastes no time.
constexpr std::int32_t kTile = 16;
// Share of the token budget for the first prefill next to decodes.
constexpr std::int32_t kFirstShare = 16;
constexpr std::int32_t kMinPosition = 64;

// 0: up to 1, 1: 2, 2: 3 and 4, 3: 5 to 8, ...
std::size_t class_of(std::int32_t number) {
  return static_cast<std::size_t>(std::bit_width(static_cast<std::uint32_t>(std::max(number, 1) - 1)));
}
std::size_t class_of_position(std::int64_t position) {
  return class_of(static_cast<std::int32_t>(position / kMinPosition) + 1);
}

}  // namespace

template <std::int64_t size>
double StepTime::Window<size>::median() const {
  auto sorted = values_;
  const auto count = std::min(count_, size);
  const auto end = sorted.begin() + count;
  const auto at = sorted.begin() + (count - 1) / 2;
  std::nth_element(sorted.begin(), at, end);
  return *at;
}

StepTime::StepTime(int target_ms, int response_ms, int token_budget)
    : target_s_(target_ms == 0 ? kUnbounded : target_ms * 1e-3),
      response_s_(response_ms * 1e-3),
      token_budget_(token_budget) {}

double StepTime::target_s(std::int32_t decodes) const {
  if (target_s_ == kUnbounded) return 0;
  if (target_s_ > 0) return target_s_;
  const auto& alone = decodes_[class_of(decodes)].seconds;
  return alone.empty() ? 0 : kSlowdown * std::max(response_s_, alone.median());
}

void StepTime::begin_prefill(std::int32_t decodes) {
  rows_ = decodes;
  planned_ = least_ = 0;
  left_s_ = kUnbounded;
  if (decodes == 0 || target_s_ == kUnbounded) return;
  auto& alone = decodes_[class_of(decodes)];
  const auto max_age = std::min(kMaxAge, kMaxAgePerMeasurement * alone.seconds.count());
  if (alone.age >= max_age && alone.probes < kMaxProbes) {
    ++alone.probes;
    left_s_ = 0;
    return;
  }
  const bool any_rate = std::ranges::any_of(rates_, [](const Rate& one) { return !one.per_token.empty(); });
  least_ = any_rate ? kMinTokens : std::max(kMinTokens, token_budget_ / kFirstShare);
  left_s_ = alone.seconds.empty() ? 0 : std::max(0.0, target_s(decodes) - alone.seconds.median());
  if (!any_rate) left_s_ = 0;
}

// The rate at the class of the position, or at the nearest class; of two equally near ones, at the higher position,
// which costs more.
double StepTime::rate(std::int32_t position) const {
  const auto wanted = class_of_position(position);
  for (std::size_t distance = 0; distance < kClasses; ++distance) {
    // An index below 0 wraps around to a value that is too large.
    for (const auto at : {wanted + distance, wanted - distance}) {
      if (at < kClasses && !rates_[at].per_token.empty()) return rates_[at].per_token.median();
    }
  }
  return 0;
}

std::int32_t StepTime::fit(std::int32_t first_position, std::int32_t num_tokens) const {
  if (left_s_ == kUnbounded) return num_tokens;
  auto fits = std::max(least_ - planned_, 1);
  if (const auto per_token = rate(first_position); per_token > 0 && left_s_ > 0) {
    fits = std::max(fits, static_cast<std::int32_t>(std::min(left_s_ / per_token, 1e9)));
  }
  if (fits >= num_tokens) return num_tokens;
  const auto whole_tiles = (rows_ + fits) / kTile * kTile - rows_;
  // Whole tiles must leave a useful amount of prefill in the step: not 1 token next to 15 decodes.
  return whole_tiles > 0 && planned_ + whole_tiles >= kMinTokens / 2 ? whole_tiles : fits;
}

void StepTime::take(std::int32_t first_position, std::int32_t num_tokens) {
  rows_ += num_tokens;
  planned_ += num_tokens;
  if (left_s_ == kUnbounded) return;
  const auto per_token = rate(first_position);
  left_s_ -= num_tokens * per_token;
  // A rest that does not fill a tile is not worth using.
  if (left_s_ < (kTile - rows_ % kTile) * per_token) left_s_ = 0;
}

void StepTime::measured(const StepWork& work, double seconds) {
  if (target_s_ == kUnbounded || seconds <= 0) return;
  auto& alone = decodes_[class_of(work.decodes)];
  if (work.prefill_tokens == 0) {
    alone.seconds.add(seconds);
    alone.age = alone.probes = 0;
    return;
  }
  auto& rate = rates_[class_of_position(work.prefill_position)];
  auto cost = seconds;
  if (work.decodes > 0) {
    ++alone.age;
    if (alone.seconds.empty()) return;
    // Noise must not make prefill free, so it costs at least a tenth of a step.
    cost = std::max(seconds - alone.seconds.median(), 0.1 * seconds);
    // Small chunks cost more per token than chunks of steps without decodes.
    if (!rate.with_decodes) rate.per_token.clear();
    rate.with_decodes = true;
  } else if (rate.with_decodes || work.prefill_tokens < token_budget_ / kFirstShare) {
    return;  // with only a few tokens, the time measures the step and not the token
  }
  rate.per_token.add(cost / work.prefill_tokens);
}

}  // namespace charonia::schedule
