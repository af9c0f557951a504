// Tracks the load in tokens and the speed of the engine. Rejects requests beyond the limits of the queue, and estimates
// when to retry. Thread-safe.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "charonia/config.h"

namespace charonia::runtime {

// Why a request was rejected or ended early. The order is the order of the values of the label `reason` (metrics.h).
enum class Rejection { queue_full, queue_tokens, queue_time, deadline, never_fits };

// The remaining work of a request. It is stored with the request, so that exactly the counted work is subtracted.
struct Work {
  std::int64_t waiting_tokens = 0;  // the tokens of its prompt; 0 once it has begun
  std::int64_t prompt_tokens = 0;   // not yet computed
  std::int64_t output_tokens = 0;   // expected, but not yet sampled
};

class LoadTracker {
 public:
  struct Rejected {
    Rejection reason;
    std::string text;  // ends with "; retry after N s"
  };

  explicit LoadTracker(const EngineConfig& config)
      : max_queue_size_(config.max_queue_size), max_queue_tokens_(config.max_queue_tokens) {}

  // Counts a request with `sequences` completions of at most max_tokens each, or returns why it is rejected. waiting:
  // the number of waiting requests. resumed: another engine has admitted the request, so it is not rejected.
  std::optional<Rejected> admit(int waiting, std::int64_t prompt_tokens, int sequences, std::int64_t max_tokens,
                                Work& work, bool resumed = false);
  // Called when a request begins.
  void begun(Work& work);
  void computed(Work& work, std::int64_t prompt_tokens);
  void sampled(Work& work);
  void ended(Work& work, std::int64_t output_tokens);

  // Called after a step.
  void step(std::int64_t prompt_tokens, std::int64_t decodes, double seconds);

  // Returns the estimated seconds until all waiting and running requests are done, within [1, 600].
  int retry_after_s() const;
  double prefill_per_s() const;  // tokens of prompts per second; 0: not yet measured
  double step_s() const;         // average seconds of the last steps; 0: not yet measured

 private:
  // The speed of the last steps, each with the weight of its tokens.
  struct Speed {
    double tokens = 0, seconds = 0;
    void add(double more_tokens, double more_seconds);
    double per_s() const { return seconds > 0 ? tokens / seconds : 0; }  // 0: not yet measured
  };

  int retry_after_locked() const;

  const int max_queue_size_;
  const std::int64_t max_queue_tokens_;
  mutable std::mutex mutex_;
  Work total_;
  // Steps with prompt tokens and steps without them are measured separately.
  Speed prefill_, decode_;
  // Moving averages; 0: not yet measured.
  double step_s_ = 0;
  double output_tokens_ = 0;  // of the completions that have ended
};

}  // namespace charonia::runtime
