// Policy: limits the time of a step that has decodes. A step makes the next token of every decoding sequence, so the
// prefill in it delays all of them. StepTime decides how much of the token budget a step may use for prefill, from the
// time of earlier steps. It has no clock: the caller passes measured times.
//
// It keeps the last measurements of:
//   decodes   seconds of steps without prefill, by the number of decodes (1, 2, 3-4, 5-8, ...)
//   rates     seconds per token of prefill, by its position (below 64, 128, 256, ...: attention takes longer with the
//             context): the step's time minus the time of its decodes alone, divided by its tokens of prefill
//
// A step with decodes gets prefill for the difference between the target and the time of its decodes. The target is a
// setting, or 3 times the interval between tokens that a client sees without prefill: the time of the decodes, or the
// minimum time between two responses of a request if that is longer. All values are medians, so one slow step changes
// nothing. docs/decisions.md explains the factor 3.
//
// Unknown values are measured. Without a recent measurement of its decodes alone, a step gets no prefill (one in 100
// steps, more often while there are few measurements). Without any rate, it gets 1/16 of the token budget. All other
// steps get at least kMinTokens, or fewer tokens (at least kMinTokens / 2) that fill a tile of the GEMMs, so that
// prefill always progresses. Steps without decodes get the whole token budget.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace charonia::schedule {

// The work of a step.
struct StepWork {
  std::int32_t decodes = 0;           // sequences with only their last token in the step, or with forced tokens
  std::int32_t prefill_tokens = 0;    // all other tokens
  std::int64_t prefill_position = 0;  // mean of the positions where their parts begin
};

class StepTime {
 public:
  static constexpr std::int32_t kMinTokens = 16;
  // If the target is measured: the ratio of the target to the time of the decodes alone.
  static constexpr double kSlowdown = 3;

  // target_ms: 0: no limit, -1: measured. response_ms: the minimum time between two responses of a request.
  StepTime(int target_ms, int response_ms, int token_budget);

  // The planning of a step calls these four, in this order. First: the step has this number of decodes.
  void begin_prefill(std::int32_t decodes);
  // Whether the step may have another part of prefill.
  bool any_left() const { return left_s_ > 0 || planned_ < least_; }
  // How many of the sequence's next num_tokens tokens may be in the step. At least 1 if any_left().
  std::int32_t fit(std::int32_t first_position, std::int32_t num_tokens) const;
  // Adds them to the step.
  void take(std::int32_t first_position, std::int32_t num_tokens);

  // Adds the measured time of a step.
  void measured(const StepWork& work, double seconds);
  // The target time of a step with this number of decodes, in seconds; 0: no limit, or not known yet.
  double target_s(std::int32_t decodes) const;

 private:
  // The last measurements of one kind.
  template <std::int64_t size>
  class Window {
   public:
    void add(double value) { values_[static_cast<std::size_t>(count_++ % size)] = value; }
    void clear() { count_ = 0; }
    bool empty() const { return count_ == 0; }
    std::int64_t count() const { return count_; }  // number of all added values, including replaced ones
    double median() const;                         // requires at least one value; the lower of two middle values

   private:
    std::array<double, static_cast<std::size_t>(size)> values_{};
    std::int64_t count_ = 0;
  };
  struct Decodes {
    Window<15> seconds;
    int age = 0;     // steps with prefill since the last step without
    int probes = 0;  // steps planned without prefill since the last measurement
  };
  struct Rate {
    Window<7> per_token;          // short, because attention takes longer with each chunk
    bool with_decodes = false;    // all values were measured in steps with decodes
  };
  static constexpr std::size_t kClasses = 32;

  double rate(std::int32_t position) const;  // 0 if unknown

  const double target_s_, response_s_;  // target_s_ < 0: measured
  const std::int32_t token_budget_;
  std::array<Decodes, kClasses> decodes_;
  std::array<Rate, kClasses> rates_;

  // The step that is being planned.
  double left_s_ = std::numeric_limits<double>::infinity();
  std::int32_t rows_ = 0;     // tokens in the step
  std::int32_t planned_ = 0;  // tokens of prefill in the step
  std::int32_t least_ = 0;    // tokens of prefill that it may have at any cost
};

}  // namespace charonia::schedule
