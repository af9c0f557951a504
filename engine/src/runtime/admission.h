// What waits and runs, counted in tokens, and how fast the engine works: who may still come in, and when those that may
// not should come back. Any thread may call.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "charonia/config.h"

namespace charonia::runtime {

// Why a request was rejected or given up. In the order of the values of the label `reason` (metrics.h).
enum class Rejection { queue_full, queue_tokens, queue_time, deadline, never_fits };

// What is still to be computed of a request. Kept with it, so that what was counted is taken back exactly.
struct Work {
  std::int64_t waiting_tokens = 0;  // of its prompt, until it begins
  std::int64_t prompt_tokens = 0;   // not computed yet
  std::int64_t output_tokens = 0;   // expected and not sampled yet
};

class Admission {
 public:
  struct Rejected {
    Rejection reason;
    std::string text;  // ends with "; retry after N s"
  };

  explicit Admission(const EngineConfig& config)
      : max_queue_size_(config.max_queue_size), max_queue_tokens_(config.max_queue_tokens) {}

  // Counts a request with so many prompt tokens and `sequences` completions of at most max_tokens each, or says why
  // not. waiting: requests that wait.
  std::optional<Rejected> admit(int waiting, std::int64_t prompt_tokens, int sequences, std::int64_t max_tokens,
                                Work& work);
  // It has begun; its prompt, with what a session puts before it, has so many tokens, of which some were found
  // computed.
  void begun(Work& work);
  void computed(Work& work, std::int64_t prompt_tokens);
  void sampled(Work& work);
  void ended(Work& work, std::int64_t output_tokens);

  // A step took so long.
  void step(std::int64_t prompt_tokens, std::int64_t decodes, double seconds);

  // Seconds until what waits and runs is done, by the speed measured: within [1, 600].
  int retry_after_s() const;

 private:
  int retry_after_locked() const;

  const int max_queue_size_;
  const std::int64_t max_queue_tokens_;
  mutable std::mutex mutex_;
  Work total_;
  // Moving averages; 0: nothing measured yet. Steps with prompt tokens and steps without are told apart.
  double prefill_per_s_ = 0, decode_per_s_ = 0;
  double output_tokens_ = 0;  // of a sequence that has ended
};

}  // namespace charonia::runtime
