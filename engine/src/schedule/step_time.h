// Policy: a bound on the time of a step that has decodes. A step makes the next token of every sequence that decodes,
// so the prefill in it delays all of them. StepTime says how much of the token budget a step may use for prefill, by
// what measured steps took. It has no clock: whoever computes the steps tells it.
//
// What it keeps, each of the last measurements of its kind:
//   decodes   seconds of steps without prefill, by the number of decodes (1, 2, 3-4, 5-8, ...)
//   rates     seconds per token of prefill, by its position (below 64, 128, 256, ...: attention takes longer with the
//             context): what a step took longer than its decodes alone, over its tokens of prefill
//
// A step with decodes gets prefill for the time between what its decodes take and the target. The target is a setting,
// or 3 times what a client waits for a token without prefill: what the decodes take, and at least the time between two
// responses of a request. All of these are medians, so one slow step moves nothing. docs/decisions.md says why 3.
//
// What is not known is found out: without a recent measurement of its decodes alone a step gets no prefill (one in 100
// steps, and more often while there are few measurements), and without any rate it gets a 16th of the token budget. All
// other steps get at least half of kMinTokens, so that prefill always goes on: kMinTokens, or fewer where these fill a
// tile of the GEMMs. Steps without decodes get the whole token budget.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace charonia::schedule {

// What a step computed.
struct StepWork {
  std::int32_t decodes = 0;           // sequences of which it computed the last token alone, or forced tokens
  std::int32_t prefill_tokens = 0;    // all its other tokens
  std::int64_t prefill_position = 0;  // the mean of the positions where their parts begin
};

class StepTime {
 public:
  static constexpr std::int32_t kMinTokens = 16;
  // With the target by measurement: the target over what decodes take alone.
  static constexpr double kSlowdown = 3;

  // target_ms: 0: no bound, -1: by measurement. response_ms: the minimum time between two responses of a request.
  StepTime(int target_ms, int response_ms, int token_budget);

  // ---- the planning of a step, in this order ----
  // The step has so many decodes.
  void begin_prefill(std::int32_t decodes);
  // Whether the step may have another part of prefill.
  bool any_left() const { return left_s_ > 0 || planned_ < least_; }
  // How many of a sequence's next tokens, at least 1 of which is asked for, may be in the step. At least 1 where
  // any_left().
  std::int32_t fit(std::int32_t first_position, std::int32_t num_tokens) const;
  // They are.
  void take(std::int32_t first_position, std::int32_t num_tokens);

  // ---- afterwards ----
  void measured(const StepWork& work, double seconds);
  // The time aimed at for a step with so many decodes, in seconds; 0: not bounded, or not known yet.
  double target_s(std::int32_t decodes) const;

 private:
  // The last measurements of one kind.
  template <std::int64_t size>
  class Window {
   public:
    void add(double value) { values_[static_cast<std::size_t>(count_++ % size)] = value; }
    void clear() { count_ = 0; }
    bool empty() const { return count_ == 0; }
    std::int64_t count() const { return count_; }  // that were added, also those that others have replaced
    double median() const;  // of what is there, at least one; the lower one of two

   private:
    std::array<double, static_cast<std::size_t>(size)> values_{};
    std::int64_t count_ = 0;
  };
  struct Decodes {
    Window<15> seconds;
    int age = 0;     // steps with prefill since the last one without
    int probes = 0;  // planned without prefill since the last measurement
  };
  struct Rate {
    Window<7> per_token;  // few, since attention takes longer from chunk to chunk
    bool beside_decodes = false;  // all of them were measured in steps with decodes
  };
  static constexpr std::size_t kClasses = 32;

  double rate(std::int32_t position) const;  // 0: none is known

  const double target_s_, response_s_;  // target_s_ < 0: by measurement
  const std::int32_t token_budget_;
  std::array<Decodes, kClasses> decodes_;
  std::array<Rate, kClasses> rates_;

  // Of the step that is planned.
  double left_s_ = std::numeric_limits<double>::infinity();
  std::int32_t rows_ = 0;     // tokens in the step
  std::int32_t planned_ = 0;  // tokens of prefill in the step
  std::int32_t least_ = 0;    // tokens of prefill that it may have whatever they cost
};

}  // namespace charonia::schedule
