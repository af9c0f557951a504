#include "runtime/load_tracker.h"

#include <algorithm>
#include <cmath>

#include "base/text.h"

namespace charonia::runtime {
namespace {

void average(double& mean, double value) {
  constexpr double kWeight = 0.1;
  mean = mean == 0 ? value : mean + kWeight * (value - mean);
}

}  // namespace

std::optional<LoadTracker::Rejected> LoadTracker::admit(int waiting, std::int64_t prompt_tokens, int sequences,
                                                    std::int64_t max_tokens, Work& work, bool resumed) {
  const std::lock_guard lock(mutex_);
  if (!resumed && waiting >= max_queue_size_) {
    return Rejected{Rejection::queue_full, cat("the queue is full: ", waiting, " requests wait and max_queue_size is ",
                                               max_queue_size_, "; retry after ", retry_after_locked(), " s")};
  }
  // A prompt longer than the limit is admitted if no prompt waits; otherwise it would never be admitted.
  if (!resumed && max_queue_tokens_ > 0 && total_.waiting_tokens > 0 &&
      total_.waiting_tokens + prompt_tokens > max_queue_tokens_) {
    return Rejected{
        Rejection::queue_tokens,
        cat("the queue is full: prompts of ", total_.waiting_tokens, " tokens wait, this one has ", prompt_tokens,
            " and max_queue_tokens is ", max_queue_tokens_, "; retry after ", retry_after_locked(), " s")};
  }
  // Most completions end before max_tokens, so the average of the last completions is a better estimate.
  const auto expected = output_tokens_ > 0 ? std::min(static_cast<double>(max_tokens), std::ceil(output_tokens_))
                                           : static_cast<double>(max_tokens);
  work = {prompt_tokens, prompt_tokens, sequences * static_cast<std::int64_t>(expected)};
  total_.waiting_tokens += work.waiting_tokens;
  total_.prompt_tokens += work.prompt_tokens;
  total_.output_tokens += work.output_tokens;
  return std::nullopt;
}

void LoadTracker::begun(Work& work) {
  const std::lock_guard lock(mutex_);
  total_.waiting_tokens -= work.waiting_tokens;
  work.waiting_tokens = 0;
}

void LoadTracker::computed(Work& work, std::int64_t prompt_tokens) {
  const std::lock_guard lock(mutex_);
  const auto known = std::min(work.prompt_tokens, prompt_tokens);
  total_.prompt_tokens -= known;
  work.prompt_tokens -= known;
}

void LoadTracker::sampled(Work& work) {
  if (work.output_tokens == 0) return;
  const std::lock_guard lock(mutex_);
  --total_.output_tokens;
  --work.output_tokens;
}

void LoadTracker::ended(Work& work, std::int64_t output_tokens) {
  const std::lock_guard lock(mutex_);
  total_.waiting_tokens -= work.waiting_tokens;
  total_.prompt_tokens -= work.prompt_tokens;
  total_.output_tokens -= work.output_tokens;
  work = {};
  if (output_tokens > 0) average(output_tokens_, static_cast<double>(output_tokens));
}

void LoadTracker::step(std::int64_t prompt_tokens, std::int64_t decodes, double seconds) {
  if (seconds <= 0) return;
  const std::lock_guard lock(mutex_);
  (prompt_tokens > 0 ? prefill_ : decode_).add(static_cast<double>(prompt_tokens + decodes), seconds);
  average(step_s_, seconds);
}

void LoadTracker::Speed::add(double more_tokens, double more_seconds) {
  constexpr double kMemory = 4096;  // tokens
  tokens += more_tokens;
  seconds += more_seconds;
  if (tokens > kMemory) tokens /= 2, seconds /= 2;
}

double LoadTracker::prefill_per_s() const {
  const std::lock_guard lock(mutex_);
  return prefill_.per_s();
}

double LoadTracker::step_s() const {
  const std::lock_guard lock(mutex_);
  return step_s_;
}

int LoadTracker::retry_after_s() const {
  const std::lock_guard lock(mutex_);
  return retry_after_locked();
}

int LoadTracker::retry_after_locked() const {
  double seconds = 0;
  const auto prefill_per_s = prefill_.per_s(), decode_per_s = decode_.per_s();
  if (prefill_per_s > 0) seconds += static_cast<double>(total_.prompt_tokens) / prefill_per_s;
  if (decode_per_s > 0) seconds += static_cast<double>(total_.output_tokens) / decode_per_s;
  return static_cast<int>(std::clamp(std::ceil(seconds), 1.0, 600.0));
}

}  // namespace charonia::runtime
